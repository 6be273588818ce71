//! The events of the Redis store, for observers, metrics and logs: each exactly once.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Charge, FailurePolicy, Key, Limiter, Quota, RateLimitLayer, RedisStore, key,
    observe,
    redisson::{RateLimiter, RateLimiterConfig},
    store::{Credentials, RedisConfig, Source},
};

use crate::support::{
    self,
    calls_back::{CallsBack, within_a_minute},
    cluster::Cluster,
    counting, get,
    load::until,
    log::{Log, lines_of_another_process},
    proxy::Proxy,
    recorder::{Recorder, observed},
    redis_store,
    server::RedisServer,
};

/// Drops a call when the server has executed it, before its reply comes.
async fn drop_when_executed(server: &RedisServer, call: impl IntoFuture<Output: Send>) {
    let before = server.calls("evalsha");
    tokio::select! {
        biased;
        _ = call.into_future() => panic!("the replies are held"),
        () = until("it is executed", async || server.calls("evalsha") > before) => {}
    }
}

fn once_per_hour(store: RedisStore) -> Limiter {
    Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1))
}

#[tokio::test]
async fn a_remembered_denial_is_a_decision_with_the_source_cached() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let limiter = once_per_hour(observed(redis_store(&server).await, recorder.clone()));
    assert_eq!(recorder.take(), ["breaker closed"]);
    for events in [
        &["batch api 1", "decided api alice Allowed Store timed"][..],
        &["batch api 1", "decided api alice Denied Store timed"],
        &["decided api alice Denied Cached"],
    ] {
        let _ = limiter.check("alice").await.unwrap();
        assert_eq!(recorder.take(), events);
    }
}

#[tokio::test]
async fn a_denial_by_a_block_has_the_outcome_blocked_also_if_it_is_remembered() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let limiter = once_per_hour(observed(redis_store(&server).await, recorder.clone()));
    limiter.block("alice", Duration::from_secs(60)).await.unwrap();
    assert_eq!(recorder.take_of("blocked"), ["blocked api alice"]);
    for source in ["Store timed", "Cached"] {
        let _ = limiter.check("alice").await.unwrap();
        let decided = format!("decided api alice Blocked {source}");
        assert_eq!(recorder.take_of("decided"), [decided]);
    }
}

#[tokio::test]
async fn checks_that_go_together_are_in_one_batch_and_have_a_decision_each() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let limiter = once_per_hour(observed(redis_store(&server).await, recorder.clone()));
    let mut tasks = JoinSet::new();
    for i in 0..200 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.check(format!("key-{i}")).await.unwrap().is_allowed() });
    }
    assert!(tasks.join_all().await.into_iter().all(|is_allowed| is_allowed));
    let events = recorder.take();
    let decided = events.iter().filter(|it| it.starts_with("decided")).count();
    let batches = events.iter().filter_map(|it| it.strip_prefix("batch api "));
    let batches: Vec<usize> = batches.map(|checks| checks.parse().unwrap()).collect();
    assert_eq!((decided, batches.iter().sum()), (200, 200));
    assert!(batches.len() < 20, "{batches:?}");
}

