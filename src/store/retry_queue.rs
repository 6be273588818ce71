//! The queues of requests that retry: one per limiter and key, within one process. They hold costs
//! and instants, and know no limiters and no charges: `limiter/retry.rs` translates.
//!
//! Only the first request of a queue sleeps until the quota has units for it, and checks. When it
//! leaves, the next request checks: immediately, or when units are known to be available. If a
//! decision shows units for several requests, these check side by side. The requests behind the
//! first one have no timer, so a request that is dropped delays no other.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::{BuildHasher, Hash, Hasher, RandomState},
    iter,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::Instant;

use super::turns::{Turns, hold_retry};
use crate::{keys::Key, sync::lock, time::random_fraction};

/// The longest time between the instant at which a request is due to check and the end of its
/// check. A request that takes longer no longer holds up others. It is ten times the default
/// deadline of a check, so only a future that is kept but not polled takes longer. `select!` over a
/// request and a slow branch is enough for that.
pub(crate) const MAX_STALL: Duration = Duration::from_secs(1);
/// The number of successful checks after which no competing process is assumed. With two processes,
/// one in two checks fails, so eight successes in a row without a competitor are likely, and with
/// one they are not (1 in 256).
const COMPETITION: u8 = 8;
/// Longer than any process runs, and short enough that an `Instant` can hold it.
const FOREVER: Duration = Duration::from_secs(30 * 366 * 86_400);

/// The requests of this process that retry, by limiter and key.
#[derive(Debug, Default)]
pub struct RetryQueues {
    hasher: RandomState,
    /// `Relaxed`: a queue compares numbers under its lock, and requests that arrive at the same
    /// time on two threads have no order anyway.
    arrivals: AtomicU64,
    queues: Mutex<Queues>,
    /// The number of queues and turns, which is read without the lock. `Relaxed`: a request that
    /// joins while units are returned may not be woken, as if it had joined a moment later.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queues {
    /// By the hash of limiter and key. Two with equal hashes, which are unlikely, share a queue.
    by_id: HashMap<u64, Arc<Mutex<Queue>>>,
    /// The hashes of the single keys of a queue that is for several keys, each with its id.
    of_keys: BTreeSet<(u64, u64)>,
    turns: Turns,
}

/// A request, as a queue needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueEntry {
    /// The hash of the limiter and the key that the queue is for.
    pub(crate) queue: u64,
    /// The hash of all limiters and keys of the request.
    pub(crate) group: u64,
    pub(crate) cost: u64,
    /// The units that the other limits of the group admit at once.
    pub(crate) max_units: u64,
    /// The pause of the next request if this one moves to another queue.
    pub(crate) gap: Duration,
}

/// The expected state of the quota, from the last decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forecast {
    /// The units that are available.
    pub(crate) available: u64,
    /// When more units are available, for a request of this cost; `None` for any cost.
    pub(crate) next_at: Instant,
    pub(crate) cost: Option<u64>,
}

impl Forecast {
    pub(crate) fn unknown() -> Self {
        Self::after_pause(Instant::now())
    }

    pub(crate) fn after_pause(next_at: Instant) -> Self {
        Self { available: 0, next_at, cost: None }
    }
}

/// Requests by their arrival. If there are any, at least one of them is checking: it has the only
/// timer, so a queue without it would wait for ever.
#[derive(Debug, Default)]
struct Queue {
    checking: BTreeMap<u64, Checking>,
    waiting: BTreeMap<u64, Waiting>,
    /// The sum of the costs of the requests that are checking.
    units_checking: u64,
    groups: HashMap<u64, Group>,
    /// The sum of the units of the groups, each up to its maximum.
    units: u64,
    /// Above 0 if another process took the awaited units recently.
    competition: u8,
    /// The hashes of the single keys, if the queue is for several ones.
    keys: Vec<u64>,
}

/// The requests with the same limiters and keys.
#[derive(Debug, Default)]
struct Group {
    /// The units that the requests wait for.
    units: u64,
    /// The units that the other limits admit at once. Requests beyond them leave the queue when
    /// they check.
    max: u64,
}

impl Group {
    fn bounded(&self) -> u64 {
        self.units.min(self.max)
    }
}

