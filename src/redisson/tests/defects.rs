//! What goes wrong with Redisson alone, and must not go wrong here.

use super::{
    super::script::{ABOVE_RATE, NO_RATE},
    limiter,
    world::RedisServer,
};

#[test]
fn a_rate_that_is_lowered_forgets_no_debt() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    for _ in 0..10 {
        assert!(world.take(1));
        world.advance(50);
    }
    assert!(world.set("update", 5, 1_000, 0));
    assert_eq!(world.value().as_deref(), Some("-5"));
    assert_eq!(world.available(), 0);
    // The sixth that expires makes room for the first.
    world.advance(749);
    assert!(!world.take(1));
    world.advance(1);
    assert!(world.take(1) && !world.take(1));
}

#[test]
fn a_rate_that_is_raised_can_be_used_at_once() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 5);
    assert!(world.take(5) && !world.take(1));
    assert!(world.set("update", 8, 1_000, 0));
    assert!(world.take(3) && !world.take(1));
}

#[test]
fn a_rate_that_is_changed_by_hand_holds_from_the_next_call_on() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 5);
    assert!(world.take(5));
    world.command::<()>(&["HSET", "LIMITER_NAME", "rate", "8"]);
    assert_eq!(world.available(), 3);
    assert!(world.take(3) && !world.take(1));
    world.command::<()>(&["HSET", "LIMITER_NAME", "rate", "2"]);
    world.advance(999);
    assert!(!world.take(1));
    world.advance(1);
    assert!(world.take(2) && !world.take(1));
    world.command::<()>(&["HSET", "LIMITER_NAME", "interval", "100"]);
    world.advance(100);
    assert!(world.take(2) && !world.take(1));
}

#[test]
fn what_is_released_does_not_come_back_twice() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    assert!(world.take(5));
    world.release(3);
    world.advance(500);
    assert!(world.take(8) && !world.take(1));
    world.advance(500);
    assert!(world.take(2) && !world.take(1));

    world.advance(1_000);
    assert!(world.take(10));
    world.release(10);
    world.advance(1_000);
    assert_eq!(world.available(), 10);
    for _ in 0..9 {
        assert!(world.take(1));
        world.release(1);
    }
    world.advance(1_000);
    assert_eq!(world.available(), 10);
    assert!(world.take(10) && !world.take(1));
    world.release(100);
    assert!(world.take(10) && !world.take(1), "no more is released than was taken");
}

#[test]
fn what_java_credits_twice_is_put_right() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    let id = world.id();
    assert_eq!(world.java_acquire(10, 0, id), Some(Ok(())));
    world.java_release(10);
    assert_eq!(world.value().as_deref(), Some("10"));
    assert!(!world.take(1));
    assert_eq!(world.value().as_deref(), Some("0"));
}

#[test]
fn the_oldest_are_released_first_and_of_one_of_them_a_part() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 9);
    for _ in 0..3 {
        assert!(world.take(3));
        world.advance(10);
    }
    world.release(4);
    let permits: Vec<_> = world.log().iter().map(|it| (it.score % 1_000, it.permits())).collect();
    assert_eq!(permits, [(10, 2), (20, 3)]);
}

#[test]
fn a_value_that_is_lost_is_known_from_the_log() {
    let server = RedisServer::start();
    for java in [false, true] {
        let mut world = limiter(&server, 10);
        assert!(world.take(7));
        world.lose(1);
        if java {
            assert_eq!(world.java_available(0), 10);
        }
        assert_eq!(world.available(), 3);
        assert!(!world.take(4));
        assert_eq!(world.value().as_deref(), Some("3"));
        assert!(world.take(3) && !world.take(1));
    }
}

#[test]
fn a_log_that_is_lost_counts_as_taken_now() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    assert!(world.take(10));
    world.advance(999);
    world.lose(3);
    let id = world.id();
    assert_eq!(world.java_acquire(1, 0, id), None, "Java fails");
    assert_eq!(world.available(), 0);
    let denied = world.acquire(1, id);
    assert_eq!(denied.wait, 1_000_000);
    assert_eq!(world.java_acquire(1, 0, id), Some(Err(1_003)), "Java does not fail any more");
    world.advance(999);
    assert!(!world.take(1));
    world.advance(1);
    assert!(world.take(10) && !world.take(1));
}

