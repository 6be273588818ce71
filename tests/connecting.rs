//! The ways to Redis: addresses, users, TLS, connections of one's own, and several.

mod support;

use std::{io, sync::Arc, time::Duration};

use redis::{ClientTlsConfig, TlsCertificates, aio::ConnectionManager};
use support::{ALGORITHMS, server::RedisServer};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, UnixStream},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
};
use tower_ratelimit::{
    Algorithm, Charge, Limiter, Quota, RedisStore, StoreError,
    redisson::{self, RateType},
};

/// What docs/operation.md lets a user do.
fn documented_permissions(start: &str) -> Vec<String> {
    let page = include_str!("../docs/operation.md");
    let line = page.lines().find(|line| line.starts_with(start)).expect("the page has the line");
    line.split_whitespace().skip(1).map(String::from).collect()
}

fn patient(store: RedisStore) -> RedisStore {
    store.deadline(Duration::from_secs(30))
}

async fn limits(store: RedisStore) {
    let limiter = Limiter::new(patient(store), Algorithm::FixedWindow, Quota::per_hour(2));
    for is_allowed in [true, true, false] {
        assert_eq!(limiter.check("key").await.unwrap().is_allowed(), is_allowed);
    }
}

fn with_sources(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

#[tokio::test]
async fn a_user_with_the_documented_permissions_can_do_all() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    redis::cmd("ACL").arg(documented_permissions("ACL SETUSER limiter ")).exec(&mut admin).unwrap();
    let url = format!("{}?user=limiter&pass=secret", server.url());
    let store = patient(RedisStore::connect(&url).await.unwrap());
    for algorithm in ALGORITHMS {
        let quota = Quota::per_second(2);
        let limiter = Limiter::named(algorithm.name(), store.clone(), algorithm, quota);
        let wait = Duration::from_secs(10);
        let mut booked = vec![];
        for request in 0..8 {
            if request == 7 {
                tokio::time::sleep(Duration::from_millis(600)).await; // the first turn has come
            }
            let decision = limiter.check_within("key", 1, wait).await.unwrap();
            if !decision.delay().is_zero() {
                booked.push(decision);
            }
        }
        let _ = limiter.peek("key").await.unwrap();
        for decision in booked {
            limiter.cancel("key", decision).await.unwrap();
        }
        limiter.spend("key", 3).await.unwrap();
        limiter.refund("key", 1).await.unwrap();
        limiter.reset("key").await.unwrap();
    }
    let quota = Quota::per_hour(2);
    let limiter = |name| Limiter::named(name, store.clone(), Algorithm::SlidingLog, quota);
    let charge = Charge::new(limiter("a"), "key").and(Charge::new(limiter("b"), "other"));
    let decision = charge.check().await.unwrap();
    charge.cancel(decision).await.unwrap();
    for command in documented_permissions("ACL SETUSER limiter ") {
        if let Some(command) = command.strip_prefix('+') {
            assert!(server.calls(command) > 0, "{command} is not needed");
        }
    }

    let denied: Vec<Vec<(String, redis::Value)>> =
        redis::cmd("ACL").arg("LOG").query(&mut admin).unwrap();
    assert!(denied.is_empty(), "{denied:?}");
}

#[tokio::test]
async fn a_redisson_user_with_the_documented_permissions_can_do_all() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    redis::cmd("ACL").arg(documented_permissions("ACL SETUSER shared ")).exec(&mut admin).unwrap();
    let url = format!("{}?user=shared&pass=secret", server.url());
    let limiter = redisson::RateLimiter::new(
        patient(RedisStore::connect(&url).await.unwrap()),
        "LIMITER_NAME",
    );
    let second = Duration::from_secs(1);
    assert!(limiter.try_set_rate(RateType::Overall, 5, second).await.unwrap());
    for _ in 0..8 {
        let _ = limiter.try_acquire(1, Duration::ZERO).await.unwrap();
    }
    limiter.available_permits().await.unwrap();
    limiter.release(1).await.unwrap();
    limiter.update_rate(RateType::PerClient, 4, 2 * second).await.unwrap();
    limiter.set_rate(RateType::Overall, 5, second).await.unwrap();
    limiter.config().await.unwrap();
    limiter.expire(60 * second).await.unwrap();
    limiter.remaining_ttl().await.unwrap();
    limiter.clear_expire().await.unwrap();
    limiter.delete().await.unwrap();

    let denied: Vec<Vec<(String, redis::Value)>> =
        redis::cmd("ACL").arg("LOG").query(&mut admin).unwrap();
    assert!(denied.is_empty(), "{denied:?}");
}

