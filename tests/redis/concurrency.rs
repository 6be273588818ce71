//! Limits on concurrency over real servers: processes that die or stand still, servers that lose
//! their memory, replies that are lost, several connections, clusters and failovers.

use std::time::Duration;

use tokio::{
    task::{JoinSet, block_in_place},
    time::sleep,
};
use tower_ratelimit::{
    Admission, Algorithm, Charge, Limiter, Permit, Quota, RedisStore, store::RedisConfig,
};

use crate::support::{
    self, clock,
    cluster::Cluster,
    load::{eventually, many_servers, until, until_server},
    proxy::Proxy,
    recorder::{Recorder, observed},
    sentinel::Watched,
    server::RedisServer,
};

const PLACES: u64 = 4;
/// As short as possible, for permits that expire.
const SHORT: Duration = Duration::from_millis(100);
/// For permits that do not expire on a busy machine: the first renewal is due after a second.
const LIFETIME: Duration = Duration::from_secs(8);
const LONG: Duration = Duration::from_secs(60);

fn places(store: &RedisStore, lifetime: Duration) -> Limiter {
    let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(PLACES));
    Limiter::new("places", store.clone(), algorithm, quota).hold_lifetime(lifetime)
}

async fn hold(places: &Limiter, n: u64) -> Option<Permit> {
    places.hold("alice", n).await.unwrap().admitted()
}

async fn until_held(places: &Limiter, n: u64) {
    until(&format!("{n} are held"), async || {
        places.peek("alice").await.is_ok_and(|state| state.held() == n)
    })
    .await;
}

/// The milliseconds after which Redis frees the places, if they are not renewed.
fn time_to_live(server: &RedisServer) -> u128 {
    let key = "ratelimit:places:concurrency:{alice}";
    let left: i64 = redis::cmd("PTTL").arg(key).query(&mut server.connection()).unwrap();
    left.max(0) as u128
}

/// The longest life of a hold: the end of its slot.
fn longest(lifetime: Duration) -> u128 {
    // Rounded up to whole milliseconds.
    lifetime.as_millis() * 5 / 4 + 1
}

#[tokio::test]
async fn a_process_that_dies_frees_its_places_after_a_lifetime() {
    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    // After its first renewal, and before, when a hold lives for a quarter of its lifetime.
    for (lifetime, runs_for, lives_for) in
        [(SHORT, 2 * SHORT, SHORT), (LIFETIME, Duration::ZERO, LIFETIME / 4)]
    {
        let places = places(&store, lifetime);
        // Of a process that cannot reach the server any more: it renews nothing.
        let proxy = Proxy::start(&server);
        let other = support::connected(support::config(&proxy.url())).await;
        let permit = hold(&self::places(&other, lifetime), PLACES).await;
        let _permit = permit.expect("all are free");
        sleep(runs_for).await; // of a real server
        proxy.drop_all(true);
        assert!(time_to_live(&server) <= longest(lives_for));
        let permit = places.hold("alice", PLACES).max_wait(LONG).await.unwrap();
        drop(permit.admitted().expect("they are free again"));
        until_held(&places, 0).await;
    }
}

#[tokio::test]
async fn a_process_that_is_cut_off_for_too_long_finds_its_permits_expired() {
    let server = RedisServer::start();
    let store = support::redis_store(&server).await;
    let places = places(&store, LONG);
    let (proxy, recorder) = (Proxy::start(&server), Recorder::new());
    let other = support::connected(support::config(&proxy.url())).await;
    let other = observed(other, recorder.clone());
    let expiring = hold(&self::places(&other, SHORT), PLACES).await.expect("all are free");
    proxy.drop_all(true);
    let permit = places
        .hold("alice", 1)
        .max_wait(LONG)
        .await
        .unwrap()
        .admitted()
        .expect("they have expired");
    proxy.drop_all(false);
    until("the permit has expired", async || expiring.is_expired()).await;
    until("the store says so", async || !recorder.take_of("hold expired").is_empty()).await;
    drop(expiring);
    other.flush().await;
    // The end of the other permit has not taken this place.
    until_held(&places, 1).await;
    drop(permit);
    until_held(&places, 0).await;
}

