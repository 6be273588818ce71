//! Tests of the shards, which the public interface does not expose.

mod agreement;
mod changes;
mod contract;
mod holds;
mod requests;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use super::*;
use crate::{
    algorithm::{Algorithm, Params},
    decision::{KeyState, Source},
    limiter::{Charge, Limiter},
    quota::Quota,
};

fn limiter(name: &str, store: &MemoryStore, quota: Quota) -> Limiter {
    Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
}

fn keys_by_shard(store: &MemoryStore) -> Vec<usize> {
    // Locks all shards at the same time, in the order in which several limits lock theirs.
    let shards: Vec<_> = store.0.shards.iter().map(|shard| lock(&shard.0)).collect();
    shards.iter().map(|shard| shard.key_count()).collect()
}

/// Fills a store of two shards with keys of the first one. Returns keys of the second one.
async fn lopsided(limiter: &Limiter, store: &MemoryStore) -> Vec<String> {
    let mut others = vec![];
    for i in 0.. {
        if keys_by_shard(store) == [2_048, 0] {
            break;
        }
        let key = format!("key {i}");
        assert!(limiter.check(&key).await.unwrap().is_allowed());
        if keys_by_shard(store)[1] > 0 {
            limiter.reset(&key).await.unwrap();
            others.push(key);
        }
    }
    others
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_shard_is_empty_evicts_a_key_of_another_shard() {
    let store = MemoryStore::with_max_keys(2_048);
    let limiter = limiter("a", &store, Quota::per_hour(2));
    let others = lopsided(&limiter, &store).await;
    for (i, other) in others.iter().take(30).enumerate() {
        assert!(limiter.check(other).cost(2).await.unwrap().is_allowed());
        assert_eq!(limiter.peek(other).await.unwrap().remaining(), 0);
        assert_eq!(keys_by_shard(&store).iter().sum::<usize>(), 2_048);
        assert_eq!(keys_by_shard(&store)[1], i + 1, "a key that is used up was evicted");
    }
}

#[tokio::test(start_paused = true)]
async fn several_limits_whose_shard_is_empty_evict_keys_of_another_shard() {
    let store = MemoryStore::with_max_keys(2_048);
    let limiter = limiter("a", &store, Quota::per_hour(2));
    let others = lopsided(&limiter, &store).await;
    for three in others.chunks_exact(3).take(10) {
        let charge = three.iter().map(|key| Charge::of_units(&limiter, key, 2));
        let charge = charge.reduce(Charge::and).unwrap();
        assert!(charge.check().await.unwrap().is_allowed());
    }
    assert_eq!(keys_by_shard(&store), [2_048 - 30, 30]);
    for key in &others[..30] {
        assert_eq!(limiter.peek(key).await.unwrap().remaining(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_decides_before_another_one_denies_spends_nothing() {
    let algorithms = [
        Algorithm::token_bucket(),
        Algorithm::fixed_window(),
        Algorithm::sliding_window(),
        Algorithm::sliding_log(),
    ];
    let [together, alone] = [MemoryStore::new(), MemoryStore::new()].map(|store| {
        std::array::from_fn::<_, 4, _>(|i| {
            let (name, quota) = (i.to_string(), Quota::per_second(10));
            Limiter::new(&name, store.clone(), algorithms[i], quota)
        })
    });
    let mut random = fastrand::Rng::with_seed(1);
    let mut decisions = [0; 2];
    for _ in 0..3_000 {
        tokio::time::advance(Duration::from_millis(random.u64(0..300))).await;
        let mut order = [0, 1, 2, 3];
        random.shuffle(&mut order);
        let chosen = order[..random.usize(2..=4)].iter();
        let parts: Vec<_> = chosen.map(|i| (*i, random.u64(1..6))).collect();
        let charge = parts.iter().map(|(i, cost)| Charge::of_units(&together[*i], "key", *cost));
        let decision = charge.reduce(Charge::and).unwrap().check().await.unwrap();

        let mut allows = true;
        for (i, cost) in &parts {
            allows &= alone[*i].check("key").cost(*cost).peek().await.unwrap().allows();
        }
        for (i, cost) in parts.iter().filter(|_| allows) {
            assert!(alone[*i].check("key").cost(*cost).await.unwrap().is_allowed());
        }
        assert_eq!(decision.is_allowed(), allows, "{parts:?}");
        decisions[usize::from(allows)] += 1;
        for (one, other) in together.iter().zip(&alone) {
            let [one, other] = [one.peek("key").await, other.peek("key").await].map(Result::unwrap);
            let state = |it: &KeyState| (it.remaining(), it.replenish_after(), it.reset_after());
            assert_eq!(state(&one), state(&other), "{parts:?}");
        }
    }
    assert!(decisions.iter().all(|count| *count > 300), "{decisions:?}");
}

#[tokio::test(start_paused = true)]
async fn a_full_store_forgets_one_unit_rather_than_several_of_a_larger_quota() {
    let store = MemoryStore::with_max_keys(4);
    let small = limiter("small", &store, Quota::per_day(3));
    let large = limiter("large", &store, Quota::per_day(1_000));
    assert!(large.check("kept").cost(2).await.unwrap().is_allowed());
    for i in 0..20 {
        assert!(small.check(format!("{i}")).await.unwrap().is_allowed());
        assert_eq!(large.peek("kept").await.unwrap().remaining(), 998, "{i}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_free_again_stays_for_a_second() {
    let store = MemoryStore::with_max_keys(1_000);
    let quota = Quota::concurrent(2);
    let places = Limiter::new("places", store.clone(), Algorithm::concurrency(), quota);
    let hold = async |key: u32| drop(places.hold(key, 2).await.unwrap().admitted().unwrap());
    for key in 0..100 {
        hold(key).await;
    }
    assert_eq!(store.key_count(), 100);
    let first = places.hold(0, 1).await.unwrap().admitted().unwrap();
    tokio::time::advance(Duration::from_millis(1_001)).await;
    for key in 100..200 {
        hold(key).await;
    }
    assert!((100..105).contains(&store.key_count()), "{}", store.key_count());
    assert_eq!(places.peek(0).await.unwrap().held(), 1);
    drop(first);
}

#[test]
fn threads_that_race_never_exceed_the_maximum_of_keys() {
    for (max_keys, when_full) in [
        (1, WhenFull::EvictSoonest),
        (31, WhenFull::EvictSoonest),
        (2_049, WhenFull::RejectNewKeys),
        (4_099, WhenFull::EvictSoonest),
    ] {
        let store = MemoryStore::with_max_keys(max_keys);
        store.set_when_full(when_full);
        let (one, two) =
            ["one", "two"].map(|name| limiter(name, &store, Quota::per_hour(1))).into();
        let over = AtomicBool::new(false);
        let work = |thread: usize| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            for i in 0..max_keys + 1_000 {
                let key = format!("{thread} {i}");
                runtime.block_on(async {
                    let _ = match i % 4 {
                        0 => Charge::new(&one, &key).also(&two).check().await,
                        1 => two.check(&key).await,
                        _ => one.check(&key).await,
                    };
                    if i % 8 == 0 {
                        one.reset(&key).await.unwrap();
                    }
                });
            }
        };
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut reads = 0;
                while !over.load(Ordering::Relaxed) {
                    let keys: usize = keys_by_shard(&store).iter().sum();
                    assert!(keys <= max_keys && store.key_count() <= max_keys, "{keys}");
                    reads += 1;
                }
                reads
            });
            let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || work(thread))).collect();
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            over.store(true, Ordering::Relaxed);
            ended.into_iter().for_each(Result::unwrap);
            assert!(watch.join().unwrap() > 0);
        });
        let keys: usize = keys_by_shard(&store).iter().sum();
        assert_eq!(store.key_count(), keys, "no slot is lost");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reading_that_is_older_than_the_last_one_grants_nothing() {
    let store = MemoryStore::with_max_keys(10);
    for algorithm in [Algorithm::token_bucket(), Algorithm::fixed_window()] {
        let limiter = Limiter::new(algorithm.name(), store.clone(), algorithm, Quota::per_hour(1));
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        // As if another thread had read a clock that is ahead, and had locked the shard first.
        let latest = |at: i64| lock(&store.0.shards[0].0).latest = at;
        latest(500_000);
        let denied = limiter.check("alice").await.unwrap();
        assert_eq!(denied.retry_after(), Some(Duration::from_millis(3_599_500)), "{algorithm}");
        let denied = limiter.check("alice").await.unwrap();
        assert_eq!(denied.retry_after(), Some(Duration::from_millis(3_599_500)), "{algorithm}");
        latest(0);
        limiter.reset("alice").await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_counter_that_differs_between_processors_grants_nothing() {
    let counter = Arc::default();
    let limiter =
        limiter("a", &MemoryStore::with_counter(&counter), Quota::per_second(10).burst(1));
    know_rate(&counter, &limiter).await;
    for difference in [40, 100, 2_000] {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        for _ in 0..10 {
            // The thread moves between two processors.
            counter.fetch_sub(2_000 * difference, Ordering::Relaxed);
            let denied = limiter.check("alice").await.unwrap();
            assert_eq!(denied.retry_after(), Some(Duration::from_millis(100)));
            counter.fetch_add(2_000 * difference, Ordering::Relaxed);
            assert!(!limiter.check("alice").await.unwrap().is_allowed());
        }
        pass(&counter, 100).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_counter_that_leaps_ahead_grants_a_tenth_of_a_second_early_and_nothing_more() {
    for (leap, early) in [(50, 5), (99, 9), (101, 0), (3_600_000, 0)] {
        let counter = Arc::default();
        let limiter = limiter("a", &MemoryStore::with_counter(&counter), Quota::per_second(100));
        know_rate(&counter, &limiter).await;
        assert!(limiter.check("alice").cost(100).await.unwrap().is_allowed());
        counter.fetch_add(2_000 * leap, Ordering::Relaxed);
        let mut admitted = 0;
        for millis in 0..=500 {
            while limiter.check("alice").await.unwrap().is_allowed() {
                admitted += 1;
            }
            assert!(admitted <= early + millis / 10, "{leap}, after {millis} ms");
            pass(&counter, 1).await;
        }
        assert_eq!(admitted, 50, "{leap}");
    }
}

/// Lets the store measure the rate of the counter, and compare it.
async fn know_rate(counter: &AtomicU64, limiter: &Limiter) {
    for _ in 0..10 {
        pass(counter, 100).await;
        limiter.peek("alice").await.unwrap();
    }
}

/// Passes the time of tokio, and of a counter with two ticks in a microsecond.
async fn pass(counter: &AtomicU64, millis: u64) {
    for _ in 0..millis {
        counter.fetch_add(2_000, Ordering::Relaxed);
        tokio::time::advance(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_steps_back_far_does_not_stop_the_store() {
    let store = MemoryStore::with_max_keys(10);
    let limiter = limiter("a", &store, Quota::per_hour(1));
    lock(&store.0.shards[0].0).latest = 10_000_000_000;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
    tokio::time::advance(Duration::from_secs(3_600)).await;
    assert!(limiter.check("alice").await.unwrap().is_allowed());
}

/// Passes 3 s of requests with other keys, which sweep the store.
async fn other_keys(limiter: &Limiter) {
    for i in 0..300 {
        tokio::time::advance(Duration::from_millis(10)).await;
        assert!(limiter.check(format!("other {i}")).await.unwrap().is_allowed());
    }
}

const HOLDING: [Algorithm; 4] = [
    Algorithm::fixed_window(),
    Algorithm::sliding_log(),
    Algorithm::sliding_window(),
    Algorithm::token_bucket(),
];

#[tokio::test(start_paused = true)]
async fn no_change_by_another_quota_makes_the_store_forget_a_count() {
    for algorithm in HOLDING {
        for change in 0..7 {
            let store = MemoryStore::new();
            let all = Limiter::new("all", store, algorithm, Quota::per_second(1_000));
            let plan = all.with_quota(Quota::per_day(3)).unwrap();
            assert!(plan.check("alice").cost(3).await.unwrap().is_allowed());
            let second = Duration::from_secs(1);
            match change {
                0 => drop(all.block("alice", second).await.unwrap()),
                1 => drop(all.unblock("alice").await.unwrap()),
                2 => {
                    let _ = plan.block("alice", second).await.unwrap();
                    assert!(all.check("alice").await.unwrap().is_blocked());
                }
                3 => assert!(!all.check("alice").cost(1_000).await.unwrap().is_allowed()),
                4 => assert!(!all.hold("alice", 1_000).await.unwrap().is_admitted()),
                5 => {
                    let held = plan.with_quota(Quota::per_day(4)).unwrap().hold("alice", 1).await;
                    held.unwrap().admitted().unwrap().cancel();
                }
                _ => drop(all.peek("alice").await.unwrap()),
            }
            other_keys(&all).await;
            let denied = plan.check("alice").await.unwrap();
            assert!(!denied.is_allowed(), "{algorithm}, change {change}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_permit_counts_by_the_quota_that_the_limiter_has_then() {
    let second = Duration::from_secs(1);
    for algorithm in HOLDING {
        let limiter = Limiter::new("a", MemoryStore::new(), algorithm, Quota::per_second(10));
        let permit = limiter.hold("alice", 9).await.unwrap().admitted().unwrap();
        limiter.set_quota(Quota::per_hour(10)).unwrap();
        permit.settle(9);
        tokio::time::advance(3 * second).await;
        assert!(limiter.check("alice").await.unwrap().is_allowed(), "{algorithm}");
        assert!(!limiter.check("alice").await.unwrap().is_allowed(), "{algorithm}");

        let limiter = Limiter::new("b", MemoryStore::new(), algorithm, Quota::per_hour(10));
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        let permit = limiter.hold("alice", 9).await.unwrap().admitted().unwrap();
        tokio::time::advance(1_800 * second).await;
        limiter.set_quota(Quota::per_second(10)).unwrap();
        permit.settle(9);
        assert!(!limiter.check("alice").cost(10).await.unwrap().is_allowed(), "{algorithm}");
        tokio::time::advance(2 * second).await;
        assert!(limiter.check("alice").cost(10).await.unwrap().is_allowed(), "{algorithm}");
    }
}

#[test]
fn a_key_is_not_in_use_for_an_instant_before_its_last_request() {
    let (algorithm, quota) = (Algorithm::token_bucket(), Quota::per_second(10));
    let params = Params::new(algorithm, quota).unwrap();
    let settings = Arc::new(Settings::new("a", algorithm, quota, params, Source::Store));
    let mut entry = Entry::new(&settings, b"key");
    let check = EngineRequest { action: Action::Check, cost: 1, ..EngineRequest::observe(2_000) };
    assert!(entry.decide(&settings, &check).admitted);
    let usage = entry.usage(1_000);
    assert_eq!(usage.reset, 102_000);
    assert!(usage.may_be_evicted(WhenFull::RejectNewKeys));
}