/// A request that checks at `at`, or is checking since then.
#[derive(Debug)]
struct Checking {
    cost: u64,
    at: Instant,
    /// Of a request that sleeps until `at`.
    waker: Option<Waker>,
    /// When the request checks again if it is denied: units were returned during its check, which
    /// may not have seen them.
    again_at: Option<Instant>,
}

impl Checking {
    /// Returns false if the check is overdue: the future of the request is kept, but not polled.
    fn is_polled(&self, now: Instant) -> bool {
        now <= after(self.at, MAX_STALL)
    }
}

#[derive(Debug)]
struct Waiting {
    cost: u64,
    waker: Option<Waker>,
}

impl RetryQueues {
    /// Returns the hasher for the hashes of an [`QueueEntry`].
    pub(crate) fn hasher(&self) -> impl Hasher + use<> {
        self.hasher.build_hasher()
    }

    /// Returns the hash of limits, by the names of their limiters and their keys.
    pub(crate) fn hash_of<'a>(&self, limits: impl Iterator<Item = (&'a str, &'a Key<'a>)>) -> u64 {
        let mut hasher = self.hasher();
        limits.for_each(|limit| limit.hash(&mut hasher));
        hasher.finish()
    }

    /// Returns the queue of a key.
    pub(crate) fn queue_of(&self, limiter: &str, key: &Key<'_>) -> u64 {
        self.hash_of([(limiter, key)].into_iter())
    }

    /// Returns whether no request waits, and no process shares units with others by turns.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    fn update_count(&self, queues: &Queues) {
        self.count.store(queues.by_id.len() + queues.turns.len(), Relaxed);
    }

    /// Lets the first requests check that wait for a key, if any do: see
    /// [`units_returned`](Self::units_returned).
    #[inline]
    pub(crate) fn key_returned(&self, limiter: &str, key: &Key<'_>) {
        if !self.is_empty() {
            self.units_returned(self.queue_of(limiter, key));
        }
    }

    /// Records that a decision has found no units of these keys for a further request.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn found_full(&self, keys: impl IntoIterator<Item = u64>) {
        let mut keys = keys.into_iter().peekable();
        if keys.peek().is_some() {
            let (queues, now) = (&mut *lock(&self.queues), Instant::now());
            keys.for_each(|key| queues.turns.found_full(key, now));
            self.update_count(queues);
        }
    }

    /// Records that this process returns units of a key, which it has held since `taken`. After a
    /// turn, it leaves units to other processes for a pause.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn units_end(&self, key: u64, taken: Instant) {
        lock(&self.queues).turns.returned(key, taken, Instant::now());
    }

    /// Wakes the first requests that wait for a key: units of it came back, earlier than their
    /// forecasts.
    pub(crate) fn units_returned(&self, key: u64) {
        let (queues, at, now) = {
            let all = &*lock(&self.queues);
            let queues = all.of_key(key);
            if queues.is_empty() {
                return; // without a look at the clock
            }
            let now = Instant::now();
            (queues, all.turns.pause_end(key, now).unwrap_or(now), now)
        };
        let wakers: Vec<Waker> =
            queues.iter().flat_map(|queue| lock(queue).check_at(at, now)).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Returns the end of the pause in which this process leaves the units of these keys to others.
    pub(crate) fn pause_end(&self, keys: &[u64]) -> Option<Instant> {
        let all = &*lock(&self.queues);
        if all.turns.len() == 0 {
            return None; // without a look at the clock
        }
        let now = Instant::now();
        keys.iter().filter_map(|key| all.turns.pause_end(*key, now)).max()
    }

    /// Returns whether requests wait for this key.
    #[cfg(feature = "redis")]
    pub(crate) fn is_waited_for(&self, key: u64) -> bool {
        !lock(&self.queues).of_key(key).is_empty()
    }

    /// Returns the pause of the first request of a queue, which has `waited`, after a denial of
    /// unknown duration. In a process that shares no units, it need not ask: each end wakes it.
    pub(crate) fn hold_retry(&self, waited: Duration) -> Duration {
        let Queues { by_id, turns, .. } = &*lock(&self.queues);
        hold_retry(if turns.len() == 0 { Duration::ZERO } else { waited }, by_id.len())
    }

    /// Returns the next number in the order of arrival.
    pub(crate) fn next_arrival(&self) -> u64 {
        self.arrivals.fetch_add(1, Relaxed)
    }

    /// Adds a request to its queue, which is for `keys`.
    pub(crate) fn join(
        self: &Arc<Self>,
        entry: QueueEntry,
        keys: &[u64],
        arrival: u64,
        forecast: Forecast,
    ) -> Ticket {
        let QueueEntry { queue: id, group, cost, max_units, .. } = entry;
        let mut queues = lock(&self.queues);
        let queue = queues.get_or_insert(id, keys);
        self.update_count(&queues);
        // The map stays locked: otherwise the queue could be removed in the meantime. Lock order:
        // the map, then the queue.
        let wakers = {
            let mut queue = lock(&queue);
            queue.update_group(group, max_units, |units| units + cost);
            queue.push(arrival, cost, forecast)
        };
        drop(queues);
        let ticket = Ticket { queues: self.clone(), queue, arrival, entry, forecast: None };
        wakers.into_iter().for_each(Waker::wake);
        ticket
    }

    /// Returns whether requests wait in this queue. If all checks are overdue, the next one starts.
    pub(crate) fn has(&self, id: u64) -> bool {
        let queue = lock(&self.queues).by_id.get(&id).cloned();
        let wakers = queue.as_ref().map(|queue| lock(queue).start_checks(Forecast::unknown()));
        wakers.into_iter().flatten().for_each(Waker::wake);
        queue.is_some()
    }

    /// Returns the known units that are spent before a request that would join its queue now.
    pub(crate) fn units_before(&self, entry: &QueueEntry, arrival: u64) -> u64 {
        let Some(queue) = lock(&self.queues).by_id.get(&entry.queue).cloned() else { return 0 };
        let queue = lock(&queue);
        let last = queue.checking.keys().next_back().max(queue.waiting.keys().next_back());
        // It arrived before some of the queue: how much is before it would take a scan, and the
        // answer is a lower bound anyway.
        if last.is_some_and(|last| *last > arrival) {
            return 0;
        }
        // A limit that holds up an earlier request of the group holds up this request, too.
        let group = queue.groups.get(&entry.group);
        queue.units + group.map_or(0, |group| group.units - group.bounded())
    }
}

