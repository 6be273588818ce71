//! The events of limiters and layers, for observers, metrics and logs: each exactly once.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{body::Body, extract::ConnectInfo};
use http::{Request, Response, StatusCode, request::Parts};
use metrics_exporter_prometheus::PrometheusBuilder;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Algorithm, Charge, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer,
    config::Limits,
    key::{self, ClientIp, KeyExtractor, ProxyHeader},
    layer::{MissingKey, RequestError, Usage},
    observe::{self, Event, Observer, TopDenied},
    store,
};

use crate::support::{
    calls_back::{CallsBack, within_a_minute},
    get,
    log::{Log, lines_of_another_process},
    recorder::{Recorder, observed as observed_store},
};

const HOUR: Quota = Quota::per_hour(2);

fn observed(quota: Quota) -> (Arc<Recorder>, Limiter) {
    let recorder = Recorder::new();
    let store = observed_store(MemoryStore::with_max_keys(10), recorder.clone());
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    (recorder, limiter)
}

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> StatusCode {
    let service = service_fn(async |_| Ok::<_, std::convert::Infallible>(Response::new(())));
    layer.layer(service).oneshot(request).await.unwrap().status()
}

#[tokio::test]
async fn a_check_is_one_decision_and_other_calls_are_none() {
    let (recorder, limiter) = observed(HOUR);
    let _ = limiter.check("alice").await.unwrap();
    assert_eq!(recorder.take(), ["keys 1 of 10", "decided api alice Allowed Store"]);
    limiter.spend("alice", 1).await.unwrap();
    let _ = limiter.peek("alice").await.unwrap();
    limiter.refund("alice", 1).await.unwrap();
    limiter.spend("alice", 1).await.unwrap();
    assert_eq!(recorder.take(), [""; 0]);
    let _ = limiter.check("alice").cost(2).await.unwrap();
    let _ = limiter.try_acquire("alice", 2, Duration::ZERO).await.unwrap();
    let _ = Charge::new(&limiter, "alice").check().await.unwrap();
    assert_eq!(recorder.take(), ["decided api alice Denied Store"; 3]);
    assert!(limiter.check("alice").cost(3).await.is_err(), "above the quota");
    assert_eq!(recorder.take(), [""; 0]);
    limiter.reset("alice").await.unwrap();
    assert_eq!(recorder.take(), ["keys 0 of 10", "reset api alice"]);
}

#[tokio::test]
async fn a_block_is_an_outcome_of_its_own_for_observers_logs_and_lists() {
    let (log, _guard) = Log::start(tracing::Level::DEBUG);
    let (recorder, top) = (Recorder::new(), Arc::new(TopDenied::new(10)));
    let store = observed_store(MemoryStore::with_max_keys(10), recorder.clone());
    store.add_observer(top.clone());
    let quota = Quota::per_hour(1);
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    let minute = Duration::from_secs(60);
    limiter.block("alice", minute).await.unwrap();
    assert_eq!(recorder.take(), ["keys 1 of 10", "blocked api alice"]);
    for key in ["alice", "ben", "ben"] {
        let _ = limiter.check(key).await.unwrap();
    }
    let decided = ["alice Blocked", "ben Allowed", "ben Denied"];
    let decided = decided.map(|decided| format!("decided api {decided} Store"));
    assert_eq!(recorder.take_of("decided"), decided);
    let listed = top.top(9);
    let listed: Vec<_> = listed.iter().map(|it| (it.key.as_str(), it.is_blocked)).collect();
    assert!(listed.contains(&("alice", true)) && listed.contains(&("ben", false)), "{listed:?}");
    limiter.unblock("alice").await.unwrap();
    assert_eq!(recorder.take(), ["unblocked api alice"]);
    let _ = limiter.check("alice").await.unwrap();
    let _ = limiter.check("alice").await.unwrap();
    let listed = top.top(9);
    assert!(listed.iter().all(|it| !it.is_blocked), "alice is denied by the quota: {listed:?}");
    limiter.reset("alice").await.unwrap();

    let text = log.text();
    let lines: Vec<_> = text.lines().collect();
    for (line, parts) in lines.iter().zip([
        &["INFO tower_ratelimit: key blocked", "limiter=\"api\"", "duration=60s"][..],
        &["DEBUG tower_ratelimit: request denied", "blocked=true"],
        &["DEBUG tower_ratelimit: request denied", "blocked=false"],
        &["INFO tower_ratelimit: key unblocked", "limiter=\"api\""],
        &["DEBUG tower_ratelimit: request denied", "blocked=false"],
        &["INFO tower_ratelimit: key reset", "limiter=\"api\""],
    ]) {
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
    assert_eq!(lines.len(), 6, "{text}");
    assert!(!text.contains("alice"), "{text}");
}

#[tokio::test]
async fn a_change_of_the_quota_is_one_event_that_names_both() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let (recorder, limiter) = observed(Quota::per_minute(5));
    let layers = limiter.clone();
    for quota in [Quota::per_minute(50), Quota::per_minute(50), Quota::per_second(1).burst(9)] {
        limiter.set_quota(quota).unwrap();
    }
    let changed = ["api: 5/min -> 50/min", "api: 50/min -> 1/s burst 9"];
    let [first, second] = changed.map(|changed| changed.replace(" ->", ", token-bucket ->"));
    let events = [first, second].map(|event| format!("changed {event}, token-bucket"));
    assert_eq!(recorder.take(), events);
    assert_eq!(layers.quota(), Quota::per_second(1).burst(9));
    for change in changed {
        let line = format!("INFO tower_ratelimit: limit changed: {change}");
        assert_eq!(log.text().matches(&line).count(), 1, "{}", log.text());
    }
}

