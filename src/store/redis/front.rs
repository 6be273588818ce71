//! The front: checks of one limiter that arrive while calls are under way are collected, and go to
//! Redis together. An idle limiter sends a check immediately, in a call of its own. In a cluster,
//! only checks of the same key are collected. It knows neither scripts nor connections.

use std::{
    collections::VecDeque,
    hash::BuildHasher,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use foldhash::fast::RandomState;
use hashbrown::{HashMap, hash_map::Entry};
use tokio::{
    runtime::{self, Handle},
    time::sleep,
};

use super::{
    batch::{CheckBatch, Queued},
    name_of,
    transport::{Client, Deadline, TransportError},
};
use crate::{
    store::{LimitRequest, Settings},
    sync::lock,
};

/// The number of calls of a lane that are under way at a time.
const MAX_CALLS: usize = 4;

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
    /// In a cluster, the hash of the only key; otherwise 0.
    key: u64,
    /// In a cluster, the slot of that key; otherwise 0.
    slot: u16,
}

struct Lane {
    runtime: Handle,
    /// Kept so that no other limiter has their address.
    settings: Arc<Settings>,
    /// The number of calls that are under way or scheduled.
    calls: usize,
    /// True if a call is scheduled, which takes the first batch when it begins.
    is_scheduled: bool,
    /// True while a task watches the deadlines.
    is_watched: bool,
    /// Checks are added to the last batch.
    queue: VecDeque<Arc<CheckBatch>>,
    /// The batches of the calls under way.
    sent: Vec<Arc<CheckBatch>>,
}

/// How a check is decided.
pub(super) enum Place {
    /// By a call of its own, during which the turn is kept.
    Alone(Option<Turn>),
    /// Together with others.
    Queued(Queued),
}

impl Front {
    pub(super) fn new(client: Client) -> Self {
        let is_clustered = AtomicBool::new(client.is_cluster());
        let (lanes, hasher) = (Mutex::default(), RandomState::default());
        Self(Arc::new(Shared { client, lanes, hasher, is_clustered }))
    }

    /// Returns the place of a check. Checks of a limiter are decided in the order of their arrival.
    /// `prefix` is that of all keys of the limiter.
    pub(super) fn enter(
        &self,
        request: &LimitRequest<'_>,
        prefix: &Arc<str>,
        deadline: Deadline,
    ) -> Place {
        let Shared { client, lanes, hasher, is_clustered } = &*self.0;
        let Ok(runtime) = Handle::try_current() else { return Place::Alone(None) };
        let hash = hasher.hash_one(request.key.as_bytes());
        let limiter = Arc::as_ptr(request.settings).addr();
        let mut id = LaneId { runtime: runtime.id(), limiter, key: 0, slot: 0 };
        if is_clustered.load(Relaxed) {
            let slot = client.slot_of(&name_of(prefix, request.settings, request.key));
            id = LaneId { key: hash, slot, ..id };
        }
        if !client.is_available_for(id.slot, deadline) {
            return Place::Alone(None);
        }
        let mut lanes = lock(lanes);
        let lane = lanes.entry(id).or_insert_with(|| Lane::new(runtime, request.settings.clone()));
        if lane.calls == 0 && lane.queue.is_empty() {
            lane.calls = 1;
            let front = self.clone();
            return Place::Alone(Some(Turn { front, id, is_scheduled: false, batch: None }));
        }
        let queued = lane.push(request, hash, prefix, deadline);
        let schedules = lane.schedules();
        let watches = !mem::replace(&mut lane.is_watched, true);
        let runtime = (schedules || watches).then(|| lane.runtime.clone());
        drop(lanes);
        if let Some(runtime) = runtime {
            if schedules {
                self.schedule(id, &runtime);
            }
            if watches {
                runtime.spawn(Watch { front: self.clone(), id, is_over: false }.run());
            }
        }
        Place::Queued(queued)
    }

    /// Schedules a call, which collects the checks that other tasks send before it begins.
    fn schedule(&self, id: LaneId, runtime: &Handle) {
        let turn = Turn { front: self.clone(), id, is_scheduled: true, batch: None };
        runtime.spawn(turn.call());
    }

