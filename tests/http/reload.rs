//! Limits that are read again while requests flow. Changes of one quota are in `contract`.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use tokio::time::advance;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer,
    config::{ConfigError, Limiters, Limits},
    key,
    observe::{Event, Observer},
    store,
};

use crate::support::{counting, get, item, items, recorder::observed, server::RedisServer};

fn read(text: &str) -> Limits {
    toml::from_str(text).unwrap()
}

fn limiters(text: &str) -> Limiters {
    read(text).limiters(&MemoryStore::new()).unwrap()
}

/// What is left of the quota of a key.
async fn left(limiter: &Limiter) -> u64 {
    limiter.peek("key").await.unwrap().remaining()
}

#[tokio::test]
async fn counts_are_kept_where_the_algorithm_stays() {
    let server = RedisServer::start();
    for url in ["memory:", &(server.url() + "?deadline=30s")] {
        let store = store::connect(url).await.unwrap();
        let first = read(
            r#"
            quota = { algorithm = "token-bucket", quota = "10/h" }
            refill = { algorithm = "token-bucket", quota = "10/h" }
            buckets = { algorithm = "sliding-window", quota = "10/h" }
            algorithm = { algorithm = "fixed-window", quota = "10/h" }
            same = { algorithm = "sliding-log", quota = "10/h" }
            "#,
        );
        let names = ["quota", "refill", "buckets", "algorithm", "same"];
        let limiters = first.limiters(&store).unwrap();
        let held = names.map(|name| limiters.get(name).unwrap());
        for limiter in &held {
            assert!(limiter.check("key").cost(8).await.unwrap().is_allowed());
        }
        let second = read(
            r#"
            quota = { algorithm = "token-bucket", quota = "20/h" }
            refill = { algorithm = "token-bucket", quota = "10/h", refill = "interval" }
            buckets = { algorithm = "sliding-window", quota = "10/h", buckets = 4 }
            algorithm = { algorithm = "sliding-log", quota = "10/h" }
            same = { algorithm = "sliding-log", quota = "10/h" }
            added = { algorithm = "leaky-bucket", quota = "10/h" }
            "#,
        );
        limiters.reload(&second).unwrap();
        for (limiter, remaining) in held.iter().zip([12, 2, 2, 10, 2]) {
            assert_eq!(left(limiter).await, remaining, "{url}: {}", limiter.name());
            let limit = second.get(limiter.name()).unwrap();
            assert_eq!((limiter.algorithm(), limiter.quota()), (limit.algorithm(), limit.quota()));
            let decision = limiter.check("key").await.unwrap();
            assert_eq!(decision.remaining(), remaining - 1, "{url}: {}", limiter.name());
        }
        assert_eq!(limiters.get("added").unwrap().algorithm(), Algorithm::LeakyBucket);
    }
}

