//! The example `failover`: a server that keeps limiting and reports it while Redis is down.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use crate::support::{self, server::RedisServer};

struct Server {
    process: Child,
    address: String,
    /// Whether Redis answers.
    redis: String,
    commands: Vec<String>,
}

impl Server {
    fn start(redis: &str) -> Self {
        Self::run(Command::new(support::example("failover")).args(["--redis", redis]))
    }

    fn run(command: &mut Command) -> Self {
        let mut process = command
            .args(["--listen", "127.0.0.1:0", "--quota", "100/h"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let mut lines =
            BufReader::new(process.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        let first = lines.next().expect("the first line");
        let address = first.strip_prefix("listening on http://").expect("the address").to_owned();
        assert_eq!(lines.next().unwrap(), "limit: 100/h per client address, counts in Redis");
        let redis: Vec<_> = lines.by_ref().take_while(|line| !line.starts_with("try it")).collect();
        let commands = lines.take(7).map(|line| line.trim_start().to_owned()).collect();
        Self { process, address, redis: redis.join("\n"), commands }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends requests until the response contains the text.
    fn until(&self, path: &str, text: &str) {
        let start = Instant::now();
        while !self.get(path).contains(text) {
            assert!(start.elapsed() < Duration::from_secs(60), "{path} never contains {text}");
            self.get("/");
        }
    }

    /// Ends the server. Returns the events that it printed.
    fn events(&mut self) -> String {
        self.process.kill().unwrap();
        let mut events = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut events).unwrap();
        events
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn the_local_fallback_limits_while_redis_is_down() {
    let mut redis = RedisServer::start();
    let mut server = Server::start(&redis.url());
    assert_eq!(server.redis, "Redis: answers");
    server.until("/", "allowed by Redis: ");
    assert!(server.get("/health").contains("available: true, each decision calls Redis\n"));
    redis.kill();
    server.until("/", "allowed by this process, because Redis gave no answer: ");
    server.until("/", "429 Too Many Requests");
    let denied = server.get("/");
    assert!(denied.contains("ratelimit-policy: \"api\";q=50;w=3600"), "{denied}");
    assert!(denied.contains("denied by this process, because Redis gave no answer: "), "{denied}");
    server
        .until("/health", "available: false, no decision calls Redis until a probe gets an answer");
    assert!(server.get("/health").contains("outages: 1\n"));
    redis.restart();
    server.until("/health", "available: true");
    server.until("/", "allowed by Redis: ");
    let events = server.events();
    let levels: Vec<_> = events.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    // The first failed decision, the outage, and its end.
    assert_eq!(levels, ["WARN", "WARN", "INFO"], "{events}");
}

#[test]
fn the_commands_that_stop_redis_are_printed_for_a_server_started_to_try_it() {
    for (redis, stop, start) in [
        (
            "redis://127.0.0.1:1/",
            "redis-cli -p 1 shutdown nosave",
            "redis-server --port 1 --save '' --daemonize yes",
        ),
        ("redis://127.0.0.1/", "# stop Redis", "# start Redis"),
        ("redis://192.0.2.1:7000/", "# stop Redis", "# start Redis"),
    ] {
        let server = Server::start(redis);
        let curl =
            format!("for i in $(seq 10); do curl -s http://{}/; sleep 0.1; done", server.address);
        let health = format!("curl -s http://{}/health", server.address);
        let commands = [&*curl, stop, &curl, &health, start, "sleep 1", &curl];
        assert_eq!(server.commands, commands, "{redis}");
    }
}

#[test]
fn a_missing_redis_is_reported_at_the_start_with_the_command_that_starts_or_installs_one() {
    let program = support::example("failover");
    let folder = tempfile::tempdir().unwrap();
    let start = |path| {
        Server::run(
            Command::new(&program).env("PATH", path).args(["--redis", "redis://127.0.0.1:1"]),
        )
    };
    let missing = start(folder.path()).redis.clone();
    assert!(missing.starts_with("Redis: NO ANSWER, so the failure policy decides: "), "{missing}");
    assert!(
        missing.contains("\nredis-server is not installed here: install it with "),
        "{missing}"
    );

    std::fs::write(folder.path().join("redis-server"), "").unwrap();
    let installed = start(folder.path()).redis.clone();
    let start = "\nto start one:\n  redis-server --port 7000 --save '' --daemonize yes\n";
    assert!(installed.contains(start), "{installed}");
}