#[tokio::test]
async fn each_failed_call_is_one_failure_and_each_change_of_the_breaker_one_event() {
    let (mut server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(RedisStore::connect(&server.url()).await.unwrap(), recorder.clone());
    let limiter = Limiter::new("api", store.clone(), Algorithm::sliding_log(), Quota::per_hour(9));
    server.kill();
    recorder.take();
    let mut failures = 0;
    while store.health().is_available {
        assert!(limiter.check("key").await.is_err());
        failures += 1;
    }
    let events = recorder.take();
    let count = |word: &str| events.iter().filter(|it| it.starts_with(word)).count();
    assert_eq!((count("failed api"), count("breaker open")), (failures, 1), "{events:?}");
    assert_eq!((count("breaker"), count("decided")), (1, 0), "{events:?}");

    assert!(limiter.check("key").await.is_err());
    assert_eq!(recorder.take(), ["failed api check circuit_open"]);
    let local = limiter.clone().on_failure(FailurePolicy::local(0.5));
    let _ = local.check("key").await.unwrap();
    let events = recorder.take();
    let decided = "decided api key Allowed Local".to_owned();
    assert!(events.starts_with(&["failed api check circuit_open".to_owned()]), "{events:?}");
    assert!(events.ends_with(&[decided]) && events.len() <= 3, "{events:?}");

    server.restart();
    until("the store uses Redis again", async || store.health().is_available).await;
    assert_eq!(recorder.take(), ["breaker closed"]);
}

#[tokio::test]
async fn failures_name_their_operation_and_each_check_is_one_decision_or_one_failure() {
    let (mut server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(RedisStore::connect(&server.url()).await.unwrap(), recorder.clone());
    let limiter = once_per_hour(store);
    let mut checks = 1;
    assert!(limiter.check("key").await.unwrap().is_allowed());
    server.kill();
    for _ in 0..10 {
        assert!(limiter.check("key").await.is_err());
        checks += 1;
        assert!(limiter.peek("key").await.is_err());
        assert!(limiter.spend("key", 1).await.is_err());
        assert!(limiter.refund("key", 1).await.is_err());
        assert!(limiter.reset("key").await.is_err());
        assert!(limiter.block("key", Duration::from_secs(1)).await.is_err());
        assert!(limiter.unblock("key").await.is_err());
    }
    let events = recorder.take();
    let count = |word: &str| events.iter().filter(|it| it.starts_with(word)).count();
    assert_eq!(count("decided") + count("failed api check "), checks, "{events:?}");
    for operation in ["peek", "spend", "refund", "reset", "block", "unblock"] {
        assert_eq!(count(&format!("failed api {operation} ")), 10, "{operation}: {events:?}");
    }
    assert_eq!(count("failed"), 70, "{events:?}");
}

#[tokio::test]
async fn a_rejected_decision_is_an_error_reply_and_rejecting_all_is_one_event() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let mut admin = server.connection();
    let mut set = |rules: &[&str]| {
        redis::cmd("ACL").arg("SETUSER").arg("limiter").arg(rules).exec(&mut admin).unwrap();
    };
    set(&["on", ">secret", "~*", "+@all", "-set"]);
    let config = support::config(&server.url()).user("limiter").password("secret");
    let store = observed(RedisStore::new(config).unwrap(), recorder.clone());
    let limiter = once_per_hour(store.clone());
    recorder.take();
    for i in 0..20 {
        assert!(limiter.check(i).await.is_err());
        assert_eq!(recorder.take(), ["batch api 1", "failed api check error_reply"]);
    }
    assert!(store.health().is_available);
    // What is missing is found out beside the requests.
    until("the missing permission is found", async || log.text().contains("lacks a")).await;
    set(&["+set"]);
    until("Redis has rejected no decision for a while", async || {
        let _ = limiter.check("key").await.unwrap();
        log.text().contains("Redis decides again")
    })
    .await;
    let text = log.text();
    let (missing, other): (Vec<_>, _) = text.lines().partition(|line| line.contains("lacks a"));
    let ([missing], [failed, rejects, decides]) = (&missing[..], &other[..]) else {
        panic!("{text}")
    };
    let parts = ["WARN tower_ratelimit: decisions failed: ", "limiter=\"api\"", "permission"];
    assert!(parts.iter().all(|part| failed.contains(part)), "{failed}");
    let parts = ["ERROR tower_ratelimit: the user at Redis lacks a permission: ", "NOPERM SET on "];
    assert!(parts.iter().all(|part| missing.contains(part)), "{missing}");
    let parts = ["ERROR tower_ratelimit: Redis rejects decisions: ", "permission"];
    assert!(parts.iter().all(|part| rejects.contains(part)), "{rejects}");
    assert!(!text.contains("script: ") && !text.contains("user_script"), "{text}");
    assert!(rejects.contains(&*server.socket().to_string_lossy()), "{rejects}");
    let parts = ["INFO tower_ratelimit: Redis decides again", "outage=", "server="];
    assert!(parts.iter().all(|part| decides.contains(part)), "{decides}");
}

#[tokio::test]
async fn a_missing_key_pattern_is_named_and_no_command_is_blamed() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let user = ["SETUSER", "limiter", "on", ">secret", "~other:*", "+@all"];
    redis::cmd("ACL").arg(&user).exec(&mut server.connection()).unwrap();
    let config = support::config(&server.url()).user("limiter").password("secret");
    let limiter = once_per_hour(RedisStore::new(config).unwrap());
    until("the missing permission is found", async || {
        assert!(limiter.check("alice").await.is_err());
        log.text().contains("lacks a permission")
    })
    .await;
    let text = log.text();
    let missing: Vec<_> = text.lines().filter(|line| line.contains("lacks a permission")).collect();
    assert!(matches!(&missing[..], [line] if line.contains("~ratelimit:*")), "{text}");
    assert!(!text.contains("commands that") && !text.contains("alice"), "{text}");
}

