//! A batch: checks of one limiter that go to Redis in one call, or holds, and the callers that wait
//! for their decisions. `front.rs` decides when a batch is sent.

use std::{
    mem,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, atomic::Ordering::Relaxed},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use hashbrown::HashTable;
use redis::ServerErrorKind;
use smallvec::SmallVec;
use tokio::task::JoinSet;
use tower_ratelimit_engine::script::CheckEach;

use super::{
    backend::Backend,
    call::{EachReply, age_of, execute_each},
    connections::{Claim, Deadline, TransportError},
    holds::first_lifetime,
    late::release_late,
};
use crate::{
    algorithm::Action,
    decision::Outcome,
    keys::Key,
    observe::{Event, Observers},
    store::{LimitRequest, Settings, Task},
    sync::{POLLED, lock, wake_all},
};

/// The number of keys in a batch, which must not block Redis for long: 64 keys take 0.12 to 0.18 ms
/// of it, and 255 keys 0.45 to 0.75 ms, without more decisions per second.
const MAX_KEYS: usize = 64;
/// The number of checks in a batch, if those of the same key take little more time than one: equal
/// checks of a key in a row are one division in the script.
const MAX_CHECKS: usize = 512;
/// The delay up to which a caller gets its error from the call and not at its own deadline. The
/// checks of a batch arrive within about this time, so most of them need no timer.
const MAX_DELAY: Duration = Duration::from_millis(1);

pub(super) struct CheckBatch {
    settings: Arc<Settings>,
    /// The lifetime of its holds; `None` for checks.
    hold: Option<Duration>,
    /// Those of the first check.
    observers: Observers,
    backend: Arc<Backend>,
    /// In a cluster, the slot of the keys; otherwise 0.
    slot: u16,
    contents: Mutex<Contents>,
}

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
    cost: u64,
    max_wait: u64,
    deadline: Deadline,
    end: End,
    /// The claim of its last call, if one was made for it.
    claim: Option<Arc<Claim>>,
    state: CallerState,
}

/// The event at which a caller gets an error, if there is no reply.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    /// Its own deadline.
    Deadline,
    /// The end of the call of the batch, at most [`MAX_DELAY`] later.
    OfBatch,
    /// One that has passed: it gets its error now, and is in no further call.
    Past,
}

enum CallerState {
    Waiting(Option<Waker>),
    Done(Answer),
    /// The caller has taken the answer, or was dropped.
    Gone,
}

type Answer = Result<Outcome, TransportError>;

/// The call of a batch.
pub(super) struct BatchCall {
    checks: CheckEach,
    /// The indexes of the callers of these checks, in the same order.
    callers: Vec<usize>,
    /// The latest deadline of the callers.
    deadline: Deadline,
    /// Given up when the first caller fails before the call is written.
    claim: Arc<Claim>,
}

/// The number of keys and checks in a batch.
#[derive(Clone, Copy, Default)]
pub(super) struct BatchSize {
    keys: usize,
    checks: usize,
}

impl CheckBatch {
    /// Makes a batch of a check, with room for those that are expected: to grow check by check
    /// moves each of them again, which is 3 % of the instructions of a check. `hash` is the hash
    /// of the key.
    pub(super) fn of(
        backend: &Arc<Backend>,
        slot: u16,
        BatchSize { keys, checks }: BatchSize,
        request: &LimitRequest<'_>,
        hash: u64,
        deadline: Deadline,
    ) -> (Arc<Self>, Queued) {
        let (settings, observers) = (request.settings.clone(), request.observers.clone());
        let (hold, backend) = (request.hold, backend.clone());
        let contents = Mutex::new(Contents {
            keys: Vec::with_capacity(keys),
            index_of: HashTable::with_capacity(keys),
            callers: Vec::with_capacity(checks),
        });
        let batch = Arc::new(Self { settings, hold, observers, backend, slot, contents });
        let queued = batch.push(request, hash, deadline).expect("an empty batch has room");
        (batch, queued)
    }

    pub(super) fn size(&self) -> BatchSize {
        let Contents { keys, callers, .. } = &*self.contents();
        BatchSize { keys: keys.len(), checks: callers.len() }
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
        let Contents { keys, index_of, callers, .. } = &mut *self.contents();
        // The fast path of the script makes a request wait only if the algorithm does that always.
        let is_fast = max_wait == 0 || settings.params.shapes();
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
        let (end, state) = (End::Deadline, CallerState::Waiting(None));
        callers.push(Caller { key, cost, max_wait, deadline, end, claim: None, state });
        Some(Queued { batch: self.clone(), index, own_call: None })
    }

