//! When a denied request asks the store again, where no instant can be reserved for it: limits on several keys, and a
//! leaky bucket that is full. Waiting for a reserved instant is in `turn.rs`.
//!
//! The store keeps no order among these requests. So each process keeps its own: a queue for each
//! limiter and key. Only the first request of a queue sleeps until the quota has room for it, and
//! asks. When it leaves, the next request asks: at once, or when there is room as far as that is
//! known. If a decision shows room for several, as many ask side by side. The others have no pause
//! of their own, so that a request that is dropped delays no other.
//!
//! In one process requests are served in order, and each asks about twice, however many wait: when
//! it arrives, and when there is room (measured: 2.0 times in memory, 1.6 to 2.3 with Redis). It
//! asks three times if the request before it has used up another limit too, whose decision hides
//! when there is room. Several processes compete for each unit, at random (5 processes of 10
//! callers: 6.1 times; of 100 callers: 3.3 to 3.6 times).

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, Hash, Hasher, RandomState},
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::{
    algorithm::{Algorithm, Refill},
    decision::Decision,
    limiter::Charge,
    limiter::{Limiter, MaxWait},
    sync::lock,
    time::with_jitter,
};

/// The precision of sleeps.
const TIMER_TICK: Duration = Duration::from_millis(1);
/// The longest time by which requests are kept apart that leave a queue for another one.
const LONGEST_GAP: Duration = Duration::from_secs(1);
/// The longest time between the instant at which a request asks and the end of its question.
const MAX_STALL: Duration = Duration::from_secs(1);
/// After how many requests that were not denied again no other process is expected to compete.
const RIVALRY: u8 = 8;
/// Longer than any process runs.
const FOREVER: Duration = Duration::from_secs(30 * 366 * 86_400);

/// The requests of this process that ask a store again, by limiter and key.
#[derive(Debug, Default)]
pub(crate) struct RetryQueues {
    hasher: RandomState,
    arrivals: AtomicU64,
    /// By the hash of limiter and key. Two with the same hash, which is unlikely, share a queue.
    queues: Mutex<HashMap<u64, Arc<Mutex<Queue>>>>,
}

/// Requests by their arrival. While there are any, at least one of them is asking.
#[derive(Debug, Default)]
struct Queue {
    asking: BTreeMap<u64, Asking>,
    waiting: BTreeMap<u64, Waiting>,
    /// The sum of the costs of those that are asking.
    units_asking: u64,
    /// By the hash of their limiters and keys.
    shares: HashMap<u64, Share>,
    /// The sum of the shares, each up to its maximum.
    units: u64,
    /// Above 0 if another process was faster lately.
    rivalry: u8,
}

/// The units that the requests of one charge wait for.
#[derive(Debug, Default)]
struct Share {
    units: u64,
    /// What the other limits of the charge let through at once. Requests beyond it leave the queue
    /// when they ask.
    max: u64,
}

impl Share {
    fn bounded(&self) -> u64 {
        self.units.min(self.max)
    }
}

/// A request that asks, now or at an instant.
#[derive(Debug)]
struct Asking {
    cost: u32,
    at: Instant,
}

impl Asking {
    /// Returns false for a request that should have asked long ago: its future is held, but not
    /// polled.
    fn is_attended(&self, now: Instant) -> bool {
        now <= after(self.at, MAX_STALL)
    }
}

#[derive(Debug)]
struct Waiting {
    cost: u32,
    waker: Option<Waker>,
}

/// What a request that stops asking knows of the quota.
#[derive(Clone, Copy, Debug)]
struct Outlook {
    /// The units that are there.
    room: u64,
    /// When there are more, for a request of this cost; of any cost, if there is none.
    more: Instant,
    cost: Option<u32>,
}

impl Outlook {
    fn unknown() -> Self {
        Self { room: 0, more: Instant::now(), cost: None }
    }
}