/// Uses the store until it knows this about its server.
async fn until_status(store: &RedisStore, status: &str) {
    let limiter = once_per_hour(store.clone());
    until(&format!("the server is {status:?}"), async || {
        let _ = limiter.check("key").await;
        store.health().status() == status
    })
    .await;
}

#[tokio::test]
async fn a_stopped_and_a_paused_server_are_told_apart() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let mut server = RedisServer::start();
    let store = RedisStore::lazy(&server.url()).unwrap();
    assert_eq!(store.health().status(), "unknown");
    until_status(&store, "ready").await;
    for (number, status, text) in [
        (1, "refused", "Redis refuses connections"),
        (2, "silent", "Redis accepts connections, but does not answer"),
        (3, "slow", "Redis answers, but makes no decision in time"),
    ] {
        match status {
            "refused" => server.kill(),
            "silent" => server.freeze(),
            _ => {
                let pause = ["PAUSE", "600000", "WRITE"];
                redis::cmd("CLIENT").arg(&pause).exec(&mut server.connection()).unwrap();
            }
        }
        until_status(&store, status).await;
        let health = store.health();
        assert!(!health.is_available && health.outages >= number, "{health:?}");
        until("the log has it", async || log.text().contains(text)).await;
        match status {
            "refused" => server.restart(),
            "silent" => server.thaw(),
            _ => redis::cmd("CLIENT").arg("UNPAUSE").exec(&mut server.connection()).unwrap(),
        }
        until_status(&store, "ready").await;
    }
}

#[tokio::test]
async fn a_server_whose_answers_are_all_late_is_slow() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = RedisStore::lazy(&proxy.url()).unwrap();
    until_status(&store, "ready").await;
    proxy.delay_replies(Duration::from_millis(150)); // beyond the deadline
    until_status(&store, "slow").await;
    until("the log has it", async || log.text().contains("makes no decision in time")).await;
    proxy.delay_replies(Duration::ZERO);
    until_status(&store, "ready").await;
}

#[tokio::test]
async fn a_server_that_rejects_decisions_is_not_ready() {
    let server = RedisServer::start();
    let store = redis_store(&server).await;
    let mut admin = server.connection();
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut admin).unwrap();
    until_status(&store, "rejecting").await;
    let health = store.health();
    assert!(health.is_available && health.last_error.unwrap().contains(": OOM command not"));
}

