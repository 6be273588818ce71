//! Checks that go to Redis together: order, costs, deadlines, and failures of one check or of all.

use std::{
    collections::HashMap,
    future::{self, IntoFuture, poll_fn},
    pin::pin,
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::{self, Handle},
    task::JoinSet,
};
use tower_ratelimit::{
    Admission, Algorithm, Decision, Error, Limiter, Quota, RedisStore,
    store::{RedisConfig, Source},
};

use crate::support::{
    self, ALGORITHMS,
    cluster::Cluster,
    load::{eventually, until},
    proxy::Proxy,
    redis_store,
    server::RedisServer,
    with_sources,
};

async fn store(server: &RedisServer) -> RedisStore {
    redis_store(server).await
}

/// Checks at one time, each with its key and cost. Returns the decisions in the same order.
async fn check_all(limiter: &Limiter, checks: &[(String, u64)]) -> Vec<Result<Decision, Error>> {
    let mut tasks = JoinSet::new();
    for (index, (key, cost)) in checks.iter().cloned().enumerate() {
        let limiter = limiter.clone();
        tasks.spawn(async move { (index, limiter.check(key).cost(cost).await) });
    }
    let mut decisions = tasks.join_all().await;
    decisions.sort_by_key(|(index, _)| *index);
    decisions.into_iter().map(|(_, decision)| decision).collect()
}

fn of_many_keys(count: usize) -> Vec<(String, u64)> {
    (0..count).map(|i| (format!("key-{i}"), 1)).collect()
}

#[tokio::test]
async fn many_checks_are_few_calls_and_decided_as_if_each_came_alone() {
    let server = RedisServer::start();
    let store = store(&server).await;
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new(algorithm.name(), store.clone(), algorithm, Quota::per_day(10));
        let _ = limiter.peek("key").await.unwrap(); // loads the script
        let before = server.calls("evalsha");
        // Of each key in this order: 4 and 5 are granted, 2 are not, 1 is.
        let costs = [4, 5, 2, 1, 1];
        let checks: Vec<_> =
            (0..500).map(|i| (format!("key-{}", i % 100), costs[i / 100])).collect();
        let decisions = check_all(&limiter, &checks).await;
        let calls = server.calls("evalsha") - before;
        assert!(calls <= 500 / 64 + 4, "{algorithm}: {calls} calls");
        for (i, decision) in decisions.iter().enumerate() {
            let (is_allowed, remaining) =
                [(true, 6), (true, 1), (false, 1), (true, 0), (false, 0)][i / 100];
            let decision = decision.as_ref().unwrap();
            assert_eq!(decision.is_allowed(), is_allowed, "{algorithm} {i}: {decision:?}");
            // The content of a leaky bucket leaves it one by one.
            if algorithm != Algorithm::LeakyBucket {
                assert_eq!(decision.remaining(), remaining, "{algorithm} {i}: {decision:?}");
            }
        }
    }
}

#[tokio::test]
async fn many_requests_at_once_are_decided_within_the_default_deadline() {
    const REQUESTS: usize = 2_000;
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let quota = Quota::per_day(REQUESTS as u64);
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
    let _ = limiter.peek("key").await.unwrap(); // loads the script
    let rounds = AtomicUsize::new(0);
    // The deadline is a time limit, which a busy machine can miss.
    until("each request is decided", async || {
        let round = rounds.fetch_add(1, Relaxed);
        let of_one_key = vec![(format!("hot-{round}"), 1); REQUESTS / 2];
        let of_many_keys = (0..REQUESTS / 2).map(|i| (format!("{round}-{i}"), 1));
        let checks: Vec<_> = of_one_key.into_iter().chain(of_many_keys).collect();
        let mut decisions = check_all(&limiter, &checks).await;
        decisions.retain(Result::is_ok);
        if decisions.len() < REQUESTS {
            return false;
        }
        for (i, decision) in decisions.into_iter().map(Result::unwrap).enumerate() {
            let spent = if i < REQUESTS / 2 { i + 1 } else { 1 };
            assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Store));
            assert_eq!(decision.remaining() as usize, REQUESTS - spent);
        }
        true
    })
    .await;
}