impl RetryQueues {
    fn join(self: &Arc<Self>, part: &Part<'_>, arrival: u64, outlook: Outlook) -> Ticket {
        let &Part { queue: id, charge, cost, .. } = part;
        let mut queues = lock(&self.queues);
        let queue = queues.entry(id).or_default().clone();
        // With the map still locked: else the queue could be removed meanwhile.
        let wakers = {
            let mut queue = lock(&queue);
            queue.share(charge, part.max_units, |units| units + u64::from(cost));
            queue.push(arrival, cost, outlook)
        };
        drop(queues);
        let (queues, gap) = (self.clone(), part.gap());
        let ticket = Ticket { queues, id, queue, arrival, charge, cost, gap, outlook: None };
        wakers.into_iter().for_each(Waker::wake);
        ticket
    }

    fn has(&self, id: u64) -> bool {
        lock(&self.queues).contains_key(&id)
    }

    /// The units that are spent before a request that would join a queue now, as far as that is
    /// known.
    fn units_before(&self, part: &Part<'_>, arrival: u64) -> u64 {
        let Some(queue) = lock(&self.queues).get(&part.queue).cloned() else { return 0 };
        let queue = lock(&queue);
        let last = queue.asking.keys().next_back().max(queue.waiting.keys().next_back());
        if last.is_some_and(|last| *last > arrival) {
            return 0;
        }
        // What holds up a request before this one with the same limits holds up this one, too.
        let same = queue.shares.get(&part.charge);
        queue.units + same.map_or(0, |same| same.units - same.bounded())
    }
}

impl Queue {
    fn push(&mut self, arrival: u64, cost: u32, outlook: Outlook) -> Vec<Waker> {
        self.waiting.insert(arrival, Waiting { cost, waker: None });
        self.call(outlook)
    }

    fn share(&mut self, charge: u64, max: u64, change: impl Fn(u64) -> u64) {
        let share = self.shares.entry(charge).or_default();
        let before = share.bounded();
        *share = Share { units: change(share.units), max };
        self.units = self.units - before + share.bounded();
        if share.units == 0 {
            self.shares.remove(&charge);
        }
    }

    /// Lets as many ask as there is room for, and at least one. Returns whom to wake, without the
    /// lock.
    fn call(&mut self, outlook: Outlook) -> Vec<Waker> {
        let (mut wakers, now) = (vec![], Instant::now());
        while let Some(first) = self.waiting.first_entry() {
            let cost = first.get().cost;
            let fits = self.units_asking + u64::from(cost) <= outlook.room;
            if !fits && self.asking.values().any(|it| it.is_attended(now)) {
                break;
            }
            let sleeps = !fits && outlook.cost.is_none_or(|it| it == cost);
            let at = if sleeps { outlook.more } else { now };
            let (arrival, Waiting { waker, .. }) = first.remove_entry();
            self.asking.insert(arrival, Asking { cost, at });
            self.units_asking += u64::from(cost);
            wakers.extend(waker);
        }
        wakers
    }

    fn stop_asking(&mut self, arrival: u64) -> Option<Asking> {
        let asking = self.asking.remove(&arrival)?;
        self.units_asking -= u64::from(asking.cost);
        Some(asking)
    }

    /// A request was denied: it goes back to its place, and the first one asks when there is room.
    fn denied(&mut self, arrival: u64, outlook: Outlook) -> Vec<Waker> {
        let Some(Asking { cost, .. }) = self.stop_asking(arrival) else { return vec![] };
        self.waiting.insert(arrival, Waiting { cost, waker: None });
        self.call(outlook)
    }

    /// Returns whom to wake, and what is to be dropped, without the lock.
    fn leave(&mut self, arrival: u64, outlook: Option<Outlook>) -> (Vec<Waker>, Option<Waiting>) {
        let waited = self.waiting.remove(&arrival);
        let asked = self.stop_asking(arrival);
        let cost = waited.as_ref().map(|it| it.cost).or(asked.as_ref().map(|it| it.cost));
        // Of a request that slept, it is known until when.
        let outlook = outlook.unwrap_or_else(|| {
            asked.map_or_else(Outlook::unknown, |it| Outlook { room: 0, more: it.at, cost })
        });
        (self.call(outlook), waited)
    }
}

/// The place of a request in a queue, which it leaves when dropped.
#[derive(Debug)]
struct Ticket {
    queues: Arc<RetryQueues>,
    id: u64,
    queue: Arc<Mutex<Queue>>,
    arrival: u64,
    charge: u64,
    cost: u32,
    /// For how long the next one pauses if this one leaves for another queue.
    gap: Duration,
    outlook: Option<Outlook>,
}