#[tokio::test]
async fn errors_of_a_damaged_key_are_one_event_which_names_it_as_redis_stores_it() {
    for (key, command) in [("alice smith\n", "SET"), ("ben", "SADD")] {
        let (log, _guard) = Log::start(tracing::Level::INFO);
        let (server, recorder) = (RedisServer::start(), Recorder::new());
        let store = observed(redis_store(&server).await, recorder.clone());
        let limiter = once_per_hour(store);
        let name = format!("ratelimit:api:token-bucket:{{{}}}", Key::from(key).as_str());
        redis::cmd(command).arg(&name).arg("x").exec(&mut server.connection()).unwrap();
        recorder.take();
        for _ in 0..20 {
            assert!(limiter.check(key).await.is_err());
            assert_eq!(recorder.take(), ["batch api 1", "failed api check error_reply"]);
            let _ = limiter.check("other").await.unwrap();
            recorder.take();
        }
        let text = log.text();
        let ours = text.lines().filter(|line| line.contains("WARN tower_ratelimit"));
        let [failed] = ours.collect::<Vec<_>>()[..] else { panic!("{text}") };
        let what = format!("the key {name} holds ");
        let parts = ["decisions failed", "limiter=\"api\"", "requests=1", "delete it", &what];
        assert!(parts.iter().all(|part| failed.contains(part)), "{failed}");
        assert_eq!(failed.matches(&name).count(), 1, "{failed}");
    }
}

#[tokio::test]
async fn a_state_that_was_counted_at_no_rate_is_an_error_of_its_key_alone() {
    let server = RedisServer::start();
    let store = redis_store(&server).await;
    let quota = Quota::per_hour(9);
    let other = Limiter::new("other", store.clone(), Algorithm::sliding_log(), quota);
    let mut admin = server.connection();
    for (algorithm, form) in [
        (Algorithm::fixed_window(), [b"F", &[1; 21][..], &[0; 6]].concat()),
        (Algorithm::token_bucket(), [b"Q", &[1; 27][..], &[0; 16]].concat()),
        (Algorithm::leaky_bucket(), [b"Q", &[1; 27][..], &[0; 16]].concat()),
    ] {
        let limiter = Limiter::new("damaged", store.clone(), algorithm, quota);
        let name = format!("ratelimit:damaged:{algorithm}:{{a}}");
        redis::cmd("SET").arg(&name).arg(form).exec(&mut admin).unwrap();
        for _ in 0..10 {
            let alone = limiter.check("a").await.unwrap_err();
            let both = Charge::new(&limiter, "a").and(Charge::new(&other, "a"));
            for error in [alone, both.check().await.unwrap_err()] {
                let text = format!("{:?}", error.source().and_then(Error::source));
                assert!(text.contains(&format!("the key {name} holds no state")), "{text}");
            }
        }
        assert_eq!(store.health().status(), "ready"); // it rejects only this key
        assert!(limiter.check("b").await.unwrap().is_allowed());
    }
}

#[tokio::test]
async fn the_error_of_several_limits_names_the_damaged_key() {
    let server = RedisServer::start();
    let store = redis_store(&server).await;
    let quota = Quota::per_hour(9);
    let bucket = Limiter::new("bucket", store.clone(), Algorithm::token_bucket(), quota);
    let log = Limiter::new("log", store, Algorithm::sliding_log(), quota);
    for (name, command, what) in [
        ("ratelimit:bucket:token-bucket:{a}", "SET", "no state of this limiter"),
        ("ratelimit:log:sliding-log:{a}", "SET", "no state of this limiter"),
        ("ratelimit:bucket:token-bucket:{a}", "SADD", "another type of value"),
        ("ratelimit:log:sliding-log:{a}", "SADD", "another type of value"),
    ] {
        let mut admin = server.connection();
        redis::cmd(command).arg(name).arg("x").exec(&mut admin).unwrap();
        let error = Charge::new(&bucket, "a").also(&log).check().await.unwrap_err();
        let mut cause: &dyn Error = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        let text = cause.to_string();
        assert!(text.contains(&format!("the key {name} holds {what}")), "{text}");
        redis::cmd("DEL").arg(name).exec(&mut admin).unwrap();
    }
}

