//! Choosing a store at run time, by a URL.

#[cfg(feature = "redis")]
use super::RedisStore;
use super::{AnyStore, MemoryStore, Store};
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
/// Sentinels. Special characters of a password must be percent-encoded: `%23` for `#`, `%40` for
/// `@`. The login is that at the servers; `sentinel_user` and `sentinel_password` are the
/// parameters for that at the Sentinels.
///
/// These parameters follow a `?`, separated by `&`. A URL with another parameter is invalid.
///
/// | parameter | setting | default |
/// |---|---|---|
/// | `max_keys=100000` | [`MemoryStore::with_max_keys`] | 100,000 |
/// | `deadline=50ms` | [`RedisStore::deadline`](crate::RedisStore::deadline), above 0 | 100 ms |
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
/// password. Print it with `{:?}`, which contains the cause; `{}` prints the failure alone.
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
    if url.is_empty() || url == "memory" {
        return Err(StoreError::config(format!(
            "cannot use the URL {url:?} of a store: it has no scheme; write memory:"
        )));
    }
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
    Ok(RedisStore::connect(url).await?.into_any())
}

#[cfg(not(feature = "redis"))]
async fn redis(url: &str) -> Result<AnyStore, StoreError> {
    check_scheme(url)?;
    let scheme = url.split(':').next().unwrap_or_default();
    Err(StoreError::config(format!(
        "cannot use the {scheme} URL of a store: the feature `redis` is not enabled; enable it, or \
         write memory:"
    )))
}

/// Rejects URLs whose errors would otherwise be unclear, or contain a part of a password.
#[cfg(feature = "redis")]
pub(super) fn check_redis_url(url: &str) -> Result<(), StoreError> {
    check_scheme(url)?;
    let is_unix = url.contains("unix://");
    let is_ambiguous = url.contains('#') || !is_unix && url.matches('@').count() > 1;
    if is_ambiguous && !url.ends_with("#insecure") {
        return Err(StoreError::config(
            "cannot use the URL of a store: it contains a `#` or more than one `@`; percent-encode \
             the special characters of the user and the password: %23 for #, %40 for @, %2F for /"
                .to_owned(),
        ));
    }
    check_parameters(url, is_unix)
}

fn check_scheme(url: &str) -> Result<(), StoreError> {
    const SCHEMES: [&str; 7] =
        ["redis", "rediss", "valkey", "valkeys", "unix", "redis+unix", "valkey+unix"];
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    let topology = scheme.strip_prefix("rediss+").or_else(|| scheme.strip_prefix("redis+"));
    if SCHEMES.contains(&scheme) || matches!(topology, Some("sentinel" | "cluster")) {
        return Ok(());
    }
    // Other text can contain a password.
    let is_address = url.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:".contains(&byte))
        && url.split_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_ok());
    let is_word = scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+');
    let why = match scheme {
        "" if is_address => format!("`{url}` has no scheme"),
        "" => "it has no scheme".to_owned(),
        _ if is_word => format!("the scheme `{scheme}` is unknown"),
        _ => "the scheme is invalid".to_owned(),
    };
    Err(StoreError::config(format!(
        "cannot use the URL of a store: {why}; write memory:, redis://HOST:PORT, \
         rediss://HOST:PORT, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/MASTER or \
         redis+cluster://HOST:PORT,HOST:PORT"
    )))
}

/// Names all parameters of the kind of URL: only some of them are known where the rest is read.
#[cfg(feature = "redis")]
fn check_parameters(url: &str, is_unix: bool) -> Result<(), StoreError> {
    let invalid =
        |why: String| Err(StoreError::config(format!("cannot use the URL of a store: {why}")));
    // A `?` before an `@` belongs to a password.
    let rest = if is_unix { url } else { url.rsplit('@').next().unwrap_or_default() };
    let Some((_, query)) = rest.split_once('?') else { return Ok(()) };
    let mut known = vec!["deadline", "connections", "prefix", "denial_ttl", "protocol"];
    if is_unix {
        known.extend(["db", "user", "pass"]);
    }
    if url.contains("+sentinel://") {
        known.extend(["sentinel_user", "sentinel_password"]);
    }
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name == "db" && !is_unix {
            return invalid(
                "the database is the path of this URL; write redis://HOST:PORT/DB".into(),
            );
        }
        if !known.contains(&name) {
            return invalid(format!(
                "the parameter `{name}` is unknown; the parameters are {}",
                known.join(", ")
            ));
        }
        let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        if name == "deadline" && digits.parse() == Ok(0) {
            return invalid(format!(
                "`deadline={value}` would fail every decision; write for example deadline=50ms"
            ));
        }
    }
    Ok(())
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

    #[tokio::test]
    async fn an_unclear_url_says_what_to_write() {
        for url in ["", "memory"] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(error.ends_with("write memory:"), "{url}: {error}");
        }
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
        let all = "deadline, connections, prefix, denial_ttl, protocol";
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
    #[tokio::test]
    async fn a_deadline_of_zero_is_rejected() {
        for url in ["redis://h?deadline=0ms", "redis+cluster://h?prefix=x&deadline=00s"] {
            let error = connect(url).await.unwrap_err().to_string();
            assert!(error.contains("deadline=0") && error.contains("=50ms"), "{url}: {error}");
        }
        let config = crate::RedisConfig::server("redis://h").unwrap();
        let error = RedisStore::new(config.deadline(std::time::Duration::ZERO)).unwrap_err();
        assert!(error.to_string().contains("deadline of 0"), "{error}");
    }
}
