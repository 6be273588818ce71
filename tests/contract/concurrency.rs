//! Limits on concurrency over either store: what is in flight, how it ends, and requests that wait.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep},
};
use tower_ratelimit::{
    Algorithm, Charge, Error, FailurePolicy, Limiter, MemoryStore, Permit, Quota,
    config::{ConfigError, Limit, Limits, QuotaError},
    observe::{Event, Observer},
    store::{AnyStore, ErrorKind, Source, Store, WhenFull},
};

use crate::support::{
    self,
    load::until,
    memory_store,
    recorder::{Recorder, observed},
    server::RedisServer,
};

const SECOND: Duration = Duration::from_secs(1);

fn concurrency(store: &AnyStore, limit: u64) -> Limiter {
    Limiter::new("streams", store.clone(), Algorithm::concurrency(), Quota::concurrent(limit))
}

async fn stores(server: &RedisServer) -> [AnyStore; 2] {
    let redis = support::redis_store(server).await;
    [MemoryStore::new().into_any(), redis.into_any()]
}

async fn hold(limiter: &Limiter, n: u64) -> Option<Permit> {
    limiter.hold("alice", n).await.unwrap().admitted()
}

#[tokio::test(start_paused = true)]
async fn a_key_with_a_permit_is_neither_evicted_nor_swept() {
    for when_full in [WhenFull::RejectNewKeys, WhenFull::EvictSoonest] {
        let streams = concurrency(&memory_store(1, when_full).into_any(), 4);
        let permit = hold(&streams, 3).await.unwrap();
        advance(3_600 * SECOND).await;
        let error = streams.hold("bob", 1).await.unwrap_err();
        assert!(matches!(&error, Error::Store(error) if error.kind() == ErrorKind::Full));
        assert_eq!(streams.peek("alice").await.unwrap().held(), 3);
        permit.cancel();
        assert!(streams.hold("bob", 1).await.unwrap().is_admitted());
    }
}

#[tokio::test]
async fn a_permit_that_is_dropped_is_free_at_once() {
    let server = RedisServer::start();
    for store in stores(&server).await {
        let streams = concurrency(&store, 2);
        // The end and the next hold of a process come in this order, without a pause.
        for _ in 0..100 {
            let one = hold(&streams, 1).await.unwrap();
            assert_eq!(one.decision().remaining(), 1);
            let two = hold(&streams, 1).await.unwrap();
            assert_eq!(two.decision().remaining(), 0);
            assert!(hold(&streams, 1).await.is_none());
            one.cancel();
            let three = hold(&streams, 1).await.unwrap();
            two.settle(7); // nothing is spent
            drop(three);
            drop(hold(&streams, 2).await.unwrap());
        }
        let state = streams.peek("alice").await.unwrap();
        assert_eq!((state.quota(), state.source()), (Quota::concurrent(2), Source::Store));
        until("all is free", async || streams.peek("alice").await.unwrap().remaining() == 2).await;
    }
}

#[tokio::test]
async fn a_denial_says_what_is_held_and_not_when_it_ends() {
    let server = RedisServer::start();
    for store in stores(&server).await {
        let streams = concurrency(&store, 3);
        let permit = hold(&streams, 2).await.unwrap();
        let denied = streams.hold("alice", 2).await.unwrap().into_result().unwrap_err();
        assert_eq!((denied.is_allowed(), denied.remaining()), (false, 1));
        assert_eq!((denied.retry_after(), denied.replenish_after()), (None, Duration::ZERO));
        let state = streams.check("alice").cost(2).peek().await.unwrap();
        assert_eq!((state.allows(), state.held(), state.remaining()), (false, 2, 1));
        assert!(hold(&streams, 1).await.is_some());
        assert!(streams.hold("bob", 3).await.unwrap().is_admitted());
        drop(permit);
        streams.block("alice", SECOND).await.unwrap();
        let denied = streams.hold("alice", 1).await.unwrap().into_result().unwrap_err();
        assert!(denied.is_blocked() && denied.retry_after().is_some());
        streams.unblock("alice").await.unwrap();
        streams.reset("alice").await.unwrap();
        assert!(hold(&streams, 3).await.is_some());
    }
}