impl Ticket {
    fn denied(&self, outlook: Outlook) {
        let wakers = lock(&self.queue).denied(self.arrival, outlook);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// A request that slept until there is room was denied, as another process was faster, or it
    /// was allowed.
    fn note_rivals(&self, was_denied: bool) {
        let rivalry = &mut lock(&self.queue).rivalry;
        *rivalry = if was_denied { RIVALRY } else { rivalry.saturating_sub(1) };
    }

    /// What a pause takes longer if other processes compete: at random, so that none of them is
    /// always the faster one.
    fn spread(&self) -> Duration {
        if lock(&self.queue).rivalry == 0 {
            return Duration::ZERO;
        }
        let chance = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
        self.gap.mul_f64(chance / 4.0)
    }

    /// The instant at which the request asks, once it is known.
    fn poll(&self, cx: &Context<'_>) -> Poll<Instant> {
        let mut queue = lock(&self.queue);
        if let Some(asking) = queue.asking.get(&self.arrival) {
            return Poll::Ready(asking.at);
        }
        let waiting = queue.waiting.get_mut(&self.arrival).map(|it| &mut it.waker);
        let outdated = match waiting {
            Some(Some(waker)) if waker.will_wake(cx.waker()) => None,
            Some(waker) => waker.replace(cx.waker().clone()),
            None => None,
        };
        drop(queue);
        drop(outdated); // which may run code of others: without the lock
        Poll::Pending
    }

    fn leave(mut self, outlook: Outlook) {
        self.outlook = Some(outlook);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let (wakers, _waited, is_empty) = {
            let queue = &mut *lock(&self.queue);
            let max = queue.shares.get(&self.charge).map_or(0, |share| share.max);
            queue.share(self.charge, max, |units| units.saturating_sub(self.cost.into()));
            let (wakers, waited) = queue.leave(self.arrival, self.outlook);
            (wakers, waited, queue.asking.is_empty())
        };
        wakers.into_iter().for_each(Waker::wake);
        if is_empty {
            let queues = &mut *lock(&self.queues.queues);
            // Another request may have joined meanwhile.
            if queues.get(&self.id).is_some_and(|queue| lock(queue).asking.is_empty()) {
                queues.remove(&self.id);
            }
        }
    }
}

/// What a charge asks of the limiter that has denied it.
struct Part<'a> {
    limiter: &'a Limiter,
    queue: u64,
    /// The hash of all limiters and keys of the charge.
    charge: u64,
    cost: u32,
    /// The most units that requests of this charge can spend at once, by its other limits.
    max_units: u64,
    /// Whether the charge has one key of the limiter.
    is_alone: bool,
}

impl<'a> Part<'a> {
    /// A decision names the limiter, but no key. So requests that have several of its keys queue by
    /// all of them.
    fn of(charge: &'a Charge, name: &str) -> Option<Self> {
        let parts = || charge.own_parts().filter(|(limiter, ..)| limiter.name() == name);
        let (limiter, _, cost) = parts().next()?;
        let shared = super::shared(limiter.store().as_dyn().names());
        let hasher = &shared.retry_queues.hasher;
        let mut queue = hasher.build_hasher();
        parts().for_each(|(limiter, key, _)| (limiter.name(), key).hash(&mut queue));
        let mut all = hasher.build_hasher();
        charge.own_parts().for_each(|(limiter, key, _)| (limiter.name(), key).hash(&mut all));
        let others = charge.own_parts().filter(|(limiter, ..)| limiter.name() != name);
        let max_requests =
            others.map(|(limiter, _, cost)| max_at_once(limiter) / u64::from(cost.max(1)));
        Some(Self {
            limiter,
            queue: queue.finish(),
            charge: all.finish(),
            cost,
            max_units: max_requests.min().map_or(u64::MAX, |max| max.saturating_mul(cost.into())),
            is_alone: parts().nth(1).is_none(),
        })
    }

    fn queues(&self) -> Arc<RetryQueues> {
        super::shared(self.limiter.store().as_dyn().names()).retry_queues.clone()
    }

