//! The front: checks, or holds, of one limiter that arrive while calls are under way are collected,
//! and go to Redis together. An idle limiter sends a check immediately, in a call of its own. In a
//! cluster, only checks of the same key are collected. It knows neither scripts nor connections.
//!
//! Checks of a key are decided in the order of their arrival: they take one connection, and a call
//! begins only when the one before it has its place in the line of that connection.

use std::{
    collections::VecDeque,
    hash::BuildHasher,
    mem,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::{HashMap, hash_map::Entry};
use tokio::runtime::{self, Handle};

use super::{
    backend::Backend,
    batch::{BatchSize, CheckBatch, Queued},
    holds::first_lifetime,
    transport::Deadline,
};
use crate::{
    store::{LimitRequest, Settings},
    sync::lock,
};

/// The number of calls of a lane that are under way at a time.
///
/// Measured with 256 checks in flight: one call at a time doubles the latency of a Redis that is
/// 0.5 ms away (p50 of 16 checks: 1,527 us, with four 728 us, with 32 722 us), because checks wait
/// for the call before. With 32, and two threads, calls go with one check each: one hot key has
/// 0.47 M decisions per second, with four 1.33 M.
const MAX_CALLS: usize = 4;
/// The same while batches are full: the connection has room for more calls, and each call has as
/// many keys as it can. With four, a Redis that is 1 ms away would decide about 256 keys per
/// millisecond at most.
const MAX_FULL_CALLS: usize = 64;

/// The lanes of a store and its clones.
#[derive(Clone)]
pub(super) struct Front(Arc<FrontInner>);

struct FrontInner {
    backend: Arc<Backend>,
    lanes: Mutex<Lanes>,
    hasher: RandomState,
}

type Lanes = HashMap<LaneId, Lane, RandomState>;

/// A lane has the checks of one limiter in one runtime, so that a blocked runtime delays no checks
/// in others.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LaneId {
    runtime: runtime::Id,
    /// The address of the settings.
    limiter: usize,
    /// In a cluster, the hash of the only key; otherwise 0.
    key: u64,
    /// In a cluster, the slot of that key; otherwise 0.
    slot: u16,
    /// The connection of its keys.
    channel: usize,
    /// The lifetime of its holds; `None` for checks.
    hold: Option<Duration>,
}

struct Lane {
    runtime: Handle,
    /// Kept so that no other limiter has their address.
    settings: Arc<Settings>,
    /// The number of calls that are under way or scheduled.
    calls: usize,
    /// True while a call is scheduled, which takes the first batch when it begins, or has begun and
    /// can be overtaken by a later one.
    is_starting: bool,
    /// True while a task watches the deadlines.
    is_watched: bool,
    /// Checks are added to the last batch.
    queue: VecDeque<Arc<CheckBatch>>,
    /// The batches of the calls under way.
    sent: Vec<Arc<CheckBatch>>,
    /// The size of the batch of the last call.
    last_size: BatchSize,
}

/// How a check is decided.
pub(super) enum Entrance {
    /// By a call of its own, during which the turn is kept.
    Alone(Option<Turn>),
    /// Together with others.
    Queued(Queued),
}

impl Front {
    pub(super) fn new(backend: Arc<Backend>) -> Self {
        let (lanes, hasher) = (Mutex::default(), RandomState::default());
        Self(Arc::new(FrontInner { backend, lanes, hasher }))
    }

    pub(super) fn backend(&self) -> &Arc<Backend> {
        &self.0.backend
    }

