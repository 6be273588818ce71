//! Block: a key that is denied until an instant, whatever its count. Does not know the algorithms:
//! the block stands around the state of one. Its Lua twin in `scripts/` has the same name.

#[cfg(feature = "redis")]
use super::state_bytes::Reader;
use super::{
    arithmetic::max,
    request::{Action, EngineReply, EngineRequest},
};
use crate::quota::LONGEST_REFILL;

/// The longest block, in microseconds.
pub(crate) const LONGEST_BLOCK: f64 = LONGEST_REFILL as f64;

/// A block, and the state inside of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block<S> {
    /// The instant at which it ends.
    pub(super) ends: f64,
    pub(super) state: S,
}

/// The letter that the state of a blocked key begins with.
#[cfg(feature = "redis")]
pub(super) const FORM: u8 = b'B';

/// Reads the end of a block that a script has found, and the bytes of the state inside of it.
#[cfg(feature = "redis")]
pub(super) fn decode(bytes: &[u8]) -> Option<(f64, &[u8])> {
    let ends = Reader::new(bytes, FORM)?.integer(7)?;
    Some((ends, &bytes[8..]))
}

/// Decides about a key whose block ends at `known`, or is to begin. `inside` decides about the
/// state inside of it. Returns the end of the block, too, if the key has one afterwards.
pub(super) fn step(
    known: f64,
    request: &EngineRequest,
    inside: impl FnOnce(&EngineRequest) -> EngineReply,
) -> (EngineReply, Option<f64>) {
    let EngineRequest { action, max_wait, now, .. } = *request;
    let ends = match action {
        Action::Block { duration } => max(known, now + duration as f64),
        Action::Unblock => 0.0,
        _ => known,
    };
    let rest = max(ends - now, 0.0);
    if action.can_be_denied() && rest > max_wait {
        return (EngineReply::denied_by_block(request, rest), Some(ends));
    }
    let blocked = if action.can_be_denied() { rest } else { 0.0 };
    let reply = inside(&match action.blocks() {
        true => EngineRequest::observe(now),
        false => EngineRequest { blocked, ..*request },
    });
    if rest > 0.0 { (reply.blocked(rest), Some(ends)) } else { (reply, None) }
}
