//! The calls of limiters and charges: what their methods set, and what happens before the first
//! poll.

use std::time::Duration;

use tower_ratelimit::{
    Admission, Algorithm, Charge, Error, FailurePolicy, Limiter, MemoryStore, Quota, store::Store,
};

use crate::support::{self, recorder::Recorder, server::RedisServer};

const HOUR: Duration = Duration::from_secs(3_600);

fn limiter(store: &MemoryStore, name: &str) -> Limiter {
    Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_day(10))
}

async fn remaining(limiter: &Limiter) -> u64 {
    limiter.peek("alice").await.unwrap().remaining()
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_never_polled_does_nothing() {
    let store = MemoryStore::new();
    let (one, other) = (limiter(&store, "one"), limiter(&store, "other"));
    let charge = Charge::new(&one, "alice").also(&other).estimate(2);
    drop(one.check("alice").cost(3));
    drop(one.check("alice").cost(3).max_wait(HOUR));
    drop(one.check("alice").peek());
    drop(one.acquire("alice", 3));
    drop(one.try_acquire("alice", 3, HOUR));
    drop(one.hold("alice", 3).max_wait(HOUR));
    drop(one.reserve("alice", 3, HOUR));
    drop(charge.check());
    drop(charge.hold());
    assert_eq!([remaining(&one).await, remaining(&other).await], [10, 10]);
}

#[tokio::test]
async fn the_cost_of_a_charge_is_of_the_limit_that_was_added_last() {
    let store = MemoryStore::new();
    let (one, other) = (limiter(&store, "one"), limiter(&store, "other"));
    let charge = Charge::new(&one, "alice").cost(2).also(&other);
    assert!(charge.check().await.unwrap().is_allowed());
    assert_eq!([remaining(&one).await, remaining(&other).await], [8, 9]);

    assert!(charge.check().cost(4).await.unwrap().is_allowed());
    assert!(charge.check().cost(3).now().unwrap().is_allowed());
    assert!(!charge.check().cost(3).peek().await.unwrap().allows());
    assert_eq!([remaining(&one).await, remaining(&other).await], [4, 2]);

    // The charge itself is as it was made.
    assert!(charge.check().max_wait(Duration::ZERO).await.unwrap().is_allowed());
    charge.of("one").cost(2).refund().await.unwrap();
    assert_eq!([remaining(&one).await, remaining(&other).await], [4, 1]);

    // An estimate and a cost replace each other.
    let held = charge.clone().estimate(5).cost(1);
    assert!(matches!(held.hold().await, Err(Error::NoEstimate)));
    assert!(held.check().await.unwrap().is_allowed());
    let charge = Charge::exempt().also(&one).cost(3).estimate(2);
    assert!(charge.is_exempt() && matches!(charge.check().cost(2).await, Err(Error::NoLimits)));
}

#[tokio::test]
async fn costs_that_no_quota_grants_are_errors_of_every_call() {
    let api = limiter(&MemoryStore::new(), "api");
    let charge = Charge::new(&api, "alice");
    for cost in [0, 11] {
        let is_wrong = |error: Error| match cost {
            0 => matches!(error, Error::ZeroCost),
            _ => matches!(error, Error::CostAboveQuota { cost: 11, max: 10, .. }),
        };
        assert!(is_wrong(api.check("alice").cost(cost).await.unwrap_err()));
        assert!(is_wrong(api.check("alice").cost(cost).now().unwrap_err()));
        assert!(is_wrong(api.check("alice").cost(cost).peek().await.unwrap_err()));
        assert!(is_wrong(api.acquire("alice", cost).await.unwrap_err()));
        assert!(is_wrong(api.try_acquire("alice", cost, HOUR).await.unwrap_err()));
        assert!(is_wrong(api.hold("alice", cost).await.unwrap_err()));
        assert!(is_wrong(api.reserve("alice", cost, HOUR).await.unwrap_err()));
        assert!(is_wrong(charge.check().cost(cost).await.unwrap_err()));
        assert!(is_wrong(charge.check().cost(cost).max_wait(HOUR).await.unwrap_err()));
        assert!(is_wrong(charge.clone().estimate(cost).hold().await.unwrap_err()));
    }
    assert_eq!(remaining(&api).await, 10);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_no_quota_grants_is_an_error_at_once_whoever_waits() {
    let store = MemoryStore::new();
    let places =
        Limiter::new("places", store.clone(), Algorithm::concurrency(), Quota::concurrent(2));
    let bucket =
        Limiter::new("bucket", store.clone(), Algorithm::leaky_bucket(), Quota::per_day(10));
    let api = limiter(&store, "api");
    let _held = [places.hold("alice", 2).await.unwrap(), api.hold("alice", 10).await.unwrap()];
    let (mut first, mut other) = (
        Box::pin(places.hold("alice", 1).max_wait(HOUR)),
        Box::pin(api.hold("alice", 1).max_wait(HOUR)),
    );
    tokio::select! {
        biased;
        _ = &mut first => panic!("no place is free"),
        _ = &mut other => panic!("no unit is left"),
        () = std::future::ready(()) => {}
    }
    let start = tokio::time::Instant::now();
    for cost in [0, 11, u64::MAX] {
        for limiter in [&places, &api] {
            let error = limiter.hold("alice", cost).max_wait(HOUR).await.unwrap_err();
            assert!(matches!(error, Error::ZeroCost | Error::CostAboveQuota { .. }), "{error}");
        }
    }
    let error = bucket.hold("alice", 1).max_wait(HOUR).await.unwrap_err();
    assert!(matches!(error, Error::CannotHold { .. }), "{error}");
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test]
#[should_panic = "a call is set before it is polled"]
async fn a_call_that_was_polled_is_not_set() {
    let api = limiter(&MemoryStore::new(), "api");
    let mut check = api.check("alice");
    assert!((&mut check).await.unwrap().is_allowed());
    drop(check.cost(2));
}

#[tokio::test]
async fn an_admission_has_a_guard_or_the_decision_of_a_denied_request() {
    let api = limiter(&MemoryStore::new(), "api");
    let held = api.hold("alice", 8).await.unwrap();
    assert!(held.is_admitted() && held.decision().is_allowed());
    let denied = api.hold("alice", 3).await.unwrap();
    assert!(!denied.is_admitted() && denied.decision().remaining() == 2);
    assert!(denied.admitted().is_none());
    let denied = api.hold("alice", 3).await.unwrap().into_result().unwrap_err();
    assert!(!denied.is_allowed());
    held.admitted().unwrap().cancel();

    let reserved = api.reserve("alice", 10, HOUR).await.unwrap();
    assert!(reserved.is_admitted() && remaining(&api).await == 0);
    let denied = api.reserve("alice", 1, Duration::ZERO).await.unwrap();
    assert!(matches!(&denied, Admission::Denied(decision) if !decision.is_allowed()));
    assert!(!denied.keep().is_allowed());
    drop(reserved); // an admission that is dropped is released, as its guard is
    assert_eq!(remaining(&api).await, 10);
    assert!(api.reserve("alice", 1, HOUR).await.unwrap().keep().is_allowed());
    assert_eq!(remaining(&api).await, 9);
}

/// Limiters over a store that has no room for another key.
async fn full(policies: [FailurePolicy; 2]) -> [Limiter; 2] {
    let store = MemoryStore::with_max_keys(1);
    let all = limiter(&store, "all");
    all.spend("bob", 1).await.unwrap();
    let [one, other] = policies;
    [limiter(&store, "one").on_failure(one), limiter(&store, "other").on_failure(other)]
}

#[tokio::test]
async fn a_charge_has_the_failure_policy_that_all_of_its_limiters_have() {
    for (policies, is_open) in [
        ([FailurePolicy::Open, FailurePolicy::Open], true),
        ([FailurePolicy::Open, FailurePolicy::Closed], false),
        ([FailurePolicy::Closed, FailurePolicy::Open], false),
    ] {
        let [one, other] = full(policies).await;
        let charge = Charge::new(&one, "alice").also(&other);
        let check = charge.check().await;
        assert_eq!(check.is_ok_and(|decision| decision.is_allowed()), is_open, "{policies:?}");
        assert_eq!(charge.check().now().is_ok(), is_open, "{policies:?}");
        assert_eq!(charge.check().max_wait(HOUR).await.is_ok(), is_open, "{policies:?}");
        let estimate = charge.clone().estimate(2);
        let held = estimate.hold().await;
        assert_eq!(held.is_ok_and(|held| held.is_admitted()), is_open, "{policies:?}");
        let held = estimate.hold().max_wait(HOUR).await;
        assert_eq!(held.is_ok_and(|held| held.is_admitted()), is_open, "{policies:?}");
    }
}

#[tokio::test]
async fn each_answer_to_a_request_is_reported_once_by_whatever_call() {
    let server = RedisServer::start();
    let redis = support::redis_store(&server).await.into_any();
    for store in [MemoryStore::new().into_any(), redis] {
        let recorder = Recorder::new();
        store.add_observer(recorder.clone());
        let [one, other] = ["one", "other"].map(|name| {
            Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_day(10))
        });
        let alone = Charge::new(&one, "alice");
        let both = alone.clone().and(Charge::new(&other, "bob"));
        for outcome in ["Allowed", "Denied"] {
            let is_reported_once = |call: &str| {
                let decided = recorder.take_of("decided");
                let is_it = decided.len() == 1 && decided[0].contains(outcome);
                assert!(is_it, "{store:?} {call}: {decided:?}");
            };
            drop(one.check("alice").await.unwrap());
            is_reported_once("check");
            drop(one.check("alice").max_wait(Duration::from_micros(1)).await.unwrap());
            is_reported_once("check that waits");
            drop(one.reserve("alice", 1, Duration::ZERO).await.unwrap());
            is_reported_once("reservation");
            drop(one.hold("alice", 1).await.unwrap());
            is_reported_once("hold");
            drop(alone.check().await.unwrap());
            is_reported_once("charge of a limit");
            drop(alone.clone().estimate(1).hold().await.unwrap());
            is_reported_once("charge that holds");
            drop(both.check().await.unwrap());
            is_reported_once("charge of two limits");
            drop(both.clone().estimate(1).hold().await.unwrap());
            is_reported_once("charge of two limits that holds");

            one.peek("alice").await.unwrap();
            one.spend("alice", 20).await.unwrap();
            both.spend().await.unwrap();
            assert_eq!(recorder.take_of("decided"), [""; 0], "no requests");
        }
    }
}
