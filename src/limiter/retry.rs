//! Retries of denied requests for which no instant can be reserved: limits on several keys, and a
//! leaky bucket that is full. Waiting for a reserved instant is in `waiter.rs`.
//!
//! The store keeps no order among these requests, so each process has a queue for each limiter and
//! key: see `retry_queue.rs`. Within a process, requests are served in order, and each checks about
//! twice, however many wait: on arrival, and when units are available (measured: 2.0 times in
//! memory, 1.6 to 2.3 with Redis). A request checks three times if the request before it used up
//! another limit, too: that decision hides when units are available. Processes compete for each
//! unit at random (5 processes of 10 callers: 6.1 times; of 100 callers: 3.3 to 3.6 times).

use std::{
    mem,
    pin::Pin,
    slice,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::{charge::Charge, handle::Limiter, max_wait::MaxWait};
use crate::{
    decision::Decision,
    quota::Quota,
    store::{Forecast, LONGEST_HOLD_RETRY, QueueEntry, RetryQueues, Store, Ticket, after},
    time::random_fraction,
};

/// The resolution of the timers of tokio: a shorter sleep takes as long.
const TIMER_TICK: Duration = Duration::from_millis(1);
/// The longest pause between requests that move from one queue to another. The instant is a guess,
/// and a request that sleeps through a wrong one delays those behind it by as much.
const MAX_GAP: Duration = Duration::from_secs(1);
/// The pauses between two calls of a store that fails. The first pause is that between the probes
/// of a circuit breaker: asking more often finds out nothing.
const STORE_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// The parts of a charge that one limiter counts.
struct LimiterPart {
    queues: Arc<RetryQueues>,
    entry: QueueEntry,
    quota: Quota,
    /// True if the quota restores its units one by one.
    is_smooth: bool,
    /// True if the charge has a single key of the limiter.
    is_single: bool,
    /// The queues of the single keys, if there are several.
    several: Vec<u64>,
}

impl LimiterPart {
    /// Returns the parts of the limiter that has decided.
    fn of(charge: &Charge, decision: &Decision) -> Option<Self> {
        let foreign = || Self::foreign(charge, decision.quota(), decision.cost());
        Self::named(charge, decision.limiter()).or_else(foreign)
    }

    /// Returns the parts of the first limiter, about which nothing is decided.
    fn first(charge: &Charge) -> Option<Self> {
        let name = charge.limiters().next()?.name();
        // The quota of a foreign limiter is only in its store: any will do for a pause.
        let foreign = || Self::foreign(charge, Quota::per_second(1), 1);
        Self::named(charge, name).or_else(foreign)
    }

    /// Returns the part of a limiter in a foreign format, which shares no charge.
    fn foreign(charge: &Charge, quota: Quota, cost: u64) -> Option<Self> {
        let (queues, queue) = foreign_queue(charge)?;
        let gap = gap(quota, cost);
        let entry = QueueEntry { queue, group: queue, cost, max_units: u64::MAX, gap };
        Some(Self { queues, entry, quota, is_smooth: false, is_single: true, several: vec![] })
    }

    /// Returns the parts of the limiter of this name. A decision contains the limiter, but no key.
    /// So requests with several keys of one limiter queue by all of these keys.
    fn named(charge: &Charge, name: &str) -> Option<Self> {
        let parts = || charge.own_parts().filter(|(limiter, ..)| limiter.name() == name);
        let (limiter, _, cost) = parts().next()?;
        let (queues, quota) = (queues(limiter), limiter.quota());
        let queue = queues.hash_of(parts().map(|(limiter, key, _)| (limiter.name(), key)));
        let all = charge.own_parts().map(|(limiter, key, _)| (limiter.name(), key));
        let group = queues.hash_of(all);
        let others = charge.own_parts().filter(|(limiter, ..)| limiter.name() != name);
        let max_requests = others.map(|(limiter, _, cost)| limiter.max_cost() / cost.max(1));
        let max_units = max_requests.min().map_or(u64::MAX, |max| max.saturating_mul(cost));
        let entry = QueueEntry { queue, group, cost, max_units, gap: gap(quota, cost) };
        let is_smooth = limiter.params().restores_evenly();
        let is_single = parts().nth(1).is_none();
        let mut several = vec![];
        if !is_single {
            several.extend(parts().map(|(limiter, key, _)| queues.queue_of(limiter.name(), key)));
        }
        Some(Self { queues, entry, quota, is_smooth, is_single, several })
    }

    /// Returns the queues of the single keys.
    fn keys(&self) -> &[u64] {
        if self.is_single { slice::from_ref(&self.entry.queue) } else { &self.several }
    }

    /// Returns a lower bound of the time in which the quota restores `units` and the cost, of which
    /// the cost alone takes `retry_after`.
    fn time_behind(&self, units: u64, retry_after: Duration) -> Duration {
        let (limit, window) = (u128::from(self.quota.limit()), u128::from(self.quota.window_us()));
        let micros = match self.is_smooth {
            true => u128::from(units) * window / limit,
            // The units of a window may be restored all at once.
            false => u128::from(units) / limit * window,
        };
        retry_after.saturating_add(Duration::from_micros(micros.try_into().unwrap_or(u64::MAX)))
    }
}

fn queues(limiter: &Limiter) -> Arc<RetryQueues> {
    limiter.store().names().retry_queues().clone()
}

/// Returns the queue of a charge of a limiter in a foreign format.
fn foreign_queue(charge: &Charge) -> Option<(Arc<RetryQueues>, u64)> {
    let target = charge.limiters().next()?.as_foreign()?;
    Some(target.retry_queue(charge.keys().next()?))
}

/// Returns the time in which the quota restores the cost.
fn gap(quota: Quota, cost: u64) -> Duration {
    let micros = u128::from(cost) * u128::from(quota.window_us()) / u128::from(quota.limit());
    // A cost that the quota cannot grant can have a gap that is too long for a `Duration`.
    Duration::from_micros(micros.min(MAX_GAP.as_micros()) as u64)
}

/// The state of a request that retries when it is denied.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    /// The number in the order of arrival, which stays the same when another limiter denies, and
    /// when the request began to wait.
    arrival: Option<(u64, Instant)>,
    ticket: Option<Ticket>,
    timer: Option<Pin<Box<Sleep>>>,
    has_slept: bool,
    /// True if it waits for units that are held, which can be returned at any time.
    waits_for_holds: bool,
    /// True if it waits for a store that has failed.
    waits_for_store: bool,
}

