//! Combine: decides about several limits for one request. Does not know the algorithms. Its Lua
//! twin is `scripts/combine.lua`.

use smallvec::{SmallVec, smallvec};

use super::request::{Action, Admission, EngineReply, EngineRequest};

/// A value for each limit of a request. Up to four need no allocation.
pub(crate) type PerLimit<T> = SmallVec<[T; 4]>;

/// Decides about several limits. All of them admit the request or none, and it waits as long as the
/// longest wait of a limit. `step` decides about one of them.
///
/// Returns the replies of all limits, and the index of the limit that binds. That is the one that
/// denies longest, or else has least remaining; of several with as few, the one with the longest
/// wait.
pub(crate) fn combine(
    requests: &[EngineRequest],
    mut step: impl FnMut(usize, &EngineRequest) -> EngineReply,
) -> (PerLimit<EngineReply>, usize) {
    let Resolved { admission, waits, mut binding } = resolve(requests, &mut step);
    let mut replies: PerLimit<EngineReply> = PerLimit::new();
    for (limit, request) in requests.iter().enumerate() {
        let resolved = request.action.can_be_denied().then_some(admission);
        let reply = step(limit, &EngineRequest { admission: resolved, ..*request });
        replies.push(reply);
        let rank = |limit: usize| (replies[limit].remaining, -waits[limit]);
        // It begins with the first limit, unless one denies.
        if admission.admitted && rank(limit) < rank(binding) {
            binding = limit;
        }
    }
    (replies, binding)
}

/// The admission by all limits.
struct Resolved {
    admission: Admission,
    /// The wait of each limit.
    waits: PerLimit<i64>,
    /// The limit that denies longest, if one denies.
    binding: usize,
}

/// Looks at all limits without a change.
fn resolve(
    requests: &[EngineRequest],
    step: &mut impl FnMut(usize, &EngineRequest) -> EngineReply,
) -> Resolved {
    let (mut wait, mut excess, mut binding) = (0, Some(0), 0);
    let mut waits: PerLimit<i64> = smallvec![0; requests.len()];
    for (limit, request) in requests.iter().enumerate() {
        if !request.action.can_be_denied() {
            continue; // units that are spent for one limit do not wait for another
        }
        let peek = step(limit, &EngineRequest { action: Action::Peek, ..*request });
        if peek.admitted {
            waits[limit] = peek.wait.unwrap_or(0);
            wait = waits[limit].max(wait);
        } else if is_longer(peek.wait, excess) {
            (excess, binding) = (peek.wait, limit);
        }
    }
    let admitted = excess == Some(0);
    let admission = Admission { admitted, wait: if admitted { Some(wait) } else { excess } };
    Resolved { admission, waits, binding }
}

/// Returns whether a wait is longer than another one. An unknown wait is the longest.
fn is_longer(wait: Option<i64>, other: Option<i64>) -> bool {
    other.is_some_and(|other| wait.is_none_or(|wait| wait > other))
}
