//! When a denied request asks the store again, where no instant can be reserved for it: limits on several keys, and a
//! leaky bucket that is full. Waiting for a reserved instant is in `turn.rs`.
//!
//! The store keeps no order among these requests. So each process keeps its own, for each limiter and key: a request
//! pauses until the quota of the requests ahead of it has come back. In one process requests are served in order, and
//! each asks about twice, however many wait (measured: 1.9 to 2.2 times). Several processes compete for each unit, at
//! random (5 processes: 5.4 times). The pause does not grow with the number of denials: when it did, callers slept
//! while the quota was free.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::sleep;

use crate::{
    algorithm::{Algorithm, Refill},
    charge::Charge,
    key::Key,
    limiter::Limiter,
    store::lock,
};

/// The precision of sleeps.
const TIMER_TICK: Duration = Duration::from_millis(1);
/// The longest part of a pause that is random, times four.
const LONGEST_SPREAD: Duration = Duration::from_secs(1);

/// The requests of this process that ask a store again, by limiter and key.
#[derive(Debug, Default)]
pub(crate) struct RetryQueues {
    hasher: RandomState,
    /// By the hash of limiter and key. Two with the same hash, which is unlikely, share a queue.
    queues: Mutex<HashMap<u64, Queue>>,
}

/// The costs, in the order of arrival.
#[derive(Debug, Default)]
struct Queue {
    newest: u64,
    costs: BTreeMap<u64, u32>,
}

/// The number of a request in a queue. Dropping it leaves the queue.
#[derive(Debug)]
struct Ticket {
    queues: Arc<RetryQueues>,
    queue: u64,
    number: u64,
}

impl RetryQueues {
    fn queue(&self, limiter: &Limiter, key: &Key<'_>) -> u64 {
        self.hasher.hash_one((limiter.name(), key))
    }

    fn join(self: &Arc<Self>, queue: u64, cost: u32) -> Ticket {
        let queues = &mut *lock(&self.queues);
        let Queue { newest, costs } = queues.entry(queue).or_default();
        *newest += 1;
        costs.insert(*newest, cost);
        Ticket { queues: self.clone(), queue, number: *newest }
    }

    fn has(&self, queue: u64) -> bool {
        lock(&self.queues).contains_key(&queue)
    }
}

impl Ticket {
    /// The sum of the costs before it.
    fn ahead(&self) -> u64 {
        let queues = lock(&self.queues.queues);
        let costs = queues.get(&self.queue).map(|queue| queue.costs.range(..self.number));
        costs.into_iter().flatten().map(|(_, cost)| u64::from(*cost)).sum()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let queues = &mut *lock(&self.queues.queues);
        if let Some(queue) = queues.get_mut(&self.queue) {
            queue.costs.remove(&self.number);
            if queue.costs.is_empty() {
                queues.remove(&self.queue);
            }
        }
    }
}

/// A request that asks again when it is denied.
#[derive(Debug, Default)]
pub(crate) struct Retry(Option<Ticket>);

impl Retry {
    /// The pause of a request that the limiter of the name `binding` has denied.
    pub(crate) fn pause(
        &mut self,
        charge: &Charge,
        binding: &str,
        retry_after: Duration,
    ) -> Duration {
        let binding = charge.own_parts().find(|(limiter, ..)| limiter.name() == binding);
        let Some((limiter, key, cost)) = binding else {
            #[cfg(feature = "redis")]
            return crate::redisson::drawn_out(retry_after);
            #[cfg(not(feature = "redis"))]
            return retry_after;
        };
        let queues = limiter.store().names().retry_queues();
        let queue = queues.queue(limiter, key);
        let pause = |ticket: &Ticket| retry_after.saturating_add(time_of(limiter, ticket.ahead()));
        match self.0.as_ref().filter(|ticket| ticket.queue == queue) {
            None => pause(self.0.insert(queues.join(queue, cost))),
            // Another process was faster. At random, so that it is not the same one each time.
            Some(ticket) => {
                let chance = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
                let spread = time_of(limiter, cost.into()).min(LONGEST_SPREAD);
                pause(ticket).saturating_add(spread.mul_f64(chance / 4.0))
            }
        }
    }
}

