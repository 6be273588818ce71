//! The front: checks of one limiter that arrive while calls are under way are collected, and go to
//! Redis together. An idle limiter sends a check immediately, in a call of its own. It knows
//! neither scripts nor connections.

use std::{
    collections::VecDeque,
    hash::BuildHasher,
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::{HashMap, HashSet, hash_map::Entry};
use redis::ServerErrorKind;
use tokio::{
    runtime::{self, Handle},
    time::sleep,
};

use super::{
    call::{Check, execute_each},
    transport::{Client, Deadline, TransportError},
};
use crate::{decision::Decision, store::Settings, sync::lock};

/// The number of calls of a lane that are under way at a time.
const MAX_CALLS: usize = 4;
/// The number of keys in a call, which must not block Redis for long.
const MAX_KEYS: usize = 64;
/// The number of checks in a call, if checks of the same key are decided together.
const MAX_CHECKS: usize = 512;
/// The delay up to which a caller gets its error from the call and not at its own deadline.
const MAX_DELAY: Duration = Duration::from_millis(1);

/// The lanes of a store and its clones.
#[derive(Clone)]
pub(super) struct Front(Arc<Shared>);

struct Shared {
    client: Client,
    lanes: Mutex<Lanes>,
    hasher: RandomState,
    /// True if the server rejects calls whose keys are in several slots.
    is_clustered: AtomicBool,
}

type Lanes = HashMap<LaneId, Lane, RandomState>;

/// A lane has the checks of one limiter in one runtime, so that a blocked runtime delays no checks
/// in others.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LaneId {
    runtime: runtime::Id,
    /// The address of the settings.
    limiter: usize,
}

struct Lane {
    runtime: Handle,
    /// Kept so that no other limiter has their address.
    _settings: Arc<Settings>,
    /// The number of calls that are under way or scheduled.
    calls: usize,
    /// True if a call is scheduled, which takes checks from the queue when it begins.
    is_scheduled: bool,
    /// True while a task watches the deadlines.
    is_watched: bool,
    queue: VecDeque<Arc<Caller>>,
    /// The callers of calls under way, and some that have their results.
    sent: VecDeque<Arc<Caller>>,
}

/// The caller of a check that does not have a call of its own.
struct Caller {
    check: Check,
    deadline: Deadline,
    /// True if the call that contains the check ends at the deadline.
    ends_with_call: AtomicBool,
    state: Mutex<State>,
}

enum State {
    Waiting(Option<Waker>),
    Done(Option<Result<Decision, TransportError>>),
    Dropped,
}

impl Front {
    pub(super) fn new(client: Client) -> Self {
        let (lanes, hasher) = (Mutex::default(), RandomState::default());
        Self(Arc::new(Shared { client, lanes, hasher, is_clustered: AtomicBool::new(false) }))
    }

    /// Decides about a check: in a call of its own, or together with others. Checks of a limiter
    /// are decided in the order of their arrival.
    pub(super) async fn check(
        &self,
        settings: Arc<Settings>,
        check: Check,
        deadline: Deadline,
    ) -> Result<Decision, TransportError> {
        let client = &self.0.client;
        let runtime = Handle::try_current().ok().filter(|_| client.is_available_for(deadline));
        let Some(runtime) = runtime else { return check.execute(client, deadline).await };
        match self.enter(runtime, settings, check, deadline) {
            Ok((_turn, check)) => check.execute(client, deadline).await,
            Err(queued) => queued.await,
        }
    }

    /// Returns the turn of a call for this check alone, or its place in the queue.
    fn enter(
        &self,
        runtime: Handle,
        settings: Arc<Settings>,
        check: Check,
        deadline: Deadline,
    ) -> Result<(Turn, Check), Queued> {
        let id = LaneId { runtime: runtime.id(), limiter: Arc::as_ptr(&settings).addr() };
        let mut lanes = lock(&self.0.lanes);
        let lane = lanes.entry(id).or_insert_with(|| Lane::new(runtime.clone(), settings));
        if lane.calls == 0 && lane.queue.is_empty() {
            lane.calls = 1;
            return Ok((Turn { front: self.clone(), id, is_scheduled: false }, check));
        }
        let caller = Arc::new(Caller::new(check, deadline));
        lane.queue.push_back(caller.clone());
        let (schedules, watches) = (lane.schedules(), !mem::replace(&mut lane.is_watched, true));
        drop(lanes);
        if schedules {
            self.schedule(id, &runtime);
        }
        if watches {
            runtime.spawn(Watch { front: self.clone(), id, is_over: false }.run());
        }
        Err(Queued(caller))
    }

    /// Schedules a call, which collects the checks that other tasks send before it begins.
    fn schedule(&self, id: LaneId, runtime: &Handle) {
        let turn = Turn { front: self.clone(), id, is_scheduled: true };
        runtime.spawn(turn.call());
    }