    /// Executes the call of a batch outside of a lane.
    pub(super) async fn execute_alone(self: Arc<Self>) {
        while let Some(call) = self.begin(false)
            && self.execute(&call, &|| ()).await
        {}
    }

    /// Executes a call. `on_handover` is called when no later call can overtake this one. Returns
    /// true if it was not sent in time for some of its callers, and others have time left: they
    /// need another call.
    pub(super) async fn execute(
        self: &Arc<Self>,
        call: &BatchCall,
        on_handover: &(dyn Fn() + Sync),
    ) -> bool {
        let is_clustered = &self.backend.is_clustered;
        // `Relaxed`: a call that misses the change gets CROSSSLOT itself, and nothing has run.
        if is_clustered.load(Relaxed) && call.checks.keys() > 1 {
            self.execute_by_key(call).await;
            return false;
        }
        match self.send(call, on_handover).await {
            Ok(reply) => self.complete(call, &reply),
            Err(error) if error.server_kind() == Some(ServerErrorKind::CrossSlot) => {
                is_clustered.store(true, Relaxed);
                self.execute_by_key(call).await;
            }
            Err(error) if error.is_timeout() && !error.may_have_run() => {
                // Nothing ran, so a second call cannot spend twice (law 2).
                self.expire();
                return true;
            }
            Err(error) => self.fail(call, &error),
        }
        false
    }

    /// Sends a call, and reports it.
    async fn send(
        &self,
        BatchCall { checks, callers, deadline, claim, .. }: &BatchCall,
        on_handover: &(dyn Fn() + Sync),
    ) -> Result<EachReply, TransportError> {
        let client = &self.backend.client;
        // An open circuit sends nothing.
        if client.node_of(self.slot).is_available_for(deadline.within()) {
            let (limiter, checks) = (self.settings.name, callers.len());
            self.observers.report(&Event::BatchSent { limiter, checks });
        }
        execute_each(checks, client, *deadline, claim, on_handover).await
    }

    /// Returns whether the units have to be returned if the caller does not take the answer.
    fn is_returned(&self, caller: &Caller) -> bool {
        self.hold.is_some() || caller.max_wait > 0
    }

    /// Returns whether a check can get a reservation, or holds units.
    pub(super) fn may_wait(&self) -> bool {
        self.contents().callers.iter().any(|it| it.is_waiting() && self.is_returned(it))
    }

    /// Makes a call for the callers that wait; `None` if there are none. `may_linger` is true if
    /// its reply can be awaited after the deadline.
    pub(super) fn begin(&self, may_linger: bool) -> Option<BatchCall> {
        let mut contents = self.contents();
        let callers = contents.callers.iter().enumerate();
        let waiting: Vec<_> = callers.filter(|it| it.1.is_waiting()).map(|it| it.0).collect();
        self.call(&mut contents, waiting, may_linger)
    }

    /// Makes a call for some callers.
    fn call(
        &self,
        Contents { keys, callers, .. }: &mut Contents,
        mut indexes: Vec<usize>,
        may_linger: bool,
    ) -> Option<BatchCall> {
        let mut last = callers[*indexes.first()?].deadline;
        let (claim, mut may_wait) = (Arc::<Claim>::default(), false);
        for &index in &indexes {
            let caller = &mut callers[index];
            may_wait |= self.is_returned(caller);
            caller.claim = Some(claim.clone());
            if caller.deadline.end() > last.end() {
                last = caller.deadline;
            }
        }
        let lingers = may_wait && may_linger;
        let ends_with_call = last.end() - MAX_DELAY;
        for &index in &indexes {
            // A call that lingers ends up to 30 s late: too late for any caller.
            let is_in_time = !lingers && callers[index].deadline.end() >= ends_with_call;
            callers[index].end = if is_in_time { End::OfBatch } else { End::Deadline };
        }
        // Stable: the checks of a key stay in the order of their arrival.
        indexes.sort_by_key(|index| callers[*index].key);
        let lifetime = self.hold.map(first_lifetime);
        let mut checks = CheckEach::new(self.settings.params, lifetime, indexes.len());
        for of_key in indexes.chunk_by(|one, next| callers[*one].key == callers[*next].key) {
            let name = self.backend.key(&self.settings, &keys[callers[of_key[0]].key].1);
            let of_key = of_key.iter().map(|index| &callers[*index]);
            checks.add(name, of_key.map(|caller| (caller.cost, caller.max_wait)));
        }
        Some(BatchCall { checks, callers: indexes, deadline: last.shared(lingers), claim })
    }

