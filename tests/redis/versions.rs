//! States of other versions: each stored value has a letter for its form, and a letter that this
//! version does not know is an error that lets the counts stay. Other bytes are foreign.

use std::{
    error::Error as _,
    time::{Duration, Instant},
};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use tokio::{runtime::Runtime, task::JoinSet, time::sleep};
use tower_ratelimit::{
    Algorithm, Charge, Error, FailurePolicy, Limiter, Quota, RedisStore,
    store::{ErrorKind, Source},
};

use crate::support::{
    self, ALGORITHMS,
    load::until,
    recorder::{Recorder, observed},
    server::RedisServer,
};

const HOUR: Duration = Duration::from_secs(3_600);
/// Letters that no form of any algorithm has.
const UNKNOWN: [u8; 11] = *b"DEGIJKNOPRY";
const OTHER_LIMIT: u64 = 1_000;

/// A limiter, and the value of the key `alice`.
struct Site<'a> {
    server: &'a RedisServer,
    limiter: Limiter,
    other: Limiter,
}

impl<'a> Site<'a> {
    fn new(server: &'a RedisServer, store: &RedisStore, algorithm: Algorithm) -> Self {
        let quota = match algorithm {
            Algorithm::Concurrency => Quota::concurrent(3),
            _ => Quota::per_hour(3),
        };
        let name = format!("api-{}", algorithm.name());
        let limiter = Limiter::new(&name, store.clone(), algorithm, quota);
        let other = Limiter::new(
            &format!("other-{}", algorithm.name()),
            store.clone(),
            Algorithm::token_bucket(),
            Quota::per_hour(OTHER_LIMIT),
        );
        Self { server, limiter, other }
    }

    fn name(&self) -> String {
        let algorithm = self.limiter.algorithm().name();
        format!("ratelimit:{}:{algorithm}:{{alice}}", self.limiter.name())
    }

    fn value(&self) -> Vec<u8> {
        redis::cmd("GET").arg(self.name()).query(&mut self.server.connection()).unwrap()
    }

    fn set(&self, value: &[u8]) {
        let mut set = redis::cmd("SET");
        set.arg(self.name()).arg(value).arg("EX").arg(600);
        set.exec(&mut self.server.connection()).unwrap();
    }

    fn is_log(&self) -> bool {
        matches!(self.limiter.algorithm(), Algorithm::SlidingLog)
    }

    fn spends(&self) -> bool {
        !matches!(self.limiter.algorithm(), Algorithm::Concurrency)
    }

    fn holds(&self) -> bool {
        !matches!(self.limiter.algorithm(), Algorithm::LeakyBucket)
    }

    /// Values of the key, each with the places where letters of forms stand.
    async fn values(&self) -> Vec<(Vec<u8>, Vec<usize>)> {
        let Self { limiter, .. } = self;
        let mut values = vec![];
        let letter = |length: usize| if self.is_log() { length - 1 } else { 0 };
        limiter.reset("alice").await.unwrap();
        if self.spends() {
            let _ = limiter.check("alice").await.unwrap();
            let value = self.value();
            let place = letter(value.len());
            values.push((value, vec![place]));
        }
        if self.holds() {
            let permit = limiter.hold("alice", 1).await.unwrap().admitted().unwrap();
            let value = self.value();
            let held = value.len() - 25 - 14;
            let mut places = vec![held, value.len() - 1];
            if self.spends() {
                places.push(letter(held));
            }
            values.push((value, places));
            drop(permit);
            until("the permit has ended", async || {
                limiter.peek("alice").await.is_ok_and(|it| it.held() == 0)
            })
            .await;
        }
        if self.spends() {
            limiter.reset("alice").await.unwrap();
            for _ in 0..6 {
                let reserved = limiter.reserve("alice", 1, 10 * HOUR).await.unwrap();
                drop(reserved.keep());
            }
            let value = self.value();
            let places = match self.is_log() {
                true => vec![value.len() - 1],
                false => vec![0, value.len() - 1],
            };
            values.push((value, places));
        }
        let blocked = |(value, places): &(Vec<u8>, Vec<usize>)| {
            // The block is over, so the state counts.
            let value = [b"B\0\0\0\0\0\0\0", &value[..], b"B"].concat();
            let inside = places.iter().map(|place| place + 8);
            let places = inside.chain([0, value.len() - 1]).collect();
            (value, places)
        };
        let all: Vec<_> = values.iter().map(blocked).collect();
        values.extend(all);
        values
    }

