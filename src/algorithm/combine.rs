//! Combine: decides about several limits for one request. Does not know the algorithms. Its Lua
//! twin is `scripts/combine.lua`.

use smallvec::SmallVec;

use super::request::{Action, Admission, EngineReply, EngineRequest};

/// A value for each limit of a request. Up to four need no allocation.
pub(crate) type PerLimit<T> = SmallVec<[T; 4]>;

/// The decision about several limits.
pub(crate) struct Combined {
    pub(crate) replies: PerLimit<EngineReply>,
    /// The index of the limit that binds: the one that denies longest, or else has least remaining;
    /// of several with as few, the one with the longest wait.
    pub(crate) binding: usize,
}

/// Decides about several limits. All of them admit the request or none, and it waits as long as the
/// longest wait of a limit. `step` decides about one of them.
#[inline]
pub(crate) fn combine(
    requests: &[EngineRequest],
    mut step: impl FnMut(usize, &EngineRequest) -> EngineReply,
) -> Combined {
    let mut combined = Combined { replies: PerLimit::new(), binding: 0 };
    let Combined { replies, binding } = &mut combined;
    let (mut wait, mut excess) = (0, Some(0));
    // Looks at all limits without a change. Units that are spent for one limit do not wait for
    // another.
    for (limit, request) in requests.iter().enumerate() {
        if !request.action.can_be_denied() {
            replies.push(EngineReply::uncounted(request.now));
            continue;
        }
        let peek = step(limit, &EngineRequest { action: Action::Peek, ..*request });
        if peek.admitted {
            wait = peek.wait.unwrap_or(0).max(wait);
        } else if is_longer(peek.wait, excess) {
            (excess, *binding) = (peek.wait, limit);
        }
        replies.push(peek);
    }
    let admitted = excess == Some(0);
    let admission = Admission { admitted, wait: if admitted { Some(wait) } else { excess } };
    let mut least = (i64::MAX, 0);
    for ((limit, request), reply) in requests.iter().enumerate().zip(replies) {
        let wait = reply.wait.unwrap_or(0);
        let resolved = request.action.can_be_denied().then_some(admission);
        *reply = step(limit, &EngineRequest { admission: resolved, ..*request });
        let rank = (reply.remaining, -wait);
        if admitted && rank < least {
            (*binding, least) = (limit, rank);
        }
    }
    combined
}

/// Returns whether a wait is longer than another one. An unknown wait is the longest.
fn is_longer(wait: Option<i64>, other: Option<i64>) -> bool {
    other.is_some_and(|other| wait.is_none_or(|wait| wait > other))
}
