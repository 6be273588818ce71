//! The crate tower-rate-limiter: its store for Redis, which increments a counter by a script. Its
//! layer, which adds headers, is left out.

use std::process::ExitCode;

use peers::{Error, Limiter, Quota, Subject, TIMEOUT, run};
use redis::{AsyncConnectionConfig, Client};
use tower_rate_limiter::{RedisStore, Store};

fn main() -> ExitCode {
    run::<TowerRateLimiter>()
}

struct TowerRateLimiter {
    store: RedisStore,
}

impl Subject for TowerRateLimiter {
    type Limiter = FixedWindow;

    async fn connect(_: &str, url: &str) -> Result<Self, Error> {
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(TIMEOUT));
        let client = Client::open(url)?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Self { store: RedisStore::new(connection) })
    }

    fn limiter(&self, quota: Quota) -> Result<FixedWindow, Error> {
        Ok(FixedWindow { store: self.store.clone(), quota })
    }
}

struct FixedWindow {
    store: RedisStore,
    quota: Quota,
}

impl Limiter for FixedWindow {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let key = format!("{}:{key}", self.quota.name);
        let usage = self.store.increment(&key, Quota::PERIOD).await;
        let usage = usage.map_err(|error| format!("{error:?}"))?;
        Ok(usage.used <= u64::from(self.quota.limit))
    }
}
