//! Block: a key that is denied until an instant, whatever its count. Its Lua twin in `scripts/` has
//! the same name.

#[cfg(feature = "redis")]
use super::state_bytes::Reader;
use super::{
    request::{Action, EngineReply, EngineRequest},
    table::{Params, State},
};
use crate::quota::LONGEST_REFILL;

/// The longest block, in microseconds.
pub(crate) const LONGEST_BLOCK: i64 = LONGEST_REFILL as i64;

/// The letter that the state of a blocked key begins with.
#[cfg(feature = "redis")]
pub(super) const FORM: u8 = b'B';

/// Reads the end of a block that a script has found, and the bytes of the state inside of it.
#[cfg(feature = "redis")]
pub(super) fn decode(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let ends = Reader::new(bytes, FORM)?.integer(7)?;
    Some((ends, &bytes[8..]))
}

impl Params {
    /// Decides about a key that is blocked or has holds, and begins and ends blocks.
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
        if action.can_be_denied() && rest > max_wait {
            return EngineReply::denied_by_block(request, rest);
        }
        let blocked = if action.can_be_denied() { rest } else { 0 };
        let beside = match action.blocks() {
            true => EngineRequest::observe(now),
            false => EngineRequest { blocked, ..*request },
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