    /// The calls about the key.
    fn calls(&self) -> Vec<&'static str> {
        let mut calls = vec!["peek", "block", "unblock"];
        if self.spends() {
            calls.extend(["check", "reserve", "spend", "refund", "charge", "spend a charge"]);
        }
        if self.holds() {
            calls.push("hold");
        }
        calls
    }

    async fn call(&self, call: &str) -> Result<(), Error> {
        let Self { limiter, other, .. } = self;
        match call {
            "peek" => limiter.peek("alice").await.map(drop),
            "block" => limiter.block("alice", HOUR).await.map(drop),
            "unblock" => limiter.unblock("alice").await.map(drop),
            "check" => limiter.check("alice").await.map(drop),
            "reserve" => limiter.reserve("alice", 1, HOUR).await.map(drop),
            "spend" => limiter.spend("alice", 1).await.map(drop),
            "refund" => limiter.refund("alice", 1).await.map(drop),
            "charge" => Charge::new(other, "alice").also(limiter).check().await.map(drop),
            "spend a charge" => Charge::new(other, "alice").also(limiter).spend().await.map(drop),
            _ => limiter.hold("alice", 1).await.map(drop),
        }
    }

    /// Makes these calls about a value, and checks that each fails and changes nothing.
    async fn assert_each_fails(&self, calls: &[&str], value: &[u8], assert: fn(&Error, &str)) {
        self.set(value);
        for call in calls {
            let at = format!("{call} of {}: {value:?}", self.limiter.algorithm());
            assert(&self.call(call).await.expect_err(&at), &at);
            assert_eq!(self.value(), value, "{at}");
        }
        let other = self.other.peek("alice").await.unwrap();
        assert_eq!(other.remaining(), OTHER_LIMIT, "a charge has spent some of its limits");
    }
}

fn all() -> impl Iterator<Item = Algorithm> {
    ALGORITHMS.into_iter().chain([Algorithm::concurrency()])
}

/// Returns the text of an error with its sources.
fn text(error: &Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source:?}"),
        None => error.to_string(),
    }
}

#[track_caller]
fn assert_of_another_version(error: &Error, at: &str) {
    let text = text(error);
    assert_eq!(error.kind(), Some(ErrorKind::OtherVersion), "{at}: {text}");
    assert!(text.contains("written by a newer version"), "{at}: {text}");
    assert!(!text.contains("delete"), "{at}: {text}");
}

#[track_caller]
fn assert_foreign(error: &Error, at: &str) {
    let text = text(error);
    assert_eq!(error.kind(), Some(ErrorKind::ErrorReply), "{at}: {text}");
    assert!(text.contains("delete it") && !text.contains("version"), "{at}: {text}");
}

#[tokio::test]
async fn an_unknown_letter_at_each_place_is_of_another_version_and_other_bytes_are_foreign() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    for algorithm in all() {
        let site = Site::new(&server, &store, algorithm);
        // Also for a log, whose own letters are at the end.
        let in_front = b"N of a newer version";
        site.assert_each_fails(&site.calls(), in_front, assert_of_another_version).await;
        for (value, places) in site.values().await {
            site.set(&value);
            site.limiter.peek("alice").await.unwrap();
            for place in places {
                // Without `A`, which the last byte of a cost can be.
                for byte in UNKNOWN.into_iter().chain(*b"\0z9[\xff") {
                    let mut changed = value.clone();
                    changed[place] = byte;
                    let is_letter = byte.is_ascii_uppercase();
                    let assert = if is_letter { assert_of_another_version } else { assert_foreign };
                    let calls = if b"Nz".contains(&byte) { site.calls() } else { vec!["peek"] };
                    site.assert_each_fails(&calls, &changed, assert).await;
                }
            }
        }
        assert_eq!(store.health().status(), "ready"); // it rejects only this key
    }
}

#[tokio::test]
async fn a_known_letter_with_a_wrong_length_is_foreign() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    for algorithm in all() {
        let site = Site::new(&server, &store, algorithm);
        for (value, _) in site.values().await {
            let last = value.len() - 1;
            let shorter = match site.is_log() {
                true => value[1..].to_vec(),
                false => value[..last].to_vec(),
            };
            site.assert_each_fails(&site.calls(), &shorter, assert_foreign).await;
        }
    }
}

