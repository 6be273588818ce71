//! The crate trypema: sliding windows of a day in buckets of a minute, in Redis or "hybrid"
//! (counted in the process, and written later).

use std::{process::ExitCode, sync::Arc};

use peers::{Error, Limiter, Quota, Subject, TIMEOUT, run};
use redis::{Client, aio::ConnectionManagerConfig};
use trypema::{
    BucketSize, RateLimit, RateLimitDecision, RateLimiterBuilder, WindowSize,
    hybrid::HybridRateLimiterProvider,
    redis::{RedisKey, RedisRateLimiterProvider},
};

fn main() -> ExitCode {
    run::<Trypema>()
}

#[derive(Clone)]
enum Trypema {
    Redis(Arc<RedisRateLimiterProvider>),
    Hybrid(Arc<HybridRateLimiterProvider>),
}

impl Subject for Trypema {
    type Limiter = RateLimiter;

    async fn connect(variant: &str, url: &str) -> Result<Self, Error> {
        let config = ConnectionManagerConfig::new().set_response_timeout(Some(TIMEOUT));
        let connection = Client::open(url)?.get_connection_manager_with_config(config).await?;
        let (window, bucket) = (WindowSize::days(1)?, BucketSize::minutes(1)?);
        let prefix = RedisKey::try_from(format!("trypema-{variant}"))?;
        Ok(match variant {
            "hybrid" => {
                let builder = HybridRateLimiterProvider::builder(connection).prefix(prefix);
                Self::Hybrid(builder.window_size(window).bucket_size(bucket).build()?)
            }
            _ => {
                let builder = RedisRateLimiterProvider::builder(connection).prefix(prefix);
                Self::Redis(builder.window_size(window).bucket_size(bucket).build()?)
            }
        })
    }

    fn limiter(&self, quota: Quota) -> Result<RateLimiter, Error> {
        let rate = RateLimit::per_day(f64::from(quota.limit))?;
        Ok(RateLimiter { provider: self.clone(), prefix: quota.name, rate })
    }
}

struct RateLimiter {
    provider: Trypema,
    prefix: &'static str,
    rate: RateLimit,
}

impl Limiter for RateLimiter {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let key = RedisKey::try_from(format!("{}-{key}", self.prefix))?;
        let decision = match &self.provider {
            Trypema::Redis(provider) => provider.absolute().inc(&key, &self.rate, 1).await?,
            Trypema::Hybrid(provider) => provider.absolute().inc(&key, &self.rate, 1).await?,
        };
        Ok(matches!(decision, RateLimitDecision::Allowed))
    }
}
