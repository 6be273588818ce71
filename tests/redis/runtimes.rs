//! Applications with several runtimes, and runtimes that end, stand still or are kept busy: calls
//! in one runtime do not depend on others, and work in the background depends on none.

use std::{
    panic::{self, AssertUnwindSafe},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};
use tower_ratelimit::{
    Algorithm, Charge, Error, Limiter, Permit, Quota, RedisStore,
    store::{self, ErrorKind, RedisConfig},
};

use crate::support::{
    self,
    load::until,
    proxy::Proxy,
    recorder::{Recorder, observed},
    sentinel::fake::Fake,
    server::RedisServer,
};

/// A new hold is renewed after half a second, and expires after a second if it is not.
const LIFETIME: Duration = Duration::from_secs(4);

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

const RUNTIMES: [fn() -> Runtime; 2] = [current_thread, multi_thread];

fn places(store: &RedisStore) -> Limiter {
    let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(5));
    Limiter::new("places", store.clone(), algorithm, quota).hold_lifetime(LIFETIME)
}

fn requests(store: &RedisStore) -> Limiter {
    Limiter::new("requests", store.clone(), Algorithm::token_bucket(), Quota::per_day(1_000_000))
}

async fn hold(places: &Limiter, key: &str) -> Permit {
    places.hold(key, 1).await.unwrap().admitted().unwrap()
}

/// Waits for the places of a key as another process does, and blocks the thread meanwhile.
fn until_taken(server: &RedisServer, key: &'static str, taken: u64) {
    let url = server.url();
    let other = thread::spawn(move || {
        current_thread().block_on(async {
            let places = places(&support::connected(support::config(&url)).await);
            let is_so = async || places.peek(key).await.unwrap().held() == taken;
            until(&format!("{taken} places of {key} are taken"), is_so).await;
        });
    });
    other.join().unwrap();
}

/// How a runtime ends up without being driven.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    StandsStill,
    Ends,
}

#[test]
fn a_flush_and_an_end_need_no_runtime_in_which_permits_were_taken() {
    for after in [After::StandsStill, After::Ends] {
        let server = RedisServer::start();
        let store = support::lazy(&server.url());
        let places = places(&store);
        let worker = thread::spawn({
            let places = places.clone();
            move || {
                let runtime = current_thread();
                // Driven between pauses.
                let kept = runtime.block_on(hold(&places, "kept"));
                runtime.block_on(async { drop(hold(&places, "job").await) });
                let held = runtime.block_on(hold(&places, "job"));
                drop(held); // outside of the runtime
                (kept, (after == After::StandsStill).then_some(runtime))
            }
        });
        let (kept, still) = worker.join().unwrap();
        let serving = multi_thread();
        serving.block_on(async {
            timeout(Duration::from_secs(20), store.flush()).await.expect("the ends are sent");
            assert_eq!(places.peek("job").await.unwrap().held(), 0, "{after:?}");
        });
        drop(serving);
        thread::sleep(LIFETIME / 2); // of a real server
        assert!(!kept.is_expired(), "{after:?}");
        until_taken(&server, "kept", 1);
        drop(kept);
        until_taken(&server, "kept", 0);
        drop(still);
    }
}

#[test]
fn a_flush_is_bounded_if_the_answer_to_a_dropped_request_is_in_a_runtime_that_stands_still() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = support::lazy(&proxy.url());
    let places = places(&store);
    let standing = current_thread();
    standing.block_on(async {
        assert_eq!(places.peek("key").await.unwrap().held(), 0);
        proxy.hold_replies(true);
        let held = timeout(Duration::from_millis(50), places.hold("key", 1)).await;
        assert!(held.is_err(), "no reply arrives");
    });
    proxy.hold_replies(false);
    // Its time passes at once: nothing else happens in it.
    let paused = Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    paused.block_on(async {
        timeout(Duration::from_secs(120), store.flush()).await.expect("it is bounded");
    });
}

#[test]
fn a_task_that_computes_delays_no_renewal_and_no_end() {
    for runtime in RUNTIMES {
        let server = RedisServer::start();
        let runtime = runtime();
        let computing = async move {
            let recorder = Recorder::new();
            let store = support::connected(support::config(&server.url())).await;
            let places = places(&observed(store, recorder.clone()));
            let neighbour = hold(&places, "neighbour").await;
            let ended = hold(&places, "ended").await;
            let job = hold(&places, "job").await;
            drop(ended);
            // From here on, the task does not let others run.
            until_taken(&server, "ended", 0);
            thread::sleep(LIFETIME / 2);
            assert!(!job.is_expired() && !neighbour.is_expired());
            until_taken(&server, "job", 1);
            until_taken(&server, "neighbour", 1);
            drop([job, neighbour]);
            until_taken(&server, "job", 0);
            assert_eq!(recorder.take_of("hold lost"), [""; 0]);
        };
        runtime.block_on(async { tokio::spawn(computing).await.unwrap() });
    }
}

/// Makes a request that is given up while the store connects, and then one without a limit of time.
fn use_store(runtime: &Runtime, requests: &Limiter, key: usize, is_first_given_up: bool) {
    runtime.block_on(async {
        if is_first_given_up {
            let _ = timeout(Duration::from_millis(1), requests.check(key)).await;
        } else {
            assert!(requests.check(key).await.unwrap().is_allowed());
        }
    });
}

