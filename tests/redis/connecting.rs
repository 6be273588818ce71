//! Connections: addresses, users, permissions, passwords, and several or custom connections.

use std::{
    fmt, io,
    iter::successors,
    net::TcpStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use redis::aio::ConnectionManager;
use tokio::{sync::watch, task, time::sleep};
use tower::BoxError;
use tower_ratelimit::store::ErrorKind;
use tower_ratelimit::{
    Admission, Algorithm, Charge, Error, Limiter, Quota, RedisStore,
    redisson::{self, RateLimiterConfig},
    store::{self, Credentials, RedisConfig},
};

use crate::support::{
    self, ALGORITHMS,
    cluster::{free_port, until},
    limits, load, permissions,
    sentinel::fake::{Fake, array},
    server::RedisServer,
    with_sources,
};

#[tokio::test]
async fn a_user_with_the_documented_permissions_can_use_every_operation() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    redis::cmd("ACL").arg(permissions("limiter")).exec(&mut admin).unwrap();
    let url = format!("{}?user=limiter&pass=secret", server.url());
    let store = support::connected(support::config(&url)).await;
    let keys: u64 = redis::cmd("DBSIZE").query(&mut admin).unwrap();
    assert_eq!(keys, 0, "a ping writes");
    redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut admin).unwrap(); // it uses all commands
    for algorithm in ALGORITHMS {
        let quota = Quota::per_second(2);
        let limiter = Limiter::new(algorithm.name(), store.clone(), algorithm, quota);
        let wait = Duration::from_secs(10);
        let mut reserved = vec![];
        for request in 0..8 {
            if request == 7 {
                // The first reservation comes due.
                tokio::time::sleep(Duration::from_millis(600)).await;
            }
            match limiter.reserve("key", 1, wait).await.unwrap() {
                Admission::Admitted(turn) if !turn.delay().is_zero() => reserved.push(turn),
                admission => drop(admission.keep()),
            }
        }
        let _ = limiter.peek("key").await.unwrap();
        let before = server.calls("evalsha");
        drop(reserved);
        let is_released = async || server.calls("evalsha") > before;
        support::load::until("Redis has released them", is_released).await;
        limiter.spend("key", 3).await.unwrap();
        limiter.refund("key", 1).await.unwrap();
        limiter.reset("key").await.unwrap();
    }
    let quota = Quota::per_hour(2);
    let limiter = |name| Limiter::new(name, store.clone(), Algorithm::SlidingLog, quota);
    let charge = Charge::new(limiter("a"), "key").and(Charge::new(limiter("b"), "other"));
    assert!(charge.check().await.unwrap().is_allowed());
    for command in permissions("limiter") {
        if let Some(command) = command.strip_prefix('+') {
            assert!(server.calls(command) > 0, "{command} is not needed");
        }
    }

    let denied: Vec<Vec<(String, redis::Value)>> =
        redis::cmd("ACL").arg("LOG").query(&mut admin).unwrap();
    assert!(denied.is_empty(), "{denied:?}");
}

#[tokio::test]
async fn a_user_with_another_prefix_and_its_permissions_can_connect_and_decide() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    let rights: Vec<_> =
        permissions("limiter").iter().map(|right| right.replace("ratelimit", "shop")).collect();
    redis::cmd("ACL").arg(rights).exec(&mut admin).unwrap();
    let url = format!("{}?user=limiter&pass=secret&prefix=shop&deadline=30s", server.url());
    limits(RedisStore::connect(&url).await.unwrap()).await;
    store::connect(&url).await.unwrap().ping().await.unwrap();
    let config = RedisConfig::server(&server.url()).unwrap().user("limiter").password("secret");
    RedisStore::new(config.prefix("shop")).unwrap().ping().await.unwrap();
    let denied: Vec<redis::Value> = redis::cmd("ACL").arg("LOG").query(&mut admin).unwrap();
    assert!(denied.is_empty(), "{denied:?}");

    let url = url.replace("prefix=shop", "prefix=other");
    let text = with_sources(&RedisStore::connect(&url).await.unwrap_err());
    assert!(text.contains("~other:*") && text.contains("?prefix="), "{text}");
    assert!(!text.contains("commands that"), "{text}");
}

