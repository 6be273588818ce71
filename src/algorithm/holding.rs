//! Decisions about keys with holds, and changes of holds, for every algorithm: what is held makes
//! the quota smaller that the model decides by. The units themselves are in `hold.rs`, decisions
//! about other keys in `engine.rs`.

use std::mem::take;

use super::{
    arithmetic::max,
    hold::{Held, HoldAction, HoldChange, HoldReply, Slots},
    request::{Action, Admission, EngineReply, EngineRequest},
    table::{Kind, Params, State},
};

impl Params {
    /// Decides about a key with holds, or holds the first units of a key.
    #[cold]
    pub(super) fn step_held(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, cost, now, .. } = *request;
        let found = state.clone();
        let mut held = self.open(state, now);
        let before = held.state.clone();
        let mut reply = self.step_beside(&mut held, request);
        let holds = matches!(action, Action::Hold { .. }) && reply.admitted;
        if let (true, Action::Hold { lifetime, epoch }) = (holds, action) {
            let epoch = epoch.map_or(now, |epoch| epoch as f64);
            reply.hold = Some(held.slots.hold(now, cost, lifetime, epoch));
        }
        self.describe(&mut reply, &held, now);
        let changed = action == Action::Refund
            || holds
            || action.commits() && (reply.admitted || !held.state.is_same(&before));
        *state = if changed { self.close(held) } else { found };
        reply
    }

    /// Decides beside what is held. Holds nothing.
    fn step_beside(&self, held: &mut Held<State, Kind>, request: &EngineRequest) -> EngineReply {
        let beside = self.beside(held.slots.total());
        if request.action.can_be_denied() && !beside.fits(request.cost) {
            // No time helps: holds have to end. The state is looked at all the same, because a
            // check converts one that another quota has counted.
            let wait = request.admission.map_or(f64::INFINITY, |all| all.wait);
            let admission = Some(Admission { admitted: false, wait });
            return beside.step_bare(&mut held.state, &EngineRequest { admission, ..*request });
        }
        let action = match request.action {
            Action::Hold { .. } => Action::Peek, // which spends nothing
            other => other,
        };
        beside.step_bare(&mut held.state, &EngineRequest { action, ..*request })
    }

    /// Describes the key beside what is held after the decision.
    fn describe(&self, reply: &mut EngineReply, held: &Held<State, Kind>, now: f64) {
        let total = held.slots.total();
        reply.held = total;
        let beside = self.beside(total);
        let mut state = held.state.clone();
        let seen = beside.step_bare(&mut state, &EngineRequest::observe(now));
        reply.remaining = max(seen.remaining, 0.0);
        // More than an empty key has left beside the holds is left only when they end.
        let grows = reply.remaining < beside.most();
        reply.replenish = if grows { seen.replenish } else { 0.0 };
        reply.reset = seen.reset;
        if total > 0.0 {
            let last = held.slots.last_end(now) - now;
            reply.reset = max(seen.reset, last) + self.drain(total, now);
        }
    }

    /// Returns whether an empty key admits this cost. With an overdraft, what is held may exceed
    /// the quota, and then nothing is admitted.
    fn fits(&self, cost: f64) -> bool {
        cost <= self.max_cost() && self.most() >= 1.0
    }

    /// The units that an empty key has left.
    fn most(&self) -> f64 {
        self.step_bare(&mut State::Initial, &EngineRequest::observe(0.0)).remaining
    }

    /// The longest time until these units, once they are spent, do not count any more.
    fn drain(&self, units: f64, now: f64) -> f64 {
        self.step_bare(&mut State::Initial, &spend(units, now)).reset
    }

    /// Takes the state for a decision, after all slots that have ended: their units are spent at
    /// their ends.
    fn open(&self, state: &mut State, now: f64) -> Held<State, Kind> {
        let mut held = match take(state) {
            State::Held(held) if held.algorithm == self.kind() => *held,
            State::Held(_) => self.held(State::Initial), // for another algorithm
            state => self.held(state),
        };
        while let Some((units, ended)) = held.slots.expire(now) {
            self.step_bare(&mut held.state, &spend(units, ended));
        }
        held
    }

    pub(super) fn held(&self, state: State) -> Held<State, Kind> {
        Held { slots: Slots::default(), state, algorithm: self.kind() }
    }

    pub(super) fn close(&self, held: Held<State, Kind>) -> State {
        if held.slots.is_empty() { held.state } else { State::Held(Box::new(held)) }
    }

    /// Calls `change` with the state beside the holds.
    pub(super) fn change_beside(
        &self,
        state: &mut State,
        now: f64,
        change: impl FnOnce(&mut State),
    ) {
        let mut held = self.open(state, now);
        change(&mut held.state);
        *state = self.close(held);
    }

    /// Ends and renews holds, all of one key.
    pub(crate) fn change_holds(
        &self,
        state: &mut State,
        now: f64,
        epoch: f64,
        changes: &[HoldChange],
    ) -> Vec<HoldReply> {
        if let State::Blocked(block) = state
            && block.algorithm == self.kind()
        {
            return self.change_holds(&mut block.state, now, epoch, changes);
        }
        let mut held = self.open(state, now);
        let (mut used, mut replies) = (0.0, Vec::with_capacity(changes.len()));
        for change in changes {
            let (more, reply) = change_hold(&mut held.slots, now, epoch, change);
            used += more;
            replies.push(reply);
        }
        if used > 0.0 {
            self.step_bare(&mut held.state, &spend(used, now));
        }
        *state = self.close(held);
        replies
    }
}

/// Changes one hold. Returns the units to spend, too.
fn change_hold(
    slots: &mut Slots,
    now: f64,
    epoch: f64,
    &HoldChange { receipt, units, action }: &HoldChange,
) -> (f64, HoldReply) {
    let has_expired = receipt.ends <= slots.time(now);
    let is_known = slots.knows(receipt);
    if is_known && !has_expired {
        slots.take(now, receipt, units);
    }
    match action {
        // Its units were spent when it expired.
        HoldAction::End { used } if has_expired => (max(used - units, 0.0), HoldReply::Expired),
        HoldAction::End { used } if is_known => (used, HoldReply::Ended),
        HoldAction::End { used } => (used, HoldReply::Lost),
        HoldAction::Renew(_) if has_expired => (0.0, HoldReply::Expired),
        HoldAction::Renew(lifetime) => {
            let receipt = slots.hold(now, units, lifetime, epoch);
            (0.0, HoldReply::Renewed(receipt))
        }
    }
}

fn spend(units: f64, now: f64) -> EngineRequest {
    EngineRequest { action: Action::Spend, cost: units, ..EngineRequest::observe(now) }
}