#[tokio::test]
async fn single_failed_calls_show_in_the_health_of_a_store_that_decides() {
    let server = RedisServer::start();
    let store = redis_store(&server).await;
    let limiter = once_per_hour(store.clone());
    let _ = limiter.check("alice").await.unwrap();
    assert_eq!(store.health().to_string(), "the store decides");
    let foreign = "ratelimit:api:token-bucket:{ben}";
    redis::cmd("SET").arg(foreign).arg("x").exec(&mut server.connection()).unwrap();
    for _ in 0..2 {
        assert!(limiter.check("ben").await.is_err());
    }
    let health = store.health();
    assert_eq!((health.status(), health.recent_failures), ("ready", 2));
    assert!(health.last_error_at.unwrap().elapsed().is_ok());
    let line = health.to_string();
    let parts = ["the store decides, but 2 calls failed in the last minute; last error, ", foreign];
    assert!(parts.iter().all(|part| line.contains(part)), "{line}");
}

#[tokio::test]
async fn redis_decides_again_only_when_no_permission_is_missing() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let mut admin = server.connection();
    let mut set = |rules: &[&str]| {
        redis::cmd("ACL").arg("SETUSER").arg("limiter").arg(rules).exec(&mut admin).unwrap();
    };
    set(&["on", ">secret", "~*", "+@all", "-getrange"]);
    let config = support::config(&server.url()).user("limiter").password("secret");
    let store = RedisStore::new(config).unwrap();
    let limiter = once_per_hour(store.clone());
    for _ in 0..5 {
        assert!(limiter.spend("alice", 1).await.is_err()); // a check needs another command
    }
    assert_eq!(store.health().status(), "rejecting");
    until("its ping has named the permission", async || log.text().contains("+getrange")).await;
    let errors = store.health().errors;
    until("the store has asked for a proof", async || {
        let _ = limiter.check("alice").await.unwrap();
        store.health().errors > errors
    })
    .await;
    assert!(!log.text().contains("decides again"), "{}", log.text());
    assert_eq!(store.health().status(), "rejecting");
    set(&["+getrange"]);
    until("the proof has succeeded", async || {
        let _ = limiter.check("alice").await.unwrap();
        log.text().contains("Redis decides again")
    })
    .await;
    assert_eq!(store.health().status(), "ready");
    // The failed proof, which came 5 s after the first failure, belongs to the outage.
    let text = log.text();
    let outage = text.split("outage=").nth(1).unwrap().split_whitespace().next().unwrap();
    let seconds: f64 = outage.strip_suffix('s').unwrap().parse().expect(outage);
    assert!(seconds >= 5.0, "{text}");
}

#[tokio::test]
async fn without_a_subscriber_an_outage_and_its_end_are_two_lines_on_stderr() {
    let this = "without_a_subscriber_an_outage_and_its_end_are_two_lines_on_stderr";
    let Ok(lines) = lines_of_another_process(this, "") else {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server);
        let config = support::config(&proxy.url()).deadline(Duration::from_millis(50));
        let store = support::connected(config).await;
        let limiter = once_per_hour(store.clone()).on_failure(FailurePolicy::Open);
        proxy.hold_replies(true);
        while store.health().is_available {
            let _ = limiter.check("key").await.unwrap();
        }
        proxy.hold_replies(false);
        while !store.health().is_available {
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_millis(500)).await; // the breaker closes before the event
        return;
    };
    let [failed, again] = &lines[..] else { panic!("{lines:?}") };
    assert!(failed.contains("tower-ratelimit: decisions failed: "), "{failed}");
    assert!(again.contains("tower-ratelimit: Redis at 127.0.0.1:"), "{again}");
    assert!(again.contains(" decides again after "), "{again}");
}

#[tokio::test]
async fn single_timeouts_are_an_event() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let config = support::config(&proxy.url()).deadline(Duration::from_millis(50));
    let limiter = once_per_hour(support::connected(config).await);
    proxy.hold_replies(true);
    assert!(limiter.check("key").await.is_err());
    let text = log.text();
    let parts = ["WARN tower_ratelimit: decisions failed", "no answer", "limiter=\"api\""];
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[tokio::test]
async fn each_call_of_a_batch_is_reported() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let limiter = once_per_hour(observed(redis_store(&server).await, recorder.clone()));
    let _ = limiter.check("first").await.unwrap(); // loads the script
    let foreign = "ratelimit:api:token-bucket:{key-1}";
    redis::cmd("SET").arg(foreign).arg("x").exec(&mut server.connection()).unwrap();
    let before = server.calls("evalsha");
    recorder.take();
    let keys = (0..3).map(|i| format!("key-{i}"));
    let checks: Vec<_> = keys.map(|key| (limiter.clone(), key)).collect();
    let tasks = checks.into_iter().map(|(limiter, key)| async move { limiter.check(key).await });
    let mut tasks: JoinSet<_> = tasks.collect();
    while tasks.join_next().await.is_some() {}
    // An idle limiter sends a check immediately.
    assert_eq!(recorder.take_of("batch"), ["batch api 1", "batch api 2"]);
    assert_eq!(server.calls("evalsha") - before, 2);
}