#[tokio::test]
async fn a_reload_is_one_event_and_one_for_each_limit_that_changes() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let recorder = Recorder::new();
    let limits = |text| toml::from_str::<Limits>(text).unwrap();
    let first = limits(
        "api = { algorithm = 'token-bucket', quota = '10/s' }\n\
                        login = { algorithm = 'sliding-log', quota = '5/min' }",
    );
    let store = observed_store(MemoryStore::new(), recorder.clone());
    let limiters = first.limiters(&store).unwrap();
    assert_eq!(recorder.take(), [""; 0], "the first limits are no reload");
    let next = limits(
        "api = { algorithm = 'token-bucket', quota = '10/s' }\n\
                       login = { algorithm = 'fixed-window', quota = '50/min' }",
    );
    limiters.reload(&next).unwrap();
    let changed = "changed login: 5/min, sliding-log -> 50/min, fixed-window";
    assert_eq!(recorder.take(), [changed, "reloaded "]);
    let removed = limits("api = { algorithm = 'token-bucket', quota = '1/s' }");
    let error = limiters.reload(&removed).unwrap_err();
    assert_eq!(recorder.take(), [format!("reloaded {error}")]);
    let text = log.text();
    assert!(text.contains("INFO tower_ratelimit: limits reloaded"), "{text}");
    assert!(text.contains("ERROR tower_ratelimit: new limits rejected: "), "{text}");
}

