//! The engine: decides about one limit with the functions of a [`Model`]. Does not know what a
//! state contains. Its Lua twin is `scripts/engine.lua`, which `scripts/finish.lua` ends.

use super::{
    core::Core,
    hold::Lifetime,
    model::{Earliest, Model, Report},
    request::{Action, Admission, EngineReply, EngineRequest, Release},
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
/// stepped back. `None` for a reservation of a state from a core, which has no room for it. The
/// reply to a request that is admitted is about the parameters `after` it.
#[inline(always)]
fn decide<M: Model>(
    state: &mut M,
    request: &EngineRequest,
    [params, after]: [&M::Params; 2],
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
    let after = if admitted { after } else { params };
    let Report { remaining, mut replenish } = state.report(now, reset, after);
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

/// Decides beside units that are held, which make the quota smaller, or holds the first ones.
#[inline(always)]
fn decide_beside<M: Model>(
    state: &mut M,
    held: i64,
    request: &EngineRequest,
    params: &M::Params,
) -> Decided<M> {
    let EngineRequest { action, cost, .. } = *request;
    let mut inside = *request;
    let (beside, mut after, mut more) = (M::beside(params, held), M::beside(params, held), 0);
    if action.holds() {
        // A hold reserves no instant: it would count from now on.
        (inside.max_wait, more, after) = (0, cost, M::beside(params, held + cost));
    }
    // With an overdraft, what is held may exceed the quota, and then nothing is admitted.
    if action.can_be_denied() && (cost > M::max_cost(&beside) || M::full(&beside) < 1) {
        // No time helps: holds have to end.
        let wait = request.admission.and_then(|all| all.wait);
        inside.admission = Some(Admission { admitted: false, wait });
    }
    let mut decided = decide(state, &inside, [&beside, &after], false).expect("not in a core");
    let reply = &mut decided.reply;
    let full = if reply.admitted { M::full(&after) } else { M::full(&beside) };
    reply.held = if reply.admitted { held + more } else { held };
    reply.remaining = reply.remaining.max(0);
    // More than an empty key has left beside the holds is left only when they end.
    if reply.remaining >= full {
        reply.replenish = 0;
    }
    decided
}

/// Decides about a state with reservations, beside units that are held. Returns whether the state
/// is the initial one from now on, too, if it is counted by these parameters.
#[inline(always)]
pub(super) fn step<M: Model>(
    state: &mut M,
    waiting: &mut Waiting<M>,
    held: i64,
    request: &EngineRequest,
    params: &M::Params,
) -> (EngineReply, Option<bool>) {
    if held > 0 || request.action.holds() {
        return step_beside(state, waiting, held, request, params);
    }
    let decided = decide(state, request, [params; 2], false).expect("not in a core");
    finish(waiting, decided, request.now, params)
}

#[inline(never)]
fn step_beside<M: Model>(
    state: &mut M,
    waiting: &mut Waiting<M>,
    held: i64,
    request: &EngineRequest,
    params: &M::Params,
) -> (EngineReply, Option<bool>) {
    let decided = decide_beside(state, held, request, params);
    let (mut reply, is_over) = finish(waiting, decided, request.now, params);
    reply.reset += M::drain(reply.held, params);
    (reply, is_over)
}

#[inline(always)]
fn finish<M: Model>(
    waiting: &mut Waiting<M>,
    decided: Decided<M>,
    now: i64,
    params: &M::Params,
) -> (EngineReply, Option<bool>) {
    let Decided { reply, counts, forgets, reservation, before } = decided;
    if counts {
        waiting.update(forgets, now, reservation, before, params);
    } else if forgets {
        waiting.0 = None;
    }
    (reply, counts.then_some(reply.reset == 0))
}

/// Decides about a state that lies in a core. `None` if no core represents the state after the
/// decision: nothing is changed then.
#[inline(always)]
pub(super) fn step_core<M: Model>(
    core: &mut Core,
    request: &EngineRequest,
    params: &M::Params,
) -> Option<EngineReply> {
    if !M::SPENDS {
        return hold_in_core::<M>(core, request, params);
    }
    if !request.action.is_plain() {
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
    let mut state = M::open(*core, &params)?;
    let Decided { reply, counts, forgets, .. } = decide(&mut state, request, [&params; 2], true)?;
    if counts || forgets {
        *core = state.close(request.now, &params)?;
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
    let mut state = M::initial(request.now, params);
    let mut reply = decide_beside(&mut state, core.amount, request, params).reply;
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
