//! The example `failover`: a server that goes on limiting while Redis is away.

mod support;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use support::server::RedisServer;

struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(redis: &str) -> Self {
        let mut process = Command::new(support::example("failover"))
            .args(["--listen", "127.0.0.1:0", "--quota", "100/h", "--redis", redis])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").expect("the first line");
        Self { address: address.to_owned(), process }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends requests until the answer, or what the server says of Redis, has the text.
    fn until(&self, path: &str, text: &str) {
        let start = Instant::now();
        while !self.get(path).contains(text) {
            assert!(start.elapsed() < Duration::from_secs(60), "{path} never says {text}");
            self.get("/");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_share_of_the_quota_is_kept_while_redis_is_away() {
    let mut redis = RedisServer::start();
    let server = Server::start(&redis.url());
    server.until("/", "decided by Store");
    redis.kill();
    server.until("/", "decided by Local");
    server.until("/", "429 Too Many Requests");
    let refused = server.get("/");
    assert!(refused.contains("ratelimit-policy: \"default\";q=50;w=3600"), "{refused}");
    server.until("/health", "is_available: false");
    redis.restart();
    server.until("/health", "is_available: true");
    server.until("/", "decided by Store");
}
