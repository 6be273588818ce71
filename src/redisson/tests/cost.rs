//! No call takes long, however long the log is, and each decides exactly.

use super::{
    super::script::{AGAIN, DONE, RELEASE, SET_RATE},
    limiter,
    world::{RedisServer, World},
};

/// Entries of 2 permits, one each 1/`count` of the interval, the last one now.
fn fill(world: &mut World, count: u64) {
    let key = world.keys.all[3].clone();
    let text = r"
        for i = 1, ARGV[2] do
          local time = math.floor(ARGV[1] - 999 + 999 * i / ARGV[2])
          local id = struct.pack('<I4I4I4I4', i, i, i, i)
          redis.call('ZADD', KEYS[1], time, struct.pack('<Bc0I4', 16, id, 2))
        end";
    let now = world.now_ms();
    redis::cmd("EVAL")
        .arg(text)
        .arg(1)
        .arg(key)
        .arg(now)
        .arg(count)
        .exec(&mut world.connection)
        .unwrap();
}

/// How much Redis did for the last calls, in commands and entries that were read or dropped.
fn calls(world: &mut World, command: &str) -> u64 {
    let stats: String = world.command(&["INFO", "commandstats"]);
    let start = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&start));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[test]
fn a_long_log_is_read_once_in_steps() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_010);
    fill(&mut world, 10_000);
    assert!(world.take(3));
    assert!(world.steps <= 11, "{}", world.steps);
    for _ in 0..7 {
        assert!(world.take(1));
        assert_eq!(world.steps, 1);
    }
    assert!(!world.take(1));
    assert_eq!(world.steps, 1);
    assert_eq!(world.available(), 0);
    assert_eq!(world.steps, 1);
}

#[test]
fn callers_that_give_up_read_a_long_log_together() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_010);
    fill(&mut world, 10_000);
    world.gives_up = true;
    assert!(world.take(1));
    assert!(world.steps <= 11, "{}", world.steps);

    let mut world = limiter(&server, 20_010);
    fill(&mut world, 10_000);
    world.steps = 0;
    let release =
        |world: &mut World| -> (i64, u64, Vec<u8>) { world.run(&RELEASE, &[b"10", b""], "", b"") };
    while release(&mut world).0 == AGAIN {}
    assert!(world.steps <= 11, "{}", world.steps);
}

#[test]
fn a_long_log_stays_known_while_java_takes_and_sweeps() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_000);
    fill(&mut world, 5_000);
    let mut left = 10_000;
    assert!(world.take(1));
    left -= 1;
    for _ in 0..60 {
        world.advance(5); // 25 of them expire
        let id = world.id();
        assert_eq!(world.java_acquire(3, 0, id), Some(Ok(())));
        left = (left + 50).min(20_000) - 3;
        assert!(world.take(1));
        left -= 1;
        assert_eq!(world.steps, 1);
        let sum: u64 = world.log().iter().map(|it| it.permits()).sum();
        assert_eq!(20_000 - sum, world.available());
    }
    assert!(left > 0);
}

#[test]
fn a_log_that_was_swept_far_is_read_again_in_steps() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_000);
    fill(&mut world, 10_000);
    assert!(!world.take(1));
    world.advance(500);
    let id = world.id();
    assert_eq!(world.java_acquire(1, 0, id), Some(Ok(())));
    let sum: u64 = world.log().iter().map(|it| it.permits()).sum();
    assert_eq!(world.available(), 20_000 - sum);
    assert!((2..=7).contains(&world.steps), "{}", world.steps);
    let rest = 20_000 - sum as u32;
    assert!(world.take(rest) && !world.take(1));
}

#[test]
fn what_has_expired_is_dropped_in_steps_and_does_not_count_meanwhile() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_000);
    fill(&mut world, 10_000);
    assert!(!world.take(1));
    world.advance(500);
    let live = |world: &mut World| {
        let start = world.now_ms() - 1_000;
        world.log().iter().filter(|it| it.score > start).map(|it| it.permits()).sum::<u64>()
    };
    let mut before = world.log().len();
    for _ in 0..8 {
        let available = 20_000 - live(&mut world);
        assert_eq!(world.available(), available);
        assert!(world.take(1));
        assert!(world.steps <= 7);
        let after = world.log().len();
        assert!(before <= after + 1_000, "{before} before, {after} after");
        // For Java, which will add what it sweeps, it must not be too much.
        let sum: i64 = world.log().iter().map(|it| it.permits() as i64).sum();
        let value: i64 = world.value().unwrap().parse().unwrap();
        assert!(value + sum <= 20_000);
        before = after;
    }
    assert_eq!(live(&mut world), world.log().iter().map(|it| it.permits()).sum::<u64>());
    let left = 20_000 - live(&mut world) as u32;
    assert_eq!(world.value().unwrap(), left.to_string());
    assert!(!world.take(left + 1) && world.take(left));
}

#[test]
fn a_log_that_has_expired_is_dropped_at_once() {
    let server = RedisServer::start();
    for (later, live) in [(2_000, 0), (950, 490)] {
        let mut world = limiter(&server, 20_000);
        fill(&mut world, 10_000);
        world.advance(later);
        assert!(world.take(1));
        assert_eq!(world.steps, 1);
        let length = world.log().len();
        assert!((live..=live + 20).contains(&length), "{length}");
        let before = calls(&mut world, "zremrangebyrank");
        assert!(world.take(1));
        assert_eq!(calls(&mut world, "zremrangebyrank"), before, "there is nothing left to drop");
    }
}

#[test]
fn many_permits_are_released_in_steps() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_000);
    fill(&mut world, 10_000);
    assert!(!world.take(1));
    world.release(19_001);
    assert_eq!(world.available(), 19_001);
    assert!(!world.take(19_002) && world.take(19_001));
}

#[test]
fn a_rate_is_set_once_in_however_many_steps() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 20_000);
    fill(&mut world, 10_000);
    let set = |world: &mut World, tally: &[u8]| -> (i64, u64, Vec<u8>) {
        world.run(&SET_RATE, &[b"update", b"30000", b"1000", b"0", b""], "", tally)
    };
    let (mut status, _, mut tally) = set(&mut world, b"");
    assert_eq!(status, AGAIN);
    world.command::<()>(&["HSET", "LIMITER_NAME", "rate", "25000"]); // by somebody else
    while status == AGAIN {
        (status, _, tally) = set(&mut world, &tally);
    }
    assert_eq!(status, DONE);
    assert_eq!(world.command::<u64>(&["HGET", "LIMITER_NAME", "rate"]), 25_000);
    assert_eq!(world.value().as_deref(), Some("5000"));

    world.lose(0);
    assert_eq!(set(&mut world, b"of a call before").0, DONE);
    assert_eq!(world.config(), None, "it was deleted by somebody else");
}

#[test]
fn a_delay_is_exact_in_a_long_log_too() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10_000);
    fill(&mut world, 5_000);
    let id = world.id();
    let denied = world.acquire(1_000, id);
    world.now += denied.wait - 1;
    let again = world.acquire(1_000, id);
    assert_eq!((again.granted(), again.wait), (false, 1));
    world.now += 1;
    assert!(world.acquire(1_000, id).granted());
}
