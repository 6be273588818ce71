//! Observability: events of limiters, layers and stores, and ready-made observers.
//!
//! | observer | what it does |
//! |---|---|
//! | [`metrics`](fn@metrics), with the feature `metrics` | counts for Prometheus and other systems |
//! | [`TopDenied`] | lists the keys that are denied most |
//! | a closure, or a type that implements [`Observer`] | feeds any other system |
//!
//! # Where to add an observer
//!
//! To the store, before limiters are made over it: [`MemoryStore::add_observer`],
//! `RedisStore::add_observer` or [`AnyStore::add_observer`]. Limiters take the observers of their
//! store when they are made, and keep them.
//!
//! | to observe | add the observer |
//! |---|---|
//! | all limiters of a store, their layers, and the store itself | to the store |
//! | one limiter of several | to the store, and compare [`Event::limiter`]; or use [`Observer::of_limiter`] |
//! | the requests that a [`Rule`](crate::layer::Rule) rejects, which have no limiter | to the store, and to the layer by [`RateLimitLayer::observe`](crate::RateLimitLayer::observe) |
//!
//! Without an observer, a check only tests a pointer. The feature `tracing` also checks, on each
//! denial and each Redis call, whether the subscriber records the event.
//!
//! # Examples
//!
//! ```
//! use std::sync::{Arc, atomic::{AtomicU64, Ordering::Relaxed}};
//! use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, observe::Event};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_ratelimit::Error> {
//! static DENIALS: AtomicU64 = AtomicU64::new(0);
//!
//! let store = MemoryStore::new();
//! store.add_observer(Arc::new(|event: &Event<'_>| match event {
//!     Event::Decided { decision, .. } if !decision.is_allowed() => {
//!         DENIALS.fetch_add(1, Relaxed);
//!     }
//!     _ => {}
//! }));
//! let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1));
//! limiter.check("alice").await?;
//! limiter.check("alice").await?;
//! assert_eq!(DENIALS.load(Relaxed), 1);
//! # Ok(())
//! # }
//! ```
//!
//! [`AnyStore::add_observer`]: crate::store::AnyStore::add_observer
//! [`MemoryStore::add_observer`]: crate::MemoryStore::add_observer

mod event;
pub(crate) mod log;
#[cfg(feature = "metrics")]
mod metrics;
mod observer;
mod top_denied;

#[cfg(feature = "metrics")]
pub use self::metrics::{metrics, metrics_of};
pub(crate) use self::observer::{LimiterObservers, Observers};
pub use self::{
    event::Event,
    observer::Observer,
    top_denied::{DeniedKey, TopDenied},
};