impl Queues {
    /// Returns the queues of requests that wait for a key, perhaps among others.
    fn of_key(&self, key: u64) -> Vec<Arc<Mutex<Queue>>> {
        let several = self.of_keys.range((key, 0)..=(key, u64::MAX)).map(|(_, id)| id);
        let ids = iter::once(&key).chain(several);
        ids.filter_map(|id| self.by_id.get(id)).cloned().collect()
    }

    fn get_or_insert(&mut self, id: u64, keys: &[u64]) -> Arc<Mutex<Queue>> {
        let queue = self.by_id.entry(id).or_insert_with(|| {
            let several = keys.iter().copied().filter(|key| *key != id);
            let keys: Vec<u64> = several.collect();
            self.of_keys.extend(keys.iter().map(|key| (*key, id)));
            Arc::new(Mutex::new(Queue { keys, ..Queue::default() }))
        });
        queue.clone()
    }

    /// Removes a queue, unless a request has joined it.
    fn remove_empty(&mut self, id: u64) {
        let Some(queue) = self.by_id.get(&id).cloned() else { return };
        let queue = lock(&queue);
        if queue.checking.is_empty() {
            self.by_id.remove(&id);
            for key in &queue.keys {
                self.of_keys.remove(&(*key, id));
            }
        }
    }
}

impl Queue {
    fn push(&mut self, arrival: u64, cost: u64, forecast: Forecast) -> Vec<Waker> {
        self.waiting.insert(arrival, Waiting { cost, waker: None });
        self.start_checks(forecast)
    }

    fn update_group(&mut self, id: u64, max: u64, change: impl Fn(u64) -> u64) {
        let group = self.groups.entry(id).or_default();
        let before = group.bounded();
        *group = Group { units: change(group.units), max };
        self.units = self.units - before + group.bounded();
        if group.units == 0 {
            self.groups.remove(&id);
        }
    }

