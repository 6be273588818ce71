//! The example `server`: its limits, also over two processes, and its output.

#[path = "../../../support/request_log.rs"]
mod request_log;

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use request_log::{LINES_PER_SECOND, Outcome, request_log};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::sleep,
};
use tower_ratelimit::{Algorithm, Limiter, Quota};

use crate::support::{self, server::RedisServer};

struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
    /// The address of the metrics.
    admin: Option<SocketAddr>,
    /// The line after the address: the limit.
    limit: String,
    /// The line after that: the command to try.
    command: String,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut process = Command::new(&*PROGRAM)
            .args(["--listen", "127.0.0.1:0"])
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let admin = flags.contains(&"--metrics").then(|| read_line(&mut output));
        let [first, limit, command] = [(); 3].map(|()| read_line(&mut output));
        let address = first.strip_prefix("listening on http://").expect("the first line");
        let address = address.parse().unwrap();
        Self { process, output, address, admin: admin.map(admin_address), limit, command }
    }

    fn line(&mut self) -> String {
        read_line(&mut self.output)
    }
}

fn admin_address(line: String) -> SocketAddr {
    let address = line.strip_prefix("metrics: http://").and_then(|rest| rest.split('/').next());
    address.expect("the line of the metrics").parse().unwrap()
}

fn read_line(output: &mut impl BufRead) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| support::example("server"));

/// Sends requests at once over one connection. Returns the statuses of the responses.
async fn send(address: SocketAddr, count: usize, headers: &str) -> Vec<u16> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut requests = format!("GET / HTTP/1.1\r\nhost: test\r\n{headers}\r\n").repeat(count - 1);
    requests += &format!("GET / HTTP/1.1\r\nhost: test\r\n{headers}connection: close\r\n\r\n");
    stream.write_all(requests.as_bytes()).await.unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).await.unwrap();
    let statuses = answers.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap());
    statuses.collect()
}

