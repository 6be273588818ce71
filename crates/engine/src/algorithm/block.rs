//! Block: a key that is denied until an instant, whatever its count. Also reads the state that a
//! script has found, which can begin with a block. Its Lua twin in `scripts/` has the same name.

use super::{
    hold,
    request::{Action, Admission, EngineReply, EngineRequest},
    state_bytes::Reader,
    table::{Params, State},
};
use crate::quota::LONGEST_REFILL;

/// The longest block, in microseconds.
pub const LONGEST_BLOCK: i64 = LONGEST_REFILL as i64;

/// The letter that the state of a blocked key begins with.
const FORM: u8 = b'B';

impl Params {
    /// Reads the state that a script found, behind a block and holds if there are any; `None` if it
    /// is malformed.
    pub fn decode(&self, bytes: &[u8]) -> Option<State> {
        let (mut state, mut rest) = (State::default(), bytes);
        if rest.first() == Some(&FORM) {
            let mut reader = Reader::new(rest, FORM)?;
            state.blocked_until = reader.integer(7)?;
            rest = reader.rest();
        }
        if rest.first() == Some(&hold::FORM) {
            (state.held, rest) = hold::decode(rest)?;
        }
        state.spent = self.decode_spent(rest)?;
        Some(state)
    }

    /// Decides about a key that is blocked, and begins and ends blocks.
    #[inline(never)]
    pub(super) fn step_blocked(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, max_wait, now, .. } = *request;
        match action {
            Action::Block { duration } => {
                state.blocked_until = state.blocked_until.max(now + duration);
            }
            Action::Unblock => state.blocked_until = 0,
            _ => {}
        }
        let rest = (state.blocked_until - now).max(0);
        let is_denied = action.can_be_denied() && rest > max_wait;
        if is_denied && action != Action::Peek {
            return EngineReply::denied_by_block(request, rest);
        }
        let blocked = if action.can_be_denied() { rest } else { 0 };
        // A peek is denied as a check is, and sees the count, too.
        let denial = is_denied.then(|| Admission { admitted: false, wait: Some(rest - max_wait) });
        let admission = request.admission.or(denial);
        let beside = match action.blocks() {
            true => EngineRequest::observe(now),
            false => EngineRequest { blocked, admission, ..*request },
        };
        let reply = self.step_held(state, &beside);
        if rest > 0 {
            return reply.blocked(rest);
        }
        if reply.admitted && action.writes() {
            state.blocked_until = 0;
        }
        reply
    }
}
