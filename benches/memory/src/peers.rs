//! Other rate limiters, with the same quotas.

use std::{
    future::{self, Ready},
    hash::BuildHasher,
    hint::black_box,
    num::NonZeroU32,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::Body;
use foldhash::fast::RandomState;
use futures_util::future::Either;
use governor::{
    RateLimiter,
    clock::{Clock, QuantaInstant},
    middleware::{NoOpMiddleware, StateInformationMiddleware},
    state::keyed::DefaultKeyedStateStore,
};
use hashbrown::HashTable;
use http::{Request, Response, StatusCode};
use quota::{QuotaPolicy, QuotaPool, RefillRate};
use throttle_kit::InMemoryBackend;
use tower::limit::{RateLimit, rate::Rate};
use tower_governor::{
    GovernorError, GovernorLayer, governor::GovernorConfigBuilder, key_extractor::KeyExtractor,
};
use tower_layer::Layer;
use tower_ratelimit::{Limiter, Quota};
use tower_service::Service;

use crate::API_KEY;

pub type Governor<C> =
    RateLimiter<String, DefaultKeyedStateStore<String>, C, NoOpMiddleware<<C as Clock>::Instant>>;

pub fn governor<C: Clock>(quota: Quota, clock: C) -> Governor<C> {
    let burst = NonZeroU32::new(quota.burst_size() as u32).expect("a burst is not zero");
    let quota = governor::Quota::with_period(period(quota)).expect("a period is not zero");
    RateLimiter::dashmap_with_clock(quota.allow_burst(burst), clock)
}

/// The time in which a token is refilled.
fn period(quota: Quota) -> Duration {
    quota.window() / quota.limit() as u32
}

/// A rate limiter that decides at once.
pub trait Check: Sync {
    // governor looks up a key by a reference to the type that it stores.
    #[allow(clippy::ptr_arg)]
    fn check(&self, key: &String) -> bool;

    /// Checks each key.
    fn check_all(&self, keys: &[String]) {
        for key in keys {
            black_box(self.check(black_box(key)));
        }
    }
}

impl Check for Limiter {
    fn check(&self, key: &String) -> bool {
        self.check(key).now().is_ok_and(|decision| decision.is_allowed())
    }

    fn check_all(&self, keys: &[String]) {
        crate::check_all(self, keys);
    }
}

impl<C: Clock + Sync> Check for Governor<C> {
    fn check(&self, key: &String) -> bool {
        self.check_key(key).is_ok()
    }
}

pub fn quota_pool(quota: Quota) -> QuotaPool {
    let rate = quota.limit() as f64 / quota.window().as_secs_f64();
    let policy = QuotaPolicy::new().set_capacity(quota.burst_size() as f64);
    QuotaPool::new(policy.set_refill_rate(RefillRate::per_sec(rate)), quota.burst_size())
}

impl Check for QuotaPool {
    fn check(&self, key: &String) -> bool {
        // Without the tokens that are left, which `consume` returns.
        QuotaPool::check(self, key, 1)
    }
}

/// throttle-kit's store in memory.
pub struct ThrottleKit(throttle_kit::RateLimiter<InMemoryBackend>);

impl ThrottleKit {
    pub fn new(quota: Quota) -> Self {
        let burst = quota.burst_size() as u32;
        let quota = throttle_kit::Quota::from_parts(period(quota), burst);
        Self(throttle_kit::RateLimiter::new(quota, InMemoryBackend::new()))
    }
}

impl Check for ThrottleKit {
    fn check(&self, key: &String) -> bool {
        crate::ready(self.0.check(key)).allowed
    }
}

#[derive(Clone, Debug)]
pub struct ApiKey;

impl KeyExtractor for ApiKey {
    type Key = String;

    fn extract<B>(&self, request: &Request<B>) -> Result<String, GovernorError> {
        let value = request.headers().get(API_KEY).and_then(|value| value.to_str().ok());
        value.map(str::to_owned).ok_or(GovernorError::UnableToExtractKey)
    }
}

pub fn governor_layer(quota: Quota) -> GovernorLayer<ApiKey, NoOpMiddleware<QuantaInstant>, Body> {
    GovernorLayer::new(builder(quota).finish().expect("a config"))
}

pub fn governor_layer_with_headers(
    quota: Quota,
) -> GovernorLayer<ApiKey, StateInformationMiddleware, Body> {
    GovernorLayer::new(builder(quota).use_headers().finish().expect("a config"))
}

fn builder(quota: Quota) -> GovernorConfigBuilder<ApiKey, NoOpMiddleware<QuantaInstant>> {
    GovernorConfigBuilder::default()
        .period(period(quota))
        .burst_size(quota.burst_size() as u32)
        .key_extractor(ApiKey)
}

/// pingora's estimate of a rate, which has no promise: it counts in a sketch that all keys share.
pub struct Approximate {
    rate: pingora_limits::rate::Rate,
    limit: isize,
}

impl Approximate {
    pub fn new(quota: Quota) -> Self {
        let rate = pingora_limits::rate::Rate::new(quota.window());
        Self { rate, limit: quota.limit() as isize }
    }
}

impl Check for Approximate {
    fn check(&self, key: &String) -> bool {
        self.rate.observe(key, 1) <= self.limit
    }
}

/// The least that a check can do: one hash, one lock, one look-up, one reading of the clock, and a
/// token bucket without a decision to read. Nothing bounds its memory.
pub struct Least {
    parts: Box<[Part]>,
    hasher: RandomState,
    epoch: Instant,
    /// Read instead of the system's clock, if there is one, with its reading at the start.
    counter: Option<(quanta::Clock, u64)>,
    /// Tokens per microsecond.
    rate: f64,
    burst: f64,
}

#[repr(align(64))]
struct Part(Mutex<HashTable<(String, [f64; 2])>>);

impl Least {
    pub fn new(quota: Quota) -> Self {
        let rate = quota.limit() as f64 / quota.window().as_micros() as f64;
        let part = || Part(Mutex::new(HashTable::new()));
        let parts = std::iter::repeat_with(part).take(64).collect();
        let (hasher, burst) = (RandomState::default(), quota.burst_size() as f64);
        Self { parts, hasher, epoch: Instant::now(), counter: None, rate, burst }
    }

    /// Reads the counter of the processor.
    pub fn with_counter(quota: Quota) -> Self {
        let clock = quanta::Clock::new();
        let start = clock.raw();
        Self { counter: Some((clock, start)), ..Self::new(quota) }
    }

    fn now(&self) -> f64 {
        match &self.counter {
            // About microseconds: the rate of the counter changes no work.
            Some((clock, start)) => ((clock.raw() - start) >> 11) as f64,
            None => self.epoch.elapsed().as_micros() as f64,
        }
    }

    pub fn check(&self, key: &str) -> bool {
        let hash = self.hasher.hash_one(key);
        let now = self.now();
        let part = &self.parts[(hash >> 32) as usize % self.parts.len()];
        let mut part = part.0.lock().expect("no panic");
        let Some((_, [at, debt])) = part.find_mut(hash, |(known, _)| known == key) else {
            let rehash = |(known, _): &(String, _)| self.hasher.hash_one(&**known);
            part.insert_unique(hash, (key.to_owned(), [now, 1.0]), rehash);
            return true;
        };
        *debt = (*debt - (now - *at).max(0.0) * self.rate).max(0.0);
        *at = now;
        let admits = *debt + 1.0 <= self.burst;
        if admits {
            *debt += 1.0;
        }
        admits
    }
}

impl Check for Least {
    fn check(&self, key: &String) -> bool {
        Least::check(self, key)
    }
}

/// The least that a layer can do: it finds the key, asks [`Least`], and passes the request on.
#[derive(Clone)]
pub struct LeastLayer(Arc<Least>);

pub fn least_layer(quota: Quota) -> LeastLayer {
    LeastLayer(Arc::new(Least::new(quota)))
}

impl<S> Layer<S> for LeastLayer {
    type Service = LeastService<S>;

    fn layer(&self, inner: S) -> LeastService<S> {
        LeastService { least: self.0.clone(), inner }
    }
}

#[derive(Clone)]
pub struct LeastService<S> {
    least: Arc<Least>,
    inner: S,
}

impl<S> Service<Request<Body>> for LeastService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Future: Unpin>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let key = request.headers().get(API_KEY).and_then(|value| value.to_str().ok());
        if key.is_some_and(|key| self.least.check(key)) {
            return Either::Left(self.inner.call(request));
        }
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        Either::Right(future::ready(Ok(response)))
    }
}

/// tower's own limit, which all requests share, and which no denial leaves: requests wait.
pub fn tower_rate_limit<S>(inner: S) -> RateLimit<S> {
    RateLimit::new(inner, Rate::new(u64::MAX, Duration::from_secs(1)))
}