#[tokio::test]
async fn a_redisson_user_with_the_documented_permissions_can_use_every_operation() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    redis::cmd("ACL").arg(permissions("shared")).exec(&mut admin).unwrap();
    let url = format!("{}?user=shared&pass=secret", server.url());
    let limiter =
        redisson::RateLimiter::new(support::connected(support::config(&url)).await, "LIMITER_NAME");
    let second = Duration::from_secs(1);
    assert!(limiter.try_set_rate(RateLimiterConfig::overall(5, second)).await.unwrap());
    for _ in 0..8 {
        let _ = limiter.try_acquire(1, Duration::ZERO).await.unwrap();
    }
    limiter.available_permits().await.unwrap();
    limiter.release(1).await.unwrap();
    limiter.update_rate(RateLimiterConfig::per_client(4, 2 * second)).await.unwrap();
    limiter.set_rate(RateLimiterConfig::overall(5, second)).await.unwrap();
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
async fn missing_permissions_are_reported() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    let documented = permissions("limiter");
    let documented: Vec<_> = documented.iter().map(String::as_str).collect();
    let mut set = |missing: &str| {
        let rights =
            documented[2..].iter().map(|right| if *right == "~ratelimit:*" { "~*" } else { right });
        let rights: Vec<_> = rights.filter(|right| *right != missing).collect();
        redis::cmd("ACL")
            .arg(&["SETUSER", "limited", "reset"])
            .arg(rights)
            .exec(&mut admin)
            .unwrap();
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut admin).unwrap();
    };
    set("+mget");
    let url = format!("{}?user=limited&pass=secret", server.url());
    let store = support::lazy(&url);
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(2));
    let Err(Error::Store(error)) = limiter.check("key").await else {
        panic!("the user may do all")
    };
    let text = with_sources(&error);
    // Redis 7.0 does not name the command.
    assert!(text.contains("names the missing permission") || text.contains("mget"), "{text}");
    assert!(!text.contains("script:") && !text.contains("user_script"), "{text}");
    assert!(store.health().is_available, "the store is unavailable");

    set("");
    RedisStore::connect(&url).await.unwrap();
    let commands = documented.iter().filter(|right| right.starts_with('+'));
    for missing in commands.chain(&["~*"]) {
        set(missing);
        let error = with_sources(&RedisStore::connect(&url).await.unwrap_err());
        let right = if *missing == "~*" { "~ratelimit:*" } else { missing };
        let remedy = format!("`ACL SETUSER limited {right}`");
        assert!(error.contains(&remedy), "without {missing}: {error}");
    }

    let wrong = format!("{}?user=limited&pass=wrong", server.url());
    let error = RedisStore::connect(&wrong).await.unwrap_err();
    assert_eq!(with_sources(&error).matches("WRONGPASS").count(), 1, "{}", with_sources(&error));
    assert_eq!(error.kind(), ErrorKind::ErrorReply);
    let error = RedisStore::connect(&format!("{wrong}&protocol=resp2")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other, "{}", with_sources(&error));
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
async fn resp2_is_used_if_the_url_sets_it() {
    let server = RedisServer::start();
    let url = format!("{}?protocol=resp2", server.url());
    limits(RedisStore::connect(&url).await.unwrap()).await;
    assert_eq!(server.calls("hello"), 0);
}

#[tokio::test]
async fn a_connection_of_the_application_is_used() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    limits(RedisStore::from_connection(ConnectionManager::new(client).await.unwrap())).await;
}