#[tokio::test]
async fn a_step_forward_of_the_clock_expires_permits_and_lets_others_in() {
    let server = RedisServer::start();
    let store = support::connected(clock::settable(&server)).await;
    let places = places(&store, LIFETIME);
    let expiring = hold(&places, PLACES).await.expect("all are free");
    let waiting = tokio::spawn({
        let places = places.clone();
        async move { places.hold("alice", PLACES).max_wait(LONG).await.unwrap().admitted() }
    });
    until_held(&places, PLACES).await;
    assert!(!waiting.is_finished());
    clock::set(&server, LONG.as_micros() as i64);
    let _permit = waiting.await.unwrap().expect("the places have expired");
    until("the permit has expired", async || expiring.is_expired()).await;
    drop(expiring);
    store.flush().await;
    // Its end has taken none of the other places.
    until_held(&places, PLACES).await;
}

#[tokio::test]
async fn a_server_that_has_lost_its_memory_lets_at_most_the_places_in_once_more() {
    for restarts in [false, true] {
        // On a busy machine, permits can expire before they are renewed.
        let mut lifetime = LIFETIME;
        while !lose_memory(restarts, lifetime).await {
            lifetime *= 2;
            assert!(lifetime <= 2 * LONG, "the permits expire, however long they live");
        }
    }
}

