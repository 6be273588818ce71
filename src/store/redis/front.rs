//! The front: the queues of checks, or holds, of one limiter, that go to Redis together. Each call
//! takes what its queue has when it begins, often one check. In a cluster, only checks of the same
//! key are collected. It knows neither scripts nor connections.
//!
//! A call runs in a task of the runtime of its callers, so that none of them keeps the others from
//! their decisions if it is not polled. An idle limiter sends a check immediately: the caller polls
//! the call itself before it spawns it. Once its command is in the line of the connection, a call
//! of one check has no other caller, and delays no other call: it stays with its caller.
//!
//! Checks of a key are decided in the order of their arrival: they take one connection, and a call
//! begins only when the one before it has its place in the line of that connection.

use std::{
    collections::VecDeque,
    hash::BuildHasher,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Waker},
    time::Duration,
};

use foldhash::fast::RandomState;
use hashbrown::{HashMap, hash_map::Entry};
use tokio::runtime::{self, Handle};

use super::{
    backend::Backend,
    batch::{BatchCall, BatchSize, CheckBatch, Queued},
    connections::{Deadline, share_last_task},
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
pub(super) struct Front {
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
    /// The lifetime of its holds; `None` for checks.
    hold: Option<Duration>,
    place: Place,
}

/// Where the checks of a lane go. In a cluster, the slot and the hash of the only key; otherwise 0.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Place {
    slot: u16,
    key: u64,
    /// The connection of its keys.
    channel: usize,
}

struct Lane {
    runtime: Handle,
    /// Kept so that no other limiter has their address.
    _settings: Arc<Settings>,
    /// The number of calls that are under way or scheduled.
    calls: usize,
    /// True while a call is scheduled, which takes the first batch when it begins, or has begun and
    /// can be overtaken by a later one.
    is_starting: bool,
    /// Checks are added to the last batch.
    queue: VecDeque<Arc<CheckBatch>>,
    /// The size of the batch of the last call.
    last_size: BatchSize,
}

impl Front {
    pub(super) fn new(backend: Arc<Backend>) -> Arc<Self> {
        let (lanes, hasher) = (Mutex::default(), RandomState::default());
        Arc::new(Self { backend, lanes, hasher })
    }

    /// Adds a check to its queue. Checks of a key are decided in the order of their arrival.
    pub(super) fn enter(
        self: &Arc<Self>,
        request: &LimitRequest<'_>,
        deadline: Deadline,
    ) -> Queued {
        let Self { backend, hasher, .. } = &**self;
        let hash = hasher.hash_one(request.key.as_bytes());
        let place = self.place_of(hash, request);
        // While the circuit is open, a check fails before the queue, in which it would wait behind
        // calls that time out.
        let node = backend.client.node_of(place.slot);
        let is_available = node.is_available_for(deadline.within());
        let runtime = Handle::try_current().ok().filter(|_| is_available);
        let Some(runtime) = runtime else {
            let size = BatchSize::default();
            let (batch, queued) =
                CheckBatch::of(backend, place.slot, size, request, hash, deadline);
            return queued.executed_by_caller(Box::pin(batch.execute_alone()));
        };
        let limiter = Arc::as_ptr(request.settings).addr();
        let id = LaneId { runtime: runtime.id(), limiter, hold: request.hold, place };
        let mut lanes = lock(&self.lanes);
        let lane = lanes.entry(id).or_insert_with(|| Lane::new(&runtime, request.settings));
        let is_idle = lane.calls == 0 && node.drives_connections();
        let queued = lane.push(request, hash, backend, place.slot, deadline);
        let next = lane.next_call();
        drop(lanes);
        let Some(runtime) = next else { return queued };
        let mut call = Box::pin(LaneCall::new(self, id).call());
        if is_idle {
            // Its task or its caller polls it again, and so it needs no wake-up.
            let cx = &mut Context::from_waker(Waker::noop());
            if call.as_mut().poll(cx).is_ready() {
                return queued;
            }
            let is_starting = lock(&self.lanes).get(&id).is_some_and(|lane| lane.is_starting);
            if !is_starting && queued.is_alone() && !request.is_returned() {
                return queued.executed_by_caller(call);
            }
        }
        runtime.spawn(call);
        share_last_task();
        queued
    }

    fn place_of(&self, hash: u64, request: &LimitRequest<'_>) -> Place {
        let Backend { client, is_clustered, .. } = &*self.backend;
        let is_clustered = is_clustered.load(Relaxed);
        if !is_clustered && client.node_of(0).connections() == 1 {
            return Place::default();
        }
        let name = self.backend.key(request.settings, request.key);
        let slot = client.slot_of(&name);
        let key = if is_clustered { hash } else { 0 };
        Place { slot, key, channel: client.node_of(slot).channel_of(name.as_bytes()) }
    }

