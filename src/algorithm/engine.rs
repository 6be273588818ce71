//! The engine: decides about one limit with the functions of a [`Model`]. Does not know what a
//! state contains. Its Lua twin is `scripts/engine.lua`, which `scripts/finish.lua` ends.

use super::{
    core::Core,
    model::{Earliest, Model, Report},
    request::{Admission, EngineReply, EngineRequest, Release},
    reservations::{Reservation, Reserved, Waiting},
};

/// A decision about a state.
struct Decided<M> {
    reply: EngineReply,
    /// Whether the state is counted by these parameters from now on, too.
    counts: bool,
    /// Whether reservations are forgotten: by another clock or quota than the state.
    forgets: bool,
    reservation: Option<Reservation>,
    /// The state without a reservation that has to be kept.
    before: Option<M>,
}

/// Decides, and changes the state where it lies: if the request counts, or to follow a clock that
/// stepped back. `None` for a reservation of a state from a core, which has no room for it.
#[inline(always)]
fn decide<M: Model>(
    state: &mut M,
    request: &EngineRequest,
    params: &M::Params,
    is_in_core: bool,
) -> Option<Decided<M>> {
    let EngineRequest { action, cost, max_wait, now, .. } = *request;
    let mut saved = state.save();
    // Whether another clock or quota has counted the state, and when that state is over.
    let (mut stale, mut over) = (state.step_back(now), i64::MAX);
    let is_foreign = !is_in_core && state.is_foreign(params);
    if let Some(time) = state.adopt(now, params, is_foreign, &mut saved) {
        stale = true;
        // The memory of denials infers from the times of a shaper how full it was.
        over = if M::shapes(params) { over } else { time };
    }

    let earliest = state.earliest(now, request.needed(), params);
    let Earliest { wait, full } = earliest.after(request.blocked);
    let excess = (wait - max_wait).max(full).min(over);
    let Admission { admitted, wait } = request.admission(wait, excess);
    let delay = wait.unwrap_or(0);
    let admits = action.commits() && admitted;
    let (mut instant, mut before) = (now, None);
    if delay > 0 {
        instant += delay;
        if admits && M::RESERVES {
            if is_in_core {
                return None;
            }
            before = Some(state.clone());
        }
    }
    if admits {
        state.commit(instant, cost, params);
    }

    let mut reset = state.reset_after(now);
    let Report { remaining, mut replenish } = state.report(now, reset, params);
    let counts = admits || admitted && action.inserts() && stale;
    if !counts {
        (reset, replenish) = (reset.min(over), replenish.min(over));
        state.restore(saved);
        stale = action.inserts() && state.step_back(now);
    }
    let reply = EngineReply::uncounted(instant);
    let reply = EngineReply { admitted, wait, remaining, replenish, reset, ..reply };
    let reservation = admits.then_some(Reservation { instant, cost });
    Some(Decided { reply, counts, forgets: stale, reservation, before })
}

/// Decides about a state with reservations. Returns whether the state is counted by these
/// parameters from now on, too.
#[inline(always)]
pub(super) fn step<M: Model>(
    state: &mut M,
    waiting: &mut Waiting<M>,
    request: &EngineRequest,
    params: &M::Params,
) -> (EngineReply, bool) {
    let decided = decide(state, request, params, false).expect("not in a core");
    let Decided { reply, counts, forgets, reservation, before } = decided;
    if counts {
        waiting.update(forgets, request.now, reservation, before, params);
    } else if forgets {
        waiting.0 = None;
    }
    (reply, counts)
}

/// Decides about a state that lies in a core. `None` if no core represents the state after the
/// decision: nothing is changed then.
#[inline(always)]
pub(super) fn step_core<M: Model>(
    core: &mut Core,
    request: &EngineRequest,
    params: &M::Params,
) -> Option<EngineReply> {
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
    let mut state = M::open(*core, &params)?;
    let Decided { reply, counts, forgets, .. } = decide(&mut state, request, &params, true)?;
    if counts || forgets {
        *core = state.close(request.now, &params)?;
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
