//! Decisions about keys with holds, and changes of holds, for every algorithm: what is held makes
//! the quota smaller that the model decides by. The units themselves are in `hold.rs`, decisions
//! about other keys in `engine.rs`.

use super::{
    hold::{Held, HoldAction, HoldChange, HoldReply, Lifetime},
    request::{Action, Admission, EngineReply, EngineRequest, Release},
    table::{Params, State},
};

impl Params {
    /// Decides about a key with holds, or holds the first units of a key.
    pub(super) fn step_held(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, cost, now, .. } = *request;
        let Action::Hold { lifetime, epoch } = action else {
            return match state.held {
                Held::None => self.step_bare(&mut state.spent, request),
                _ => self.step_beside(state, request),
            };
        };
        // A hold reserves no instant: it would count from now on.
        let mut reply = self.step_beside(state, &EngineRequest { max_wait: 0, ..*request });
        if reply.admitted {
            reply.hold = Some(state.held.hold(now, cost, lifetime, epoch.unwrap_or(now)));
            let held = state.held.total();
            let seen = self.beside(held).step_bare(&mut state.spent, &EngineRequest::observe(now));
            self.describe(&mut reply, &seen, state, held, now);
        }
        reply
    }

    /// Decides beside what is held. Holds nothing.
    fn step_beside(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, now, .. } = *request;
        // A request that changes nothing leaves slots that have ended as they are (law 1).
        let found = state.held.slots().is_some_and(|slots| slots.is_due(now));
        let found = found.then(|| state.clone());
        self.expire_holds(state, now);
        let held = state.held.total();
        let beside = self.beside(held);
        let mut inside = *request;
        if action.can_be_denied() && !beside.fits(request.cost) {
            // No time helps: holds have to end.
            let wait = request.admission.and_then(|all| all.wait);
            inside.admission = Some(Admission { admitted: false, wait });
        }
        let mut reply = beside.step_bare(&mut state.spent, &inside);
        let seen = reply;
        self.describe(&mut reply, &seen, state, held, now);
        state.held.forget_if_empty();
        if let Some(found) = found
            && !(reply.admitted && action.writes())
        {
            *state = found;
            if action.inserts() {
                state.follow_clock(now);
            }
        }
        reply
    }

    /// Describes the key after the decision: `seen` by the quota beside what is held.
    fn describe(
        &self,
        reply: &mut EngineReply,
        seen: &EngineReply,
        state: &State,
        held: i64,
        now: i64,
    ) {
        reply.held = held;
        reply.remaining = seen.remaining.max(0);
        // More than an empty key has left beside the holds is left only when they end.
        let grows = reply.remaining < self.beside(held).full();
        reply.replenish = if grows { seen.replenish } else { 0 };
        reply.reset = match &state.held {
            Held::Expiring(slots) if slots.have_ends() => self.reset_after_expiry(state, now),
            _ => seen.reset + self.drain(held),
        };
    }

    /// The time until the state is the initial one, if all holds expire.
    fn reset_after_expiry(&self, state: &State, now: i64) -> i64 {
        let State { mut held, mut spent, .. } = state.clone();
        let mut at = now;
        while let Some((units, ended)) = held.slots_mut().and_then(|slots| slots.expire_next(now)) {
            at = ended;
            self.step_bare(&mut spent, &spend(units, at));
        }
        at - now + self.step_bare(&mut spent, &EngineRequest::observe(at)).reset
    }

    /// Returns whether an empty key admits this cost. With an overdraft, what is held may exceed
    /// the quota, and then nothing is admitted.
    fn fits(&self, cost: i64) -> bool {
        cost <= self.max_cost() && self.full() >= 1
    }

    /// Follows a clock that may have stepped back, and spends the units of all slots that have
    /// ended, at their ends.
    fn expire_holds(&self, state: &mut State, now: i64) {
        let Held::Expiring(slots) = &mut state.held else { return };
        if slots.is_stale(now) {
            slots.touch(now);
        }
        while let Some((units, ended)) = slots.expire(now) {
            self.step_bare(&mut state.spent, &spend(units, ended));
        }
    }

    /// Ends and renews holds, all of one key. Calls `answer` with each reply.
    pub(crate) fn change_holds(
        &self,
        state: &mut State,
        now: i64,
        epoch: i64,
        changes: &[HoldChange],
        mut answer: impl FnMut(HoldReply),
    ) {
        self.expire_holds(state, now);
        let time = state.held.time(now);
        let mut used = 0;
        for change in changes {
            let left = change.receipt.ends - time;
            let (more, reply) = change_hold(&mut state.held, now, epoch, left, change);
            used += more;
            answer(reply);
        }
        if used > 0 {
            self.step_bare(&mut state.spent, &spend(used, now));
        }
        state.held.forget_if_empty();
    }

    /// Returns units to the state, as the algorithm counted them.
    pub(crate) fn return_units(&self, state: &mut State, now: i64, releases: &[Release]) {
        self.expire_holds(state, now);
        state.held.forget_if_empty();
        self.return_bare(&mut state.spent, now, releases);
    }
}

/// Changes one hold. Returns the units to spend, too.
fn change_hold(
    held: &mut Held,
    now: i64,
    epoch: i64,
    left: i64,
    &HoldChange { receipt, units, action }: &HoldChange,
) -> (i64, HoldReply) {
    let has_expired = left <= 0;
    let is_known = held.knows(receipt);
    if is_known && !has_expired {
        held.take(now, receipt, units);
    }
    match action {
        // Its units were spent when it expired.
        HoldAction::End { used } if has_expired => ((used - units).max(0), HoldReply::Expired),
        HoldAction::End { used } if is_known => (used, HoldReply::Ended),
        HoldAction::End { used } => (used, HoldReply::Lost),
        HoldAction::Renew(_) if has_expired => (0, HoldReply::Expired),
        HoldAction::Renew(lifetime) => {
            let receipt = match is_known {
                // Not for less than is left of it: the holder may not get this reply.
                true => {
                    let time = lifetime.time.max(left);
                    held.hold_more(now, units, Lifetime { time, ..lifetime })
                }
                false => held.hold(now, units, lifetime, epoch),
            };
            (0, HoldReply::Renewed(receipt))
        }
    }
}

fn spend(units: i64, now: i64) -> EngineRequest {
    EngineRequest { action: Action::Spend, cost: units, ..EngineRequest::observe(now) }
}
