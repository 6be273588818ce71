//! Decisions about keys with holds, and ends of holds, for every algorithm: what is held makes the
//! quota smaller that `engine.rs` decides by. The units themselves are in `hold.rs`.

use super::{
    hold::{Held, HoldReceipt},
    request::{Action, EngineReply, EngineRequest, Release},
    table::{Params, Spent, State},
};

impl Params {
    /// Decides about a key that is not blocked.
    #[inline(always)]
    pub(super) fn step_held(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        match state.held {
            Held::Expiring(_) => self.step_expiring(state, request),
            _ => self.step_beside(state, request),
        }
    }

    /// Decides beside what is held.
    #[inline(never)]
    fn step_beside(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, cost, now, .. } = *request;
        let held = request.held_around(state.held.total());
        let mut reply = self.step_model(&mut state.spent, held, request);
        if let Action::Hold { lifetime, epoch } = action
            && reply.admitted
        {
            reply.hold = Some(state.held.hold(now, cost, lifetime, epoch.unwrap_or(now)));
        }
        reply
    }

    /// Decides beside holds that expire.
    #[inline(never)]
    fn step_expiring(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, now, .. } = *request;
        // A request that changes nothing leaves slots that have ended as they are (law 1).
        let is_due = matches!(&state.held, Held::Expiring(slots) if slots.is_due(now));
        let found = is_due.then(|| state.clone());
        self.expire_holds(state, now);
        let reply = self.step_beside(state, request);
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

    /// Follows a clock that may have stepped back, and spends the units of all slots that have
    /// ended, at their ends. Forgets what is held if that is nothing.
    #[inline(always)]
    pub(super) fn expire_holds(&self, state: &mut State, now: i64) {
        let Held::Expiring(slots) = &mut state.held else { return };
        if slots.is_stale(now) {
            slots.touch(now);
        }
        while let Some((units, ended)) = slots.expire(now) {
            self.spend_bare(&mut state.spent, units, ended);
        }
        state.held.forget_if_empty();
    }

    /// Decides if nothing is held. The decision is compiled once more, without what holds need.
    #[inline(never)]
    pub(super) fn step_alone(&self, spent: &mut Spent, request: &EngineRequest) -> EngineReply {
        self.step_model(spent, [0; 2], request)
    }

    /// Counts units that were held, and are used now.
    pub fn spend(&self, state: &mut State, units: i64, now: i64) {
        self.expire_holds(state, now);
        if state.blocked_until <= now {
            state.blocked_until = 0;
        }
        self.spend_bare(&mut state.spent, units, now);
    }

    /// The same for a state without a block and holds, compiled without what only a reply needs.
    #[inline(never)]
    pub(super) fn spend_bare(&self, spent: &mut Spent, units: i64, now: i64) {
        self.step_model(spent, [0; 2], &EngineRequest::spend(units, now));
    }

    /// Returns units to the state, as the algorithm counted them.
    pub fn return_units(&self, state: &mut State, now: i64, releases: &[Release]) {
        self.expire_holds(state, now);
        self.return_bare(&mut state.spent, now, releases);
    }
}

impl State {
    /// Ends a hold that does not expire. Returns whether its units were held.
    #[inline]
    pub fn end_hold(&mut self, receipt: HoldReceipt, units: i64) -> bool {
        let Held::Endless(core) = &mut self.held else { return false };
        let is_known = core.end_hold(receipt, units);
        self.held.forget_if_empty();
        is_known
    }
}