    /// Returns the place of a check. Checks of a key are decided in the order of their arrival.
    pub(super) fn enter(&self, request: &LimitRequest<'_>, deadline: Deadline) -> Entrance {
        let FrontInner { backend, hasher, .. } = &*self.0;
        let client = &backend.client;
        // Outside of a runtime nothing can be scheduled: the caller polls its call itself.
        let Ok(runtime) = Handle::try_current() else { return Entrance::Alone(None) };
        let hash = hasher.hash_one(request.key.as_bytes());
        let id = self.lane_of(runtime.id(), hash, request);
        // It fails fast, and must not wait in a queue behind calls that time out.
        if !client.is_available_for(id.slot, deadline) {
            return Entrance::Alone(None);
        }
        let new_lane = || Lane::new(runtime.clone(), request.settings.clone());
        let mut lanes = lock(&self.0.lanes);
        let mut lane = lanes.entry(id).or_insert_with(new_lane);
        // A call for a request that may wait outlives its caller. Under load, no check asks for the
        // connection, which takes locks and the time.
        if !request.is_returned() && lane.is_free() {
            drop(lanes); // the connection has locks of its own
            let is_ready = client.is_ready(id.slot, id.channel);
            lanes = lock(&self.0.lanes);
            lane = lanes.entry(id).or_insert_with(new_lane);
            if is_ready && lane.is_free() {
                (lane.calls, lane.is_starting) = (1, true);
                return Entrance::Alone(Some(Turn::new(self.clone(), id, false)));
            }
        }
        let queued = lane.push(request, hash, backend, id.slot, deadline);
        let schedules = lane.schedules();
        let watches = !mem::replace(&mut lane.is_watched, true);
        let runtime = (schedules || watches).then(|| lane.runtime.clone());
        drop(lanes); // a runtime that has ended drops the task in `spawn`, which takes this lock
        if let Some(runtime) = runtime {
            if schedules {
                self.schedule(id, &runtime);
            }
            if watches {
                runtime.spawn(Watch { front: self.clone(), id, is_over: false }.run());
            }
        }
        Entrance::Queued(queued)
    }

    fn lane_of(&self, runtime: runtime::Id, hash: u64, request: &LimitRequest<'_>) -> LaneId {
        let backend = self.backend();
        let client = &backend.client;
        let limiter = Arc::as_ptr(request.settings).addr();
        let hold = request.hold;
        let mut id = LaneId { runtime, limiter, key: 0, slot: 0, channel: 0, hold };
        let is_clustered = backend.is_clustered.load(Relaxed);
        if is_clustered || client.has_several_connections() {
            let name = backend.key(request.settings, request.key);
            id.slot = client.slot_of(&name);
            id.channel = client.channel_of(id.slot, &name);
            id.key = if is_clustered { hash } else { 0 };
        }
        id
    }

    /// Schedules a call, which collects the checks that other tasks send before it begins.
    fn schedule(&self, id: LaneId, runtime: &Handle) {
        runtime.spawn(Turn::new(self.clone(), id, true).call());
    }

    /// Takes a batch out of the queue for a call that begins.
    fn take(&self, id: LaneId) -> Option<Arc<CheckBatch>> {
        let mut lanes = lock(&self.0.lanes);
        let lane = lanes.get_mut(&id).expect("a lane with a call exists");
        let batch = lane.queue.pop_front();
        lane.last_size = batch.as_ref().map_or(lane.last_size, |batch| batch.size());
        // For the watch: callers in `sent` still have deadlines.
        lane.sent.extend(batch.clone());
        batch
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
            next.over().await;
            for batch in self.batches() {
                batch.expire();
            }
        }
    }

    /// Returns the first deadline of the callers that do not end with their call; `None` ends the
    /// watch.
    fn next_deadline(&mut self) -> Option<Deadline> {
        let front = self.front.clone();
        let lanes = &mut *lock(&front.0.lanes);
        let lane = lanes.get(&self.id)?;
        let batches = lane.sent.iter().chain(&lane.queue);
        let deadlines = batches.filter_map(|batch| batch.next_deadline());
        let next = deadlines.min_by_key(|deadline| deadline.end());
        // Under the lock, so that a check that enters either is seen here or starts a new watch.
        if next.is_none() {
            self.end(lanes);
        }
        next
    }

    fn batches(&self) -> Vec<Arc<CheckBatch>> {
        let lanes = &*lock(&self.front.0.lanes);
        let Some(lane) = lanes.get(&self.id) else { return vec![] };
        lane.sent.iter().chain(&lane.queue).cloned().collect()
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
            settings,
            calls: 0,
            is_starting: false,
            is_watched: false,
            queue: VecDeque::new(),
            sent: vec![],
            last_size: BatchSize::default(),
        }
    }

    fn is_idle(&self) -> bool {
        self.calls == 0 && !self.is_watched
    }

    /// Returns whether no check waits, and no call is under way.
    fn is_free(&self) -> bool {
        self.calls == 0 && self.queue.is_empty()
    }

    /// Adds a check to the last batch, or to a new one.
    fn push(
        &mut self,
        request: &LimitRequest<'_>,
        hash: u64,
        backend: &Arc<Backend>,
        slot: u16,
        deadline: Deadline,
    ) -> Queued {
        if let Some(last) = self.queue.back()
            && let Some(queued) = last.push(request, hash, deadline)
        {
            return queued;
        }
        let (settings, observers) = (self.settings.clone(), request.observers.clone());
        let hold = request.hold.map(first_lifetime);
        let backend = backend.clone();
        let batch = CheckBatch::new(settings, hold, observers, backend, slot, self.last_size);
        let queued = batch.push(request, hash, deadline).expect("a batch has room for a check");
        self.queue.push_back(batch);
        queued
    }

    /// Returns true if a call is to be scheduled now.
    fn schedules(&mut self) -> bool {
        // If there is a second batch, the first one is full.
        let max_calls = if self.queue.len() > 1 { MAX_FULL_CALLS } else { MAX_CALLS };
        let schedules = !self.is_starting && self.calls < max_calls && !self.queue.is_empty();
        if schedules {
            self.is_starting = true;
            self.calls += 1;
        }
        schedules
    }
}