#[test]
fn a_value_that_is_no_integer_is_put_right() {
    let server = RedisServer::start();
    for value in ["4.0", "many", "-20", "1e3", "inf", "-inf", "nan"] {
        let mut world = limiter(&server, 5);
        assert!(world.take(1));
        world.command::<()>(&["SET", "{LIMITER_NAME}:value", value]);
        assert!(world.take(3) && !world.take(2), "{value}");
        assert_eq!(world.value().as_deref(), Some("1"), "{value}");
        let id = world.id();
        assert_eq!(world.java_acquire(1, 0, id), Some(Ok(())), "{value}");
    }
}

#[test]
fn a_value_beyond_all_bounds_leaves_an_integer() {
    let server = RedisServer::start();
    for value in ["-inf", "nan", "1e400", &format!("-{}", "9".repeat(400))] {
        let mut world = limiter(&server, 2_000);
        world.tiny = true;
        for _ in 0..8 {
            assert!(world.take(1));
        }
        world.advance(500);
        for _ in 0..8 {
            assert!(world.take(1));
        }
        world.command::<()>(&["SET", "{LIMITER_NAME}:value", value]);
        world.advance(500);
        assert!(world.take(1), "{value}"); // some that have expired are still to be swept
        assert!(world.value().unwrap().parse::<i64>().is_ok(), "{value}: {:?}", world.value());
        for _ in 0..3 {
            assert!(world.take(1));
        }
        assert_eq!(world.value().as_deref(), Some("1988"), "{value}");
    }
}

#[test]
fn to_look_writes_nothing() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    let before = world.dump();
    assert_eq!(world.available(), 10);
    assert_eq!(world.dump(), before);
    assert!(world.take(4));
    world.advance(1_000);
    let before = world.dump();
    assert_eq!(world.available(), 10, "what has expired is not there any more");
    assert_eq!(world.dump(), before);
}

#[test]
fn the_value_of_a_limiter_that_is_gone_does_not_count() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    assert_eq!(world.java_available(0), 10);
    world.lose(0);
    assert!(world.set("try", 3, 1_000, 0));
    let id = world.id();
    assert_eq!(world.java_acquire(3, 0, id), Some(Ok(())));
    assert_eq!(world.value().as_deref(), Some("0"));
    assert!(!world.take(1));
}

#[test]
fn a_clock_that_is_ahead_admits_nothing_extra_here_and_locks_nobody_out() {
    let server = RedisServer::start();
    for skew in [3, 1_000, 2_000, 2_001, 90_000, 1_000_000] {
        let mut world = limiter(&server, 10);
        let id = world.id();
        assert_eq!(world.java_acquire(10, skew, id), Some(Ok(())));
        assert!(!world.take(1));
        world.advance(999);
        assert!(!world.take(1), "{skew} ms ahead");
        // As much longer as it is ahead, and at most three intervals.
        world.advance(1 + if skew <= 2_000 { skew as u64 } else { 0 });
        assert!(world.take(10), "{skew} ms ahead: {:?}", world.log());
    }
}

#[test]
fn what_is_taken_counts_for_a_full_interval_to_the_microsecond() {
    let server = RedisServer::start();
    for us in [0, 1, 500, 999] {
        let mut world = limiter(&server, 3);
        world.now += us;
        assert!(world.take(3));
        world.now += 999_999;
        assert!(!world.take(1), "{us} us after a millisecond");
        world.now += 1_000;
        assert!(world.take(3), "{us} us after a millisecond");
    }
}

#[test]
fn one_clock_that_is_far_ahead_drops_nothing_of_another_too_early() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 3);
    let java = |world: &mut super::World, skew| {
        let id = world.id();
        world.java_acquire(1, skew, id)
    };
    assert_eq!(java(&mut world, 90_000), Some(Ok(())));
    assert_eq!(world.available(), 2);
    assert!(world.take(1));
    world.advance(999);
    assert_eq!(java(&mut world, 4_000), Some(Ok(())));
    world.advance(1);
    assert!(world.take(2), "its own and the first of Java's have expired");
    assert!(!world.take(1));
    world.advance(999);
    assert!(!world.take(1));
    world.advance(1);
    assert!(world.take(3) && !world.take(1));
}