/// The time in which the quota gives back this number of units.
fn time_of(limiter: &Limiter, units: u64) -> Duration {
    let (limit, window) = (f64::from(limiter.quota().limit()), limiter.quota().window());
    let windows = units as f64 / limit;
    let windows = match limiter.algorithm() {
        // All units of a window come back at once. A tenth of the window keeps the requests in order and apart.
        Algorithm::FixedWindow | Algorithm::TokenBucket { refill: Refill::Interval, .. } => {
            windows.floor() + windows.fract() / 10.0
        }
        _ => windows,
    };
    Duration::try_from_secs_f64(window.as_secs_f64() * windows).unwrap_or(Duration::MAX)
}

/// Sleeps for a moment if other requests wait to ask again, so that these ask first. Otherwise the caller that was
/// served last would be served next, each time: it asks at the instant at which a window begins, or at which its own
/// departure makes room in a leaky bucket.
pub(crate) async fn let_others_ask_first(charge: &Charge) {
    let is_awaited = charge.own_parts().any(|(limiter, key, _)| {
        let queues = limiter.store().names().retry_queues();
        queues.has(queues.queue(limiter, key))
    });
    if is_awaited {
        sleep(TIMER_TICK).await;
    }
}

#[cfg(test)]
mod tests {
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
                    match decision.retry_after() {
                        None => (retry, served) = (Retry::default(), served + 1),
                        Some(time) => sleep(retry.pause(&charge, decision.limiter(), time)).await,
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
        for callers in [5, 50, 500] {
            let store = MemoryStore::new();
            let limiter = |name, limit| {
                let quota = Quota::per_second(limit).burst(1);
                Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
            };
            let (asked, served) =
                greedy(callers, &limiter("all", 100), &limiter("own", 1_000)).await;
            assert!(served >= 60 * 95, "{callers} callers: {served} served");
            assert!(asked <= 5 * served / 2 + 500, "{callers} callers: {asked} asked for {served}");
        }
    }

    #[test]
    fn who_leaves_the_queue_is_not_waited_for() {
        let store = MemoryStore::new();
        let limiter = Limiter::new(store, Algorithm::token_bucket(), Quota::per_second(100));
        let charge = Charge::new(&limiter, "everybody").cost(2);
        let unit = Duration::from_millis(10);
        let pause = |retry: &mut Retry| retry.pause(&charge, limiter.name(), unit);
        let [mut first, mut second, mut third] = [(); 3].map(|()| Retry::default());
        assert_eq!(pause(&mut first), unit);
        assert_eq!(pause(&mut second), unit * 3);
        assert_eq!(pause(&mut third), unit * 5);
        drop(second);
        let again = pause(&mut third);
        assert!((unit * 3..=unit * 7 / 2).contains(&again), "{again:?}");
        drop((first, third));
        let queues = limiter.store().names().retry_queues();
        assert!(lock(&queues.queues).is_empty());
    }

    #[test]
    fn a_pause_is_never_above_the_time_of_those_ahead_and_a_little_more() {
        let limiter = Limiter::new(
            MemoryStore::new(),
            Algorithm::FixedWindow,
            Quota::new(10, Duration::from_secs(366 * 86_400)),
        );
        let charge = Charge::new(&limiter, "everybody").cost(10);
        let mut retry = Retry::default();
        for _ in 0..1_000 {
            let pause = retry.pause(&charge, limiter.name(), MINUTE);
            assert!((MINUTE..=MINUTE + LONGEST_SPREAD / 4).contains(&pause), "{pause:?}");
        }
        // However far it is, it is a time.
        assert!(time_of(&limiter, u64::MAX) > Duration::from_secs(1 << 60));
    }
}
