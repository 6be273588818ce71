//! Stores that a URL describes: one server, Sentinels and a cluster, with settings.

use std::sync::{Arc, Mutex};

use tower_ratelimit::store::ErrorKind;
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RedisStore,
    store::{self, RedisConfig},
};

use crate::support::{
    ALGORITHMS,
    cluster::{Cluster, free_port},
    load::{eventually, many_servers, until},
    sentinel::{
        NAME, Watched,
        fake::{Fake, array},
    },
    server::RedisServer,
    with_sources,
};

/// Decides about a request by the store at this URL.
async fn check(url: &str) -> Limiter {
    let store = store::connect(url).await.unwrap();
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(2));
    assert_eq!(eventually(async || limiter.check("key").await).await.remaining(), 1, "{url}");
    limiter
}

#[tokio::test]
async fn a_store_starts_without_redis_and_uses_it_when_it_answers() {
    let mut server = RedisServer::start();
    server.kill();
    let url = format!("{}?deadline=20s", server.url());
    assert!(store::connect(&url).await.is_err());
    let store = store::lazy(&url).unwrap();
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::token_bucket(), Quota::per_hour(2));
    assert_eq!(store.health().status(), "unknown");
    assert!(with_sources(&store.ping().await.unwrap_err()).contains("cannot connect"));
    assert_eq!((store.health().status(), store.health().answers), ("unknown", 0));
    server.restart();
    assert!(eventually(async || limiter.check("key").await).await.is_allowed());
    store.ping().await.unwrap();
    assert_eq!(store.health().status(), "ready");
}

#[tokio::test]
async fn every_script_begins_with_the_line_of_the_settings_and_has_the_hash_of_its_text() {
    let server = RedisServer::start();
    let config = RedisConfig::from_url(&format!("{}?deadline=20s", server.url())).unwrap();
    let store = RedisStore::new(config.script_header("-- of the shop")).unwrap();
    store.ping().await.unwrap();
    let before = server.calls("eval");
    for algorithm in ALGORITHMS {
        let name = algorithm.name();
        let limiter = Limiter::new(name, store.clone(), algorithm, Quota::per_hour(100));
        for _ in 0..3 {
            drop(limiter.reserve("key", 1, std::time::Duration::ZERO).await.unwrap());
        }
    }
    // A text is sent once, so the hashes in the other calls are those that the server computes.
    assert_eq!(server.calls("eval") - before, 5);

    let scripts = Arc::new(Mutex::new(vec![]));
    let seen = scripts.clone();
    let server = Fake::start(move |_, words| match words[0] {
        "EVAL" => {
            seen.lock().unwrap().push((words[0].to_owned(), words[1].to_owned()));
            "*2\r\n:1700000000000000\r\n$0\r\n\r\n".to_owned()
        }
        "EVALSHA" => {
            seen.lock().unwrap().push((words[0].to_owned(), words[1].to_owned()));
            "-NOSCRIPT no\r\n".to_owned()
        }
        _ => array(&["1700000000", "0"]),
    });
    let url = format!("{}?deadline=20s&script_flags=allow-key-locking", server.url());
    let limiter = Limiter::new(
        "default",
        RedisStore::lazy(&url).unwrap(),
        Algorithm::FixedWindow,
        Quota::per_hour(100),
    );
    let _ = limiter.check("key").await.unwrap();
    let scripts = scripts.lock().unwrap();
    let [(_, hash), (_, text)] = &scripts[..] else { panic!("{scripts:?}") };
    assert!(text.starts_with("#!lua flags=allow-key-locking\n"), "{text}");
    assert_eq!(redis::Script::new(text).get_hash(), hash);
}

#[tokio::test]
async fn a_store_in_memory_is_always_ready() {
    let store = store::lazy("memory:").unwrap();
    store.ping().await.unwrap();
    let health = store.health();
    assert!(health.is_available && health.status() == "ready" && health.answers == 0);
}

fn addresses(urls: impl IntoIterator<Item = String>) -> String {
    let addresses = urls.into_iter().map(|url| url["redis://".len()..].to_owned());
    addresses.collect::<Vec<_>>().join(",")
}

#[tokio::test]
async fn a_url_describes_a_server_and_settings() {
    let server = RedisServer::start();
    let url = format!("{}?prefix=shop&deadline=20s&connections=2&denial_ttl=0s", server.url());
    let limiter = check(&url).await;
    let key = "shop:default:token-bucket:{key}";
    assert_eq!(redis::cmd("EXISTS").arg(key).query(&mut server.connection()), Ok(1));
    let before = server.calls("evalsha");
    let denied = async || !limiter.check("key").await.unwrap().is_allowed();
    assert!(!denied().await && denied().await && denied().await);
    assert_eq!(server.calls("evalsha") - before, 3, "a denial was remembered");
    let lazy = RedisStore::lazy(&url).unwrap();
    let limiter = Limiter::new("default", lazy, Algorithm::token_bucket(), Quota::per_hour(2));
    assert_eq!(limiter.peek("key").await.unwrap().remaining(), 0);
}

#[tokio::test]
async fn a_url_describes_sentinels() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(Some("secret"));
    watched.watch();
    let sentinels = addresses(watched.sentinel_urls());
    let url = format!("redis+sentinel://:secret@{}/{NAME}?deadline=20s", sentinels);
    until("the Sentinels name the master", async || store::connect(&url).await.is_ok()).await;
    check(&url).await;
}

#[tokio::test]
async fn a_url_describes_a_cluster() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    let nodes = addresses(cluster.urls());
    check(&format!("redis+cluster://{nodes}?deadline=20s")).await;
}

#[tokio::test]
async fn an_error_names_the_address_and_no_password() {
    let port = free_port();
    let error = store::connect(&format!("redis://:secret@127.0.0.1:{port}")).await.unwrap_err();
    let text = with_sources(&error);
    assert!(text.contains(&format!("127.0.0.1:{port}")) && !text.contains("secret"), "{text}");
    assert!(error.kind() != ErrorKind::Timeout && text.contains("refused"), "{text}");
    for (url, part) in [
        ("redis://127.0.0.1?deadlin=1s", "`deadlin` is unknown"),
        ("redsi://127.0.0.1", "`redsi` is unknown"),
        ("127.0.0.1:6379", "has no scheme"),
    ] {
        let text = with_sources(&store::connect(url).await.unwrap_err());
        assert!(text.starts_with("cannot use the") && text.contains(part), "{text}");
    }
}