impl Retry {
    /// Records that the store has failed. Returns whether the request asks again by `deadline`: of
    /// the requests in a queue, only the first one does, after a pause that grows with the wait.
    pub(crate) fn store_failed(&mut self, charge: &Charge, deadline: Option<Instant>) -> bool {
        let now = Instant::now();
        let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
        let Some(part) = LimiterPart::first(charge).filter(|_| !left.is_zero()) else {
            return false;
        };
        (self.waits_for_store, self.has_slept) = (true, false);
        let (arrival, since) =
            *self.arrival.get_or_insert_with(|| (part.queues.next_arrival(), now));
        let [shortest, longest] = STORE_PAUSES;
        // At random, so that the requests of all keys and processes do not ask at one instant.
        let spread = 0.5 + random_fraction() / 2.0;
        let pause = (now - since).clamp(shortest, longest).mul_f64(spread).min(left);
        let forecast = Forecast::after_pause(after(now, pause));
        match &self.ticket {
            Some(ticket) => ticket.denied(forecast),
            None => {
                let ticket = part.queues.join(part.entry, part.keys(), arrival, forecast);
                self.ticket = Some(ticket);
            }
        }
        true
    }

    /// Records a denial. Returns whether the request retries: if it can be allowed by `deadline`.
    pub(crate) fn denied(
        &mut self,
        charge: &Charge,
        denied: &Decision,
        deadline: Option<Instant>,
    ) -> bool {
        let now = Instant::now();
        let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
        let has_slept = mem::take(&mut self.has_slept);
        self.waits_for_store = false;
        let Some(part) = LimiterPart::of(charge, denied) else { return false };
        // A block ends at its instant, whatever is returned.
        self.waits_for_holds = denied.held() > 0 && !denied.is_blocked();
        let queues = &part.queues;
        let (arrival, since) = *self.arrival.get_or_insert_with(|| (queues.next_arrival(), now));
        let retry = queues.hold_retry(now - since);
        let (retry_after, is_known) = match denied.retry_after() {
            Some(time) if time <= left || !self.waits_for_holds => (time, true),
            // Holds can end sooner.
            _ if left.is_zero() => (retry, false),
            _ => (retry.min(left), false),
        };
        let forecast = |pause| Forecast {
            available: 0,
            next_at: after(now, pause),
            cost: Some(part.entry.cost),
        };
        let is_in_queue = |ticket: &Ticket| ticket.entry().queue == part.entry.queue;
        if retry_after > left {
            // It leaves now, and not at its deadline: those behind may have more time.
            if let Some(ticket) = self.ticket.take_if(|ticket| is_in_queue(ticket)) {
                // The requests behind it may not know of the block.
                let next = if denied.is_blocked() { Duration::ZERO } else { retry_after };
                ticket.leave(forecast(next));
            }
            return false;
        }
        if let Some(ticket) = self.ticket.as_ref().filter(|ticket| is_in_queue(ticket)) {
            if has_slept {
                ticket.record_competition(true);
            }
            let jitter = if is_known { ticket.jitter() } else { Duration::ZERO };
            // At most until its deadline: with the jitter it would miss units that it can have.
            ticket.denied(forecast(retry_after.saturating_add(jitter).min(left)));
            return true;
        }
        // Denied now rather than at its deadline, so that no request sleeps in vain. Holds return
        // units sooner.
        if !self.waits_for_holds
            && part.time_behind(queues.units_before(&part.entry, arrival), retry_after) > left
        {
            return false;
        }
        // A hold that has ended since the denial has woken no request: there was no queue.
        let first = match self.waits_for_holds {
            true => retry_after.min(retry).min(LONGEST_HOLD_RETRY),
            false => retry_after,
        };
        let ticket = queues.join(part.entry, part.keys(), arrival, forecast(first));
        if let Some(previous) = self.ticket.replace(ticket) {
            // The next request is paced as if this one had spent. Otherwise all requests of a key
            // would move to the other queue with each unit, and back.
            let next_at = after(now, previous.entry().gap);
            previous.leave(Forecast { available: 0, next_at, cost: None });
        }
        true
    }

