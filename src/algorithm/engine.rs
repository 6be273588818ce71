//! The engine: decides about one limit with the functions of a [`Model`]. Does not know what a
//! state contains. Its Lua twin is `scripts/engine.lua`, which `scripts/finish.lua` ends.

use super::{
    core::Core,
    model::{Earliest, Model, Report},
    request::{Admission, EngineReply, EngineRequest, Release},
    reservations::{Reservation, Reserved},
};

/// Decides, and changes the state where it lies: if the request counts, or to follow a clock that
/// stepped back. Returns whether the state is counted by these parameters from now on, too. `None`
/// if the state is from a core, which it is at this instant, and the request waits.
#[inline(always)]
pub(super) fn decide<M: Model>(
    Reserved { state, waiting }: &mut Reserved<M>,
    request: &EngineRequest,
    params: &M::Params,
    is_in_core: bool,
) -> Option<(EngineReply, bool)> {
    let EngineRequest { action, cost, max_wait, now, .. } = *request;
    let mut saved = state.save();
    // Whether another clock or quota has counted the state, and when that state is over.
    let (mut stale, mut over) = (false, i64::MAX);
    if !is_in_core {
        stale = state.step_back(now);
        if stale && action.inserts() {
            // It stays so, even if the request is denied.
            saved = state.save();
            waiting.0 = None;
        }
        if let Some(time) = state.adopt(now, params, &mut saved) {
            stale = true;
            // The memory of denials infers from the times of a shaper how full it was.
            over = if M::SHAPES { over } else { time };
        }
    }

    // The units that must be left.
    let needed = action.can_be_denied().then_some(cost);
    let earliest = state.earliest(now, needed, params);
    let Earliest { wait, full } = earliest.after(request.blocked);
    let excess = (wait - max_wait).max(full).min(over);
    let Admission { admitted, wait } = request.admission.unwrap_or_else(|| {
        let admitted = excess <= 0 || !action.can_be_denied();
        Admission { admitted, wait: Some(if admitted { wait } else { excess }) }
    });
    let instant = now + wait.unwrap_or(0);
    let admits = action.commits() && admitted;
    let counts = admits || admitted && action.inserts() && stale;
    if counts && stale {
        waiting.0 = None;
    }
    if admits {
        if M::RESERVES {
            if is_in_core && instant > now {
                return None;
            }
            waiting.update(now, Reservation { instant, cost }, state, params);
        }
        state.commit(instant, cost, params);
    }

    let mut reset = state.reset_after(now);
    let Report { remaining, mut replenish } = state.report(now, reset, params);
    if !counts {
        (reset, replenish) = (reset.min(over), replenish.min(over));
        state.restore(saved);
    }
    let reply = EngineReply::uncounted(instant);
    Some((EngineReply { admitted, wait, remaining, replenish, reset, ..reply }, counts))
}

/// Decides about a state that lies in a core. `None` if no core represents the state after the
/// decision, or the clock stepped back: nothing is changed then.
#[inline(always)]
pub(super) fn step_core<M: Model>(
    core: &mut Core,
    request: &EngineRequest,
    params: &M::Params,
) -> Option<EngineReply> {
    if request.now < core.at {
        return None;
    }
    match M::simplest(params) {
        Some(params) => step_opened::<M>(core, request, params),
        None => step_opened::<M>(core, request, *params),
    }
}

/// Copies the parameters: so the compiler knows that the state and they have the same rate.
#[inline(always)]
fn step_opened<M: Model>(
    core: &mut Core,
    request: &EngineRequest,
    params: M::Params,
) -> Option<EngineReply> {
    let mut opened = Reserved::new(M::open(*core, request.now, &params)?);
    let (reply, counts) = decide(&mut opened, request, &params, true)?;
    if counts {
        *core = opened.state.close(request.now, &params)?;
    }
    Some(reply)
}

/// Returns units to the state. Units of an instant to come are only returned if their reservation
/// is found: the state may have been lost, and other requests may have spent since. Reservations
/// that stay keep their instants.
pub(super) fn return_units<M: Model>(
    reserved: &mut Reserved<M>,
    now: i64,
    releases: &[Release],
    params: &M::Params,
) {
    reserved.follow_clock(now);
    let Reserved { state, waiting } = reserved;
    waiting.0.take_if(|reservations| reservations.are_over(now));
    match &mut waiting.0 {
        Some(reservations) => {
            reservations.fold(now, usize::MAX, params);
            reservations.base.advance(now);
            for release in releases {
                reservations.lower(now, release, params);
            }
            *state = reservations.base.clone();
            for &Reservation { instant, cost } in &reservations.entries {
                state.commit(instant, cost, params);
            }
            waiting.0.take_if(|reservations| reservations.entries.is_empty());
        }
        None => {
            state.advance(now);
            for release in releases {
                if !M::RESERVES || release.instant.is_none_or(|instant| instant <= now) {
                    state.refund(now, release, params);
                }
            }
        }
    }
}
