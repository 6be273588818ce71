//! Limiters over either store: checks, peeks, refunds, resets, quotas and settings.

use std::{sync::Arc, time::Duration};

use proptest::{prelude::*, test_runner::TestRunner};
use tokio::sync::Barrier;
use tower_ratelimit::{
    Algorithm, Error, FailurePolicy, Limiter, MemoryStore, Quota,
    config::{ConfigError, QuotaError, Refill},
};

use crate::support::{self, ALGORITHMS, server::RedisServer};

/// One limiter in memory, and some over separate connections, like those of replicas. Half of the
/// replicas remember denials.
async fn limiters(server: &RedisServer, algorithm: Algorithm, quota: Quota) -> [Vec<Limiter>; 2] {
    let memory = Limiter::new("default", MemoryStore::new(), algorithm, quota);
    let mut redis = vec![];
    for replica in 0..8 {
        let store = match replica % 2 {
            0 => support::redis_store(server).await,
            _ => support::forgetful_store(server).await,
        };
        redis.push(Limiter::new("default", store, algorithm, quota));
    }
    [vec![memory.clone(), memory], redis]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tasks_that_race_for_a_key_are_admitted_exactly_as_often_as_allowed() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiters in limiters(&server, algorithm, Quota::per_hour(100)).await {
            let barrier = Arc::new(Barrier::new(2_000));
            let mut tasks = tokio::task::JoinSet::new();
            for i in 0..2_000 {
                let limiter = limiters[i % limiters.len()].clone();
                let barrier = barrier.clone();
                tasks.spawn(async move {
                    barrier.wait().await;
                    limiter.check("key").await.unwrap().is_allowed()
                });
            }
            let admitted = tasks.join_all().await.into_iter().filter(|allowed| *allowed).count();
            assert_eq!(admitted, 100, "{algorithm}");
        }
    }
}

#[tokio::test]
async fn peek_spends_nothing_and_refund_and_reset_return_units() {
    let of_zero = async |limiter: &Limiter, remaining| {
        let states = [limiter.spend("key", 0).await, limiter.refund("key", 0).await];
        for state in states.map(Result::unwrap) {
            assert_eq!((state.remaining(), state.allows()), (remaining, remaining > 0));
        }
    };
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiters in limiters(&server, algorithm, Quota::per_hour(10)).await {
            let limiter = &limiters[0];
            let remaining = async || limiter.peek("key").await.unwrap().remaining();
            assert_eq!(remaining().await, 10, "{algorithm}");
            assert!(limiter.check("key").cost(8).await.unwrap().is_allowed());
            assert_eq!((remaining().await, remaining().await), (2, 2), "{algorithm}");
            assert!(!limiter.check("key").cost(3).await.unwrap().is_allowed());
            assert_eq!(remaining().await, 2, "{algorithm}: a denied request spent something");
            assert!(limiter.check("key").cost(2).peek().await.unwrap().allows(), "{algorithm}");
            assert!(!limiter.check("key").cost(3).peek().await.unwrap().allows(), "{algorithm}");
            of_zero(limiter, 2).await;
            let refunded = limiter.refund("key", 5).await.unwrap();
            assert_eq!((remaining().await, refunded.remaining()), (7, 7), "{algorithm}");
            assert!(refunded.allows() && refunded.retry_after().is_none(), "{algorithm}");
            let refunded = limiter.refund("key", 10).await.unwrap();
            assert_eq!(remaining().await, 10, "{algorithm}: more was returned than spent");
            assert_eq!((refunded.remaining(), refunded.reset_after()), (10, Duration::ZERO));
            let spent = limiter.spend("key", 4).await.unwrap();
            assert_eq!((remaining().await, spent.remaining()), (6, 6), "{algorithm}");
            let spent = limiter.spend("key", 9).await.unwrap();
            assert_eq!((remaining().await, spent.remaining()), (0, 0), "{algorithm}");
            assert!(!spent.allows() && spent.reset_after() > Duration::ZERO, "{algorithm}");
            assert_eq!(spent.retry_after(), Some(spent.replenish_after()), "{algorithm}");
            of_zero(limiter, 0).await;
            limiter.reset("key").await.unwrap();
            of_zero(limiter, 10).await;
            let _ = limiter.check("key").cost(10).await.unwrap();
            limiter.reset("key").await.unwrap();
            assert_eq!(remaining().await, 10, "{algorithm}");
            assert_eq!(limiters[1].peek("key").await.unwrap().remaining(), 10);
        }
    }
}