    /// Joins the queue of a limit for which requests wait, or whose units this process leaves to
    /// others for a pause, before a first check. Returns false if there is none.
    pub(crate) fn join(&mut self, charge: &Charge) -> bool {
        let names = charge.own_parts().map(|(limiter, ..)| limiter.name());
        let mut parts = names.filter_map(|name| LimiterPart::named(charge, name));
        let now = Instant::now();
        let waiting = parts.find_map(|part| {
            let pause_end = part.queues.pause_end(part.keys());
            let waits = pause_end.is_some() || part.queues.has(part.entry.queue);
            waits.then(|| (part, pause_end.unwrap_or(now)))
        });
        let Some((part, next_at)) = waiting else { return false };
        let (arrival, forecast) = (part.queues.next_arrival(), Forecast::after_pause(next_at));
        self.arrival = Some((arrival, now));
        self.ticket = Some(part.queues.join(part.entry, part.keys(), arrival, forecast));
        self.waits_for_holds = true;
        true
    }

    /// Records that the request was allowed: requests behind it check when units are available.
    pub(crate) fn allowed(&mut self, charge: &Charge, decision: &Decision) {
        (self.timer, self.has_slept) = (None, false);
        let Some(ticket) = self.ticket.take() else { return };
        ticket.record_competition(false);
        if mem::take(&mut self.waits_for_store) && charge.reserves() {
            return ticket.leave(Forecast::unknown()); // the next request reserves its instant
        }
        let shapes = |(limiter, ..): (&Limiter, _, _)| limiter.params().shapes();
        if charge.retry_deadline(MaxWait::LONGEST).is_some() && charge.own_parts().any(shapes) {
            // A shaper can deny even with units available, as no instant is reserved.
            return ticket.leave(Forecast::unknown());
        }
        let mut forecast = Forecast { available: decision.remaining(), ..Forecast::unknown() };
        let is_about_queue = LimiterPart::of(charge, decision)
            .is_some_and(|part| part.is_single && part.entry.queue == ticket.entry().queue);
        if forecast.available == 0 && is_about_queue {
            let pause = decision.replenish_after().saturating_sub(decision.age()) + ticket.jitter();
            (forecast.next_at, forecast.cost) = (after(forecast.next_at, pause), Some(1));
        }
        ticket.leave(forecast);
    }

