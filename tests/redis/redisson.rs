//! Tests of the public methods of a limiter shared with Java services. Layers are in
//! `redisson_layer`.

use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{task::JoinSet, time::Instant};
use tower_ratelimit::store::ErrorKind;
use tower_ratelimit::{
    Charge, Error, RedisStore,
    redisson::{RateLimiter, RateLimiterConfig, RateLimiterError},
};

use crate::support::{self, proxy::Proxy, server::RedisServer};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

async fn store(server: &RedisServer) -> RedisStore {
    support::redis_store(server).await
}

/// Creates a limiter with `rate` permits per hour.
async fn limiter(server: &RedisServer, rate: u64) -> RateLimiter {
    let limiter = RateLimiter::new(store(server).await, "LIMITER_NAME");
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(rate, HOUR)).await.unwrap());
    limiter
}

fn redis<T: redis::FromRedisValue>(server: &RedisServer, words: &[&str]) -> T {
    redis::cmd(words[0]).arg(&words[1..]).query(&mut server.connection()).unwrap()
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Waits until another task has made the condition true.
async fn until(condition: impl AsyncFn() -> bool) {
    for _ in 0..10_000 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("the condition stays false");
}

async fn take(limiter: &RateLimiter, permits: u64) -> bool {
    limiter.try_acquire(permits, Duration::ZERO).await.unwrap().is_allowed()
}

#[tokio::test]
async fn each_method_works() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "LIMITER_NAME");
    assert_eq!(limiter.name(), "LIMITER_NAME");
    assert_eq!(limiter.config().await.unwrap(), None);
    assert!(!limiter.update_rate(RateLimiterConfig::overall(5, HOUR)).await.unwrap());
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(5, HOUR)).await.unwrap());
    assert!(!limiter.try_set_rate(RateLimiterConfig::per_client(7, SECOND)).await.unwrap());

    let config = limiter.config().await.unwrap();
    assert_eq!(config, Some(RateLimiterConfig::overall(5, HOUR)));

    let decision = limiter.acquire(2).await.unwrap();
    assert!(decision.is_allowed());
    assert_eq!((decision.remaining(), decision.cost()), (3, 2));
    assert_eq!((decision.quota().limit(), decision.quota().window()), (5, HOUR));
    assert!(decision.reset_after() > HOUR - 60 * SECOND);
    assert_eq!(limiter.available_permits().await.unwrap(), 3);
    limiter.release(1).await.unwrap();
    assert_eq!(limiter.available_permits().await.unwrap(), 4);
    let denied = limiter.try_acquire(5, SECOND).await.unwrap();
    assert!(denied.retry_after().is_some_and(|wait| wait > HOUR - 60 * SECOND && wait <= HOUR));

    assert!(limiter.update_rate(RateLimiterConfig::overall(6, HOUR)).await.unwrap());
    assert_eq!(limiter.available_permits().await.unwrap(), 5);
    limiter.set_rate(RateLimiterConfig::overall(7, HOUR)).await.unwrap();
    assert_eq!(limiter.available_permits().await.unwrap(), 7);

    assert_eq!(limiter.remaining_ttl().await.unwrap(), None);
    assert!(limiter.expire(HOUR).await.unwrap());
    assert!(limiter.remaining_ttl().await.unwrap().is_some_and(|ttl| ttl <= HOUR));
    assert!(limiter.clear_expire().await.unwrap());
    assert!(!limiter.clear_expire().await.unwrap());
    assert_eq!(limiter.remaining_ttl().await.unwrap(), None);

    assert!(take(&limiter, 1).await);
    assert!(limiter.delete().await.unwrap());
    assert!(!limiter.delete().await.unwrap());
    assert!(!limiter.expire(HOUR).await.unwrap());
    assert_eq!(limiter.remaining_ttl().await.unwrap(), None);
    assert_eq!(redis::<u64>(&server, &["DBSIZE"]), 0);
}