#[test]
fn clocks_that_are_ahead_by_more_and_more_are_waited_for_together() {
    let server = RedisServer::start();
    for (step, tiny) in [(10, false), (500, false), (500, true), (990, false), (990, true)] {
        let mut world = limiter(&server, 30);
        world.tiny = tiny;
        // The farthest first, as it would drop the others.
        for skew in (1..=30).rev() {
            let id = world.id();
            assert_eq!(world.java_acquire(1, skew * step, id), Some(Ok(())));
        }
        // To call meanwhile makes none of them new, nor does to give back some of them.
        let mut ms = 0;
        while !world.take(30) {
            assert!(ms < 3_000, "{step}: {:?}", world.log());
            if ms % 500 == 0 {
                world.release(1);
            }
            world.advance(50);
            ms += 50;
        }
        assert!(ms >= 1_000);
        assert!(!world.take(1));
    }
}

#[test]
fn to_give_back_some_of_what_is_far_ahead_makes_the_rest_no_newer() {
    let server = RedisServer::start();
    for by_id in [false, true] {
        let mut world = limiter(&server, 30);
        let ids: Vec<_> = (0..10).map(|_| world.id()).collect();
        for id in &ids {
            assert_eq!(world.java_acquire(3, 90_000, *id), Some(Ok(())));
        }
        assert!(!world.take(1));
        for id in &ids[..5] {
            world.advance(150);
            if by_id {
                world.give_back(3, 3, id);
            } else {
                world.release(2);
            }
        }
        world.advance(249);
        assert!(!world.take(30));
        world.advance(1);
        assert!(world.take(30), "{:?}", world.log());
    }
}

#[test]
fn all_that_is_far_ahead_can_be_given_back_from_a_long_log() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 100);
    let ids = [(); 2].map(|()| world.id());
    for id in ids {
        assert!(world.acquire(1, id).granted());
    }
    world.now -= 10_000_000;
    let last = world.id();
    assert!(world.acquire(1, last).granted());
    for _ in 0..39 {
        assert!(world.take(1));
    }
    for id in ids {
        world.give_back(1, 1, &id);
    }
    world.give_back(1, 1, &last);
    world.release(1);
    assert_eq!(world.available(), 62);
}

#[test]
fn what_is_far_ahead_stays_if_others_may_have_come_among_it() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 4);
    let java = |world: &mut super::World, permits, skew| {
        let id = world.id();
        world.java_acquire(permits, skew, id)
    };
    assert_eq!(java(&mut world, 1, 100_000), Some(Ok(())));
    assert!(world.take(1));
    // All clocks step back; then one that is ahead drops one entry and adds another.
    world.now -= 10_000_000;
    assert!(!world.take(4));
    world.advance(2);
    assert_eq!(java(&mut world, 3, 100_000), Some(Ok(())));
    world.advance(999);
    assert!(!world.take(2));
    world.advance(1_001);
    assert!(world.take(4));
}

#[test]
fn who_comes_after_a_clock_that_is_ahead_is_not_swept_too_early_by_it() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    let java = |world: &mut super::World, permits| {
        let id = world.id();
        world.java_acquire(permits, 500, id)
    };
    assert_eq!(java(&mut world, 1), Some(Ok(())));
    assert!(world.take(9));
    world.advance(999);
    assert!(java(&mut world, 1).is_some_and(|answer| answer.is_err()));
    world.advance(1);
    assert_eq!(java(&mut world, 1), Some(Ok(())));
}

#[test]
fn a_script_that_is_executed_twice_takes_once() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    let id = world.id();
    let first = world.acquire(4, id);
    assert_eq!(world.acquire(4, id), first);
    world.advance(300);
    assert!(world.take(6));
    assert!(world.acquire(4, id).granted(), "it was granted already");
    assert_eq!(world.log().len(), 2);
    world.advance(700);
    assert_eq!(world.available(), 4, "and it leaves as it came");
}

#[test]
fn what_java_takes_twice_by_one_script_comes_back() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    let id = world.id();
    for _ in 0..2 {
        assert_eq!(world.java_acquire(1, 0, id), Some(Ok(())));
    }
    assert_eq!(world.value().as_deref(), Some("8"));
    assert!(world.take(9) && !world.take(1));
}