async fn send_one(address: SocketAddr, headers: &str) -> u16 {
    send(address, 1, headers).await[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_admit_exactly_the_quota() {
    let redis = RedisServer::start();
    for algorithm in ["fixed-window", "sliding-log", "sliding-window", "token-bucket"] {
        let flags =
            ["--redis", &support::patient(&redis), "--quota", "100/h", "--algorithm", algorithm];
        let servers = [Server::start(&flags), Server::start(&flags)];
        let mut connections = JoinSet::new();
        for i in 0..400 {
            connections.spawn(send(servers[i % 2].address, 5, ""));
        }
        let statuses = connections.join_all().await.concat();
        let count = |status: u16| statuses.iter().filter(|code| **code == status).count();
        assert_eq!((count(200), count(429), statuses.len()), (100, 1_900, 2_000), "{algorithm}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_share_one_leaky_bucket() {
    let redis = RedisServer::start();
    let flags =
        ["--redis", &support::patient(&redis), "--quota", "100/h", "--algorithm", "leaky-bucket"];
    let servers = [Server::start(&flags), Server::start(&flags)];
    let mut connections = JoinSet::new();
    for i in 0..500 {
        let address = servers[i % 2].address;
        connections.spawn(async move { send_one(address, "").await });
    }
    // One request leaves at once, 99 wait, 36 s apart, and the others are denied.
    let mut statuses = vec![];
    while statuses.len() < 401 {
        statuses.push(connections.join_next().await.unwrap().unwrap());
    }
    statuses.sort_unstable();
    assert_eq!(statuses[0], 200);
    assert_eq!(statuses[1..], [429; 400]);
    let store = support::redis_store(&redis).await;
    let limiter = Limiter::new("server", store, Algorithm::LeakyBucket, Quota::per_hour(100));
    let peer = "127.0.0.1".parse::<std::net::IpAddr>().unwrap();
    let queued = limiter.peek(tower_ratelimit::Key::from(peer)).await.unwrap().reset_after();
    let all = Duration::from_secs(3_600);
    assert!(queued <= all && queued > all - Duration::from_secs(36), "{queued:?}");
}

#[tokio::test]
async fn every_request_is_answered_while_redis_is_down() {
    let mut redis = RedisServer::start();
    let flags = ["--redis", &support::patient(&redis), "--quota", "2/h", "--key", "header:user"];
    let server = Server::start(&flags);
    for round in 0..2 {
        // The server still denies those that it has denied, for a second.
        let [ada, ben] = ["ada", "ben"].map(|user| format!("user: {user}-{round}\r\n"));
        // Right after a failed attempt to connect, the store does not try again.
        let start = Instant::now();
        while send_one(server.address, "user: probe\r\n").await == 503 {
            assert!(start.elapsed() < Duration::from_secs(30), "round {round}");
        }
        assert_eq!(send(server.address, 3, &ada).await, [200, 200, 429], "round {round}");
        redis.kill();
        assert_eq!(send(server.address, 5, &ben).await, [503; 5], "round {round}");
        redis.restart();
    }
}

#[tokio::test]
async fn the_flags_work_as_the_help_describes() {
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
    for (headers, status) in [
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
        assert_eq!(send_one(server.address, headers).await, status, "{headers:?}");
    }
    let global = Server::start(&["--quota", "1/h", "--key", "global"]);
    assert_eq!(send(global.address, 2, "").await, [200, 429]);
}

#[tokio::test]
async fn without_flags_the_limit_is_5_per_10_s_and_a_command_to_try_it_is_printed() {
    let server = Server::start(&[]);
    assert_eq!(server.limit, "limit: 5/10s per client address, token-bucket, counts in memory");
    assert_eq!(
        server.command,
        format!(
            "try it: for i in $(seq 7); do curl -s -o /dev/null -w '%{{http_code}}\\n' \
             http://{}/; done",
            server.address
        )
    );
    assert_eq!(send_one(server.address, "").await, 200);
}

#[tokio::test]
async fn the_sixth_of_5_requests_per_hour_is_denied_and_each_is_printed() {
    let mut server = Server::start(&["--quota", "5/h"]);
    assert_eq!(send(server.address, 6, "").await, [200, 200, 200, 200, 200, 429]);
    for left in (0..5).rev() {
        assert_eq!(server.line(), format!("GET / from 127.0.0.1: allowed, {left} left"));
    }
    let denied = server.line();
    let wait = denied.strip_prefix("GET / from 127.0.0.1: denied, retry in ");
    let wait = wait.and_then(|rest| rest.strip_suffix(" s")?.parse().ok());
    assert!(wait.is_some_and(|wait: f64| wait > 0.0 && wait <= 720.0), "{denied}");
}

#[tokio::test]
async fn the_lines_name_the_client_as_the_key_does_and_the_reason_of_a_rejection() {
    let mut server =
        Server::start(&["--quota", "5/h", "--key", "header:x-api-key", "--cost-header", "x-cost"]);
    assert!(server.command.contains(" -H 'x-api-key: ada' "), "{}", server.command);
    for (headers, line) in [
        ("", "GET / from 127.0.0.1: rejected with 400: "),
        ("x-api-key: ada\r\n", "GET / from x-api-key=ada: allowed, 4 left"),
        ("x-api-key: ada\r\nx-cost: 3\r\n", "GET / from x-api-key=ada: allowed, 1 left"),
        ("x-api-key: ada\r\nx-cost: 2\r\n", "GET / from x-api-key=ada: denied, retry in "),
        ("x-api-key: ada\r\nx-cost: 6\r\n", "GET / from x-api-key=ada: rejected with 429: "),
        (
            "x-api-key: ada\r\nx-cost: many\r\n",
            "GET / from x-api-key=ada: rejected with 400: header x-cost must be a positive integer",
        ),
        ("x-api-key: b\u{9b}\r\n", "GET / from x-api-key=b%C2%9B: allowed, 4 left"),
    ] {
        send_one(server.address, headers).await;
        let printed = server.line();
        assert!(printed.starts_with(line), "{printed}");
    }
}

#[tokio::test]
async fn a_delay_and_a_failure_of_the_store_are_printed() {
    let mut redis = RedisServer::start();
    let flags = ["--quota", "2/s", "--algorithm", "leaky-bucket", "--key", "global"];
    let mut server = Server::start(&[&flags[..], &["--redis", &support::patient(&redis)]].concat());
    assert_eq!(server.limit, "limit: 2/s for all clients together, leaky-bucket, counts in Redis");
    assert_eq!(send(server.address, 1, "").await, [200]);
    assert_eq!(server.line(), "GET / from 127.0.0.1: allowed, 1 left");
    // The second of two requests waits, unless it comes half a second later.
    let delayed = loop {
        assert_eq!(send(server.address, 2, "").await, [200, 200]);
        let lines = [server.line(), server.line()];
        if let Some(line) = lines.into_iter().find(|line| line.contains("after a wait")) {
            break line;
        }
    };
    assert!(delayed.starts_with("GET / from 127.0.0.1: allowed after a wait of 0."), "{delayed}");
    assert!(delayed.ends_with(" left"), "{delayed}");
    redis.kill();
    assert_eq!(send(server.address, 1, "").await, [503]);
    let rejected = server.line();
    assert!(rejected.starts_with("GET / from 127.0.0.1: rejected with 503: "), "{rejected}");
}

#[tokio::test(flavor = "multi_thread")]
async fn some_of_many_requests_are_printed_and_the_rest_are_counted() {
    let mut server = Server::start(&["--quota", "100/h"]);
    let mut connections = JoinSet::new();
    for _ in 0..20 {
        connections.spawn(send(server.address, 100, ""));
    }
    connections.join_all().await;
    let (mut lines, mut counted) = ([0, 0], [0, 0]);
    while lines.iter().chain(&counted).sum::<u32>() < 2_000 {
        let line = server.line();
        match line.strip_prefix(".. and ") {
            None => lines[usize::from(line.contains(": denied, "))] += 1,
            Some(rest) => {
                let (total, parts) = rest.split_once(" more in this second: ").expect(&line);
                let parts = parts.split(", ").map(|part| part.split_once(' ').expect(&line));
                let parts = parts.map(|(count, name)| (count.parse().unwrap(), name));
                let parts: Vec<(u32, _)> = parts.collect();
                assert_eq!(parts.iter().map(|(count, _)| count).sum::<u32>().to_string(), total);
                for (count, name) in parts {
                    counted[usize::from(name == "denied")] += count;
                }
            }
        }
    }
    assert!(counted.iter().sum::<u32>() > 0);
    assert_eq!([lines[0] + counted[0], lines[1] + counted[1]], [100, 1_900]);
}

#[tokio::test]
async fn quiet_prints_no_request() {
    let mut server = Server::start(&["--quiet"]);
    assert!(server.command.starts_with("try it: for i in "));
    send(server.address, 100, "").await;
    server.process.kill().unwrap();
    assert_eq!(server.line(), "");
}

#[tokio::test(start_paused = true)]
async fn a_second_has_20_lines_and_then_a_count() {
    let (log, printer) = request_log();
    let mut output = vec![];
    let requests = async move {
        let mut number = 0;
        let mut record = |outcome| {
            number += 1;
            log.record(outcome, || number.to_string());
        };
        let seconds = [
            vec![Outcome::Allowed; 2],
            [[Outcome::Allowed; 25], [Outcome::Denied; 25], [Outcome::Rejected; 25]].concat(),
            vec![Outcome::Denied; 20],
            vec![Outcome::Denied; 21],
        ];
        for outcomes in seconds {
            sleep(Duration::from_millis(500)).await;
            outcomes.into_iter().for_each(&mut record);
            sleep(Duration::from_millis(500)).await;
        }
    };
    let (printed, ()) = tokio::join!(printer.print(&mut output), requests);
    printed.unwrap();
    let numbers = |range: std::ops::RangeInclusive<u32>| range.map(|number| number.to_string());
    let mut expected: Vec<_> = numbers(1..=22).collect();
    expected.push(".. and 55 more in this second: 5 allowed, 25 denied, 25 rejected".to_owned());
    expected.extend(numbers(78..=117));
    expected.push(".. and 1 more in this second: 1 denied".to_owned());
    assert_eq!(String::from_utf8(output).unwrap().lines().collect::<Vec<_>>(), expected);
}

#[tokio::test(start_paused = true)]
async fn an_output_that_stalls_holds_up_no_request_and_keeps_one_second_of_lines() {
    let (log, printer) = request_log();
    let (mut reader, writer) = tokio::io::duplex(1);
    let printer = tokio::spawn(printer.print(writer));
    for _ in 0..10 {
        (0..100).for_each(|_| log.record(Outcome::Denied, || "denied".to_owned()));
        sleep(Duration::from_secs(1)).await;
    }
    drop(log);
    let mut output = String::new();
    reader.read_to_string(&mut output).await.unwrap();
    printer.await.unwrap().unwrap();
    let lines: Vec<_> = output.lines().collect();
    assert_eq!(lines[..LINES_PER_SECOND], ["denied"; LINES_PER_SECOND]);
    assert_eq!(lines[LINES_PER_SECOND..], [".. and 980 more in this second: 980 denied"]);
}

#[tokio::test]
async fn the_metrics_and_the_denied_keys_are_served() {
    let server = Server::start(&["--metrics", "127.0.0.1:0", "--key", "header:x-user"]);
    send(server.address, 7, "x-user: ada\r\n").await;
    send(server.address, 6, "x-user: ben\r\n").await;
    let metrics = get(server.admin.unwrap(), "/metrics").await;
    for line in [
        r#"tower_ratelimit_decisions_total{limiter="server",outcome="denied",source="store"} 3"#,
        r#"tower_ratelimit_rejections_total{reason="denied"} 3"#,
        "tower_ratelimit_keys 2",
    ] {
        assert!(metrics.lines().any(|it| it == line), "{line}\n{metrics}");
    }
    let top = get(server.admin.unwrap(), "/top-denied").await;
    assert!(top.contains("3 denials in "), "{top}");
    let top: Vec<_> = top.lines().skip_while(|line| !line.starts_with("denied ")).collect();
    let cells = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let [head, ada, ben] = [0, 1, 2].map(|row| cells(top[row]));
    assert_eq!(head, ["denied", "max-error", "last", "blocked", "limiter", "key"]);
    // The third to fifth cell of a row are the time since the last denial.
    for (row, count, key) in [(&ada, "2", "header:x-user=ada"), (&ben, "1", "header:x-user=ben")] {
        assert_eq!([&row[..2], &row[4..]].concat(), [count, "0", "ago", "no", "server", key]);
    }
    let columns: Vec<_> =
        top.iter().map(|line| line.find("key").or(line.find("header:"))).collect();
    assert!(columns.iter().all(|column| *column == columns[0]), "{top:?}");
    assert!(get(server.admin.unwrap(), "/health").await.ends_with("the store decides\n"));
    assert!(request(server.admin.unwrap(), "DELETE", "/top-denied").await.ends_with("cleared\n"));
    assert!(!get(server.admin.unwrap(), "/top-denied").await.contains("header:"));
}

/// Returns the response to a request, with its head.
async fn get(address: SocketAddr, path: &str) -> String {
    request(address, "GET", path).await
}

async fn request(address: SocketAddr, method: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

#[test]
fn an_invalid_flag_is_explained() {
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