#[tokio::test]
async fn several_limits_are_one_decision_of_the_one_that_binds() {
    let recorder = Recorder::new();
    let store = observed_store(MemoryStore::new(), recorder.clone());
    let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota);
    let (wide, narrow) = (limiter("wide", Quota::per_hour(9)), limiter("narrow", HOUR));
    let charge = Charge::new(&wide, "all").and(Charge::new(&narrow, "alice"));
    for outcome in ["Allowed", "Allowed", "Denied"] {
        let _ = charge.check().await.unwrap();
        let decided = format!("decided narrow alice {outcome} Store");
        assert_eq!(recorder.take_of("decided"), [decided]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_begins_and_ends_once_and_a_dropped_one_releases() {
    let (recorder, limiter) = observed(Quota::per_second(1).burst(1));
    let timeout = Duration::from_secs(3);
    let _ = limiter.try_acquire("key", 1, timeout).await.unwrap();
    recorder.take();
    let _ = limiter.try_acquire("key", 1, timeout).await.unwrap();
    let waited = ["decided api key Waited Store", "wait began api", "wait ended api"];
    assert_eq!(recorder.take(), waited);
    let dropped = tokio::time::timeout(Duration::from_millis(10), limiter.acquire("key", 1)).await;
    assert!(dropped.is_err());
    let events = recorder.take();
    assert_eq!(events.len(), 4, "{events:?}");
    assert_eq!(events[..2], waited[..2]);
    for event in ["wait ended api", "released api key 1"] {
        assert!(events.iter().any(|it| it == event), "{events:?}");
    }
    // A full bucket reserves nothing: the request retries.
    let store = observed_store(MemoryStore::new(), recorder.clone());
    let quota = Quota::per_second(1).burst(1);
    let leaky = Limiter::new("default", store, Algorithm::leaky_bucket(), quota);
    let _ = leaky.check("key").await.unwrap();
    recorder.take();
    let _ = leaky.acquire("key", 1).await.unwrap();
    let events = recorder.take();
    let waits = |what| events.iter().filter(|it| **it == format!("wait {what} default")).count();
    assert_eq!((waits("began"), waits("ended")), (1, 1), "{events:?}");
}

#[tokio::test]
async fn returned_units_are_one_release() {
    let (recorder, limiter) = observed(HOUR);
    let turn = limiter.reserve("alice", 2, Duration::ZERO).await.unwrap();
    recorder.take();
    drop(turn);
    assert_eq!(recorder.take(), ["released api alice 2"]);
}

#[tokio::test]
async fn a_failed_call_is_one_failure_and_the_policy_one_decision() {
    let recorder = Recorder::new();
    let store = observed_store(MemoryStore::with_max_keys(1), recorder.clone());
    let limiter = Limiter::new("default", store, Algorithm::sliding_log(), Quota::per_hour(1));
    let _ = limiter.check("alice").await.unwrap();
    recorder.take();
    assert!(limiter.check("ben").await.is_err());
    assert_eq!(recorder.take(), ["failed default check full"]);
    let open = limiter.clone().on_failure(FailurePolicy::Open);
    let _ = open.check("ben").await.unwrap();
    let uncounted = ["failed default check full", "decided default ben Allowed Open"];
    assert_eq!(recorder.take(), uncounted);
    let layer = RateLimitLayer::new(&limiter, key::header("x-user"));
    let ben = || get(&[("x-user", "ben")]);
    assert_eq!(send(&layer, ben()).await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(recorder.take(), ["failed default check full", "rejected store -"]);
    let layer = layer.on_failure(FailurePolicy::Open);
    assert_eq!(send(&layer, ben()).await, StatusCode::OK);
    let uncounted = ["failed default check full", "decided default header:x-user=ben Allowed Open"];
    assert_eq!(recorder.take(), uncounted);
}

#[tokio::test]
async fn a_denied_request_is_one_decision_and_one_rejection() {
    let (recorder, limiter) = observed(Quota::per_hour(1));
    let layer = RateLimitLayer::new(&limiter, key::header("x-user"));
    let alice = || get(&[("x-user", "alice")]);
    assert_eq!(send(&layer, alice()).await, StatusCode::OK);
    assert_eq!(recorder.take_of("decided"), ["decided api header:x-user=alice Allowed Store"]);
    assert_eq!(send(&layer, alice()).await, StatusCode::TOO_MANY_REQUESTS);
    let denied = ["decided api header:x-user=alice Denied Store", "rejected denied api"];
    assert_eq!(recorder.take(), denied);
    // The rejection reaches the observer by the store already.
    let layer = layer.observe(recorder.clone());
    assert_eq!(send(&layer, alice()).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(recorder.take(), denied);
    let own = Recorder::new();
    let layer = layer.observe(own.clone());
    assert_eq!(send(&layer, alice()).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(
        (recorder.take(), own.take()),
        (denied.map(String::from).to_vec(), vec![denied[1].to_owned()])
    );
    let layer = layer.dry_run(true);
    assert_eq!(send(&layer, alice()).await, StatusCode::OK);
    assert_eq!(recorder.take(), denied[..1]);
}

#[tokio::test]
async fn a_panic_of_an_observer_of_the_layer_changes_no_response() {
    let (_, limiter) = observed(HOUR);
    let layer = RateLimitLayer::new(&limiter, key::header("x-user"));
    let layer = layer.observe(Arc::new(|event: &Event<'_>| panic!("{event:?}")));
    assert_eq!(send(&layer, get(&[])).await, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn rejections_have_reasons() {
    let (recorder, limiter) = observed(HOUR);
    let user = || key::header("x-user");
    let layer = |cost: u64| RateLimitLayer::new(&limiter, user()).cost(move |_| cost);
    let alice = || get(&[("x-user", "alice")]);
    let rejected = async |layer: RateLimitLayer, request| {
        assert!(!send(&layer, request).await.is_success());
        recorder.take()
    };
    assert_eq!(rejected(layer(3), alice()).await, ["rejected cost_above_quota api"]);
    assert_eq!(rejected(layer(1), get(&[])).await, ["rejected missing_key -"]);
    let unauthorized = MissingKey::reject_with(StatusCode::UNAUTHORIZED);
    let layer = layer(1).missing_key(unauthorized);
    assert_eq!(rejected(layer.clone(), get(&[])).await, ["rejected missing_key -"]);
    assert_eq!(rejected(layer.forbid(|_| true), alice()).await, ["rejected forbidden -"]);
    let by_ip = RateLimitLayer::new(&limiter, key::PeerIp);
    assert_eq!(rejected(by_ip, get(&[])).await, ["rejected misconfigured -"]);
    // A request that a rule rejects has no limiter.
    let rule = |_: &Parts| Err::<Charge, _>(RequestError::invalid("no"));
    let by_rule = RateLimitLayer::by_rule(rule);
    assert_eq!(rejected(by_rule.clone(), get(&[])).await, [""; 0]);
    let by_rule = by_rule.observe(recorder.clone());
    assert_eq!(rejected(by_rule, get(&[])).await, ["rejected invalid -"]);
}

/// Passes the events of one limiter to another observer.
struct OfOne(&'static str, Arc<Recorder>, Arc<Recorder>);

impl Observer for OfOne {
    fn on_event(&self, event: &Event<'_>) {
        self.2.on_event(event);
    }

    fn of_limiter(&self, limiter: &'static str) -> Option<Arc<dyn Observer>> {
        (limiter == self.0).then(|| self.1.clone() as _)
    }
}

#[tokio::test]
async fn an_observer_can_tell_the_events_of_one_limiter_apart() {
    let (own, others) = (Recorder::new(), Recorder::new());
    let store = MemoryStore::with_max_keys(10);
    store.add_observer(Arc::new(OfOne("api", own.clone(), others.clone())));
    let limiter = |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), HOUR);
    let (api, login) = (limiter("api").with_quota(Quota::per_hour(1)).unwrap(), limiter("login"));
    for limiter in [&api, &login] {
        let _ = limiter.check("alice").await.unwrap();
    }
    assert_eq!(own.take(), ["decided api alice Allowed Store"], "the keys are of the store");
    let rest = ["keys 1 of 10", "keys 2 of 10", "decided login alice Allowed Store"];
    assert_eq!(others.take(), rest);
}

#[tokio::test]
async fn an_observer_that_is_added_later_gets_the_events_of_later_limiters_only() {
    let (recorder, limiter) = observed(HOUR);
    let _ = limiter.check("alice").await.unwrap();
    recorder.take();
    let later = Recorder::new();
    let store = MemoryStore::new();
    let limiter = |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), HOUR);
    let first = limiter("first");
    for _ in 0..2 {
        store.clone().add_observer(later.clone()); // clones share it; the second has no effect
    }
    let second = limiter("second");
    for limiter in [first, second] {
        let _ = limiter.check("alice").await.unwrap();
    }
    assert_eq!(later.take_of("decided"), ["decided second alice Allowed Store"]);
}

#[tokio::test]
async fn only_another_number_of_keys_is_reported_and_to_the_store_only() {
    let recorder = Recorder::new();
    let store = observed_store(MemoryStore::with_max_keys(2), recorder.clone());
    let limiter =
        |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(9));
    let (one, two) = (limiter("one"), limiter("two"));
    let _ = one.peek("alice").await.unwrap();
    assert_eq!(recorder.take(), [""; 0]);
    let charge = Charge::new(&one, "alice").and(Charge::new(&two, "alice"));
    let _ = charge.check().await.unwrap();
    assert_eq!(recorder.take_of("keys"), ["keys 2 of 2"]);
    let _ = charge.check().await.unwrap();
    let _ = charge.peek().await.unwrap();
    let _ = one.check("ben").await.unwrap(); // evicts another key
    assert_eq!(recorder.take_of("keys"), [""; 0]);
    one.reset("carl").await.unwrap();
    assert_eq!(recorder.take_of("keys"), [""; 0]);
    one.reset("ben").await.unwrap();
    assert_eq!(recorder.take_of("keys"), ["keys 1 of 2"]);
}

#[test]
fn an_observer_can_call_its_store_and_limiters_from_each_event() {
    let kinds = within_a_minute(async || {
        tokio::time::pause(); // the second request waits however late it is
        let store = MemoryStore::new();
        let observer = CallsBack::add_to(&store);
        let quota = Quota::per_second(50).burst(1);
        let limiter = observer.limiter(quota);
        let _ = limiter.check("alice").await.unwrap();
        let _ = limiter.try_acquire("alice", 1, Duration::from_secs(9)).await.unwrap();
        drop(limiter.reserve("carl", 1, Duration::ZERO).await.unwrap());
        let permit = limiter.hold("dora", 1).await.unwrap().admitted().unwrap();
        limiter.reset("dora").await.unwrap();
        drop(permit);
        limiter.block("ben", Duration::from_secs(60)).await.unwrap();
        let layer = RateLimitLayer::new(&limiter, |_: &Parts| "ben");
        assert_eq!(send(&layer, get(&[])).await, StatusCode::TOO_MANY_REQUESTS);
        limiter.unblock("ben").await.unwrap();
        let limits = "login = { algorithm = 'sliding-log', quota = '5/min' }";
        let limits = toml::from_str::<Limits>(limits).unwrap();
        limits.limiters(&store).unwrap().reload(&limits).unwrap();

        let full = MemoryStore::with_max_keys(1);
        let of_full = CallsBack::add_to(&full);
        assert!(of_full.limiter(Quota::per_hour(1)).check("alice").await.unwrap().is_allowed());
        assert!(of_full.limiter(quota).check("ben").await.is_err());
        assert!(of_full.kinds().contains(&"StoreFailed".to_owned()));
        observer.kinds()
    });
    let expected = [
        "Blocked",
        "Decided",
        "HoldBegan",
        "HoldEnded",
        "HoldLost",
        "KeysHeld",
        "Rejected",
        "Released",
        "Reloaded",
        "Reset",
        "SettingsChanged",
        "Unblocked",
        "WaitBegan",
        "WaitEnded",
    ];
    assert_eq!(kinds, expected);
}

#[tokio::test]
async fn a_decision_about_several_keys_of_a_limiter_names_none_of_them() {
    let (recorder, top) = (Recorder::new(), Arc::new(TopDenied::new(10)));
    let store = observed_store(MemoryStore::with_max_keys(10), recorder.clone());
    store.add_observer(top.clone());
    let quota = Quota::per_hour(1);
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    let _ = limiter.check("alice").await.unwrap();
    recorder.take();
    let charge = Charge::new(&limiter, "tenant").and(Charge::new(&limiter, "alice"));
    assert!(!charge.check().await.unwrap().is_allowed());
    assert_eq!(recorder.take_of("decided"), ["decided api - Denied Store"]);
    assert_eq!(top.total(), 0);
}

#[tokio::test]
async fn the_metrics_count_what_happened() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let store =
        observed_store(MemoryStore::with_max_keys(10), Arc::new(observe::metrics_of("main")));
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1));
    let layer = RateLimitLayer::new(&limiter, key::header("x-user"));
    for _ in 0..3 {
        send(&layer, get(&[("x-user", "alice")])).await;
    }
    limiter.block("ben", Duration::from_secs(60)).await.unwrap();
    let _ = limiter.check("ben").await.unwrap();
    limiter.unblock("ben").await.unwrap();
    limiter.reset("ben").await.unwrap();
    limiter.set_quota(Quota::per_hour(2)).unwrap();
    let text = handle.render();
    for line in [
        r#"decisions_total{store="main",limiter="api",outcome="allowed",source="store"} 1"#,
        r#"decisions_total{store="main",limiter="api",outcome="denied",source="store"} 2"#,
        r#"decisions_total{store="main",limiter="api",outcome="denied",source="cached"} 0"#,
        r#"decisions_total{store="main",limiter="api",outcome="blocked",source="store"} 1"#,
        r#"key_changes_total{store="main",limiter="api",change="blocked"} 1"#,
        r#"key_changes_total{store="main",limiter="api",change="unblocked"} 1"#,
        r#"key_changes_total{store="main",limiter="api",change="reset"} 1"#,
        r#"settings_changes_total{store="main",limiter="api"} 1"#,
        r#"reloads_total{store="main",result="applied"} 0"#,
        r#"rejections_total{store="main",reason="denied"} 2"#,
        r#"keys{store="main"} 1"#,
        r#"keys_limit{store="main"} 10"#,
        r#"waiting_requests{store="main",limiter="api"} 0"#,
        r#"store_errors_total{store="main",limiter="api",operation="check",kind="full"} 0"#,
    ] {
        assert!(
            text.lines().any(|it| it.strip_prefix("tower_ratelimit_") == Some(line)),
            "{line}\n{text}"
        );
    }
    assert!(!text.contains("alice"), "{text}");
}

#[tokio::test]
async fn denied_keys_are_listed() {
    let top = Arc::new(TopDenied::new(10));
    let store = observed_store(MemoryStore::new(), top.clone());
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1));
    let layer = RateLimitLayer::new(limiter, key::PeerIp);
    for (last, requests) in [(1, 2), (2, 4), (3, 1)] {
        for _ in 0..requests {
            let mut request = get(&[]);
            let peer = SocketAddr::from(([192, 0, 2, last], 80));
            request.extensions_mut().insert(ConnectInfo(peer));
            send(&layer, request).await;
        }
    }
    let top: Vec<_> = top.top(9).iter().map(|it| (it.key.to_string(), it.count)).collect();
    assert_eq!(top, [("ip=192.0.2.2".to_owned(), 3), ("ip=192.0.2.1".to_owned(), 1)]);
}

