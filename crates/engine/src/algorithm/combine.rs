//! Combine: decides about several limits for one request. Does not know the algorithms. Its Lua
//! twin is `scripts/combine.lua`.

use smallvec::SmallVec;

use super::request::{Action, Admission, EngineReply, EngineRequest};

/// A value for each limit of a request. Up to four need no allocation.
pub type PerLimit<T> = SmallVec<[T; 4]>;

/// The decision about several limits.
pub struct Combined {
    pub replies: PerLimit<EngineReply>,
    /// The index of the limit that binds: the one that denies longest, or else has least remaining;
    /// of several with as few, the one with the longest wait.
    pub binding: usize,
}

/// Decides about several limits. All of them admit the request or none, and it waits as long as the
/// longest wait of a limit. `step` decides about one of them.
pub fn combine(
    requests: &[EngineRequest],
    mut step: impl FnMut(usize, &EngineRequest) -> EngineReply,
) -> Combined {
    let mut combined = Combined { replies: PerLimit::new(), binding: 0 };
    let looked = combined.look(requests, true, &mut step);
    combined.commit(requests, looked, step);
    combined
}

impl Combined {
    /// Looks at the limits without a change. If no other one denies or waits, and `may_commit`, the
    /// last one decides. Returns the decision, and the number of limits that have looked only.
    #[inline]
    pub fn look(
        &mut self,
        requests: &[EngineRequest],
        may_commit: bool,
        mut step: impl FnMut(usize, &EngineRequest) -> EngineReply,
    ) -> (Admission, usize) {
        let (mut wait, mut excess, mut looked) = (0, Some(0), requests.len());
        for (limit, request) in requests.iter().enumerate() {
            // Units that are spent for one limit do not wait for another.
            if !request.action.can_be_denied() {
                self.replies.push(EngineReply::uncounted(request.now));
                continue;
            }
            let decides = may_commit && (wait, excess) == (0, Some(0)) && limit + 1 == looked;
            looked -= usize::from(decides);
            let action = if decides { request.action } else { Action::Peek };
            let reply = step(limit, &EngineRequest { action, ..*request });
            if reply.admitted {
                wait = reply.wait.unwrap_or(0).max(wait);
            } else if is_longer(reply.wait, excess) {
                (excess, self.binding) = (reply.wait, limit);
            }
            self.replies.push(reply);
        }
        let admitted = excess == Some(0);
        (Admission { admitted, wait: if admitted { Some(wait) } else { excess } }, looked)
    }

    /// Decides about each limit that has looked only.
    #[inline]
    pub fn commit(
        &mut self,
        requests: &[EngineRequest],
        (admission, looked): (Admission, usize),
        mut step: impl FnMut(usize, &EngineRequest) -> EngineReply,
    ) {
        let mut least = (i64::MAX, 0);
        for (limit, (request, reply)) in requests.iter().zip(&mut self.replies).enumerate() {
            let wait = reply.wait.unwrap_or(0);
            if limit < looked {
                let admission = request.action.can_be_denied().then_some(admission);
                *reply = step(limit, &EngineRequest { admission, ..*request });
            }
            let rank = (reply.remaining, -wait);
            if admission.admitted && rank < least {
                (self.binding, least) = (limit, rank);
            }
        }
    }
}

/// Returns whether a wait is longer than another one. An unknown wait is the longest.
fn is_longer(wait: Option<i64>, other: Option<i64>) -> bool {
    other.is_some_and(|other| wait.is_none_or(|wait| wait > other))
}
