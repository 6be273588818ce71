//! The queues of requests that retry: one per limiter and key, within one process. They hold costs
//! and instants, and know no limiters and no charges: `limiter/retry.rs` translates.
//!
//! Only the first request of a queue sleeps until the quota has units for it, and checks. When it
//! leaves, the next request checks: immediately, or when units are known to be available. If a
//! decision shows units for several requests, these check side by side. The requests behind the
//! first one have no timer, so a request that is dropped delays no other.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::Instant;

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
/// The time in which the requests of this process take the units that it returns to Redis one after
/// the other. Then it leaves units to other processes for a pause. Without this, the others would
/// find no unit: a request of this process learns of a return first.
const TURN: Duration = Duration::from_millis(600);
/// The pause, in which each other process checks once: `HOLD_RETRY`, and the time of a timer and a
/// call on a busy machine.
const PAUSE: Duration = Duration::from_millis(75);
/// The pause after a denial of unknown duration: units are held, perhaps by another process, which
/// ends its holds without a word to this one. The first request of a queue checks after half to all
/// of it then, and an end in this process wakes it.
pub(crate) const HOLD_RETRY: Duration = Duration::from_millis(50);
/// Longer than any process runs, and short enough that an `Instant` can hold it.
const FOREVER: Duration = Duration::from_secs(30 * 366 * 86_400);

/// The requests of this process that retry, by limiter and key.
#[derive(Debug, Default)]
pub struct RetryQueues {
    hasher: RandomState,
    /// `Relaxed`: a queue compares numbers under its lock, and requests that arrive at the same
    /// time on two threads have no order anyway.
    arrivals: AtomicU64,
    /// By the hash of limiter and key. Two with equal hashes, which are unlikely, share a queue.
    queues: Mutex<HashMap<u64, Arc<Mutex<Queue>>>>,
    /// The number of queues, which is read without the lock. `Relaxed`: a request that joins while
    /// units are returned may not be woken, as if it had joined a moment later.
    count: AtomicUsize,
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
        Self { available: 0, next_at: Instant::now(), cost: None }
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
    /// The beginning of the turn of this process, if it shares the units with others.
    turn: Option<Instant>,
    /// The returns of units by this process since the turn began, less the checks that have found
    /// some: a further check shows what another process has taken or returned.
    expected: u32,
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

    /// Returns whether no request waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Lets the first request check that waits for a key, if any does: see
    /// [`units_returned`](Self::units_returned).
    #[inline]
    pub(crate) fn key_returned(&self, limiter: &str, key: &Key<'_>, is_shared: bool) {
        if !self.is_empty() {
            self.units_returned(self.queue_of(limiter, key), is_shared);
        }
    }

    /// Lets the first request of a queue check: units were returned, of which its forecast did not
    /// know. If other processes share the units, these take them after a while.
    pub(crate) fn units_returned(&self, id: u64, is_shared: bool) {
        let queue = lock(&self.queues).get(&id).cloned();
        let wakers = queue.map(|queue| lock(&queue).units_returned(is_shared));
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Returns whether requests wait in this queue.
    #[cfg(feature = "redis")]
    pub(crate) fn is_waited_for(&self, id: u64) -> bool {
        lock(&self.queues).contains_key(&id)
    }

    /// Returns the next number in the order of arrival.
    pub(crate) fn next_arrival(&self) -> u64 {
        self.arrivals.fetch_add(1, Relaxed)
    }

    pub(crate) fn join(
        self: &Arc<Self>,
        entry: QueueEntry,
        arrival: u64,
        forecast: Forecast,
    ) -> Ticket {
        let QueueEntry { queue: id, group, cost, max_units, .. } = entry;
        let mut queues = lock(&self.queues);
        let queue = queues.entry(id).or_default().clone();
        self.count.store(queues.len(), Relaxed);
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
        let queue = lock(&self.queues).get(&id).cloned();
        let wakers = queue.as_ref().map(|queue| lock(queue).start_checks(Forecast::unknown()));
        wakers.into_iter().flatten().for_each(Waker::wake);
        queue.is_some()
    }

    /// Returns the known units that are spent before a request that would join its queue now.
    pub(crate) fn units_before(&self, entry: &QueueEntry, arrival: u64) -> u64 {
        let Some(queue) = lock(&self.queues).get(&entry.queue).cloned() else { return 0 };
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
            self.checking.insert(arrival, Checking { cost, at, waker: None });
            self.units_checking += cost;
            wakers.extend(waker);
        }
        wakers
    }

