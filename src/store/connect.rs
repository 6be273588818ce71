//! Choosing a store at run time, by a URL.

use super::{AnyStore, MemoryStore, Store};
#[cfg(feature = "redis")]
use super::{
    RedisStore,
    redis::{FORMS, scheme_error},
};
use crate::error::StoreError;

/// Makes the store that a URL describes, and proves by [`AnyStore::ping`] that it can decide. To
/// start although Redis is down, use [`lazy`].
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
/// Sentinels. Special characters of a password must be percent-encoded: `%23` for `#`, `%40` for
/// `@`. The login is that at the servers; `sentinel_user` and `sentinel_password` are the
/// parameters for that at the Sentinels.
///
/// These parameters follow a `?`, separated by `&`. A URL with another parameter is invalid.
///
/// | parameter | setting | default |
/// |---|---|---|
/// | `max_keys=100000` | [`MemoryStore::with_max_keys`] | 100,000 |
/// | `deadline=50ms` | [`RedisConfig::deadline`](crate::store::RedisConfig::deadline), above 0 | 100 ms |
/// | `connections=2` | [`RedisConfig::connections`](crate::store::RedisConfig::connections) | 1 |
/// | `prefix=shop` | [`RedisConfig::prefix`](crate::store::RedisConfig::prefix) | `ratelimit` |
/// | `denial_ttl=0s` | [`RedisConfig::denial_ttl`](crate::store::RedisConfig::denial_ttl) | 1 s |
/// | `script_flags=allow-key-locking` | [`RedisConfig::script_header`](crate::store::RedisConfig::script_header) | none |
/// | `protocol=resp2` | the protocol | RESP3, if the server supports it |
///
/// Times are in `us`, `ms`, `s` or `m`. For certificates of your own, make a `RedisStore` from a
/// [`RedisConfig`](crate::store::RedisConfig).
///
/// # Errors
///
/// If the URL is invalid, or Redis cannot decide. The error names the address, without the
/// password. Print it with `{:?}`, which contains the cause; `{}` prints the failure alone.
///
/// # Cancel safety
///
/// The future can be dropped at any time.
///
/// # Panics
///
/// Outside of a tokio runtime with time and I/O, if the store is in Redis.
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
/// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
/// assert!(limiter.check("alice").await?.is_allowed());
/// # Ok(())
/// # }
/// ```
pub async fn connect(url: &str) -> Result<AnyStore, StoreError> {
    let store = lazy(url)?;
    store.ping().await?;
    Ok(store)
}

/// Makes the store that a URL describes, as [`connect`] does, without connecting: a store in Redis
/// connects when it is first used. The process starts although Redis is down, and the
/// [`FailurePolicy`](crate::FailurePolicy) applies until it answers.
///
/// [`AnyStore::ping`] tests the store, and [`AnyStore::health`] reports its state. The guide
/// has [a complete program](crate::guide::redis_connecting#a-service-that-starts-without-redis).
///
/// # Errors
///
/// If the URL is invalid.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::store;
///
/// let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
/// let store = store::lazy(&url)?;
/// assert!(store.health().is_available);
/// # Ok::<(), tower_ratelimit::store::StoreError>(())
/// ```
pub fn lazy(url: &str) -> Result<AnyStore, StoreError> {
    if url.is_empty() || url == "memory" {
        let why = if url.is_empty() { "it is empty" } else { "it has no scheme" };
        return Err(StoreError::config(format!(
            "cannot use the URL {url:?} of a store: {why}; write memory: to count in this process, \
             or redis://HOST:PORT to count in Redis"
        )));
    }
    if let Some(rest) = url.strip_prefix("memory:") {
        return memory(rest).map(Store::into_any);
    }
    redis(url)
}

fn memory(rest: &str) -> Result<MemoryStore, StoreError> {
    let max_keys = rest.trim_start_matches("//").strip_prefix("?max_keys=");
    match (rest, max_keys.map(str::parse)) {
        ("" | "//", _) => Ok(MemoryStore::new()),
        (_, Some(Ok(max_keys))) if max_keys > 0 => Ok(MemoryStore::with_max_keys(max_keys)),
        _ => Err(StoreError::config(format!(
            "cannot use the URL {:?} of a store: a store in memory has one parameter, `max_keys`, \
             from 1 on; write memory: or memory:?max_keys=N",
            format!("memory:{rest}")
        ))),
    }
}