    /// Takes the checks of a call out of the queue.
    fn take(&self, id: LaneId) -> Call {
        let mut lanes = lock(&self.0.lanes);
        let lane = lanes.get_mut(&id).expect("a lane with a call exists");
        lane.is_scheduled = false;
        let callers = lane.take(&self.0.hasher);
        lane.sent.extend(callers.iter().cloned());
        let next = lane.schedules().then(|| lane.runtime.clone());
        drop(lanes);
        if let Some(runtime) = next {
            self.schedule(id, &runtime);
        }
        Call(callers)
    }
}

/// Fails callers at their deadlines. Most get their results before.
struct Watch {
    front: Front,
    id: LaneId,
    is_over: bool,
}

impl Watch {
    async fn run(mut self) {
        while let Some(next) = self.next_deadline() {
            sleep(next.left()).await;
            sleep(next.grace()).await;
            for (caller, is_sent) in self.expired() {
                let error = TransportError::timeout(caller.deadline.within());
                let error = if is_sent { error } else { error.unsent() };
                let error = self.front.0.client.record_failure(caller.deadline, error);
                caller.complete(Err(error));
            }
        }
    }

    /// Returns the first deadline of the callers that do not end with their call; `None` ends the
    /// watch.
    fn next_deadline(&mut self) -> Option<Deadline> {
        let front = self.front.clone();
        let lanes = &mut *lock(&front.0.lanes);
        let lane = lanes.get(&self.id)?;
        let next = lane.watched().map(|(caller, _)| caller.deadline);
        let next = next.min_by_key(|deadline| deadline.left());
        if next.is_none() {
            self.end(lanes);
        }
        next
    }

    /// Returns the callers whose deadline is over, and whether their check was sent.
    fn expired(&self) -> Vec<(Arc<Caller>, bool)> {
        let lanes = &*lock(&self.front.0.lanes);
        let Some(lane) = lanes.get(&self.id) else { return vec![] };
        let expired = lane.watched().filter(|(caller, _)| caller.deadline.is_over());
        expired.map(|(caller, is_sent)| (caller.clone(), is_sent)).collect()
    }