#[tokio::test]
async fn a_rate_and_concurrency_are_charged_together_or_not_at_all() {
    let server = RedisServer::start();
    for store in stores(&server).await {
        let streams = concurrency(&store, 2);
        let quota = Quota::per_day(3);
        let requests = Limiter::new("requests", store.clone(), Algorithm::token_bucket(), quota);
        let charge = Charge::new(&requests, "alice").also(&streams);
        let left = async || {
            let requests = requests.peek("alice").await.unwrap().remaining();
            (requests, streams.peek("alice").await.unwrap().held())
        };
        let one = charge.hold().await.unwrap().admitted().unwrap();
        let two = charge.hold().await.unwrap().admitted().unwrap();
        assert_eq!(left().await, (1, 2));
        let denied = charge.hold().await.unwrap().into_result().unwrap_err();
        assert_eq!((denied.limiter(), denied.retry_after()), ("streams", None));
        assert_eq!(left().await, (1, 2));
        drop(one);
        let three = charge.hold().await.unwrap().admitted().unwrap();
        assert_eq!(left().await, (0, 2));
        drop((two, three));
        let denied = charge.hold().await.unwrap().into_result().unwrap_err();
        assert_eq!(denied.limiter(), "requests");
        until("none is in flight", async || left().await == (0, 0)).await;
    }
}

#[tokio::test]
async fn calls_that_spend_are_errors_that_say_what_to_do() {
    let server = RedisServer::start();
    for store in stores(&server).await {
        let streams = concurrency(&store, 2);
        let only_holds =
            |error| matches!(error, Error::OnlyHolds { limiter, .. } if limiter == "streams");
        assert!(only_holds(streams.check("alice").await.unwrap_err()));
        assert!(only_holds(streams.acquire("alice", 1).await.unwrap_err()));
        assert!(only_holds(streams.reserve("alice", 1, SECOND).await.unwrap_err()));
        assert!(only_holds(streams.spend("alice", 1).await.unwrap_err()));
        assert!(only_holds(streams.refund("alice", 1).await.unwrap_err()));
        let charge = Charge::new(&streams, "alice");
        assert!(only_holds(charge.check().await.unwrap_err()));
        assert!(only_holds(charge.spend().await.unwrap_err()));
        assert!(only_holds(charge.check().max_wait(SECOND).await.unwrap_err()));
        let above = streams.hold("alice", 3).await.unwrap_err();
        assert!(matches!(above, Error::CostAboveQuota { cost: 3, max: 2, .. }));
        assert!(matches!(streams.hold("alice", 0).await.unwrap_err(), Error::ZeroCost));
        assert_eq!(streams.peek("alice").await.unwrap().remaining(), 2);
    }
}

