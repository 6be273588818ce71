//! The engine: decides about one limit with the functions of a [`Model`]. Does not know what a
//! state contains. Its Lua twin is `scripts/engine.lua`, which `scripts/finish.lua` ends.

use super::{
    core::Core,
    hold::Lifetime,
    model::{Earliest, Model, Parameters, Report},
    request::{Action, Admission, EngineReply, EngineRequest, Release},
    reservations::{Reservation, Reserved},
};

/// Decides, and changes the state where it lies: if the request counts, or to follow a clock that
/// stepped back. The units that are `held` make the quota smaller: two numbers, before the request,
/// and after it if it is admitted. Returns, if these parameters count the state from now on,
/// whether it is the initial one, too. Returns `None` if the state `is_in_core`, which has no place
/// for a reservation, and the request needs one.
#[inline(always)]
pub(super) fn decide<M: Model>(
    reserved: &mut Reserved<M>,
    held: [i64; 2],
    request: &EngineRequest,
    params: &M::Params,
    is_in_core: bool,
) -> Option<(EngineReply, Option<bool>)> {
    let EngineRequest { action, cost, now, blocked, mut max_wait, mut admission } = *request;
    let state = &mut reserved.state;
    let mut saved = state.save();
    // Whether another clock or quota has counted the state, and when that state is over.
    let (mut stale, mut over) = (false, i64::MAX);
    if !is_in_core {
        stale = state.step_back(now);
        if stale && action.inserts() {
            // It stays so, even if the request is denied.
            saved = state.save();
            reserved.waiting = None;
        }
        if let Some(time) = state.adopt(now, params, &mut saved) {
            stale = true;
            // The memory of denials infers from the times of a shaper how full it was.
            over = if M::SHAPES && action.inserts() { over } else { time };
        }
    }

    if held[0] < held[1] {
        max_wait = 0; // a hold reserves no instant: it would count from now on
    }
    let before = params.beside(held[0]);
    // With an overdraft, what is held may exceed the quota, and then nothing is admitted.
    let is_beside = held[1] > 0 && action.can_be_denied();
    if is_beside && (cost > before.max_cost() || before.full() < 1) {
        // No time helps: holds have to end.
        let wait = admission.and_then(|all| all.wait);
        admission = Some(Admission { admitted: false, wait });
    }
    // The units that must be left.
    let needed = action.can_be_denied().then_some(cost);
    let earliest @ Earliest { full, .. } = state.earliest(now, needed, &before);
    let wait = earliest.wait.max(blocked);
    // A request that proceeds after a block needs room then.
    let full = if full > blocked { full } else { 0 };
    let excess = (wait - max_wait).max(full).min(over);
    let Admission { admitted, wait } = admission.unwrap_or_else(|| {
        let admitted = excess <= 0 || !action.can_be_denied();
        Admission { admitted, wait: Some(if admitted { wait } else { excess }) }
    });
    let instant = now + wait.unwrap_or(0);
    let admits = action.commits() && admitted;
    let counts = admits || admitted && action.inserts() && stale;
    if counts && stale {
        reserved.waiting = None;
    }
    if admits {
        // It waits, or proceeds before others, which wait for another limit.
        if M::RESERVES && (instant > now || reserved.waiting.is_some()) {
            if is_in_core {
                return None;
            }
            // Units that are spent whatever is left are used now: the requests may leave.
            let at = if action.can_be_denied() { instant } else { now };
            reserved.reserve(now, Reservation { instant: at, cost }, params);
        }
        reserved.state.commit(instant, cost, params);
    }

    let state = &mut reserved.state;
    let mut reset = state.reset_after(now);
    let is_over = counts.then_some(reset == 0);
    let held = if admitted { held[1] } else { held[0] };
    let after = params.beside(held);
    let Report { mut remaining, mut replenish } = if reset > 0 {
        // The units that a denied request waits for.
        let known = if admitted { (0, 0) } else { (cost, earliest.wait) };
        state.report(now, known, &after)
    } else {
        Report { remaining: after.full(), replenish: 0 }
    };
    if held > 0 {
        // As if all holds ended now: when they end is not known, or is up to their renewals. Their
        // units are counted by these parameters then, so `over` does not bound it.
        reset = state.reset_beside(now, reset, held, params);
        // More than an empty key has left beside the holds is left only when they end.
        remaining = remaining.max(0);
        replenish = if remaining < after.full() { replenish } else { 0 };
    }
    if !counts {
        reset = if held > 0 { reset } else { reset.min(over) };
        replenish = replenish.min(over);
        state.restore(saved);
    }
    let reply = EngineReply::uncounted(instant);
    Some((EngineReply { admitted, wait, remaining, replenish, reset, held, ..reply }, is_over))
}

/// Decides about a state that lies in a core. `None` if no core represents the state after the
/// decision, or the clock stepped back: nothing is changed then.
#[inline(always)]
pub(super) fn step_core<M: Model>(
    core: &mut Core,
    request: &EngineRequest,
    params: &M::Params,
) -> Option<EngineReply> {
    if !M::SPENDS {
        return hold_in_core::<M>(core, request, params);
    }
    if request.now < core.at || !request.action.is_plain() {
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
    let (reply, is_over) = decide(&mut opened, [0; 2], request, &params, true)?;
    if is_over.is_some() {
        *core = opened.state.close(request.now, &params)?;
    }
    Some(reply)
}

/// Decides about a key whose units are only held, which lie in the core.
#[inline(always)]
fn hold_in_core<M: Model>(
    core: &mut Core,
    request: &EngineRequest,
    params: &M::Params,
) -> Option<EngineReply> {
    let epoch = match request.action {
        Action::Hold { lifetime: Lifetime::ENDLESS, epoch } => epoch,
        Action::Peek => None,
        _ => return None,
    };
    let mut state = Reserved::new(M::initial(request.now, params));
    let held = request.held_around(core.amount);
    let (mut reply, _) = decide(&mut state, held, request, params, false)?;
    if reply.admitted && request.action.holds() {
        reply.hold = Some(core.hold(request.cost, epoch.unwrap_or(request.now)));
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
    waiting.take_if(|reservations| reservations.are_over(now));
    match waiting {
        Some(reservations) => {
            reservations.fold(now, params);
            reservations.base.advance(now);
            for release in releases {
                reservations.lower(now, release, params);
            }
            *state = reservations.base.clone();
            for &Reservation { instant, cost } in &reservations.entries {
                state.commit(instant, cost, params);
            }
            waiting.take_if(|reservations| reservations.entries.is_empty());
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