#[tokio::test]
async fn a_block_ends_with_another_algorithm() {
    let server = RedisServer::start();
    for url in ["memory:", &(server.url() + "?deadline=30s")] {
        let store = store::connect(url).await.unwrap();
        let first = read("api = { algorithm = 'fixed-window', quota = '10/h' }");
        let limiters = first.limiters(&store).unwrap();
        let api = limiters.get("api").unwrap();
        assert!(api.block("key", Duration::from_secs(60)).await.unwrap().blocked_for().is_some());
        assert!(!api.check("key").await.unwrap().is_allowed());
        limiters.reload(&read("api = { algorithm = 'sliding-log', quota = '10/h' }")).unwrap();
        let peeked = api.peek("key").await.unwrap();
        let decision = api.check("key").await.unwrap();
        assert!(peeked.allows() && peeked.blocked_for().is_none(), "{url}");
        assert!(decision.is_allowed() && !decision.is_blocked(), "{url}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_that_is_the_first_call_after_a_change_of_the_algorithm_stays_in_memory() {
    let limiters = limiters("api = { algorithm = 'fixed-window', quota = '10/s' }");
    let api = limiters.get("api").unwrap();
    assert!(api.check("key").await.unwrap().is_allowed());
    limiters.reload(&read("api = { algorithm = 'sliding-log', quota = '10/s' }")).unwrap();
    api.block("key", Duration::from_secs(3_600)).await.unwrap();
    advance(Duration::from_secs(2)).await;
    for other in 0_u32..20_000 {
        assert!(api.check(other).await.unwrap().is_allowed());
    }
    assert!(api.check("key").await.unwrap().is_blocked());
}

#[tokio::test]
async fn an_observer_gets_a_limiter_while_limits_are_reloaded() {
    #[derive(Default)]
    struct Getter(OnceLock<Limiters>, Mutex<Vec<Quota>>);

    impl Observer for Getter {
        fn on_event(&self, event: &Event<'_>) {
            if let Event::SettingsChanged { limiter, .. } = event {
                let quota = self.0.get().unwrap().get(limiter).unwrap().quota();
                self.1.lock().unwrap().push(quota);
            }
        }

        fn of_limiter(&self, added: &'static str) -> Option<Arc<dyn Observer>> {
            let limiters = self.0.get()?;
            assert!(limiters.get("api").is_ok() && limiters.get(added).is_err());
            None
        }
    }

    let getter = Arc::new(Getter::default());
    let store = observed(MemoryStore::new(), getter.clone());
    let first = read("api = { algorithm = 'fixed-window', quota = '10/s' }");
    let limiters = first.limiters(&store).unwrap();
    assert!(getter.0.set(limiters.clone()).is_ok());
    let next = read(
        "api = { algorithm = 'fixed-window', quota = '20/s' }\n\
         login = { algorithm = 'fixed-window', quota = '5/min' }",
    );
    limiters.reload(&next).unwrap();
    assert_eq!(limiters.get("login").unwrap().quota(), Quota::per_minute(5));
    assert_eq!(*getter.1.lock().unwrap(), [Quota::per_second(20)]);
}

#[tokio::test]
async fn a_limit_that_is_removed_rejects_the_reload_or_stays() {
    let limiters = limiters(
        "api = { algorithm = 'sliding-log', quota = '10/h' }\n\
         login = { algorithm = 'sliding-log', quota = '5/h' }",
    );
    let [api, login] = ["api", "login"].map(|name| limiters.get(name).unwrap());
    let renamed = read(
        "api = { algorithm = 'sliding-log', quota = '20/h' }\n\
         logins = { algorithm = 'sliding-log', quota = '6/h' }",
    );
    let error = limiters.reload(&renamed).unwrap_err();
    assert!(matches!(&error, ConfigError::LimitsRemoved { names, .. } if names == &["login"]));
    assert_eq!(
        error.to_string(),
        "the limit \"login\" was removed, but a limiter uses it; nothing changed: restore it, or \
         call `reload_keeping_removed`"
    );
    let text = limiters.reload(&Limits::default()).unwrap_err().to_string();
    assert!(text.starts_with("the limits \"api\", \"login\" were removed"), "{text}");
    assert_eq!((api.quota(), login.quota()), (Quota::per_hour(10), Quota::per_hour(5)));
    assert!(limiters.get("logins").is_err(), "nothing changes");

    limiters.reload_keeping_removed(&renamed).unwrap();
    assert_eq!((api.quota(), login.quota()), (Quota::per_hour(20), Quota::per_hour(5)));
    assert_eq!(left(&limiters.get("login").unwrap()).await, 5);
    let rest = read("login = { algorithm = 'sliding-log', quota = '7/h' }");
    limiters.reload_keeping_removed(&rest).unwrap();
    assert_eq!((api.quota(), login.quota()), (Quota::per_hour(20), Quota::per_hour(7)));
}

#[tokio::test]
async fn a_new_name_that_is_taken_changes_nothing() {
    let store = MemoryStore::new();
    let limits = read("api = { algorithm = 'sliding-log', quota = '10/h' }");
    let limiters = limits.limiters(&store).unwrap();
    let other = limits.get("api").unwrap().limiter("sms", store.clone()).unwrap();
    let more = read(
        "api = { algorithm = 'sliding-log', quota = '20/h' }\n\
         mail = { algorithm = 'sliding-log', quota = '20/h' }\n\
         sms = { algorithm = 'sliding-log', quota = '20/h' }",
    );
    let error = limiters.reload(&more).unwrap_err();
    assert!(matches!(error, ConfigError::NameTaken { limiter, .. } if limiter == "sms"));
    assert_eq!(limiters.get("api").unwrap().quota(), Quota::per_hour(10));
    assert!(limiters.get("mail").is_err());
    drop(other);
    limiters.reload(&more).unwrap();
    assert_eq!(limiters.get("mail").unwrap().quota(), Quota::per_hour(20));
}

#[tokio::test]
async fn a_layer_follows_its_limiter_and_its_headers_report_the_new_quota() {
    let limiters = limiters("api = { algorithm = 'sliding-log', quota = '2/h' }");
    let layer = RateLimitLayer::new(limiters.get("api").unwrap(), key::Global);
    let send = async || {
        let service = layer.layer(counting(&Arc::default()));
        let response = service.oneshot(get(&[])).await.unwrap();
        (response.status().as_u16(), items(&response, "ratelimit-policy"))
    };
    let policy = |limit| vec![item("api", &[("q", limit), ("w", 3_600)])];
    assert_eq!(send().await, (200, policy(2)));
    assert_eq!(send().await, (200, policy(2)));
    assert_eq!(send().await, (429, policy(2)));
    limiters.reload(&read("api = { algorithm = 'sliding-log', quota = '3/h' }")).unwrap();
    assert_eq!(send().await, (200, policy(3)));
    assert_eq!(send().await, (429, policy(3)));
    limiters.reload(&read("api = { algorithm = 'token-bucket', quota = '5/h burst 1' }")).unwrap();
    assert_eq!(send().await, (200, policy(5)));
}
