//! The Redis store: scripts, keys, deadlines, and its behaviour while Redis is down.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use tower_ratelimit::store::ErrorKind;
use tower_ratelimit::{Algorithm, Charge, Error, Key, Limiter, Quota, RedisStore};

use crate::support::{self, ALGORITHMS, server::RedisServer};

async fn store(server: &RedisServer) -> RedisStore {
    support::redis_store(server).await
}

async fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new("default", store(server).await, Algorithm::token_bucket(), Quota::per_hour(100))
}

fn run(connection: &mut redis::Connection, words: &[&str]) {
    redis::cmd(words[0]).arg(&words[1..]).exec(connection).unwrap();
}

#[tokio::test]
async fn a_decision_is_one_round_trip_and_the_script_is_sent_only_if_it_is_unknown() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    let before = (server.calls("evalsha"), server.calls("eval"));
    let calls = || (server.calls("evalsha") - before.0, server.calls("eval") - before.1);
    for _ in 0..10 {
        let _ = limiter.check("key").await.unwrap();
    }
    assert_eq!(calls(), (10, 1));

    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).unwrap();
    let decision = limiter.check("key").await.unwrap();
    assert_eq!(decision.remaining(), 89, "the request was charged more than once");
    let _ = limiter.check("key").await.unwrap();
    assert_eq!(calls(), (12, 2));
}

#[tokio::test]
async fn a_scan_finds_the_keys_of_one_limiter_and_no_others() {
    let server = RedisServer::start();
    // The characters are special in a pattern of Redis.
    let store = support::with_prefix(&server, "sh*p[a]").await;
    let other = support::with_prefix(&server, "shapa").await;
    let (algorithm, quota) = (Algorithm::token_bucket(), Quota::per_hour(10));
    let api = Limiter::new("api", store.clone(), algorithm, quota);
    let of_other_name = Limiter::new("api2", store.clone(), algorithm, quota);
    let of_other_prefix = Limiter::new("api", other, algorithm, quota);
    let mut names: Vec<_> = (0..2_500).map(|number| format!("user {number}")).collect();
    names.push(String::new());
    for name in &names {
        assert!(api.check(name).await.unwrap().is_allowed());
    }
    for limiter in [of_other_name, of_other_prefix] {
        assert!(limiter.check("another").await.unwrap().is_allowed());
    }

    let mut scan = store.scan("api", algorithm);
    let (mut found, mut steps) = (HashSet::new(), 0);
    while let Some(keys) = scan.next().await.unwrap() {
        found.extend(keys);
        steps += 1;
    }
    assert_eq!(found, names.iter().map(|name| Key::from(name).into_owned()).collect());
    assert!(steps >= 2, "{steps}");
    assert!(scan.next().await.unwrap().is_none());
    let of_other_algorithm = store.scan("api", Algorithm::fixed_window()).next().await.unwrap();
    assert_eq!(of_other_algorithm, Some(vec![]));
}

#[tokio::test]
async fn keys_can_be_read_and_expire() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let quota = Quota::per_hour(10);
    let store = support::with_prefix(&server, "shop").await;
    let limiters =
        ALGORITHMS.map(|algorithm| Limiter::new(algorithm.name(), store.clone(), algorithm, quota));
    for limiter in &limiters {
        assert!(limiter.check("alice").await.unwrap().is_allowed());
        let admitted = limiter.check("bob").cost(10).await.unwrap();
        assert!(admitted.is_allowed());
        while limiter.check("bob").cost(9).await.unwrap().is_allowed() {}
    }
    let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
    keys.sort_unstable();
    let mut expected: Vec<_> = ALGORITHMS
        .iter()
        .flat_map(|algorithm| {
            ["alice", "bob"].map(|key| format!("shop:{algorithm}:{algorithm}:{{{key}}}"))
        })
        .collect();
    expected.sort_unstable();
    assert_eq!(keys, expected);
    for key in keys {
        let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
        assert!((1..=7_200_001).contains(&ttl), "{key}: {ttl} ms");
    }
}

#[tokio::test]
async fn a_key_cannot_choose_its_slot() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    let _ = limiter.check("}{other}").await.unwrap();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut server.connection()).unwrap();
    assert_eq!(keys, ["ratelimit:default:token-bucket:{%7D%7Bother%7D}"]);
}

