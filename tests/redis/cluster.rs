//! A Redis Cluster: keys on different servers, which fail, move slots and are replaced.

use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::{
    sync::Barrier,
    task::{JoinSet, block_in_place},
    time::sleep,
};
use tower_ratelimit::{
    Algorithm, Charge, Error, Limiter, Quota, RedisStore,
    redisson::{RateLimiter, RateLimiterConfig},
    store::{ErrorKind, RedisConfig},
};

use crate::support::{
    ALGORITHMS,
    cluster::{ANNOUNCED, ANNOUNCED_BELOW, Cluster, SLOTS, free_port},
    load::{
        self, Load, Tasks, eventually, forgetful, key, many_servers, redis_key, until,
        until_decided, until_server,
    },
    permissions,
    sentinel::fake::{Fake, array},
    server::RedisServer,
};

/// Settings with which faults are detected soon.
const SETTINGS: [&str; 2] = ["--cluster-node-timeout", "1500"];

const HOUR: Duration = Duration::from_secs(3_600);
/// A deadline that a busy machine can keep.
const LONG: Duration = Duration::from_secs(30);

/// A store with a deadline that a busy machine can keep, connected to all nodes.
async fn with_long_deadline(cluster: &Cluster) -> RedisStore {
    with_prefix(cluster, "ratelimit").await
}

/// The same, whose keys have this prefix.
async fn with_prefix(cluster: &Cluster, prefix: &str) -> RedisStore {
    connected(config(cluster).prefix(prefix).deadline(LONG)).await
}

fn config(cluster: &Cluster) -> RedisConfig {
    RedisConfig::cluster(cluster.urls()).unwrap()
}

/// Makes a store that remembers no denials and is connected to all nodes.
async fn connected(config: RedisConfig) -> RedisStore {
    let store = forgetful(config);
    let (algorithm, quota) = (Algorithm::FixedWindow, Quota::per_hour(1_000_000));
    let limiter = Limiter::new("connect", store.clone(), algorithm, quota);
    let _ = until_decided(&[limiter], &users()).await;
    store
}

fn users() -> Vec<String> {
    (0..30).map(|number| format!("user-{number}")).collect()
}

/// The users whose keys are on the first master, and the other users.
fn split(cluster: &Cluster) -> (Vec<String>, Vec<String>) {
    users().into_iter().partition(|user| cluster.master_of(&redis_key(user)) == 0)
}

/// The users whose keys are on a node that is still a master: if a busy machine delays a node
/// beyond its timeout, its replica takes over, and counts can be lost.
fn of_survivors(cluster: &Cluster, users: &[String]) -> Vec<String> {
    let is_master =
        |user: &&String| cluster.masters[cluster.master_of(&redis_key(user))].is_master();
    block_in_place(|| users.iter().filter(is_master).cloned().collect())
}

/// Names of limiters whose keys are on different masters.
fn on_different_masters(cluster: &Cluster) -> [String; 3] {
    let on = |index| {
        let mut names = (0..).map(|number| format!("key-{number}"));
        names.find(|name| cluster.master_of(&format!("{{{name}}}")) == index).unwrap()
    };
    [0, 1, 2].map(on)
}

async fn remaining(limiter: &Limiter, key: &str) -> u64 {
    limiter.peek(key).await.unwrap().remaining()
}

async fn until_remaining(limiter: &Limiter, key: &str, expected: u64) {
    until("the units are returned", async || remaining(limiter, key).await == expected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_finds_the_keys_of_all_masters() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    let store = with_long_deadline(&cluster).await;
    let (algorithm, quota) = (Algorithm::token_bucket(), Quota::per_hour(10));
    let limiter = Limiter::new("api", store.clone(), algorithm, quota);
    for user in users() {
        assert!(limiter.check(&user).await.unwrap().is_allowed());
    }
    let mut scan = store.scan("api", algorithm);
    let mut found = vec![];
    while let Some(keys) = scan.next().await.unwrap() {
        found.extend(keys.iter().map(ToString::to_string));
    }
    found.sort_unstable();
    let mut all = users();
    all.sort_unstable();
    assert_eq!(found, all);

    // Those of all limiters, by their names.
    let (mut scan, mut names) = (store.scan_all(), vec![]);
    while let Some(found) = scan.next_names().await.unwrap() {
        names.extend(found);
    }
    names.sort_unstable();
    let mut all: Vec<_> =
        all.iter().map(|key| format!("ratelimit:api:token-bucket:{{{key}}}")).collect();
    all.sort_unstable();
    assert_eq!(names, all);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_decides_as_one_server_does() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    keys_are_spread(&cluster).await;
    limits_on_one_key_are_one_script(&cluster).await;
    limits_on_different_keys_are_charged_all_or_none(&cluster).await;
    a_late_answer_about_one_of_several_keys_is_released(&cluster).await;
    settling_and_cancelling_a_charge_reach_all_its_keys(&cluster).await;
    a_request_returns_only_units_that_it_spent(&cluster).await;
    requests_that_race_are_admitted_exactly(&cluster).await;
    checks_of_a_hot_key_share_calls(&cluster).await;
    scripts_that_are_flushed_are_sent_again(&cluster).await;
    redisson_works(&cluster).await;
    any_node_can_be_a_seed(&cluster).await;
}

async fn keys_are_spread(cluster: &Cluster) {
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new(
            "spread",
            with_long_deadline(cluster).await,
            algorithm,
            Quota::per_hour(2).burst(2),
        );
        for user in users() {
            assert_eq!(limiter.check(&*user).await.unwrap().remaining(), 1, "{algorithm}");
        }
        assert_eq!(limiter.check("").await.unwrap().remaining(), 1, "{algorithm}");
    }
    for master in &cluster.masters {
        let keys: usize = master.query(&["DBSIZE"]);
        assert!((15..100).contains(&keys), "{keys} keys are on one master");
    }
}

