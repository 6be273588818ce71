//! The bytes of a key in Redis are at most those of the table in `docs/redis-capacity.md`.

use std::time::Duration;

use tower_ratelimit::{Algorithm, Limiter, Quota, config::Refill};

use crate::support::{self, server::RedisServer};

const PAGE: &str = include_str!("../../docs/redis-capacity.md");

/// The table is for names of up to this length.
const NAME: usize = 40;

const INTERVAL: Algorithm = Algorithm::token_bucket().refill(Refill::Interval);

/// The rows of the table, by their first columns.
const COUNTERS: &str = "| fixed window, token bucket | 120 |";
const LEAKY: &str = "| leaky bucket, token bucket that refills once per interval | 136 |";
const WINDOW: &str = "| sliding window | 152, plus 5 for each bucket; with a count of 2^32 or more \
                      9 for each bucket |";
const LOG: &str = "| sliding log | 152, plus 11 to 48 for each microsecond";
const LARGE_LOG: &str = "with a cost of 2^32 or more 14 to 64 |";
const HELD: &str = "| concurrency | 248, however many requests are in flight |";
const PERMITS: &str = "| permits of another algorithm | 248 beside the state |";
const WAITING: &str = "| waiting requests | up to 40 each, and up to 200 more for the first of a \
                       key; with a sliding window 16 more for each bucket |";

/// A server with one key, and a limiter of it.
struct OneKey {
    server: RedisServer,
    limiter: Limiter,
    key: String,
}

impl OneKey {
    async fn new(algorithm: Algorithm, quota: Quota) -> Self {
        let server = RedisServer::start();
        let limiter = Limiter::new("api", support::redis_store(&server).await, algorithm, quota);
        let rest = format!("ratelimit:api:{algorithm}:{{}}").len();
        Self { server, limiter, key: "k".repeat(NAME - rest) }
    }

    fn bytes(&self) -> u64 {
        let mut connection = self.server.connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
        assert!(keys.len() == 1 && keys[0].len() == NAME, "{keys:?}");
        let words = ["USAGE", &keys[0], "SAMPLES", "0"];
        redis::cmd("MEMORY").arg(&words).query(&mut connection).unwrap()
    }
}

fn windows() -> impl Iterator<Item = (Algorithm, u64)> {
    [1, 4, 10, 60, 100]
        .map(|buckets| (Algorithm::sliding_window().buckets(buckets), buckets.into()))
        .into_iter()
}

#[tokio::test]
async fn a_key_takes_at_most_the_bytes_of_the_page() {
    let log = |n: u64| 152 + 48 * n;
    let counters = [Algorithm::fixed_window(), Algorithm::token_bucket()].map(|it| (it, 120));
    let others = [(INTERVAL, 136), (Algorithm::leaky_bucket(), 136), (Algorithm::SlidingLog, 0)];
    let windows = windows().map(|(it, buckets)| (it, 152 + 5 * buckets));
    for (algorithm, most) in counters.into_iter().chain(others).chain(windows) {
        let one = OneKey::new(algorithm, Quota::per_hour(300)).await;
        // Each departure of a leaky bucket after the first one is a request that waits.
        let requests = if algorithm == Algorithm::LeakyBucket { 1 } else { 300 };
        for n in 1..=requests {
            assert!(one.limiter.check(&one.key).await.unwrap().is_allowed());
            let most = if algorithm == Algorithm::SlidingLog { log(n) } else { most };
            let bytes = one.bytes();
            assert!(bytes <= most, "{algorithm:?}: {bytes} bytes after {n} requests");
        }
    }
}

#[tokio::test]
async fn a_key_of_a_large_quota_takes_at_most_the_bytes_of_the_page() {
    const COST: u64 = 1 << 33;
    let windows = windows().map(|(it, buckets)| (it, 152 + 9 * buckets));
    for (algorithm, most) in windows.chain([(Algorithm::SlidingLog, 0)]) {
        let one = OneKey::new(algorithm, Quota::per_hour(300 * COST)).await;
        for n in 1..=300_u64 {
            assert!(one.limiter.check(&one.key).cost(COST).await.unwrap().is_allowed());
            let most = if algorithm == Algorithm::SlidingLog { 152 + 64 * n } else { most };
            let bytes = one.bytes();
            assert!(bytes <= most, "{algorithm:?}: {bytes} bytes after {n} requests");
        }
    }
}

#[tokio::test]
async fn requests_in_flight_take_at_most_the_bytes_of_the_page() {
    const MOST: u64 = 248;
    for (algorithm, state) in [
        (Algorithm::concurrency(), 0),
        (Algorithm::token_bucket(), 120),
        (Algorithm::fixed_window(), 120),
        (Algorithm::sliding_window(), 156),
    ] {
        let quota = match algorithm {
            Algorithm::Concurrency => Quota::concurrent(1_000),
            _ => Quota::per_hour(1_000),
        };
        let one = OneKey::new(algorithm, quota).await;
        let mut permits = vec![];
        // Permits are counted by the time of their expiry: here it is different for each of 30.
        for n in 1..=300_u64 {
            let lifetime = Duration::from_secs(60 * (n % 30 + 1));
            let limiter = one.limiter.clone().hold_lifetime(lifetime);
            permits.push(limiter.hold(&one.key, 1).await.unwrap().admitted().unwrap());
            let bytes = one.bytes();
            assert!(bytes <= state + MOST, "{algorithm:?}: {bytes} bytes for {n} permits");
        }
    }
}

#[tokio::test]
async fn waiting_requests_take_at_most_the_bytes_of_the_page() {
    const LONG: Duration = Duration::from_secs(3_600 * 2_000);
    let counters = [Algorithm::fixed_window(), Algorithm::token_bucket(), INTERVAL];
    let queues = [Algorithm::leaky_bucket(), Algorithm::SlidingLog];
    let others = counters.into_iter().chain(queues).map(|it| (it, 0));
    for (algorithm, buckets) in others.chain(windows()) {
        let quota = match algorithm {
            Algorithm::LeakyBucket => Quota::per_hour(1).burst(1_001),
            _ => Quota::per_hour(1),
        };
        let one = OneKey::new(algorithm, quota).await;
        assert!(one.limiter.check(&one.key).await.unwrap().is_allowed());
        let without = one.bytes();
        for n in 1..=1_000 {
            let reservation = one.limiter.reserve(&one.key, 1, LONG).await.unwrap();
            assert!(reservation.keep().is_allowed());
            let (more, most) = (one.bytes() - without, 40 * n + 200 + 16 * buckets);
            assert!(more <= most, "{algorithm:?}: {more} bytes for {n} waiting requests");
        }
    }
}

#[test]
fn the_page_has_the_figures_of_these_tests() {
    for row in [COUNTERS, LEAKY, WINDOW, LOG, LARGE_LOG, HELD, PERMITS, WAITING] {
        assert!(PAGE.contains(row), "docs/redis-capacity.md does not contain: {row}");
    }
}
