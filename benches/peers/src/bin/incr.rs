//! A bare `INCR` for each request, through the multiplexed connection of the redis crate. It limits
//! nothing: the least that a request can cost.

use std::process::ExitCode;

use peers::{Error, Limiter, Quota, Subject, TIMEOUT, run};
use redis::{
    AsyncCommands, Client,
    aio::{ConnectionManager, ConnectionManagerConfig},
};

fn main() -> ExitCode {
    run::<Incr>()
}

#[derive(Clone)]
struct Incr {
    connection: ConnectionManager,
    prefix: &'static str,
}

impl Subject for Incr {
    type Limiter = Self;

    async fn connect(_: &str, url: &str) -> Result<Self, Error> {
        let config = ConnectionManagerConfig::new().set_response_timeout(Some(TIMEOUT));
        let connection = Client::open(url)?.get_connection_manager_with_config(config).await?;
        Ok(Self { connection, prefix: "" })
    }

    fn limiter(&self, quota: Quota) -> Result<Self, Error> {
        Ok(Self { prefix: quota.name, ..self.clone() })
    }
}

impl Limiter for Incr {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let key = format!("{}:{key}", self.prefix);
        let count: u64 = self.connection.clone().incr(key, 1).await?;
        Ok(count > 0)
    }
}