    /// Waits until the request is to check. Returns false if the deadline comes first.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, deadline: Option<Instant>) -> Poll<bool> {
        let Some(ticket) = &self.ticket else { return Poll::Ready(true) };
        let (instant, checks) = match (ticket.poll(cx), deadline) {
            // A last time: units can have been returned meanwhile, as in a pause.
            (Poll::Ready(at), Some(deadline)) if at > deadline && self.waits_for_holds => {
                (deadline, true)
            }
            (Poll::Ready(at), Some(deadline)) if at > deadline => return Poll::Ready(false),
            (Poll::Ready(at), _) => (at, true),
            (Poll::Pending, Some(deadline)) => (deadline, false),
            (Poll::Pending, None) => return Poll::Pending,
        };
        if instant > Instant::now() {
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(instant)));
            // Moved, not made anew: a retry allocates nothing.
            if timer.deadline() != instant {
                timer.as_mut().reset(instant);
            }
            self.has_slept = checks && !self.waits_for_store;
            ready!(timer.as_mut().poll(cx));
        }
        Poll::Ready(checks)
    }
}

/// Sleeps for a moment if other requests wait to retry, so that these check first. Otherwise the
/// caller that was served last would be served next, each time: it checks at the instant at which a
/// window begins, or at which its own departure makes room in a leaky bucket.
pub(crate) async fn yield_to_queue(charge: &Charge) {
    if visit_queue(charge) {
        sleep(TIMER_TICK).await;
    }
}

/// Returns whether requests wait in a queue of the charge. If these wait for a request that is not
/// polled, the next one checks.
pub(crate) fn visit_queue(charge: &Charge) -> bool {
    let is_queued = charge.own_parts().any(|(limiter, ..)| {
        LimiterPart::named(charge, limiter.name())
            .is_some_and(|part| part.queues.has(part.entry.queue))
    });
    is_queued || foreign_queue(charge).is_some_and(|(queues, queue)| queues.has(queue))
}

/// Returns whether this process leaves units of the charge to others.
fn has_pause(charge: &Charge) -> bool {
    charge.own_parts().any(|(limiter, key, _)| {
        let queues = queues(limiter);
        queues.pause_end(&[queues.queue_of(limiter.name(), key)]).is_some()
    })
}

impl Charge {
    /// Returns whether the request holds units for which others wait, of this process or of another
    /// one.
    pub(crate) fn is_queued(&self) -> bool {
        self.holds_units() && (visit_queue(self) || has_pause(self))
    }
}

#[cfg(test)]
mod sharing;
#[cfg(test)]
mod tests {
    use std::{
        future::poll_fn,
        sync::atomic::{AtomicU64, Ordering::Relaxed},
        task::Waker,
    };

    use tokio::task::JoinSet;

    use super::*;
    use crate::{
        MemoryStore, Permit, Quota,
        algorithm::{Algorithm, Refill},
        store::MAX_STALL,
    };

    const MINUTE: Duration = Duration::from_secs(60);