#[tokio::test]
async fn the_keys_are_distributed_over_the_connections() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).connections(3);
    let store = RedisStore::new(config).unwrap();
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(100));
    for check in 0..90 {
        let _ = limiter.check(check % 30).await.unwrap();
    }
    let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
    let ours = clients.lines().filter(|line| line.contains("cmd=evalsha"));
    assert_eq!(ours.count(), 3, "{clients}");
    assert_eq!(limiter.peek(0).await.unwrap().remaining(), 97);
}

#[test]
#[should_panic = "a store needs at least one connection"]
fn zero_connections_are_rejected() {
    let _ = RedisConfig::server("redis://127.0.0.1").unwrap().connections(0);
}

#[test]
fn invalid_addresses_are_rejected_immediately() {
    let sentinel =
        |urls: &[&str], master| RedisConfig::sentinels(urls, master).and_then(RedisStore::new);
    let cluster = |urls: &[&str]| RedisConfig::cluster(urls).and_then(RedisStore::new);
    let cases = [
        (
            RedisStore::lazy("localhost"),
            "`localhost` has no scheme; write redis://HOST:PORT, rediss://HOST:PORT",
        ),
        (RedisStore::lazy("redis://:secret@host/x"), "redis://***@host/x: Invalid database number"),
        (RedisStore::lazy("rediss://localhost/#insecure"), "`RedisConfig::ca_certificates`"),
        (RedisStore::lazy("redis://:secret:localhost:1"), "the Redis URL redis://***: "),
        (RedisStore::lazy("redis://secret@localhost"), "there is a user but no password"),
        (RedisStore::lazy("redis://localhost/-1"), "the database must be a number"),
        (RedisStore::lazy("redis://localhost/?db=3"), "is the path of this URL"),
        (sentinel(&[], "mymaster"), "redis://HOST:26379"),
        (sentinel(&["redis://127.0.0.1:26379"], "unix:///a/socket"), "NAME[/DB]"),
        (cluster(&[]), "there is no URL"),
        (cluster(&["unix:///a/socket"]), "the nodes of a cluster have hosts"),
        (cluster(&["redis://a", "rediss://b"]), "write rediss:// for all of them"),
        (RedisStore::lazy("redis://limiter@a"), "there is a user but no password"),
        (sentinel(&["redis://limiter@a"], "mymaster"), "there is a user but no password"),
    ];
    for (store, text) in cases {
        let message = with_sources(&store.unwrap_err());
        assert!(message.contains(text) && !message.contains("secret"), "{message}");
    }
}

#[tokio::test]
async fn a_server_without_hello_is_supported() {
    let server = RedisServer::start_with(&["--rename-command", "HELLO", ""]);
    limits(RedisStore::connect(&server.url()).await.unwrap()).await;
}

/// Returns true while the connection for decisions exists.
fn is_connected(server: &RedisServer) -> bool {
    let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
    clients.lines().any(|line| line.contains("cmd=evalsha"))
}

fn kill_connections_of(server: &RedisServer, user: &str) {
    let kill = ["KILL", "USER", user, "SKIPME", "yes"];
    let killed: u32 = redis::cmd("CLIENT").arg(&kill).query(&mut server.connection()).unwrap();
    assert!(killed >= 1); // earlier connections of the test may still be open
}