    /// Takes a batch out of the queue for a call that begins.
    fn take(&self, id: LaneId) -> Option<Arc<CheckBatch>> {
        let mut lanes = lock(&self.0.lanes);
        let lane = lanes.get_mut(&id).expect("a lane with a call exists");
        lane.is_scheduled = false;
        let batch = lane.queue.pop_front();
        lane.sent.extend(batch.clone());
        let next = lane.schedules().then(|| lane.runtime.clone());
        drop(lanes);
        if let Some(runtime) = next {
            self.schedule(id, &runtime);
        }
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
            sleep(next.left()).await;
            sleep(next.grace()).await;
            for (batch, is_sent) in self.batches() {
                for (caller, deadline) in batch.expired(Instant::now()) {
                    let error = TransportError::timeout(deadline.within());
                    let error = if is_sent { error } else { error.unsent() };
                    let client = &self.front.0.client;
                    let error = client.record_failure(self.id.slot, deadline, error);
                    batch.complete_one(caller, Err(error));
                }
            }
        }
    }

    /// Returns the first deadline of the callers that do not end with their call; `None` ends the
    /// watch.
    fn next_deadline(&mut self) -> Option<Deadline> {
        let front = self.front.clone();
        let lanes = &mut *lock(&front.0.lanes);
        let lane = lanes.get(&self.id)?;
        let now = Instant::now();
        let deadlines = lane.sent.iter().chain(&lane.queue);
        let deadlines = deadlines.filter_map(|batch| batch.next_deadline(now));
        let next = deadlines.min_by_key(|deadline| deadline.left_at(now));
        if next.is_none() {
            self.end(lanes);
        }
        next
    }

    /// Returns the batches of the lane, and whether they were sent.
    fn batches(&self) -> Vec<(Arc<CheckBatch>, bool)> {
        let lanes = &*lock(&self.front.0.lanes);
        let Some(lane) = lanes.get(&self.id) else { return vec![] };
        let sent = lane.sent.iter().map(|batch| (batch.clone(), true));
        sent.chain(lane.queue.iter().map(|batch| (batch.clone(), false))).collect()
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
            is_scheduled: false,
            is_watched: false,
            queue: VecDeque::new(),
            sent: vec![],
        }
    }

    fn is_idle(&self) -> bool {
        self.calls == 0 && !self.is_watched
    }

    /// Adds a check to the last batch, or to a new one.
    fn push(
        &mut self,
        request: &LimitRequest<'_>,
        hash: u64,
        prefix: &Arc<str>,
        deadline: Deadline,
    ) -> Queued {
        if let Some(last) = self.queue.back()
            && let Some(queued) = last.push(request, hash, deadline)
        {
            return queued;
        }
        let batch =
            CheckBatch::new(self.settings.clone(), request.observers.clone(), prefix.clone());
        let queued = batch.push(request, hash, deadline).expect("a batch has room for a check");
        self.queue.push_back(batch);
        queued
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
}

/// One of the calls of a lane. Its end lets the next one begin.
pub(super) struct Turn {
    front: Front,
    id: LaneId,
    /// True if the call has not begun.
    is_scheduled: bool,
    batch: Option<Arc<CheckBatch>>,
}

impl Turn {
    /// Executes a call for the first batch in the queue.
    async fn call(mut self) {
        let front = self.front.clone();
        let Shared { client, is_clustered, .. } = &*front.0;
        // So that nothing delays the call once it has taken its checks: the next one could overtake
        // it.
        client.ready(self.id.slot).await;
        self.is_scheduled = false;
        self.batch = front.take(self.id);
        if let Some(batch) = &self.batch {
            batch.execute(client, self.id.slot, is_clustered).await;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut lanes = lock(&self.front.0.lanes);
        let Entry::Occupied(mut entry) = lanes.entry(self.id) else { return };
        let lane = entry.get_mut();
        lane.calls -= 1;
        let mut ended: Vec<_> = self.batch.take().into_iter().collect();
        lane.sent.retain(|batch| ended.iter().all(|ended| !Arc::ptr_eq(batch, ended)));
        if self.is_scheduled {
            lane.is_scheduled = false; // the runtime has ended
            ended.extend(lane.queue.drain(..));
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
