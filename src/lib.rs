//! Per-key rate limiting for Tower services. Counters live in process memory, or in Redis, where
//! all replicas share one limit.
//!
//! # Three set-ups
//!
//! **One process, a limit for each client address.** With axum, in memory:
//!
//! ```no_run
//! use axum::{Router, routing::get};
//! use std::net::SocketAddr;
//! use tower_ratelimit::{Quota, RateLimitLayer};
//!
//! #[tokio::main]
//! async fn main() -> std::io::Result<()> {
//!     let layer = RateLimitLayer::per_ip(Quota::per_second(10).burst(20));
//!     let app = Router::new().route("/", get(async || "hello")).layer(layer);
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     // `per_ip` needs the addresses of the clients. Behind a proxy, use `key::ClientIp`.
//!     axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
//! }
//! ```
//!
//! **Several replicas, a limit for each API key**, behind authentication: a client that invents
//! keys gets a full quota for each. The counters are in Redis, with hashes of the keys. While Redis
//! fails, each replica enforces its share:
//!
//! ```no_run
//! use axum::{Router, routing::get};
//! use tower_ratelimit::{
//!     Algorithm, FailurePolicy, Limiter, Quota, RateLimitLayer, RedisStore, key,
//! };
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let store = RedisStore::connect("redis://127.0.0.1/?prefix=shop&deadline=50ms").await?;
//!     let quota = Quota::per_minute(600).burst(50);
//!     let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
//!     let secret = std::env::var("RATE_LIMIT_SECRET")?; // the same in all replicas
//!     let layer = RateLimitLayer::new(limiter, key::header("x-api-key").hashed(secret))
//!         .on_failure(FailurePolicy::local(0.25)); // four replicas
//!     let app = Router::new().route("/", get(async || "hello")).layer(layer);
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     Ok(axum::serve(listener, app).await?)
//! }
//! ```
//!
//! **A client of a third-party API**, which allows 20 requests per second. Callers wait for their
//! turn, in order, over all processes:
//!
//! ```no_run
//! use tower_ratelimit::{Algorithm, FailurePolicy, Limiter, Quota, RedisStore};
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let store = RedisStore::connect("redis://127.0.0.1/?prefix=jobs").await?;
//!     let quota = Quota::per_second(18).burst(1); // at most 18 + 1 in any second
//!     let vendor = Limiter::new("vendor", store, Algorithm::token_bucket(), quota)
//!         .on_failure(FailurePolicy::Wait);
//!     for page in 1..=100 {
//!         let _ = vendor.acquire("vendor", 1).await?; // waits for its turn
//!         println!("get page {page}");
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Items
//!
//! | to | use |
//! |---|---|
//! | limit a service | [`RateLimitLayer`], [`key`]: which client a request is counted for |
//! | limit anything else | [`Limiter`], [`Key`], [`Decision`], [`Error`] |
//! | say how much is allowed | [`Quota`], [`Algorithm`] |
//! | charge several limits at once | [`Charge`] |
//! | charge a cost that is known later | [`Limiter::hold`], [`Permit`] in an [`Admission`] |
//! | wait yourself | [`Limiter::reserve`], [`Reservation`] in an [`Admission`] |
//! | keep the counters | [`MemoryStore`], [`RedisStore`] |
//! | adopt what a vendor says about its limit | [`Limiter::learn`], [`VendorState`] |
//! | serve requests while Redis is down | [`FailurePolicy`] |
//!
//! | module | contents |
//! |---|---|
//! | [`call`] | the futures of limiters and charges |
//! | [`layer`] | headers, rejections and their responses, rules, settlement by responses |
//! | [`store`] | a store that a URL chooses, health, the settings of Redis, errors of stores |
//! | [`config`] | limits in a configuration file, errors of settings |
//! | [`observe`] | events, metrics, the keys that are denied most |
//! | [`redisson`] | a limiter that Java services share |
//!
//! The [`guide`] has the documentation: the [quick start](guide::quick_start), [how it
//! works](guide::how_it_works), [choosing an algorithm](guide::algorithms), [eleven
//! programs to copy](guide::copy_one_of_these), [recipes](guide::recipes), [outgoing
//! calls](guide::outgoing), [Redis](guide::redis_connecting), [when Redis
//! fails](guide::redis_failures), [on call](guide::on_call), [incidents](guide::incidents),
//! [monitoring](guide::monitoring), [`limitctl`](guide::limitctl), [all settings](guide::settings)
//! and [troubleshooting](guide::troubleshooting).
//!
//! Import the items by name: with `use tower_ratelimit::*`, the module `config` hides the crate
//! `config`.
//!
//! # Glossary
//!
//! | term | meaning |
//! |---|---|
//! | key | the subject of a limit, such as a client address; each key has its own count |
//! | quota | `limit` units per `window`; after idling, up to `burst` units at once |
//! | cost | the units that a request uses, 1 by default |
//! | decision | the result of a check: allowed or denied, the units that remain, the time to wait |
//! | denial | a decision against a request: the quota has too few units left, or the key is blocked |
//! | forbidden | a client that is not let in at all, whatever its quota |
//! | rejection | the layer's response in place of the service's: the request is denied or forbidden, or has failed |
//! | hold | units that are taken now; how many of them are used is known later |
//! | permit | the handle of a hold, which ends it: settled, cancelled or dropped |
//! | reservation | the future instant at which a waiting request may proceed; its units are spent |
//! | charge | the limits, keys and costs of one request: all of them are charged, or none |
//! | rule | the closure or type that returns the charge of each request |
//! | store | keeps the state of all keys, and decides in one atomic step |
//!
//! # The runtime
//!
//! A check in memory needs no runtime. Waiting needs the timers of tokio, and a [`RedisStore`] its
//! timers and its I/O: see [the guide](guide::layers#what-needs-a-runtime). The target
//! `wasm32-unknown-unknown` has no clock, and is not supported.
//!
//! # In tests
//!
//! The clock of the memory store is `tokio::time::Instant`. With
//! `#[tokio::test(start_paused = true)]`, limits follow `tokio::time::advance` and `sleep`.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `axum` (default) | [`key::PeerIp`] reads axum's `ConnectInfo<SocketAddr>`, [`key::Route`](struct@key::Route) is its `MatchedPath`, and [`layer::Rejection`] is a response |
//! | `cpu-counter` (default) | [`MemoryStore`](MemoryStore#the-clock-of-the-processor) reads the counter of the processor on x86-64, where the kernel does: faster checks |
//! | `metrics` | [`observe::metrics`](fn@observe::metrics): counters, gauges and histograms |
//! | `redis` | [`RedisStore`] |
//! | `redis-1` | [`RedisStore::from_connection`], for connections of the crate `redis`, version 1.8 or a later 1.x; implies `redis` |
//! | `redisson` | [`redisson`]; implies `redis` |
//! | `serde` | [`config::Limits`]: named limits from TOML, JSON and other formats; [other settings](guide::configuration#settings-in-structs-of-your-own), such as [`Quota`] as text; [results](guide::configuration#results-as-json), such as [`Decision`] |
//! | `tls-rustls` | `rediss://` URLs, with the crypto provider `ring` if the application has installed no other; implies `redis` |
//! | `tls-rustls-no-provider` | the same without `ring`: the application installs a crypto provider |
//! | `tls-rustls-webpki-roots` | the root certificates of `webpki-roots`, in addition to those of the system; implies `tls-rustls-no-provider` |
//! | `tracing` | [events](guide::monitoring#events) about denials, misconfigured services and failures of Redis |
//! | `uuid` | `Uuid` as a key |