    /// Lets as many requests check as there are units for, and at least one. Returns their wakers,
    /// to be called without the lock.
    fn start_checks(&mut self, forecast: Forecast) -> Vec<Waker> {
        let (mut wakers, now) = (vec![], Instant::now());
        while let Some(first) = self.waiting.first_entry() {
            let cost = first.get().cost;
            // Not only the first one: if a window ends, its whole quota is there, and checks one
            // after the other would take a round trip each.
            let fits = self.units_checking + cost <= forecast.available;
            if !fits && self.checking.values().any(|checking| checking.is_polled(now)) {
                break;
            }
            // The time of a forecast is that of its cost. Another cost may fit earlier, so it asks.
            let sleeps = !fits && forecast.cost.is_none_or(|expected| expected == cost);
            let at = if sleeps { forecast.next_at } else { now };
            let (arrival, Waiting { waker, .. }) = first.remove_entry();
            self.checking.insert(arrival, Checking { cost, at, waker: None, again_at: None });
            self.units_checking += cost;
            wakers.extend(waker);
        }
        wakers
    }

    /// Lets all requests that sleep until they check do so at this instant. Returns their wakers.
    fn check_at(&mut self, at: Instant, now: Instant) -> Vec<Waker> {
        let wakers = self.checking.values_mut().filter_map(|checking| {
            if checking.at <= now {
                checking.again_at = Some(at);
                return None;
            }
            checking.at = at;
            checking.waker.take()
        });
        wakers.collect()
    }

    fn stop_check(&mut self, arrival: u64) -> Option<Checking> {
        let checking = self.checking.remove(&arrival)?;
        self.units_checking -= checking.cost;
        Some(checking)
    }

    /// Returns a denied request to its position. The first request checks when units are available.
    fn denied(&mut self, arrival: u64, forecast: Forecast) -> Vec<Waker> {
        let Some(Checking { cost, again_at, .. }) = self.stop_check(arrival) else {
            return vec![];
        };
        let next_at = again_at.unwrap_or(forecast.next_at);
        self.push(arrival, cost, Forecast { next_at, ..forecast })
    }

    /// Removes a request. Returns wakers to call, and a value to drop, both without the lock.
    fn leave(&mut self, arrival: u64, forecast: Option<Forecast>) -> (Vec<Waker>, Option<Waiting>) {
        let waiting = self.waiting.remove(&arrival);
        let checking = self.stop_check(arrival);
        let cost = waiting
            .as_ref()
            .map(|waiting| waiting.cost)
            .or(checking.as_ref().map(|checking| checking.cost));
        // If the request slept, the end of its sleep is known.
        let forecast = forecast.unwrap_or_else(|| {
            checking.map_or_else(Forecast::unknown, |Checking { at, .. }| Forecast {
                available: 0,
                next_at: at,
                cost,
            })
        });
        (self.start_checks(forecast), waiting)
    }
}

/// The position of a request in a queue. Dropping it removes the request.
#[derive(Debug)]
pub(crate) struct Ticket {
    queues: Arc<RetryQueues>,
    queue: Arc<Mutex<Queue>>,
    arrival: u64,
    entry: QueueEntry,
    forecast: Option<Forecast>,
}

impl Ticket {
    pub(crate) fn entry(&self) -> &QueueEntry {
        &self.entry
    }

    /// Returns the request to its position after a denial.
    pub(crate) fn denied(&self, forecast: Forecast) {
        let wakers = lock(&self.queue).denied(self.arrival, forecast);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Records the result of a check at the expected instant: a denial means that another process
    /// took the units.
    pub(crate) fn record_competition(&self, was_denied: bool) {
        let competition = &mut lock(&self.queue).competition;
        *competition = if was_denied { COMPETITION } else { competition.saturating_sub(1) };
    }

    /// Returns the extension of a pause if other processes compete: random, so that no process is
    /// always the first.
    pub(crate) fn jitter(&self) -> Duration {
        if lock(&self.queue).competition == 0 {
            return Duration::ZERO;
        }
        self.entry.gap.mul_f64(random_fraction() / 4.0)
    }

    /// Returns the instant at which the request checks, once it is known.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<Instant> {
        let (at, outdated) = self.poll_queue(cx);
        drop(outdated); // can run foreign code, and must not hold the lock
        at
    }