/// The runtime of the caller is blocked while the server closes the connection, so the end is not
/// read before the next request.
#[tokio::test]
async fn a_connection_that_the_server_closes_fails_no_later_request() {
    let port = free_port().to_string();
    let server = RedisServer::start_with(&["--port", &port, "--bind", "127.0.0.1"]);
    let url = format!("redis://127.0.0.1:{port}");
    until("the port is open", || TcpStream::connect(format!("127.0.0.1:{port}")).is_ok());
    for protocol in ["", "?protocol=resp2"] {
        let store = support::lazy(&(url.clone() + protocol));
        let limiter =
            Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(1_000));
        let _ = limiter.check(protocol).await.unwrap();
        for _ in 0..20 {
            kill_connections_of(&server, "default");
            while is_connected(&server) {}
            thread::sleep(Duration::from_millis(10));
            let check = async || limiter.check(protocol).await.unwrap();
            let _ = tokio::join!(check(), check(), check());
        }
        assert_eq!(limiter.peek(protocol).await.unwrap().remaining(), 939);
        let health = store.health();
        assert_eq!((health.errors, health.interrupted, health.timeouts), (0, 0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_requests_under_way_fail_with_their_connection_and_none_is_sent_twice() {
    let server = RedisServer::start();
    let store = support::connected(support::config(&server.url())).await;
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(1_000_000));
    let before = server.calls("evalsha");
    let is_over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (limiter, is_over) = (limiter.clone(), is_over.clone());
            tokio::spawn(async move {
                let (mut answers, mut interrupted) = (0, 0);
                while !is_over.load(Relaxed) {
                    match limiter.check("key").await {
                        Ok(_) => answers += 1,
                        Err(Error::Store(error)) if error.kind() == ErrorKind::Interrupted => {
                            interrupted += 1
                        }
                        Err(error) => panic!("{error:?}"),
                    }
                }
                (answers, interrupted)
            })
        })
        .collect();
    let mut admin = server.connection();
    for _ in 0..60 {
        sleep(Duration::from_millis(15)).await;
        let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
        task::block_in_place(|| redis::cmd("CLIENT").arg(&kill).exec(&mut admin)).unwrap();
    }
    is_over.store(true, Relaxed);
    let (mut answers, mut interrupted) = (0, 0);
    for caller in callers {
        let (answered, ended) = caller.await.unwrap();
        (answers, interrupted) = (answers + answered, interrupted + ended);
    }
    let counted = 1_000_000 - limiter.peek("key").await.unwrap().remaining();
    assert!(counted >= answers && counted <= answers + interrupted, "{answers} {interrupted}");
    let calls = server.calls("evalsha") - before;
    assert!(calls <= answers + interrupted + 1, "{calls} calls for {answers} and {interrupted}");
    let health = store.health();
    assert_eq!(health.interrupted, interrupted);
    assert_eq!((health.errors, health.timeouts), (0, 0), "{:?}", health.last_error);
}

#[tokio::test]
async fn a_connection_that_is_closed_before_it_is_used_fails_no_request() {
    let server = Fake::start(|connection, words| match words[0] {
        _ if connection == 1 => String::new(),
        "TIME" => array(&["1700000000", "0"]),
        _ => "*2\r\n:1700000000000000\r\n$0\r\n\r\n".to_owned(),
    });
    let store = support::lazy(&server.url());
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(100));
    let _ = limiter.check("key").await.unwrap();
    assert_eq!((server.connections(), store.health().errors), (2, 0));
}

#[tokio::test]
async fn a_rotation_of_the_password_interrupts_no_request() {
    let server = RedisServer::start();
    let mut admin = server.connection();
    let set = |password: &str| {
        let user = ["SETUSER", "limiter", "reset", "on", password, "~*", "+@all"];
        redis::cmd("ACL").arg(&user).exec(&mut server.connection()).unwrap();
    };
    let credentials = |password: &str| Credentials::new("limiter", password);
    set(">first");
    let (sender, receiver) = watch::channel(credentials("first"));
    let config = support::config(&server.url()).credentials_provider(support::latest(receiver));
    let store = RedisStore::new(config).unwrap();
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(100));
    let _ = limiter.check("key").await.unwrap();
    assert_eq!(server.calls("auth"), 0, "the first login is part of `HELLO`");
    for (number, password) in (1..).zip(["second", "third"]) {
        set(&format!(">{password}"));
        sender.send_replace(credentials(password));
        let start = Instant::now();
        while server.calls("auth") < number {
            let _ = limiter.check("key").await.unwrap();
            assert!(start.elapsed() < Duration::from_secs(60), "{password} is not sent");
        }
    }
    let log: Vec<redis::Value> = redis::cmd("ACL").arg("LOG").query(&mut admin).unwrap();
    assert!(log.is_empty(), "a login failed");
    kill_connections_of(&server, "limiter");
    while is_connected(&server) {
        sleep(Duration::from_millis(1)).await;
    }
    let _ = limiter.check("key").await.unwrap();
    let health = store.health();
    assert_eq!((health.errors, health.interrupted), (0, 0), "{:?}", health.last_error);
}

