//! Tests that each call takes bounded time and decides exactly, also with a long log.

use tower_ratelimit_redisson::{
    Script,
    status::{AGAIN, DONE},
};

use super::{
    harness::{Entry, Harness, RedisServer},
    limiter,
};

/// Adds `count` entries of 2 permits each, spread evenly over the interval up to now.
fn fill(harness: &mut Harness, count: u64) {
    let key = harness.keys.all[3].clone();
    let text = r"
        for i = 1, ARGV[2] do
          local time = math.floor(ARGV[1] - 999 + 999 * i / ARGV[2])
          local id = struct.pack('<I4I4I4I4', i, i, i, i)
          redis.call('ZADD', KEYS[1], time, struct.pack('<Bc0I4', 16, id, 2))
        end";
    let now = harness.now_ms();
    redis::cmd("EVAL")
        .arg(text)
        .arg(1)
        .arg(key)
        .arg(now)
        .arg(count)
        .exec(&mut harness.connection)
        .unwrap();
}

/// Returns the number of times that Redis has executed a command.
fn calls(harness: &mut Harness, command: &str) -> u64 {
    let stats: String = harness.command(&["INFO", "commandstats"]);
    let start = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&start));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[test]
fn a_long_log_is_read_once_in_steps() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_010);
    fill(&mut harness, 10_000);
    assert!(harness.take(3));
    assert!(harness.steps <= 11, "{}", harness.steps);
    for _ in 0..7 {
        assert!(harness.take(1));
        assert_eq!(harness.steps, 1);
    }
    assert!(!harness.take(1));
    assert_eq!(harness.steps, 1);
    assert_eq!(harness.available(), 0);
    assert_eq!(harness.steps, 1);
}

#[test]
fn the_tally_of_a_long_log_is_updated_in_place() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_000);
    fill(&mut harness, 1_000);
    assert!(harness.take(1));
    let before = calls(&mut harness, "setrange");
    let steps = [1, 5, 20, 0, 1, 0, 40, 3]; // milliseconds, in each of which an entry expires
    for ms in steps {
        harness.advance(ms);
        assert!(harness.take(3));
        let sum: u64 = harness.log().iter().map(Entry::permits).sum();
        assert_eq!(harness.value().as_deref(), Some(&*(20_000 - sum).to_string()));
        assert_eq!(harness.available(), 20_000 - sum);
    }
    assert_eq!(calls(&mut harness, "setrange") - before, steps.len() as u64);
    harness.advance(10);
    let id = harness.id();
    assert_eq!(harness.java_acquire(1, 0, id), Some(Ok(())));
    let sum: u64 = harness.log().iter().map(Entry::permits).sum();
    assert_eq!(harness.available(), 20_000 - sum, "the log is counted from the tally");
    assert_eq!(harness.steps, 1);
}

#[test]
fn callers_that_time_out_share_the_reading_of_a_long_log() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_010);
    fill(&mut harness, 10_000);
    harness.drops_tally = true;
    assert!(harness.take(1));
    assert!(harness.steps <= 11, "{}", harness.steps);

    let mut harness = limiter(&server, 20_010);
    fill(&mut harness, 10_000);
    harness.steps = 0;
    let release = |harness: &mut Harness| -> (i64, u64, Vec<u8>) {
        harness.execute(Script::Release, &[b"10", b""], "", b"")
    };
    while release(&mut harness).0 == AGAIN {}
    assert!(harness.steps <= 11, "{}", harness.steps);
}

#[test]
fn a_long_log_is_not_read_again_while_java_takes_and_sweeps() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_000);
    fill(&mut harness, 5_000);
    let mut left = 10_000;
    assert!(harness.take(1));
    left -= 1;
    for _ in 0..60 {
        harness.advance(5); // 25 entries expire
        let id = harness.id();
        assert_eq!(harness.java_acquire(3, 0, id), Some(Ok(())));
        left = (left + 50).min(20_000) - 3;
        assert!(harness.take(1));
        left -= 1;
        assert_eq!(harness.steps, 1);
        let sum: u64 = harness.log().iter().map(Entry::permits).sum();
        assert_eq!(20_000 - sum, harness.available());
    }
    assert!(left > 0);
}