    /// Runs callers that check again as soon as they are served, as `Charge::acquire` does. Returns
    /// the numbers of checks and of allowed checks.
    async fn run_greedy_callers(callers: u64, all: &Limiter, own: &Limiter) -> (u32, u32) {
        let (mut tasks, end) = (JoinSet::new(), Instant::now() + MINUTE);
        for caller in 0..callers {
            let charge = Charge::new(own, caller).and(Charge::new(all, "everybody"));
            tasks.spawn(async move {
                let (mut retry, mut checks, mut served) = (Retry::default(), 0, 0);
                while Instant::now() < end {
                    checks += 1;
                    let decision = charge.check().await.unwrap();
                    if decision.is_allowed() {
                        retry.allowed(&charge, &decision);
                        (retry, served) = (Retry::default(), served + 1);
                    } else {
                        assert!(retry.denied(&charge, &decision, None));
                        assert!(poll_fn(|cx| retry.poll(cx, None)).await);
                    }
                }
                (checks, served)
            });
        }
        let counts = tasks.join_all().await;
        counts.into_iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1))
    }

    #[tokio::test(start_paused = true)]
    async fn each_request_checks_about_twice_however_many_wait() {
        for (burst, times) in [(10, 2.1), (1, 3.1)] {
            for callers in [5, 50, 500] {
                let store = MemoryStore::new();
                let limiter = |name, quota| {
                    Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
                };
                let all = limiter("all", Quota::per_second(100).burst(1));
                // With the smaller burst, each decision is about this limit, and hides the state of
                // the other.
                let own = limiter("own", Quota::per_second(1_000).burst(burst));
                let (checks, served) = run_greedy_callers(callers, &all, &own).await;
                let per_served = f64::from(checks - callers as u32) / f64::from(served);
                println!(
                    "own burst {burst}, {callers} callers: {served}, {per_served:.2} checks each"
                );
                assert!(served >= 60 * 95, "{callers} callers: {served} served");
                assert!(per_served <= times, "{callers} callers: {per_served} checks each");
            }
        }
    }

    /// A denied request with the waker of its task.
    struct Denied {
        retry: Retry,
        woken: Arc<Woken>,
        charge: Charge,
    }

    #[derive(Default)]
    struct Woken(AtomicU64);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    impl Denied {
        /// Checks a charge whose limiter denies it.
        async fn new(charge: Charge) -> Self {
            let mut denied = Self { retry: Retry::default(), woken: Arc::default(), charge };
            assert!(denied.check().await.is_err());
            denied
        }

        /// A denial contains whether the request retries.
        async fn check(&mut self) -> Result<(), bool> {
            let decision = self.charge.check().await.unwrap();
            if decision.is_allowed() {
                self.retry.allowed(&self.charge, &decision);
                return Ok(());
            }
            Err(self.retry.denied(&self.charge, &decision, None))
        }

        fn is_due(&mut self) -> bool {
            let waker = Waker::from(self.woken.clone());
            self.retry.poll(&mut Context::from_waker(&waker), None) == Poll::Ready(true)
        }

        fn was_woken(&self) -> bool {
            self.woken.0.swap(0, Relaxed) > 0
        }
    }

    /// Returns an empty bucket of 100 per second, and requests that it has denied.
    async fn queue<const N: usize>(burst: u64, costs: [u64; N]) -> (Limiter, [Denied; N]) {
        let quota = Quota::per_second(100).burst(burst);
        let limiter = Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), quota);
        assert!(limiter.check("key").cost(burst).await.unwrap().is_allowed());
        let mut all = Vec::new();
        for cost in costs {
            all.push(Denied::new(Charge::of_units(&limiter, "key", cost)).await);
            assert!(!all.last_mut().unwrap().is_due());
        }
        (limiter, all.try_into().ok().unwrap())
    }

    const UNIT: Duration = Duration::from_millis(10);

    #[tokio::test(start_paused = true)]
    async fn the_first_checks_when_units_are_available_and_the_next_one_after_it() {
        let (limiter, [mut first, mut second, mut third]) = queue(10, [1, 1, 1]).await;
        sleep(UNIT).await;
        assert!(first.was_woken() && first.is_due());
        assert!(!second.is_due() && !third.is_due() && !second.was_woken());
        assert_eq!(first.check().await, Ok(()));
        assert!(second.was_woken() && !second.is_due(), "no units are available yet");
        sleep(UNIT).await;
        assert!(second.is_due() && !third.is_due() && !third.was_woken());
        assert_eq!(second.check().await, Ok(()));
        assert!(third.was_woken());
        drop((first, second, third));
        assert!(queues(&limiter).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn as_many_requests_check_as_there_are_units_for() {
        let (_, [mut first, mut second, mut third, mut fourth]) = queue(10, [1, 2, 1, 1]).await;
        sleep(4 * UNIT).await;
        assert!(first.is_due() && !second.is_due());
        assert_eq!(first.check().await, Ok(()));
        assert!(second.is_due() && third.is_due() && !fourth.is_due());
        assert_eq!((third.check().await, second.check().await), (Ok(()), Ok(())));
        assert!(fourth.was_woken() && !fourth.is_due());
        sleep(UNIT).await;
        assert!(fourth.is_due());
    }

    #[tokio::test(start_paused = true)]
    async fn of_requests_that_check_side_by_side_the_oldest_denied_one_checks_first() {
        let (limiter, [mut first, mut second, mut third]) = queue(10, [1, 1, 1]).await;
        sleep(3 * UNIT).await;
        assert!(first.is_due() && first.check().await.is_ok());
        assert!(second.is_due() && third.is_due());
        assert!(limiter.check("key").cost(2).await.unwrap().is_allowed(), "another process");
        assert_eq!((third.check().await, second.check().await), (Err(true), Err(true)));
        assert!(!second.is_due() && !third.is_due());
        sleep(UNIT).await;
        assert!(second.is_due() && !third.is_due());
        assert!(second.check().await.is_ok() && third.was_woken());
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_request_lets_the_next_one_check_whatever_its_state() {
        for dropped_at in ["asleep", "woken", "checking"] {
            let (_, [mut first, mut second, mut third]) = queue(10, [2, 1, 2]).await;
            sleep(UNIT).await;
            // The second one costs less: its units may be available already.
            drop(first);
            assert!(second.was_woken() && second.is_due(), "{dropped_at}");
            assert_eq!(second.check().await, Ok(()));
            assert!(third.was_woken() && third.is_due(), "its cost is above the known one");
            assert_eq!(third.check().await, Err(true));
            assert!(!third.is_due());
            first = Denied::new(third.charge.clone()).await;
            assert!(!first.is_due());
            if dropped_at != "asleep" {
                sleep(2 * UNIT).await;
                assert!(third.was_woken());
            }
            if dropped_at == "checking" {
                assert!(third.is_due());
            }
            drop(third);
            assert!(first.was_woken(), "{dropped_at}");
            assert_eq!(first.is_due(), dropped_at != "asleep");
            sleep(2 * UNIT).await;
            assert!(first.is_due() && first.check().await.is_ok(), "{dropped_at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_not_polled_delays_others_only_for_a_moment() {
        let (_, [first, mut second, third, mut fourth]) = queue(10, [1, 1, 1, 1]).await;
        sleep(UNIT + MAX_STALL).await;
        drop(third); // each arrival and departure starts overdue checks
        assert!(first.was_woken() && !second.is_due(), "the first one is due");
        sleep(Duration::from_millis(1)).await;
        assert!(!fourth.is_due());
        drop(fourth);
        assert!(second.was_woken() && second.is_due() && second.check().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_denied_for_the_last_time_passes_its_forecast_to_the_next_ones() {
        let (limiter, [mut first, mut second]) = queue(10, [1, 1]).await;
        sleep(UNIT).await;
        assert!(first.is_due());
        assert!(limiter.check("key").await.unwrap().is_allowed(), "another process");
        let denied = first.charge.check().await.unwrap();
        assert!(!first.retry.denied(&first.charge, &denied, Some(Instant::now())));
        assert!(second.was_woken() && !second.is_due());
        let waker = Waker::noop();
        let deadline = Some(Instant::now() + UNIT / 2);
        let polled = second.retry.poll(&mut Context::from_waker(waker), deadline);
        assert_eq!(polled, Poll::Ready(false), "a check by then would be denied");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_has_a_small_jitter_only_if_other_processes_compete() {
        let mut pauses = vec![];
        for _ in 0..100 {
            let (limiter, [mut first]) = queue(10, [1]).await;
            sleep(UNIT).await;
            assert!(first.is_due());
            assert!(limiter.check("key").await.unwrap().is_allowed(), "another process");
            assert_eq!(first.check().await, Err(true));
            let ticket = first.retry.ticket.as_ref().expect("it is in a queue");
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
            Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
        };
        let (one, two) = (limiter("one"), limiter("two"));
        assert!(one.check("key").await.unwrap().is_allowed());
        let both = Charge::new(&one, "key").and(Charge::new(&two, "all"));
        let mut first = Denied::new(both.clone()).await;
        let mut next = Denied::new(both).await;
        assert!(two.check("all").await.unwrap().is_allowed());
        let mut second = Denied::new(Charge::new(&two, "all")).await;
        let mut third = Denied::new(Charge::new(&two, "all")).await;
        assert!(!first.is_due() && !next.is_due());
        assert!(!second.is_due() && !third.is_due());
        sleep(UNIT).await;
        assert!(two.check("all").await.unwrap().is_allowed(), "another process");
        assert!(first.is_due() && first.check().await == Err(true), "by the other limiter");
        assert!(next.was_woken() && !next.is_due(), "it is paced");
        assert!(second.is_due() && second.check().await == Err(true));
        sleep(2 * UNIT).await;
        assert!(!second.is_due() && first.was_woken() && first.is_due());
        assert_eq!(first.check().await, Ok(()));
        assert!(second.was_woken() && !third.was_woken());
        assert!(next.is_due());
    }

    #[tokio::test]
    async fn requests_that_share_one_of_two_keys_of_a_limiter_are_in_different_queues() {
        let quota = Quota::per_hour(1);
        let limiter = Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), quota);
        let charge = |key| Charge::new(&limiter, "shared").and(Charge::new(&limiter, key));
        let [one, two] = ["one", "two"].map(|key| {
            let charge = charge(key);
            let part = LimiterPart::named(&charge, "default").unwrap();
            (part.entry.queue, part.is_single)
        });
        assert!(one.0 != two.0 && !one.1 && !two.1);
    }

    /// Returns a limiter of one place that is held, and a request that waits for it until then.
    async fn waiting_for_a_place(wait: Duration) -> (Limiter, Permit, Denied, Instant) {
        let (store, quota) = (MemoryStore::new(), Quota::concurrent(1));
        let places = Limiter::new("places", store, Algorithm::concurrency(), quota);
        let permit = places.hold("key", 1).await.unwrap().admitted().unwrap();
        let charge = Charge::new(&places, "key");
        let mut denied = Denied { retry: Retry::default(), woken: Arc::default(), charge };
        let decision = denied.charge.hold().await.unwrap().into_result().unwrap_err();
        let deadline = Instant::now() + wait;
        assert!(denied.retry.denied(&denied.charge, &decision, Some(deadline)));
        (places, permit, denied, deadline)
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_whose_wait_ends_in_a_pause_checks_a_last_time() {
        let (places, _permit, mut waiting, deadline) = waiting_for_a_place(UNIT).await;
        let key = queues(&places).queue_of("places", &"key".into());
        queues(&places).found_full([key]);
        queues(&places).units_end(key, Instant::now() - MINUTE);
        queues(&places).units_returned(key);
        assert!(queues(&places).pause_end(&[key]).is_some_and(|end| end > deadline));
        assert!(poll_fn(|cx| waiting.retry.poll(cx, Some(deadline))).await);
        assert_eq!(Instant::now(), deadline);
    }

    #[tokio::test(start_paused = true)]
    async fn units_that_are_returned_before_a_denied_request_has_joined_the_queue_are_found() {
        let (store, quota) = (MemoryStore::new(), Quota::per_hour(10));
        let tokens = Limiter::new("tokens", store, Algorithm::token_bucket(), quota);
        tokens.spend("key", 5).await.unwrap();
        let permit = tokens.hold("key", 5).await.unwrap().admitted().unwrap();
        let charge = Charge::new(&tokens, "key").estimate(2);
        let decision = charge.hold().await.unwrap().into_result().unwrap_err();
        assert!(decision.retry_after().is_some_and(|time| time > MINUTE), "units are restored");
        permit.cancel();
        let mut retry = Retry::default();
        let deadline = Some(Instant::now() + 60 * MINUTE);
        assert!(retry.denied(&charge, &decision, deadline));
        let start = Instant::now();
        assert!(poll_fn(|cx| retry.poll(cx, deadline)).await);
        assert!(start.elapsed() <= 5 * UNIT, "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn units_that_are_returned_during_a_check_are_found() {
        let (places, permit, mut waiting, deadline) = waiting_for_a_place(MINUTE).await;
        let deadline = Some(deadline);
        assert!(poll_fn(|cx| waiting.retry.poll(cx, deadline)).await);
        let denied = waiting.charge.hold().await.unwrap().into_result().unwrap_err();
        drop(permit); // after the decision, and before its arrival
        assert!(waiting.retry.denied(&waiting.charge, &denied, deadline));
        let start = Instant::now();
        assert!(poll_fn(|cx| waiting.retry.poll(cx, deadline)).await);
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert!(places.hold("key", 1).await.unwrap().is_admitted());
    }

    #[test]
    fn the_time_behind_others_is_a_lower_bound() {
        let time_behind = |algorithm, quota, units| {
            let limiter = Limiter::new("default", MemoryStore::new(), algorithm, quota);
            let charge = Charge::new(&limiter, "key");
            LimiterPart::named(&charge, "default").unwrap().time_behind(units, UNIT)
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
}