fn calls(cluster: &Cluster) -> u64 {
    cluster
        .masters
        .iter()
        .map(|node| node.server.calls("evalsha") + node.server.calls("eval"))
        .sum()
}

async fn limits_on_one_key_are_one_script(cluster: &Cluster) {
    let store = with_long_deadline(cluster).await;
    let limiter = |name, limit| {
        Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(limit))
    };
    let (few, many) = (limiter("few", 3), limiter("many", 9));
    for user in users() {
        let charge = Charge::new(&few, &*user).also(&many);
        assert_eq!(charge.check().await.unwrap().limiter(), "few");
        let before = calls(cluster);
        for _ in 0..3 {
            let _ = charge.check().await.unwrap();
        }
        assert_eq!(calls(cluster) - before, 3);
        assert_eq!(remaining(&many, &user).await, 6, "a denied request is charged");
    }
}

async fn limits_on_different_keys_are_charged_all_or_none(cluster: &Cluster) {
    let [first, second, third] = &on_different_masters(cluster);
    for algorithm in ALGORITHMS.into_iter().filter(|algorithm| *algorithm != Algorithm::LeakyBucket)
    {
        let store = with_prefix(cluster, algorithm.name()).await;
        let limiter =
            |name, limit| Limiter::new(name, store.clone(), algorithm, Quota::per_hour(limit));
        let (a, b, c) = (limiter("a", 5), limiter("b", 9), limiter("c", 2));
        let charge = Charge::new(&a, &**first)
            .and(Charge::new(&b, &**second))
            .and(Charge::new(&c, &**third));
        for left in [1, 0] {
            let decision = charge.check().await.unwrap();
            assert!(decision.is_allowed(), "{algorithm}");
            assert_eq!((decision.limiter(), decision.remaining()), ("c", left), "{algorithm}");
        }
        let denied = charge.check().await.unwrap();
        assert!(!denied.is_allowed(), "{algorithm}");
        assert_eq!(denied.limiter(), "c", "{algorithm}");
        assert!(denied.retry_after().is_some_and(|wait| wait > HOUR / 4), "{algorithm}");
        until_remaining(&a, first, 3).await;
        until_remaining(&b, second, 7).await;
        let peeked = charge.peek().await.unwrap();
        assert_eq!((peeked.allows(), peeked.limiter()), (false, "c"), "{algorithm}");

        // The last key causes an error.
        let master = &cluster.masters[2];
        let state = format!("{algorithm}:c:{algorithm}:{{{third}}}");
        c.reset(&**third).await.unwrap(); // drops the remembered denial, too
        let _: u64 = master.query(&["SADD", &state, "of another type"]);
        assert!(matches!(charge.check().await, Err(Error::Store(_))), "{algorithm}");
        until_remaining(&a, first, 3).await;
        until_remaining(&b, second, 7).await;
        let _: u64 = master.query(&["DEL", &state]);
    }
}