#[tokio::test]
async fn keys_in_several_slots_are_a_call_each() {
    let cluster = Cluster::start(1, false, &[]);
    let (node, recorder) = (cluster.nodes().next().unwrap(), Recorder::new());
    let store = support::lazy(&node.url());
    let limiter = once_per_hour(observed(store, recorder.clone()));
    for is_known in [false, true] {
        recorder.take();
        let keys = (0..20).map(|i| format!("{is_known}-{i}"));
        let checks: Vec<_> = keys.map(|key| (limiter.clone(), key)).collect();
        let tasks =
            checks.into_iter().map(|(limiter, key)| async move { limiter.check(key).await });
        let decided = tasks.collect::<JoinSet<_>>().join_all().await;
        assert!(decided.iter().all(Result::is_ok), "{decided:?}");
        let batches = recorder.take_of("batch");
        let alone = batches.iter().filter(|batch| *batch == "batch api 1").count();
        // Until a call was rejected, the store does not know that the server is in a cluster.
        assert_eq!((alone, batches.len() > 20), (20, !is_known), "{batches:?}");
    }
}

#[tokio::test]
async fn a_dropped_check_is_decided_in_the_background_if_its_units_are_returned() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let proxy = Proxy::start(&server);
    let store = support::connected(support::config(&proxy.url())).await;
    store.add_observer(recorder.clone());
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(9));
    let _ = limiter.check("key").await.unwrap();
    recorder.take();
    proxy.hold_replies(true);
    drop_when_executed(&server, limiter.check("key")).await;
    drop_when_executed(&server, limiter.try_acquire("key", 2, Duration::from_secs(1))).await;
    proxy.hold_replies(false);
    let spent = async || 9 - limiter.peek("key").await.unwrap().remaining();
    until("the units of the second check are returned", async || spent().await == 2).await;
    let events = recorder.take();
    let events: Vec<_> = events.iter().filter(|event| !event.starts_with("batch")).collect();
    assert_eq!(events, ["decided api key Allowed Store timed", "released api key 2"]);
}

#[test]
fn an_observer_can_call_its_store_and_limiters_from_each_event_of_redis() {
    let kinds = within_a_minute(async || {
        let mut server = RedisServer::start();
        let proxy = Proxy::start(&server);
        let store = support::connected(support::config(&proxy.url())).await;
        let observer = CallsBack::add_to(&store);
        let limiter = observer.limiter(Quota::per_hour(1));
        let both = tokio::join!(limiter.check("alice"), limiter.check("ben"));
        assert!(both.0.is_ok() && both.1.is_ok());
        for source in [Source::Store, Source::Cached] {
            assert_eq!(limiter.check("alice").await.unwrap().source(), source);
        }
        let cached = limiter.block("ben", Duration::from_secs(60)).await;
        assert!(cached.is_ok() && limiter.check("ben").await.unwrap().is_blocked());
        proxy.hold_replies(true);
        drop_when_executed(&server, limiter.reserve("carl", 1, Duration::from_secs(1))).await;
        proxy.hold_replies(false);
        let has = |kind: &str| observer.kinds().iter().any(|it| it == kind);
        until("the units of the dropped check are returned", async || has("Released")).await;
        server.kill();
        while store.health().is_available {
            assert!(limiter.peek("dora").await.is_err());
        }
        server.restart();
        until("the store uses Redis again", async || store.health().is_available).await;
        observer.kinds()
    });
    let expected = [
        "BatchSent",
        "Blocked",
        "BreakerChanged",
        "Decided",
        "Released",
        "Reset",
        "SettingsChanged",
        "StoreFailed",
    ];
    assert_eq!(kinds, expected);
}

