//! Tower middleware that limits requests per key, with counts in memory or in Redis, so that all
//! replicas enforce one limit.
//!
//! ```
//! use axum::{Router, routing::get};
//! use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
//!
//! let quota = Quota::per_second(10).burst(20);
//! let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
//! let app: Router = Router::new()
//!     .route("/", get(|| async { "hello" }))
//!     .layer(RateLimitLayer::new(limiter, key::PeerIp));
//! ```
//!
//! # Items
//!
//! | group | items |
//! |---|---|
//! | start here | [`RateLimitLayer`], [`Limiter`], [`Quota`], [`Algorithm`], [`MemoryStore`], [`key`] |
//! | limits | [`Limiter`], [`Decision`], [`KeyState`], [`Reservation`], [`Charge`], [`Rule`], [`Key`], [`Refill`], [`Source`], [`Error`] |
//! | HTTP | [`RateLimitLayer`], [`KeyExtractor`], [`Rejection`], [`RequestError`], [`MissingKey`], [`Headers`], [`FailurePolicy`] |
//! | other requests | [`RateLimitLayer::custom`], [`Custom`] |
//! | stores | [`MemoryStore`], [`WhenFull`], [`RedisStore`], [`RedisConfig`], [`Health`], [`StoreError`] |
//! | metrics and events | [`observe`], [`observe::Observer`], [`observe::Metrics`], [`observe::TopDenied`] |
//! | configuration | [`Limits`], [`Limit`], [`Limiters`], [`WhenRemoved`], [`ConfigError`] |
//! | Redisson | [`redisson::RateLimiter`] |
//!
//! The pages of the [`guide`] describe [algorithms](guide::algorithms), [keys](guide::keys),
//! [several limits](guide::several_limits), [waiting](guide::waiting), [responses](guide::http),
//! [layers](guide::layers), [configuration](guide::configuration),
//! [Redis operation](guide::operation), [servers](guide::servers), [Redis
//! connections](guide::connections), [Redisson](guide::redisson) and
//! [benchmarks](guide::benchmarks).
//!
//! # Glossary
//!
//! | term | meaning |
//! |---|---|
//! | key | the subject of a limit, such as a client address; each key has its own count |
//! | quota | `limit` units per `window`; after idling, up to `burst` units at once |
//! | cost | the units that a request uses, 1 by default |
//! | decision | the result of a check: allowed or denied, the units that remain, the time to wait |
//! | denial | a decision against a request: the quota has too few units left |
//! | rejection | the layer's response in place of that of the service, after a denial or an error |
//! | reservation | the future instant at which a waiting request may proceed; its units are spent |
//! | charge | the limits, keys and costs of one request: all of them are charged, or none |
//! | rule | the closure or type that returns the charge of each request |
//! | store | keeps the state of all keys, and decides in one atomic step |
//!
//! # In tests
//!
//! The clock of the memory store is [`tokio::time::Instant`]. With
//! `#[tokio::test(start_paused = true)]`, limits follow `tokio::time::advance` and `sleep`.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `axum` | [`key::PeerIp`] reads axum's `ConnectInfo<SocketAddr>`, [`key::Route`] is its `MatchedPath`, and [`Rejection`] is a response |
//! | `metrics` | [`observe::Metrics`]: counters, gauges and histograms |
//! | `redis` | [`RedisStore`] |
//! | `redisson` | [`redisson`]: a limiter that Java services share; implies `redis` |
//! | `serde` | [`Limits`]: named limits from TOML, JSON and other formats; [`Quota`] as text |
//! | `tls-rustls`, `tls-rustls-webpki-roots` | `rediss://` URLs; imply `redis` |
//! | `tracing` | [events](guide::operation#events) about denials, misconfigured services and failures of Redis |
//! | `uuid` | `Uuid` as a key |

#![cfg_attr(docsrs, feature(doc_cfg))]
// The crate docs link to items of all features.
#![cfg_attr(
    not(all(feature = "axum", feature = "metrics", feature = "redisson", feature = "serde")),
    allow(rustdoc::broken_intra_doc_links)
)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod algorithm;
#[cfg(feature = "serde")]
mod config;
mod decision;
mod error;
#[cfg(any(doc, doctest))]
pub mod guide;
mod keys;
mod limiter;
mod middleware;
pub mod observe;
mod quota;
#[cfg(feature = "redisson")]
pub mod redisson;
pub mod store;
mod sync;
mod time;

#[cfg(feature = "serde")]
pub use config::{Limit, Limiters, Limits, WhenRemoved};
#[cfg(doc)]
#[doc(no_inline)]
pub use guide::operation;
#[doc(inline)]
pub use middleware::extractor as key;
#[cfg(feature = "redis")]
pub use redis;
#[cfg(feature = "tls-rustls")]
pub use store::Tls;
#[cfg(feature = "redis")]
pub use store::{RedisConfig, RedisStore};
pub use {
    algorithm::{Algorithm, Refill},
    decision::{Decision, KeyState, Source},
    error::{ConfigError, Error, StoreError},
    keys::Key,
    limiter::{AnyLimiter, Charge, FailurePolicy, Limiter, Reservation},
    middleware::{
        Custom, Headers, Http, IntoCharge, IntoCost, IntoMatch, IntoRejection, KeyExtractor,
        MissingKey, Protocol, RateLimit, RateLimitLayer, Rejection, RejectionBody, RequestError,
        Reset, ResponseBody, ResponseFuture, Rule,
    },
    quota::{Quota, QuotaError},
    store::{Health, MemoryStore, Store, WhenFull},
};
