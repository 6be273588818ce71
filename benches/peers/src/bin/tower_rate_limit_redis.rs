//! The crate tower-rate-limit-redis: GCRA by a script, in a layer around a service that is ready at
//! once.

use std::{convert::Infallible, process::ExitCode};

use http::{Request, Response, StatusCode};
use peers::{Error, Limiter, Quota, Subject, TIMEOUT, run};
use redis_0_32::{AsyncConnectionConfig, Client, aio::MultiplexedConnection};
use tower::{Layer, ServiceExt, service_fn};
use tower_rate_limit_redis::{KeyResolver, RateLimitLayer};

fn main() -> ExitCode {
    run::<TowerRateLimitRedis>()
}

struct TowerRateLimitRedis {
    connection: MultiplexedConnection,
}

impl Subject for TowerRateLimitRedis {
    type Limiter = KeyedLimiter;

    async fn connect(_: &str, url: &str) -> Result<Self, Error> {
        let config = AsyncConnectionConfig::new().set_response_timeout(TIMEOUT);
        let client = Client::open(url)?;
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Self { connection })
    }

    fn limiter(&self, quota: Quota) -> Result<KeyedLimiter, Error> {
        let layer = RateLimitLayer::builder()
            .conn(self.connection.clone())
            .key_resolver(ByExtension { prefix: quota.name })
            .capacity(quota.limit.try_into()?)
            .emission_interval(Quota::PERIOD / quota.limit)
            .build();
        Ok(KeyedLimiter { layer })
    }
}

struct KeyedLimiter {
    layer: RateLimitLayer<ByExtension>,
}

impl Limiter for KeyedLimiter {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let inner =
            service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(())) });
        let mut request = Request::new(String::new());
        request.extensions_mut().insert(key.to_owned());
        match self.layer.layer(inner).oneshot(request).await?.status() {
            StatusCode::OK => Ok(true),
            StatusCode::TOO_MANY_REQUESTS => Ok(false),
            status => Err(format!("status {status}").into()),
        }
    }
}

/// The key is in the extensions of the request.
#[derive(Clone)]
struct ByExtension {
    prefix: &'static str,
}

impl KeyResolver for ByExtension {
    type Key = String;
    type ErrorBody = ();

    fn key<T>(&self, request: &Request<T>) -> Result<String, Response<()>> {
        let key = request.extensions().get::<String>();
        Ok(format!("{}:{}", self.prefix, key.map_or("", String::as_str)))
    }
}