    /// Takes the first batch out of the queue for a call that begins. A call is scheduled only for
    /// a batch, and one at a time. Nothing delays the call once it has taken its checks.
    async fn take(&self, id: LaneId) -> Arc<CheckBatch> {
        let deadline = lock(&self.lanes)[&id].queue[0].first_deadline();
        let Place { slot, channel, .. } = id.place;
        let _ = deadline.wait_for(self.backend.client.ready(slot, channel)).await;
        let mut lanes = lock(&self.lanes);
        let lane = lanes.get_mut(&id).expect("a lane with a call exists");
        let batch = lane.queue.pop_front().expect("a call is scheduled for a batch");
        lane.last_size = batch.size();
        batch
    }
}

impl Lane {
    fn new(runtime: &Handle, settings: &Arc<Settings>) -> Self {
        Self {
            runtime: runtime.clone(),
            _settings: settings.clone(),
            calls: 0,
            is_starting: false,
            queue: VecDeque::new(),
            last_size: BatchSize::default(),
        }
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
        let (batch, queued) =
            CheckBatch::of(backend, slot, self.last_size, request, hash, deadline);
        self.queue.push_back(batch);
        queued
    }

    /// Returns the runtime for the next call, if one is to begin now.
    fn next_call(&mut self) -> Option<Handle> {
        // If there is a second batch, the first one is full.
        let max_calls = if self.queue.len() > 1 { MAX_FULL_CALLS } else { MAX_CALLS };
        if self.is_starting || self.calls >= max_calls || self.queue.is_empty() {
            return None;
        }
        self.is_starting = true;
        self.calls += 1;
        Some(self.runtime.clone())
    }
}

/// One of the calls of a lane. Its handover, and its end, let the next one begin.
struct LaneCall {
    front: Arc<Front>,
    id: LaneId,
    /// True until later calls cannot overtake this one. Atomic because `hand_over` is called while
    /// the call has borrowed it; each swap finds one winner, which then takes the lock of the
    /// lanes. `Relaxed`, because that lock orders everything else.
    is_starting: AtomicBool,
    /// True once the call has left its lane, in the same way.
    is_over: AtomicBool,
    /// The batch of the call, which it takes out of the queue when it begins.
    batch: Option<Arc<CheckBatch>>,
}

impl LaneCall {
    fn new(front: &Arc<Front>, id: LaneId) -> Self {
        let (is_starting, is_over) = (AtomicBool::new(true), AtomicBool::new(false));
        Self { front: front.clone(), id, is_starting, is_over, batch: None }
    }

    /// Lets the next call begin in a task: it collects the checks that other tasks send before.
    fn spawn_next(&self, runtime: Option<Handle>) {
        if let Some(runtime) = runtime {
            runtime.spawn(Self::new(&self.front, self.id).call());
        }
    }

    /// Executes a call for its batch.
    async fn call(mut self) {
        let front = self.front.clone();
        let batch = self.batch.insert(front.take(self.id).await).clone();
        loop {
            let late = if batch.may_wait() { front.backend.begin_late_call() } else { None };
            let Some(call) = batch.begin(late.is_some()) else { return };
            if !self.execute(&batch, call).await {
                return;
            }
        }
    }

    /// Executes a call. Returns true if others are to be made for callers that are left.
    async fn execute(&self, batch: &Arc<CheckBatch>, call: BatchCall) -> bool {
        let on_handover = || self.hand_over();
        let mut executed = pin!(batch.execute(&call, &on_handover));
        if let Some(is_again) = batch.expire_until(executed.as_mut()).await {
            return is_again;
        }
        self.end(); // before the answer, which may come late
        executed.await;
        false
    }

    /// Lets the next call begin, which cannot overtake this one any more.
    fn hand_over(&self) {
        if !self.is_starting.swap(false, Relaxed) {
            return;
        }
        let mut lanes = lock(&self.front.lanes);
        let Some(lane) = lanes.get_mut(&self.id) else { return };
        // From here on a later call of the lane stands behind this one in the same line.
        lane.is_starting = false;
        let next = lane.next_call();
        drop(lanes);
        self.spawn_next(next);
    }

    /// Ends the call. The callers that still wait fail.
    fn end(&self) {
        if self.is_over.swap(true, Relaxed) {
            return;
        }
        let mut lanes = lock(&self.front.lanes);
        let Entry::Occupied(mut entry) = lanes.entry(self.id) else { return };
        let lane = entry.get_mut();
        lane.calls -= 1;
        let mut ended: Vec<_> = self.batch.iter().cloned().collect();
        if self.is_starting.swap(false, Relaxed) {
            lane.is_starting = false;
            if self.batch.is_none() {
                ended.extend(lane.queue.drain(..)); // the runtime has ended
            }
        }
        let next = lane.next_call();
        if lane.calls == 0 {
            entry.remove();
        }
        drop(lanes);
        for batch in ended {
            batch.abandon();
        }
        self.spawn_next(next);
    }
}

impl Drop for LaneCall {
    fn drop(&mut self) {
        self.end();
    }
}