    /// Does the same. Returns a waker to drop, too.
    fn poll_queue(&self, cx: &Context<'_>) -> (Poll<Instant>, Option<Waker>) {
        let queue = &mut *lock(&self.queue);
        // Stays there until the check has ended, so that a poll in between finds the same instant.
        let (at, waker) = match queue.checking.get_mut(&self.arrival) {
            Some(Checking { at, waker, .. }) => (Poll::Ready(*at), Some(waker)),
            None => {
                let waiting = queue.waiting.get_mut(&self.arrival);
                (Poll::Pending, waiting.map(|waiting| &mut waiting.waker))
            }
        };
        let outdated = match waker {
            Some(Some(waker)) if waker.will_wake(cx.waker()) => None,
            Some(waker) => waker.replace(cx.waker().clone()),
            None => None,
        };
        (at, outdated)
    }

    /// Leaves the queue, with a forecast for the requests behind.
    pub(crate) fn leave(mut self, forecast: Forecast) {
        self.forecast = Some(forecast);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let QueueEntry { queue: id, group, cost, .. } = self.entry;
        let (wakers, _waiting, is_empty) = {
            let queue = &mut *lock(&self.queue);
            let max = queue.groups.get(&group).map_or(0, |group| group.max);
            queue.update_group(group, max, |units| units.saturating_sub(cost));
            let (wakers, waiting) = queue.leave(self.arrival, self.forecast);
            (wakers, waiting, queue.checking.is_empty())
        };
        wakers.into_iter().for_each(Waker::wake);
        // The lock of the map is taken only for the last request of a queue, and before that of the
        // queue, as `join` does: the other order could deadlock.
        if is_empty {
            let queues = &mut *lock(&self.queues.queues);
            queues.remove_empty(id);
            self.queues.update_count(queues);
        }
    }
}

/// Returns the instant after a pause, however long.
pub(crate) fn after(now: Instant, pause: Duration) -> Instant {
    now.checked_add(pause).unwrap_or_else(|| now + FOREVER)
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push { cost: u64 },
        Denied { index: usize },
        Allowed { index: usize, available: u64 },
        Dropped { index: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..5_u64).prop_map(|cost| Step::Push { cost }),
            any::<usize>().prop_map(|index| Step::Denied { index }),
            (any::<usize>(), 0..10_u64)
                .prop_map(|(index, available)| Step::Allowed { index, available }),
            any::<usize>().prop_map(|index| Step::Dropped { index }),
        ]
    }

    proptest! {
        #[test]
        fn at_least_one_request_checks_and_no_more_than_there_are_units_for(
            steps in vec(step(), 0..200)
        ) {
            let (mut queue, mut arrivals) = (Queue::default(), 0);
            for step in steps {
                let checking: Vec<u64> = queue.checking.keys().copied().collect();
                let at = |index: usize| checking.get(index % checking.len().max(1)).copied();
                let forecast = |available| Forecast { available, ..Forecast::unknown() };
                let mut max = 0;
                match step {
                    Step::Push { cost } => {
                        arrivals += 1;
                        queue.push(arrivals, cost, forecast(0));
                    }
                    Step::Denied { index } => {
                        if let Some(arrival) = at(index) {
                            queue.denied(arrival, forecast(0));
                        }
                    }
                    Step::Allowed { index, available } => {
                        if let Some(arrival) = at(index) {
                            queue.leave(arrival, Some(forecast(available)));
                            max = available;
                        }
                    }
                    Step::Dropped { index } => {
                        queue.leave(index as u64 % (arrivals + 1), None);
                    }
                }
                let costs = queue.checking.values().map(|checking| checking.cost);
                let units_checking: u64 = costs.sum();
                prop_assert_eq!(queue.units_checking, units_checking);
                prop_assert!(!queue.checking.is_empty() || queue.waiting.is_empty());
                let is_new = |arrival: &&u64| !checking.contains(arrival);
                let new = queue.checking.keys().filter(is_new).count();
                prop_assert!(new <= 1 || units_checking <= max);
            }
        }
    }
}