    fn units_returned(&mut self, is_shared: bool) -> Vec<Waker> {
        let now = Instant::now();
        if !is_shared {
            return self.check_at(now);
        }
        let turn = *self.turn.get_or_insert(now);
        self.expected += 1;
        if now < turn {
            return self.check_at(turn); // a pause
        }
        if now < turn + TURN {
            return self.check_at(now);
        }
        self.turn = Some(now + PAUSE);
        self.check_at(now + PAUSE)
    }

    /// Lets all requests that sleep until they check do so at this instant. Returns their wakers.
    fn check_at(&mut self, at: Instant) -> Vec<Waker> {
        let now = Instant::now();
        let sleeping = self.checking.values_mut().filter(|checking| checking.at > now);
        let woken = sleeping.filter_map(|checking| {
            checking.at = at;
            checking.waker.take()
        });
        woken.collect()
    }

    /// Ends the turn of this process after a check that shows that units were those of another one:
    /// it has taken the units that this process has returned, in a pause or a moment before, or has
    /// returned some itself. The next turn begins with the next return: otherwise this process
    /// would pause after one request.
    fn end_turn_if_taken(&mut self, was_denied: bool) {
        if self.turn.is_some_and(|turn| turn <= Instant::now()) {
            let was_expected = self.expected > 0;
            self.expected = if was_denied { 0 } else { self.expected.saturating_sub(1) };
            self.turn.take_if(|_| was_denied == was_expected);
        }
    }

    fn stop_check(&mut self, arrival: u64) -> Option<Checking> {
        let checking = self.checking.remove(&arrival)?;
        self.units_checking -= checking.cost;
        Some(checking)
    }

    /// Returns a denied request to its position. The first request checks when units are available.
    fn denied(&mut self, arrival: u64, forecast: Forecast) -> Vec<Waker> {
        let Some(Checking { cost, .. }) = self.stop_check(arrival) else { return vec![] };
        self.push(arrival, cost, forecast)
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
        let queue = &mut *lock(&self.queue);
        queue.end_turn_if_taken(was_denied);
        let competition = &mut queue.competition;
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
            // Another request may have joined in the meantime.
            if queues.get(&id).is_some_and(|queue| lock(queue).checking.is_empty()) {
                queues.remove(&id);
                self.queues.count.store(queues.len(), Relaxed);
            }
        }
    }
}

/// Returns the instant after a pause, however long.
pub(crate) fn after(now: Instant, pause: Duration) -> Instant {
    now.checked_add(pause).unwrap_or_else(|| now + FOREVER)
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use proptest::{collection::vec, prelude::*};
    use tokio::time::advance;

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

    /// A process whose only waiting request checks again, each time after `HOLD_RETRY`.
    struct Process {
        queues: Arc<RetryQueues>,
        ticket: Ticket,
    }

    impl Process {
        fn new() -> Self {
            let queues = Arc::<RetryQueues>::default();
            let gap = Duration::ZERO;
            let entry = QueueEntry { queue: 1, group: 1, cost: 1, max_units: 1, gap };
            let ticket = queues.join(entry, 0, Self::retry());
            Self { queues, ticket }
        }

        fn retry() -> Forecast {
            Forecast { available: 0, next_at: Instant::now() + HOLD_RETRY, cost: Some(1) }
        }

        /// The check has ended. The request is to check again.
        fn checked(&self, was_denied: bool) {
            self.ticket.record_competition(was_denied);
            self.ticket.denied(Self::retry());
        }

        /// Returns when the request checks after the process has returned a unit.
        fn returned(&self) -> Duration {
            self.queues.units_returned(1, true);
            match self.ticket.poll(&Context::from_waker(Waker::noop())) {
                Poll::Ready(at) => at.saturating_duration_since(Instant::now()),
                Poll::Pending => panic!("it is the first one"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_leaves_units_to_others_after_its_turn() {
        for was_taken in [true, false] {
            let process = Process::new();
            for _ in 0..12 {
                assert_eq!(process.returned(), Duration::ZERO);
                advance(HOLD_RETRY).await;
                process.checked(false);
            }
            assert_eq!(process.returned(), PAUSE);
            advance(PAUSE).await;
            process.checked(was_taken);
            // The turn of the other process, or the next one of this process.
            advance(TURN).await;
            process.ticket.denied(Process::retry());
            assert_eq!(process.returned(), if was_taken { Duration::ZERO } else { PAUSE });
        }
    }
}
