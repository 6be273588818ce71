//! The example `server`: two processes that share one quota.

mod support;

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use support::{ALGORITHMS, server::RedisServer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};
use tower_ratelimit::{Algorithm, Limiter, Quota};

struct Server {
    process: Child,
    address: SocketAddr,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut process = Command::new(&*PROGRAM)
            .args(["--listen", "127.0.0.1:0"])
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").expect("the first line");
        Self { process, address: address.parse().unwrap() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| support::example("server"));

/// Sends some requests at once, over one connection; the statuses of the answers.
async fn send(address: SocketAddr, count: usize, field: &str) -> Vec<u16> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut requests = format!("GET / HTTP/1.1\r\nhost: test\r\n{field}\r\n").repeat(count - 1);
    requests += &format!("GET / HTTP/1.1\r\nhost: test\r\n{field}connection: close\r\n\r\n");
    stream.write_all(requests.as_bytes()).await.unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).await.unwrap();
    let statuses = answers.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap());
    statuses.collect()
}

async fn send_one(address: SocketAddr, field: &str) -> u16 {
    send(address, 1, field).await[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_admit_exactly_the_quota() {
    let redis = RedisServer::start();
    for algorithm in ALGORITHMS.iter().filter(|it| **it != Algorithm::LeakyBucket) {
        let name = algorithm.to_string();
        let flags = ["--redis", &redis.url(), "--quota", "100/h", "--algorithm", &name];
        let servers = [Server::start(&flags), Server::start(&flags)];
        let mut connections = JoinSet::new();
        for i in 0..400 {
            connections.spawn(send(servers[i % 2].address, 5, ""));
        }
        let statuses = connections.join_all().await.concat();
        let count = |status: u16| statuses.iter().filter(|it| **it == status).count();
        assert_eq!((count(200), count(429), statuses.len()), (100, 1_900, 2_000), "{algorithm}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_one_leaky_bucket() {
    let redis = RedisServer::start();
    let flags = ["--redis", &redis.url(), "--quota", "100/h", "--algorithm", "leaky-bucket"];
    let servers = [Server::start(&flags), Server::start(&flags)];
    let mut connections = JoinSet::new();
    for i in 0..500 {
        let address = servers[i % 2].address;
        connections.spawn(async move { send_one(address, "").await });
    }
    // One leaves at once, 99 wait for their turns, which are 36 s apart, and the others are denied.
    let mut statuses = vec![];
    while statuses.len() < 401 {
        statuses.push(connections.join_next().await.unwrap().unwrap());
    }
    statuses.sort_unstable();
    assert_eq!(statuses[0], 200);
    assert_eq!(statuses[1..], [429; 400]);
    let store = support::redis_store(&redis).await;
    let limiter = Limiter::named("server", store, Algorithm::LeakyBucket, Quota::per_hour(100));
    let peer = "127.0.0.1".parse::<std::net::IpAddr>().unwrap();
    let booked = limiter.peek(tower_ratelimit::Key::from(peer)).await.unwrap().reset_after();
    let all = Duration::from_secs(3_600);
    assert!(booked <= all && booked > all - Duration::from_secs(36), "{booked:?}");
}

#[tokio::test]
async fn every_request_is_answered_while_redis_is_away() {
    let mut redis = RedisServer::start();
    let flags = ["--redis", &redis.url(), "--quota", "2/h", "--key", "header:user"];
    let server = Server::start(&flags);
    let ada = "user: ada\r\n";
    for round in 0..2 {
        // Right after a failed attempt to connect, there is no other.
        let start = Instant::now();
        while send_one(server.address, "user: probe\r\n").await == 503 {
            assert!(start.elapsed() < Duration::from_secs(30), "round {round}");
        }
        assert_eq!(send(server.address, 3, ada).await, [200, 200, 429], "round {round}");
        redis.kill();
        assert_eq!(send(server.address, 5, ada).await, [503; 5], "round {round}");
        redis.restart();
    }
}

#[tokio::test]
async fn the_flags_do_what_the_help_says() {
    let server = Server::start(&[
        "--quota",
        "5/h",
        "--key",
        "header:x-api-key",
        "--cost-header",
        "x-cost",
        "--algorithm",
        "sliding-window",
    ]);
    for (field, status) in [
        ("", 400),
        ("x-api-key: ada\r\nx-cost: 0\r\n", 400),
        ("x-api-key: ada\r\nx-cost: -1\r\n", 400),
        ("x-api-key: ada\r\nx-cost: many\r\n", 400),
        ("x-api-key: ada\r\nx-cost: 6\r\n", 429),
        ("x-api-key: ada\r\nx-cost: 99999999999999999999\r\n", 429),
        ("x-api-key: ada\r\nx-cost: 4\r\n", 200),
        ("x-api-key: ada\r\n", 200),
        ("x-api-key: ada\r\n", 429),
        ("x-api-key: ben\r\n", 200),
    ] {
        assert_eq!(send_one(server.address, field).await, status, "{field:?}");
    }
    let global = Server::start(&["--quota", "1/h", "--key", "global"]);
    assert_eq!(send(global.address, 2, "").await, [200, 429]);
}

#[test]
fn a_wrong_flag_is_explained() {
    for (flags, complaint) in [
        (["--quota", "0/s"], "the limit is 0"),
        (["--algorithm", "magic"], "use fixed-window"),
        (["--key", "cookie"], "use peer-ip, global or header:NAME"),
        (["--redis", "redis://127.0.0.1:1/"], "cannot use the Redis server"),
    ] {
        let output = Command::new(&*PROGRAM).args(flags).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(complaint), "{stderr}");
    }
}