#[tokio::test]
async fn a_denial_is_an_event_and_contains_the_key_only_at_the_level_trace() {
    for (level, has_key) in [(tracing::Level::DEBUG, false), (tracing::Level::TRACE, true)] {
        let (log, _guard) = Log::start(level);
        let quota = Quota::per_hour(1);
        let limiter = Limiter::new("default", MemoryStore::new(), Algorithm::sliding_log(), quota);
        for _ in 0..2 {
            let _ = limiter.check("alice").await.unwrap();
        }
        let text = log.text();
        let [event] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        let parts =
            ["DEBUG tower_ratelimit: request denied", "limiter=\"default\"", "retry_after="];
        assert!(parts.iter().all(|part| event.contains(part)), "{event}");
        assert_eq!(event.contains("key=\"alice\""), has_key, "{event}");
    }
}

#[tokio::test]
async fn a_misconfigured_service_is_one_error_in_the_log() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let errors = Arc::new(AtomicUsize::new(0));
    let counted = errors.clone();
    let layer = RateLimitLayer::per_ip(HOUR).observe(Arc::new(move |event: &Event<'_>| {
        if let Event::Rejected { error: Some(error), .. } = event {
            assert!(error.contains("with_connect_info"), "{error}");
            counted.fetch_add(1, Relaxed);
        }
    }));
    for _ in 0..20 {
        let status = send(&layer, get(&[])).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    }
    let text = log.text();
    let [event] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    let parts = ["ERROR tower_ratelimit: the service is misconfigured", "with_connect_info"];
    assert!(parts.iter().all(|part| event.contains(part)), "{event}");
    assert_eq!(errors.load(Relaxed), 20);
}