#[test]
fn a_store_can_be_shared_by_tests_with_a_runtime_each() {
    for runtime in RUNTIMES {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server);
        proxy.delay_replies(Duration::from_millis(2)); // the first request ends before it is sent
        let requests = requests(&support::lazy(&proxy.url()));
        for test in 0..40 {
            use_store(&runtime(), &requests, test, test % 2 == 0);
        }
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let requests = requests.clone();
                thread::spawn(move || {
                    for test in 0..20 {
                        use_store(&runtime(), &requests, 100 * thread + test, test % 3 == 0);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn a_runtime_that_ends_while_it_reads_the_slots_of_a_cluster_fails_no_other_request() {
    let reads = Arc::<AtomicUsize>::default();
    let (read, port) = (reads.clone(), Arc::<AtomicUsize>::default());
    let own_port = port.clone();
    let node = Fake::start(move |_, words| match words[0] {
        "CLUSTER" => {
            read.fetch_add(1, SeqCst);
            thread::sleep(Duration::from_millis(200));
            let port = own_port.load(SeqCst);
            format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n")
        }
        "TIME" => "*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n".to_owned(),
        _ => "*2\r\n:1700000000000000\r\n$0\r\n\r\n".to_owned(),
    });
    port.store(node.port().into(), SeqCst);
    let config = RedisConfig::cluster([node.url()]).unwrap().deadline(Duration::from_secs(30));
    let store = RedisStore::new(config).unwrap();
    let requests = requests(&store);
    current_thread().block_on(async {
        let first = timeout(Duration::from_millis(50), requests.check("key")).await;
        assert!(first.is_err(), "the slots are not known yet");
    });
    let _ = current_thread().block_on(requests.check("key"));
    assert_eq!(reads.load(SeqCst), 1);
    assert_eq!(store.health().timeouts, 0);
}

#[test]
fn the_end_of_a_runtime_is_no_failure_of_the_server() {
    let server = RedisServer::start();
    let store = support::lazy(&server.url());
    let (requests, places) = (requests(&store), places(&store));
    let serving = current_thread();
    use_store(&serving, &requests, 0, false);
    let cx = &mut Context::from_waker(Waker::noop());
    for _ in 0..10 {
        let charge = Charge::new(&places, "key").also(&requests);
        let mut call = pin!(charge.hold());
        let ending = current_thread();
        {
            let _entered = ending.enter();
            assert!(call.as_mut().poll(cx).is_pending());
        }
        drop(ending);
        let _entered = serving.enter();
        let Poll::Ready(Err(Error::Store(error))) = call.poll(cx) else { panic!() };
        assert_eq!(error.kind(), ErrorKind::Timeout);
    }
    use_store(&serving, &requests, 0, false);
    assert_eq!(store.health().status(), "ready");
}

/// The connection of a runtime that stands still answers nothing.
#[test]
fn a_request_does_not_need_the_runtime_of_an_earlier_one() {
    let server = RedisServer::start();
    let store = support::lazy(&server.url());
    let requests = requests(&store);
    let standing: Vec<_> = (0..3)
        .map(|key| {
            let runtime = current_thread();
            use_store(&runtime, &requests, key, false);
            runtime
        })
        .collect();
    for runtime in RUNTIMES {
        (0..10).for_each(|key| use_store(&runtime(), &requests, key, false));
    }
    for (key, runtime) in standing.iter().enumerate() {
        use_store(runtime, &requests, key, false);
    }
    assert_eq!(store.health().status(), "ready");
    assert_eq!(store.health().timeouts + store.health().errors, 0);
}

#[test]
fn each_runtime_has_a_connection_and_work_in_the_background_one_more() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let store = support::lazy(&proxy.url());
    let (requests, places) = (requests(&store), places(&store));
    let (one, two) = (current_thread(), multi_thread());
    use_store(&one, &requests, 0, false);
    assert_eq!(proxy.open(), 1);
    use_store(&two, &requests, 0, false);
    assert_eq!(proxy.open(), 2);
    one.block_on(async {
        drop(hold(&places, "key").await);
        store.flush().await;
        assert_eq!(proxy.open(), 3);
        use_store_here(&requests).await;
        assert_eq!(proxy.open(), 3);
    });
    drop(two);
    one.block_on(until("a connection ends with its runtime", async || proxy.open() == 2));
    drop([requests, places]);
    drop(store);
    one.block_on(until("all end with the store", async || proxy.open() == 0));
}

async fn use_store_here(requests: &Limiter) {
    assert!(requests.check("key").await.unwrap().is_allowed());
}

#[test]
fn a_call_outside_of_a_runtime_panics_as_documented() {
    fn panics(call: impl Future) -> bool {
        let poll = || pin!(call).poll(&mut Context::from_waker(Waker::noop())).is_ready();
        panic::catch_unwind(AssertUnwindSafe(poll)).is_err()
    }

    let server = RedisServer::start();
    let store = RedisStore::lazy(&server.url()).unwrap();
    let mut scan = store.scan_all();
    assert!(panics(async move { scan.next().await.is_ok() }));
    assert!(panics(async move { store.ping().await.is_ok() }));
    let url = server.url();
    assert!(panics(async move { store::connect(&url).await.is_ok() }));
}