/// As for one key: the caller has gone, and takes nothing.
async fn a_late_answer_about_one_of_several_keys_is_released(cluster: &Cluster) {
    let [first, second, _] = &on_different_masters(cluster);
    let deadline = Duration::from_millis(500);
    let store = connected(config(cluster).prefix("late").deadline(deadline)).await;
    let limiter = Limiter::new("late", store, Algorithm::FixedWindow, Quota::per_hour(5));
    let of = |charge: Charge| charge.and(Charge::new(&limiter, &**second));
    let spends = of(Charge::new(&limiter, &**first));
    let holds = of(Charge::new(&limiter, &**first).estimate(1));
    assert!(spends.check().await.unwrap().is_allowed());
    for is_held in [false, true] {
        let _: String = cluster.masters[0].query(&["CLIENT", "PAUSE", "1500", "WRITE"]);
        let result = match is_held {
            true => holds.hold().await.map(drop),
            false => spends.check().await.map(drop),
        };
        let error = result.unwrap_err();
        let Error::Store(failure) = &error else { panic!("{error}") };
        assert_eq!(failure.kind(), ErrorKind::Timeout);
        // A write waits until the pause is over, behind the call.
        let _: String = cluster.masters[0].query(&["SET", &format!("{{{first}}}"), ""]);
        until("the units are returned", async || {
            limiter.peek(&**first).await.is_ok_and(|it| (it.remaining(), it.held()) == (4, 0))
        })
        .await;
    }
}

async fn settling_and_cancelling_a_charge_reach_all_its_keys(cluster: &Cluster) {
    let [first, second, third] = &on_different_masters(cluster);
    let store = with_prefix(cluster, "follows").await;
    let limiter =
        |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(100));
    let (a, b, c) = (limiter("a"), limiter("b"), limiter("c"));
    let charge = Charge::new(&a, &**first)
        .and(Charge::new(&b, &**second).estimate(10))
        .and(Charge::new(&c, &**third).estimate(20));
    let left = async || {
        let (a, b) = (remaining(&a, first).await, remaining(&b, second).await);
        (a, b, remaining(&c, third).await)
    };
    let until_left = async |expected| {
        until("the permit has ended", async || left().await == expected).await;
    };
    let permit = charge.hold().await.unwrap().admitted().unwrap();
    let decision = permit.decision();
    assert_eq!((decision.limiter(), decision.remaining()), ("c", 80));
    assert_eq!(left().await, (99, 90, 80));
    permit.cancel();
    until_left((99, 100, 100)).await;
    charge.spend().await.unwrap();
    charge.spend().await.unwrap();
    assert_eq!(left().await, (97, 80, 60));
    charge.refund().await.unwrap();
    assert_eq!(left().await, (98, 90, 80));
    let mut permit = charge.hold().await.unwrap().admitted().unwrap();
    assert_eq!(left().await, (97, 80, 60));
    permit.settle_for("b", 3).unwrap();
    permit.settle_for("c", 30).unwrap();
    until_left((97, 87, 50)).await;
    a.reset(&**first).await.unwrap();
    assert_eq!(left().await, (100, 87, 50));

    // Units that can be returned are returned, even if others cannot.
    let state = format!("follows:a:token-bucket:{{{first}}}");
    let _: u64 = cluster.masters[0].query(&["SADD", &state, "of another type"]);
    assert!(charge.refund().await.is_err());
    assert_eq!((remaining(&b, second).await, remaining(&c, third).await), (97, 70));
}

/// Each key has its own receipt, by the clock of its server.
async fn a_request_returns_only_units_that_it_spent(cluster: &Cluster) {
    let keys = &on_different_masters(cluster);
    for algorithm in [Algorithm::SlidingLog, Algorithm::FixedWindow] {
        let store = with_prefix(cluster, &format!("receipts-{algorithm}")).await;
        let limiters = ["a", "b", "c"]
            .map(|name| Limiter::new(name, store.clone(), algorithm, Quota::per_hour(100)));
        let left = async || {
            let mut left = vec![];
            for (limiter, key) in limiters.iter().zip(keys) {
                left.push(remaining(limiter, key).await);
            }
            left
        };
        let until_left = async |expected: [u64; 3]| {
            until("the permit has ended", async || left().await == expected).await;
        };
        let [a, b, c] = [0, 1, 2].map(|i| Charge::new(&limiters[i], &*keys[i]).estimate(30));
        let charge = a.and(b).and(c);
        let permit = async || charge.hold().await.unwrap().admitted().unwrap();
        let (first, second, mut third) = (permit().await, permit().await, permit().await);
        assert_eq!(left().await, [10, 10, 10], "{algorithm}");
        first.cancel();
        until_left([40, 40, 40]).await;

        // Units that were lost, and spent by other requests since, are not returned.
        limiters[0].reset(&*keys[0]).await.unwrap();
        assert!(limiters[0].check(&*keys[0]).cost(100).await.unwrap().is_allowed());
        second.cancel();
        until_left([0, 70, 70]).await;
        for (limiter, left_then) in [("a", [0, 70, 70]), ("c", [0, 70, 95]), ("b", [0, 95, 95])] {
            third.settle_for(limiter, 5).unwrap();
            until_left(left_then).await;
        }
    }
}