/// A new user has no subscriber yet, and the response does not name the mistake.
#[tokio::test]
async fn without_a_subscriber_a_misconfigured_service_is_one_line_on_stderr() {
    let this = "without_a_subscriber_a_misconfigured_service_is_one_line_on_stderr";
    let Ok(lines) = lines_of_another_process(this, "") else {
        let layer = RateLimitLayer::per_ip(HOUR);
        for _ in 0..20 {
            send(&layer, get(&[])).await;
        }
        return;
    };
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.contains("the service is misconfigured") && line.contains("with_connect_info"));
}

/// Neither the response nor the decision names the cause. A caller that gets an error prints it.
#[tokio::test]
async fn without_a_subscriber_a_failure_that_is_hidden_is_one_line_on_stderr() {
    let this = "without_a_subscriber_a_failure_that_is_hidden_is_one_line_on_stderr";
    let api = |policy| {
        let store = store::lazy("redis://127.0.0.1:1/?deadline=10s").unwrap(); // no server there
        Limiter::new("api", store, Algorithm::token_bucket(), HOUR).on_failure(policy)
    };
    for case in ["a response", "open", "local", "a wait", "an error"] {
        let lines = match lines_of_another_process(this, case) {
            Ok(lines) => lines,
            Err(case) => {
                let limiter = match &*case {
                    "open" => api(FailurePolicy::Open),
                    "local" => api(FailurePolicy::local(1.0)),
                    "a wait" => api(FailurePolicy::Wait),
                    _ => api(FailurePolicy::Closed),
                };
                let layer = RateLimitLayer::new(limiter.clone(), |_: &Parts| "alice");
                for _ in 0..2 {
                    match &*case {
                        "a response" => assert_eq!(send(&layer, get(&[])).await, 503),
                        "a wait" => {
                            let wait = Duration::from_secs(1);
                            limiter.try_acquire("alice", 1, wait).await.unwrap_err();
                        }
                        "an error" => _ = limiter.check("alice").await.unwrap_err(),
                        _ => assert!(limiter.check("alice").await.unwrap().is_allowed()),
                    }
                }
                return;
            }
        };
        assert_eq!(lines.len(), usize::from(case != "an error"), "{case}: {lines:?}");
        let parts = ["decisions failed: ", "127.0.0.1:1", "refused"];
        assert!(lines.iter().all(|line| parts.iter().all(|it| line.contains(it))), "{lines:?}");
    }
}

