//! The example `streams`: one limit on streams over two replicas, in memory and in Redis.

use std::process::Command;

use crate::support::{self, server::RedisServer};

#[test]
fn two_replicas_have_three_streams_at_a_time_and_one_that_is_cut_off_makes_room() {
    let redis = RedisServer::start();
    for flags in [&[][..], &["--redis", &redis.url()]] {
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
