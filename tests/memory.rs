//! The memory store is bounded, and drops what is over by itself.

mod support;

use std::time::Duration;

use tokio::time::advance;
use tower_ratelimit::{Algorithm, Charge, Error, Limiter, MemoryStore, Quota};

fn limiter(store: &MemoryStore, quota: Quota) -> Limiter {
    Limiter::new(store.clone(), Algorithm::token_bucket(), quota)
}

/// A flood of keys, each of which is charged once.
async fn spend_all_over(limiter: &Limiter, keys: usize, cost: u32) {
    for i in 0..keys {
        let _ = limiter.check_n(format!("flood {i}"), cost).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_flood_neither_grows_it_nor_resets_a_key_that_is_denied() {
    for max_keys in [1, 10, 1_000, 10_000] {
        let store = MemoryStore::with_max_keys(max_keys);
        let limiter = limiter(&store, Quota::per_hour(2));
        assert!(limiter.check_n("victim", 2).await.unwrap().is_allowed());
        assert!(!limiter.check("victim").await.unwrap().is_allowed());
        for i in 0..5 * max_keys {
            match limiter.check(format!("flood {i}")).await {
                Ok(decision) => assert!(decision.is_allowed()),
                Err(Error::Store(error)) => assert!(error.is_full() && max_keys == 1),
                Err(error) => panic!("{error}"),
            }
            assert!(store.key_count() <= max_keys);
        }
        assert!(!limiter.check("victim").await.unwrap().is_allowed(), "{max_keys}");
        advance(Duration::from_secs(1_800)).await;
        assert!(limiter.check("victim").await.unwrap().is_allowed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_flood_resets_no_key_that_one_of_several_limits_denies() {
    let store = MemoryStore::with_max_keys(200);
    let named =
        |name| Limiter::named(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(10));
    let (requests, tokens, flood) = (named("requests"), named("tokens"), named("flood"));
    let charge = |cost| Charge::new(&requests, "victim").also(&tokens).cost(cost);
    assert!(charge(6).check().await.unwrap().is_allowed());
    assert!(!charge(6).check().await.unwrap().is_allowed());
    spend_all_over(&flood, 2_000, 7).await;
    assert_eq!(tokens.peek("victim").await.unwrap().remaining(), 4);

    // Denied while there is no room, for a key that is not there.
    advance(Duration::from_secs(6 * 3_600)).await;
    assert!(tokens.check_n("victim", 6).await.unwrap().is_allowed());
    for i in 0..200 {
        // These have used less than the victim, which is not denied yet.
        let _ = flood.check_n(format!("again {i}"), 5).await.unwrap();
    }
    assert!(!charge(1).cost(6).check().await.unwrap().is_allowed());
    spend_all_over(&flood, 2_000, 7).await;
    assert_eq!(tokens.peek("victim").await.unwrap().remaining(), 4);
}

#[tokio::test(start_paused = true)]
async fn to_look_at_a_key_with_another_quota_makes_it_no_victim_of_a_flood() {
    let store = MemoryStore::with_max_keys(200);
    let free = limiter(&store, Quota::per_hour(10));
    let pro = free.with_quota(Quota::per_hour(1_000)).unwrap();
    assert!(free.check_n("victim", 10).await.unwrap().is_allowed());
    assert_eq!(pro.peek("victim").await.unwrap().remaining(), 990);
    spend_all_over(&free, 2_000, 9).await;
    assert_eq!(free.peek("victim").await.unwrap().remaining(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_flood_drops_no_bucket_in_which_somebody_waits() {
    let store = MemoryStore::with_max_keys(200);
    let limiter = Limiter::new(store.clone(), Algorithm::LeakyBucket, Quota::per_hour(10));
    for _ in 0..3 {
        assert!(limiter.check("victim").await.unwrap().is_allowed());
    }
    spend_all_over(&limiter, 2_000, 5).await;
    let delay = limiter.check("victim").await.unwrap().delay();
    assert_eq!(delay, Duration::from_secs(3 * 360));
}

#[tokio::test(start_paused = true)]
async fn a_flood_drops_those_that_have_used_least() {
    for algorithm in support::ALGORITHMS {
        let store = MemoryStore::with_max_keys(2_000);
        let limiter = Limiter::new(store.clone(), algorithm, Quota::per_hour(5));
        assert!(limiter.check_n("victim", 4).await.unwrap().is_allowed());
        advance(Duration::from_secs(60)).await;
        spend_all_over(&limiter, 10_000, 1).await;
        assert_eq!(limiter.peek("victim").await.unwrap().remaining(), 1, "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_full_of_denied_keys_takes_no_other() {
    let store = MemoryStore::with_max_keys(100);
    let limiter = limiter(&store, Quota::per_hour(1));
    for i in 0..100 {
        assert!(limiter.check(format!("flood {i}")).await.unwrap().is_allowed());
    }
    let Err(Error::Store(error)) = limiter.check("new").await else { panic!("it was admitted") };
    assert!(error.is_full());
    assert_eq!(error.to_string(), "all of the store's 100 keys are used up, raise `max_keys`");
    for i in 0..100 {
        assert!(!limiter.check(format!("flood {i}")).await.unwrap().is_allowed());
    }
    assert_eq!(limiter.peek("new").await.unwrap().remaining(), 1, "to look takes no room");
    advance(Duration::from_secs(3_601)).await;
    assert!(limiter.check("new").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn keys_that_are_as_if_never_seen_are_dropped_as_new_ones_come() {
    let store = MemoryStore::new();
    let limiter = limiter(&store, Quota::per_second(1));
    for round in 0..20 {
        for i in 0..1_000 {
            assert!(limiter.check(format!("{round} {i}")).await.unwrap().is_allowed());
        }
        advance(Duration::from_secs(2)).await;
    }
    assert!(store.key_count() < 6_000, "{} keys are left of 20,000", store.key_count());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_kept_for_a_second_after_it_is_as_if_never_seen() {
    let store = MemoryStore::new();
    let limiter = limiter(&store, Quota::per_second(1_000));
    let fill = async |round| {
        for i in 0..1_000 {
            assert!(limiter.check(format!("{round} {i}")).await.unwrap().is_allowed());
        }
    };
    fill(0).await;
    advance(Duration::from_millis(900)).await;
    fill(1).await;
    assert_eq!(store.key_count(), 2_000);
    advance(Duration::from_millis(1_100)).await;
    fill(2).await;
    assert!(store.key_count() < 2_500, "{} keys are left of 3,000", store.key_count());
}

#[tokio::test(start_paused = true)]
async fn to_look_at_a_key_by_another_algorithm_changes_nothing() {
    let store = MemoryStore::new();
    let quota = Quota::per_hour(10);
    let log = || Limiter::new(store.clone(), Algorithm::SlidingLog, quota);
    assert!(log().check_n("key", 10).await.unwrap().is_allowed());
    assert_eq!(limiter(&store, quota).peek("key").await.unwrap().remaining(), 10);
    assert_eq!(log().peek("key").await.unwrap().remaining(), 0);
}

#[tokio::test(start_paused = true)]
async fn paused_time_moves_the_limits() {
    let limiter = limiter(&MemoryStore::new(), Quota::per_day(1));
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let wait = limiter.check("key").await.unwrap().retry_after().unwrap();
    tokio::time::sleep(wait - Duration::from_millis(1)).await;
    assert!(!limiter.check("key").await.unwrap().is_allowed());
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(limiter.check("key").await.unwrap().is_allowed());
}