// The mark of `docs/pictures`, as docs.rs serves no pictures.
#![doc(html_logo_url = "data:image/svg+xml;base64,\
     PHN2ZyB4bWxucz0naHR0cDovL3d3dy53My5vcmcvMjAwMC9zdmcnIHZpZXdCb3g9JzAgMCA2NCA2NCcgc3Ryb2tl\
     LXdpZHRoPSc2Jz48cmVjdCB3aWR0aD0nNjQnIGhlaWdodD0nNjQnIHJ4PScxNCcgZmlsbD0nIzBhNWZiNCcvPjxw\
     YXRoIHN0cm9rZT0nI2ZmZicgZD0nTTEwIDQ4aDhNMjIgNDhoOE0yMiAzOWg4TTM0IDQ4aDhNMzQgMzloOE0zNCAz\
     MGg4TTQ2IDQ4aDhNNDYgMzloOE00NiAzMGg4Jy8+PHBhdGggc3Ryb2tlPScjZmZiNDU0JyBkPSdNNDYgMTdoOE00\
     NiA4aDgnLz48cGF0aCBkPSdNOCAyMy41aDQ4JyBzdHJva2U9JyNmZmYnIHN0cm9rZS13aWR0aD0nMicgc3Ryb2tl\
     LWRhc2hhcnJheT0nNCAzJy8+PC9zdmc+")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(clippy::missing_panics_doc)]