#[tokio::test]
async fn invalid_names_rates_and_permits_are_rejected_with_a_reason() {
    let server = RedisServer::start();
    let store = store(&server).await;
    for name in ["", "a}b", "x{y", "{}z"] {
        let error = RateLimiter::try_new(store.clone(), name).unwrap_err();
        let is_named = matches!(&error, RateLimiterError::Slots { name: it, .. } if &**it == name);
        assert!(is_named && error.to_string().contains("slots of a cluster"), "{error}");
        assert_eq!(Error::from(error.clone()).to_string(), error.to_string());
    }

    let limiter = RateLimiter::new(store.clone(), "api:{42}");
    let config = async |rate, interval| {
        let Err(Error::Redisson(error)) =
            limiter.try_set_rate(RateLimiterConfig::overall(rate, interval)).await
        else {
            panic!("the rate is accepted");
        };
        error
    };
    assert!(matches!(config(0, SECOND).await, RateLimiterError::Rate { rate: 0, .. }));
    assert!(matches!(config(u64::MAX, SECOND).await, RateLimiterError::Rate { .. }));
    assert!(matches!(config(1, Duration::ZERO).await, RateLimiterError::Rate { .. }));
    assert!(matches!(config(1, Duration::MAX).await, RateLimiterError::Rate { .. }));
    let short = limiter.clone().keep_alive(SECOND);
    let error = short.set_rate(RateLimiterConfig::overall(1, 2 * SECOND)).await.unwrap_err();
    assert!(matches!(error, Error::Redisson(RateLimiterError::KeepAlive { .. })), "{error}");

    for result in [
        limiter.acquire(1).await.map(drop),
        limiter.available_permits().await.map(drop),
        limiter.release(1).await,
    ] {
        let Err(Error::Redisson(RateLimiterError::NoRate { name, .. })) = &result else {
            panic!("{result:?}");
        };
        assert_eq!(&**name, "api:{42}");
        assert_eq!(result.unwrap_err().limiter(), Some("redisson"));
    }

    assert!(limiter.try_set_rate(RateLimiterConfig::overall(5, SECOND)).await.unwrap());
    let calls = server.calls("evalsha");
    assert!(matches!(limiter.acquire(0).await, Err(Error::ZeroCost)));
    assert!(matches!(limiter.release(0).await, Err(Error::ZeroCost)));
    assert_eq!(server.calls("evalsha"), calls);
    for permits in [6, u32::MAX.into(), 1 << 32, u64::MAX] {
        let rejected = limiter.acquire(permits).await;
        let Err(Error::CostAboveQuota { cost, max: 5, .. }) = rejected else {
            panic!("{rejected:?}");
        };
        assert_eq!(cost, permits);
    }
    assert_eq!(redis::<u64>(&server, &["DBSIZE"]), 1);
}

#[tokio::test]
async fn a_rate_may_exceed_the_maximum_of_an_acquire() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 1 << 53).await;
    assert_eq!(limiter.available_permits().await.unwrap(), 1 << 53);
    assert!(take(&limiter, i32::MAX as u64).await);
    assert_eq!(limiter.available_permits().await.unwrap(), (1 << 53) - i32::MAX as u64);
    let rejected = limiter.acquire(1 << 31).await;
    assert!(matches!(rejected, Err(Error::CostAboveQuota { max: 0x7fff_ffff, .. })));
    limiter.release(u64::MAX).await.unwrap();
    assert_eq!(limiter.available_permits().await.unwrap(), 1 << 53);
}

#[tokio::test]
async fn limiters_with_the_same_name_share_one_count() {
    let server = RedisServer::start();
    let one = limiter(&server, 5).await;
    let other = RateLimiter::new(support::with_prefix(&server, "shop").await, "LIMITER_NAME");
    assert!(take(&one, 3).await);
    assert!(!take(&other, 3).await && take(&other, 2).await);
}