#[tokio::test]
async fn a_rejected_login_of_an_open_connection_is_one_event() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let mut admin = server.connection();
    let rules = ["on", ">first", "~*", "+@all"];
    redis::cmd("ACL").arg("SETUSER").arg("limiter").arg(&rules).exec(&mut admin).unwrap();
    let credentials = |password: &str| Credentials::new("limiter", password);
    let (sender, receiver) = watch::channel(credentials("first"));
    let config = support::config(&server.url()).credentials_provider(support::latest(receiver));
    let limiter = once_per_hour(RedisStore::new(config).unwrap());
    let _ = limiter.check("key").await.unwrap();
    assert_eq!(log.text(), "");
    sender.send_replace(credentials("unknown"));
    let start = Instant::now();
    while log.text().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "there is no event");
        sleep(Duration::from_millis(1)).await;
    }
    let _ = limiter.check("other").await.unwrap();
    let text = log.text();
    let [event] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert!(event.contains("ERROR tower_ratelimit: Redis rejected new credentials"), "{event}");
    assert!(!event.contains("unknown"), "{event}");
    sender.send_replace(credentials("first"));
    until("the next credentials are sent", async || server.calls("auth") > 1).await;
    let log: Vec<redis::Value> = redis::cmd("ACL").arg("LOG").query(&mut admin).unwrap();
    assert_eq!(log.len(), 1, "{log:?}");
}

#[tokio::test]
async fn a_provider_that_fails_for_an_open_connection_is_one_event_and_is_called_again() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let rules = ["on", ">first", ">second", "~*", "+@all"];
    let mut admin = server.connection();
    redis::cmd("ACL").arg("SETUSER").arg("limiter").arg(&rules).exec(&mut admin).unwrap();
    let failures = Arc::new(AtomicUsize::new(0));
    let count = failures.clone();
    let provider = move |known: Option<Credentials>| {
        let has_failed = known.is_some() && count.fetch_add(1, Relaxed) < 3;
        let password = if known.is_none() { "first" } else { "second" };
        async move {
            match has_failed {
                true => Err("the vault is sealed".into()),
                false => Ok(Credentials::new("limiter", password)),
            }
        }
    };
    let config = support::config(&server.url()).credentials_provider(provider);
    let limiter = once_per_hour(RedisStore::new(config).unwrap());
    let _ = limiter.check("key").await.unwrap();
    until("the next credentials are sent", async || server.calls("auth") > 0).await;
    assert!(failures.load(Relaxed) >= 3);
    let text = log.text();
    let [event] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    let begin = "WARN tower_ratelimit: the provider of the credentials failed";
    assert!(event.contains(begin) && event.contains("the vault is sealed"), "{event}");
}

#[tokio::test]
async fn a_rejected_login_is_not_reported_as_a_missing_answer() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let server = RedisServer::start();
    let config = RedisConfig::server(&server.url()).unwrap().user("limiter").password("unknown");
    let store = RedisStore::new(config).unwrap();
    let limiter = once_per_hour(store.clone());
    until("the store is unavailable", async || {
        assert!(limiter.check("key").await.is_err());
        !store.health().is_available
    })
    .await;
    let text = log.text();
    let rejected = text.lines().find(|line| line.contains("WARN tower_ratelimit: Redis rejects"));
    assert!(rejected.is_some_and(|line| line.contains("login") && line.contains("WRONGPASS")));
    assert!(!text.contains("does not answer"), "{text}");
}

