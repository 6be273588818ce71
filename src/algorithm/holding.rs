//! Decisions about keys with holds, and changes of holds, for every algorithm: what is held makes
//! the quota smaller that the model decides by. The units themselves are in `hold.rs`, decisions
//! about other keys in `engine.rs`.

use std::mem::take;

use super::{
    arithmetic::max,
    hold::{Held, HoldAction, HoldChange, HoldReceipt, HoldReply, Lifetime, Slots},
    packed::Packed,
    request::{Action, Admission, EngineReply, EngineRequest},
    table::{Params, State},
};

impl Params {
    /// Decides about a key with holds, or holds the first units of a key.
    #[cold]
    pub(super) fn step_held(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, cost, now, .. } = *request;
        // A hold reserves no instant: it would count from now on.
        let max_wait = if let Action::Hold { .. } = action { 0.0 } else { request.max_wait };
        let request = &EngineRequest { max_wait, ..*request };
        // A request that changes nothing leaves slots that have ended as they are (law 1).
        let is_due = state.has_stale_holds(now) || state.has_ended_holds(now);
        let found = is_due.then(|| state.clone());
        let mut held = self.open(state, now);
        let mut reply = self.step_beside(&mut held, request);
        if let (true, Action::Hold { lifetime, epoch }) = (reply.admitted, action) {
            let epoch = epoch.map_or(now, |epoch| epoch as f64);
            reply.hold = Some(held.slots.hold(now, cost, lifetime, epoch));
        }
        self.describe(&mut reply, &mut held, now);
        let changes = reply.admitted && action.inserts() || action == Action::Refund;
        *state = match found {
            Some(mut found) if !changes => {
                if action.inserts() {
                    found.follow_clock(now);
                }
                found
            }
            _ => self.close(held),
        };
        reply
    }

    /// Decides beside what is held. Holds nothing.
    fn step_beside(&self, held: &mut Held<State>, request: &EngineRequest) -> EngineReply {
        let beside = self.beside(held.slots.total());
        if request.action.can_be_denied() && !beside.fits(request.cost) {
            // No time helps: holds have to end.
            let wait = request.admission.map_or(f64::INFINITY, |all| all.wait);
            let admission = Some(Admission { admitted: false, wait });
            return beside.step_bare(&mut held.state, &EngineRequest { admission, ..*request });
        }
        beside.step_bare(&mut held.state, request)
    }

    /// Describes the key beside what is held after the decision.
    fn describe(&self, reply: &mut EngineReply, held: &mut Held<State>, now: f64) {
        reply.held = held.slots.total();
        let beside = self.beside(reply.held);
        let seen = beside.step_bare(&mut held.state, &EngineRequest::observe(now));
        reply.remaining = max(seen.remaining, 0.0);
        // More than an empty key has left beside the holds is left only when they end.
        let grows = reply.remaining < beside.most();
        reply.replenish = if grows { seen.replenish } else { 0.0 };
        reply.reset = match held.slots.have_ends() {
            true => self.reset_after_expiry(held, now),
            false => seen.reset + self.drain(reply.held, now),
        };
    }

    /// The time until the state is the initial one, if all holds expire.
    fn reset_after_expiry(&self, held: &Held<State>, now: f64) -> f64 {
        let Held { mut slots, mut state, .. } = held.clone();
        let mut at = now;
        while let Some((units, ended)) = slots.expire_next(now) {
            at = ended;
            self.step_bare(&mut state, &spend(units, at));
        }
        at - now + self.step_bare(&mut state, &EngineRequest::observe(at)).reset
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

    /// The time until these units of an unused key, once they are spent, do not count any more.
    fn drain(&self, units: f64, now: f64) -> f64 {
        self.step_bare(&mut State::Initial, &spend(units, now)).reset
    }

    /// Takes the state for a decision, by a clock that may have stepped back, and after all slots
    /// that have ended: their units are spent at their ends.
    fn open(&self, state: &mut State, now: f64) -> Held<State> {
        let mut held = match take(state) {
            State::Held(held) => *held,
            state => self.held(state),
        };
        if held.slots.is_stale(now) {
            held.slots.touch(now);
        }
        while let Some((units, ended)) = held.slots.expire(now) {
            self.step_bare(&mut held.state, &spend(units, ended));
        }
        held
    }

    /// Returns a state with these holds, as the scripts pack them.
    #[cfg(test)]
    pub(super) fn with_holds(&self, bytes: &[u8], state: State) -> State {
        let (slots, _) = super::hold::decode(bytes).expect("holds");
        self.close(Held { slots, ..self.held(state) })
    }

    /// Packs what is held of a key whose units are only held: there is no state beside it.
    #[cold]
    pub(super) fn pack_held(&self, held: &Held<State>) -> Option<Packed> {
        if self.spends() { None } else { held.slots.pack() }
    }

    /// The state that these numbers represent. Without units, the first number says when the
    /// first hold began.
    #[cold]
    pub(super) fn unpack_held(&self, packed: Packed) -> State {
        match packed[1] {
            0 => State::Initial,
            _ => self.close(Held { slots: Slots::endless(packed), ..self.held(State::Initial) }),
        }
    }

    /// Holds units of a key that [`pack_held`](Self::pack_held) has packed, as `step` does; `None`
    /// for other algorithms, and if the number of units is invalid.
    #[inline]
    pub(crate) fn hold_packed(
        &self,
        packed: &mut Packed,
        units: u64,
        now: i64,
        epoch: impl FnOnce() -> i64,
    ) -> Option<EngineReply> {
        match self {
            Self::Concurrency(params) => params.hold(packed, units, now, epoch),
            _ => None,
        }
    }

    /// Ends a hold of such a key, as `change_holds` does. Returns false if it holds no units.
    #[inline]
    pub(crate) fn end_packed(&self, packed: &mut Packed, receipt: HoldReceipt, units: u64) -> bool {
        match self {
            Self::Concurrency(params) => params.end(packed, receipt, units),
            _ => false,
        }
    }

    pub(super) fn held(&self, state: State) -> Held<State> {
        Held { slots: Slots::default(), state }
    }

    pub(super) fn close(&self, mut held: Held<State>) -> State {
        if held.state.is_initial() {
            held.state = State::Initial;
        }
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
        if let State::Blocked(block) = state {
            return self.change_holds(&mut block.state, now, epoch, changes);
        }
        let mut held = self.open(state, now);
        let time = held.slots.time(now);
        let (mut used, mut replies) = (0.0, Vec::with_capacity(changes.len()));
        for change in changes {
            let left = change.receipt.ends - time;
            let (more, reply) = change_hold(&mut held.slots, now, epoch, left, change);
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
    left: f64,
    &HoldChange { receipt, units, action }: &HoldChange,
) -> (f64, HoldReply) {
    let has_expired = left <= 0.0;
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
            let receipt = match is_known {
                // Not for less than is left of it: the holder may not get this reply.
                true => {
                    let time = max(lifetime.time, left);
                    slots.hold_more(now, units, Lifetime { time, ..lifetime })
                }
                false => slots.hold(now, units, lifetime, epoch),
            };
            (0.0, HoldReply::Renewed(receipt))
        }
    }
}

fn spend(units: f64, now: f64) -> EngineRequest {
    EngineRequest { action: Action::Spend, cost: units, ..EngineRequest::observe(now) }
}