    fn end(&mut self, lanes: &mut Lanes) {
        self.is_over = true;
        if let Entry::Occupied(mut lane) = lanes.entry(self.id) {
            lane.get_mut().is_watched = false;
            if lane.get().is_idle() {
                lane.remove();
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.is_over {
            let front = self.front.clone();
            self.end(&mut lock(&front.0.lanes));
        }
    }
}

impl Lane {
    fn new(runtime: Handle, settings: Arc<Settings>) -> Self {
        Self {
            runtime,
            _settings: settings,
            calls: 0,
            is_scheduled: false,
            is_watched: false,
            queue: VecDeque::new(),
            sent: VecDeque::new(),
        }
    }

    fn is_idle(&self) -> bool {
        self.calls == 0 && !self.is_watched
    }

    /// Returns true if a call is to be scheduled now.
    fn schedules(&mut self) -> bool {
        let schedules = !self.is_scheduled && self.calls < MAX_CALLS && !self.queue.is_empty();
        if schedules {
            self.is_scheduled = true;
            self.calls += 1;
        }
        schedules
    }

    /// Takes the callers of a call out of the queue.
    fn take(&mut self, hasher: &RandomState) -> Vec<Arc<Caller>> {
        let mut callers = Vec::with_capacity(self.queue.len().min(MAX_KEYS));
        let mut keys = HashSet::with_hasher(RandomState::default());
        while let Some(caller) = self.queue.front() {
            let max = if caller.check.shares_its_key() { MAX_CHECKS } else { MAX_KEYS };
            keys.insert(hasher.hash_one(caller.check.key()));
            if keys.len() > MAX_KEYS || callers.len() == max {
                break;
            }
            callers.extend(self.queue.pop_front().filter(|caller| caller.is_waiting()));
        }
        callers
    }

    /// Forgets callers that have their results.
    fn forget_done(&mut self) {
        while self.sent.front().is_some_and(|caller| !caller.is_waiting()) {
            self.sent.pop_front();
        }
        // A call can hang while calls over another connection end.
        if self.sent.len() > 2 * MAX_CALLS * MAX_CHECKS {
            self.sent.retain(|caller| caller.is_waiting());
        }
    }

    /// Returns the callers that do not end with a call, and whether their check was sent.
    fn watched(&self) -> impl Iterator<Item = (&Arc<Caller>, bool)> {
        let sent = self.sent.iter().filter(|caller| !caller.ends_with_call.load(Relaxed));
        let sent = sent.map(|caller| (caller, true));
        let all = sent.chain(self.queue.iter().map(|caller| (caller, false)));
        all.filter(|(caller, _)| caller.is_waiting())
    }
}

/// One of the calls of a lane. Its end lets the next one begin.
struct Turn {
    front: Front,
    id: LaneId,
    /// True if the call has not begun.
    is_scheduled: bool,
}

impl Turn {
    /// Executes a call for the checks in the queue.
    async fn call(mut self) {
        // So that nothing delays the call once it has taken its checks: the next one could overtake
        // it.
        self.front.0.client.ready().await;
        self.is_scheduled = false;
        let call = self.front.take(self.id);
        call.execute(&self.front).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut lanes = lock(&self.front.0.lanes);
        let Entry::Occupied(mut entry) = lanes.entry(self.id) else { return };
        let lane = entry.get_mut();
        lane.calls -= 1;
        lane.forget_done();
        let mut abandoned = Call(vec![]);
        if self.is_scheduled {
            lane.is_scheduled = false; // the runtime has ended
            abandoned.0.extend(lane.queue.drain(..));
        }
        let next = lane.schedules().then(|| lane.runtime.clone());
        if lane.is_idle() {
            entry.remove();
        }
        drop(lanes);
        if let Some(runtime) = next {
            self.front.schedule(self.id, &runtime);
        }
    }
}

/// The callers of a call.
struct Call(Vec<Arc<Caller>>);

impl Call {
    async fn execute(self, front: &Front) {
        let client = &front.0.client;
        let latest = self.0.iter().map(|caller| caller.deadline).max_by_key(|it| it.left());
        let Some(deadline) = latest else { return };
        for caller in &self.0 {
            let ends = caller.deadline.left() + MAX_DELAY >= deadline.left();
            caller.ends_with_call.store(ends, Relaxed);
        }
        if front.0.is_clustered.load(Relaxed) && !self.has_one_key() {
            return self.execute_alone(client).await;
        }
        match execute_each(self.0.iter().map(|caller| &caller.check), client, deadline).await {
            Ok(decisions) => self.complete(decisions, client).await,
            Err(error) if error.server_kind() == Some(ServerErrorKind::CrossSlot) => {
                front.0.is_clustered.store(true, Relaxed);
                self.execute_alone(client).await;
            }
            Err(error) => self.fail(client, &error),
        }
    }

    fn has_one_key(&self) -> bool {
        self.0.iter().all(|caller| caller.check.key() == self.0[0].check.key())
    }

    async fn complete(mut self, decisions: Vec<Option<Decision>>, client: &Client) {
        let mut alone = Call(vec![]);
        for (caller, decision) in self.0.drain(..).zip(decisions) {
            match decision {
                Some(decision) => caller.complete(Ok(decision)),
                None => alone.0.push(caller),
            }
        }
        alone.execute_alone(client).await;
    }

    /// Executes a call for each check, because one call for all was not possible.
    async fn execute_alone(mut self, client: &Client) {
        for caller in self.0.drain(..) {
            let (client, caller) = (client.clone(), Call(vec![caller]));
            tokio::spawn(async move {
                let caller = &caller.0[0];
                caller.ends_with_call.store(true, Relaxed);
                caller.complete(caller.check.execute(&client, caller.deadline).await);
            });
        }
    }

    /// Fails the callers, each with an error of its own. The call itself has recorded one failure.
    fn fail(&self, client: &Client, error: &TransportError) {
        let waiting = self.0.iter().filter(|caller| caller.is_waiting());
        for (index, caller) in waiting.enumerate() {
            let mut error = error.clone();
            if index > 0 && !error.is_error_reply() {
                error = client.record_failure(caller.deadline, error);
            }
            caller.complete(Err(error));
        }
    }
}

impl Drop for Call {
    /// Fails the callers whose runtime has ended before the call.
    fn drop(&mut self) {
        for caller in &self.0 {
            caller.complete(Err(TransportError::timeout(caller.deadline.within())));
        }
    }
}

impl Caller {
    fn new(check: Check, deadline: Deadline) -> Self {
        let state = Mutex::new(State::Waiting(None));
        Self { check, deadline, ends_with_call: AtomicBool::new(false), state }
    }

    fn is_waiting(&self) -> bool {
        matches!(*lock(&self.state), State::Waiting(_))
    }

    /// Passes the result to the caller, unless the caller has one or is gone.
    fn complete(&self, result: Result<Decision, TransportError>) {
        let mut state = lock(&self.state);
        if let State::Waiting(waker) = &mut *state {
            let waker = waker.take();
            *state = State::Done(Some(result));
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// A check in the queue or in a call. If it is dropped before it is sent, it is not counted.
struct Queued(Arc<Caller>);

impl Future for Queued {
    type Output = Result<Decision, TransportError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *lock(&self.0.state) {
            State::Waiting(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    None => *waker = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            State::Done(result) => Poll::Ready(result.take().expect("polled after completion")),
            State::Dropped => unreachable!("a dropped future is not polled"),
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        *lock(&self.0.state) = State::Dropped;
    }
}
