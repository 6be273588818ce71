//! The experiments. Each makes the same fault for a client of the crate `redis` and for this crate.

use std::{
    fs,
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use redis::{
    aio::MultiplexedConnection,
    cluster::ClusterClientBuilder,
    sentinel::{SentinelClient, SentinelServerType},
};
use tempfile::TempDir;
use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};
use tower_ratelimit::store::RedisConfig;

use crate::{
    Result, Row,
    cluster::{Cluster, free_port, until},
    proxy::Proxy,
    server::{RedisServer, program},
    sides::{Call, DEADLINE, Ours, Plain, Side, begin, manager, until_counted},
};

const SECOND: Duration = Duration::from_secs(1);

pub const ALL: [(&str, fn() -> Result<Row>); 8] = [
    ("late", late),
    ("hang", hang),
    ("idle", idle),
    ("twice", twice),
    ("order", order),
    ("node", node),
    ("sentinel", sentinel),
    ("endless", endless),
];

/// One thread, so that a task that blocks it delays all others.
fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// A task blocks the runtime for longer than the deadline, after the calls began.
fn late() -> Result<Row> {
    const CALLS: usize = 20;
    async fn run(side: &dyn Side) -> Result<(usize, u64)> {
        side.count("key").await?;
        let mut calls: Vec<Call> = (0..CALLS).map(|_| side.count("key")).collect();
        begin(&mut calls).await;
        thread::sleep(3 * DEADLINE); // blocks the runtime
        let mut failed = 0;
        for call in calls {
            failed += usize::from(call.await.is_err());
        }
        sleep(SECOND / 5).await;
        // Less the first call, and the call that reads the count.
        Ok((failed, until_counted(side, "key").await? - 2))
    }
    let [peer, ours] = both(|side| Box::pin(run(side)))?;
    let text = |(failed, executed): (usize, u64)| format!("{failed} fail, {executed} are executed");
    Ok(Row {
        property: "of 20 calls that are due before they are written, none fails and is executed",
        redis: text(peer),
        ours: text(ours),
        is_kept: ours.1 == (CALLS - ours.0) as u64,
    })
}

type Run<'a, T> = std::pin::Pin<Box<dyn Future<Output = Result<T>> + 'a>>;

/// Runs an experiment on a server for a `ConnectionManager` and for this crate.
fn both<T>(run: impl for<'a> Fn(&'a dyn Side) -> Run<'a, T>) -> Result<[T; 2]> {
    let server = RedisServer::start();
    let peer =
        runtime()?.block_on(async { run(&manager(&server.url(), DEADLINE).await?).await })?;
    let server = RedisServer::start();
    let ours = runtime()?.block_on(async { run(&Ours::connect(&server.url()).await?).await })?;
    Ok([peer, ours])
}

/// A server is stopped without closing its connections.
fn hang() -> Result<Row> {
    const CALLS: u64 = 50;
    async fn run(side: &dyn Side, server: &RedisServer) -> Result<(u64, u64)> {
        side.count("key").await?;
        server.freeze();
        let mut waited = 0;
        for _ in 0..CALLS {
            let start = Instant::now();
            let _ = side.count("key").await;
            waited += u64::from(start.elapsed() > DEADLINE / 2);
        }
        server.thaw();
        sleep(SECOND).await;
        Ok((waited, until_counted(side, "key").await? - 2))
    }
    let server = RedisServer::start();
    let peer = runtime()?
        .block_on(async { run(&manager(&server.url(), DEADLINE).await?, &server).await })?;
    let server = RedisServer::start();
    let ours =
        runtime()?.block_on(async { run(&Ours::connect(&server.url()).await?, &server).await })?;
    let text = |(waited, executed)| format!("{waited} wait, {executed} are executed later");
    Ok(Row {
        property: "while a server hangs, few of 50 calls wait for their deadlines",
        redis: text(peer),
        ours: text(ours),
        is_kept: ours.0 <= 10,
    })
}

/// A server closes an idle connection.
fn idle() -> Result<Row> {
    const ROUNDS: usize = 50;
    async fn run(side: &dyn Side, server: &RedisServer) -> Result<usize> {
        let mut failed = 0;
        for _ in 0..ROUNDS {
            until_counted(side, "key").await?;
            let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
            redis::cmd("CLIENT").arg(&kill).exec(&mut server.connection())?;
            sleep(SECOND / 50).await;
            failed += usize::from(side.count("key").await.is_err());
        }
        Ok(failed)
    }
    let server = RedisServer::start();
    let peer = runtime()?
        .block_on(async { run(&manager(&server.url(), DEADLINE).await?, &server).await })?;
    let server = RedisServer::start();
    let ours =
        runtime()?.block_on(async { run(&Ours::connect(&server.url()).await?, &server).await })?;
    Ok(Row {
        property: "the next call after an idle connection was closed does not fail (50 times)",
        redis: format!("{peer} fail"),
        ours: format!("{ours} fail"),
        is_kept: ours == 0,
    })
}