#[tokio::test]
async fn each_client_has_a_rate_of_its_own() {
    let server = RedisServer::start();
    let this = RateLimiter::new(store(&server).await, "LIMITER_NAME");
    this.try_set_rate(RateLimiterConfig::per_client(2, HOUR)).await.unwrap();
    let same = RateLimiter::new(store(&server).await, "LIMITER_NAME");
    let other = this.clone().client_id("other");
    assert!(take(&this, 2).await && !take(&same, 1).await && take(&other, 2).await);

    let mut keys: Vec<String> = redis(&server, &["KEYS", "*:value:*"]);
    keys.sort_by_key(String::len);
    assert_eq!(keys[0], "{LIMITER_NAME}:value:other");
    let id = keys[1].strip_prefix("{LIMITER_NAME}:value:").unwrap();
    let parts: Vec<_> = id.split('-').map(str::len).collect();
    assert_eq!(parts, [8, 4, 4, 4, 12], "{id}");
    assert!(id.bytes().all(|byte| b"-0123456789abcdef".contains(&byte)));
    assert_eq!((&id[14..15], "89ab".contains(&id[19..20])), ("4", true), "{id}");
    for key in &keys {
        let ttl: u64 = redis(&server, &["PTTL", key]);
        assert!(ttl <= 3_600_001, "{key}");
    }
}

#[tokio::test]
async fn an_attempt_is_one_round_trip() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 5).await;
    assert!(take(&limiter, 1).await);
    let (before, texts) = (server.calls("evalsha"), server.calls("eval"));
    for _ in 0..10 {
        let _ = take(&limiter, 1).await;
    }
    assert_eq!(server.calls("evalsha") - before, 10);
    assert_eq!(server.calls("eval"), texts, "the script text is sent once");
    redis::<()>(&server, &["SCRIPT", "FLUSH"]);
    limiter.release(1).await.unwrap();
    assert!(take(&limiter, 1).await && !take(&limiter, 1).await, "the script was executed once");
}

/// Returns how many commands Redis executes for an acquire, the script included.
async fn commands_of(server: &RedisServer, limiter: &RateLimiter) -> u64 {
    const INFO: u64 = 1;
    let total = || {
        let stats: String = redis(server, &["INFO", "commandstats"]);
        // A new connection introduces itself.
        let lines = stats.lines().filter(|line| !line.starts_with("cmdstat_client"));
        let calls = lines.filter_map(|line| line.split("calls=").nth(1)?.split(',').next());
        calls.map(|calls| calls.parse::<u64>().unwrap()).sum::<u64>()
    };
    let before = total();
    let _ = take(limiter, 1).await;
    total() - before - INFO
}

#[tokio::test]
async fn an_acquire_takes_few_commands() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 100).await;
    assert!(take(&limiter, 1).await); // loads the script
    assert!(commands_of(&server, &limiter).await <= 9, "a short log");
    for _ in 0..30 {
        assert!(take(&limiter, 1).await);
    }
    assert!(commands_of(&server, &limiter).await <= 10, "a long log");
    while take(&limiter, 1).await {}
    assert!(commands_of(&server, &limiter).await <= 8, "denied with a long log");
    limiter.set_rate(RateLimiterConfig::overall(1, HOUR)).await.unwrap();
    assert!(take(&limiter, 1).await && !take(&limiter, 1).await);
    assert!(commands_of(&server, &limiter).await <= 6, "denied with a short log");
}

#[tokio::test]
async fn the_type_of_a_rate_is_learned_with_one_more_call() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 5).await;
    assert!(take(&limiter, 1).await); // loads the script
    limiter.set_rate(RateLimiterConfig::per_client(2, HOUR)).await.unwrap();
    for calls in [2, 1] {
        let before = server.calls("evalsha");
        assert!(take(&limiter, 1).await);
        assert_eq!(server.calls("evalsha") - before, calls);
    }
    assert!(!take(&limiter, 1).await);
    limiter.set_rate(RateLimiterConfig::overall(2, HOUR)).await.unwrap();
    assert!(take(&limiter, 2).await && !take(&limiter, 1).await);
}

