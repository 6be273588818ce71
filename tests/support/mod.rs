//! Helpers that several test binaries share: servers, load, requests and responses. No tests.

#![allow(dead_code)]

pub mod calls_back;
pub mod certificates;
pub mod clock;
pub mod cluster;
pub mod load;
pub mod log;
pub mod proxy;
pub mod recorder;
pub mod sentinel;
pub mod server;

use std::{
    convert::Infallible,
    error::Error,
    fmt::Debug,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response};
use http_body_util::BodyExt;
use sfv::{BareItem, ListEntry, Parser};
use tokio::sync::watch;
use tower::{Service, service_fn};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RedisStore,
    store::{Credentials, RedisConfig, StoreError, WhenFull},
};

use self::server::RedisServer;

pub const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window().buckets(4),
    Algorithm::token_bucket(),
    Algorithm::LeakyBucket,
];

pub fn in_memory(quota: Quota) -> Limiter {
    Limiter::new("default", MemoryStore::new(), Algorithm::token_bucket(), quota)
}

pub fn memory_store(max_keys: usize, when_full: WhenFull) -> MemoryStore {
    let store = MemoryStore::with_max_keys(max_keys);
    store.set_when_full(when_full);
    store
}

type Login = Result<Credentials, Box<dyn Error + Send + Sync>>;

/// A provider of credentials that a test replaces.
pub fn latest(
    receiver: watch::Receiver<Credentials>,
) -> impl Fn(Option<Credentials>) -> Pin<Box<dyn Future<Output = Login> + Send>> {
    move |known: Option<Credentials>| {
        let mut receiver = receiver.clone();
        Box::pin(async move {
            Ok(receiver.wait_for(|latest| known.as_ref() != Some(latest)).await?.clone())
        })
    }
}

pub async fn redis_store(server: &RedisServer) -> RedisStore {
    connected(config(&server.url())).await
}

/// A store that calls Redis for each check, because it remembers no denials.
pub async fn forgetful_store(server: &RedisServer) -> RedisStore {
    connected(config(&server.url()).denial_ttl(Duration::ZERO)).await
}

/// Settings with a deadline that a busy machine can keep.
pub fn config(url: &str) -> RedisConfig {
    RedisConfig::from_url(url).expect("a valid URL").deadline(Duration::from_secs(30))
}

/// A store with a deadline that a busy machine can keep, which is not connected.
pub fn lazy(url: &str) -> RedisStore {
    RedisStore::new(config(url)).expect("valid settings")
}

pub async fn connected(config: RedisConfig) -> RedisStore {
    let store = RedisStore::new(config).expect("valid settings");
    store.ping().await.expect("the server runs");
    store
}

/// A store whose keys have this prefix.
pub async fn with_prefix(server: &RedisServer, prefix: &str) -> RedisStore {
    let url = format!("{}?prefix={prefix}", server.url());
    connected(config(&url)).await
}

/// The permissions of a user in docs/redis-permissions.md, as arguments of `ACL`.
pub fn permissions(user: &str) -> Vec<String> {
    let page = include_str!("../../docs/redis-permissions.md");
    let start = format!("ACL SETUSER {user} ");
    let line = page.lines().find(|line| line.starts_with(&start)).expect("the page has the line");
    line.split_whitespace().skip(1).map(String::from).collect()
}

pub async fn limits(store: RedisStore) {
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(2));
    for is_allowed in [true, true, false] {
        assert_eq!(limiter.check("key").await.unwrap().is_allowed(), is_allowed);
    }
}

pub fn with_sources(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

/// A service that counts its calls.
pub fn counting(
    calls: &Arc<AtomicUsize>,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ use<> {
    let calls = calls.clone();
    service_fn(move |_| {
        calls.fetch_add(1, Ordering::SeqCst);
        async { Ok(Response::new(Body::empty())) }
    })
}

pub fn get(headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().uri("/");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

pub fn header<'a, B>(response: &'a Response<B>, name: &str) -> Vec<&'a str> {
    response.headers().get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
}

pub async fn json<B: http_body::Body<Error: Debug>>(response: Response<B>) -> serde_json::Value {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap()
}

/// The items of a structured field, with their parameters.
pub fn items<B>(response: &Response<B>, name: &str) -> Vec<(String, Vec<(String, i64)>)> {
    let text = header(response, name).join(", ");
    let list: sfv::List = Parser::new(&text).parse().unwrap();
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else { panic!("an inner list") };
            let BareItem::String(policy) = item.bare_item else { panic!("not a string") };
            let params = item.params.into_iter().map(|(key, value)| match value {
                BareItem::Integer(number) => (key.to_string(), number.into()),
                other => panic!("{other:?}"),
            });
            (policy.to_string(), params.collect())
        })
        .collect()
}

pub fn item(policy: &str, params: &[(&str, i64)]) -> (String, Vec<(String, i64)>) {
    let params = params.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    (policy.to_owned(), params)
}
