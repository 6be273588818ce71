//! Stores that a URL describes: one server, Sentinels and a cluster, with settings.

use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore, store};

use crate::support::{
    cluster::{Cluster, free_port},
    load::{eventually, many_servers, until},
    sentinel::{NAME, Watched},
    server::RedisServer,
    with_sources,
};

/// Decides about a request by the store at this URL.
async fn check(url: &str) -> Limiter {
    let store = store::connect(url).await.unwrap();
    let limiter = Limiter::new(store, Algorithm::token_bucket(), Quota::per_hour(2));
    assert_eq!(eventually(async || limiter.check("key").await).await.remaining(), 1, "{url}");
    limiter
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
    let limiter = Limiter::new(lazy, Algorithm::token_bucket(), Quota::per_hour(2));
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
    assert!(!error.is_timeout() && text.contains("refused"), "{text}");
    for url in ["redis://127.0.0.1?deadlin=1s", "redsi://127.0.0.1", "127.0.0.1:6379"] {
        let text = with_sources(&store::connect(url).await.unwrap_err());
        assert!(text.contains("cannot use the URL of a store"), "{text}");
    }
}