/// 2,000 requests of 10 users, with limits of 15 for each user and 100 for all together.
async fn requests_that_race_are_admitted_exactly(cluster: &Cluster) {
    let mut replicas = vec![];
    for _ in 0..4 {
        let store = with_prefix(cluster, "race").await;
        let named = |name, algorithm, limit| {
            Limiter::new(name, store.clone(), algorithm, Quota::per_hour(limit))
        };
        let user = named("user", Algorithm::token_bucket(), 15);
        replicas.push((user, named("all", Algorithm::FixedWindow, 100)));
    }
    let barrier = Arc::new(Barrier::new(2_000));
    let mut tasks = JoinSet::new();
    for i in 0..2_000 {
        let (user, all) = &replicas[i % 4];
        let charge = Charge::new(user, &*format!("user-{}", i % 10)).and(Charge::new(all, "all"));
        let barrier = barrier.clone();
        tasks.spawn(async move {
            barrier.wait().await;
            charge.check().await.unwrap().is_allowed()
        });
    }
    let admitted = tasks.join_all().await.into_iter().filter(|allowed| *allowed).count();
    assert_eq!(admitted, 100);
    until("the units of denied requests are returned", async || {
        let mut spent = 0;
        for user in 0..10 {
            spent += 15 - remaining(&replicas[0].0, &format!("user-{user}")).await;
        }
        spent == 100
    })
    .await;
}

/// 256 tasks with 20 checks each of one key, beside checks of other keys.
async fn checks_of_a_hot_key_share_calls(cluster: &Cluster) {
    const TASKS: u64 = 256;
    const CHECKS: u64 = 20;
    let store = with_long_deadline(cluster).await;
    let quota = Quota::per_day(1_000_000);
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingLog] {
        let name = format!("hot-{algorithm}");
        let limiter = Limiter::new(&name, store.clone(), algorithm, quota);
        assert_eq!(remaining(&limiter, "hot").await, 1_000_000);
        let before = calls(cluster);
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                for _ in 0..CHECKS {
                    assert!(limiter.check("hot").await.unwrap().is_allowed());
                }
                assert!(limiter.check(format!("user-{task}")).await.unwrap().is_allowed());
            });
        }
        tasks.join_all().await;
        let calls = calls(cluster) - before - TASKS;
        assert!(calls <= TASKS * CHECKS / 4, "{algorithm}: {calls} calls");
        assert_eq!(remaining(&limiter, "hot").await, 1_000_000 - TASKS * CHECKS);
        assert_eq!(remaining(&limiter, "user-7").await, 999_999);
    }
}

async fn scripts_that_are_flushed_are_sent_again(cluster: &Cluster) {
    let limiter = load::limiter(&with_long_deadline(cluster).await);
    for left in [99, 98] {
        for user in users() {
            assert_eq!(limiter.check(key(&user)).await.unwrap().remaining(), left);
        }
        for master in &cluster.masters {
            let () = master.query(&["SCRIPT", "FLUSH"]);
        }
    }
}