#[test]
fn a_limiter_of_another_type_leaves_no_keys_behind() {
    let server = RedisServer::start();
    for mode in ["set", "update"] {
        let mut world = limiter(&server, 10);
        assert!(world.take(4));
        world.set(mode, 5, 2_000, 1);
        assert!(world.take(5) && !world.take(1));
        if mode == "update" {
            // In case it is changed back.
            assert_eq!([1, 3].map(|key| world.ttl(key)), [Some(1_001); 2]);
            world.set("update", 10, 1_000, 0);
            assert!(world.take(6) && !world.take(1));
            assert_eq!([1, 3].map(|key| world.ttl(key)), [None; 2]);
            world.set("update", 5, 2_000, 1);
            world.advance(1_001);
        }
        let of_all: Vec<String> = world.command(&["KEYS", "{LIMITER_NAME}:*s"]);
        let expired = world.dump().iter().all(|(key, _)| !key.ends_with(":permits"));
        assert!(expired, "{mode}: {of_all:?}");
    }
}

#[test]
fn permits_that_can_never_be_taken_are_refused_and_nothing_is_written() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    let before = world.dump();
    let id = world.id();
    assert_eq!(world.acquire(11, id).status, ABOVE_RATE);
    assert_eq!(world.dump(), before);
    world.lose(0);
    assert_eq!(world.acquire(1, id).status, NO_RATE);
    assert_eq!(world.dump(), []);
}

#[test]
fn a_denied_request_writes_nothing_and_its_delay_is_exact() {
    let server = RedisServer::start();
    for (permits, waits_for) in [(1, 1), (2, 1), (3, 2), (10, 5)] {
        let mut world = limiter(&server, 10);
        for _ in 0..5 {
            assert!(world.take(2));
            world.now += 30_300;
        }
        let before = world.dump();
        let id = world.id();
        let denied = world.acquire(permits, id);
        assert_eq!(denied.remaining, 0);
        assert_eq!(world.dump(), before);
        // Each is there for a full interval, in whole milliseconds.
        let leaves = world.log()[waits_for - 1].score * 1_000 + 1_000_000;
        assert_eq!(world.now + denied.wait, leaves);
        world.now += denied.wait - 1;
        assert!(!world.acquire(permits, id).granted());
        world.now += 1;
        assert!(world.acquire(permits, id).granted());
    }
}

#[test]
fn figures_beyond_all_bounds_stop_nobody() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 5);
    world.command::<()>(&[
        "ZADD",
        "{LIMITER_NAME}:permits",
        "+inf",
        "a",
        "1e300",
        "b",
        "-inf",
        "c",
    ]);
    assert!(world.take(5) && !world.take(1));
    world.advance(1_001);
    assert!(world.take(5) && !world.take(1));
    assert_eq!(world.log().len(), 1);

    let longest = i64::MAX.to_string();
    for field in ["rate", "interval", "keepAliveTime"] {
        world.command::<()>(&["HSET", "LIMITER_NAME", field, &longest]);
    }
    for _ in 0..40 {
        assert!(world.take(1));
    }
    assert!(world.value().unwrap().parse::<i64>().is_ok());
    let id = world.id();
    assert_eq!(world.java_acquire(1, 0, id), Some(Ok(())));
}

#[test]
fn a_rate_that_is_none_is_none_to_everybody_and_another_can_be_set() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 5);
    let id = world.id();
    let whole = ["many", "", "-1", "nan", "inf", "2.5", "1e3", "0x10", " 5", "+5", "5 "];
    let fields = ["rate", "interval", "type"].map(|field| whole.map(|value| (field, value)));
    for (field, value) in fields.into_iter().flatten().chain([("interval", "0"), ("type", "2")]) {
        world.command::<()>(&["HSET", "LIMITER_NAME", field, value]);
        let before = world.dump();
        assert_eq!(world.acquire(1, id).status, NO_RATE, "{field} {value:?}");
        assert_eq!(world.config(), None, "{field} {value:?}");
        assert_eq!(world.dump(), before);
        assert!(world.set("try", 5, 1_000, 0), "{field} {value:?}");
        assert_eq!(world.config(), Some([5, 1_000, 0, 0]));
        world.command::<()>(&["HSET", "LIMITER_NAME", "keepAliveTime", value]);
        let keep_alive = world.config().unwrap()[3];
        assert_eq!(keep_alive, if value == "2" { 2 } else { 0 }, "{value:?}");
        assert!(world.take(1));
        world.set("set", 5, 1_000, 0);
    }
    world.command::<()>(&["HSET", "LIMITER_NAME", "rate", "0"]);
    assert_eq!(world.acquire(1, id).status, ABOVE_RATE, "nobody shall pass");
}
