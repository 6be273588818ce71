//! The ends of holds that Redis has not answered yet, by key: a hold of the same process that is
//! denied meanwhile tries again after the answer. Sending them is in `keeper.rs`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use tokio::sync::Notify;

use super::connections::{Deadline, TransportError};
use crate::{decision::Outcome, store::Lines, sync::lock};

/// Clones share the ends.
#[derive(Clone)]
pub(super) struct Ends(Arc<EndsInner>);

struct EndsInner {
    /// By the hash of limiter and key. Two with equal hashes only try again in vain.
    keys: Mutex<HashMap<u64, Unanswered>>,
    /// Notified when one is answered, or is not sent any more.
    answered: Notify,
    /// Notified when a request waits for one, which should not wait for others to be sent with it.
    needed: Notify,
    lines: Arc<Lines>,
}

#[derive(Default)]
struct Unanswered {
    /// The ends without an answer.
    open: usize,
    answered: usize,
}

impl Ends {
    pub(super) fn new(lines: Arc<Lines>) -> Self {
        let (keys, answered, needed) = (Mutex::default(), Notify::new(), Notify::new());
        Self(Arc::new(EndsInner { keys, answered, needed, lines }))
    }

    /// Begins the end of a hold. It is open until the returned value is dropped.
    pub(super) fn begin(&self, key: u64) -> OpenEnd {
        lock(&self.0.keys).entry(key).or_default().open += 1;
        OpenEnd { ends: self.clone(), key }
    }

    /// Returns the ends of these keys that are open now. Each has the name of its limiter.
    pub(super) fn open(&self, keys: Vec<(&'static str, u64)>) -> OpenEnds {
        let (open, answered) = self.count(&keys);
        OpenEnds { ends: self.clone(), keys, open, answered }
    }

    /// Lets the ends of a hold be sent at once.
    pub(super) fn hurry(&self) {
        self.0.needed.notify_one();
    }

    /// Waits until an end is to be sent at once.
    pub(super) async fn needed(&self) {
        self.0.needed.notified().await;
    }

    /// Returns how many ends are open, and how many were answered since there were none.
    fn count(&self, keys: &[(&'static str, u64)]) -> (usize, usize) {
        let all = lock(&self.0.keys);
        let counts = keys.iter().filter_map(|(_, key)| all.get(key));
        counts.fold((0, 0), |sum, it| (sum.0 + it.open, sum.1 + it.answered))
    }
}

/// The ends of some keys that were open at an instant.
pub(super) struct OpenEnds {
    ends: Ends,
    keys: Vec<(&'static str, u64)>,
    open: usize,
    /// How many were answered before.
    answered: usize,
}

impl OpenEnds {
    /// Returns the decision about a request that holds units of the keys. A denied one decides
    /// `again` after the ends: what this process has returned before the request is there for it.
    /// The denial is an answer; an error of the second decision is none.
    pub(super) async fn execute<F>(
        &self,
        first: impl Future<Output = Result<Outcome, TransportError>>,
        again: impl FnOnce() -> F,
        deadline: Deadline,
    ) -> Result<Outcome, TransportError>
    where
        F: Future<Output = Result<Outcome, TransportError>>,
    {
        let mut outcome = first.await?;
        if self.open > 0
            && outcome.decision.waits_for_holds()
            // Also those that the first decision has begun: in a cluster, a denied charge ends what
            // it holds elsewhere.
            && deadline.wait_for(self.ends.open(self.keys.clone()).answered()).await.is_some()
            && let Ok(second) = again().await
        {
            outcome = second;
        }
        let decision = &outcome.decision;
        let is_full = match decision.is_allowed() {
            true => decision.remaining() < decision.cost(),
            false => decision.waits_for_holds() || decision.held() > 0,
        };
        if is_full {
            let keys = self.keys.iter().filter(|(limiter, _)| *limiter == decision.limiter());
            self.ends.0.lines.found_full(keys.map(|(_, key)| *key), decision.is_allowed());
        }
        Ok(outcome)
    }

    /// Waits for the answers to all of them.
    async fn answered(&self) {
        let EndsInner { answered, needed, .. } = &*self.ends.0;
        loop {
            let notified = answered.notified();
            let (left, now) = self.ends.count(&self.keys);
            // Fewer: there were none in between.
            if left == 0 || now < self.answered || now >= self.answered + self.open {
                return;
            }
            needed.notify_one();
            notified.await;
        }
    }
}

/// An end without an answer.
pub(super) struct OpenEnd {
    ends: Ends,
    key: u64,
}

impl Drop for OpenEnd {
    fn drop(&mut self) {
        let EndsInner { keys, answered, .. } = &*self.ends.0;
        let mut all = lock(keys);
        if let Some(of_key) = all.get_mut(&self.key) {
            of_key.open -= 1;
            of_key.answered += 1;
            if of_key.open == 0 {
                all.remove(&self.key);
            }
        }
        drop(all);
        answered.notify_waiters();
    }
}