    /// Passes the replies to the callers.
    fn complete(&self, call: &BatchCall, reply: &EachReply) {
        for (check, difference) in &reply.differences {
            let (monitor, limiter) = (&self.backend.monitor, self.settings.name);
            monitor.differs(&self.observers, limiter, call.checks.key(*check), difference.admitted);
        }
        let mut wakers: SmallVec<[_; 1]> = SmallVec::with_capacity(call.callers.len());
        let mut late = vec![];
        let mut contents = self.contents();
        for (&index, found) in call.callers.iter().zip(&reply.replies) {
            let caller = &mut contents.callers[index];
            let policy = self.settings.policy(caller.cost);
            let is_returned = self.is_returned(caller);
            let result = match found {
                Ok(found) => {
                    Ok(Outcome::new(policy, *found, Action::Check, age_of(found, reply.age)))
                }
                Err(error) => {
                    let error = TransportError::of_redis(error.clone());
                    Err(self.backend.client.node_of(self.slot).named(error))
                }
            };
            match caller.complete(result) {
                Ok(waker) => wakers.extend(waker),
                Err(Ok(outcome)) if is_returned => late.push((index, outcome)),
                Err(_) => {} // counted, as documented
            }
        }
        drop(contents); // a waker can run foreign code, and the releases lock the contents again
        wake_all(wakers);
        late.into_iter().for_each(|(index, outcome)| self.release_refused(index, &outcome));
    }

    /// Releases what a check has spent, because its caller has gone.
    fn release_refused(&self, index: usize, outcome: &Outcome) {
        let (key, cost) = {
            let Contents { keys, callers, .. } = &*self.contents();
            let Caller { key, cost, .. } = callers[index];
            (keys[key].1.clone(), cost)
        };
        let Self { settings, observers, hold, .. } = self;
        let limit = LimitRequest { settings, observers, key: &key, cost, max_wait: 0, hold: *hold };
        release_late(&self.backend, &limit, &outcome.receipts.get(0));
    }