/// Starts checks in this order, with pauses in which calls are sent, and polls all until they are
/// decided.
async fn check_in_order(limiter: &Limiter, keys: &[String]) -> Vec<Decision> {
    let mut checks: Vec<_> = keys.iter().map(|key| Box::pin(limiter.check(&**key))).collect();
    let mut decisions: Vec<Option<Decision>> = vec![None; keys.len()];
    let (mut started, mut round) = (0, 1);
    poll_fn(|cx| {
        started = (started + round * 37 % 101).min(checks.len());
        round += 1;
        for (check, decision) in checks[..started].iter_mut().zip(&mut decisions) {
            if decision.is_none()
                && let Poll::Ready(decided) = check.as_mut().poll(cx)
            {
                *decision = Some(decided.unwrap());
            }
        }
        if started < checks.len() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if decisions.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    decisions.into_iter().flatten().collect()
}

/// The checks of each key must be decided in the order in which they were started.
fn assert_order(keys: &[String], decisions: &[Decision], limit: u32, what: &str) {
    let mut spent = HashMap::<_, u32>::new();
    for (i, (key, decision)) in keys.iter().zip(decisions).enumerate() {
        let spent = spent.entry(key).or_default();
        *spent += 1;
        assert_eq!(decision.is_allowed(), *spent <= limit, "{what}: check {i}, {spent} of {key}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn checks_of_a_key_are_decided_in_the_order_of_their_arrival_whatever_happens() {
    const LIMIT: u32 = 150;
    let server = RedisServer::start();
    for connections in [1, 4] {
        let config = support::config(&server.url()).connections(connections);
        let store = RedisStore::new(config.denial_ttl(Duration::ZERO)).unwrap();
        let limiter =
            Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_day(LIMIT.into()));
        for round in 0..60 {
            let key = |i: usize| format!("{connections}-{round}-{}", i * 7919 % 5);
            let keys: Vec<_> = (0..1_500).map(key).collect();
            let mut admin = server.connection();
            let during = match round % 3 {
                0 => "nothing happens",
                // Otherwise another connection can load the script for the later checks.
                1 if connections == 1 => {
                    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut admin).unwrap();
                    "the scripts are flushed"
                }
                1 => "nothing happens",
                _ => {
                    let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
                    redis::cmd("CLIENT").arg(&kill).exec(&mut admin).unwrap();
                    "the connections are closed"
                }
            };
            let decisions = check_in_order(&limiter, &keys).await;
            assert_order(&keys, &decisions, LIMIT, during);
        }
    }
}

#[tokio::test]
async fn the_calls_under_way_grow_while_many_checks_wait() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = support::connected(support::config(&proxy.url())).await;
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(9));
    let _ = limiter.check("first").await.unwrap();
    let before = server.calls("evalsha");
    proxy.hold_replies(true);
    let checks = tokio::spawn(async move { check_all(&limiter, &of_many_keys(5_000)).await });
    until("many calls are under way", async || server.calls("evalsha") - before >= 60).await;
    proxy.hold_replies(false);
    assert!(checks.await.unwrap().iter().all(Result::is_ok));
    let calls = server.calls("evalsha") - before;
    assert!(calls <= 5_000 / 64 + 8, "{calls} calls: batches are full");
}

#[tokio::test]
async fn a_server_that_rejects_writes_still_denies() {
    for algorithm in ALGORITHMS {
        let server = RedisServer::start();
        let store = support::forgetful_store(&server).await;
        let limiter = Limiter::new("default", store, algorithm, Quota::per_day(2));
        for i in (0..50).step_by(2) {
            let check = async || {
                let check = limiter.reserve(format!("key-{i}"), 1, Duration::ZERO);
                check.await.unwrap().keep().is_allowed()
            };
            while check().await {}
        }
        let set = |value: &str| {
            let mut command = redis::cmd("CONFIG");
            command.arg("SET").arg("maxmemory").arg(value).exec(&mut server.connection()).unwrap();
        };
        set("1");
        let before = server.calls("evalsha");
        let mut tasks = JoinSet::new();
        for i in 0..50 {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                let key = format!("key-{i}");
                (i, limiter.reserve(key, 1, Duration::ZERO).await.map(Admission::keep))
            });
        }
        for (i, decision) in tasks.join_all().await {
            match decision {
                Ok(decision) => assert!(i % 2 == 0 && !decision.is_allowed(), "{algorithm} {i}"),
                Err(error) => assert!(i % 2 == 1 && error.is_store(), "{algorithm} {i}: {error}"),
            }
        }
        let calls = server.calls("evalsha") - before;
        assert!(calls <= 4, "{algorithm}: {calls} calls to a server in trouble");
        set("0");
    }
}

