//! Requests that wait for reserved instants, while the clock of their server is set.

use std::time::Duration;

use tower_ratelimit::{Algorithm, Limiter, Quota, Reservation};

use crate::support::{self, clock, recorder::Recorder, server::RedisServer};

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// Reserves an instant. Returns the minutes until then, too.
async fn reserve(limiter: &Limiter) -> (u64, Reservation) {
    let reserved = limiter.reserve("key", 1, DAY).await.unwrap();
    let reservation = reserved.admitted().expect("a day is enough");
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

#[tokio::test]
async fn an_instant_that_is_given_back_goes_to_the_next_request_and_is_released_once() {
    let server = RedisServer::start();
    let store = support::connected(clock::settable(&server)).await;
    let recorder = Recorder::new();
    store.add_observer(recorder.clone());
    let quota = Quota::per_minute(1).burst(1);
    let vendor = Limiter::new("vendor", store, Algorithm::token_bucket(), quota);
    assert!(vendor.check("key").await.unwrap().is_allowed());
    let [first, second] = [reserve(&vendor).await, reserve(&vendor).await];
    assert_eq!((first.0, second.0), (1, 2));
    // A call on its way while the release is sent comes after the instant.
    let (mut taken, mut dropped) = (0, 0);
    for _ in 0..20_000 {
        let left = reserve(&vendor).await;
        taken += usize::from(left.0 == 3);
        dropped += 1;
        if taken == 10 {
            break;
        }
        if left.0 > 100 {
            drop(left);
            tokio::time::sleep(Duration::from_millis(1)).await; // releases are sent elsewhere
        }
    }
    assert_eq!(taken, 10);
    drop(second);
    assert_eq!(recorder.take_of("released").len(), dropped + 1, "one for each that gave up");
    // Of all of them, only the first one is left.
    let reset_after = async || vendor.peek("key").await.unwrap().reset_after();
    while reset_after().await > 2 * MINUTE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(reset_after().await, 2 * MINUTE);
    assert_eq!(first.1.decision().delay(), MINUTE);
}

#[tokio::test]
async fn an_instant_before_those_of_other_processes_goes_to_a_later_request_of_its_own() {
    let server = RedisServer::start();
    let url = clock::settable(&server);
    let quota = Quota::per_minute(1).burst(1);
    let mut vendors = vec![];
    for _ in 0..2 {
        let store = support::connected(url.clone()).await;
        vendors.push(Limiter::new("vendor", store, Algorithm::token_bucket(), quota));
    }
    let [own, other] = &vendors[..] else { panic!("two processes") };
    assert!(own.check("key").await.unwrap().is_allowed());
    let (first, behind) = (reserve(own).await, reserve(other).await);
    assert_eq!((first.0, behind.0), (1, 2));
    let calls = server.calls("evalsha");
    drop(first);
    while server.calls("evalsha") < calls + 2 {
        tokio::time::sleep(Duration::from_millis(5)).await; // it was to be released, twice
    }
    let mut next = reserve(own).await;
    for _ in 0..100 {
        if next.0 == 1 {
            break;
        }
        next = reserve(own).await; // it came during a call that tries to release the first one
    }
    assert_eq!(next.0, 1);
    let reset_after = async || other.peek("key").await.unwrap().reset_after();
    while reset_after().await > 3 * MINUTE {
        tokio::time::sleep(Duration::from_millis(5)).await; // the third instant is released
    }
    assert_eq!(reset_after().await, 3 * MINUTE);
    drop((next, behind));
    while reset_after().await > MINUTE {
        tokio::time::sleep(Duration::from_millis(5)).await; // what is kept is released at last
    }
    assert_eq!(reset_after().await, MINUTE);
}