    /// Executes a call for each key, because one call for all is not possible.
    async fn execute_by_key(self: &Arc<Self>, call: &BatchCall) {
        let mut tasks = JoinSet::new();
        for call in self.split(call) {
            let batch = self.clone();
            tasks.spawn(async move {
                match batch.send(&call, &|| ()).await {
                    Ok(reply) => batch.complete(&call, &reply),
                    Err(error) => batch.fail(&call, &error),
                }
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    /// Returns a call for each key of a call.
    fn split(&self, call: &BatchCall) -> Vec<BatchCall> {
        let mut contents = self.contents();
        let callers = &contents.callers;
        let is_waiting = |index: &&usize| callers[**index].is_waiting();
        let waiting: Vec<_> = call.callers.iter().filter(is_waiting).copied().collect();
        let of_keys = waiting.chunk_by(|one, next| callers[*one].key == callers[*next].key);
        let of_keys: Vec<_> = of_keys.map(<[_]>::to_vec).collect();
        let lingers = call.deadline.lingers();
        of_keys.into_iter().filter_map(|it| self.call(&mut contents, it, lingers)).collect()
    }

    /// Fails the callers of a call, each with an error of its own. A timeout is recorded for each
    /// of them; of another error the call itself has recorded one.
    fn fail(&self, call: &BatchCall, error: &TransportError) {
        let (node, mut is_first) = (|| self.backend.client.node_of(self.slot), true);
        let is_of_call =
            |it: &Caller| it.claim.as_ref().is_some_and(|it| Arc::ptr_eq(it, &call.claim));
        self.fail_those(is_of_call, |deadline, claim| match error.clone() {
            error if error.is_timeout() => node().record_timeout(deadline, claim),
            error if mem::take(&mut is_first) || error.is_error_reply() => error,
            error => node().record_failure(deadline, error),
        });
    }

    /// Fails the callers whose runtime has ended before the call.
    pub(super) fn abandon(&self) {
        self.fail_those(|_| true, |deadline, _| TransportError::timeout(deadline.within()));
    }

    /// The deadline of the check that came first.
    pub(super) fn first_deadline(&self) -> Deadline {
        self.contents().callers[0].deadline
    }

    /// Fails callers at their own deadlines until the call has ended. Returns nothing if no caller
    /// waits for it any more.
    pub(super) async fn expire_until<T>(
        &self,
        mut call: impl Future<Output = T> + Unpin,
    ) -> Option<T> {
        loop {
            let (end, deadline) = self.next_end()?;
            if end == End::OfBatch {
                return Some(call.await);
            }
            let ended = deadline.wait_for(&mut call).await;
            if ended.is_some() {
                return ended;
            }
            self.expire();
        }
    }

    /// Returns how the first caller is to fail, if there is no reply.
    fn next_end(&self) -> Option<(End, Deadline)> {
        let contents = self.contents();
        let waiting = contents.callers.iter().filter(|it| it.is_waiting());
        let ends = waiting.map(|it| (it.end, it.deadline));
        ends.min_by_key(|(end, deadline)| (*end, deadline.end()))
    }

    /// Fails the callers whose deadlines are over.
    fn expire(&self) {
        let is_over = |it: &Caller| it.deadline.is_too_late();
        let node = || self.backend.client.node_of(self.slot);
        self.fail_those(is_over, |deadline, claim| node().record_timeout(deadline, claim));
    }

    /// Fails callers, unless they have results or are gone, and gives up their calls, so that their
    /// checks spend nothing later.
    fn fail_those(
        &self,
        filter: impl Fn(&Caller) -> bool,
        mut error: impl FnMut(Deadline, Option<&Claim>) -> TransportError,
    ) {
        let give_up = |(index, caller): (usize, &mut Caller)| {
            caller.end = End::Past;
            let claim = caller.claim.clone();
            claim.iter().for_each(|claim| _ = claim.give_up());
            (index, caller.deadline, claim)
        };
        let failing: Vec<_> = {
            let mut contents = self.contents();
            let callers = contents.callers.iter_mut().enumerate();
            callers.filter(|(_, it)| it.is_waiting() && filter(it)).map(give_up).collect()
        };
        let failing = failing.into_iter();
        let failures: Vec<_> =
            failing.map(|(index, end, claim)| (index, error(end, claim.as_deref()))).collect();
        let mut contents = self.contents();
        let mut wakers = Vec::with_capacity(failures.len());
        for (index, error) in failures {
            wakers.extend(contents.callers[index].complete(Err(error)).ok().flatten());
        }
        drop(contents); // a waker can run foreign code
        wake_all(wakers);
    }
}

impl Caller {
    fn is_waiting(&self) -> bool {
        matches!(self.state, CallerState::Waiting(_)) && self.end != End::Past
    }

    /// Sets the result, and returns the waker. If the caller has a result or is gone, returns this
    /// one.
    fn complete(&mut self, result: Answer) -> Result<Option<Waker>, Answer> {
        let CallerState::Waiting(waker) = &mut self.state else { return Err(result) };
        let waker = waker.take();
        self.state = CallerState::Done(result);
        Ok(waker)
    }
}

/// A check in a batch. If it is dropped before the call of the batch, it is not counted; if it may
/// wait and is dropped later, what it has spent is released.
pub(super) struct Queued {
    batch: Arc<CheckBatch>,
    index: usize,
    /// The call of the batch, if the caller executes it.
    own_call: Option<Task>,
}

impl Queued {
    /// Returns whether the batch has no other checks now.
    pub(super) fn is_alone(&self) -> bool {
        self.batch.contents().callers.len() == 1
    }

    /// Lets the caller execute the call of the batch, which has no other checks.
    pub(super) fn executed_by_caller(mut self, call: Task) -> Self {
        self.own_call = Some(call);
        self
    }
}

impl Future for Queued {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(call) = &mut this.own_call {
            ready!(call.as_mut().poll(cx));
            this.own_call = None;
        }
        let mut contents = this.batch.contents();
        let state = &mut contents.callers[this.index].state;
        if let CallerState::Waiting(waker) = state {
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                let old = waker.replace(cx.waker().clone());
                drop(contents); // the drop of a waker can drop other checks of the batch
                drop(old);
            }
            return Poll::Pending;
        }
        match mem::replace(state, CallerState::Gone) {
            CallerState::Done(answer) => Poll::Ready(answer),
            _ => panic!("{POLLED}"),
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let mut contents = self.batch.contents();
        let caller = &mut contents.callers[self.index];
        let is_returned = self.batch.is_returned(caller);
        let old = mem::replace(&mut caller.state, CallerState::Gone);
        drop(contents);
        if let (true, CallerState::Done(Ok(outcome))) = (is_returned, &old) {
            self.batch.release_refused(self.index, outcome);
        }
    }
}