#[tokio::test]
async fn a_login_whose_connection_ends_is_not_reported_as_rejected() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let mut server = RedisServer::start();
    let credentials = |password: &str| Credentials::new("default", password);
    let (sender, receiver) = watch::channel(credentials("any"));
    let config = support::config(&server.url()).credentials_provider(support::latest(receiver));
    let limiter = once_per_hour(RedisStore::new(config).unwrap());
    let _ = limiter.check("key").await.unwrap();
    server.freeze();
    sender.send_replace(credentials("next"));
    sleep(Duration::from_millis(50)).await; // the login is sent
    server.kill();
    until("the connection has ended", async || limiter.check("other").await.is_err()).await;
    sleep(Duration::from_millis(50)).await;
    assert!(!log.text().contains("credentials"), "{}", log.text());
}

#[tokio::test]
async fn an_observer_of_a_store_gets_the_decisions_of_a_limiter_shared_with_redisson() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(redis_store(&server).await, recorder.clone());
    let limiter = RateLimiter::new(store, "shared").label("java");
    limiter.try_set_rate(RateLimiterConfig::overall(1, Duration::from_secs(3_600))).await.unwrap();
    let layer = RateLimitLayer::new(&limiter, key::Global);
    recorder.take();
    for events in [
        &["decided java shared Allowed Store timed"][..],
        &["decided java shared Denied Store timed", "rejected denied java"],
    ] {
        let _ = layer.layer(counting(&Arc::default())).oneshot(get(&[])).await.unwrap();
        assert_eq!(recorder.take(), events);
    }
}

#[tokio::test]
async fn a_limiter_shared_with_redisson_has_the_same_events() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(redis_store(&server).await, recorder.clone());
    let limiter = RateLimiter::new(store, "shared").label("java");
    limiter.try_set_rate(RateLimiterConfig::overall(1, Duration::from_millis(200))).await.unwrap();
    recorder.take();
    let _ = limiter.try_acquire(1, Duration::ZERO).await.unwrap();
    assert_eq!(recorder.take(), ["decided java shared Allowed Store timed"]);
    let _ = limiter.try_acquire(1, Duration::ZERO).await.unwrap();
    assert_eq!(recorder.take(), ["decided java shared Denied Store timed"]);
    let _ = limiter.try_acquire(1, Duration::from_secs(60)).await.unwrap();
    let events = recorder.take();
    let count = |event: &str| events.iter().filter(|it| *it == event).count();
    assert_eq!((count("wait began java"), count("wait ended java")), (1, 1), "{events:?}");
    assert_eq!(count("decided java shared Allowed Store timed"), 1, "{events:?}");
}

#[tokio::test]
async fn the_metrics_of_redis_are_counted() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let mut server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let store = observed(store, Arc::new(observe::metrics()));
    let limiter = once_per_hour(store.clone());
    for _ in 0..3 {
        let _ = limiter.check("alice").await.unwrap();
    }
    server.kill();
    while store.health().is_available {
        assert!(limiter.check("ben").await.is_err());
    }
    assert!(limiter.check("ben").await.is_err());
    assert!(limiter.peek("ben").await.is_err());
    let text = handle.render();
    for line in [
        r#"decisions_total{limiter="api",outcome="allowed",source="store"} 1"#,
        r#"decisions_total{limiter="api",outcome="denied",source="store"} 1"#,
        r#"decisions_total{limiter="api",outcome="denied",source="cached"} 1"#,
        r#"decision_duration_seconds_count{limiter="api"} 2"#,
        r#"store_errors_total{limiter="api",operation="check",kind="circuit_open"} 1"#,
        r#"store_errors_total{limiter="api",operation="check",kind="error_reply"} 0"#,
        r#"store_errors_total{limiter="api",operation="peek",kind="circuit_open"} 1"#,
        r#"rejections_total{reason="store"} 0"#,
    ] {
        assert!(
            text.lines().any(|it| it.strip_prefix("tower_ratelimit_") == Some(line)),
            "{line}\n{text}"
        );
    }
    let open = text.lines().find(|it| it.starts_with("tower_ratelimit_circuit_open{server="));
    assert!(open.is_some_and(|it| it.ends_with("} 1")), "{text}");
    assert!(!text.contains("tower_ratelimit_keys"), "there is no store in memory: {text}");
}