/// The connection to the node of a cluster ends in the middle of a reply.
fn twice() -> Result<Row> {
    async fn run(side: &dyn Side, proxy: &Proxy) -> Result<(bool, u64)> {
        until_counted(side, "key").await?;
        proxy.cut_a_reply();
        let is_error = side.count("key").await.is_err();
        // Less the first call, and the call that reads the count.
        Ok((is_error, until_counted(side, "key").await? - 2))
    }
    let start = || -> Result<(Cluster, Proxy)> {
        let cluster = Cluster::start(1, false, &[]);
        let proxy = Proxy::start(&cluster.masters[0].server);
        let port = proxy.url().rsplit(':').next().unwrap_or_default().to_owned();
        let () = cluster.masters[0].query(&["CONFIG", "SET", "cluster-announce-port", &port]);
        Ok((cluster, proxy))
    };
    let (_cluster, proxy) = start()?;
    let peer = runtime()?.block_on(async {
        let client = cluster_client(vec![proxy.url()])?;
        run(&Plain(client.get_async_connection().await?), &proxy).await
    })?;
    let (_cluster, proxy) = start()?;
    let ours = runtime()?
        .block_on(async { run(&Ours::new(RedisConfig::cluster([proxy.url()])?)?, &proxy).await })?;
    let text = |(is_error, executed): (bool, u64)| {
        let result = if is_error { "an error" } else { "no error" };
        format!("{result}, executed {executed} times")
    };
    Ok(Row {
        property: "a call whose reply is lost is not sent again (cluster)",
        redis: text(peer),
        ours: text(ours),
        is_kept: ours == (true, 1),
    })
}

fn cluster_client(urls: Vec<String>) -> Result<redis::cluster::ClusterClient> {
    let builder = ClusterClientBuilder::new(urls).response_timeout(DEADLINE);
    Ok(builder.connection_timeout(DEADLINE).build()?)
}

/// The server forgets its scripts a few times, while calls are made in order.
fn order() -> Result<Row> {
    const CALLS: usize = 4_000;
    const LONG: Duration = Duration::from_secs(10);
    /// Returns the number of calls that were executed after a later one, and of those that failed.
    async fn run(server: &RedisServer, call: impl Fn() -> Call) -> Result<(usize, usize)> {
        call().await?;
        let (mut tasks, mut admin) = (JoinSet::new(), server.connection());
        for index in 0..CALLS {
            if index % (CALLS / 10) == 0 {
                redis::cmd("SCRIPT").arg("FLUSH").exec(&mut admin)?;
            }
            let call = call();
            tasks.spawn(async move { (index, call.await.map_err(|error| error.to_string())) });
            yield_now().await;
        }
        let mut counts = tasks.join_all().await;
        counts.sort_by_key(|(index, _)| *index);
        let failed = counts.iter().filter(|(_, count)| count.is_err()).count();
        let (mut first_after, mut overtaken) = (u64::MAX, 0);
        for count in counts.into_iter().rev().filter_map(|(_, count)| count.ok()) {
            overtaken += usize::from(count > first_after);
            first_after = first_after.min(count);
        }
        Ok((overtaken, failed))
    }
    let script = redis::Script::new("return redis.call('INCR', KEYS[1])");
    let server = RedisServer::start();
    let peer = runtime()?.block_on(async {
        let Plain(connection) = manager(&server.url(), LONG).await?;
        let call = || -> Call {
            let (mut connection, script) = (connection.clone(), script.clone());
            Box::pin(async move { Ok(script.key("key").invoke_async(&mut connection).await?) })
        };
        run(&server, call).await
    })?;
    let server = RedisServer::start();
    let ours = runtime()?.block_on(async {
        let side = Ours::with(RedisConfig::server(&server.url())?.deadline(LONG))?;
        side.store.ping().await?;
        run(&server, || side.count("key")).await
    })?;
    let text = |(overtaken, failed)| format!("{overtaken} are overtaken, {failed} fail");
    Ok(Row {
        property: "4,000 calls of one key are executed in order, with `SCRIPT FLUSH` ten times",
        redis: text(peer),
        ours: text(ours),
        is_kept: ours == (0, 0),
    })
}

/// The calls of other nodes' keys while one node of a cluster hangs.
#[derive(Default)]
struct OfHealthyNodes {
    calls: AtomicU64,
    failed: AtomicU64,
    longest: AtomicU64,
}