#[tokio::test]
async fn a_broken_list_of_reservations_fails_no_other_key_and_is_named() {
    let server = RedisServer::start();
    let store = store(&server).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(1));
    let wait = Duration::from_secs(5 * 3_600);
    for _ in 0..3 {
        let _ = limiter.reserve("key-3", 1, wait).await.unwrap().keep();
    }
    let name = "ratelimit:default:token-bucket:{key-3}";
    let mut admin = server.connection();
    let mut value: Vec<u8> = redis::cmd("GET").arg(name).query(&mut admin).unwrap();
    let entries = value.len() - 2 * 16;
    value.splice(entries..entries, [0; 8]);
    redis::cmd("SET").arg(name).arg(value).arg("KEEPTTL").exec(&mut admin).unwrap();
    let mut tasks = JoinSet::new();
    for i in 0..64 {
        let limiter = limiter.clone();
        tasks.spawn(async move { (i, limiter.reserve(format!("key-{i}"), 1, wait).await) });
    }
    for (i, decision) in tasks.join_all().await {
        assert_eq!(decision.is_err(), i == 3, "{i}: {decision:?}");
        if let Err(Error::Store(error)) = decision {
            let text = with_sources(&error);
            assert!(text.contains(name) && text.contains("delete it"), "{text}");
        }
    }
}

#[tokio::test]
async fn checks_without_an_end_of_their_deadline_share_calls() {
    let server = RedisServer::start();
    let config = support::config(&server.url()).deadline(Duration::MAX);
    let store = RedisStore::new(config).unwrap();
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_day(10));
    let decisions = check_all(&limiter, &of_many_keys(100)).await;
    assert!(decisions.iter().all(|it| it.as_ref().unwrap().is_allowed()), "{decisions:?}");
}

/// A branch of a `select!` in a loop is such a check.
#[tokio::test]
async fn a_check_that_is_not_polled_any_more_keeps_no_others() {
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let of_application = RedisConfig::from_connection(connection).deadline(Duration::from_secs(30));
    let given = RedisStore::new(of_application).unwrap();
    for store in [store(&server).await, given] {
        let name = if store.health().answers > 0 { "own" } else { "given" };
        let limiter = Limiter::new(name, store, Algorithm::token_bucket(), Quota::per_hour(9));
        let mut check = pin!(limiter.check("first").into_future());
        let mut reservation = pin!(limiter.reserve("first", 1, Duration::from_secs(1)));
        let mut hold = pin!(limiter.hold("first", 1).into_future());
        tokio::select! {
            biased;
            _ = &mut check => unreachable!("Redis has not answered yet"),
            _ = &mut reservation => unreachable!("Redis has not answered yet"),
            _ = &mut hold => unreachable!("Redis has not answered yet"),
            () = future::ready(()) => {}
        }
        for _ in 0..3 {
            let decisions = check_all(&limiter, &of_many_keys(100)).await;
            assert!(decisions.iter().all(|it| it.as_ref().unwrap().is_allowed()), "{name}");
        }
        assert!(check.await.unwrap().is_allowed());
        assert!(reservation.await.unwrap().keep().is_allowed());
        assert!(hold.await.is_ok(), "{name}");
    }
}