#[test]
fn a_quota_fits_its_algorithm() {
    let new = |algorithm, quota| Limiter::try_new("x", MemoryStore::new(), algorithm, quota);
    let panics = |algorithm, quota| {
        let new = || Limiter::new("x", MemoryStore::new(), algorithm, quota);
        *std::panic::catch_unwind(new).unwrap_err().downcast::<String>().unwrap()
    };
    let error = new(Algorithm::concurrency(), Quota::per_second(10)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "quota \"10/s\": concurrency counts units at a time; use a quota such as \"10 \
         concurrent\", or another algorithm"
    );
    assert_eq!(
        panics(Algorithm::concurrency(), Quota::per_second(10)),
        "the quota `Quota::per_second(10)` does not fit `Algorithm::concurrency()`, which counts \
         units at a time; use a quota such as `Quota::concurrent(10)`, or another algorithm"
    );
    let error = new(Algorithm::token_bucket(), Quota::concurrent(10)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "quota \"10 concurrent\": a token-bucket counts units per window; use the algorithm \
         concurrency, or a quota such as 10/s"
    );
    assert_eq!(
        panics(Algorithm::token_bucket(), Quota::concurrent(10)),
        "the quota `Quota::concurrent(10)` does not fit `Algorithm::token_bucket()`, which counts \
         units per window; use `Algorithm::concurrency()`, or a quota such as \
         `Quota::per_second(10)`"
    );
    assert!(matches!(error, ConfigError::Quota(QuotaError::Concurrent { .. })));
    assert!(Quota::concurrent(10).try_burst(20).is_err());
    assert!(Quota::try_concurrent(0).is_err());
    assert!(Quota::try_concurrent(1 << 47).is_err());
    for (text, quota) in [("10 concurrent", 10), (" 1_000 Concurrent ", 1_000)] {
        assert_eq!(text.parse(), Ok(Quota::concurrent(quota)));
    }
    assert_eq!(Quota::concurrent(1_000).to_string(), "1000 concurrent");
    for text in ["concurrent", "10/s concurrent", "10 concurrent burst 20", "0 concurrent"] {
        assert!(text.parse::<Quota>().is_err(), "{text}");
    }
}

