//! Tower middleware that limits requests per key, with the counts in memory or in Redis, so that every
//! replica enforces one limit.
//!
//! ```
//! use axum::{Router, routing::get};
//! use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
//!
//! let quota = Quota::per_second(10).burst(20);
//! let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
//! let app: Router = Router::new()
//!     .route("/", get(|| async { "hello" }))
//!     .layer(RateLimitLayer::new(limiter, key::Header::new("x-api-key")));
//! ```
//!
//! * A [`Quota`] says how much is allowed, an [`Algorithm`] how it is counted.
//! * A [`Limiter`] decides about keys. It knows no HTTP, and is useful alone. Its counts are in a
//!   [`MemoryStore`], or in a `RedisStore` (feature `redis`) that many processes share.
//! * A request over the quota is denied, or [waits for its turn](Limiter::try_acquire).
//! * A [`Charge`] is what a request costs: one limit, or several at once, all or nothing. A [`Rule`] says it for
//!   each request.
//! * A [`RateLimitLayer`] around a service finds the [`key`] of each request, asks the limiter, and answers
//!   in the place of the service if it must.
//! * A [`Decision`] is the limiter's answer, and in the extensions of requests and responses.
//!
//! # Differences from `tower::limit`
//!
//! `tower::limit::RateLimit` delays all requests to one instance of a service, whoever they are from. This
//! one counts per key, over all clones, connections and replicas, and refuses instead of delaying, unless
//! [`max_wait`](RateLimitLayer::max_wait) or a [leaky bucket](Algorithm::LeakyBucket) lets requests wait. It is
//! always ready, and asks the service for readiness after the decision, so that a rejection never waits for the
//! service. Put `tower::limit::ConcurrencyLimit`, `LoadShed` and `Buffer` inside of this layer: a `ConcurrencyLimit`
//! outside gives permits to requests that wait or are rejected, a `LoadShed` outside never sheds, and a `Buffer` outside
//! never fills. See [readiness](RateLimitLayer#readiness).
//!
//! # In tests
//!
//! The memory store's clock is [`tokio::time::Instant`]: with `#[tokio::test(start_paused = true)]`, limits
//! refill as `tokio::time::advance` and `sleep` say, without waiting.
//!
//! # Features
//!
//! | feature | |
//! |---|---|
//! | `redis` | `RedisStore`, and `redisson`: a limiter that Java services share |
//! | `tls-rustls`, `tls-rustls-webpki-roots` | `rediss://` URLs |
//! | `tracing` | events when Redis stops answering, and when it answers again |
//! | `axum` | [`key::PeerIp`] reads axum's `ConnectInfo<SocketAddr>`, and `key::Route` is its `MatchedPath` |
//! | `serde` | `Limits`, named limits from TOML, JSON and the like; [`Quota`] as text |

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod algorithm;
#[cfg(feature = "serde")]
mod config;
mod decision;
mod error;
mod keys;
mod limiter;
mod middleware;
#[cfg(doc)]
#[doc = include_str!("../docs/operation.md")]
pub mod operation {}
mod quota;
#[cfg(feature = "redis")]
pub mod redisson;
mod store;
mod time;

#[cfg(feature = "serde")]
pub use config::{Limit, Limits};
#[doc(inline)]
pub use middleware::extractor as key;
#[cfg(feature = "redis")]
pub use redis;
#[cfg(feature = "tls-rustls")]
pub use store::Tls;
#[cfg(feature = "redis")]
pub use store::{Health, RedisConfig, RedisStore};
pub use {
    algorithm::{Algorithm, Refill},
    decision::{Decision, Source},
    error::{ConfigError, Error},
    keys::Key,
    limiter::{AnyLimiter, Charge, Limiter},
    middleware::{
        Custom, FailurePolicy, Headers, Http, IntoCharge, IntoCost, KeyExtractor, MissingKey,
        Protocol, RateLimit, RateLimitLayer, Rejection, RequestError, Reset, ResponseBody,
        ResponseFuture, Rule,
    },
    quota::{Quota, QuotaError},
    store::{MemoryStore, Store, StoreError, WhenFull},
};