#[tokio::test]
async fn a_check_of_an_idle_limiter_needs_no_task() {
    let server = RedisServer::start();
    let limiter =
        Limiter::new("default", store(&server).await, Algorithm::FixedWindow, Quota::per_hour(9));
    assert!(limiter.check("key").await.unwrap().is_allowed());
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for is_dropped in [true, false] {
        let mut check = Box::pin(limiter.check("key").into_future());
        let polled = poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx).is_pending())).await;
        assert!(polled && tasks() <= before, "{} tasks, {before} before", tasks());
        if is_dropped {
            drop(check); // the limiter is idle again
        } else {
            assert!(check.await.unwrap().is_allowed());
        }
    }
    let decisions = check_all(&limiter, &of_many_keys(100)).await;
    assert!(decisions.iter().all(Result::is_ok));
}

#[tokio::test]
async fn a_check_that_is_dropped_before_its_call_spends_nothing() {
    let server = RedisServer::start();
    let limiter =
        Limiter::new("default", store(&server).await, Algorithm::FixedWindow, Quota::per_hour(9));
    let mut first = Box::pin(limiter.check("first"));
    let mut second = Box::pin(limiter.check("second"));
    poll_fn(|cx| {
        assert!(first.as_mut().poll(cx).is_pending() && second.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    drop(second);
    assert!(first.await.unwrap().is_allowed());
    assert_eq!(limiter.peek("second").await.unwrap().remaining(), 9);
}

#[tokio::test]
async fn a_key_with_another_value_fails_no_other_check() {
    let server = RedisServer::start();
    let store = store(&server).await;
    for algorithm in ALGORITHMS {
        let limiter = Limiter::new(algorithm.name(), store.clone(), algorithm, Quota::per_hour(9));
        let _ = limiter.peek("key").await.unwrap();
        for (key, command, value) in [("key-3", "SET", "x"), ("key-5", "SADD", "x")] {
            let key = format!("ratelimit:{0}:{0}:{{{key}}}", algorithm.name());
            redis::cmd(command).arg(key).arg(value).exec(&mut server.connection()).unwrap();
        }
        let decisions = check_all(&limiter, &of_many_keys(50)).await;
        for (i, decision) in decisions.iter().enumerate() {
            assert_eq!(decision.is_err(), i == 3 || i == 5, "{algorithm} {i}: {decision:?}");
        }
        assert_eq!(limiter.peek("key-2").await.unwrap().remaining(), 8, "{algorithm}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_used_as_one_server_gets_calls_of_one_key() {
    let cluster = Cluster::start(1, false, &[]);
    let node = cluster.nodes().next().unwrap();
    let store = support::lazy(&node.url());
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::token_bucket(), Quota::per_hour(9));
    for remaining in [8, 7] {
        for decision in check_all(&limiter, &of_many_keys(100)).await {
            assert_eq!(decision.unwrap().remaining(), remaining);
        }
    }
    let errors = store.health().errors;
    assert!((1..=4).contains(&errors), "{errors} calls were rejected");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_check_fails_at_its_own_deadline_and_all_open_the_circuit() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let deadline = Duration::from_millis(200);
    let observed = support::connected(support::config(&proxy.url()).deadline(deadline)).await;
    let quick = Limiter::new("quick", observed.clone(), Algorithm::FixedWindow, Quota::per_hour(9));
    assert!(eventually(async || quick.check("key").await).await.is_allowed());
    proxy.hold_replies(true);
    for decision in check_all(&quick, &of_many_keys(300)).await {
        assert!(matches!(decision, Err(Error::Store(_))), "{decision:?}");
    }
    // A check that this process was too busy to send in time is no timeout of Redis.
    let health = observed.health();
    assert!(!health.is_available && health.timeouts >= 5, "{health:?}");
    proxy.hold_replies(false);
    until("Redis is used again", async || quick.check("key").await.is_ok()).await;
}

/// The waker of a task that panics when it is called.
struct Broken;

impl Wake for Broken {
    fn wake(self: Arc<Self>) {
        panic!("a broken waker");
    }
}

#[tokio::test]
async fn a_waker_that_panics_keeps_no_other_request_from_its_deadline() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let config = support::config(&proxy.url()).deadline(Duration::from_millis(200));
    let store = support::connected(config).await;
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(9));
    assert!(eventually(async || limiter.check("key").await).await.is_allowed());
    proxy.hold_replies(true);
    let reserve = || Box::pin(limiter.reserve("key", 1, Duration::from_secs(1)));
    // The first one goes alone, the others together.
    let (mut first, mut broken, mut last) = (reserve(), reserve(), reserve());
    let waker = Arc::new(Broken).into();
    poll_fn(|cx| {
        assert!(first.as_mut().poll(cx).is_pending());
        assert!(broken.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert!(last.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    let ends = async { (first.await, last.await) };
    let (first, last) = tokio::time::timeout(Duration::from_secs(60), ends).await.expect("an end");
    assert!(first.is_err() && last.is_err(), "{first:?} {last:?}");
    assert!(broken.await.is_err());
}

/// Checks while another task computes beside its own request, before it returns to the runtime.
fn check_beside<R: Future<Output = ()> + Send + 'static>(
    request: impl FnOnce(Limiter) -> R,
    is_idle: bool,
) {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let mut runtime = runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
    let config = support::config(&proxy.url()).deadline(Duration::from_secs(10));
    let limiter = runtime.block_on(async {
        let store = support::connected(config).await;
        Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_day(9))
    });
    let check = |key| {
        let limiter = limiter.clone();
        runtime.spawn(async move { assert!(limiter.check(key).await.unwrap().is_allowed()) })
    };
    runtime.block_on(check("loads the script")).unwrap();
    let (before, mut others) = (server.calls("evalsha"), vec![]);
    if !is_idle {
        proxy.hold_replies(true);
        others.push(check("under way"));
        while server.calls("evalsha") == before {
            thread::sleep(Duration::from_millis(5));
        }
    }
    let [computing, over] = [(); 2].map(|()| Arc::new(Barrier::new(2)));
    let (begins, ends, own) = (computing.clone(), over.clone(), request(limiter.clone()));
    others.push(runtime.spawn(async {
        let compute = async move {
            begins.wait();
            ends.wait(); // blocks the worker
        };
        tokio::join!(own, compute).0
    }));
    computing.wait();
    proxy.hold_replies(false);
    let decisions = runtime.block_on(check_all(&limiter, &of_many_keys(100)));
    over.wait();
    assert!(decisions.iter().all(Result::is_ok), "{is_idle}: {decisions:?}");
    for other in others {
        runtime.block_on(other).unwrap();
    }
}

#[test]
fn a_task_that_computes_beside_its_request_keeps_no_others() {
    for is_idle in [true, false] {
        check_beside(
            |api| async move { assert!(api.check("own").await.unwrap().is_allowed()) },
            is_idle,
        );
        // The caller polls the call of a peek.
        check_beside(|api| async move { drop(api.peek("own").await.unwrap()) }, is_idle);
    }
}

#[test]
fn a_blocked_runtime_delays_no_check_in_another_one() {
    let server = RedisServer::start();
    let one = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let two = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The connection is in the second runtime.
    let store = two.block_on(store(&server));
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(1_000));
    assert!(two.block_on(limiter.check("key")).unwrap().is_allowed());
    let (blocked, over) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let thread = {
        let (limiter, blocked, over) = (limiter.clone(), blocked.clone(), over.clone());
        thread::spawn(move || {
            one.block_on(async {
                let mut checks: Vec<_> = (0..10).map(|_| Box::pin(limiter.check("key"))).collect();
                poll_fn(|cx| {
                    let polled = checks.iter_mut().map(|check| check.as_mut().poll(cx));
                    assert!(polled.filter(Poll::is_pending).count() == 10);
                    Poll::Ready(())
                })
                .await;
                blocked.wait();
                over.wait(); // blocks the thread
                for check in checks {
                    assert!(check.await.unwrap().is_allowed());
                }
            });
        })
    };
    blocked.wait();
    let start = Instant::now();
    let decisions = two.block_on(check_all(&limiter, &of_many_keys(100)));
    assert!(decisions.iter().all(Result::is_ok), "after {:?}", start.elapsed());
    over.wait();
    // The first runtime needs the connection of the second one.
    while !thread.is_finished() {
        two.block_on(async { tokio::time::sleep(Duration::from_millis(1)).await });
    }
    thread.join().unwrap();
}