/// The bytes of buckets in forms that other versions had.
#[tokio::test]
async fn a_state_of_an_earlier_commit_is_an_error_that_lets_it_stay() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    let at = *b"\x40\x2c\xd5\xa9\x45\x06\0";
    let one = *b"\x01\0\0\0\0\0\0";
    let large = [b"V", &at[..], &one, &one[..6], &one, &one, &[0; 6]].concat();
    let beyond = [b"X", &at[..], &one, &one[..6], &one[..6], &one[..4], &one, &[0; 3]].concat();
    let queue = [b"L", &at[..], &one, &[0; 7], &one[..6], &one[..4], &[0; 3], &[20]].concat();
    let long = [b"M", &at[..], &one, &[0; 7], &one[..6], &one[..4], &[0; 3], &one].concat();
    let interval = [b"U", &at[..], &one, &one[..6], &one[..6], &one[..4], &one, &[0; 3]].concat();
    let all = [&large, &beyond, &interval, &queue, &long];
    assert_eq!(all.map(|state| state.len()), [41, 41, 41, 36, 42]);
    for (algorithm, state) in [
        (Algorithm::token_bucket(), &large),
        (Algorithm::token_bucket(), &beyond),
        (Algorithm::token_bucket(), &interval),
        (Algorithm::LeakyBucket, &queue),
        (Algorithm::LeakyBucket, &long),
    ] {
        let site = Site::new(&server, &store, algorithm);
        site.assert_each_fails(&site.calls(), state, assert_of_another_version).await;
        let text = text(&site.call("peek").await.unwrap_err());
        assert!(text.contains("or by an older one"), "{text}");
    }
}

#[test]
fn random_bytes_are_an_error_that_changes_nothing() {
    let runtime = Runtime::new().unwrap();
    let server = RedisServer::start();
    let store = runtime.block_on(support::forgetful_store(&server));
    let letter =
        prop_oneof![Just(b'N'), proptest::sample::select(b"BCFHLMSTUVWXZ".to_vec()), any::<u8>()];
    let ends = (letter.clone(), letter.clone());
    let values = (ends, prop_oneof![vec(any::<u8>(), 0..60), vec(letter, 0..60)]);
    for algorithm in all() {
        let site = Site::new(&server, &store, algorithm);
        let config = Config { cases: 100, failure_persistence: None, ..Config::default() };
        let property = |((first, last), middle): ((u8, u8), Vec<u8>)| {
            let value = [&[first], &middle[..], &[last]].concat();
            let place = if site.is_log() { last } else { first };
            for call in site.calls() {
                site.set(&value);
                let Err(error) = runtime.block_on(site.call(call)) else {
                    prop_assert!(place != b'N', "{call}");
                    continue;
                };
                let text = format!("{call}: {}", text(&error));
                prop_assert_eq!(site.value(), &*value, "{}", &text);
                let is_of_another = error.kind() == Some(ErrorKind::OtherVersion);
                prop_assert!(is_of_another != text.contains("delete it"), "{}", text);
                prop_assert!(is_of_another || place != b'N', "{}", text);
            }
            Ok(())
        };
        TestRunner::new(config).run(&values, property).unwrap();
    }
}

/// A state of a newer version, with the letter that it gives to the form.
fn newer(value: &[u8]) -> Vec<u8> {
    [b"Z", &value[1..], b"more"].concat()
}