#[cfg(feature = "redis")]
fn redis(url: &str) -> Result<AnyStore, StoreError> {
    match scheme_error(url) {
        Some(why) => Err(StoreError::config(format!(
            "cannot use the URL of a store: {why}; write memory:, {FORMS}"
        ))),
        None => Ok(RedisStore::lazy(url)?.into_any()),
    }
}

#[cfg(not(feature = "redis"))]
fn redis(url: &str) -> Result<AnyStore, StoreError> {
    Err(without_redis(url))
}

/// The error of a URL without the feature `redis`. It does not repeat the URL, which can contain a
/// password.
#[cfg(any(not(feature = "redis"), test))]
fn without_redis(url: &str) -> StoreError {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let begins = |names: &[&str]| names.iter().any(|it| scheme.starts_with(it));
    let why = if begins(&["rediss", "valkeys"]) {
        "the feature `tls-rustls` is not enabled; run `cargo add tower-ratelimit --features \
         tls-rustls`, or write memory:"
    } else if begins(&["redis", "valkey", "unix"]) {
        "the feature `redis` is not enabled; run `cargo add tower-ratelimit --features redis`, or \
         write memory:"
    } else if url != url.trim() {
        "it begins or ends with a space; remove it"
    } else {
        "it has no scheme of a store; write memory:, or with the feature `redis` redis://HOST:PORT"
    };
    StoreError::config(format!("cannot use the URL of a store: {why}"))
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
        for url in ["memory:?max_keys=0", "memory:?max_keys=x", "memory:?keys=1", "memory:\n"] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(
                error.contains("memory:?max_keys=N") && !error.contains('\n'),
                "{url}: {error}"
            );
        }
    }

    #[tokio::test]
    async fn a_url_without_a_scheme_says_what_to_write() {
        for url in ["", "memory"] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(
                error.contains("write memory:") && error.contains("redis://HOST"),
                "{url}: {error}"
            );
        }
    }

    // The tests have all features.
    #[test]
    fn a_url_of_redis_names_the_feature() {
        for (url, part) in [
            ("redis://:zz@127.0.0.1", "`redis` is not enabled"),
            ("valkeys://:zz@127.0.0.1", "`tls-rustls` is not enabled"),
            ("rediss+cluster://:zz@a,b", "`tls-rustls` is not enabled"),
            ("valkey://zz", "`redis` is not enabled"),
            ("redis+sentinel://zz/m", "`redis` is not enabled"),
            ("http://zz", "no scheme of a store"),
            (" memory:zz", "ends with a space"),
            ("zz:6379", "no scheme of a store"),
            (" ", "ends with a space"),
        ] {
            let error = without_redis(url).to_string();
            assert!(error.contains(part) && !error.contains("zz"), "{error}");
        }
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn an_unclear_url_says_what_to_write() {
        for url in ["http://127.0.0.1", "127.0.0.1:6379", "p@zz://h", "u:zz", "redis+ring://a"] {
            let error = connect(url).await.unwrap_err().to_string();
            for part in
                ["memory:", "redis:", "rediss:", "unix:", "redis+sentinel:", "redis+cluster:"]
            {
                assert!(error.contains(part) && !error.contains("zz"), "{url}: {error}");
            }
        }
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn special_characters_of_a_password_must_be_encoded() {
        for url in [
            "redis://:p@zz#q@127.0.0.1/",
            "redis://:p@zzq@127.0.0.1/",
            "redis+cluster://:pazz#q@127.0.0.1",
            "unix:///a/socket?pass=pazz#q",
        ] {
            for error in [connect(url).await.unwrap_err(), RedisStore::lazy(url).unwrap_err()] {
                let error = format!("{error:?}");
                assert!(error.contains("%23 for #, %40 for @"), "{url}: {error}");
                assert!(!error.contains("zz"), "{url}: {error}");
            }
        }
        assert!(RedisStore::lazy("redis://:p%40zz%23q@127.0.0.1/").is_ok());
        assert!(RedisStore::lazy("unix:///a/socket?pass=p@s@s").is_ok());
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn an_unknown_parameter_lists_the_known_ones() {
        let all = "deadline, prefix, denial_ttl, connections, script_flags, protocol";
        for (url, last) in [
            ("redis://h/?dedline=50ms", "protocol"),
            ("redis://:a?b@h/?dedline=50ms", "protocol"),
            ("redis://h/?deadline=50ms&dedline=50ms", "protocol"),
            ("unix:///a/b?dedline=50ms", "db, user, pass"),
            ("redis+cluster://h?dedline=50ms", "protocol"),
            ("redis+sentinel://h/m?dedline=50ms", "sentinel_user, sentinel_password"),
        ] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(error.contains("`dedline` is unknown"), "{url}: {error}");
            assert!(error.contains(all) && error.ends_with(last), "{url}: {error}");
        }
        let error = connect("redis://h?deadline=1s&db=2").await.unwrap_err().to_string();
        assert!(error.contains("is the path"), "{error}");
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_url_has_one_answer_whatever_reads_it() {
        for (url, part) in [
            ("redis://:p@zz#q@127.0.0.1/", "%23 for #"),
            ("redis+cluster://:pazz#q@127.0.0.1", "%23 for #"),
            ("redis://h/?dedline=50ms", "script_flags, protocol"),
            ("unix:///a/b?dedline=50ms", "db, user, pass"),
            ("redis+sentinel://h/m?dedline=1s", "sentinel_user, sentinel_password"),
            ("redis://h?deadline=1s&db=2", "redis://HOST:PORT/DB"),
            ("redis://h?db=2", "redis://HOST:PORT/DB"),
            ("redis://h?deadline=0s", "deadline of 0"),
            ("redis://h?deadline=50", "not a time"),
            ("redis://h?connections=0", "from 1 on"),
            ("redis://h?prefix={x}", "no braces"),
            ("redis://zz@h", "no password"),
            ("redis://:zz@h/x", "Invalid database"),
            ("redis+cluster://h/1", "no databases"),
            ("redis+sentinel://h", "names no master"),
            ("redis://zz:zz@h/ ?prefix=a", "contains a space"),
            ("redis+cluster://h, i", "contains a space"),
        ] {
            let config = crate::store::RedisConfig::from_url(url).and_then(RedisStore::new);
            let texts = [
                lazy(url).unwrap_err().to_string(),
                RedisStore::lazy(url).unwrap_err().to_string(),
                config.unwrap_err().to_string(),
            ];
            assert!(texts.iter().all(|text| *text == texts[0]), "{url}: {texts:?}");
            assert!(texts[0].contains(part) && !texts[0].contains("zz"), "{url}: {texts:?}");
            if url.starts_with("redis://") || url.starts_with("unix") {
                let server = crate::store::RedisConfig::server(url).and_then(RedisStore::new);
                assert_eq!(server.unwrap_err().to_string(), texts[0], "{url}");
            }
        }
        for url in ["redi://h", "h:6379", "", "memory:", " redis://h", "redis://h\n"] {
            let texts =
                [RedisStore::lazy(url).err(), crate::store::RedisConfig::from_url(url).err()]
                    .map(|error| error.expect("it is not a URL of Redis").to_string());
            assert_eq!(texts[0], texts[1]);
            assert!(texts[0].contains("redis+cluster:"), "{texts:?}");
        }
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn a_deadline_of_zero_is_rejected() {
        for url in ["redis://h?deadline=0ms", "redis+cluster://h?prefix=x&deadline=00s"] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(error.contains("deadline of 0") && error.contains("=50ms"), "{url}: {error}");
        }
        let config = crate::store::RedisConfig::server("redis://h").unwrap();
        let error = RedisStore::new(config.deadline(std::time::Duration::ZERO)).unwrap_err();
        assert!(error.to_string().contains("deadline of 0"), "{error}");
    }
}
