//! Choosing a store at run time, by a URL.

use super::{AnyStore, MemoryStore, Store};
#[cfg(feature = "redis")]
use super::{RedisConfig, RedisStore};
use crate::error::StoreError;

/// Makes the store that a URL describes, for example one from the environment. A store in Redis is
/// asked whether it can decide, as by [`RedisStore::ping`](crate::RedisStore::ping).
///
/// | URL | store |
/// |---|---|
/// | `memory:` | [`MemoryStore`] |
/// | `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` | one server |
/// | `unix:///PATH` | one server, with the parameters `db`, `user` and `pass` |
/// | `redis+sentinel://[[USER]:PASSWORD@]HOST:PORT,HOST:PORT/MASTER[/DB]` | the master that these Sentinels name |
/// | `redis+cluster://[[USER]:PASSWORD@]HOST:PORT,HOST:PORT` | a cluster with these nodes, among others |
///
/// With the feature `tls-rustls`, `rediss` in place of `redis` selects TLS for all servers and
/// Sentinels. Special characters of a password are percent-encoded. The login is that at the
/// servers; `sentinel_user` and `sentinel_password` are the parameters for that at the Sentinels.
///
/// These parameters follow a `?`, separated by `&`. A URL with another parameter is invalid.
///
/// | parameter | setting | default |
/// |---|---|---|
/// | `max_keys=100000` | [`MemoryStore::with_max_keys`] | 100,000 |
/// | `deadline=50ms` | [`RedisStore::deadline`](crate::RedisStore::deadline) | 100 ms |
/// | `connections=2` | [`RedisConfig::connections`](crate::RedisConfig::connections) | 1 |
/// | `prefix=shop` | [`RedisStore::prefix`](crate::RedisStore::prefix) | `ratelimit` |
/// | `denial_ttl=0s` | [`RedisStore::denial_ttl`](crate::RedisStore::denial_ttl) | 1 s |
/// | `protocol=resp2` | the protocol | RESP3, if the server supports it |
///
/// Times are in `us`, `ms`, `s` or `m`. To start although Redis is down, or with certificates of
/// your own, make a `RedisStore` from a [`RedisConfig`](crate::RedisConfig).
///
/// # Errors
///
/// If the URL is invalid, or Redis cannot decide. The error names the address, without the
/// password.
///
/// # Cancel safety
///
/// The future can be dropped at any time.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Algorithm, Limiter, Quota, store};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
/// let store = store::connect(&url).await?;
/// let limiter = Limiter::new(store, Algorithm::token_bucket(), Quota::per_second(10));
/// assert!(limiter.check("alice").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
pub async fn connect(url: &str) -> Result<AnyStore, StoreError> {
    if let Some(rest) = url.strip_prefix("memory:") {
        return memory(rest).map(Store::into_any);
    }
    redis(url).await
}

fn memory(rest: &str) -> Result<MemoryStore, StoreError> {
    let max_keys = rest.trim_start_matches("//").strip_prefix("?max_keys=");
    match (rest, max_keys.map(str::parse)) {
        ("" | "//", _) => Ok(MemoryStore::new()),
        (_, Some(Ok(max_keys))) if max_keys > 0 => Ok(MemoryStore::with_max_keys(max_keys)),
        _ => Err(StoreError::config(format!(
            "cannot use the URL memory:{rest}: write memory: or memory:?max_keys=N, with N from 1 \
             on"
        ))),
    }
}

#[cfg(feature = "redis")]
async fn redis(url: &str) -> Result<AnyStore, StoreError> {
    let store = RedisStore::new(RedisConfig::from_url(url)?)?;
    store.ping().await?;
    Ok(store.into_any())
}

#[cfg(not(feature = "redis"))]
async fn redis(url: &str) -> Result<AnyStore, StoreError> {
    let scheme = url.split(':').next().unwrap_or_default();
    Err(StoreError::config(format!(
        "cannot use the {scheme} URL of a store: the feature `redis` is not enabled; enable it, or \
         write memory:"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_store_in_memory_can_be_bounded() {
        for url in ["memory:", "memory://", "memory:?max_keys=7"] {
            assert!(matches!(connect(url).await, Ok(AnyStore::Memory(_))), "{url}");
        }
        let AnyStore::Memory(store) = connect("memory:?max_keys=7").await.unwrap() else {
            unreachable!()
        };
        assert!(format!("{store:?}").contains("max_keys: 7"));
        for url in ["memory:?max_keys=0", "memory:?max_keys=x", "memory:?keys=1", "memory:x"] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(error.contains("memory:?max_keys=N"), "{url}: {error}");
        }
    }
}
