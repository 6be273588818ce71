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
/// stepped back. Returns, too, whether these parameters count the state from now on. Returns `None`
/// if the state `is_in_core`, which has no place for a reservation, and the request needs one. If
/// it `HOLDS`, the units that are `held` make the quota smaller. They are two numbers: those that
/// are held before the request, also if it is denied, and those after it, if it is admitted.
#[inline(always)]
fn decide<M: Model, const HOLDS: bool>(
    Reserved { state, waiting }: &mut Reserved<M>,
    request: &EngineRequest,
    params: &M::Params,
    held: [i64; 2],
    is_in_core: bool,
) -> Option<(EngineReply, bool)> {
    let EngineRequest { action, cost, max_wait, now, blocked, .. } = *request;
    let mut saved = state.save();
    // Whether another clock or quota has counted the state, and that which is saved; and when that
    // state is over.
    let (mut stale, mut is_other, mut over) = (false, false, i64::MAX);
    if !is_in_core {
        stale = state.step_back(now);
        is_other = stale && !action.inserts();
        if stale && action.inserts() {
            // It stays so, even if the request is denied.
            saved = state.save();
            waiting.0 = None;
        }
        if let Some(time) = state.adopt(now, params, &mut saved) {
            (stale, is_other) = (true, true);
            // The memory of denials infers from the times of a shaper how full it was.
            over = if M::SHAPES && action.inserts() { over } else { time };
        }
    }

    // The units that must be left.
    let needed = action.can_be_denied().then_some(cost);
    let before = if HOLDS { Some(params.beside(held[0])) } else { None };
    let before = before.as_ref().unwrap_or(params);
    let earliest @ Earliest { full, .. } = state.earliest(now, needed, before);
    let wait = earliest.wait.max(blocked);
    // A request that proceeds after a block needs room then.
    let full = if full > blocked { full } else { 0 };
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
        // It waits, or proceeds before others, which wait for another limit.
        if M::RESERVES && (instant > now || waiting.0.is_some()) {
            if is_in_core {
                return None;
            }
            // Units that are spent whatever is left are used now: the requests may leave.
            let at = if action.can_be_denied() { instant } else { now };
            waiting.insert(now, Reservation { instant: at, cost }, state, params);
        }
        state.commit(instant, cost, params);
    }

    let mut reset = state.reset_after(now);
    let held = if HOLDS { held[usize::from(admitted)] } else { 0 };
    let after = if HOLDS { Some(params.beside(held)) } else { None };
    let after = after.as_ref().unwrap_or(params);
    let Report { remaining, mut replenish } = if reset > 0 {
        // The units that a denied request waits for.
        let known = if admitted { (0, 0) } else { (cost, earliest.wait) };
        state.report(now, known, after)
    } else {
        Report { remaining: after.full(), replenish: 0 }
    };
    if HOLDS && held > 0 {
        // As if all holds ended now: when they end is not known, or is up to their renewals. Their
        // units are counted by these parameters then, so `over` does not bound it.
        reset = state.reset_beside(now, reset, held, is_other && !counts, params);
    }
    if !counts {
        reset = if held > 0 { reset } else { reset.min(over) };
        replenish = replenish.min(over);
        state.restore(saved);
    }
    let reply = EngineReply::uncounted(instant);
    Some((EngineReply { admitted, wait, remaining, replenish, reset, held, ..reply }, counts))
}

/// Decides beside units that are held, which make the quota smaller, or holds the first ones.
#[inline(always)]
fn decide_beside<M: Model>(
    reserved: &mut Reserved<M>,
    held: i64,
    request: &EngineRequest,
    params: &M::Params,
) -> (EngineReply, bool) {
    let EngineRequest { action, cost, .. } = *request;
    let mut inside = *request;
    let (beside, mut more) = (params.beside(held), 0);
    if action.holds() {
        // A hold reserves no instant: it would count from now on.
        (inside.max_wait, more) = (0, cost);
    }
    // With an overdraft, what is held may exceed the quota, and then nothing is admitted.
    if action.can_be_denied() && (cost > beside.max_cost() || beside.full() < 1) {
        // No time helps: holds have to end.
        let wait = request.admission.and_then(|all| all.wait);
        inside.admission = Some(Admission { admitted: false, wait });
    }
    let decided = decide::<_, true>(reserved, &inside, params, [held, held + more], false);
    let (mut reply, counts) = decided.expect("not in a core");
    let full = params.beside(reply.held).full();
    reply.remaining = reply.remaining.max(0);
    // More than an empty key has left beside the holds is left only when they end.
    if reply.remaining >= full {
        reply.replenish = 0;
    }
    (reply, counts)
}

/// Decides about a state with reservations, beside units that are `held` if it `HOLDS`. Returns
/// whether the state is the initial one from now on, too, if it is counted by these parameters.
#[inline(always)]
pub(super) fn step<M: Model, const HOLDS: bool>(
    reserved: &mut Reserved<M>,
    held: i64,
    request: &EngineRequest,
    params: &M::Params,
) -> (EngineReply, Option<bool>) {
    if HOLDS {
        let (reply, counts) = decide_beside(reserved, held, request, params);
        // `reset` is the one beside the holds.
        let is_over = || reserved.state.reset_after(request.now) == 0;
        return (reply, counts.then(is_over));
    }
    let decided = decide::<_, false>(reserved, request, params, [0; 2], false);
    let (reply, counts) = decided.expect("not in a core");
    (reply, counts.then_some(reply.reset == 0))
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
    let (reply, counts) = decide::<_, false>(&mut opened, request, &params, [0; 2], true)?;
    if counts {
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
    let (mut reply, _) = decide_beside(&mut state, core.amount, request, params);
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
    waiting.0.take_if(|reservations| reservations.are_over(now));
    match &mut waiting.0 {
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
