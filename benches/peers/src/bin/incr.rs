//! A bare `INCR` for each request, through the multiplexed connection of the redis crate. It limits
//! nothing: the least that a request can cost. Or a bare `INCREX`, which is a fixed window.

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
    is_increx: bool,
    quota: Quota,
}

impl Subject for Incr {
    type Limiter = Self;

    async fn connect(variant: &str, url: &str) -> Result<Self, Error> {
        let config = ConnectionManagerConfig::new().set_response_timeout(Some(TIMEOUT));
        let connection = Client::open(url)?.get_connection_manager_with_config(config).await?;
        let quota = Quota { name: "connect", limit: 1 };
        let incr = Self { connection, is_increx: variant == "increx", quota };
        incr.check("").await?; // a server without the command says so
        Ok(incr)
    }

    fn limiter(&self, quota: Quota) -> Result<Self, Error> {
        Ok(Self { quota, ..self.clone() })
    }
}

impl Limiter for Incr {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let Quota { name, limit } = self.quota;
        let (key, mut connection) = (format!("{name}:{key}"), self.connection.clone());
        if self.is_increx {
            let mut command = redis::cmd("INCREX");
            command.arg(key).arg("UBOUND").arg(limit);
            command.arg("EX").arg(Quota::PERIOD.as_secs()).arg("ENX");
            let (_, applied): (u64, u64) = command.query_async(&mut connection).await?;
            return Ok(applied == 1);
        }
        let count: u64 = connection.incr(key, 1).await?;
        Ok(count > 0)
    }
}
