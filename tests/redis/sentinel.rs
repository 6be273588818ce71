//! Redis behind Sentinels: the master is followed when it changes.

use std::{
    error::Error,
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpSocket, TcpStream},
    runtime::Runtime,
    task::{self, JoinSet},
    time::{sleep, timeout},
};
use tower_ratelimit::{Limiter, RedisStore, store::RedisConfig};

use crate::support::{
    cluster::free_port,
    load::{
        Load, Tasks, eventually, forgetful, key, limiter, many_servers, until, until_decided,
        until_server,
    },
    log::Log,
    permissions,
    sentinel::{
        NAME, Watched,
        fake::{Fake, array, map, push},
    },
    server::RedisServer,
};

/// A deadline that a busy machine can keep.
const LONG: Duration = Duration::from_secs(30);

fn config(sentinels: impl IntoIterator<Item = impl AsRef<str>>, master: &str) -> RedisConfig {
    RedisConfig::sentinels(sentinels, master).unwrap()
}

fn store(watched: &Watched) -> RedisStore {
    forgetful(config(watched.sentinel_urls(), &watched.master_url()))
}

fn with_long_deadline(watched: &Watched) -> Limiter {
    let config = config(watched.sentinel_urls(), &watched.master_url());
    limiter(&forgetful(config.deadline(LONG)))
}

fn users(prefix: &str) -> Vec<String> {
    (0..30).map(|number| format!("{prefix}-{number}")).collect()
}

/// Uses up a quota, and waits until the replicas have the count.
async fn spend_all(watched: &Watched, limiter: &Limiter, user: &str) {
    while eventually(async || limiter.check(key(user)).await).await.is_allowed() {}
    until_server("the replicas have all data", || watched.is_replicated()).await;
}