#[tokio::test]
async fn a_denied_request_writes_nothing() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let store = support::forgetful_store(&server).await;
        let limiter = Limiter::new(algorithm.name(), store, algorithm, Quota::per_hour(5));
        while limiter.check("key").await.unwrap().is_allowed() {}
        let key = format!("ratelimit:{algorithm}:{algorithm}:{{key}}");
        let mut connection = server.connection();
        let mut read = || -> (Vec<u8>, i64) {
            let dump = redis::cmd("DUMP").arg(&key).query(&mut connection).unwrap();
            (dump, redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap())
        };
        let (dump, ttl) = read();
        for _ in 0..10 {
            assert!(!limiter.check("key").await.unwrap().is_allowed());
            let _ = limiter.peek("key").await.unwrap();
        }
        let (later_dump, later_ttl) = read();
        assert!(later_dump == dump && later_ttl <= ttl, "{algorithm}");
    }
}

#[tokio::test]
async fn a_logged_request_takes_at_most_24_bytes() {
    let server = RedisServer::start();
    let quota = Quota::per_hour(10_000);
    let limiter = Limiter::new("default", store(&server).await, Algorithm::SlidingLog, quota);
    for _ in 0..10_000 {
        let _ = limiter.check("key").await.unwrap();
    }
    let key = "ratelimit:default:sliding-log:{key}";
    let bytes: f64 = redis::cmd("MEMORY")
        .arg(&["USAGE", key, "SAMPLES", "0"])
        .query(&mut server.connection())
        .unwrap();
    assert!(bytes / 1e4 <= 24.0, "{bytes} bytes for 10,000 requests");
}

#[tokio::test]
async fn a_store_connects_only_on_request() {
    let mut server = RedisServer::start();
    let url = server.url();
    server.kill();
    let error = RedisStore::connect(&url).await.unwrap_err();
    let expected = format!("Redis at {} is not available", server.socket().display());
    assert_eq!(error.to_string(), expected);
    let lazy = RedisStore::lazy(&url).unwrap();
    let limiter = Limiter::new("default", lazy, Algorithm::token_bucket(), Quota::per_hour(1));
    assert!(matches!(limiter.check("key").await, Err(Error::Store(_))));
    server.restart();
    assert_eq!(until_it_answers(&limiter).await, 0);
    assert!(RedisStore::lazy("not a url").is_err());
}

#[test]
fn a_lazy_store_needs_no_runtime_to_be_made() {
    let store = RedisStore::lazy("redis://127.0.0.1/").unwrap();
    let _ = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(1));
}

#[tokio::test]
async fn limiting_resumes_when_redis_is_back() {
    let mut server = RedisServer::start();
    let limiter = limiter(&server).await;
    for _ in 0..3 {
        assert_eq!(until_it_answers(&limiter).await, 99);
        server.kill();
        for _ in 0..3 {
            let Err(Error::Store(error)) = limiter.check("key").await else { panic!("no error") };
            assert!(
                error.kind() != ErrorKind::Timeout,
                "the store waits for a server that is down"
            );
        }
        server.restart();
    }
}