    /// The time in which the quota gives back the cost.
    fn gap(&self) -> Duration {
        let quota = self.limiter.quota();
        let window = quota.window().mul_f64(f64::from(self.cost) / f64::from(quota.limit()));
        window.min(LONGEST_GAP)
    }

    /// At least the time in which the quota gives back so many units and the cost, of which the
    /// cost alone takes `retry_after`.
    fn time_behind(&self, units: u64, retry_after: Duration) -> Duration {
        let quota = self.limiter.quota();
        let (limit, window) = (u128::from(quota.limit()), u128::from(quota.window_us()));
        let micros = match self.limiter.algorithm() {
            Algorithm::LeakyBucket | Algorithm::TokenBucket { refill: Refill::Continuous, .. } => {
                u128::from(units) * window / limit
            }
            // The units of a window may come back at once.
            _ => u128::from(units) / limit * window,
        };
        retry_after.saturating_add(Duration::from_micros(micros.try_into().unwrap_or(u64::MAX)))
    }
}

fn max_at_once(limiter: &Limiter) -> u64 {
    let quota = limiter.quota();
    match limiter.algorithm() {
        Algorithm::TokenBucket { overdraft, .. } => {
            u64::from(quota.burst_size()) + u64::from(overdraft)
        }
        Algorithm::LeakyBucket => quota.burst_size().into(),
        _ => quota.limit().into(),
    }
}

/// A request that asks again when it is denied.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    /// Its number in the order of arrival, which it keeps when another limiter denies it.
    arrival: Option<u64>,
    place: Option<Place>,
    timer: Option<Pin<Box<Sleep>>>,
    has_slept: bool,
}

#[derive(Debug)]
enum Place {
    Queue(Ticket),
    /// It asks at this instant, without order.
    Alone(Instant),
}

impl Retry {
    /// The request was denied. Returns whether it asks again, which it does if its turn can come
    /// until `until`.
    pub(crate) fn denied(
        &mut self,
        charge: &Charge,
        denied: &Decision,
        until: Option<Instant>,
    ) -> bool {
        let Some(retry_after) = denied.retry_after() else { return false };
        let now = Instant::now();
        let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(now));
        let has_slept = mem::take(&mut self.has_slept);
        let Some(part) = Part::of(charge, denied.limiter()) else {
            let pause = with_jitter(retry_after).min(left);
            self.place = Some(Place::Alone(after(now, pause)));
            return retry_after <= left;
        };
        let more = |pause| Outlook { room: 0, more: after(now, pause), cost: Some(part.cost) };
        let is_known = matches!(&self.place, Some(Place::Queue(ticket)) if ticket.id == part.queue);
        if retry_after > left {
            if let Some(Place::Queue(ticket)) = self.place.take_if(|_| is_known) {
                ticket.leave(more(retry_after));
            }
            return false;
        }
        if let Some(Place::Queue(ticket)) = &self.place
            && is_known
        {
            if has_slept {
                ticket.note_rivals(true);
            }
            ticket.denied(more(retry_after.saturating_add(ticket.spread()).min(left)));
            return true;
        }
        let queues = part.queues();
        let arrival = *self.arrival.get_or_insert_with(|| queues.arrivals.fetch_add(1, Relaxed));
        if part.time_behind(queues.units_before(&part, arrival), retry_after) > left {
            return false;
        }
        let ticket = queues.join(&part, arrival, more(retry_after));
        if let Some(Place::Queue(left)) = self.place.replace(Place::Queue(ticket)) {
            // The next one is paced as if this one had spent. Else all requests of a key would
            // follow to the other queue with each unit, and back.
            let more = after(now, left.gap);
            left.leave(Outlook { room: 0, more, cost: None });
        }
        true
    }

    /// The request was allowed: the next ones ask when there is room for them.
    pub(crate) fn allowed(&mut self, charge: &Charge, decision: &Decision) {
        (self.timer, self.has_slept) = (None, false);
        let Some(Place::Queue(ticket)) = self.place.take() else { return };
        ticket.note_rivals(false);
        let is_leaky =
            |(limiter, ..): (&Limiter, _, _)| matches!(limiter.algorithm(), Algorithm::LeakyBucket);
        if charge.retry_until(MaxWait::LONGEST).is_some() && charge.own_parts().any(is_leaky) {
            // A bucket with room still denies, as no instant is reserved.
            return ticket.leave(Outlook::unknown());
        }
        let mut outlook = Outlook { room: decision.remaining(), ..Outlook::unknown() };
        let is_of_queue = Part::of(charge, decision.limiter())
            .is_some_and(|part| part.is_alone && part.queue == ticket.id);
        if outlook.room == 0 && is_of_queue {
            let pause = decision.replenish_after().saturating_sub(decision.age()) + ticket.spread();
            (outlook.more, outlook.cost) = (after(outlook.more, pause), Some(1));
        }
        ticket.leave(outlook);
    }

    /// Waits for the turn. Returns whether it has come, as it has not if the wait ended before.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, until: Option<Instant>) -> Poll<bool> {
        let turn = match &self.place {
            Some(Place::Queue(ticket)) => ticket.poll(cx),
            Some(Place::Alone(at)) => Poll::Ready(*at),
            None => return Poll::Ready(true),
        };
        let (instant, asks) = match (turn, until) {
            (Poll::Ready(at), Some(until)) if at > until => return Poll::Ready(false),
            (Poll::Ready(at), _) => (at, true),
            (Poll::Pending, Some(until)) => (until, false),
            (Poll::Pending, None) => return Poll::Pending,
        };
        if instant > Instant::now() {
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(instant)));
            if timer.deadline() != instant {
                timer.as_mut().reset(instant);
            }
            self.has_slept = asks;
            ready!(timer.as_mut().poll(cx));
        }
        Poll::Ready(asks)
    }
}