#[tokio::test]
async fn a_user_without_permissions_is_told_so() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    let rules = ["SETUSER", "nobody", "on", ">secret", "~*", "+eval", "+evalsha", "+set", "+time"];
    redis::cmd("ACL").arg(&rules).exec(&mut admin).unwrap();
    let url = format!("{}?user=nobody&pass=secret", server.url());
    let store = patient(RedisStore::connect(&url).await.unwrap());
    let limiter = Limiter::new(store.clone(), Algorithm::FixedWindow, Quota::per_hour(2));
    let Err(tower_ratelimit::Error::Store(error)) = limiter.check("key").await else { panic!() };
    let text = with_sources(&error);
    assert!(text.contains("user") || text.contains("permission"), "{text}");
    assert!(store.health().is_available, "it answers");

    for missing in ["~*", "+eval", "+evalsha", "+set", "+time"] {
        let rights: Vec<_> = rules[4..].iter().filter(|right| **right != missing).collect();
        let mut user = redis::cmd("ACL");
        user.arg(&["SETUSER", "nobody", "reset", "on", ">secret"]).arg(rights);
        user.exec(&mut admin).unwrap();
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut admin).unwrap();
        let error = with_sources(&RedisStore::connect(&url).await.unwrap_err());
        let right = if missing == "~*" { "key" } else { &missing[1..] };
        assert!(error.to_lowercase().contains(right), "without {missing}: {error}");
    }

    let wrong = format!("{}?user=nobody&pass=wrong", server.url());
    let error = RedisStore::connect(&wrong).await.unwrap_err();
    assert_eq!(with_sources(&error).matches("WRONGPASS").count(), 1, "{}", with_sources(&error));
}

#[tokio::test]
async fn the_database_of_the_url_is_used() {
    let server = RedisServer::start();
    limits(RedisStore::connect(&format!("{}?db=3", server.url())).await.unwrap()).await;
    let mut admin = server.connection();
    let sizes: [u64; 2] = ["0", "3"].map(|database| {
        redis::cmd("SELECT").arg(database).exec(&mut admin).unwrap();
        redis::cmd("DBSIZE").query(&mut admin).unwrap()
    });
    assert_eq!(sizes, [0, 1]);
}

#[tokio::test]
async fn resp2_is_spoken_where_it_is_asked_for() {
    let server = RedisServer::start();
    let url = format!("{}?protocol=resp2", server.url());
    limits(RedisStore::connect(&url).await.unwrap()).await;
    assert_eq!(server.calls("hello"), 0);
}

#[tokio::test]
async fn a_connection_of_ones_own_is_used() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    limits(RedisStore::from_client(&client).unwrap()).await;
    let mut admin = server.connection();
    redis::cmd("FLUSHALL").exec(&mut admin).unwrap();
    limits(RedisStore::from_connection(ConnectionManager::new(client).await.unwrap())).await;
}

#[tokio::test]
async fn the_questions_go_round_the_connections() {
    let server = RedisServer::start();
    let store = patient(RedisStore::lazy(&server.url()).unwrap().connections(3));
    let limiter = Limiter::new(store, Algorithm::FixedWindow, Quota::per_hour(100));
    for _ in 0..9 {
        let _ = limiter.check("key").await.unwrap();
    }
    let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
    let ours = clients.lines().filter(|line| line.contains("cmd=evalsha"));
    assert_eq!(ours.count(), 3, "{clients}");
    assert_eq!(limiter.peek("key").await.unwrap().remaining(), 91);
}