#[tokio::test]
async fn a_wrong_name_beside_a_right_one_is_a_warning_if_an_estimate_is_left() {
    let this = "a_wrong_name_beside_a_right_one_is_a_warning_if_an_estimate_is_left";
    let Ok(lines) = lines_of_another_process(this, "") else {
        let store = MemoryStore::new();
        let limiter = |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), HOUR);
        let (input, output) = (limiter("input"), limiter("output"));
        let plan = Charge::new(&input, "bob").estimate(1); // it has no limit on the output
        let both = Charge::new(&input, "alice").estimate(1).also(&output).estimate(1);
        for (charge, name) in [(plan, "output"), (both, "outptu")] {
            let layer = RateLimitLayer::by_rule(move |_: &Parts| Ok(charge.clone()))
                .settle_by(move |_| Some(Usage::of("input", 1).and(name, 1)));
            assert_eq!(send(&layer, get(&[])).await, StatusCode::OK);
        }
        return;
    };
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.contains("the estimate of a request counts") && line.contains("\"outptu\""));
}

#[tokio::test]
async fn a_usage_that_names_no_limiter_of_the_request_is_one_warning() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let store = MemoryStore::new();
    let tokens = Limiter::new("tokens", store, Algorithm::token_bucket(), Quota::per_hour(100));
    let rule = {
        let tokens = tokens.clone();
        move |_: &Parts| Ok(Charge::new(&tokens, "alice").estimate(10))
    };
    let layer = RateLimitLayer::by_rule(rule).settle_by(|_| Some(Usage::of("token", 3)));
    for _ in 0..3 {
        assert_eq!(send(&layer, get(&[])).await, StatusCode::OK);
    }
    assert_eq!(tokens.peek("alice").await.unwrap().remaining(), 70);
    let text = log.text();
    let [event] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    let parts = ["WARN tower_ratelimit: the estimate of a request counts", "\"token\""];
    assert!(parts.iter().all(|part| event.contains(part)), "{event}");
}

