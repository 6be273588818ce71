//! The bounds of the memory store: the number of keys, their eviction, and their expiry, which
//! needs no task.

use std::{
    pin::pin,
    sync::{Arc, Barrier, Mutex},
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use tokio::time::advance;
use tower_ratelimit::{
    Algorithm, Charge, Decision, Error, Limiter, MemoryStore, Quota,
    observe::{Event, Observer},
    store::{ErrorKind, WhenFull},
};

use crate::support::{self, memory_store};

fn limiter(store: &MemoryStore, quota: Quota) -> Limiter {
    Limiter::new("default", store.clone(), Algorithm::token_bucket(), quota)
}

/// Charges many keys, each of them once.
async fn flood_keys(limiter: &Limiter, keys: usize, cost: u64) {
    for i in 0..keys {
        let _ = limiter.check(format!("flood {i}")).cost(cost).await.unwrap();
    }
}

/// Checks a key when the number of keys is reported, and notes that number.
#[derive(Debug)]
struct Checking(Limiter, Mutex<Vec<usize>>);

impl Observer for Checking {
    fn on_event(&self, event: &Event<'_>) {
        if let Event::KeysHeld { keys, .. } = *event {
            assert!(self.0.check("known").now().unwrap().is_allowed());
            self.1.lock().unwrap().push(keys);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_number_of_keys_is_reported_while_no_key_is_locked() {
    let store = MemoryStore::with_max_keys(10); // one shard
    let limiter = limiter(&store, Quota::per_hour(100));
    assert!(limiter.check("known").await.unwrap().is_allowed());
    let checking = Arc::new(Checking(limiter.clone(), Mutex::default()));
    store.add_observer(checking.clone());
    for key in ["known", "new", "known"] {
        drop(limiter.hold(key, 1).await.unwrap());
    }
    assert_eq!(*checking.1.lock().unwrap(), [2], "only a new key changes the number");
}

#[tokio::test(start_paused = true)]
async fn a_flood_neither_grows_the_store_nor_resets_a_denied_key() {
    for max_keys in [1, 10, 1_000, 10_000] {
        let store = MemoryStore::with_max_keys(max_keys);
        let limiter = limiter(&store, Quota::per_hour(2));
        assert!(limiter.check("victim").cost(2).await.unwrap().is_allowed());
        assert!(!limiter.check("victim").await.unwrap().is_allowed());
        for i in 0..5 * max_keys {
            match limiter.check(format!("flood {i}")).await {
                Ok(decision) => assert!(decision.is_allowed()),
                Err(Error::Store(error)) => {
                    assert!(error.kind() == ErrorKind::Full && max_keys == 1)
                }
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
        |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(10));
    let (requests, tokens, flood) = (named("requests"), named("tokens"), named("flood"));
    let charge = |cost| Charge::new(&requests, "victim").also(&tokens).cost(cost);
    assert!(charge(6).check().await.unwrap().is_allowed());
    assert!(!charge(6).check().await.unwrap().is_allowed());
    flood_keys(&flood, 2_000, 7).await;
    assert_eq!(tokens.peek("victim").await.unwrap().remaining(), 4);

    // Denied while there is no room for the second key.
    advance(Duration::from_secs(6 * 3_600)).await;
    assert!(tokens.check("victim").cost(6).await.unwrap().is_allowed());
    for i in 0..200 {
        // These keys have used less than the victim, which is not denied yet.
        let _ = flood.check(format!("again {i}")).cost(5).await.unwrap();
    }
    assert!(!charge(6).check().await.unwrap().is_allowed());
    flood_keys(&flood, 2_000, 7).await;
    assert_eq!(tokens.peek("victim").await.unwrap().remaining(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_peek_with_another_quota_does_not_get_a_key_evicted() {
    let store = MemoryStore::with_max_keys(200);
    let free = limiter(&store, Quota::per_hour(10));
    let pro = free.with_quota(Quota::per_hour(1_000)).unwrap();
    assert!(free.check("victim").cost(10).await.unwrap().is_allowed());
    assert_eq!(pro.peek("victim").await.unwrap().remaining(), 990);
    flood_keys(&free, 2_000, 9).await;
    assert_eq!(free.peek("victim").await.unwrap().remaining(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_flood_evicts_no_bucket_in_which_a_request_waits() {
    let store = MemoryStore::with_max_keys(200);
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::LeakyBucket, Quota::per_hour(10));
    for _ in 0..3 {
        assert!(limiter.check("victim").await.unwrap().is_allowed());
    }
    flood_keys(&limiter, 2_000, 5).await;
    let delay = limiter.check("victim").await.unwrap().delay();
    assert_eq!(delay, Duration::from_secs(3 * 360));
}

#[tokio::test(start_paused = true)]
async fn a_flood_evicts_the_keys_with_the_least_usage() {
    for algorithm in support::ALGORITHMS {
        let store = MemoryStore::with_max_keys(2_000);
        let limiter = Limiter::new("default", store.clone(), algorithm, Quota::per_hour(5));
        assert!(limiter.check("victim").cost(4).await.unwrap().is_allowed());
        advance(Duration::from_secs(60)).await;
        flood_keys(&limiter, 10_000, 1).await;
        assert_eq!(limiter.peek("victim").await.unwrap().remaining(), 1, "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_full_of_denied_keys_takes_no_other_key() {
    let store = MemoryStore::with_max_keys(100);
    let limiter = limiter(&store, Quota::per_hour(1));
    for i in 0..100 {
        assert!(limiter.check(format!("flood {i}")).await.unwrap().is_allowed());
    }
    let Err(Error::Store(error)) = limiter.check("new").await else {
        panic!("the request was admitted")
    };
    assert_eq!(error.kind(), ErrorKind::Full);
    let text = "no room for a new key: `max_keys` is 100, and all keys are in use; raise it";
    assert_eq!(error.to_string(), text);
    for i in 0..100 {
        assert!(!limiter.check(format!("flood {i}")).await.unwrap().is_allowed());
    }
    assert_eq!(limiter.peek("new").await.unwrap().remaining(), 1, "a peek takes no room");
    advance(Duration::from_secs(3_601)).await;
    assert!(limiter.check("new").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn two_requests_keep_a_key_in_use_until_the_retry_after_of_the_second() {
    for (first, hours) in [(1, 1), (24, 24)] {
        let store = MemoryStore::with_max_keys(100);
        let limiter = limiter(&store, Quota::per_day(24));
        for i in 0..100 {
            let key = format!("flood {i}");
            assert!(limiter.check(&key).cost(first).await.unwrap().is_allowed());
            let denied = limiter.check(&key).cost(24).await.unwrap();
            assert_eq!(denied.retry_after(), Some(Duration::from_secs(hours * 3_600)));
        }
        advance(Duration::from_secs(hours * 3_600 - 1)).await;
        assert!(is_full(&limiter.check("new").await));
        // A store counts the end of a denial in whole seconds.
        advance(Duration::from_secs(2)).await;
        assert!(limiter.check("new").await.unwrap().is_allowed());
    }
}

#[tokio::test(start_paused = true)]
async fn keys_in_the_initial_state_are_dropped_as_new_keys_arrive() {
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
async fn a_key_is_kept_for_a_second_after_its_state_is_initial() {
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
async fn a_peek_by_another_algorithm_changes_nothing() {
    let store = MemoryStore::new();
    let quota = Quota::per_hour(10);
    let log = || Limiter::new("default", store.clone(), Algorithm::SlidingLog, quota);
    assert!(log().check("key").cost(10).await.unwrap().is_allowed());
    assert_eq!(limiter(&store, quota).peek("key").await.unwrap().remaining(), 10);
    assert_eq!(log().peek("key").await.unwrap().remaining(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_store_decides_in_its_first_microsecond_as_it_does_later() {
    let day = Duration::from_secs(86_400);
    for algorithm in support::ALGORITHMS {
        let decisions = async |age| {
            let store = MemoryStore::new();
            advance(age).await;
            let limiter = Limiter::new("default", store.clone(), algorithm, Quota::per_hour(3));
            let (mut seen, mut admitted) = (vec![], vec![]);
            // A leaky bucket holds three requests, two of which wait; elsewhere the fourth waits.
            for _ in 0..if algorithm == Algorithm::LeakyBucket { 3 } else { 4 } {
                let turn = limiter.reserve("key", 1, day).await.unwrap();
                assert!(turn.decision().is_allowed(), "{algorithm}");
                seen.push(format!("{:?}", turn.decision()));
                admitted.push(turn);
            }
            for turn in admitted {
                drop(turn);
                seen.push(format!("{:?}", limiter.peek("key").await.unwrap()));
            }
            assert_eq!(limiter.peek("key").await.unwrap().remaining(), 3, "{algorithm}");
            let early = limiter.reserve("key", 1, Duration::ZERO).await.unwrap();
            seen.push(format!("{:?}", limiter.check("key").cost(2).await.unwrap()));
            seen.push(format!("{:?}", limiter.check("key").await.unwrap()));
            drop(early);
            seen.push(format!("{:?}", limiter.peek("key").await.unwrap()));
            advance(Duration::from_micros(1)).await;
            let denied = limiter.check("key").cost(2).await.unwrap();
            seen.push(format!("{denied:?}"));
            advance(denied.retry_after().unwrap()).await;
            let allowed = limiter.check("key").cost(2).await.unwrap();
            assert!(allowed.is_allowed(), "{algorithm}");
            seen.push(format!("{allowed:?}"));
            seen // all but the instants
        };
        let later = decisions(day).await;
        assert_eq!(decisions(Duration::ZERO).await, later, "{algorithm}");
    }
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

/// The output of a future that is ready immediately: threads that race need no runtime.
fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future is not ready at once"),
    }
}

fn is_full(result: &Result<Decision, Error>) -> bool {
    matches!(result, Err(Error::Store(error)) if error.kind() == ErrorKind::Full)
}

const BOTH: [WhenFull; 2] = [WhenFull::RejectNewKeys, WhenFull::EvictSoonest];

fn algorithms_and_settings() -> impl Iterator<Item = (Algorithm, WhenFull)> {
    support::ALGORITHMS
        .into_iter()
        .flat_map(|algorithm| BOTH.map(|when_full| (algorithm, when_full)))
}

#[tokio::test(start_paused = true)]
async fn a_store_is_full_when_it_holds_its_maximum_of_keys_and_not_before() {
    for max_keys in [1, 2, 3, 31, 33, 100, 1_000, 1_023, 2_047, 2_049, 4_099, 10_007, 100_000] {
        let store = MemoryStore::with_max_keys(max_keys);
        let limiter = limiter(&store, Quota::per_day(1));
        for i in 0..max_keys {
            assert_eq!(store.key_count(), i);
            assert!(limiter.check(format!("{i}")).await.unwrap().is_allowed(), "{i} of {max_keys}");
        }
        for i in 0..10 {
            assert!(is_full(&limiter.check(format!("new {i}")).await), "{i} over {max_keys}");
        }
        assert_eq!(store.key_count(), max_keys);
        for i in 0..max_keys {
            assert!(!limiter.check(format!("{i}")).await.unwrap().is_allowed(), "{max_keys}");
        }
        limiter.reset("0").await.unwrap();
        assert_eq!(store.key_count(), max_keys - 1);
        assert!(limiter.check("new").await.unwrap().is_allowed());
        assert!(is_full(&limiter.check("another").await));
    }
}

#[test]
fn threads_that_race_for_the_last_slots_fill_the_store_exactly() {
    const THREADS: usize = 8;
    for max_keys in [1, 7, 1_000, 2_049, 10_007] {
        let store = MemoryStore::with_max_keys(max_keys);
        let limiter = limiter(&store, Quota::per_day(1));
        let barrier = Barrier::new(THREADS);
        let admit = |thread: usize| {
            barrier.wait();
            let keys = (0..max_keys.max(100)).map(|i| format!("{thread} {i}"));
            let admitted = keys.filter(|key| {
                let result = ready(limiter.check(key));
                assert!(store.key_count() <= max_keys);
                assert!(is_full(&result) || result.as_ref().unwrap().is_allowed());
                !is_full(&result)
            });
            admitted.collect::<Vec<_>>()
        };
        let admitted: Vec<String> = thread::scope(|scope| {
            let admit = &admit;
            let threads: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || admit(thread))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((admitted.len(), store.key_count()), (max_keys, max_keys));
        for key in &admitted {
            assert!(!ready(limiter.check(key)).unwrap().is_allowed(), "{key} was admitted once");
        }
    }
}

#[test]
fn threads_that_race_for_a_store_that_evicts_all_get_decisions() {
    const THREADS: usize = 8;
    for max_keys in [100, 2_049, 5_000] {
        let store = memory_store(max_keys, WhenFull::EvictSoonest);
        let limiter = limiter(&store, Quota::per_day(1));
        let admit = |thread: usize| {
            for i in 0..max_keys {
                assert!(ready(limiter.check(format!("{thread} {i}"))).unwrap().is_allowed());
                assert!(store.key_count() <= max_keys);
            }
        };
        thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || admit(thread));
            }
        });
        let all =
            (0..THREADS).flat_map(|thread| (0..max_keys).map(move |i| format!("{thread} {i}")));
        let held = all.filter(|key| ready(limiter.peek(key)).unwrap().remaining() == 0).count();
        assert_eq!((held, store.key_count()), (max_keys, max_keys));
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_rejects_keeps_denied_keys_and_one_that_evicts_drops_the_soonest() {
    for (algorithm, when_full) in algorithms_and_settings() {
        let store = memory_store(20, when_full);
        let limiter = Limiter::new("default", store, algorithm, Quota::per_day(1));
        for i in 0..20 {
            assert!(limiter.check(format!("{i}")).await.unwrap().is_allowed());
            advance(Duration::from_secs(60)).await;
        }
        for new in 0..5 {
            let result = limiter.check(format!("new {new}")).await;
            assert_eq!(is_full(&result), when_full == WhenFull::RejectNewKeys, "{algorithm}");
            let evicted = if is_full(&result) { 0 } else { new + 1 };
            for i in 0..20 {
                let left = limiter.peek(format!("{i}")).await.unwrap().remaining();
                assert_eq!(left, u64::from(i < evicted), "{i} of {algorithm}, {when_full:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_with_units_left_is_evicted_before_a_denied_key() {
    for (algorithm, when_full) in algorithms_and_settings() {
        let store = memory_store(20, when_full);
        let limiter = Limiter::new("default", store, algorithm, Quota::per_day(5));
        for i in 0..19 {
            assert!(limiter.check(format!("{i}")).cost(5).await.unwrap().is_allowed());
        }
        advance(Duration::from_secs(60)).await;
        for new in 0..50 {
            // Restored later than all other keys.
            assert!(limiter.check(format!("new {new}")).cost(4).await.unwrap().is_allowed());
        }
        for i in 0..19 {
            let denied = !limiter.check(format!("{i}")).await.unwrap().is_allowed();
            assert!(denied, "{i} of {algorithm}, {when_full:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_store_forgets_neither_a_block_nor_the_count_of_a_blocked_key() {
    for algorithm in support::ALGORITHMS {
        let store = MemoryStore::with_max_keys(20);
        let limiter = Limiter::new("default", store, algorithm, Quota::per_day(3));
        let minute = Duration::from_secs(60);
        for i in 0..20 {
            let key = format!("{i}");
            // Every second key still has units.
            assert!(limiter.check(&key).cost(3 - i % 2).await.unwrap().is_allowed());
            let _ = limiter.block(&key, minute).await.unwrap();
            assert!(limiter.try_acquire(&key, 1, Duration::ZERO).await.unwrap().is_blocked());
        }
        assert!(is_full(&limiter.check("new").await), "{algorithm}: a block was forgotten");

        advance(2 * minute).await;
        let mut new_keys = 0;
        while !is_full(&limiter.check(format!("new {new_keys}")).cost(3).await) {
            new_keys += 1;
        }
        assert_eq!(new_keys, 10, "{algorithm}: only keys with units left make room");
        for i in (0..20).step_by(2) {
            let used_up = limiter.peek(format!("{i}")).await.unwrap();
            assert_eq!(used_up.remaining(), 0, "{algorithm}: the count of key {i} was forgotten");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_flood_resets_the_denied_keys_of_a_store_that_evicts_and_none_of_one_that_rejects() {
    for when_full in BOTH {
        let store = memory_store(5_000, when_full);
        let limiter = limiter(&store, Quota::per_day(3));
        for i in 0..5_000 {
            assert!(limiter.check(format!("{i}")).cost(3).await.unwrap().is_allowed());
        }
        advance(Duration::from_secs(60)).await;
        let mut rejected = 0;
        for i in 0..2_000 {
            for _ in 0..3 {
                rejected += usize::from(is_full(&limiter.check(format!("flood {i}")).await));
            }
            assert_eq!(store.key_count(), 5_000);
        }
        let mut denied = 0;
        for i in 0..5_000 {
            denied += usize::from(limiter.peek(format!("{i}")).await.unwrap().remaining() == 0);
        }
        let expected =
            if when_full == WhenFull::RejectNewKeys { (6_000, 5_000) } else { (0, 3_000) };
        assert_eq!((rejected, denied), expected, "{when_full:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_for_which_a_request_waits_is_never_evicted() {
    for (algorithm, when_full) in algorithms_and_settings() {
        let store = memory_store(100, when_full);
        let stores = [MemoryStore::new(), store.clone()];
        // The same requests in a store without a flood, for comparison.
        let limiters = stores.map(|store| Limiter::new("a", store, algorithm, Quota::per_hour(2)));
        let flood = Limiter::new("b", store.clone(), algorithm, Quota::per_day(1));
        let check = async |max_wait| {
            let [calm, flooded] = &limiters;
            let expected = calm.reserve("victim", 1, max_wait).await.unwrap().keep();
            let decision = flooded.reserve("victim", 1, max_wait).await.unwrap().keep();
            assert_eq!(decision, expected, "{algorithm}, {when_full:?}");
            decision
        };
        let day = Duration::from_secs(86_400);
        let mut delay = Duration::ZERO;
        while delay.is_zero() {
            delay = check(day).await.delay();
        }
        // The keys of the flood are restored later.
        for i in 0..2_000 {
            let result = flood.check(format!("flood {i}")).await;
            assert_eq!(is_full(&result), i >= 99 && when_full == WhenFull::RejectNewKeys);
        }
        assert!(!check(Duration::ZERO).await.is_allowed());

        // When the request has proceeded, the key can be evicted.
        advance(delay).await;
        if when_full == WhenFull::EvictSoonest {
            for i in 0..200 {
                assert!(flood.check(format!("again {i}")).await.unwrap().is_allowed());
            }
            assert!(limiters[1].check("victim").cost(2).await.unwrap().is_allowed(), "{algorithm}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_for_which_a_request_waits_is_not_evicted_after_a_quota_change() {
    let changed = [Quota::per_hour(4), Quota::per_hour(1), Quota::per_minute(4)];
    for (algorithm, quota) in support::ALGORITHMS
        .into_iter()
        .flat_map(|algorithm| changed.map(|quota| (algorithm, quota)))
    {
        let store = memory_store(100, WhenFull::EvictSoonest);
        let limiter = Limiter::new("a", store.clone(), algorithm, Quota::per_hour(2));
        let flood = Limiter::new("b", store, Algorithm::FixedWindow, Quota::per_day(1));
        let day = Duration::from_secs(86_400);
        let mut delay = Duration::ZERO;
        while delay.is_zero() {
            delay = limiter.reserve("victim", 1, day).await.unwrap().keep().delay();
        }
        let changed = limiter.with_quota(quota).unwrap();
        // In a leaky bucket, this request can wait, too.
        delay = delay.max(changed.check("victim").await.unwrap().delay());
        let left = changed.peek("victim").await.unwrap();
        assert!(!left.reset_after().is_zero(), "{algorithm}, {quota}");
        // The keys of the flood are restored later.
        for i in 0..2_000 {
            assert!(flood.check(format!("flood {i}")).await.unwrap().is_allowed());
        }
        assert_eq!(changed.peek("victim").await.unwrap(), left, "{algorithm}, {quota}");

        advance(delay).await;
        for i in 0..200 {
            assert!(flood.check(format!("again {i}")).await.unwrap().is_allowed());
        }
        let reset = changed.peek("victim").await.unwrap().reset_after();
        assert!(reset.is_zero(), "{algorithm}, {quota}: the request no longer waits");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_evicts_is_full_while_a_request_waits_for_each_of_its_keys() {
    for algorithm in support::ALGORITHMS {
        let store = memory_store(10, WhenFull::EvictSoonest);
        let limiter = Limiter::new("default", store.clone(), algorithm, Quota::per_hour(2));
        let day = Duration::from_secs(86_400);
        let mut longest = Duration::ZERO;
        for key in 0..10 {
            for _ in 0..3 {
                let decision = limiter.reserve(format!("{key}"), 1, day).await.unwrap().keep();
                if decision.is_allowed() {
                    longest = longest.max(decision.delay());
                }
            }
        }
        assert!(longest >= Duration::from_secs(1_800), "{algorithm}");
        assert!(is_full(&limiter.check("new").await), "{algorithm}");
        advance(longest - Duration::from_micros(1)).await;
        assert!(is_full(&limiter.check("new").await), "{algorithm}");
        advance(Duration::from_micros(1)).await;
        assert!(limiter.check("new").await.unwrap().is_allowed(), "{algorithm}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_store_takes_all_keys_of_several_limits_or_none() {
    for when_full in BOTH {
        let store = memory_store(10, when_full);
        let named =
            |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
        let (user, all) = (named("user", Quota::per_hour(5)), named("all", Quota::per_hour(9)));
        let flood = named("flood", Quota::per_day(1));
        // Alice's key would be evicted first, because it has the most units left.
        assert!(user.check("alice").await.unwrap().is_allowed());
        for i in 0..9 {
            assert!(flood.check(format!("{i}")).await.unwrap().is_allowed());
            advance(Duration::from_secs(1)).await;
        }
        let charge = Charge::new(&user, "alice").and(Charge::new(&all, "all"));
        let charge = charge.and(Charge::new(&all, "europe"));
        let result = charge.check().await;
        let left = async |limiter: &Limiter, key| limiter.peek(key).await.unwrap().remaining();
        let evicted = if when_full == WhenFull::EvictSoonest {
            assert!(result.unwrap().is_allowed());
            assert_eq!((left(&user, "alice").await, left(&all, "all").await), (3, 8));
            assert_eq!(left(&all, "europe").await, 8);
            2
        } else {
            assert!(is_full(&result));
            assert_eq!((left(&user, "alice").await, left(&all, "all").await), (4, 9));
            0
        };
        for i in 0..9 {
            let restored = flood.peek(format!("{i}")).await.unwrap().remaining() == 1;
            assert_eq!(restored, i < evicted, "{i}, {when_full:?}");
        }
        assert_eq!(store.key_count(), 10);
    }
}

#[tokio::test(start_paused = true)]
async fn several_limits_find_room_in_a_large_store_that_is_full() {
    for when_full in BOTH {
        let store = memory_store(3_000, when_full);
        let limiter = limiter(&store, Quota::per_day(2));
        // Denied keys make room under one setting, keys with units left under the other.
        let cost = if when_full == WhenFull::EvictSoonest { 2 } else { 1 };
        flood_keys(&limiter, 3_000, cost).await;
        for i in 0..100 {
            let key = |n| format!("{n} of {i}");
            let charge = (0..5).map(|n| Charge::new(&limiter, key(n)).cost(2));
            let charge = charge.reduce(Charge::and).unwrap();
            assert!(charge.check().await.unwrap().is_allowed());
            for n in 0..5 {
                assert!(!limiter.check(key(n)).await.unwrap().is_allowed());
            }
            assert_eq!(store.key_count(), 3_000);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn spending_on_a_denied_key_and_a_new_one_evicts_neither() {
    let store = memory_store(2, WhenFull::EvictSoonest);
    let named = |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    let (user, other) = (named("user", Quota::per_hour(5)), named("other", Quota::per_day(1)));
    user.spend("alice", 7).await.unwrap();
    assert!(other.check("bob").await.unwrap().is_allowed());
    Charge::new(&user, "alice").and(Charge::new(&other, "carol")).spend().await.unwrap();
    assert_eq!(store.key_count(), 2);
    let denied = user.check("alice").await.unwrap();
    assert_eq!(
        denied.retry_after(),
        Some(Duration::from_secs(4 * 720)),
        "the key owes 3 units at 5 per hour"
    );
    assert!(!other.check("carol").await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn clones_share_the_setting_for_a_full_store() {
    let store = MemoryStore::with_max_keys(1);
    let limiter = limiter(&store, Quota::per_day(1));
    assert!(limiter.check("a").await.unwrap().is_allowed());
    assert!(is_full(&limiter.check("b").await), "the default rejects new keys");
    store.clone().set_when_full(WhenFull::EvictSoonest);
    assert!(limiter.check("b").await.unwrap().is_allowed());
    store.set_when_full(WhenFull::RejectNewKeys);
    assert!(is_full(&limiter.check("a").await));
}
