//! The table of the page on nginx: `limit_req` by its own arithmetic, and the limit that replaces
//! it, decide the same about random arrivals.

use std::time::Duration;

use tokio::time::advance;
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

/// `limit_req zone=.. burst=..` of one key. nginx counts in thousandths of a request, by a clock of
/// whole milliseconds.
struct LimitReq {
    per_second: u64,
    burst: u64,
    /// The requests above the rate that are not delayed; all, with `nodelay`.
    delay: u64,
    excess: u64,
    last: Option<u64>,
}

impl LimitReq {
    fn new(per_second: u64, burst: u64, delay: u64) -> Self {
        Self { per_second, burst, delay, excess: 0, last: None }
    }

    /// Returns the delay of an admitted request in milliseconds; `None` for a 503.
    fn request(&mut self, now: u64) -> Option<u64> {
        let excess = match self.last {
            Some(last) => (self.excess + 1_000).saturating_sub(self.per_second * (now - last)),
            None => 0,
        };
        if excess > self.burst * 1_000 {
            return None;
        }
        (self.excess, self.last) = (excess, Some(now));
        Some(excess.saturating_sub(self.delay * 1_000) / self.per_second)
    }
}

fn limiter(algorithm: Algorithm, quota: Quota) -> Limiter {
    Limiter::new("nginx", MemoryStore::new(), algorithm, quota)
}

/// The milliseconds between arrivals, more often than the rate: bursts, single ones, and pauses.
fn arrivals(random: &mut fastrand::Rng, per_second: u64) -> impl Iterator<Item = u64> {
    let mean = 1_000 / per_second;
    let mut random = random.fork();
    (0..2_000).map(move |_| match random.u32(0..10) {
        0..=4 => 0,
        5..=8 => random.u64(0..=mean),
        _ => random.u64(0..=8 * mean),
    })
}

#[tokio::test(start_paused = true)]
async fn burst_with_nodelay_is_a_token_bucket_with_one_more() {
    let mut random = fastrand::Rng::with_seed(1);
    for (per_second, burst) in [(1, 0), (1, 5), (3, 2), (7, 40), (10, 20), (100, 5), (250, 99)] {
        let mut nginx = LimitReq::new(per_second, burst, u64::MAX / 1_000);
        let quota = Quota::per_second(per_second).burst(burst + 1);
        let ours = limiter(Algorithm::token_bucket(), quota);
        let (mut now, mut denied) = (0, 0);
        for pause in arrivals(&mut random, per_second) {
            now += pause;
            advance(Duration::from_millis(pause)).await;
            let expected = nginx.request(now).is_some();
            let decision = ours.check("client").await.unwrap();
            assert_eq!(decision.is_allowed(), expected, "{per_second} r/s, burst={burst}, {now}");
            denied += u32::from(!expected);
        }
        assert!((100..1_900).contains(&denied), "{per_second} r/s, burst={burst}: {denied}");
    }
}

#[tokio::test(start_paused = true)]
async fn burst_without_nodelay_is_a_leaky_bucket_with_one_more() {
    let mut random = fastrand::Rng::with_seed(2);
    for (per_second, burst) in [(1, 5), (3, 2), (10, 20), (100, 5), (250, 99)] {
        let mut nginx = LimitReq::new(per_second, burst, 0);
        let quota = Quota::per_second(per_second).burst(burst + 1);
        let ours = limiter(Algorithm::leaky_bucket(), quota);
        let mut now = 0;
        for pause in arrivals(&mut random, per_second) {
            now += pause;
            advance(Duration::from_millis(pause)).await;
            let decision = ours.check("client").await.unwrap();
            let delay = decision.is_allowed().then(|| decision.delay().as_millis() as u64);
            assert_eq!(delay, nginx.request(now), "{per_second} r/s, burst={burst}, {now}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn delay_is_a_token_bucket_with_a_longest_wait() {
    let mut random = fastrand::Rng::with_seed(3);
    for (per_second, burst, delay) in [(1, 5, 2), (10, 20, 8), (100, 5, 4), (250, 99, 1)] {
        let mut nginx = LimitReq::new(per_second, burst, delay);
        let quota = Quota::per_second(per_second).burst(delay + 1);
        let ours = limiter(Algorithm::token_bucket(), quota);
        let max_wait = Duration::from_secs(burst - delay) / per_second as u32;
        let mut now = 0;
        for pause in arrivals(&mut random, per_second) {
            now += pause;
            advance(Duration::from_millis(pause)).await;
            let decision = ours.reserve("client", 1, max_wait).await.unwrap().keep();
            let waits = decision.delay().as_millis() as u64;
            let delay = decision.is_allowed().then_some(waits);
            assert_eq!(delay, nginx.request(now), "{per_second} r/s, burst={burst}, {now}");
        }
    }
}