#[tokio::test]
async fn an_acquire_whose_timeout_is_too_short_is_denied_at_once() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 1).await;
    assert!(take(&limiter, 1).await);
    let before = server.calls("evalsha");
    let denied = limiter.try_acquire(1, HOUR - 60 * SECOND).await.unwrap();
    assert!(denied.retry_after().is_some_and(|wait| wait > HOUR - 60 * SECOND));
    assert_eq!(server.calls("evalsha") - before, 1);
}

#[tokio::test]
async fn waiting_acquires_get_the_permits_when_these_are_available() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "LIMITER_NAME");
    let interval = Duration::from_millis(200);
    limiter.set_rate(RateLimiterConfig::overall(2, interval)).await.unwrap();
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..10 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let taken = if i % 2 == 0 {
                limiter.acquire(1).await
            } else {
                limiter.try_acquire(1, HOUR).await
            };
            assert!(taken.unwrap().is_allowed());
        });
    }
    tasks.join_all().await;
    assert!(start.elapsed() >= 4 * interval, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_waiting_acquire_stops_at_its_timeout() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "LIMITER_NAME");
    limiter.set_rate(RateLimiterConfig::overall(1, Duration::from_millis(100))).await.unwrap();
    let mut denied = 0;
    // Another task takes every permit.
    let greedy = {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            loop {
                let _ = limiter.try_acquire(1, Duration::ZERO).await;
            }
        })
    };
    until(async || limiter.available_permits().await.unwrap() == 0).await;
    for _ in 0..5 {
        let start = Instant::now();
        let timeout = Duration::from_millis(150);
        let decision = limiter.try_acquire(1, timeout).await.unwrap();
        if let Some(wait) = decision.retry_after() {
            denied += 1;
            assert!(start.elapsed() + wait > timeout, "the acquire stopped too early");
        }
    }
    greedy.abort();
    assert!(denied > 0);
}

#[tokio::test]
async fn many_processes_never_take_more_than_the_rate() {
    let server = RedisServer::start();
    let mut tasks = JoinSet::new();
    let first = limiter(&server, 100).await;
    for _ in 0..8 {
        let limiter = RateLimiter::new(store(&server).await, "LIMITER_NAME");
        for _ in 0..50 {
            let limiter = limiter.clone();
            tasks.spawn(async move { take(&limiter, 1).await });
        }
    }
    let taken = tasks.join_all().await.into_iter().filter(|taken| *taken).count();
    assert_eq!((taken, first.available_permits().await.unwrap()), (100, 0));
}

#[tokio::test]
async fn an_acquire_dropped_during_a_call_releases_the_permits_that_it_takes() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 5).await;
    assert!(take(&limiter, 1).await);
    limiter.release(1).await.unwrap(); // loads the scripts
    drop(limiter.acquire(3));
    let calls = server.calls("evalsha");
    server.freeze();
    {
        let mut acquire = Box::pin(limiter.acquire(3));
        for _ in 0..10 {
            assert!(poll_once(acquire.as_mut()).is_pending());
            tokio::task::yield_now().await;
        }
    }
    server.thaw();
    until(async || server.calls("evalsha") == calls + 2).await;
    assert_eq!(limiter.available_permits().await.unwrap(), 5);
    assert_eq!(redis::<u64>(&server, &["EXISTS", "{LIMITER_NAME}:permits"]), 0);
}

#[tokio::test]
async fn an_acquire_dropped_while_waiting_takes_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server, 2).await;
    assert!(take(&limiter, 1).await);
    let before = server.calls("evalsha");
    let task = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire(2).await }
    });
    until(async || server.calls("evalsha") > before).await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(limiter.available_permits().await.unwrap(), 1);
}