#[tokio::test]
async fn a_cost_that_can_never_be_granted_is_an_error() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiters in limiters(&server, algorithm, Quota::per_hour(10)).await {
            let limiter = &limiters[0];
            let error = limiter.check("key").cost(11).await.unwrap_err();
            assert!(matches!(error, Error::CostAboveQuota { cost: 11, max: 10, .. }));
            let error = limiter.reserve("key", 11, Duration::MAX).await.unwrap_err();
            assert!(matches!(error, Error::CostAboveQuota { .. }));
            assert!(!error.is_store());
            assert!(matches!(limiter.check("key").cost(0).await, Err(Error::ZeroCost)));
            assert!(matches!(limiter.check("key").cost(0).peek().await, Err(Error::ZeroCost)));
            let error = limiter.check("key").cost(11).peek().await.unwrap_err();
            assert!(matches!(error, Error::CostAboveQuota { cost: 11, .. }));
            assert_eq!(limiter.peek("key").await.unwrap().remaining(), 10, "{algorithm}");
        }
    }
    let overdraft = Algorithm::token_bucket().overdraft(5);
    let limiter = Limiter::new("default", MemoryStore::new(), overdraft, Quota::per_hour(10));
    assert!(limiter.check("key").cost(15).await.unwrap().is_allowed());
    let error = limiter.check("key").cost(16).await.unwrap_err();
    assert!(matches!(error, Error::CostAboveQuota { max: 15, .. }));
}

#[tokio::test]
async fn another_quota_applies_to_the_state_as_it_is() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        for limiters in limiters(&server, algorithm, Quota::per_hour(10)).await {
            let limiter = &limiters[0];
            assert!(limiter.check("key").cost(8).await.unwrap().is_allowed());
            let raised = limiter.with_quota(Quota::per_hour(20)).unwrap();
            assert_eq!(raised.peek("key").await.unwrap().remaining(), 12, "{algorithm}");
            let lowered = limiter.with_quota(Quota::per_hour(5)).unwrap();
            assert!(!lowered.check("key").await.unwrap().is_allowed(), "{algorithm}");
            assert_eq!(limiter.peek("key").await.unwrap().remaining(), 2, "{algorithm}");
        }
    }
}

#[test]
fn conflicting_settings_are_rejected() {
    let make =
        |name, algorithm, quota| Limiter::try_new(name, MemoryStore::new(), algorithm, quota);
    let quota = Quota::per_second(10);
    let long = "a".repeat(65);
    for name in ["", "a b", "a:b", "{a}", &long] {
        let error = make(name, Algorithm::FixedWindow, quota).unwrap_err();
        assert!(matches!(error, ConfigError::Name { .. }), "{name:?}");
    }
    for buckets in [0, 101] {
        let error = make("a", Algorithm::sliding_window().buckets(buckets), quota).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("a sliding window has 1 to 100 buckets, not {buckets}")
        );
    }
    let error = make("a", Algorithm::SlidingLog, quota.burst(5)).unwrap_err();
    assert!(error.to_string().starts_with("quota \"10/s burst 5\": a sliding-log admits"));
    let overdraft = Algorithm::token_bucket().overdraft(u64::MAX);
    assert!(matches!(
        make("a", overdraft, quota),
        Err(ConfigError::Quota(QuotaError::Overdraft { .. }))
    ));
    let overdraft = Algorithm::token_bucket().overdraft(40_000);
    let error = make("a", overdraft, Quota::per_day(1)).unwrap_err();
    assert!(matches!(error, ConfigError::Quota(QuotaError::Overdraft { .. })));
    assert!(error.to_string().ends_with("use at most 36524"), "{error}");
}

#[test]
fn a_setting_of_another_algorithm_is_a_mistake() {
    let settings: [fn(Algorithm) -> Algorithm; 3] =
        [|it| it.buckets(2), |it| it.refill(Refill::Interval), |it| it.overdraft(2)];
    for (algorithm, has) in [
        (Algorithm::sliding_window(), [true, false, false]),
        (Algorithm::token_bucket(), [false, true, true]),
        (Algorithm::FixedWindow, [false; 3]),
        (Algorithm::LeakyBucket, [false; 3]),
    ] {
        let accepts = settings.map(|set| std::panic::catch_unwind(|| set(algorithm)).is_ok());
        assert_eq!(accepts, has, "{algorithm}");
    }
}

