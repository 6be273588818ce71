//! The crate throttled: GCRA by a script.

use std::{num::NonZeroU32, process::ExitCode, sync::Arc};

use peers::{Error, Limiter, Quota, Subject, TIMEOUT, run};
use redis::{
    Client,
    aio::{ConnectionManager, ConnectionManagerConfig},
};
use throttled::{RateLimiter, RedisRateLimiter};

fn main() -> ExitCode {
    run::<Throttled>()
}

struct Throttled {
    connection: ConnectionManager,
}

impl Subject for Throttled {
    type Limiter = KeyedLimiter;

    async fn connect(_: &str, url: &str) -> Result<Self, Error> {
        let config = ConnectionManagerConfig::new().set_response_timeout(Some(TIMEOUT));
        let connection = Client::open(url)?.get_connection_manager_with_config(config).await?;
        Ok(Self { connection })
    }

    fn limiter(&self, quota: Quota) -> Result<KeyedLimiter, Error> {
        // The longest period of this crate is an hour.
        let rate = NonZeroU32::new((quota.limit / 24).max(1)).ok_or("no rate")?;
        let burst = NonZeroU32::new(quota.limit).ok_or("no burst")?;
        Ok(KeyedLimiter {
            limiter: Arc::new(RedisRateLimiter::new(self.connection.clone())),
            prefix: quota.name,
            quota: throttled::Quota::per_hour(rate).with_burst(burst),
        })
    }
}

struct KeyedLimiter {
    limiter: Arc<RedisRateLimiter>,
    prefix: &'static str,
    quota: throttled::Quota,
}

impl Limiter for KeyedLimiter {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let key = format!("{}:{key}", self.prefix);
        Ok(self.limiter.check(key, self.quota).await?.is_allowed())
    }
}