#[tokio::test]
async fn permits_that_come_back_in_any_way_call_the_first_acquire() {
    let server = RedisServer::start();
    let store = store(&server).await;
    let rate = |rate| RateLimiterConfig::overall(rate, HOUR);
    for way in ["release", "refund", "set", "update", "template", "client", "delete", "dropped"] {
        let name = format!("{way}:{{key}}");
        let template = RateLimiter::new(store.clone(), &name);
        assert!(template.try_set_rate(rate(2)).await.unwrap());
        let limiter = template.for_key("key").unwrap();
        assert!(take(&limiter, 1).await);
        limiter.release(1).await.unwrap(); // loads the scripts
        let mut taken = Box::pin(limiter.try_acquire(2, Duration::ZERO));
        if way == "dropped" {
            let calls = server.calls("evalsha");
            server.freeze();
            for _ in 0..10 {
                assert!(poll_once(taken.as_mut()).is_pending());
                tokio::task::yield_now().await;
            }
            server.thaw();
            until(async || server.calls("evalsha") > calls).await;
        } else {
            assert!(taken.as_mut().await.unwrap().is_allowed());
        }
        let calls = server.calls("evalsha");
        let waiting = tokio::spawn({
            let limiter = limiter.clone();
            async move { limiter.try_acquire(2, 2 * HOUR).await }
        });
        until(async || server.calls("evalsha") > calls).await;
        tokio::time::sleep(Duration::from_millis(20)).await; // the reply of a real server
        assert!(!waiting.is_finished(), "{way}");
        match way {
            "release" => limiter.release(2).await.unwrap(),
            "refund" => drop(Charge::new(&template, "key").cost(2).refund().await.unwrap()),
            "set" => limiter.set_rate(rate(3)).await.unwrap(),
            "update" => assert!(limiter.update_rate(rate(4)).await.unwrap()),
            "template" => assert!(template.update_rate(rate(4)).await.unwrap()),
            "client" => {
                assert!(limiter.clone().client_id("other").update_rate(rate(4)).await.unwrap());
            }
            "delete" => assert!(limiter.delete().await.unwrap()),
            _ => {}
        }
        drop(taken);
        let served = tokio::time::timeout(60 * SECOND, waiting).await;
        assert!(served.expect(way).unwrap().unwrap().is_allowed(), "{way}");
    }
}

#[tokio::test]
async fn the_keep_alive_time_is_stored_and_applied() {
    let server = RedisServer::start();
    let limiter = RateLimiter::new(store(&server).await, "LIMITER_NAME").keep_alive(2 * HOUR);
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(2, HOUR)).await.unwrap());
    let config = limiter.config().await.unwrap().unwrap();
    assert_eq!(config.keep_alive(), Some(2 * HOUR));
    let copy = RateLimiter::new(store(&server).await, "COPY");
    copy.set_rate(config).await.unwrap();
    assert_eq!(copy.config().await.unwrap(), Some(config));
    assert!(take(&limiter, 1).await);
    for key in ["LIMITER_NAME", "{LIMITER_NAME}:value", "{LIMITER_NAME}:permits"] {
        let ttl: u64 = redis(&server, &["PTTL", key]);
        assert!((3_600_000..=7_200_000).contains(&ttl), "{key}: {ttl}");
    }
}

#[tokio::test]
async fn a_store_that_does_not_reply_is_an_error() {
    let mut server = RedisServer::start();
    let limiter = limiter(&server, 5).await;
    server.kill();
    assert!(matches!(limiter.acquire(1).await, Err(Error::Store(_))));
    assert!(matches!(limiter.available_permits().await, Err(Error::Store(_))));
    assert!(matches!(limiter.config().await, Err(Error::Store(_))));
}

const DEADLINE: Duration = Duration::from_millis(500);
/// One delay fits into the deadline, two do not.
const DELAY: Duration = Duration::from_millis(300);

