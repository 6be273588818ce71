//! This crate: each algorithm by `Limiter::check`, concurrency by a hold that ends at once, and the
//! limiter that Java services share. It
//! uses only what an older commit has, too, because it is also built with that commit.

use std::{
    collections::HashMap,
    mem,
    process::ExitCode,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use peers::{Error, Limiter, Quota, Subject, run};
use tower_ratelimit::{
    Admission, Algorithm, RedisStore,
    redisson::{RateLimiter, RateLimiterConfig},
};

/// Of a permit, long enough that none is renewed during a round.
const LIFETIME: Duration = Duration::from_secs(3_600);

fn main() -> ExitCode {
    run::<Ours>()
}

struct Ours {
    store: RedisStore,
    /// None: Redisson's form.
    algorithm: Option<Algorithm>,
    /// Permits that are never returned, in order to measure a hold alone.
    keeps_permits: bool,
}

impl Subject for Ours {
    type Limiter = OurLimiter;

    async fn connect(variant: &str, url: &str) -> Result<Self, Error> {
        let algorithm = match variant {
            "token-bucket" => Some(Algorithm::token_bucket()),
            "fixed-window" => Some(Algorithm::FixedWindow),
            "leaky-bucket" => Some(Algorithm::LeakyBucket),
            "sliding-window" => Some(Algorithm::sliding_window()),
            "sliding-window-10" => Some(Algorithm::sliding_window().buckets(10)),
            "sliding-log" => Some(Algorithm::SlidingLog),
            "concurrency" | "concurrency-kept" => Some(Algorithm::concurrency()),
            "redisson" => None,
            other => return Err(format!("no algorithm {other}").into()),
        };
        // A slow machine shows in the figures, and does not end the measurement.
        let mark = if url.contains('?') { '&' } else { '?' };
        let store = RedisStore::connect(&format!("{url}{mark}deadline=30s")).await?;
        Ok(Self { store, algorithm, keeps_permits: variant == "concurrency-kept" })
    }

    fn limiter(&self, quota: Quota) -> Result<OurLimiter, Error> {
        let store = self.store.clone();
        Ok(match self.algorithm {
            Some(algorithm @ Algorithm::Concurrency) => {
                let places = tower_ratelimit::Quota::concurrent(quota.limit.into());
                let limiter =
                    tower_ratelimit::Limiter::try_new(quota.name, store, algorithm, places)?;
                OurLimiter::Permits(limiter.hold_lifetime(LIFETIME), self.keeps_permits)
            }
            Some(algorithm) => {
                let per_day = tower_ratelimit::Quota::per_day(quota.limit.into());
                OurLimiter::Keyed(tower_ratelimit::Limiter::try_new(
                    quota.name, store, algorithm, per_day,
                )?)
            }
            None => OurLimiter::Redisson(Redisson { store, quota, limiters: Mutex::default() }),
        })
    }
}

enum OurLimiter {
    Keyed(tower_ratelimit::Limiter),
    Permits(tower_ratelimit::Limiter, bool),
    Redisson(Redisson),
}

impl Limiter for OurLimiter {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        match self {
            Self::Keyed(limiter) => Ok(limiter.check(key).await?.is_allowed()),
            Self::Permits(limiter, keeps) => match limiter.hold(key, 1).await? {
                Admission::Admitted(permit) if *keeps => {
                    mem::forget(permit);
                    Ok(true)
                }
                held => Ok(held.is_admitted()), // and return it
            },
            Self::Redisson(redisson) => redisson.check(key).await,
        }
    }
}

/// A limiter for each key, as Redisson has it.
struct Redisson {
    store: RedisStore,
    quota: Quota,
    limiters: Mutex<HashMap<String, RateLimiter>>,
}

impl Redisson {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let known = self.limiters().get(key).cloned();
        let limiter = match known {
            Some(limiter) => limiter,
            None => {
                let name = format!("{}:{key}", self.quota.name);
                let limiter = RateLimiter::try_new(self.store.clone(), &name)?;
                let limit = u64::from(self.quota.limit);
                limiter.try_set_rate(RateLimiterConfig::overall(limit, Quota::PERIOD)).await?;
                self.limiters().entry(key.to_owned()).or_insert(limiter).clone()
            }
        };
        Ok(limiter.try_acquire(1, Duration::ZERO).await?.is_allowed())
    }

    fn limiters(&self) -> std::sync::MutexGuard<'_, HashMap<String, RateLimiter>> {
        self.limiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