/// One node of a cluster ends, and its address accepts connections but does not answer, as behind a
/// load balancer. A third of the calls is for its keys.
fn node() -> Result<Row> {
    const TIME: Duration = Duration::from_secs(5);
    /// The best one counts: a machine that pauses for a moment fails calls, too.
    const ROUNDS: usize = 3;
    async fn run(side: Arc<dyn Side>, mut cluster: Cluster) -> Result<[u64; 3]> {
        let keys: Vec<_> = (0..60).map(|number| format!("key-{number}")).collect();
        let key_of = |key: &str| (key.to_owned(), cluster.master_of(&format!("{{{key}}}")) > 0);
        let keys: Arc<[_]> = keys.iter().map(|key| key_of(key)).collect();
        for (key, _) in &*keys {
            until_counted(&*side, key).await?;
        }
        cluster.masters[0].server.kill();
        let _hung = TcpListener::bind(("127.0.0.1", cluster.masters[0].port))?;
        let (is_over, seen) = (Arc::new(AtomicBool::new(false)), Arc::<OfHealthyNodes>::default());
        let mut tasks = JoinSet::new();
        for task in 0..12 {
            let (side, keys) = (side.clone(), keys.clone());
            let (is_over, seen) = (is_over.clone(), seen.clone());
            tasks.spawn(async move {
                for call in (task..).step_by(7) {
                    if is_over.load(Relaxed) {
                        return;
                    }
                    let (key, is_healthy) = &keys[call % keys.len()];
                    let start = Instant::now();
                    let is_error = side.count(key).await.is_err();
                    if *is_healthy {
                        seen.calls.fetch_add(1, Relaxed);
                        seen.failed.fetch_add(is_error.into(), Relaxed);
                        let took = start.elapsed().as_millis() as u64;
                        seen.longest.fetch_max(took, Relaxed);
                    }
                    sleep(Duration::from_millis(5)).await;
                }
            });
        }
        sleep(TIME).await;
        is_over.store(true, Relaxed);
        tasks.join_all().await;
        Ok([&seen.calls, &seen.failed, &seen.longest].map(|count| count.load(Relaxed)))
    }
    // So that the others do not take the node as failed meanwhile.
    let settings = ["--cluster-node-timeout", "60000", "--cluster-require-full-coverage", "no"];
    let start = || Cluster::start(3, false, &settings);
    let (mut peers, mut all_ours) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let cluster = start();
        peers.push(runtime()?.block_on(async {
            let client = cluster_client(cluster.urls())?;
            run(Arc::new(Plain(client.get_async_connection().await?)), cluster).await
        })?);
        let cluster = start();
        all_ours.push(runtime()?.block_on(async {
            run(Arc::new(Ours::new(RedisConfig::cluster(cluster.urls())?)?), cluster).await
        })?);
    }
    let best =
        |rounds: Vec<[u64; 3]>| rounds.into_iter().min_by_key(|it| it[1]).unwrap_or_default();
    let (peer, ours) = (best(peers), best(all_ours));
    let text = |[calls, failed, longest]: [u64; 3]| {
        format!("{failed} of {calls} fail, the longest takes {longest} ms")
    };
    Ok(Row {
        property: "while a node of a cluster does not answer, calls of other nodes do not wait",
        redis: text(peer),
        ours: text(ours),
        is_kept: ours[1] == 0 && ours[2] < 50,
    })
}