/// Tokens per day, bytes per hour, and billionths of a dollar per month.
#[tokio::test(start_paused = true)]
async fn large_quotas_are_spent_settled_and_refilled_in_all_algorithms() {
    let month = Duration::from_secs(30 * 86_400);
    for text in ["15_000_000_000/day", "50_000_000_000/h", "1_000_000_000_000/30day"] {
        for algorithm in ALGORITHMS {
            let quota: Quota = text.parse().unwrap();
            let limiter = Limiter::new("large", MemoryStore::new(), algorithm, quota);
            let limit = quota.limit();
            let context = format!("{algorithm} {quota}");
            let error = limiter.check("key").cost(limit + 1).await.unwrap_err();
            let is_named = matches!(error, Error::CostAboveQuota { max, .. } if max == limit);
            assert!(is_named, "{context}: {error}");
            assert!(limiter.check("key").cost(limit / 3).await.unwrap().is_allowed(), "{context}");
            let spent = limiter.spend("key", limit / 3).await.unwrap();
            assert_eq!(spent.remaining(), limit - limit / 3 * 2, "{context}");
            // In a leaky bucket, units that were spent leave like a request that waits.
            if algorithm != Algorithm::leaky_bucket() {
                let refunded = limiter.refund("key", limit / 3).await.unwrap();
                assert_eq!(refunded.remaining(), limit - limit / 3, "{context}");
            }
            assert_eq!(limiter.spend("key", u64::MAX).await.unwrap().remaining(), 0, "{context}");
            limiter.reset("key").await.unwrap();
            tokio::time::advance(month).await;
            assert!(limiter.check("key").cost(limit).await.unwrap().is_allowed(), "{context}");
            assert!(!limiter.check("key").await.unwrap().is_allowed(), "{context}");
        }
    }
}