async fn redisson_works(cluster: &Cluster) {
    let store = with_long_deadline(cluster).await;
    for number in 0..10 {
        let limiter = RateLimiter::new(store.clone(), &format!("limiter-{number}"));
        assert!(limiter.try_set_rate(RateLimiterConfig::overall(5, HOUR)).await.unwrap());
        for remaining in [3, 1] {
            assert_eq!(limiter.acquire(2).await.unwrap().remaining(), remaining);
        }
        assert!(!limiter.try_acquire(2, Duration::ZERO).await.unwrap().is_allowed());
        limiter.release(2).await.unwrap();
        assert_eq!(limiter.available_permits().await.unwrap(), 3);
        assert!(limiter.remaining_ttl().await.unwrap().is_none());
        assert!(limiter.delete().await.unwrap());
        assert_eq!(limiter.config().await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_server_that_is_no_cluster_is_an_error_that_says_what_to_write() {
    let port = free_port().to_string();
    let _server = RedisServer::start_with(&["--port", &port]);
    let url = format!("redis://127.0.0.1:{port}");
    let config = RedisConfig::cluster([url]).unwrap().deadline(LONG);
    let store = RedisStore::new(config).unwrap();
    let decided = load::limiter(&store).check(key("alice")).await;
    let errors = [format!("{:?}", decided.unwrap_err()), format!("{:?}", store.ping().await)];
    for error in errors {
        assert!(error.contains("cluster support disabled"), "{error}");
        assert!(error.contains("leave out `+cluster` in the URL"), "{error}");
    }
}

async fn any_node_can_be_a_seed(cluster: &Cluster) {
    let url = cluster.masters[2].url();
    let configs = [
        RedisConfig::cluster([&*url]),
        RedisConfig::cluster(["redis://127.0.0.1:1", &*url]),
        RedisConfig::cluster([&*url]).map(|config| config.connections(3)),
    ];
    for config in configs {
        let limiter = load::limiter(&forgetful(config.unwrap().deadline(LONG)));
        for user in users() {
            let _ = eventually(async || limiter.peek(key(&user)).await).await;
        }
    }
    let none: [&str; 0] = [];
    assert!(RedisConfig::cluster(none).is_err());
    assert!(RedisConfig::cluster(["not a url"]).is_err());
    assert!(RedisConfig::cluster(["unix:///a/socket"]).is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_under_load_fails_no_request_and_loses_no_count() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let cluster = Cluster::start(3, false, &[]);
    let stores = [with_long_deadline(&cluster).await, with_long_deadline(&cluster).await];
    let limiters = stores.each_ref().map(load::limiter);
    let (mut moving, _) = split(&cluster);
    moving.truncate(8);
    let _ = until_decided(&limiters, &users()).await;
    let load = Load::start(&limiters, &users());
    sleep(Duration::from_millis(500)).await;
    for user in &moving {
        let slot = cluster.slot(&redis_key(user));
        block_in_place(|| cluster.begin_to_move(slot, 0, 1));
        sleep(Duration::from_millis(100)).await;
        block_in_place(|| cluster.end_moving(slot, 0, 1));
    }
    sleep(Duration::from_millis(500)).await;
    let answers = load.finish("slots move").await;
    for user in users() {
        assert_eq!(answers.failed(&user), 0, "{user}");
    }
    answers.check_counts(&load::limiter(&with_long_deadline(&cluster).await), &users()).await;

    // ASK redirects one command, and not the slot. The documented permissions are enough.
    let permissions = permissions("clustered").join(" ");
    for master in &cluster.masters {
        let words = ["ACL"].into_iter().chain(permissions.split(' '));
        let () = master.query(&words.collect::<Vec<_>>());
    }
    let slot = cluster.slot("ratelimit:ping");
    let from = usize::from(slot) * 3 / usize::from(SLOTS);
    let to = (from + 1) % 3;
    cluster.begin_to_move(slot, from, to);
    let urls = cluster.urls().into_iter().map(|url| url.replace("//", "//clustered:secret@"));
    let store = forgetful(RedisConfig::cluster(urls).unwrap().deadline(LONG));
    until("the store answers", async || store.ping().await.is_ok()).await;
    let mut pings = JoinSet::new();
    for _ in 0..300 {
        let store = store.clone();
        pings.spawn(async move {
            while let Err(error) = store.ping().await {
                // A busy machine can need longer for a login than a ping has for it.
                let error = format!("{error:?}");
                let texts = ["cannot log in: no answer", "the attempt to connect took too long"];
                assert!(texts.iter().any(|text| error.contains(text)), "{error}");
            }
        });
    }
    pings.join_all().await;
    cluster.end_moving(slot, from, to);
    store.ping().await.unwrap();
    let limiter = load::limiter(&store);
    for user in users() {
        let decision = eventually(async || limiter.check(key(&user)).await).await;
        assert!(!decision.is_allowed());
    }
    drop((stores, limiters, limiter, store));
    tasks.check().await;
}

/// A server that accepts connections and never answers.
fn hung() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    (listener, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeds_that_refuse_or_hang_fail_no_first_request_at_any_position() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    let (_listener, hung) = hung();
    let refused = format!("redis://127.0.0.1:{}", free_port());
    // Shorter than an attempt to connect to the seed that hangs.
    let deadline = Duration::from_millis(900);
    for (number, bad) in [refused, hung].into_iter().enumerate() {
        for index in 0..3 {
            let mut urls = cluster.urls();
            urls.insert(index, bad.clone());
            let config = RedisConfig::cluster(&urls).unwrap().deadline(deadline);
            let store = || forgetful(config.clone());
            let (mut decided, mut pinged) = (0, 0);
            for round in 0..5 {
                let user = format!("{number} {index} {round}");
                decided += u32::from(load::limiter(&store()).check(&*user).await.is_ok());
                pinged += u32::from(store().ping().await.is_ok());
            }
            // A machine that pauses for a moment may fail one of them.
            assert!(decided >= 4 && pinged >= 4, "{bad} at position {index}: {decided}, {pinged}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ping_of_a_cluster_pings_all_its_masters() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    for master in &cluster.masters {
        let _: () = master.query(&["ACL", "SETUSER", "default", "-evalsha"]);
        let error = forgetful(config(&cluster)).ping().await.unwrap_err();
        assert!(format!("{error:?}").contains("evalsha"), "{error:?}");
        let _: () = master.query(&["ACL", "SETUSER", "default", "+evalsha"]);
        forgetful(config(&cluster)).ping().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_stays_open_fails_only_requests_with_keys_on_both_nodes() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    let limiter = |name, store: &RedisStore| {
        Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(10))
    };
    let store = connected(config(&cluster).deadline(Duration::from_secs(2))).await;
    let (one, other) = (limiter("one", &store), limiter("other", &store));
    assert!(one.check("alice").await.unwrap().is_allowed());
    let slot = cluster.slot("ratelimit:one:token-bucket:{alice}");
    let from = cluster.master_of("ratelimit:one:token-bucket:{alice}");
    let to = (from + 1) % 3;
    cluster.begin_to_move(slot, from, to);

    // The first key has not moved; the second one is created on the other node.
    assert_eq!(one.check("alice").await.unwrap().remaining(), 8);
    assert_eq!(other.check("alice").await.unwrap().remaining(), 9);
    let reserved = other.reserve("alice", 10, HOUR).await.unwrap().admitted().unwrap();
    assert!(!reserved.delay().is_zero());
    drop(reserved);
    let is_released = async || other.peek("alice").await.unwrap().remaining() == 9;
    until("the reservation is released", is_released).await;
    assert_eq!(other.check("alice").await.unwrap().remaining(), 8);

    // The keys of two limits are on both nodes, or none exists yet.
    let short_deadline = connected(config(&cluster).deadline(Duration::from_millis(400))).await;
    let short_deadline = |name| limiter(name, &short_deadline);
    let pairs = [
        [short_deadline("one"), short_deadline("other")],
        [short_deadline("new"), short_deadline("newer")],
    ]
    .map(|[one, other]| Charge::new(one, "alice").also(other));
    for charge in &pairs {
        let (text, commands) = store_error(&cluster, charge).await;
        assert!(text.contains(&format!("slot {slot} ")), "{text}");
        assert!(text.contains("redis-cli --cluster fix"), "{text}");
        assert!((2..=4).contains(&commands), "{commands} commands");
    }

    // The move ended on one node only.
    let () = cluster.masters[to].query(&["CLUSTER", "SETSLOT", &slot.to_string(), "STABLE"]);
    for charge in [Charge::new(short_deadline("newest"), "alice"), pairs[1].clone()] {
        let (text, commands) = store_error(&cluster, &charge).await;
        assert!(text.contains(&format!("slot {slot} ")), "{text}");
        assert_eq!(commands, 2);
    }
    assert_eq!(one.check("alice").await.unwrap().remaining(), 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_charge_of_several_limits_waits_for_its_whole_deadline_while_its_slot_moves() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    let store = connected(config(&cluster).deadline(Duration::from_millis(600))).await;
    let limiter =
        |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_hour(1_000));
    let (one, other) = (limiter("one"), limiter("other"));
    let key = "ratelimit:one:token-bucket:{alice}";
    let (slot, owner) = (cluster.slot(key), cluster.master_of(key));
    let (masters, attempts) = ([owner, (owner + 1) % 3], AtomicUsize::new(0));
    // A busy machine can move the slot too late.
    until("a charge is decided after the move", async || {
        let attempt = attempts.fetch_add(1, SeqCst);
        let [from, to] = [attempt, attempt + 1].map(|index| masters[index % 2]);
        let _ = eventually(async || one.check("alice").await).await; // the other key does not exist
        block_in_place(|| cluster.begin_to_move(slot, from, to));
        let charge = Charge::new(one.clone(), "alice").also(other.clone());
        let charge = tokio::spawn(async move { charge.check().await });
        // The pauses are 100 and 200 ms; the next one would be longer than what is left.
        sleep(Duration::from_millis(400)).await;
        block_in_place(|| cluster.end_moving(slot, from, to));
        let is_decided = charge.await.unwrap().is_ok();
        let _ = eventually(async || other.reset("alice").await).await;
        is_decided
    })
    .await;
}

/// The error of a charge without a decision, and the number of commands.
async fn store_error(cluster: &Cluster, charge: &Charge) -> (String, u64) {
    let before = calls(cluster);
    let Err(Error::Store(error)) = charge.check().await else { panic!("the slot is open") };
    let text = std::error::Error::source(&error).unwrap().to_string();
    (text, calls(cluster) - before)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_the_address_of_a_dead_master_is_left() {
    let _permit = many_servers().await;
    let mut cluster = Cluster::start(3, true, &SETTINGS);
    let store = forgetful(config(&cluster));
    let limiter = load::limiter(&store);
    let (affected, _) = split(&cluster);
    let _ = until_decided(std::slice::from_ref(&limiter), &users()).await;
    cluster.masters[0].server.kill();
    let port = cluster.masters[0].port.to_string();
    let stranger =
        block_in_place(|| RedisServer::start_with(&["--port", &port, "--bind", "127.0.0.1"]));
    until_server("the replica is master", || cluster.replicas[0].is_master()).await;
    let decided = || cluster.replicas[0].server.calls("mget");
    until("the new master decides", async || {
        for user in &affected {
            let _ = limiter.check(key(user)).await;
        }
        block_in_place(decided) > 0
    })
    .await;
    let (on_stranger, on_master) = block_in_place(|| (stranger.calls("mget"), decided()));
    for user in &affected {
        let _ = eventually(async || limiter.check(key(user)).await).await;
    }
    let (stranger_after, master_after) = block_in_place(|| (stranger.calls("mget"), decided()));
    assert_eq!(stranger_after, on_stranger, "the other server at the address decided");
    assert!(master_after >= on_master + affected.len() as u64);
}

/// A reply to an earlier call may come from the server that had the address before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_slots_are_read_after_each_new_connection_even_if_they_were_read_just_before() {
    // The second connection of the requests takes longer than the first request waits for it.
    for login in [0, 150] {
        let port = Arc::new(AtomicU16::new(0));
        let (reads, ends) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (read, own_port, end) = (reads.clone(), port.clone(), ends.clone());
        let node = Fake::start(move |connection, words| match words[0] {
            "CLUSTER" => {
                read.fetch_add(1, SeqCst);
                let port = own_port.load(SeqCst);
                format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n")
            }
            "TIME" => {
                if connection == 3 {
                    thread::sleep(Duration::from_millis(login));
                }
                array(&["1700000000", "0"])
            }
            "EVALSHA" if end.swap(false, SeqCst) => String::new(),
            _ => "*2\r\n:1700000000000000\r\n$0\r\n\r\n".to_owned(),
        });
        port.store(node.port(), SeqCst);
        let limiter = load::limiter(&forgetful(RedisConfig::cluster([node.url()]).unwrap()));
        let _ = eventually(async || limiter.check(key("user")).await).await;
        ends.store(true, SeqCst);
        assert!(limiter.check(key("user")).await.is_err(), "the connection ends");
        let before = reads.load(SeqCst);
        let _ = eventually(async || limiter.check(key("user")).await).await;
        assert_eq!(node.connections(), 3, "one reads the slots");
        let mut soon = 0;
        for check in 0..350 {
            let _ = eventually(async || limiter.check(key("user")).await).await;
            sleep(Duration::from_millis(20)).await;
            if check == 70 {
                soon = reads.load(SeqCst);
            }
        }
        assert!(soon > before);
        assert!(
            reads.load(SeqCst) >= soon + 2,
            "the slots are read again until a replica is promoted"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_all_seeds_of_a_cluster_hang_only_the_first_requests_wait() {
    let hung = [hung(), hung(), hung()];
    let urls = hung.each_ref().map(|(_, url)| url);
    let store = forgetful(RedisConfig::cluster(urls).unwrap());
    let limiter = load::limiter(&store);
    for _ in 0..20 {
        assert!(limiter.check(key("user")).await.is_err());
    }
    let health = store.health();
    assert!(!health.is_available);
    assert!(health.skipped >= 10, "{health:?}");
}

/// For example, behind port forwarding.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_addresses_that_the_nodes_name_are_mapped() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &["--cluster-announce-port", ANNOUNCED]);
    let map = |host: &str, port| (host.to_owned(), port + ANNOUNCED_BELOW);
    let config = RedisConfig::cluster([cluster.masters[0].url()]).unwrap().map_addresses(map);
    let store = forgetful(config.deadline(LONG));
    store.ping().await.unwrap();
    let limiter = load::limiter(&store);
    for user in users() {
        let _ = limiter.check(key(&user)).await.unwrap();
    }
    let calls = block_in_place(|| calls(&cluster));
    assert!(calls >= users().len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_takes_over_from_a_killed_master_is_followed() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let mut cluster = Cluster::start(3, true, &SETTINGS);
    let (affected, others) = split(&cluster);
    let stores = [(); 2].map(|()| forgetful(config(&cluster)));
    let limiters = stores.each_ref().map(load::limiter);
    let long_deadline = load::limiter(&with_long_deadline(&cluster).await);
    let spent = (0..).map(|number| format!("spent-{number}"));
    let spent = { spent }.find(|user| cluster.master_of(&redis_key(user)) == 0).unwrap();
    while long_deadline.check(key(&spent)).await.unwrap().is_allowed() {}
    until_server("the replica has all data", || cluster.masters[0].is_replicated()).await;

    let load = Load::start(&limiters, &users());
    sleep(Duration::from_secs(1)).await;
    cluster.masters[0].server.kill();
    let start = Instant::now();
    until_server("the replica is master", || cluster.replicas[0].is_master()).await;
    let promoted = start.elapsed();
    let _ = until_decided(&limiters, &users()).await;
    println!("killed: promoted after {promoted:?}, decided after {:?}", start.elapsed());

    cluster.masters[0].server.restart();
    until_server("the old master is a replica", || !cluster.masters[0].is_master()).await;
    let took = until_decided(&limiters, &users()).await;
    println!("restarted: it has become a replica, decided after {took:?}");
    let answers = load.finish("a master is killed").await;
    assert!(affected.iter().map(|user| answers.decided(user)).sum::<usize>() > 0);
    answers.check_counts(&long_deadline, &of_survivors(&cluster, &others)).await;
    for limiter in limiters.iter().chain([&long_deadline]) {
        assert!(!eventually(async || limiter.check(key(&spent)).await).await.is_allowed());
    }
    let clients = block_in_place(|| cluster.masters[1].clients());
    println!("the second master has {clients} clients");
    assert!(clients < 20, "connections are leaked");
    drop((stores, limiters, long_deadline));
    tasks.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_node_delays_only_requests_for_its_own_keys() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let settings = [&SETTINGS[..], &["--cluster-require-full-coverage", "no"]].concat();
    let cluster = Cluster::start(3, true, &settings);
    let (affected, others) = split(&cluster);
    let stores = [(); 2].map(|()| forgetful(config(&cluster)));
    let limiters = stores.each_ref().map(load::limiter);
    let _ = until_decided(&limiters, &users()).await;

    let load = Load::start(&limiters, &users());
    sleep(Duration::from_secs(1)).await;
    cluster.masters[0].server.freeze();
    let start = Instant::now();
    let took = until_decided(&limiters, &others).await;
    println!("frozen: keys of other nodes are decided after {took:?}");
    until_server("the replica is master", || cluster.replicas[0].is_master()).await;
    let promoted = start.elapsed();
    let _ = until_decided(&limiters, &affected).await;
    println!("frozen: promoted after {promoted:?}, decided after {:?}", start.elapsed());
    let answers = load.finish("a master is frozen").await;
    let count = |what: fn(&load::Answers, &str) -> usize| -> usize {
        others.iter().map(|user| what(&answers, user)).sum()
    };
    let (decided, failed) = (count(load::Answers::decided), count(load::Answers::failed));
    println!("frozen: of the keys of other nodes, {decided} were decided, {failed} failed");
    assert!(failed < decided, "other keys fail, too");
    let long_deadline = load::limiter(&with_long_deadline(&cluster).await);
    answers.check_counts(&long_deadline, &of_survivors(&cluster, &others)).await;

    cluster.masters[0].server.thaw();
    until_server("the old master is a replica", || !cluster.masters[0].is_master()).await;
    let took = until_decided(&limiters, &users()).await;
    println!("thawed: it has become a replica, decided after {took:?}");
    drop((stores, limiters, long_deadline));
    tasks.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_cluster_is_down_the_policy_responds_until_it_is_up() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let mut cluster = Cluster::start(3, true, &SETTINGS);
    let (_, others) = split(&cluster);
    let stores = [(); 2].map(|()| forgetful(config(&cluster)));
    let limiters = stores.each_ref().map(load::limiter);
    let load = Load::start(&limiters, &users());
    sleep(Duration::from_secs(1)).await;
    cluster.replicas[0].server.kill();
    cluster.masters[0].server.kill();
    until_server("the cluster is down", || !cluster.masters[1..].iter().any(|node| node.is_up()))
        .await;
    let late = forgetful(config(&cluster));
    let limiter = load::limiter(&late);
    let start = Instant::now();
    for user in users() {
        assert!(limiter.peek(key(&user)).await.is_err());
    }
    println!("down: {} decisions failed in {:?}", users().len(), start.elapsed());
    cluster.masters[0].server.restart();
    cluster.replicas[0].server.restart();
    let start = Instant::now();
    until_server("the cluster is up", || cluster.nodes().all(|node| node.is_up())).await;
    let up = start.elapsed();
    for limiters in [&limiters[..], std::slice::from_ref(&limiter)] {
        let _ = until_decided(limiters, &users()).await;
    }
    println!("restarted: up after {up:?}, decided after {:?}", start.elapsed());
    let answers = load.finish("the cluster is down").await;
    let long_deadline = load::limiter(&with_long_deadline(&cluster).await);
    answers.check_counts(&long_deadline, &of_survivors(&cluster, &others)).await;
    drop((stores, limiters, late, limiter, long_deadline));
    tasks.check().await;
}