/// Waits for a decision: right after a failed attempt to connect, the store does not try again.
async fn until_it_answers(limiter: &Limiter) -> u64 {
    let start = Instant::now();
    loop {
        match limiter.check("key").await {
            Ok(decision) => return decision.remaining(),
            Err(error) => assert!(start.elapsed() < Duration::from_secs(30), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_server_that_refused_connections_for_a_while_is_used_again() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    assert_eq!(until_it_answers(&limiter).await, 99);
    let mut admin = server.connection();
    run(&mut admin, &["CONFIG", "SET", "requirepass", "secret"]);
    run(&mut admin, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    while limiter.check("key").await.is_ok() {}
    assert!(limiter.check("key").await.is_err());
    run(&mut admin, &["CONFIG", "SET", "requirepass", ""]);
    assert!(until_it_answers(&limiter).await < 99);
}

/// The number of all connections that were made to the server.
fn connections(connection: &mut redis::Connection) -> u64 {
    let stats: redis::InfoDict = redis::cmd("INFO").arg("stats").query(connection).unwrap();
    stats.get("total_connections_received").unwrap()
}

#[tokio::test]
async fn a_server_that_became_a_replica_is_left() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    assert_eq!(until_it_answers(&limiter).await, 99);
    let mut admin = server.connection();
    let before = connections(&mut admin);
    run(&mut admin, &["REPLICAOF", "127.0.0.1", "1"]);
    // A new connection may lead to another server.
    while connections(&mut admin) == before {
        assert!(limiter.check("key").await.is_err());
    }
    run(&mut admin, &["REPLICAOF", "NO", "ONE"]);
    assert_eq!(until_it_answers(&limiter).await, 98);
}

#[tokio::test]
async fn a_call_to_a_server_that_does_not_answer_ends_at_the_deadline() {
    let server = RedisServer::start();
    let deadline = Duration::from_millis(200);
    let store = support::connected(support::config(&server.url()).deadline(deadline)).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(100));
    let _ = limiter.check("key").await.unwrap();
    server.freeze();
    let start = Instant::now();
    for _ in 0..3 {
        let Err(Error::Store(error)) = limiter.check("key").await else { panic!("no error") };
        assert!(error.kind() == ErrorKind::Timeout);
    }
    assert!(start.elapsed() >= 3 * deadline);
    server.thaw();
    // Connects again; on a busy machine, this may exceed the deadline, too.
    let start = Instant::now();
    while let Err(error) = limiter.check("key").await {
        assert!(start.elapsed() < Duration::from_secs(30), "{error}");
    }
}

/// The number of commands that Redis has run, including those of scripts.
fn all_commands(server: &RedisServer) -> u64 {
    let stats: String =
        redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let calls = stats.lines().filter_map(|line| line.split_once("calls=")?.1.split(',').next());
    calls.map(|calls| calls.parse::<u64>().unwrap()).sum()
}

#[tokio::test]
async fn a_cancellation_in_a_long_log_takes_no_more_commands_than_a_search() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).deadline(Duration::from_secs(60));
    let store = support::connected(config).await;
    let quota = Quota::per_hour(100_000);
    let limiter = Limiter::new("default", store, Algorithm::SlidingLog, quota);
    let mut commands = vec![];
    for entries in [10, 5_000] {
        let early = limiter.reserve("key", 7, Duration::ZERO).await.unwrap();
        for _ in 0..entries {
            assert!(limiter.check("key").await.unwrap().is_allowed());
        }
        let left = limiter.peek("key").await.unwrap().remaining();
        let before = all_commands(&server);
        drop(early);
        let is_released = async || limiter.peek("key").await.unwrap().remaining() == left + 7;
        support::load::until("it is released", is_released).await;
        commands.push(all_commands(&server) - before);
    }
    // There would be thousands if later entries were read or written.
    assert!(commands[1] < 500, "{commands:?}"); // peeks among them
}

#[tokio::test]
async fn cancelled_entries_do_not_accumulate_in_a_log() {
    let server = RedisServer::start();
    let quota = Quota::per_hour(1_000);
    let limiter = Limiter::new("default", store(&server).await, Algorithm::SlidingLog, quota);
    let check = async || limiter.reserve("key", 1, Duration::ZERO).await.unwrap();
    let mut last = check().await;
    for _ in 0..2_000 {
        let next = check().await;
        assert!(next.decision().is_allowed());
        drop(std::mem::replace(&mut last, next));
    }
    let is_released = async || limiter.peek("key").await.unwrap().remaining() == 999;
    support::load::until("all are released", is_released).await;
    let key = "ratelimit:default:sliding-log:{key}";
    let bytes: u64 = redis::cmd("STRLEN").arg(key).query(&mut server.connection()).unwrap();
    assert!(bytes < 150 * 11, "{bytes} bytes for one request that counts");
}