async fn followed(watched: &Watched, limiters: &[Limiter], users: &[String], fault: &str) {
    let start = Instant::now();
    let old = watched.servers[0].1;
    until_server("the Sentinels name another master", || {
        watched.master().is_some_and(|port| port != old)
    })
    .await;
    let promoted = start.elapsed();
    let _ = until_decided(limiters, users).await;
    println!("{fault}: another master after {promoted:?}, decided after {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_connects_once_the_sentinels_run_and_follows_when_the_master_is_killed() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let mut watched = Watched::start(None);
    let stores = [store(&watched), store(&watched)];
    let error = stores[0].ping().await.unwrap_err();
    assert!(error.source().is_some(), "{error:?}");
    watched.watch();
    for store in &stores {
        until("the store answers", async || store.ping().await.is_ok()).await;
    }
    let limiters = stores.each_ref().map(limiter);
    let long_deadline = with_long_deadline(&watched);
    spend_all(&watched, &long_deadline, "spent").await;

    let users = users("user");
    let load = Load::start(&limiters, &users);
    tokio::time::sleep(Duration::from_secs(1)).await;
    watched.servers[0].0.kill();
    followed(&watched, &limiters, &users, "the master is killed").await;
    let answers = load.finish("the master is killed").await;
    assert!(users.iter().map(|user| answers.decided(user)).sum::<usize>() > 0);
    for limiter in limiters.iter().chain([&long_deadline]) {
        assert!(!eventually(async || limiter.check(key("spent")).await).await.is_allowed());
    }
    drop((stores, limiters, long_deadline));
    tasks.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_master_is_replaced_and_not_used_again() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let mut watched = Watched::start(Some("secret"));
    watched.watch();
    let stores = [store(&watched), store(&watched)];
    let limiters = stores.each_ref().map(limiter);
    let idle = with_long_deadline(&watched);
    let long_deadline = with_long_deadline(&watched);
    spend_all(&watched, &long_deadline, "spent").await;
    let _ = eventually(async || idle.check(key("idle")).await).await;

    let early = users("early");
    let load = Load::start(&limiters, &early);
    tokio::time::sleep(Duration::from_secs(1)).await;
    watched.servers[0].0.freeze();
    followed(&watched, &limiters, &early, "the master is frozen").await;
    let _ = load.finish("the master is frozen").await;
    let fresh = with_long_deadline(&watched);
    assert!(!eventually(async || fresh.check(key("spent")).await).await.is_allowed());

    let late = users("late");
    let master = watched.master();
    let load = Load::start(&limiters, &late);
    watched.servers[0].0.thaw();
    until_server("the old master is a replica", || !watched.is_master(0)).await;
    let took = until_decided(&limiters, &late).await;
    println!("the old master has become a replica: decided after {took:?}");
    let answers = load.finish("the old master comes back").await;
    if watched.master() == master {
        answers.check_counts(&fresh, &late).await;
    } // otherwise a busy machine caused another failover, in which counts can be lost

    until("an idle store decides on the same master as the others", async || {
        let remaining = async |limiter: &Limiter| {
            let decision = eventually(async || limiter.check(key("new")).await).await;
            decision.remaining()
        };
        let before = remaining(&idle).await;
        remaining(&fresh).await + 1 == before
    })
    .await;
    drop((stores, limiters, idle, long_deadline, fresh));
    tasks.check().await;
}

#[tokio::test]
async fn a_wrong_name_is_reported() {
    let mut watched = Watched::start(None);
    watched.watch();
    let store = forgetful(config(watched.sentinel_urls(), "redis://other"));
    let error = store.ping().await.unwrap_err();
    let source = error.source().expect("a reason").to_string();
    assert!(source.contains("Sentinels") && source.contains("other"), "{source}");

    let none: [&str; 0] = [];
    assert!(RedisConfig::sentinels(none, "redis://limits").is_err());
    assert!(RedisConfig::sentinels(["redis://127.0.0.1"], "unix:///limits").is_err());
}

/// The number of requests in flight in a failover.
const IN_FLIGHT: u64 = 8;

/// Promotes a replica while requests are decided. Asserts that the new master decides before the
/// Sentinels make the old one a replica, some seconds later, and that the old one decides nothing
/// from then on. Returns the number of requests that the old one received after the announcement.
async fn fail_over(watched: &Watched, limiter: &Limiter, fault: &str) -> u64 {
    let failed = Arc::new(AtomicUsize::new(0));
    let mut load = JoinSet::new();
    for number in 0..IN_FLIGHT {
        let (limiter, failed) = (limiter.clone(), failed.clone());
        load.spawn(async move {
            loop {
                if limiter.check(key(&format!("user-{number}"))).await.is_err() {
                    failed.fetch_add(1, SeqCst);
                }
                sleep(Duration::from_millis(2)).await;
            }
        });
    }
    let decisions = || task::block_in_place(|| watched.decisions());
    until("the master decides", async || decisions()[0] > 0).await;
    failed.store(0, SeqCst);
    let announcement = watched.announcement();
    task::block_in_place(|| watched.fail_over());
    let started = Instant::now();
    let mut at_announcement = None;
    let followed = loop {
        let now = decisions();
        if at_announcement.is_none() && announcement.try_recv().is_ok() {
            at_announcement = Some(now[0]);
            println!("{fault}: announced after {:?}", started.elapsed());
        }
        if now[1..] != [0, 0] {
            break now;
        }
        let is_master = task::block_in_place(|| watched.reports_master(0));
        assert!(is_master, "the store left the old master only when it was a replica");
        sleep(Duration::from_millis(2)).await;
    };
    println!("{fault}: followed after {:?}", started.elapsed());
    until_server("the old master is a replica", || !watched.is_master(0)).await;
    load.shutdown().await;
    let [old, ..] = decisions();
    let late = old - followed[0];
    assert!(late <= IN_FLIGHT, "{late} decisions by the old master after the first of the new one");
    let late = old - at_announcement.unwrap_or(followed[0]);
    println!("{fault}: {late} decisions by the old master since, {failed:?} failed");
    late
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_failover_is_followed_when_it_is_announced() {
    let _permit = many_servers().await;
    let tasks = Tasks::count();
    let mut watched = Watched::start(None);
    watched.watch();
    let urls = watched.sentinel_urls_as("listener");
    let store = forgetful(config(urls, &watched.master_url()));
    // The watcher does not end with the runtime of its first call.
    let earlier = store.clone();
    let ping = move || Runtime::new().unwrap().block_on(earlier.ping());
    task::spawn_blocking(ping).await.unwrap().unwrap();
    until_server("the store is subscribed everywhere", || watched.subscriptions() == [1; 3]).await;
    let late = fail_over(&watched, &limiter(&store), "a planned failover").await;
    // Far more requests are made in a second.
    assert!(late <= 50 * IN_FLIGHT, "{late} decisions by the old master after the announcement");
    assert_eq!(watched.denied_commands(), [0; 3], "the permissions are enough");
    drop(store);
    tasks.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_failover_is_followed_after_all_subscriptions_have_ended() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    watched.watch();
    let store = store(&watched);
    until("the store has connected", async || store.ping().await.is_ok()).await;
    until_server("the store is subscribed everywhere", || watched.subscriptions() == [1; 3]).await;
    assert_eq!(task::block_in_place(|| watched.kill_subscriptions()), 3);
    fail_over(&watched, &limiter(&store), "a planned failover after the subscriptions").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_failover_is_followed_without_the_permission_to_subscribe() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    watched.watch();
    let urls = watched.sentinel_urls_as("reader");
    let store = forgetful(config(urls, &watched.master_url()));
    fail_over(&watched, &limiter(&store), "a planned failover without subscriptions").await;
    assert_eq!(watched.subscriptions(), [0; 3]);
}

#[tokio::test]
async fn a_missing_permission_to_subscribe_is_reported_once() {
    let mut watched = Watched::start(None);
    watched.watch();
    let (log, _guard) = Log::start(tracing::Level::WARN);
    let urls = watched.sentinel_urls_as("reader");
    let store = forgetful(config(urls, &watched.master_url()));
    until("the store has connected", async || store.ping().await.is_ok()).await;
    until("all Sentinels have denied the subscription", async || {
        watched.denied_commands() == [1; 3]
    })
    .await;
    // The thread of the background reads these answers later.
    until("a denial is reported", async || log.text().contains("+subscribe")).await;
    let lines = log.text();
    assert_eq!(lines.matches("+subscribe").count(), 1, "{lines}");
    assert_eq!(lines.lines().count(), 1, "{lines}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_with_the_documented_permissions_are_enough() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    let permissions = permissions("watched").join(" ");
    let words: Vec<_> = ["ACL"].into_iter().chain(permissions.split(' ')).collect();
    task::block_in_place(|| {
        watched.watch();
        let () = watched.query(0, &words).unwrap();
    });
    let sentinels = watched.sentinel_urls_as("listener");
    let config = config(sentinels, &format!("redis://watched:secret@{NAME}"));
    let store = forgetful(config.deadline(LONG));
    store.ping().await.unwrap();
    until_server("the store is subscribed everywhere", || watched.subscriptions() == [1; 3]).await;
    let limiter = limiter(&store);
    let _ = limiter.check(key("user")).await.unwrap();
    task::block_in_place(|| {
        let log: redis::Value = watched.query(0, &["ACL", "LOG"]).unwrap();
        assert!(log.as_sequence().is_some_and(<[_]>::is_empty), "{log:?}");
        assert_eq!(watched.denied_commands(), [0; 3]);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_sentinels_are_discovered() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    watched.watch();
    let [first, ..] = watched.sentinel_urls();
    let store = forgetful(config([first], &watched.master_url()));
    until("the store has connected", async || store.ping().await.is_ok()).await;
    until_server("the store is subscribed everywhere", || watched.subscriptions() == [1; 3]).await;
    task::block_in_place(|| watched.end_the_first_sentinel());
    fail_over(&watched, &limiter(&store), "a planned failover without the first Sentinel").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_with_false_replies_changes_nothing() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    watched.watch();
    let port = free_port().to_string();
    let decoy = RedisServer::start_with(&["--port", &port, "--bind", "127.0.0.1"]);
    let commands = Arc::new(AtomicUsize::new(0));
    let ghost = Arc::new(Fake::start(|_, _| "-ERR\r\n".to_owned()));
    let (received, ghost_port) = (commands.clone(), ghost.port().to_string());
    let false_sentinel = Fake::start(move |_, words| {
        let announcement = push(&[
            "message",
            "+switch-master",
            &format!("{NAME} 127.0.0.1 {port} 127.0.0.1 {port}"),
        ]);
        match words {
            ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", _] => {
                received.fetch_add(1, SeqCst);
                array(&["127.0.0.1", &port]) + &announcement
            }
            ["SENTINEL", "MASTER", _] => map(&[("config-epoch", "1000000")]),
            ["SENTINEL", "MYID"] => "$4\r\nliar\r\n".to_owned(),
            ["SENTINEL", "SENTINELS", _] => {
                let entry = [("runid", "ghost"), ("ip", "127.0.0.1"), ("port", &ghost_port)];
                "*1\r\n".to_owned() + &map(&entry)
            }
            ["SUBSCRIBE", channel] => {
                format!(">3\r\n$9\r\nsubscribe\r\n${}\r\n{channel}\r\n:1\r\n", channel.len())
            }
            _ => "-ERR unknown\r\n".to_owned(),
        }
    });
    let [first, second, _] = watched.sentinel_urls();
    let sentinels = [false_sentinel.url(), first, second];
    let store = forgetful(config(sentinels, &watched.master_url()));
    until("the store has connected", async || store.ping().await.is_ok()).await;
    until("the false Sentinel is called repeatedly", async || commands.load(SeqCst) > 20).await;
    let limiter = limiter(&store);
    fail_over(&watched, &limiter, "a planned failover with a false Sentinel").await;
    assert_eq!(decoy.calls("evalsha"), 0);
    assert_eq!(ghost.connections(), 0, "a single Sentinel made another one known");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_cannot_be_reached_keeps_no_store_from_starting() {
    let _permit = many_servers().await;
    let mut watched = Watched::start(None);
    watched.watch();
    let hung = TcpListener::bind("127.0.0.1:0").unwrap();
    let full = TcpSocket::new_v4().unwrap();
    full.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let full = full.listen(1).unwrap();
    // Connections that are not accepted fill the queue; the next ones get no answer.
    let mut waiting = vec![];
    let connect = || TcpStream::connect(full.local_addr().unwrap());
    while let Ok(stream) = timeout(Duration::from_secs(1), connect()).await {
        waiting.push(stream.unwrap());
    }
    let refused = free_port();
    let url = |port: u16| format!("redis://127.0.0.1:{port}");
    let hung = url(hung.local_addr().unwrap().port());
    let full = url(full.local_addr().unwrap().port());
    let [live, ..] = watched.sentinel_urls();
    for dead in [hung.clone(), full.clone(), url(refused)] {
        for urls in [[&dead, &live], [&live, &dead]] {
            let store = forgetful(config(urls, &watched.master_url()).deadline(LONG));
            store.ping().await.unwrap_or_else(|error| panic!("{urls:?}: {error:?}"));
        }
    }
    let urls = [&hung, &full, &url(refused), &live];
    let store = forgetful(config(urls, &watched.master_url()).deadline(LONG));
    store.ping().await.unwrap();
    let master = watched.query::<()>(0, &["CLIENT", "KILL", "TYPE", "normal"]);
    assert!(master.is_ok());
    until("the store connects again", async || store.ping().await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_do_not_answer_are_named_in_the_error() {
    let ports = [free_port(), free_port()];
    let urls = ports.map(|port| format!("redis://127.0.0.1:{port}"));
    let store = forgetful(config(urls, "redis://limits"));
    let error = store.ping().await.unwrap_err();
    let source = error.source().expect("a reason").to_string();
    assert!(source.starts_with("no Sentinel names the master limits: "), "{source}");
    for port in ports {
        assert!(
            source.contains(&format!("127.0.0.1:{port} (cannot connect: Connection refused")),
            "{source}"
        );
    }
    assert!(source.contains("; check"), "{source}");
}

/// One of two Sentinels names another master. Neither of them is more credible than the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_a_master_is_not_left() {
    let masters = [(); 2].map(|()| {
        Fake::start(|_, words| match words[0] {
            "ROLE" => array(&["master"]),
            "TIME" => array(&["1700000000", "0"]),
            _ => "*2\r\n:1700000000000000\r\n$0\r\n\r\n".to_owned(),
        })
    });
    let has_changed = Arc::new(AtomicBool::new(false));
    let ports = masters.each_ref().map(|master| master.port().to_string());
    let sentinels = [0, 1].map(|number| {
        let (has_changed, ports) = (has_changed.clone(), ports.clone());
        Fake::start(move |_, words| match words {
            ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", _] => {
                let index = usize::from(number == 1 && has_changed.load(SeqCst));
                array(&["127.0.0.1", &ports[index]])
            }
            ["SENTINEL", "MASTER", _] => map(&[("config-epoch", ["1", "9"][number])]),
            _ => "-ERR unknown\r\n".to_owned(),
        })
    });
    let config = config(sentinels.each_ref().map(Fake::url), NAME);
    let limiter = limiter(&forgetful(config.deadline(LONG)));
    let _ = limiter.check(key("user")).await.unwrap();
    has_changed.store(true, SeqCst);
    let [first, second] = &masters;
    for _ in 0..100 {
        let _ = limiter.check(key("user")).await.unwrap();
        sleep(Duration::from_millis(25)).await;
    }
    assert_eq!(second.connections(), 0);
    assert!(first.connections() > 1, "its role was read again");
}

/// For example, behind port forwarding. Without Sentinels, decisions continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_address_that_the_sentinels_name_is_mapped() {
    let port = free_port();
    let server = RedisServer::start_with(&["--port", &port.to_string(), "--bind", "127.0.0.1"]);
    let sentinel = Fake::start(|_, words| match words {
        ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", _] => array(&["redis.invalid", "6379"]),
        _ => "-ERR unknown\r\n".to_owned(),
    });
    let map = move |host: &str, _| match host {
        "redis.invalid" => ("127.0.0.1".to_owned(), port),
        other => panic!("{other}"),
    };
    let config = RedisConfig::sentinels([sentinel.url()], NAME).unwrap().map_addresses(map);
    let store = forgetful(config.deadline(LONG));
    store.ping().await.unwrap();
    drop(sentinel);
    let limiter = limiter(&store);
    for _ in 0..4 {
        assert!(limiter.check(key("user")).await.unwrap().is_allowed());
        sleep(Duration::from_millis(500)).await;
    }
    assert!(server.calls("evalsha") >= 4);
}

/// Settings of a server that takes about 30 s to load the keys below, and replies with LOADING.
const LOADS_SLOWLY: [&str; 6] = [
    "--key-load-delay",
    "1000",
    "--loading-process-events-interval-bytes",
    "1024",
    "--rdbcompression",
    "no",
];

/// Fills the master, and restarts it.
async fn restart_slowly(watched: &mut Watched) {
    let fill = "for i = 1, 30000 do redis.call('SET', 'key' .. i, string.rep('v', 100)) end";
    task::block_in_place(|| {
        watched.query::<()>(0, &["EVAL", fill, "0"]).unwrap();
    });
    until_server("the replicas have all data", || watched.is_replicated()).await;
    task::block_in_place(|| {
        watched.query::<()>(0, &["SAVE"]).unwrap();
        watched.servers[0].0.kill();
        watched.servers[0].0.restart();
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_master_that_loads_its_data_is_left_for_the_new_one() {
    let _permit = many_servers().await;
    if task::block_in_place(|| RedisServer::start().major_version()) < 7 {
        // The server has none of the settings, and does not reply while it loads: see the next
        // test.
        return;
    }
    let mut watched = Watched::start_with(None, &LOADS_SLOWLY);
    watched.watch();
    let store = store(&watched);
    let limiter = limiter(&store);
    let _ = eventually(async || limiter.check(key("user")).await).await;
    restart_slowly(&mut watched).await;
    until("the old master replies that it loads", async || {
        let answer = limiter.check(key("user")).await;
        answer.is_err_and(|error| format!("{error:?}").contains("loading"))
    })
    .await;
    until_server("a replica can be promoted", || watched.try_fail_over()).await;
    let promoted = || watched.decisions()[1..].iter().sum::<u64>();
    let before = task::block_in_place(promoted);
    until("a new master decides", async || {
        limiter.check(key("user")).await.is_ok() && task::block_in_place(promoted) > before
    })
    .await;
    assert!(task::block_in_place(|| watched.is_loading(0)), "the store waited for the old master");
}

/// For example, if another server has the address now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_to_a_server_that_loads_its_data_is_replaced() {
    let server = Fake::start(|connection, words| match words[0] {
        "TIME" => array(&["1700000000", "0"]),
        "EVALSHA" if connection > 1 => "*2\r\n:1700000000000000\r\n$0\r\n\r\n".to_owned(),
        _ => "-LOADING Redis is loading the dataset in memory\r\n".to_owned(),
    });
    let limiter = limiter(&RedisStore::lazy(&server.url()).unwrap());
    let mut answers = vec![];
    while server.connections() < 2 && answers.len() < 100 {
        answers.push(limiter.check(key("user")).await);
        sleep(Duration::from_millis(20)).await;
    }
    assert!(answers[0].is_err() && server.connections() == 2, "{answers:?}");
    assert!(eventually(async || limiter.check(key("user")).await).await.is_allowed());
}
