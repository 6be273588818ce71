//! The ends of holds that Redis has not answered yet, by key: a hold of the same process that is
//! denied meanwhile tries again after the answer. Sending them is in `keeper.rs`.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
};

use tokio::sync::Notify;

use super::connections::{Deadline, TransportError};
use crate::{decision::Outcome, store::Lines, sync::lock};

/// Clones share the ends.
#[derive(Clone)]
pub(super) struct Ends(Arc<EndsInner>);

struct EndsInner {
    open: Mutex<OpenNumbers>,
    /// Notified when one is answered, or is not sent any more.
    answered: Notify,
    /// Notified when a request waits for one, which should not wait for others to be sent with it.
    needed: Notify,
    lines: Arc<Lines>,
}

/// The ends without an answer: each has a number, in the order in which they began.
#[derive(Default)]
struct OpenNumbers {
    next: u64,
    /// By the hash of limiter and key. Two with equal hashes only try again in vain.
    by_key: HashMap<u64, BTreeSet<u64>>,
}

impl OpenNumbers {
    /// Returns whether an end of one of the keys that began before is open.
    fn has(&self, keys: &[(&'static str, u64)], before: u64) -> bool {
        let mut open = keys.iter().filter_map(|(_, key)| self.by_key.get(key));
        open.any(|numbers| numbers.first().is_some_and(|first| *first < before))
    }
}

impl Ends {
    pub(super) fn new(lines: Arc<Lines>) -> Self {
        let (open, answered, needed) = (Mutex::default(), Notify::new(), Notify::new());
        Self(Arc::new(EndsInner { open, answered, needed, lines }))
    }

    /// Begins the end of a hold. It is open until the returned value is dropped.
    pub(super) fn begin(&self, key: u64) -> OpenEnd {
        let open = &mut *lock(&self.0.open);
        let number = open.next;
        open.next += 1;
        open.by_key.entry(key).or_default().insert(number);
        OpenEnd { ends: self.clone(), key, number }
    }

    /// Returns the ends of these keys that are open now. Each has the name of its limiter.
    pub(super) fn open(&self, keys: Vec<(&'static str, u64)>) -> OpenEnds {
        let any = lock(&self.0.open).has(&keys, u64::MAX);
        OpenEnds { ends: self.clone(), keys, any }
    }

    /// Lets the ends of a hold be sent at once.
    pub(super) fn hurry(&self) {
        self.0.needed.notify_one();
    }

    /// Waits until an end is to be sent at once.
    pub(super) async fn needed(&self) {
        self.0.needed.notified().await;
    }
}

/// The ends of some keys that were open at an instant.
pub(super) struct OpenEnds {
    ends: Ends,
    keys: Vec<(&'static str, u64)>,
    /// Whether there were some.
    any: bool,
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
        if self.any
            && outcome.decision.waits_for_holds()
            // Also those that the first decision has begun: in a cluster, a denied charge ends what
            // it holds elsewhere.
            && deadline.wait_for(self.answered()).await.is_some()
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

    /// Waits for the answers to the ends of the keys that are open now.
    async fn answered(&self) {
        let EndsInner { open, answered, needed, .. } = &*self.ends.0;
        let before = lock(open).next;
        loop {
            let notified = answered.notified();
            if !lock(open).has(&self.keys, before) {
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
    number: u64,
}

impl Drop for OpenEnd {
    fn drop(&mut self) {
        let EndsInner { open, answered, .. } = &*self.ends.0;
        let mut open = lock(open);
        if let Some(numbers) = open.by_key.get_mut(&self.key)
            && numbers.remove(&self.number)
            && numbers.is_empty()
        {
            open.by_key.remove(&self.key);
        }
        drop(open); // a waker can run foreign code
        answered.notify_waiters();
    }
}
