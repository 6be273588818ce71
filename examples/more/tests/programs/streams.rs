//! The example `streams`: one limit on streams over two replicas, in memory and in Redis.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

use crate::support::{self, server::RedisServer};

#[test]
fn two_replicas_have_three_streams_at_a_time_and_one_that_is_cut_off_makes_room() {
    let redis = RedisServer::start();
    for flags in [&[][..], &["--redis", &support::patient(&redis)]] {
        let program = support::example("streams");
        let output = Command::new(program).args(flags).output().expect("the example starts");
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        let has = |stream: u32, event: &str| {
            let name = format!("stream {stream}  {event}");
            stdout.lines().any(|line| line.contains(&name))
        };
        assert!(has(2, "cut off by the client after 4 events"), "{stdout}");
        assert!((1..=5).all(|stream| has(stream, "begins")), "{stdout}");
        assert!([1, 3, 4, 5].iter().all(|stream| has(*stream, "ends after 10 events")), "{stdout}");
        let policy = "\"streams\";q=3;qu=\"concurrent-requests\"";
        assert!(has(6, &format!("429 Too Many Requests, {policy}")), "{stdout}");
        let in_flight = stdout.lines().filter_map(|line| line.strip_suffix(" in flight"));
        let counts = in_flight.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
        let counts: Vec<u64> = counts.collect();
        assert!(counts.len() == 11 && counts.iter().all(|count| *count <= 3), "{stdout}");
    }
}

/// A process that is killed when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_replica_serves_metrics_of_the_streams_in_flight() {
    let process = Command::new(support::example("streams"))
        .args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--events", "1000"])
        .stdout(Stdio::piped())
        .spawn();
    let mut process = Killed(process.expect("the example starts"));
    let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
    let mut connect = || {
        let line = lines.next().unwrap().unwrap();
        let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap();
        TcpStream::connect(address).unwrap()
    };
    let (mut metrics, mut events) = (connect(), connect());
    events.write_all(b"GET /events HTTP/1.0\r\nx-customer: ada\r\n\r\n").unwrap();
    let mut head = [0; 12];
    events.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.0 200");
    metrics.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    metrics.read_to_string(&mut text).unwrap();
    assert!(text.contains("tower_ratelimit_held_units{limiter=\"streams\"} 1\n"), "{text}");
}