#[tokio::test]
async fn each_open_connection_renews_its_token_and_a_new_connection_gets_another() {
    let server = RedisServer::start();
    let user = ["SETUSER", "limiter", "on", ">token 1", ">token 2", "~*", "+@all"];
    redis::cmd("ACL").arg(&user).exec(&mut server.connection()).unwrap();
    let calls = Arc::new(Mutex::new(vec![]));
    let seen = calls.clone();
    let provider = move |known: Option<Credentials>| {
        let token = if known.is_none() { "token 1" } else { "token 2" };
        seen.lock().unwrap().push(known);
        async move { Ok(Credentials::new("limiter", token)) }
    };
    let config = support::config(&server.url()).deadline(Duration::from_secs(5));
    let store = RedisStore::new(config.credentials_provider(provider)).unwrap();
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(100));
    let count = |token: Option<&str>| {
        let known = token.map(|token| Credentials::new("limiter", token));
        calls.lock().unwrap().iter().filter(|it| **it == known).count()
    };
    let _ = limiter.check("key").await.unwrap();
    load::until("the provider returns known credentials", async || count(Some("token 2")) > 1)
        .await;
    let logins = count(None);
    assert!((1..=logins).contains(&(server.calls("auth") as usize)), "they are sent again");
    kill_connections_of(&server, "limiter");
    while is_connected(&server) {
        sleep(Duration::from_millis(1)).await;
    }
    let _ = limiter.check("key").await.unwrap();
    assert!(count(None) > logins);
    drop(limiter);
    load::until("the connections end with the store", async || {
        let mut admin = server.connection();
        let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut admin).unwrap();
        !clients.contains("user=limiter")
    })
    .await;
}

#[tokio::test]
async fn the_error_of_a_provider_is_the_reason_of_a_failed_ping() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).credentials_provider(|_| async {
        let cause = io::Error::other("the vault is sealed");
        Err(BoxError::from(ErrorWithCause(cause)))
    });
    let store = RedisStore::new(config).unwrap();
    let error = with_sources(&store.ping().await.unwrap_err());
    let why = "cannot get the credentials: no token: the vault is sealed; check their provider";
    assert!(error.contains(why), "{error}");
    load::until("the store is unavailable", async || {
        let _ = store.ping().await;
        !store.health().is_available
    })
    .await;
    assert_eq!(store.health().status(), "unavailable");
}

#[tokio::test]
async fn no_cause_of_an_error_is_of_a_type_of_the_crate_redis() {
    let server = RedisServer::start();
    let ends =
        [format!("redis://127.0.0.1:{}", free_port()), server.url() + "?user=unknown&pass=x"];
    for url in ends {
        let error = RedisStore::lazy(&url).unwrap().ping().await.unwrap_err();
        let causes = successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let causes: Vec<_> = causes.collect();
        assert!(causes.len() > 1 && causes.iter().all(|it| !it.is::<redis::RedisError>()));
    }
}

#[derive(Debug)]
struct ErrorWithCause(io::Error);

impl fmt::Display for ErrorWithCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no token")
    }
}

impl std::error::Error for ErrorWithCause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

#[test]
fn the_text_of_credentials_has_no_password() {
    let text = format!("{:?}", Credentials::new("limiter", "secret"));
    assert!(text.contains("limiter") && !text.contains("secret"), "{text}");
}