#[test]
fn a_log_is_read_again_in_steps_after_java_has_swept_most_of_it() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_000);
    fill(&mut harness, 10_000);
    assert!(!harness.take(1));
    harness.advance(500);
    let id = harness.id();
    assert_eq!(harness.java_acquire(1, 0, id), Some(Ok(())));
    let sum: u64 = harness.log().iter().map(Entry::permits).sum();
    assert_eq!(harness.available(), 20_000 - sum);
    assert!((2..=7).contains(&harness.steps), "{}", harness.steps);
    let rest = 20_000 - sum as u32;
    assert!(harness.take(rest) && !harness.take(1));
}

#[test]
fn expired_entries_are_dropped_in_steps_and_do_not_count_meanwhile() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_000);
    fill(&mut harness, 10_000);
    assert!(!harness.take(1));
    harness.advance(500);
    let live = |harness: &mut Harness| {
        let start = harness.now_ms() - 1_000;
        harness.log().iter().filter(|entry| entry.score > start).map(Entry::permits).sum::<u64>()
    };
    let mut before = harness.log().len();
    for _ in 0..8 {
        let available = 20_000 - live(&mut harness);
        assert_eq!(harness.available(), available);
        assert!(harness.take(1));
        assert!(harness.steps <= 7);
        let after = harness.log().len();
        assert!(before <= after + 1_000, "{before} before, {after} after");
        // Java adds the permits that it sweeps to the value.
        let sum: i64 = harness.log().iter().map(|entry| entry.permits() as i64).sum();
        let value: i64 = harness.value().unwrap().parse().unwrap();
        assert!(value + sum <= 20_000);
        before = after;
    }
    assert_eq!(live(&mut harness), harness.log().iter().map(Entry::permits).sum::<u64>());
    let left = 20_000 - live(&mut harness) as u32;
    assert_eq!(harness.value().unwrap(), left.to_string());
    assert!(!harness.take(left + 1) && harness.take(left));
}

#[test]
fn an_expired_log_is_dropped_at_once() {
    let server = RedisServer::start();
    for (later, live) in [(2_000, 0), (950, 490)] {
        let mut harness = limiter(&server, 20_000);
        fill(&mut harness, 10_000);
        harness.advance(later);
        assert!(harness.take(1));
        assert_eq!(harness.steps, 1);
        let length = harness.log().len();
        assert!((live..=live + 20).contains(&length), "{length}");
        let before = calls(&mut harness, "zremrangebyrank");
        assert!(harness.take(1));
        assert_eq!(calls(&mut harness, "zremrangebyrank"), before, "no entries are left to drop");
    }
}

#[test]
fn many_permits_are_released_in_steps() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_000);
    fill(&mut harness, 10_000);
    assert!(!harness.take(1));
    harness.release(19_001);
    assert_eq!(harness.available(), 19_001);
    assert!(!harness.take(19_002) && harness.take(19_001));
}

#[test]
fn a_call_of_several_steps_sets_the_rate_once() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 20_000);
    fill(&mut harness, 10_000);
    let set = |harness: &mut Harness, tally: &[u8]| -> (i64, u64, Vec<u8>) {
        harness.execute(Script::SetRate, &[b"update", b"30000", b"1000", b"0", b""], "", tally)
    };
    let (mut status, _, mut tally) = set(&mut harness, b"");
    assert_eq!(status, AGAIN);
    harness.command::<()>(&["HSET", "LIMITER_NAME", "rate", "25000"]); // by another client
    while status == AGAIN {
        (status, _, tally) = set(&mut harness, &tally);
    }
    assert_eq!(status, DONE);
    assert_eq!(harness.command::<u64>(&["HGET", "LIMITER_NAME", "rate"]), 25_000);
    assert_eq!(harness.value().as_deref(), Some("5000"));

    harness.lose(0);
    assert_eq!(set(&mut harness, b"of an earlier call").0, DONE);
    assert_eq!(harness.config(), None, "another client deleted the rate");
}

#[test]
fn the_delay_is_exact_in_a_long_log() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10_000);
    fill(&mut harness, 5_000);
    let id = harness.id();
    let denied = harness.acquire(1_000, id);
    harness.now += denied.wait - 1;
    let again = harness.acquire(1_000, id);
    assert_eq!((again.granted(), again.wait), (false, 1));
    harness.now += 1;
    assert!(harness.acquire(1_000, id).granted());
}