// The crate docs link to items of all features.
#![cfg_attr(
    not(all(feature = "axum", feature = "metrics", feature = "redisson", feature = "serde")),
    allow(rustdoc::broken_intra_doc_links)
)]

#[cfg(all(target_family = "wasm", target_os = "unknown"))]
compile_error!(
    "tower-ratelimit cannot be built for this target: `std::time::Instant` panics there, and \
     limits need a clock; build for a target with a clock"
);

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod config;
mod decision;
mod error;
#[cfg(any(doc, doctest))]
pub mod guide;
mod keys;
mod limiter;
mod middleware;
pub mod observe;
#[cfg(feature = "redisson")]
pub mod redisson;
pub mod store;
mod sync;
mod time;

pub(crate) use tower_ratelimit_engine::{algorithm, quota};

pub mod call {
    //! The calls of a [`Limiter`](crate::Limiter) or a [`Charge`](crate::Charge): futures, whose
    //! methods set what they do before they are awaited.

    pub use crate::limiter::{Acquire, Check, Hold};
}

pub mod layer {
    //! The types around [`RateLimitLayer`](crate::RateLimitLayer): headers, rejections and their
    //! responses, settlement, rules, and the service behind a layer.
    //!
    //! | to | use |
    //! |---|---|
    //! | report the state of the quota to clients | [`Headers`] |
    //! | reject requests, in a rule or a key extractor | [`RequestError`] |
    //! | handle requests without a key | [`MissingKey`] |
    //! | write other responses to rejected requests | [`Rejection`], [`ResponseBody`], and [`RateLimitLayer::map_rejection`](crate::RateLimitLayer::map_rejection) |
    //! | look up the charge of a request in an `async fn` | [`Rule`] |
    //! | settle what a request holds, in the service | [`Settle`] |
    //! | settle it by the response | [`Meter`] and [`Usage`], for [`RateLimitLayer::settle_by`](crate::RateLimitLayer::settle_by) |
    //! | settle it by the tokens of a language model | [`TokenMeter`] and [`Tokens`] |
    //! | name the layer of requests that are not HTTP | `RateLimitLayer<`[`Custom`]`<Req, Res>>` |
    //! | name a limited service, and the body of its responses | [`RateLimit`], [`ResponseBody`] |
    //!
    //! The page on [responses](crate::guide::http) shows them.

    pub use crate::middleware::{
        Custom, Headers, Meter, MissingKey, RateLimit, Rejection, RequestError, ResponseBody, Rule,
        Settle, TokenMeter, Tokens, Usage,
    };
}

#[doc(inline)]
pub use middleware::extractor as key;
#[cfg(feature = "redis")]
pub use store::RedisStore;
pub use {
    algorithm::Algorithm,
    decision::Decision,
    error::Error,
    keys::Key,
    limiter::{Admission, Charge, FailurePolicy, Limiter, Permit, Reservation, VendorState},
    middleware::RateLimitLayer,
    quota::Quota,
    store::MemoryStore,
};