/// Adds entries to the log as a Java client does, each of one permit.
fn add_java_entries(server: &RedisServer, entries: u32) {
    let now: (u64, u64) = redis(server, &["TIME"]);
    let mut add = redis::cmd("ZADD");
    add.arg("{LIMITER_NAME}:permits");
    for entry in 0..entries {
        let id = u128::from(entry).to_le_bytes();
        let entry = [&[16][..], &id, &1_u32.to_le_bytes()].concat();
        add.arg(now.0 * 1_000).arg(entry);
    }
    add.exec(&mut server.connection()).unwrap();
}

fn is_timeout<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Store(error)) if error.kind() == ErrorKind::Timeout)
}

#[tokio::test]
async fn the_reading_of_a_long_log_has_one_deadline_and_continues_in_the_next_call() {
    let server = RedisServer::start();
    let _ = limiter(&server, 10_000).await;
    add_java_entries(&server, 5_000);
    let proxy = Proxy::start(&server);
    let config = support::config(&proxy.url()).deadline(DEADLINE);
    let store = support::connected(config).await;
    let limiter = RateLimiter::new(store, "LIMITER_NAME");
    let commands = || server.calls("evalsha") + server.calls("eval");

    proxy.delay_replies(DELAY);
    let before = commands();
    assert!(is_timeout(&limiter.available_permits().await));
    assert!(commands() - before <= 2, "{} commands in one deadline", commands() - before);
    for call in 0.. {
        let before = commands();
        let decision = limiter.try_acquire(1, Duration::ZERO).await;
        assert!(commands() - before <= 2, "{} commands in one deadline", commands() - before);
        if let Ok(decision) = decision {
            assert!(call > 0, "one deadline is not enough");
            assert!(decision.is_allowed());
            break;
        }
        assert!(is_timeout(&decision));
        assert!(call < 30, "each call starts again");
    }
    proxy.delay_replies(Duration::ZERO);
    assert!((4_900..5_000).contains(&limiter.available_permits().await.unwrap()));
}

#[tokio::test]
async fn the_rate_of_a_template_is_read_within_the_deadline_of_the_decision() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let config = support::config(&proxy.url()).deadline(DEADLINE);
    let store = support::connected(config).await;
    let template = RateLimiter::new(store.clone(), "api:{key}");
    let rate = RateLimiterConfig::overall(5, HOUR);
    template.try_set_rate(rate).await.unwrap();
    let limiter = template.for_key("alice").unwrap();
    assert!(take(&limiter, 1).await); // loads the scripts
    template.try_set_rate(rate).await.unwrap(); // clears the cached rate

    proxy.delay_replies(DELAY);
    let before = server.calls("evalsha");
    assert!(is_timeout(&limiter.try_acquire(1, Duration::ZERO).await));
    assert!(server.calls("evalsha") - before <= 2);
}

#[tokio::test]
async fn a_key_of_another_type_is_an_error() {
    let server = RedisServer::start();
    redis::<()>(&server, &["SET", "LIMITER_NAME", "text"]);
    let limiter = RateLimiter::new(store(&server).await, "LIMITER_NAME");
    assert!(matches!(limiter.acquire(1).await, Err(Error::Store(_))));
    let set = limiter.try_set_rate(RateLimiterConfig::overall(1, SECOND)).await;
    assert!(matches!(set, Err(Error::Store(_))));
}

#[test]
fn limiters_and_their_futures_can_be_sent() {
    fn is_sync<T: Send + Sync + Clone + std::fmt::Debug + Unpin>() {}
    is_sync::<RateLimiter>();
    fn is_send<T: Send>(_: T) {}
    let store = RedisStore::lazy("redis://127.0.0.1:1/").unwrap();
    let limiter = RateLimiter::new(store, "LIMITER_NAME");
    is_send(limiter.try_acquire(1, SECOND));
    is_send(limiter.set_rate(RateLimiterConfig::overall(1, SECOND)));
    is_send(limiter.release(1));
    assert_eq!(format!("{limiter:?}"), r#"RateLimiter { name: "LIMITER_NAME", .. }"#);
}