#[tokio::test]
async fn a_key_with_another_value_is_an_error_for_this_key_only() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).deadline(Duration::from_secs(10));
    let store = support::connected(config).await;
    let mut connection = server.connection();
    // The form of a sliding window, with invalid numbers.
    let window = |buckets: u8, [length, start, at, last]: [i64; 4]| {
        let numbers = [length, start, at, last].map(|number| number.to_le_bytes()[..7].to_vec());
        let counts = vec![9; 5 + 4 * (usize::from(buckets) + 1)];
        [vec![b'W', buckets], numbers.concat(), counts].concat()
    };
    let mut values = vec![b"x".to_vec(), b"W".to_vec(), vec![0; 33], vec![0; 52], vec![0; 36]];
    let (least, most) = (i64::MIN >> 8, i64::MAX >> 8);
    for (index, bad) in [(0, 0), (0, most), (1, least), (1, most), (3, least), (3, most), (3, 0)] {
        let mut numbers = [3_600_000_000, 1_700_000_000_000_000, 0, 1_700_000_000_000_000];
        numbers[index] = bad;
        values.push(window(1, numbers));
    }
    // The form of a sliding log, with other numbers of entries than it has.
    for [gone, length] in [[0_u8, 2], [1, 1], [0, 255], [0, 0]] {
        let counts = vec![0, 0, 0, 0, gone, 0, 0, 0, length, 0, 0, 0];
        values.push([vec![9; 11], vec![0; 28], counts, vec![0; 11], b"S".to_vec()].concat());
    }
    values.push(vec![b'W', 0]);
    // More sub-windows than a double can count.
    let max = 1 << 53;
    values.push(window(100, [1, 2 - max, 0, max - 1]));
    let mut attempts = 0;
    for algorithm in support::ALGORITHMS {
        let quota = Quota::per_hour(10);
        let limiter = Limiter::new(algorithm.name(), store.clone(), algorithm, quota);
        let key = format!("ratelimit:{}:{}:{{key}}", algorithm.name(), algorithm.name());
        for value in &values {
            redis::cmd("SET").arg(&key).arg(value).exec(&mut connection).unwrap();
            let answers = [
                limiter.check("key").await.map(drop),
                limiter.spend("key", 1).await.map(drop),
                limiter.refund("key", 1).await.map(drop),
            ];
            for answer in answers {
                assert!(answer.is_err(), "{algorithm} accepts {value:?} as its state");
                attempts += 1;
            }
            let other = format!("other-{attempts}");
            assert!(limiter.check(other).await.unwrap().is_allowed());
        }
        redis::cmd("DEL").arg(&key).exec(&mut connection).unwrap();
        assert!(limiter.check("key").await.unwrap().is_allowed());
    }
}

#[tokio::test]
async fn a_charge_that_fails_on_one_key_changes_no_other() {
    let server = RedisServer::start();
    let store = store(&server).await;
    let quota = Quota::per_hour(10);
    let mut connection = server.connection();
    for algorithm in support::ALGORITHMS {
        let limiter = |name: &str| {
            let name = [name, algorithm.name()].join("-");
            Limiter::new(&name, store.clone(), algorithm, quota)
        };
        let (sound, broken) = (limiter("sound"), limiter("broken"));
        let charge = Charge::new(&sound, "key").and(Charge::new(&broken, "key"));
        assert!(sound.check("key").cost(2).await.unwrap().is_allowed());
        let key = format!("ratelimit:broken-{0}:{0}:{{key}}", algorithm.name());
        redis::cmd("SET").arg(&key).arg("x").exec(&mut connection).unwrap();
        let before = sound.peek("key").await.unwrap().remaining();
        assert!(charge.check().await.is_err());
        assert!(charge.spend().await.is_err());
        assert!(charge.refund().await.is_err());
        assert_eq!(sound.peek("key").await.unwrap().remaining(), before, "{algorithm}");
    }
}

#[tokio::test]
async fn a_server_without_memory_counts_nothing() {
    let server = RedisServer::start();
    let store = store(&server).await;
    let memory = |bytes: &str| {
        let mut set = redis::cmd("CONFIG");
        set.arg("SET").arg("maxmemory").arg(bytes).exec(&mut server.connection()).unwrap();
    };
    for algorithm in support::ALGORITHMS {
        let limiter = Limiter::new(algorithm.name(), store.clone(), algorithm, Quota::per_hour(9));
        memory("1");
        assert!(limiter.check("key").await.is_err(), "{algorithm}");
        memory("0");
        assert_eq!(limiter.peek("key").await.unwrap().remaining(), 9, "{algorithm}");
    }
}

#[tokio::test]
async fn a_state_of_two_numbers_takes_at_most_28_bytes() {
    let server = RedisServer::start();
    let store = store(&server).await;
    for algorithm in [Algorithm::FixedWindow, Algorithm::token_bucket()] {
        for quota in [Quota::per_hour(1_000_000), Quota::per_second(3), Quota::per_day(7)] {
            let limiter = Limiter::new("default", store.clone(), algorithm, quota);
            assert!(limiter.check("key").await.unwrap().is_allowed());
            let _ = limiter.reserve("key", 1, Duration::from_secs(1)).await.unwrap().keep();
            let key = format!("ratelimit:default:{}:{{key}}", algorithm.name());
            let length: u64 =
                redis::cmd("STRLEN").arg(&key).query(&mut server.connection()).unwrap();
            assert!((1..=28).contains(&length), "{algorithm} {quota}: {length} bytes");
            limiter.reset("key").await.unwrap();
        }
    }
}
