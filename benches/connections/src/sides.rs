//! The two sides of an experiment as one kind of call: it counts one, and returns the count. The
//! faults are in `experiments.rs`.

use std::{
    future::poll_fn,
    pin::Pin,
    task::Poll,
    time::{Duration, Instant},
};

use redis::aio::{ConnectionLike, ConnectionManager, ConnectionManagerConfig};
use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore, store::RedisConfig};

use crate::Result;

/// The deadline of calls, on both sides.
pub const DEADLINE: Duration = Duration::from_millis(100);
const LIMIT: u32 = 1_000_000;

/// A call that counts one for a key, and returns the count.
pub type Call = Pin<Box<dyn Future<Output = Result<u64>> + Send>>;

/// Makes the calls of one side.
pub trait Side: Send + Sync {
    fn count(&self, key: &str) -> Call;
}

/// `INCR` by a client of the crate `redis`.
pub struct Plain<C>(pub C);

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Side for Plain<C> {
    fn count(&self, key: &str) -> Call {
        let (mut connection, mut command) = (self.0.clone(), redis::cmd("INCR"));
        command.arg(key);
        Box::pin(async move { Ok(command.query_async(&mut connection).await?) })
    }
}

/// A check by a limiter of this crate: one script, which counts one.
pub struct Ours {
    pub store: RedisStore,
    pub limiter: Limiter,
}

impl Ours {
    /// With [`DEADLINE`].
    pub fn new(config: RedisConfig) -> Result<Self> {
        Self::with(config.deadline(DEADLINE))
    }

    pub fn with(config: RedisConfig) -> Result<Self> {
        let store = RedisStore::new(config)?;
        let quota = Quota::per_day(LIMIT);
        let limiter = Limiter::new("api", store.clone(), Algorithm::FixedWindow, quota);
        Ok(Self { store, limiter })
    }

    pub async fn connect(url: &str) -> Result<Self> {
        let ours = Self::new(RedisConfig::from_url(url)?)?;
        ours.store.ping().await?;
        Ok(ours)
    }
}

impl Side for Ours {
    fn count(&self, key: &str) -> Call {
        let (limiter, key) = (self.limiter.clone(), key.to_owned());
        Box::pin(async move { Ok(u64::from(LIMIT) - limiter.check(key).await?.remaining()) })
    }
}

pub async fn manager(url: &str, deadline: Duration) -> Result<Plain<ConnectionManager>> {
    let config = ConnectionManagerConfig::new()
        .set_response_timeout(Some(deadline))
        .set_connection_timeout(Some(DEADLINE));
    let client = redis::Client::open(url)?;
    Ok(Plain(ConnectionManager::new_with_config(client, config).await?))
}

/// Calls until one succeeds; returns its count. After a fault, a client may need a moment.
pub async fn until_counted(side: &dyn Side, key: &str) -> Result<u64> {
    let start = Instant::now();
    loop {
        match side.count(key).await {
            Ok(count) => return Ok(count),
            Err(error) if start.elapsed() > Duration::from_secs(30) => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Polls each call once, in order, as tasks of requests do.
pub async fn begin(calls: &mut [Call]) {
    poll_fn(|cx| {
        for call in calls.iter_mut() {
            let is_pending = call.as_mut().poll(cx).is_pending();
            assert!(is_pending, "no server has answered yet");
        }
        Poll::Ready(())
    })
    .await;
}
