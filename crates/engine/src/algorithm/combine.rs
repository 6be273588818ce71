//! Combine: decides about several limits for one request. Does not know the algorithms. Its Lua
//! twin is `scripts/combine.lua`.

use smallvec::SmallVec;

use super::request::{Action, Admission, EngineReply, EngineRequest};

/// A value for each limit of a request. Up to four need no allocation.
pub type PerLimit<T> = SmallVec<[T; 4]>;

/// The decision about several limits.
#[derive(Default)]
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
    let mut combined = Combined::default();
    let can_be_denied = requests.iter().any(|request| request.action.can_be_denied());
    // Nothing is undone: only the last limit decides before all have looked.
    let (limits, mut last) = (0..requests.len(), None);
    let admission = combined.look(limits.clone(), can_be_denied, |limit, may_decide| {
        last = (may_decide && limit + 1 == requests.len()).then_some(limit);
        let action = if last.is_some() { requests[limit].action } else { Action::Peek };
        step(limit, &EngineRequest { action, ..requests[limit] })
    });
    combined.commit(limits, admission, |limit, reply| {
        if last != Some(limit) {
            let admission = can_be_denied.then_some(admission);
            *reply = step(limit, &EngineRequest { admission, ..requests[limit] });
        }
    });
    combined
}

impl Combined {
    /// Asks each limit, unless none `can_be_denied`. As long as no limit denies or waits, the next
    /// one may decide at once; `commit` undoes that if a later one does.
    #[inline(always)]
    pub fn look<L>(
        &mut self,
        limits: impl Iterator<Item = L>,
        can_be_denied: bool,
        mut step: impl FnMut(L, bool) -> EngineReply,
    ) -> Admission {
        let (mut wait, mut excess) = (0, Some(0));
        self.replies.clear();
        for (index, limit) in limits.enumerate() {
            if !can_be_denied {
                // Units that are spent for one limit do not wait for another.
                self.replies.push(EngineReply::uncounted(0));
                continue;
            }
            let reply = step(limit, (wait, excess) == (0, Some(0)));
            if reply.admitted {
                wait = reply.wait.unwrap_or(0).max(wait);
            } else if is_longer(reply.wait, excess) {
                (excess, self.binding) = (reply.wait, index);
            }
            self.replies.push(reply);
        }
        let admitted = excess == Some(0);
        Admission { admitted, wait: if admitted { Some(wait) } else { excess } }
    }

    /// Lets each limit follow the decision of all: `step` replaces the reply of one that has not
    /// decided so.
    #[inline(always)]
    pub fn commit<L>(
        &mut self,
        limits: impl Iterator<Item = L>,
        admission: Admission,
        mut step: impl FnMut(L, &mut EngineReply),
    ) {
        let mut least = (i64::MAX, 0);
        for (index, (limit, reply)) in limits.zip(&mut self.replies[..]).enumerate() {
            let wait = reply.wait.unwrap_or(0);
            step(limit, reply);
            let rank = (reply.remaining, -wait);
            if admission.admitted && rank < least {
                (self.binding, least) = (index, rank);
            }
        }
    }
}

/// Returns whether a wait is longer than another one. An unknown wait is the longest.
fn is_longer(wait: Option<i64>, other: Option<i64>) -> bool {
    other.is_some_and(|other| wait.is_none_or(|wait| wait > other))
}