#[tokio::test]
async fn a_file_can_set_a_limit_on_concurrency_and_change_it() {
    let read = |text| toml::from_str::<Limits>(text).unwrap();
    let limits = read("streams = { algorithm = 'concurrency', quota = '1 concurrent' }");
    let limiters = limits.limiters(&MemoryStore::new()).unwrap();
    let streams = limiters.get("streams").unwrap();
    let one = hold(&streams, 1).await.unwrap();
    assert!(hold(&streams, 1).await.is_none());
    limiters
        .reload(&read("streams = { algorithm = 'concurrency', quota = '3 concurrent' }"))
        .unwrap();
    let two = hold(&streams, 2).await.unwrap();
    limiters
        .reload(&read("streams = { algorithm = 'concurrency', quota = '2 concurrent' }"))
        .unwrap();
    drop(one);
    assert!(hold(&streams, 1).await.is_none()); // two are still in flight
    drop(two);
    assert!(hold(&streams, 2).await.is_some());
    limiters.reload(&read("streams = { algorithm = 'token-bucket', quota = '5/day' }")).unwrap();
    assert!(streams.check("alice").cost(5).await.unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_are_served_in_order_and_woken_by_an_end() {
    let store = MemoryStore::new().into_any();
    let streams = concurrency(&store, 1);
    let first = hold(&streams, 1).await.unwrap();
    let (served, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let (streams, served) = (streams.clone(), served.clone());
        tasks.spawn(async move {
            let permit =
                streams.hold("alice", 1).max_wait(60 * SECOND).await.unwrap().admitted().unwrap();
            assert_eq!(served.fetch_add(1, SeqCst), number, "in the order of arrival");
            sleep(SECOND).await;
            drop(permit);
        });
        tokio::task::yield_now().await;
    }
    // One that gives up delays no other.
    let streams_2 = streams.clone();
    let impatient =
        tokio::spawn(async move { streams_2.hold("alice", 1).max_wait(SECOND / 2).await });
    sleep(SECOND).await;
    let denied = impatient.await.unwrap().unwrap().into_result().unwrap_err();
    assert_eq!((denied.retry_after(), denied.remaining()), (None, 0));
    drop(first);
    tasks.join_all().await;
    assert_eq!(start.elapsed(), 21 * SECOND, "each began when the one before it ended");
}

/// It checks again and again, but observers and the log get one decision about it.
#[tokio::test]
async fn a_request_that_waits_for_a_place_is_decided_once() {
    let server = RedisServer::start();
    for store in stores(&server).await {
        let recorder = Recorder::new();
        store.add_observer(recorder.clone());
        let streams = concurrency(&store, 1);
        let rate = Limiter::new("rate", store, Algorithm::token_bucket(), Quota::per_day(9));
        let both = Charge::new(&streams, "alice").also(&rate);
        let permit = hold(&streams, 1).await.unwrap();
        recorder.take();
        for wait in [SECOND / 5, Duration::ZERO] {
            assert!(!streams.hold("alice", 1).max_wait(wait).await.unwrap().is_admitted());
            assert!(!both.hold().max_wait(wait).await.unwrap().is_admitted());
            let decided = recorder.take_of("decided");
            let denied = |it: &String| it.starts_with("decided streams alice Denied");
            assert!(decided.len() == 2 && decided.iter().all(denied), "{wait:?}: {decided:?}");
        }
        // Whether the first in the queue or not.
        let denied = tokio::join!(
            streams.hold("alice", 1).max_wait(SECOND / 5),
            streams.hold("alice", 1).max_wait(SECOND / 5),
            streams.hold("alice", 1).max_wait(SECOND / 5),
        );
        assert!(!denied.0.unwrap().is_admitted() && !denied.1.unwrap().is_admitted());
        assert!(!denied.2.unwrap().is_admitted());
        assert_eq!(recorder.take_of("decided streams alice Denied").len(), 3);
        let waiting = tokio::spawn(async move { both.hold().max_wait(60 * SECOND).await });
        sleep(SECOND / 5).await; // of a real server
        assert_eq!(recorder.take_of("decided"), [""; 0]);
        drop(permit);
        let _permit = waiting.await.unwrap().unwrap().admitted().unwrap();
        let decided = recorder.take_of("decided");
        assert!(decided.len() == 1 && decided[0].contains("Allowed"), "{decided:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_for_places_of_two_keys_is_woken_by_an_end_of_either() {
    for held in ["alice", "bob"] {
        let streams = concurrency(&MemoryStore::new().into_any(), 1);
        let permit = streams.hold(held, 1).await.unwrap().admitted().unwrap();
        let both = Charge::new(&streams, "alice").and(Charge::new(&streams, "bob"));
        let start = Instant::now();
        let waiting = tokio::spawn(async move { both.hold().max_wait(60 * SECOND).await });
        sleep(10 * SECOND).await;
        drop(permit);
        let _permit = waiting.await.unwrap().unwrap().admitted().expect("both are free");
        assert_eq!(start.elapsed(), 10 * SECOND, "{held}");
    }
}

#[tokio::test]
async fn waiting_requests_of_two_processes_share_the_places() {
    let server = RedisServer::start();
    let mut tasks = JoinSet::new();
    let in_flight = Arc::new(AtomicU64::new(0));
    for _ in 0..2 {
        let streams = concurrency(&support::redis_store(&server).await.into_any(), 2);
        for _ in 0..5 {
            let (streams, in_flight) = (streams.clone(), in_flight.clone());
            tasks.spawn(async move {
                for _ in 0..5 {
                    let wait = 60 * SECOND;
                    let permit =
                        streams.hold("alice", 1).max_wait(wait).await.unwrap().admitted().unwrap();
                    assert!(in_flight.fetch_add(1, SeqCst) < 2);
                    sleep(Duration::from_millis(10)).await;
                    in_flight.fetch_sub(1, SeqCst);
                    drop(permit);
                }
            });
        }
    }
    tasks.join_all().await;
}

#[tokio::test]
async fn the_failure_policy_applies() {
    for (policy, admitted) in [(FailurePolicy::Open, 9), (FailurePolicy::local(0.5), 2)] {
        let store = support::lazy("redis://127.0.0.1:1");
        let quota = Quota::concurrent(4);
        let streams = Limiter::new("streams", store, Algorithm::concurrency(), quota);
        assert!(streams.hold("alice", 1).await.unwrap_err().is_store());
        let streams = streams.on_failure(policy);
        let mut permits = vec![];
        for _ in 0..9 {
            permits.extend(hold(&streams, 1).await);
        }
        assert_eq!(permits.len(), admitted, "{policy:?}");
        permits.clear();
        assert!(hold(&streams, 1).await.is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_to_spend_takes_no_place_of_a_limit_that_begins_to_count_places() {
    let read = |text| toml::from_str::<Limits>(text).unwrap();
    let bucket = "one = { algorithm = 'token-bucket', quota = '1/s' }\n";
    let before = format!("{bucket}two = {{ algorithm = 'token-bucket', quota = '2/s' }}");
    let after = format!("{bucket}two = {{ algorithm = 'concurrency', quota = '2 concurrent' }}");
    let limiters = read(&before).limiters(&MemoryStore::new()).unwrap();
    let [one, two] = ["one", "two"].map(|name| limiters.get(name).unwrap());
    assert!(one.check("alice").await.unwrap().is_allowed());
    // On two keys, requests retry instead of reserving an instant.
    let charge = Charge::new(&one, "alice").and(Charge::new(&two, "all"));
    let waiting = tokio::spawn(async move { charge.check().max_wait(2 * SECOND).await });
    sleep(SECOND / 2).await;
    limiters.reload(&read(&after)).unwrap();
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::OnlyHolds { limiter, .. } if limiter == "two"));
    assert_eq!(two.peek("all").await.unwrap().held(), 0);
    assert!(one.check("alice").await.unwrap().is_allowed(), "its unit is returned");
}

/// The settings of a limit that counts places, and those of one that counts requests.
fn places_and_rate() -> [Limit; 2] {
    let places = "algorithm = 'concurrency'\nquota = '4 concurrent'";
    [places, "algorithm = 'token-bucket'\nquota = '4/day'"].map(|it| toml::from_str(it).unwrap())
}

#[tokio::test]
async fn a_check_keeps_no_place_of_a_limit_that_begins_to_count_places_during_the_call() {
    let [places, rate] = places_and_rate();
    let limiter = rate.limiter("streams", MemoryStore::new()).unwrap();
    let (sender, begun) = mpsc::channel();
    let changed = limiter.clone();
    let changing = thread::spawn(move || begun.iter().for_each(|()| places.apply_to(&changed)));
    for round in 0..4_000 {
        rate.apply_to(&limiter);
        sender.send(()).unwrap();
        let key = format!("user-{round}");
        let error = loop {
            let charge = Charge::new(&limiter, &key);
            let kept = async || Ok(limiter.reserve(&key, 1, SECOND).await?.keep());
            let result = if round % 2 == 0 { charge.check().await } else { kept().await };
            if let Err(error) = result {
                break error;
            }
        };
        assert!(matches!(error, Error::OnlyHolds { .. }), "{error}");
        assert_eq!(limiter.peek(&key).await.unwrap().held(), 0, "round {round}");
    }
    drop(sender);
    changing.join().unwrap();
}

/// Lets a limiter count places once its store has failed.
struct ChangedByFailure(OnceLock<Limiter>);

impl Observer for ChangedByFailure {
    fn on_event(&self, event: &Event<'_>) {
        if let (Event::StoreFailed { .. }, Some(limiter)) = (event, self.0.get()) {
            places_and_rate()[0].apply_to(limiter);
        }
    }
}

#[tokio::test]
async fn the_fallback_of_a_check_keeps_no_place() {
    let changing = Arc::new(ChangedByFailure(OnceLock::new()));
    let store = observed(support::lazy("redis://127.0.0.1:1"), changing.clone());
    let limiter = places_and_rate()[1].limiter("streams", store).unwrap();
    let limiter = limiter.on_failure(FailurePolicy::local(1.0));
    changing.0.set(limiter.clone()).ok().unwrap();
    let error = limiter.check("alice").await.unwrap_err();
    assert!(matches!(error, Error::OnlyHolds { .. }), "{error}");
    assert!(hold(&limiter, 4).await.is_some());
}
