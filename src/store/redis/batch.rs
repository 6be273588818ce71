//! A batch: checks of one limiter that go to Redis in one call, and the callers that wait for their
//! decisions. `front.rs` decides when a batch is sent, and when a caller times out.

use std::{
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use hashbrown::HashTable;
use redis::ServerErrorKind;

use super::{
    call::{EachReply, ScriptCall, execute_each},
    name_of, report_sent,
    script::{CheckEach, reserves_fast},
    transport::{Client, Deadline, TransportError},
};
use crate::{
    decision::Decision,
    keys::Key,
    observe::Observers,
    store::{LimitRequest, Settings},
    sync::lock,
};

/// The number of keys in a batch, which must not block Redis for long.
const MAX_KEYS: usize = 64;
/// The number of checks in a batch, if those of the same key take little more time than one.
const MAX_CHECKS: usize = 512;
/// The delay up to which a caller gets its error from the call and not at its own deadline.
const MAX_DELAY: Duration = Duration::from_millis(1);

pub(super) struct CheckBatch {
    settings: Arc<Settings>,
    /// Those of the first check.
    observers: Observers,
    /// The prefix of all keys in Redis.
    prefix: Arc<str>,
    contents: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    /// Each key once, with its hash, in the order of arrival.
    keys: Vec<(u64, Key<'static>)>,
    index_of: HashTable<usize>,
    /// In the order of arrival.
    callers: Vec<Caller>,
}

struct Caller {
    /// The index of the key.
    key: usize,
    cost: u32,
    max_wait: f64,
    deadline: Deadline,
    end: End,
    state: State,
}

/// The event at which a caller gets an error, if there is no reply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Its own deadline.
    Deadline,
    /// The end of the call of the batch, at most [`MAX_DELAY`] later.
    OfBatch,
    /// The end of a call for this check alone.
    OfCall,
}

enum State {
    Waiting(Option<Waker>),
    Done(Option<Result<Decision, TransportError>>),
    Dropped,
}

/// The call of a batch.
struct BatchCall {
    checks: CheckEach,
    /// The indexes of the callers of these checks, in the same order.
    callers: Vec<usize>,
    /// The latest deadline of the callers.
    deadline: Deadline,
    has_one_key: bool,
}

impl CheckBatch {
    pub(super) fn new(
        settings: Arc<Settings>,
        observers: Observers,
        prefix: Arc<str>,
    ) -> Arc<Self> {
        Arc::new(Self { settings, observers, prefix, contents: Mutex::default() })
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        lock(&self.contents)
    }

    /// Adds a check, if there is room for it. `hash` is that of its key.
    pub(super) fn push(
        self: &Arc<Self>,
        request: &LimitRequest<'_>,
        hash: u64,
        deadline: Deadline,
    ) -> Option<Queued> {
        let LimitRequest { settings, key, cost, max_wait, .. } = *request;
        let Contents { keys, index_of, callers } = &mut *self.contents();
        let is_fast = max_wait == 0.0 || reserves_fast(&settings.params);
        let max = if is_fast { MAX_CHECKS } else { MAX_KEYS };
        let known = index_of.find(hash, |index| keys[*index].1 == *key).copied();
        if callers.len() >= max || known.is_none() && keys.len() == MAX_KEYS {
            return None;
        }
        let key = known.unwrap_or_else(|| {
            let index = keys.len();
            keys.push((hash, key.clone().into_owned()));
            index_of.insert_unique(hash, index, |index| keys[*index].0);
            index
        });
        let index = callers.len();
        let (end, state) = (End::Deadline, State::Waiting(None));
        callers.push(Caller { key, cost, max_wait, deadline, end, state });
        Some(Queued { batch: self.clone(), index, is_done: false })
    }

    /// Executes a call for the callers that still wait. `slot` is that of the keys in a cluster;
    /// `is_clustered` is true if the server rejects calls whose keys are in several slots.
    pub(super) async fn execute(
        self: &Arc<Self>,
        client: &Client,
        slot: u16,
        is_clustered: &AtomicBool,
    ) {
        let Some(call) = self.begin() else { return };
        if is_clustered.load(Relaxed) && !call.has_one_key {
            return self.execute_alone(&call.callers, client);
        }
        report_sent(&self.observers, self.settings.name, call.callers.len());
        match execute_each(&call.checks, client, call.deadline).await {
            Ok(reply) => {
                let uncounted = self.complete(&call, &reply);
                self.execute_alone(&uncounted, client);
            }
            Err(error) if error.server_kind() == Some(ServerErrorKind::CrossSlot) => {
                is_clustered.store(true, Relaxed);
                self.execute_alone(&call.callers, client);
            }
            Err(error) => self.fail(&call.callers, client, slot, &error),
        }
    }

    /// Makes the call; `None` if no caller waits.
    fn begin(&self) -> Option<BatchCall> {
        let Contents { keys, callers, .. } = &mut *self.contents();
        let now = Instant::now();
        let waiting = callers.iter().filter(|it| it.is_waiting()).map(|it| it.deadline);
        let deadline = waiting.max_by_key(|deadline| deadline.left_at(now))?;
        let latest = deadline.left_at(now);
        let mut indexes = Vec::with_capacity(callers.len());
        for (index, caller) in callers.iter_mut().enumerate().filter(|(_, it)| it.is_waiting()) {
            if caller.deadline.left_at(now) + MAX_DELAY >= latest {
                caller.end = End::OfBatch;
            }
            indexes.push(index);
        }
        indexes.sort_by_key(|index| callers[*index].key);
        let mut checks = CheckEach::new(self.settings.params, indexes.len());
        let mut of_keys = 0;
        for of_key in indexes.chunk_by(|one, next| callers[*one].key == callers[*next].key) {
            of_keys += 1;
            let name = self.name(&keys[callers[of_key[0]].key].1);
            let of_key = of_key.iter().map(|index| &callers[*index]);
            checks.add(name, of_key.map(|caller| (caller.cost, caller.max_wait)));
        }
        Some(BatchCall { checks, callers: indexes, deadline, has_one_key: of_keys == 1 })
    }

    fn name(&self, key: &Key<'_>) -> String {
        name_of(&self.prefix, &self.settings, key)
    }

    /// Passes the replies to the callers. Returns the callers of checks that were not counted.
    fn complete(&self, call: &BatchCall, reply: &EachReply) -> Vec<usize> {
        let mut uncounted = vec![];
        let mut wakers = Vec::with_capacity(call.callers.len());
        let mut contents = self.contents();
        for (&index, found) in call.callers.iter().zip(&reply.replies) {
            let caller = &mut contents.callers[index];
            match found {
                Some(found) => {
                    let policy = self.settings.policy(caller.cost);
                    wakers.extend(caller.complete(Ok(reply.decision(policy, *found))));
                }
                None => uncounted.push(index),
            }
        }
        drop(contents);
        wakers.into_iter().for_each(Waker::wake);
        uncounted
    }

    /// Executes a call for each of these checks, because one call for all was not possible.
    fn execute_alone(self: &Arc<Self>, callers: &[usize], client: &Client) {
        for &index in callers {
            let call = {
                let Contents { keys, callers, .. } = &mut *self.contents();
                let Caller { key, cost, max_wait, deadline, .. } = callers[index];
                callers[index].end = End::OfCall;
                let name = self.name(&keys[key].1);
                (ScriptCall::check(&self.settings, name, cost, max_wait), deadline)
            };
            let (client, alone) = (client.clone(), Alone { batch: self.clone(), index });
            tokio::spawn(async move {
                let (call, deadline) = call;
                report_sent(&alone.batch.observers, alone.batch.settings.name, 1);
                let result = call.execute(&client, deadline).await;
                alone.batch.complete_one(index, result);
            });
        }
    }

    /// Fails callers, each with an error of its own. The call itself has recorded one failure.
    fn fail(&self, callers: &[usize], client: &Client, slot: u16, error: &TransportError) {
        let mut waiting = vec![];
        {
            let contents = self.contents();
            let callers = callers.iter().map(|index| (*index, &contents.callers[*index]));
            waiting
                .extend(callers.filter(|(_, it)| it.is_waiting()).map(|it| (it.0, it.1.deadline)));
        }
        for (count, (index, deadline)) in waiting.into_iter().enumerate() {
            let mut error = error.clone();
            if count > 0 && !error.is_error_reply() {
                error = client.record_failure(slot, deadline, error);
            }
            self.complete_one(index, Err(error));
        }
    }

    /// Fails the callers whose runtime has ended before the call.
    pub(super) fn abandon(&self) {
        let of_batch = |caller: &Caller| caller.end != End::OfCall;
        for (index, deadline) in self.waiting(of_batch) {
            self.complete_one(index, Err(TransportError::timeout(deadline.within())));
        }
    }

    /// Returns the first deadline at which a caller is to fail, unless its call ends before.
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Deadline> {
        let deadlines = self.waiting(|it| it.end == End::Deadline).into_iter().map(|it| it.1);
        deadlines.min_by_key(|deadline| deadline.left_at(now))
    }

    /// Returns the callers that are to fail now, because their deadlines are over.
    pub(super) fn expired(&self, now: Instant) -> Vec<(usize, Deadline)> {
        self.waiting(|it| it.end == End::Deadline && it.deadline.left_at(now).is_zero())
    }

    fn waiting(&self, filter: impl Fn(&Caller) -> bool) -> Vec<(usize, Deadline)> {
        let contents = self.contents();
        let callers = contents.callers.iter().enumerate();
        let waiting = callers.filter(|(_, caller)| caller.is_waiting() && filter(caller));
        waiting.map(|(index, caller)| (index, caller.deadline)).collect()
    }

    /// Passes its result to a caller, unless the caller has one or is gone.
    pub(super) fn complete_one(&self, index: usize, result: Result<Decision, TransportError>) {
        let waker = self.contents().callers[index].complete(result);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Caller {
    fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// Sets the result, unless the caller has one or is gone. Returns the waker of the caller.
    fn complete(&mut self, result: Result<Decision, TransportError>) -> Option<Waker> {
        let State::Waiting(waker) = &mut self.state else { return None };
        let waker = waker.take();
        self.state = State::Done(Some(result));
        waker
    }
}

/// A check with a call of its own, whose caller fails if the runtime of the call ends.
struct Alone {
    batch: Arc<CheckBatch>,
    index: usize,
}

impl Drop for Alone {
    fn drop(&mut self) {
        let deadline = self.batch.contents().callers[self.index].deadline;
        let error = TransportError::timeout(deadline.within());
        self.batch.complete_one(self.index, Err(error));
    }
}

/// A check in a batch. If it is dropped before the call of the batch, it is not counted.
pub(super) struct Queued {
    batch: Arc<CheckBatch>,
    index: usize,
    is_done: bool,
}

impl Future for Queued {
    type Output = Result<Decision, TransportError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut contents = this.batch.contents();
        match &mut contents.callers[this.index].state {
            State::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => Poll::Pending,
            State::Waiting(waker) => {
                let old = waker.replace(cx.waker().clone());
                drop(contents); // the drop of a waker can drop other checks of the batch
                drop(old);
                Poll::Pending
            }
            State::Done(result) => {
                this.is_done = true;
                Poll::Ready(result.take().expect("polled after completion"))
            }
            State::Dropped => unreachable!("a dropped future is not polled"),
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if !self.is_done {
            let mut contents = self.batch.contents();
            let old = mem::replace(&mut contents.callers[self.index].state, State::Dropped);
            drop(contents);
            drop(old);
        }
    }
}