#[test]
fn a_quota_prints_as_it_reads() {
    for (text, quota) in [
        ("10/s", Quota::per_second(10)),
        ("100/min burst 20", Quota::per_minute(100).burst(20)),
        ("5/10s", Quota::new(5, Duration::from_secs(10))),
        ("1/day", Quota::per_day(1)),
        ("7/90min", Quota::new(7, Duration::from_secs(5_400))),
        ("3/1500us", Quota::new(3, Duration::from_micros(1_500))),
        ("4294967295000/ms", Quota::new(4_294_967_295_000, Duration::from_millis(1))),
        ("15000000000/day", Quota::per_day(15_000_000_000)),
        ("50000000000/h burst 1", Quota::per_hour(50_000_000_000).burst(1)),
        ("1000000000000/30day", Quota::new(1_000_000_000_000, Duration::from_secs(30 * 86_400))),
        ("5/2week", Quota::new(5, Duration::from_secs(14 * 86_400))),
    ] {
        assert_eq!(text.parse(), Ok(quota));
        assert_eq!(quota.to_string(), text);
    }
    for (text, same) in [
        (" 10 / second ", "10/s"),
        ("60/60s", "60/min"),
        ("2/2hours burst 2", "2/2h"),
        ("1/24h", "1/day"),
        ("9/m", "9/min"),
        ("1000/day", "1000/day"),
        ("1_000_000/3 days", "1000000/3day"),
        ("10/s, burst 20", "10/s burst 20"),
        ("10/s,burst=2_0", "10/s burst 20"),
        ("10 per second burst: 20", "10/s burst 20"),
        ("5 per 10 seconds", "5/10s"),
        ("5/10 s burst 2", "5/10s burst 2"),
        ("7 PER Week", "7/week"),
        ("7/w", "7/week"),
        ("1/7d", "1/week"),
        ("9/2hrs", "9/2h"),
    ] {
        let quota = text.parse::<Quota>();
        assert_eq!(quota.expect(text).to_string(), same);
    }
    for (names, one) in [
        (["us", "µs", "usec", "usecs", "microsecond", "microseconds"], "1/5001us"),
        (["ms", "ms", "msec", "msecs", "millisecond", "milliseconds"], "1/5ms"),
        (["s", "S", "sec", "secs", "second", "seconds"], "1/5s"),
        (["m", "Min", "min", "mins", "minute", "minutes"], "1/5min"),
        (["h", "H", "hr", "hrs", "hour", "hours"], "1/5h"),
        (["d", "D", "day", "Day", "DAY", "days"], "1/5day"),
        (["w", "W", "week", "Week", "weeks", "Weeks"], "1/5week"),
    ] {
        for name in names {
            let text = one.replace(char::is_alphabetic, "") + name;
            assert_eq!(text.parse::<Quota>().expect(name).to_string(), one);
        }
    }
    const MAX: u64 = 1 << 46;
    let quotas = (1_u64..=MAX, 20_000_u64..31_622_400_000_000, 0..=MAX);
    TestRunner::default()
        .run(&quotas, |(limit, window, burst)| {
            let quota = Quota::try_new(limit, Duration::from_micros(window)).unwrap();
            let quota = quota.try_burst(burst).unwrap_or(quota);
            prop_assert_eq!(quota.to_string().parse(), Ok(quota));
            Ok(())
        })
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_decision_and_a_state_print_as_one_line() {
    let store = MemoryStore::new();
    let limiter = |name, algorithm, quota| Limiter::new(name, store.clone(), algorithm, quota);
    let api = limiter("api", Algorithm::token_bucket(), Quota::per_minute(5));
    let print = async |cost| api.check("alice").cost(cost).await.unwrap().to_string();
    assert_eq!(print(4).await, r#"allowed by "api" (5/min): 1 left"#);
    assert_eq!(print(2).await, r#"denied by "api" (5/min): 1 left, retry after 12s"#);
    let state = api.peek("alice").await.unwrap().to_string();
    assert_eq!(state, r#""api" (5/min): 1 left, the rest after 48s"#);
    assert_eq!(api.peek("bob").await.unwrap().to_string(), r#""api" (5/min): 5 left"#);

    let blocked = api.block("alice", Duration::from_secs(600)).await.unwrap().to_string();
    assert_eq!(blocked, r#""api" (5/min): 0 left, blocked for 600s"#);
    let line = r#"denied by "api" (5/min): 0 left, the key is blocked, retry after 600s"#;
    assert_eq!(print(1).await, line);

    let queue = limiter("queue", Algorithm::leaky_bucket(), Quota::per_second(2));
    let _ = queue.check("alice").await.unwrap();
    let delayed = queue.check("alice").await.unwrap().to_string();
    assert_eq!(delayed, r#"allowed by "queue" (2/s): 0 left, proceeds after 500ms"#);

    // Times are rounded up: to milliseconds below 10 seconds, to seconds from there.
    for (limit, window, text) in
        [(3, 1_000, "334ms"), (3, 10_000, "3.334s"), (3, 29_999, "10s"), (7, 3_600_000, "515s")]
    {
        let quota = Quota::new(limit, Duration::from_millis(window)).burst(1);
        let thirds = Limiter::new("thirds", MemoryStore::new(), Algorithm::token_bucket(), quota);
        let _ = thirds.check("alice").await.unwrap();
        let line = thirds.check("alice").await.unwrap().to_string();
        assert!(line.ends_with(&format!(": 0 left, retry after {text}")), "{line}");
        let state = thirds.peek("alice").await.unwrap().to_string();
        assert!(state.ends_with(&format!(": 0 left, the rest after {text}")), "{state}");
    }

    let places = limiter("places", Algorithm::concurrency(), Quota::concurrent(1));
    let permit = places.hold("alice", 1).await.unwrap().admitted().unwrap();
    let denied = places.hold("alice", 1).await.unwrap();
    let line = r#"denied by "places" (1 concurrent): 0 left, the time to retry is unknown"#;
    assert_eq!(denied.decision().to_string(), line);
    let state = places.peek("alice").await.unwrap().to_string();
    assert!(state.starts_with(r#""places" (1 concurrent): 0 left, 1 held"#), "{state}");
    drop(permit);
}

#[test]
fn invalid_text_is_no_quota() {
    for (text, complaint) in [
        ("", "write LIMIT/WINDOW"),
        ("10", "write LIMIT/WINDOW"),
        ("/s", "write LIMIT/WINDOW"),
        ("10/", "write LIMIT/WINDOW"),
        ("10 a day", "write LIMIT/WINDOW"),
        ("per second", "write LIMIT/WINDOW"),
        ("ten/s", "the limit \"ten\" is not a whole number; use digits"),
        ("-1/s", "the limit \"-1\" is not a whole number"),
        ("1.5/s", "the limit \"1.5\" is not a whole number; use a longer window"),
        ("1,000/s", "the limit \"1,000\" is not a whole number; use digits, such as 10 or 1_000"),
        ("_1/s", "the limit \"_1\" is not a whole number"),
        ("1__0/s", "the limit \"1__0\" is not a whole number"),
        (
            "10 requests/s",
            "the limit \"10 requests\" is not a whole number; leave \"requests\" out",
        ),
        ("10req/s", "the limit \"10req\" is not a whole number; leave \"req\" out"),
        ("10/s burst", "the burst has no number"),
        ("10/s, burst", "the burst has no number"),
        ("10/s, burst many", "the burst \"many\" is not a whole number"),
        ("10/s bust 5", "\"bust\" is unexpected behind the window"),
        ("10/s, 5", "\"5\" is unexpected behind the window"),
        ("10/s burst 5 5", "\"5\" is unexpected behind the window"),
        ("10/s burst 5 per key", "\"per\" is unexpected behind the window"),
        ("10/fortnight", "the unit \"fortnight\" is unknown; use us, ms, s, min, h, day or week"),
        ("10/month, burst 20", "a month has no fixed length; count in days, such as 30day"),
        ("10 per 2 years", "a year has no fixed length; count in days, such as 365day"),
        ("10/5", "the window \"5\" has no unit; use us, ms"),
        ("10/5 burst 20", "the window \"5\" has no unit"),
        ("10/burst 20", "the window \"\" has no unit"),
        ("10/ss", "the unit \"ss\" is unknown"),
        ("10/mss", "the unit \"mss\" is unknown"),
        ("5/1.5s", "the window \"1.5\" is not a whole number; use a smaller unit, such as 1500ms"),
        ("5/-1s", "the window \"-1\" is not a whole number"),
        ("0/s", "the limit is 0"),
        ("10/s burst 0", "the burst is 0"),
        (
            "70368744177665/s",
            "the limit is 70368744177665, but must be at most 70368744177664 in this window",
        ),
        (
            "4294967295001/ms",
            "the limit is 4294967295001, but must be at most 4294967295000 in this window",
        ),
        (
            "99999999999999999999/s",
            "the limit 99999999999999999999 is too large; the maximum is 70368744177664",
        ),
        (
            "1000000/s burst 70368744177665",
            "the burst is 70368744177665, but must be at most 70368744177664",
        ),
        ("1/s burst 99999999999999999999", "the burst 99999999999999999999 is too large"),
        ("10/99999999999999999999s", "too large; it must be 1 ms to 366 days"),
        ("10/9999999999999999d", "too large; it must be 1 ms to 366 days"),
        ("10/0s", "1 ms to 366 days"),
        ("10/999us", "1 ms to 366 days"),
        ("10/367d", "1 ms to 366 days"),
        (
            "1/day burst 40000",
            "a burst of 40000 would take more than 100 years to refill; use at most 36525",
        ),
    ] {
        let error = text.parse::<Quota>().unwrap_err().to_string();
        assert!(error.contains(complaint) && error.contains(&format!("{text:?}")), "{error}");
    }
    let no_input = Quota::try_new(0, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(no_input, QuotaError::Invalid { .. }));
    assert_eq!(no_input.to_string(), "quota: the limit is 0, but must be at least 1");
}

#[tokio::test]
async fn a_check_that_is_not_awaited_needs_a_store_that_answers_immediately() {
    let quota = Quota::per_hour(3);
    let limiter =
        Limiter::new("default", MemoryStore::with_max_keys(1), Algorithm::sliding_log(), quota);
    assert_eq!(limiter.check("key").cost(2).now().unwrap().remaining(), 1);
    assert!(limiter.check("key").now().unwrap().is_allowed());
    assert!(!limiter.check("key").now().unwrap().is_allowed());
    assert!(matches!(limiter.check("key").cost(0).now(), Err(Error::ZeroCost)));
    assert!(matches!(
        limiter.check("key").cost(4).now(),
        Err(Error::CostAboveQuota { max: 3, .. })
    ));
    assert!(matches!(limiter.check("other").now(), Err(Error::Store(_)))); // the store is full
    let open = limiter.on_failure(FailurePolicy::Open);
    assert!(open.check("other").now().unwrap().is_allowed());

    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let limiter = Limiter::new("default", store, Algorithm::sliding_log(), quota);
    let before = (server.calls("evalsha"), server.calls("eval"));
    let error = limiter.check("key").now().unwrap_err();
    assert!(matches!(&error, Error::NotImmediate { limiter, .. } if limiter == "default"));
    assert!(error.to_string().ends_with("await `check`"), "{error}");
    assert_eq!((server.calls("evalsha"), server.calls("eval")), before);
}