/// One of the calls of a lane. Its handover, and its end, let the next one begin.
pub(super) struct Turn {
    front: Front,
    id: LaneId,
    /// True if the call has not begun.
    is_scheduled: bool,
    /// True until later calls cannot overtake this one. Atomic because `hand_over` is called while
    /// the call has borrowed the turn; each swap finds one winner, which then takes the lock of the
    /// lanes. `Relaxed`, because that lock orders everything else.
    is_starting: AtomicBool,
    /// True once the turn has left its lane, in the same way.
    is_over: AtomicBool,
    batch: Option<Arc<CheckBatch>>,
}

impl Turn {
    fn new(front: Front, id: LaneId, is_scheduled: bool) -> Self {
        let (is_starting, is_over) = (AtomicBool::new(true), AtomicBool::new(false));
        Self { front, id, is_scheduled, is_starting, is_over, batch: None }
    }

    /// Executes a call for the first batch in the queue.
    async fn call(mut self) {
        let front = self.front.clone();
        let backend = front.backend();
        let LaneId { slot, channel, .. } = self.id;
        // So that nothing delays the call once it has taken its checks.
        backend.client.ready(slot, channel).await;
        self.is_scheduled = false;
        let Some(batch) = front.take(self.id) else { return };
        self.batch = Some(batch.clone());
        loop {
            let late = if batch.may_wait() { backend.begin_late_call() } else { None };
            let Some(call) = batch.begin(late.is_some()) else { return };
            let on_handover = || self.hand_over();
            let call_again = batch.execute(&call, &on_handover);
            let mut call_again = pin!(call_again);
            if late.is_none() {
                if call_again.await {
                    continue;
                }
                return;
            }
            let in_time = call.deadline().wait_for(call_again.as_mut()).await;
            match in_time {
                Some(true) => {}
                Some(false) => return,
                None => {
                    batch.expire();
                    self.end();
                    call_again.await;
                    return;
                }
            }
        }
    }

    /// Lets the next call begin, which cannot overtake this one any more.
    pub(super) fn hand_over(&self) {
        if !self.is_starting.swap(false, Relaxed) {
            return;
        }
        let mut lanes = lock(&self.front.0.lanes);
        let Some(lane) = lanes.get_mut(&self.id) else { return };
        // From here on a later call of the lane stands behind this one in the same line.
        lane.is_starting = false;
        let next = lane.schedules().then(|| lane.runtime.clone());
        drop(lanes);
        if let Some(runtime) = next {
            self.front.schedule(self.id, &runtime);
        }
    }

    /// Ends the turn. The callers that still wait fail.
    fn end(&self) {
        if self.is_over.swap(true, Relaxed) {
            return;
        }
        let mut lanes = lock(&self.front.0.lanes);
        let Entry::Occupied(mut entry) = lanes.entry(self.id) else { return };
        let lane = entry.get_mut();
        lane.calls -= 1;
        let mut ended: Vec<_> = self.batch.iter().cloned().collect();
        lane.sent.retain(|batch| ended.iter().all(|ended| !Arc::ptr_eq(batch, ended)));
        if self.is_starting.swap(false, Relaxed) {
            lane.is_starting = false;
            if self.is_scheduled {
                ended.extend(lane.queue.drain(..)); // the runtime has ended
            }
        }
        let next = lane.schedules().then(|| lane.runtime.clone());
        if lane.is_idle() {
            entry.remove();
        }
        drop(lanes);
        for batch in ended {
            batch.abandon();
        }
        if let Some(runtime) = next {
            self.front.schedule(self.id, &runtime);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.end();
    }
}