#[tokio::test]
async fn in_a_rolling_deployment_old_processes_apply_their_policy_and_newer_counts_stay() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(support::forgetful_store(&server).await, recorder.clone());
    let site = Site::new(&server, &store, Algorithm::token_bucket());
    let limiter = &site.limiter;
    let _ = limiter.check("alice").await.unwrap();
    let old = site.value();
    let new = newer(&old);
    site.set(&new);
    recorder.take();
    for _ in 0..10 {
        assert_of_another_version(&limiter.check("alice").await.unwrap_err(), "closed");
    }
    let failed = format!("failed {} check other_version", limiter.name());
    assert_eq!(recorder.take_of("failed"), vec![failed; 10]);

    // The keys of one call are decided each by itself.
    let keys = (0..40).map(|i| if i % 2 == 0 { "alice".into() } else { format!("key-{i}") });
    let checks: Vec<_> = keys.map(|key| (limiter.clone(), key)).collect();
    let checks = checks.into_iter().map(|(limiter, key)| async move {
        let result = limiter.check(&*key).await;
        (key, result)
    });
    for (key, result) in checks.collect::<JoinSet<_>>().join_all().await {
        match &*key {
            "alice" => assert_of_another_version(&result.unwrap_err(), "one of a batch"),
            _ => assert!(result.unwrap().is_allowed(), "{key}"),
        }
    }
    let health = store.health();
    assert_eq!((health.status(), health.is_available, health.outages), ("ready", true, 0));

    let open = limiter.clone().on_failure(FailurePolicy::Open);
    let open = open.check("alice").await.unwrap();
    assert!(open.is_allowed() && open.source() != Source::Store, "{:?}", open.source());
    let local = limiter.clone().on_failure(FailurePolicy::local(1.0));
    assert!(local.check("alice").await.unwrap().is_allowed());
    assert_eq!(site.value(), new);

    // A request that may wait outlasts it.
    let waits = limiter.clone().on_failure(FailurePolicy::Wait);
    let waits = tokio::spawn(async move { waits.try_acquire("alice", 1, HOUR).await });
    until("it has asked", async || !recorder.take_of("failed").is_empty()).await;
    site.set(&old);
    let admitted = waits.await.unwrap().unwrap();
    assert_eq!((admitted.is_allowed(), admitted.remaining()), (true, 1));

    // What a caller that has gone has reserved stays, and the release is not repeated.
    let _ = limiter.check("alice").await.unwrap();
    let reservation = limiter.reserve("alice", 1, HOUR).await.unwrap().admitted().unwrap();
    let new = newer(&site.value());
    site.set(&new);
    let calls = server.calls("evalsha");
    drop(reservation);
    until("the release is sent", async || server.calls("evalsha") > calls).await;
    sleep(Duration::from_millis(300)).await; // of a real server
    assert_eq!((server.calls("evalsha"), site.value()), (calls + 1, new));
    assert_eq!(store.health().status(), "ready");
}

#[tokio::test]
async fn the_end_of_a_hold_in_a_state_of_another_version_is_reported_and_not_repeated() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(support::forgetful_store(&server).await, recorder.clone());
    for algorithm in [Algorithm::token_bucket(), Algorithm::concurrency()] {
        let site = Site::new(&server, &store, algorithm);
        let limiter = &site.limiter;
        let permit = limiter.hold("alice", 2).await.unwrap().admitted().unwrap();
        let new = newer(&site.value());
        site.set(&new);
        recorder.take();
        permit.cancel();
        let events = std::cell::RefCell::new(vec![]);
        until("the end is reported", async || {
            events.borrow_mut().extend(recorder.take_of("hold unsettled"));
            !events.borrow().is_empty()
        })
        .await;
        assert_eq!(events.take(), [format!("hold unsettled {} alice 2 0", limiter.name())]);
        let calls = server.calls("evalsha");
        sleep(Duration::from_millis(300)).await; // of a real server
        assert_eq!(server.calls("evalsha"), calls);
        assert_eq!(recorder.take_of("hold unsettled"), [""; 0]);
        assert_eq!(site.value(), new);
    }
}

#[tokio::test]
async fn a_hold_in_a_state_of_another_version_expires_and_is_renewed_rarely() {
    let server = RedisServer::start();
    let store = support::forgetful_store(&server).await;
    let site = Site::new(&server, &store, Algorithm::token_bucket());
    let limiter = site.limiter.clone().hold_lifetime(Duration::from_millis(400));
    let permit = limiter.hold("alice", 2).await.unwrap().admitted().unwrap();
    let (old, new) = (site.value(), newer(&site.value()));
    site.set(&new);
    until("the permit has expired", async || permit.is_expired()).await;
    sleep(Duration::from_millis(300)).await; // of a real server
    let (calls, start) = (server.calls("evalsha"), Instant::now());
    sleep(Duration::from_secs(1)).await;
    let renewals = server.calls("evalsha") - calls;
    let seconds = start.elapsed().as_secs(); // more on a busy machine
    assert!(renewals <= seconds + 1, "it is renewed once in a second: {renewals} in {seconds} s");
    assert_eq!(site.value(), new);
    site.set(&old);
    until("the units that it has spent are known", async || {
        limiter.peek("alice").await.is_ok_and(|it| (it.held(), it.remaining()) == (0, 1))
    })
    .await;
    drop(permit);
}