/// Returns false if permits have expired before their renewal.
async fn lose_memory(restarts: bool, lifetime: Duration) -> bool {
    let mut server = RedisServer::start();
    let recorder = Recorder::new();
    let store = observed(support::redis_store(&server).await, recorder.clone());
    let places = places(&store, lifetime);
    let other = self::places(&support::redis_store(&server).await, lifetime);
    let in_flight = [hold(&places, 1).await.unwrap(), hold(&places, 2).await.unwrap()];
    if restarts {
        server.kill();
        server.restart();
    } else {
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
    // Others take what they can get, until the permits are held again.
    let (mut more, mut lost) = (vec![], 0);
    while lost < 2 {
        more.extend(other.hold("alice", 1).await.ok().and_then(Admission::admitted));
        lost += recorder.take_of("hold lost").len();
        sleep(Duration::from_millis(5)).await; // of a real server
        if in_flight.iter().any(Permit::is_expired) {
            return false;
        }
    }
    let taken = more.len() as u64;
    assert!((1..=PLACES).contains(&taken), "{taken} more were let in");
    assert_eq!(other.peek("alice").await.unwrap().held(), 3 + taken);
    assert!(in_flight.iter().all(|permit| !permit.is_expired()));
    assert!(hold(&other, 1).await.is_none());
    drop(more);
    until_held(&places, 3).await;
    assert_eq!(hold(&other, 1).await.map(|permit| permit.decision().remaining()), Some(0));
    drop(in_flight);
    until_held(&places, 0).await;
    true
}

/// Takes places and returns them, for a while. Some calls fail.
async fn take_and_return(places: &Limiter) {
    let mut tasks = JoinSet::new();
    for _ in 0..20 {
        let places = places.clone();
        tasks.spawn(async move {
            for _ in 0..20 {
                let _ = places.hold("alice", 1).max_wait(Duration::from_millis(5)).await;
            }
        });
    }
    tasks.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_place_leaks_when_replies_are_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let observer = places(&support::redis_store(&server).await, SHORT);
    // Longer than the test: what is returned has not expired. A new hold, whose reply never comes,
    // lives for a quarter of its lifetime.
    let faults: [(&str, Duration, &dyn Fn()); 5] = [
        ("paused", 10 * LONG, &|| {
            let pause = ["PAUSE", "200"];
            redis::cmd("CLIENT").arg(&pause).exec(&mut server.connection()).unwrap();
        }),
        ("late", 10 * LONG, &|| proxy.delay_replies(Duration::from_millis(100))),
        ("lost", LIFETIME, &|| proxy.lose_connections()),
        ("cut", LIFETIME, &|| proxy.cut_a_reply()),
        ("garbled", LIFETIME, &|| proxy.garble(true)),
    ];
    for (fault, lifetime, begin) in faults {
        let config = support::config(&proxy.url()).deadline(Duration::from_millis(50));
        let places = places(&RedisStore::new(config).unwrap(), lifetime);
        eventually(async || places.peek("alice").await).await;
        let load = tokio::spawn({
            let places = places.clone();
            async move { take_and_return(&places).await }
        });
        begin();
        load.await.unwrap();
        proxy.delay_replies(Duration::ZERO);
        proxy.garble(false);
        until_held(&observer, 0).await;
        println!("{fault}: all places are free");
    }
}

/// Asserts that the next hold of a key sees the end of the one before.
async fn ends_are_seen_at_once(places: &Limiter, keys: &[String]) {
    for _ in 0..50 {
        for key in keys {
            let permit = places.hold(key, PLACES).await.unwrap();
            drop(permit.admitted().expect("the one before has ended"));
        }
    }
}

#[tokio::test]
async fn the_next_hold_sees_an_end_over_several_connections() {
    let server = RedisServer::start();
    let store = support::connected(support::config(&server.url()).connections(3)).await;
    let keys: Vec<String> = (0..10).map(|number| format!("user-{number}")).collect();
    ends_are_seen_at_once(&places(&store, LIFETIME), &keys).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_limits_concurrency_alone_and_beside_a_rate_of_another_key() {
    let _permit = many_servers().await;
    let cluster = Cluster::start(3, false, &[]);
    let config = RedisConfig::cluster(cluster.urls()).unwrap();
    let store = support::connected(config.deadline(LONG)).await;
    let places = places(&store, LIFETIME);
    let on = |index| {
        let mut names = (0..).map(|number| format!("user-{number}"));
        names.find(|name| cluster.master_of(&format!("{{{name}}}")) == index).unwrap()
    };
    let [user, other, company] = [0, 1, 2].map(on);
    ends_are_seen_at_once(&places, &[user.clone(), other, company.clone()]).await;

    let rate = Limiter::new("rate", store, Algorithm::token_bucket(), Quota::per_day(10));
    let charge =
        Charge::new(&rate, user.as_str()).and(Charge::new(&places, company.as_str()).cost(3));
    for spent in 1..5 {
        let permit = charge.hold().await.unwrap().admitted().expect("both have room");
        let denied = charge.hold().await.unwrap().into_result().unwrap_err();
        assert_eq!((denied.limiter(), denied.retry_after()), ("places", None));
        until("the rate has back what was denied", async || {
            rate.peek(user.as_str()).await.unwrap().remaining() == 10 - spent
        })
        .await;
        drop(permit);
    }
    rate.spend(user.as_str(), 10).await.unwrap();
    assert_eq!(charge.hold().await.unwrap().into_result().unwrap_err().limiter(), "rate");
    until("nothing is held", async || {
        places.peek(company.as_str()).await.unwrap().remaining() == PLACES
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_dead_node_delay_no_renewal_at_another_node() {
    const AT_DEAD_NODE: usize = 2_000;
    let _permit = many_servers().await;
    let mut cluster = Cluster::start(3, false, &["--cluster-require-full-coverage", "no"]);
    let config = RedisConfig::cluster(cluster.urls()).unwrap();
    let store = support::connected(config.deadline(LONG)).await;
    let places = places(&store, LIFETIME);
    let hold = async |key: &String| places.hold(key.as_str(), 1).await.unwrap().admitted().unwrap();
    let names = (0..).map(|number| format!("user-{number}"));
    let is_on = |name: &String, index| cluster.master_of(&format!("{{{name}}}")) == index;
    let dead = names.clone().filter(|name| is_on(name, 0)).take(AT_DEAD_NODE);
    let living = names.clone().find(|name| is_on(name, 1)).unwrap();
    let mut permits = vec![];
    for key in dead {
        permits.push(hold(&key).await);
    }
    cluster.masters[0].server.kill();
    let permit = hold(&living).await;
    let name = format!("ratelimit:places:concurrency:{{{living}}}");
    let value = || cluster.masters[1].query::<Vec<u8>>(&["GET", &name]);
    for renewals in 0..2 {
        let last = value();
        until_server("the permit is renewed", || {
            let value = value();
            assert!(!value.is_empty() && !permit.is_expired(), "after {renewals} renewals");
            value != last
        })
        .await;
    }
    drop(permits);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_survive_a_failover() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    watched.watch();
    let config = RedisConfig::sentinels(watched.sentinel_urls(), &watched.master_url()).unwrap();
    let store = support::connected(config.deadline(Duration::from_secs(1))).await;
    let places = places(&store, LONG); // no permit expires while Sentinels decide
    let permits = [hold(&places, 1).await.unwrap(), hold(&places, 2).await.unwrap()];
    let old = watched.servers[0].1;
    block_in_place(|| watched.fail_over());
    until_server("the Sentinels name another master", || {
        watched.master().is_some_and(|port| port != old)
    })
    .await;
    // The replica has them, or the next renewal holds them again.
    until_held(&places, 3).await;
    drop(permits);
    until_held(&places, 0).await;
}
