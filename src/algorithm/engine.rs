//! The engine: decides about one limit with the functions of a [`Model`]. Does not know what a
//! state contains. Its Lua twin is `scripts/engine.lua`, which `scripts/finish.lua` ends.

use super::{
    arithmetic::{max, min},
    model::{Earliest, Model, Report},
    request::{Admission, EngineReply, EngineRequest, Release},
    reservations::{Reservation, Reserved},
};

/// Decides, and stores the state after the decision.
#[inline]
pub(super) fn step<M: Model>(
    stored: &mut Option<Reserved<M>>,
    request: &EngineRequest,
    params: &M::Params,
) -> EngineReply {
    let EngineRequest { action, cost, max_wait, now, .. } = *request;
    let found = stored.is_some();
    let reserved = stored.get_or_insert_with(|| Reserved::new(M::initial(now, params)));
    let state = &mut reserved.state;
    let mut saved = state.save();
    // Whether another clock or quota has counted the state, and when that state is over.
    let (mut stale, mut over) = (false, f64::INFINITY);
    if found {
        stale = state.step_back(now);
        if let Some(time) = state.adopt(now, params, &mut saved) {
            stale = true;
            // The memory of denials infers from the times of a shaper how full it was.
            over = if M::shapes(params) { over } else { time };
        }
    }

    let earliest = state.earliest(now, request.needed(), params);
    let Earliest { wait, full } = earliest.after(request.blocked);
    let excess = min(max(wait - max_wait, full), over);
    let Admission { admitted, wait } = request.admission(wait, excess);
    let instant = now + wait;
    let admits = action.commits() && admitted;
    let mut before = None;
    if admits {
        before = (wait > 0.0 && M::RESERVES).then(|| state.clone());
        state.commit(instant, cost, params);
    }

    let mut reset = state.reset_after(now);
    let Report { remaining, mut replenish } = state.report(now, reset, params);
    if admits || admitted && action.inserts() && stale {
        let reservation = admits.then_some(Reservation { instant, cost });
        reserved.waiting.update(stale, now, reservation, before, params);
        if reset == 0.0 {
            *stored = None;
        }
    } else if found {
        (reset, replenish) = (min(reset, over), min(replenish, over));
        state.restore(saved);
        if action.inserts() {
            reserved.follow_clock(now);
        }
    } else {
        *stored = None;
    }
    EngineReply { admitted, wait, remaining, replenish, reset, ..EngineReply::uncounted(instant) }
}

/// Returns units to the state. Units of an instant to come are only returned if their reservation
/// is found: the state may have been lost, and other requests may have spent since. Reservations
/// that stay keep their instants.
pub(super) fn return_units<M: Model>(
    stored: &mut Option<Reserved<M>>,
    now: f64,
    releases: &[Release],
    params: &M::Params,
) {
    let Some(reserved) = stored else { return };
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
    if state.reset_after(now) == 0.0 {
        *stored = None;
    }
}
