//! Tower middleware that limits requests per key, with the counts in memory or in Redis, so that every
//! replica enforces one limit.

#![cfg_attr(docsrs, feature(doc_cfg))]
// Only `RedisStore` runs the scripts.
#![cfg_attr(not(feature = "redis"), allow(dead_code))]

mod algorithm;
mod body;
mod decision;
mod error;
mod future;
pub mod key;
mod layer;
mod limiter;
mod protocol;
mod quota;
mod response;
mod service;
mod store;

#[cfg(feature = "redis")]
pub use store::RedisStore;
pub use {
    algorithm::{Algorithm, Refill},
    body::ResponseBody,
    decision::Decision,
    error::{ConfigError, Error, RequestError, StoreError},
    future::ResponseFuture,
    key::{Key, KeyExtractor},
    layer::RateLimitLayer,
    limiter::Limiter,
    protocol::{Custom, Exchange, Http, IntoCost, MissingKey, Protocol, Rejection},
    quota::{Quota, QuotaError},
    service::RateLimit,
    store::{MemoryStore, Store},
};