/// Sends requests from these peers in turn, and returns the warnings.
async fn warnings(
    key: impl KeyExtractor<Parts>,
    requests: usize,
    peers: &[&str],
    headers: &[(&str, &str)],
) -> Vec<String> {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let store = MemoryStore::new();
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(10));
    let layer = RateLimitLayer::new(limiter, key);
    for peer in peers.iter().cycle().take(requests) {
        let mut request = get(headers);
        request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
        // Clones of the layer are the same layer.
        send(&layer.clone(), request).await;
    }
    log.text().lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_proxy_that_hides_all_clients_is_one_warning() {
    const PROXY: &[&str] = &["10.0.0.1:80"];
    let forwarded = [("x-forwarded-for", "203.0.113.9")];
    let client_ip = |networks: &[&str]| ClientIp::new(ProxyHeader::XForwardedFor, networks);
    let pair = (key::PeerIp, |_: &Parts| "a route");

    let of_peer =
        ["WARN tower_ratelimit: all clients may share one limit", "`key::ClientIp` in place"];
    for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
        let found = warnings(key::PeerIp, 5_000, PROXY, &[(header, "for=203.0.113.9")]).await;
        let [warning] = &found[..] else { panic!("{header}: {found:?}") };
        assert!(of_peer.iter().all(|text| warning.contains(text)), "{warning}");
        assert!(warning.contains(&format!("the header {header},")), "{warning}");
    }
    for found in [
        warnings(pair, 1_000, PROXY, &forwarded).await,
        warnings(key::PeerIp.peer_addr(|it| it.get().copied()), 1_000, PROXY, &forwarded).await,
    ] {
        let [warning] = &found[..] else { panic!("{found:?}") };
        assert!(of_peer.iter().all(|text| warning.contains(text)), "{warning}");
    }
    for (key, headers, text) in [
        (client_ip(&["192.168.0.0/16"]), &forwarded[..], "add its network to `key::ClientIp`"),
        (client_ip(&["10.0.0.0/8"]), &[], "names no client in the header x-forwarded-for"),
        (client_ip(&["10.0.0.0/8"]), &[], "if these are its health checks, exempt their route"),
        (client_ip(&["10.0.0.0/8"]), &[("x-forwarded-for", "unknown")], "names no client"),
    ] {
        let found = warnings(key, 3_000, PROXY, headers).await;
        let [warning] = &found[..] else { panic!("{text}: {found:?}") };
        assert!(warning.contains(text), "{warning}");
        assert!(!warning.contains("10.0.0.1"), "keys are not logged: {warning}");
    }

    // The other key is the address only of the requests that have no first key.
    let by_header = || key::header("user").or(key::PeerIp);
    let user = by_header().or(client_ip(&["192.168.0.0/16"]));
    let with_key = [("user", "ada"), ("x-forwarded-for", "203.0.113.9")];
    for (key, headers) in
        [(by_header(), &forwarded[..]), (by_header(), &[("user", ""), forwarded[0]])]
    {
        let found = warnings(key, 3_000, PROXY, headers).await;
        let [warning] = &found[..] else { panic!("{found:?}") };
        assert!(of_peer.iter().all(|text| warning.contains(text)), "{warning}");
    }
    let first_found = warnings(key::PeerIp.or(key::Global), 1_000, PROXY, &forwarded).await;
    assert_eq!(first_found.len(), 1);

    let others: &[&str] = &["10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"];
    for none in [
        warnings(key::PeerIp, 999, PROXY, &forwarded).await,
        warnings(key::PeerIp, 3_000, PROXY, &[]).await,
        warnings(key::PeerIp, 5_000, others, &forwarded).await,
        warnings(client_ip(&["10.0.0.0/8"]), 3_000, PROXY, &forwarded).await,
        warnings(client_ip(&["10.0.0.0/8"]), 3_000, &["203.0.113.9:80"], &[]).await,
        warnings(key::Global, 3_000, PROXY, &forwarded).await,
        warnings(by_header(), 3_000, PROXY, &with_key).await,
        warnings(user, 3_000, PROXY, &with_key).await,
    ] {
        assert_eq!(none, [""; 0]);
    }
}