/// A Sentinel. It is killed when this is dropped.
struct Sentinel {
    process: Child,
    port: u16,
    _folder: TempDir,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Sentinel {
    fn start(master: u16) -> Result<Self> {
        let (port, folder) = (free_port(), tempfile::tempdir()?);
        let file = folder.path().join("sentinel.conf");
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor limits 127.0.0.1 {master} 1\n\
             sentinel down-after-milliseconds limits 1000\n\
             sentinel failover-timeout limits 5000\n",
            folder.path().display()
        );
        fs::write(&file, text)?;
        let mut command = Command::new(program());
        let process = command.arg(&file).arg("--sentinel").stdout(Stdio::null()).spawn()?;
        let sentinel = Self { process, port, _folder: folder };
        until("the Sentinel knows the replica", || {
            sentinel.master().is_ok_and(|it| it.chunks(2).any(|it| it == ["num-slaves", "1"]))
        });
        Ok(sentinel)
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn master(&self) -> redis::RedisResult<Vec<String>> {
        let mut connection = redis::Client::open(self.url())?.get_connection()?;
        redis::cmd("SENTINEL").arg(&["MASTER", "limits"]).query(&mut connection)
    }

    /// Commands a failover, as soon as the Sentinel accepts it.
    fn fail_over(&self) -> Result<()> {
        let mut connection = redis::Client::open(self.url())?.get_connection()?;
        let mut command = redis::cmd("SENTINEL");
        command.arg(&["FAILOVER", "limits"]);
        while command.exec(&mut connection).is_err() {
            thread::sleep(SECOND / 10);
        }
        Ok(())
    }
}

/// Starts a master and its replica.
fn replicated() -> (Vec<RedisServer>, u16) {
    let mut servers = vec![];
    let ports = [free_port(), free_port()].map(|port| port.to_string());
    for (index, port) in ports.iter().enumerate() {
        let own = ["--port", port, "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"];
        let of_replica = ["--replicaof", "127.0.0.1", &ports[0]];
        let settings = [&own[..], if index == 1 { &of_replica } else { &[] }].concat();
        servers.push(RedisServer::start_with(&settings));
    }
    (servers, ports[0].parse().expect("a port"))
}

/// The first Sentinel of the list hangs; then another one commands a failover.
fn sentinel() -> Result<Row> {
    const AFTER: Duration = Duration::from_secs(5);
    async fn run(side: &dyn Side, sentinel: &Sentinel, old: &RedisServer) -> Result<(u64, u64)> {
        until_counted(side, "key").await?;
        sentinel.fail_over()?;
        let is_replica = || {
            let role = redis::cmd("ROLE").query::<Vec<redis::Value>>(&mut old.connection());
            role.is_ok_and(|role| role[0] == redis::Value::BulkString(b"slave".to_vec()))
        };
        while !is_replica() {
            let _ = side.count("key").await;
            sleep(SECOND / 50).await;
        }
        let (start, mut calls, mut failed) = (Instant::now(), 0, 0);
        while start.elapsed() < AFTER {
            calls += 1;
            failed += u64::from(side.count("key").await.is_err());
            sleep(SECOND / 50).await;
        }
        Ok((calls, failed))
    }
    let listener = TcpListener::bind("127.0.0.1:0")?; // accepts connections, and never answers
    let hung = format!("redis://{}", listener.local_addr()?);
    let (servers, master) = replicated();
    let watched = Sentinel::start(master)?;
    let (peer_took, peer) = runtime()?.block_on(async {
        let start = Instant::now();
        let urls = vec![hung.clone(), watched.url()];
        let kind = || SentinelServerType::Master;
        let mut client = SentinelClient::build(urls, "limits".to_owned(), None, kind())?;
        let connection: Option<MultiplexedConnection> =
            match timeout(10 * SECOND, client.get_async_connection()).await {
                Ok(connection) => Some(connection?),
                Err(_) => None,
            };
        let took = start.elapsed();
        let connection = match connection {
            Some(connection) => connection,
            None => {
                let urls = vec![watched.url()];
                let mut client = SentinelClient::build(urls, "limits".to_owned(), None, kind())?;
                client.get_async_connection().await?
            }
        };
        Ok::<_, Box<dyn std::error::Error>>((
            took,
            run(&Plain(connection), &watched, &servers[0]).await?,
        ))
    })?;
    let (servers, master) = replicated();
    let watched = Sentinel::start(master)?;
    let (ours_took, ours) = runtime()?.block_on(async {
        let start = Instant::now();
        let config = RedisConfig::sentinels([hung, watched.url()], "limits")?;
        let side = Ours::new(config)?;
        side.store.ping().await?;
        let took = start.elapsed();
        Ok::<_, Box<dyn std::error::Error>>((took, run(&side, &watched, &servers[0]).await?))
    })?;
    let text = |took: Duration, (calls, failed): (u64, u64)| {
        let connected = match took < 10 * SECOND {
            true => format!("connected after {} ms", took.as_millis()),
            false => "not connected within 10 s".to_owned(),
        };
        format!("{connected}; {failed} of {calls} calls fail in the 5 s after the failover")
    };
    Ok(Row {
        property: "a Sentinel that hangs does not keep a process from starting, and a failover is \
                   followed",
        redis: text(peer_took, peer),
        ours: text(ours_took, ours),
        is_kept: ours_took < 2 * SECOND && ours.1 < ours.0 / 10,
    })
}

/// A server sends a reply that does not end.
fn endless() -> Result<Row> {
    const MAX: u64 = 256 << 20;
    async fn run(side: &dyn Side, proxy: &Proxy) -> Result<u64> {
        until_counted(side, "key").await?;
        proxy.flood();
        let _ = side.count("key").await;
        let start = Instant::now();
        while start.elapsed() < 3 * SECOND && proxy.flooded() < MAX {
            sleep(SECOND / 100).await;
        }
        Ok(proxy.flooded() >> 20)
    }
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let peer = runtime()?
        .block_on(async { run(&manager(&proxy.url(), DEADLINE).await?, &proxy).await })?;
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let ours =
        runtime()?.block_on(async { run(&Ours::connect(&proxy.url()).await?, &proxy).await })?;
    Ok(Row {
        property: "a reply without an end does not fill the memory (cut at 256 MiB)",
        redis: format!("{peer} MiB are read"),
        ours: format!("{ours} MiB are read"),
        is_kept: ours <= 48, // 16 MiB, and the buffers of the sockets
    })
}