#[test]
#[should_panic = "a store needs a connection"]
fn no_connection_is_too_few() {
    let _ = RedisStore::lazy("redis://127.0.0.1").unwrap().connections(0);
}

#[test]
fn addresses_that_cannot_be_are_refused_at_once() {
    let cases = [
        (RedisStore::lazy("localhost"), "Redis URL did not parse"),
        (RedisStore::lazy("localhost"), "a server's is redis://HOST:PORT/"),
        (RedisStore::sentinel(Vec::<String>::new(), "redis://mymaster"), "the URL of a Sentinel"),
        (RedisStore::sentinel(["redis://127.0.0.1:26379"], "unix:///a/socket"), "NAME[/DB]"),
        (RedisStore::cluster(Vec::<String>::new()), "a cluster needs the URL of a node"),
    ];
    for (store, text) in cases {
        let error = store.unwrap_err();
        assert!(with_sources(&error).contains(text), "{}", with_sources(&error));
    }
}

/// A port that speaks TLS with a certificate for `localhost` and leads to the server, and that certificate.
async fn with_tls(server: &RedisServer) -> (u16, String) {
    let signed = rcgen::generate_simple_self_signed([String::from("localhost")]).unwrap();
    let key = PrivateKeyDer::try_from(signed.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![signed.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let socket = server.socket();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, socket) = (acceptor.clone(), socket.clone());
            tokio::spawn(async move {
                let mut client = acceptor.accept(client).await?;
                copy_bidirectional(&mut client, &mut UnixStream::connect(socket).await?).await?;
                io::Result::Ok(())
            });
        }
    });
    (port, signed.cert.pem())
}

#[tokio::test]
async fn a_server_without_hello_is_spoken_to() {
    let server = RedisServer::start_with(&["--rename-command", "HELLO", ""]);
    limits(RedisStore::connect(&server.url()).await.unwrap()).await;
}

#[tokio::test]
async fn a_connection_that_the_server_closes_fails_no_later_request_with_any_constructor() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    let client = redis::Client::open(server.url()).unwrap();
    let stores =
        [RedisStore::from_client(&client).unwrap(), RedisStore::lazy(&server.url()).unwrap()];
    for (number, store) in (0..).zip(stores) {
        let quota = Quota::per_hour(1_000);
        let limiter = Limiter::new(patient(store), Algorithm::FixedWindow, quota);
        for _ in 0..20 {
            let _ =
                limiter.check("key").await.unwrap_or_else(|error| panic!("{number}: {error:?}"));
            let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
            let killed: u32 = redis::cmd("CLIENT").arg(&kill).query(&mut admin).unwrap();
            assert_eq!(killed, 1);
            let list = ["LIST", "TYPE", "normal"];
            while redis::cmd("CLIENT")
                .arg(&list)
                .query::<String>(&mut admin)
                .unwrap()
                .lines()
                .count()
                > 1
            {}
            tokio::time::sleep(Duration::from_millis(5)).await; // the runtime reads that it is closed
        }
    }
}

#[tokio::test]
async fn tls_is_spoken() {
    // The application chooses the cryptography.
    let _ = ring::default_provider().install_default();
    let server = RedisServer::start();
    let (port, certificate) = with_tls(&server).await;
    let url = format!("rediss://localhost:{port}");
    let certificates = TlsCertificates {
        client_tls: None::<ClientTlsConfig>,
        root_cert: Some(certificate.into()),
    };
    let client = redis::Client::build_with_tls(url.as_str(), certificates).unwrap();
    limits(RedisStore::from_client(&client).unwrap()).await;

    let error = RedisStore::connect(&url).await.unwrap_err();
    assert!(with_sources(&error).contains("certificate"), "{}", with_sources(&error));
}