fn after(now: Instant, pause: Duration) -> Instant {
    now.checked_add(pause).unwrap_or_else(|| now + FOREVER)
}

/// Sleeps for a moment if other requests wait to ask again, so that these ask first. Otherwise the caller that was
/// served last would be served next, each time: it asks at the instant at which a window begins, or at which its own
/// departure makes room in a leaky bucket.
pub(crate) async fn let_others_ask_first(charge: &Charge) {
    let is_awaited = charge.own_parts().any(|(limiter, ..)| {
        Part::of(charge, limiter.name()).is_some_and(|part| part.queues().has(part.queue))
    });
    if is_awaited {
        sleep(TIMER_TICK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use proptest::{collection::vec, prelude::*};
    use tokio::{
        task::JoinSet,
        time::{Instant, sleep},
    };

    use super::*;
    use crate::{MemoryStore, Quota};

    const MINUTE: Duration = Duration::from_secs(60);

    /// Callers that ask again as soon as they were served, as `Charge::acquire` does: how often they asked, and were
    /// served.
    async fn greedy(callers: u64, all: &Limiter, own: &Limiter) -> (u32, u32) {
        let (mut tasks, end) = (JoinSet::new(), Instant::now() + MINUTE);
        for caller in 0..callers {
            let charge = Charge::new(own, caller).and(Charge::new(all, "everybody"));
            tasks.spawn(async move {
                let (mut retry, mut asked, mut served) = (Retry::default(), 0, 0);
                while Instant::now() < end {
                    asked += 1;
                    let decision = charge.check().await.unwrap();
                    if decision.is_allowed() {
                        retry.allowed(&charge, &decision);
                        (retry, served) = (Retry::default(), served + 1);
                    } else {
                        assert!(retry.denied(&charge, &decision, None));
                        assert!(poll_fn(|cx| retry.poll(cx, None)).await);
                    }
                }
                (asked, served)
            });
        }
        let counts = tasks.join_all().await;
        counts.into_iter().fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
    }

    #[tokio::test(start_paused = true)]
    async fn however_many_wait_each_asks_about_twice() {
        for (burst, times) in [(10, 2.1), (1, 3.1)] {
            for callers in [5, 50, 500] {
                let store = MemoryStore::new();
                let limiter = |name, quota| {
                    Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
                };
                let all = limiter("all", Quota::per_second(100).burst(1));
                // After a request, either it has something left, or it hides what is left of the
                // other.
                let own = limiter("own", Quota::per_second(1_000).burst(burst));
                let (asked, served) = greedy(callers, &all, &own).await;
                let per_served = f64::from(asked - callers as u32) / f64::from(served);
                println!("own burst {burst}, {callers} callers: {served}, asked {per_served:.2}");
                assert!(served >= 60 * 95, "{callers} callers: {served} served");
                assert!(per_served <= times, "{callers} callers: {per_served} for each");
            }
        }
    }

    /// What a task sees of a request that was denied: whether it may ask, and whether it was woken
    /// since.
    struct Denied(Retry, Arc<Woken>, Charge);

    #[derive(Default)]
    struct Woken(AtomicU64);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    impl Denied {
        /// Is denied by the limiter of its charge.
        async fn new(charge: Charge) -> Self {
            let mut it = Self(Retry::default(), Arc::default(), charge);
            assert!(it.ask().await.is_err());
            it
        }

        /// Returns whether it asks again if it is not allowed.
        async fn ask(&mut self) -> Result<(), bool> {
            let decision = self.2.check().await.unwrap();
            if decision.is_allowed() {
                self.0.allowed(&self.2, &decision);
                return Ok(());
            }
            Err(self.0.denied(&self.2, &decision, None))
        }

        fn may_ask(&mut self) -> bool {
            let waker = Waker::from(self.1.clone());
            self.0.poll(&mut Context::from_waker(&waker), None) == Poll::Ready(true)
        }

        fn was_woken(&self) -> bool {
            self.1.0.swap(0, Relaxed) > 0
        }
    }

    /// A bucket of 100 per second with nothing left, and requests that were denied by it.
    async fn queue<const N: usize>(burst: u32, costs: [u32; N]) -> (Limiter, [Denied; N]) {
        let quota = Quota::per_second(100).burst(burst);
        let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
        assert!(limiter.check_n("key", burst).await.unwrap().is_allowed());
        let mut all = Vec::new();
        for cost in costs {
            all.push(Denied::new(Charge::new(&limiter, "key").cost(cost)).await);
            assert!(!all.last_mut().unwrap().may_ask());
        }
        (limiter, all.try_into().ok().unwrap())
    }

    const UNIT: Duration = Duration::from_millis(10);

    #[tokio::test(start_paused = true)]
    async fn the_first_asks_when_there_is_room_and_the_next_one_after_it() {
        let (limiter, [mut first, mut second, mut third]) = queue(10, [1, 1, 1]).await;
        sleep(UNIT).await;
        assert!(first.was_woken() && first.may_ask());
        assert!(!second.may_ask() && !third.may_ask() && !second.was_woken());
        assert_eq!(first.ask().await, Ok(()));
        assert!(second.was_woken() && !second.may_ask(), "it knows that there is no room yet");
        sleep(UNIT).await;
        assert!(second.may_ask() && !third.may_ask() && !third.was_woken());
        assert_eq!(second.ask().await, Ok(()));
        assert!(third.was_woken());
        drop((first, second, third));
        let shared = super::super::shared(limiter.store().as_dyn().names());
        assert!(lock(&shared.retry_queues.queues).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn as_many_ask_as_there_is_room_for() {
        let (_, [mut first, mut second, mut third, mut fourth]) = queue(10, [1, 2, 1, 1]).await;
        sleep(4 * UNIT).await;
        assert!(first.may_ask() && !second.may_ask());
        assert_eq!(first.ask().await, Ok(()));
        assert!(second.may_ask() && third.may_ask() && !fourth.may_ask());
        assert_eq!((third.ask().await, second.ask().await), (Ok(()), Ok(())));
        assert!(fourth.was_woken() && !fourth.may_ask());
        sleep(UNIT).await;
        assert!(fourth.may_ask());
    }

    #[tokio::test(start_paused = true)]
    async fn of_those_that_ask_side_by_side_the_oldest_that_is_denied_asks_first() {
        let (limiter, [mut first, mut second, mut third]) = queue(10, [1, 1, 1]).await;
        sleep(3 * UNIT).await;
        assert!(first.may_ask() && first.ask().await.is_ok());
        assert!(second.may_ask() && third.may_ask());
        assert!(limiter.check_n("key", 2).await.unwrap().is_allowed(), "another process");
        assert_eq!((third.ask().await, second.ask().await), (Err(true), Err(true)));
        assert!(!second.may_ask() && !third.may_ask());
        sleep(UNIT).await;
        assert!(second.may_ask() && !third.may_ask());
        assert!(second.ask().await.is_ok() && third.was_woken());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_dropped_passes_on_its_turn_whatever_it_was_doing() {
        for dropped_at in ["asleep", "woken", "asking"] {
            let (_, [mut first, mut second, mut third]) = queue(10, [2, 1, 2]).await;
            sleep(UNIT).await;
            // It costs less: there may be room for it already.
            drop(first);
            assert!(second.was_woken() && second.may_ask(), "{dropped_at}");
            assert_eq!(second.ask().await, Ok(()));
            assert!(third.was_woken() && third.may_ask(), "it costs more than is known");
            assert_eq!(third.ask().await, Err(true));
            assert!(!third.may_ask());
            first = Denied::new(third.2.clone()).await;
            assert!(!first.may_ask());
            if dropped_at != "asleep" {
                sleep(2 * UNIT).await;
                assert!(third.was_woken());
            }
            if dropped_at == "asking" {
                assert!(third.may_ask());
            }
            drop(third);
            assert!(first.was_woken(), "{dropped_at}");
            assert_eq!(first.may_ask(), dropped_at != "asleep");
            sleep(2 * UNIT).await;
            assert!(first.may_ask() && first.ask().await.is_ok(), "{dropped_at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_not_polled_stops_others_only_for_a_moment() {
        let (_, [first, mut second, third, mut fourth]) = queue(10, [1, 1, 1, 1]).await;
        sleep(UNIT + MAX_STALL).await;
        drop(third); // any request that comes or goes makes the others look
        assert!(first.was_woken() && !second.may_ask(), "it is time for the first one");
        sleep(Duration::from_millis(1)).await;
        assert!(!fourth.may_ask());
        drop(fourth);
        assert!(second.was_woken() && second.may_ask() && second.ask().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_denied_last_is_told_until_when_the_next_ones_would_wait() {
        let (limiter, [mut first, mut second]) = queue(10, [1, 1]).await;
        sleep(UNIT).await;
        assert!(first.may_ask());
        assert!(limiter.check("key").await.unwrap().is_allowed(), "another process");
        let denied = first.2.check().await.unwrap();
        assert!(!first.0.denied(&first.2, &denied, Some(Instant::now())));
        assert!(second.was_woken() && !second.may_ask());
        let waker = Waker::noop();
        let until = Some(Instant::now() + UNIT / 2);
        let polled = second.0.poll(&mut Context::from_waker(waker), until);
        assert_eq!(polled, Poll::Ready(false), "it asks no more than it must");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_drawn_out_at_random_only_against_other_processes_and_by_little() {
        let mut pauses = vec![];
        for _ in 0..100 {
            let (limiter, [mut first]) = queue(10, [1]).await;
            sleep(UNIT).await;
            assert!(first.may_ask());
            assert!(limiter.check("key").await.unwrap().is_allowed(), "another process");
            assert_eq!(first.ask().await, Err(true));
            let Some(Place::Queue(ticket)) = &first.0.place else { panic!("it has a place") };
            let Poll::Ready(at) = ticket.poll(&Context::from_waker(Waker::noop())) else {
                panic!("it is the first")
            };
            let pause = at - Instant::now();
            assert!((UNIT..=UNIT * 5 / 4).contains(&pause), "{pause:?}");
            pauses.push(pause);
        }
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_keeps_its_order_when_another_limiter_denies_it() {
        let store = MemoryStore::new();
        let limiter = |name| {
            let quota = Quota::per_second(100).burst(1);
            Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
        };
        let (one, two) = (limiter("one"), limiter("two"));
        assert!(one.check("key").await.unwrap().is_allowed());
        let both = Charge::new(&one, "key").and(Charge::new(&two, "all"));
        let mut first = Denied::new(both.clone()).await;
        let mut next_of_one = Denied::new(both).await;
        assert!(two.check("all").await.unwrap().is_allowed());
        let mut second = Denied::new(Charge::new(&two, "all")).await;
        let mut third = Denied::new(Charge::new(&two, "all")).await;
        assert!(!first.may_ask() && !next_of_one.may_ask());
        assert!(!second.may_ask() && !third.may_ask());
        sleep(UNIT).await;
        assert!(two.check("all").await.unwrap().is_allowed(), "another process");
        assert!(first.may_ask() && first.ask().await == Err(true), "by the other limiter");
        assert!(next_of_one.was_woken() && !next_of_one.may_ask(), "it is paced");
        assert!(second.may_ask() && second.ask().await == Err(true));
        sleep(2 * UNIT).await;
        assert!(!second.may_ask() && first.was_woken() && first.may_ask());
        assert_eq!(first.ask().await, Ok(()));
        assert!(second.was_woken() && !third.was_woken());
        assert!(next_of_one.may_ask());
    }

    #[tokio::test]
    async fn requests_that_share_one_of_two_keys_of_a_limiter_do_not_wait_for_each_other() {
        let quota = Quota::per_hour(1);
        let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
        let charge = |key| Charge::new(&limiter, "shared").and(Charge::new(&limiter, key));
        let [one, two] = ["one", "two"].map(|key| {
            let charge = charge(key);
            Part::of(&charge, "default").map(|part| (part.queue, part.is_alone)).unwrap()
        });
        assert!(one.0 != two.0 && !one.1 && !two.1);
    }

    #[test]
    fn the_time_behind_others_is_never_above_what_the_quota_needs() {
        let time_behind = |algorithm, quota, units| {
            let limiter = Limiter::new(MemoryStore::new(), algorithm, quota);
            let charge = Charge::new(&limiter, "key");
            Part::of(&charge, "default").unwrap().time_behind(units, UNIT)
        };
        let (smooth, quota) = (Algorithm::token_bucket(), Quota::per_second(10));
        let second = Duration::from_secs(1);
        assert_eq!(time_behind(smooth, quota, 25), UNIT + 5 * second / 2);
        assert_eq!(time_behind(Algorithm::LeakyBucket, quota, 1), UNIT + second / 10);
        for algorithm in [
            Algorithm::FixedWindow,
            Algorithm::SlidingLog,
            Algorithm::sliding_window(),
            Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 },
        ] {
            assert_eq!(time_behind(algorithm, quota, 9), UNIT, "{algorithm}");
            assert_eq!(time_behind(algorithm, quota, 25), UNIT + 2 * second, "{algorithm}");
        }
        let slow = Quota::new(1, Duration::from_secs(366 * 86_400));
        assert!(time_behind(smooth, slow, u64::MAX) > Duration::from_secs(1 << 40));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push { cost: u32 },
        Denied { who: usize },
        Allowed { who: usize, room: u64 },
        Dropped { who: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..5_u32).prop_map(|cost| Step::Push { cost }),
            any::<usize>().prop_map(|who| Step::Denied { who }),
            (any::<usize>(), 0..10_u64).prop_map(|(who, room)| Step::Allowed { who, room }),
            any::<usize>().prop_map(|who| Step::Dropped { who }),
        ]
    }

    proptest! {
        #[test]
        fn while_there_are_requests_one_asks_and_no_more_than_there_is_room_for(
            steps in vec(step(), 0..200)
        ) {
            let (mut queue, mut arrivals) = (Queue::default(), 0);
            for step in steps {
                let asking: Vec<u64> = queue.asking.keys().copied().collect();
                let one = |who: usize| asking.get(who % asking.len().max(1)).copied();
                let outlook = |room| Outlook { room, ..Outlook::unknown() };
                let mut most = 0;
                match step {
                    Step::Push { cost } => {
                        arrivals += 1;
                        queue.push(arrivals, cost, outlook(0));
                    }
                    Step::Denied { who } => {
                        if let Some(who) = one(who) {
                            queue.denied(who, outlook(0));
                        }
                    }
                    Step::Allowed { who, room } => {
                        if let Some(who) = one(who) {
                            queue.leave(who, Some(outlook(room)));
                            most = room;
                        }
                    }
                    Step::Dropped { who } => {
                        queue.leave(who as u64 % (arrivals + 1), None);
                    }
                }
                let units_asking: u64 = queue.asking.values().map(|it| u64::from(it.cost)).sum();
                prop_assert_eq!(queue.units_asking, units_asking);
                prop_assert!(!queue.asking.is_empty() || queue.waiting.is_empty());
                let new = queue.asking.keys().filter(|it| !asking.contains(it)).count();
                prop_assert!(new <= 1 || units_asking <= most);
            }
        }
    }
}
