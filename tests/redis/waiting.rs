//! Requests that wait for reserved instants, while the clock of their server is set.

use std::time::Duration;

use tower_ratelimit::{Algorithm, Limiter, Quota, Reservation};

use crate::support::{self, clock, server::RedisServer};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

/// Reserves an instant. Returns the minutes until then, too.
async fn reserve(limiter: &Limiter) -> (u64, Reservation) {
    let reserved = limiter.reserve("key", 1, HOUR).await.unwrap();
    let reservation = reserved.admitted().expect("an hour is enough");
    // Without the time of the call.
    (reservation.delay().as_secs().div_ceil(60), reservation)
}

#[tokio::test]
async fn after_a_step_forward_of_the_clock_requests_go_beside_those_that_wait() {
    let server = RedisServer::start();
    let store = support::connected(clock::settable(&server)).await;
    let quota = Quota::per_minute(1).burst(1);
    let vendor = Limiter::new("vendor", store, Algorithm::token_bucket(), quota);
    assert!(vendor.check("key").await.unwrap().is_allowed());
    let mut waiting = vec![];
    for number in 1..=3 {
        waiting.push(reserve(&vendor).await);
        assert_eq!(waiting[waiting.len() - 1].0, number);
    }
    let set = |minutes: i64| clock::set(&server, minutes * MINUTE.as_micros() as i64);
    // The instants of two of them have passed, while they wait by the clock of their process.
    set(2);
    waiting.push(reserve(&vendor).await);
    assert_eq!(waiting[3].0, 2);
    // Those of all have.
    set(10);
    assert!(vendor.check("key").await.unwrap().is_allowed());
    assert_eq!(reserve(&vendor).await.0, 1);
}
