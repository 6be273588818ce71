//! Block: a key that is denied until an instant, whatever its count. Does not know the algorithms:
//! the block stands around the state of one. Its Lua twin is `scripts/block.lua`.

use std::mem::take;

#[cfg(feature = "redis")]
use super::state_bytes::Reader;
use super::{
    arithmetic::max,
    request::{Action, EngineReply, EngineRequest},
    table::{Kind, Params, State},
};
use crate::quota::LONGEST_REFILL;

/// The longest block, in microseconds.
pub(crate) const LONGEST_BLOCK: f64 = LONGEST_REFILL as f64;

/// A block, and the state inside of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block {
    /// The instant at which it ends.
    pub(super) ends: f64,
    pub(super) state: State,
    /// The algorithm that it is for: with another one, it ends.
    algorithm: Kind,
}

impl Block {
    /// The letter that the state of a blocked key begins with.
    #[cfg(feature = "redis")]
    pub(super) const FORM: u8 = b'B';

    /// Reads a state that a script found in a block.
    #[cfg(feature = "redis")]
    pub(super) fn decode(params: &Params, bytes: &[u8]) -> Option<State> {
        let ends = Reader::new(bytes, Self::FORM)?.integer(7)?;
        let state = params.decode(&bytes[8..])?;
        Some(Self::around(params, state, ends))
    }

    pub(super) fn is_of(&self, params: &Params) -> bool {
        self.algorithm == params.kind()
    }

    pub(super) fn around(params: &Params, state: State, ends: f64) -> State {
        State::Blocked(Box::new(Self { ends, state, algorithm: params.kind() }))
    }

    /// Decides about a key that is blocked, or is to be.
    #[cold]
    pub(super) fn step(params: &Params, state: &mut State, request: &EngineRequest) -> EngineReply {
        let EngineRequest { action, max_wait, now, .. } = *request;
        let (known, mut inner) = match take(state) {
            State::Blocked(block) => (block.ends, block.state),
            state => (0.0, state),
        };
        let ends = match action {
            Action::Block => max(known, now + max_wait),
            Action::Unblock => 0.0,
            _ => known,
        };
        let rest = max(ends - now, 0.0);
        if action.can_be_denied() && rest > max_wait {
            *state = Self::around(params, inner, ends);
            return EngineReply::denied_by_block(request, rest);
        }
        let blocked = if action.can_be_denied() { rest } else { 0.0 };
        let request = match action.blocks() {
            true => EngineRequest { action: Action::Refund, cost: 0.0, ..*request },
            false => EngineRequest { blocked, ..*request },
        };
        let reply = params.step_inside(&mut inner, &request);
        if rest > 0.0 {
            *state = Self::around(params, inner, ends);
            return reply.blocked(rest);
        }
        *state = inner;
        reply
    }
}
