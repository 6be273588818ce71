//! Defects of Redisson alone that this crate avoids or repairs.

use tower_ratelimit_redisson::status::{ABOVE_RATE, NO_RATE};

use super::{harness::RedisServer, limiter};

#[test]
fn a_lowered_rate_forgets_no_debt() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    for _ in 0..10 {
        assert!(harness.take(1));
        harness.advance(50);
    }
    assert!(harness.set("update", 5, 1_000, 0));
    assert_eq!(harness.value().as_deref(), Some("-5"));
    assert_eq!(harness.available(), 0);
    // Six permits must expire before one can be taken.
    harness.advance(749);
    assert!(!harness.take(1));
    harness.advance(1);
    assert!(harness.take(1) && !harness.take(1));
}

#[test]
fn a_raised_rate_applies_at_once() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 5);
    assert!(harness.take(5) && !harness.take(1));
    assert!(harness.set("update", 8, 1_000, 0));
    assert!(harness.take(3) && !harness.take(1));
}

#[test]
fn a_rate_changed_with_redis_cli_applies_from_the_next_call_on() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 5);
    assert!(harness.take(5));
    harness.command::<()>(&["HSET", "LIMITER_NAME", "rate", "8"]);
    assert_eq!(harness.available(), 3);
    assert!(harness.take(3) && !harness.take(1));
    harness.command::<()>(&["HSET", "LIMITER_NAME", "rate", "2"]);
    harness.advance(999);
    assert!(!harness.take(1));
    harness.advance(1);
    assert!(harness.take(2) && !harness.take(1));
    harness.command::<()>(&["HSET", "LIMITER_NAME", "interval", "100"]);
    harness.advance(100);
    assert!(harness.take(2) && !harness.take(1));
}

#[test]
fn released_permits_are_credited_once() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    assert!(harness.take(5));
    harness.release(3);
    harness.advance(500);
    assert!(harness.take(8) && !harness.take(1));
    harness.advance(500);
    assert!(harness.take(2) && !harness.take(1));

    harness.advance(1_000);
    assert!(harness.take(10));
    harness.release(10);
    harness.advance(1_000);
    assert_eq!(harness.available(), 10);
    for _ in 0..9 {
        assert!(harness.take(1));
        harness.release(1);
    }
    harness.advance(1_000);
    assert_eq!(harness.available(), 10);
    assert!(harness.take(10) && !harness.take(1));
    harness.release(100);
    assert!(harness.take(10) && !harness.take(1), "no more permits are released than were taken");
}

#[test]
fn permits_that_java_credits_twice_are_corrected() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    let id = harness.id();
    assert_eq!(harness.java_acquire(10, 0, id), Some(Ok(())));
    harness.java_release(10);
    assert_eq!(harness.value().as_deref(), Some("10"));
    assert!(!harness.take(1));
    assert_eq!(harness.value().as_deref(), Some("0"));
}

#[test]
fn the_oldest_permits_are_released_first_also_a_part_of_an_entry() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 9);
    for _ in 0..3 {
        assert!(harness.take(3));
        harness.advance(10);
    }
    harness.release(4);
    let permits: Vec<_> =
        harness.log().iter().map(|entry| (entry.score % 1_000, entry.permits())).collect();
    assert_eq!(permits, [(10, 2), (20, 3)]);
}

#[test]
fn a_lost_value_is_restored_from_the_log() {
    let server = RedisServer::start();
    for java in [false, true] {
        let mut harness = limiter(&server, 10);
        assert!(harness.take(7));
        harness.lose(1);
        if java {
            assert_eq!(harness.java_available(0), 10);
        }
        assert_eq!(harness.available(), 3);
        assert!(!harness.take(4));
        assert_eq!(harness.value().as_deref(), Some("3"));
        assert!(harness.take(3) && !harness.take(1));
    }
}

#[test]
fn the_permits_of_a_lost_log_count_from_now() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    assert!(harness.take(10));
    harness.advance(999);
    harness.lose(3);
    let id = harness.id();
    assert_eq!(harness.java_acquire(1, 0, id), None, "Java fails");
    assert_eq!(harness.available(), 0);
    let denied = harness.acquire(1, id);
    assert_eq!(denied.wait, 1_000_000);
    assert_eq!(harness.java_acquire(1, 0, id), Some(Err(1_003)), "Java does not fail any more");
    harness.advance(999);
    assert!(!harness.take(1));
    harness.advance(1);
    assert!(harness.take(10) && !harness.take(1));
}

#[test]
fn a_value_that_is_not_an_integer_is_corrected() {
    let server = RedisServer::start();
    for value in ["4.0", "many", "-20", "1e3", "inf", "-inf", "nan"] {
        let mut harness = limiter(&server, 5);
        assert!(harness.take(1));
        harness.command::<()>(&["SET", "{LIMITER_NAME}:value", value]);
        assert!(harness.take(3) && !harness.take(2), "{value}");
        assert_eq!(harness.value().as_deref(), Some("1"), "{value}");
        let id = harness.id();
        assert_eq!(harness.java_acquire(1, 0, id), Some(Ok(())), "{value}");
    }
}

#[test]
fn a_value_out_of_range_is_replaced_by_an_integer() {
    let server = RedisServer::start();
    for value in ["-inf", "nan", "1e400", &format!("-{}", "9".repeat(400))] {
        let mut harness = limiter(&server, 2_000);
        harness.tiny = true;
        for _ in 0..8 {
            assert!(harness.take(1));
        }
        harness.advance(500);
        for _ in 0..8 {
            assert!(harness.take(1));
        }
        harness.command::<()>(&["SET", "{LIMITER_NAME}:value", value]);
        harness.advance(500);
        assert!(harness.take(1), "{value}"); // some expired entries are still to be swept
        assert!(harness.value().unwrap().parse::<i64>().is_ok(), "{value}: {:?}", harness.value());
        for _ in 0..3 {
            assert!(harness.take(1));
        }
        assert_eq!(harness.value().as_deref(), Some("1988"), "{value}");
    }
}

#[test]
fn available_permits_writes_nothing() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    let before = harness.dump();
    assert_eq!(harness.available(), 10);
    assert_eq!(harness.dump(), before);
    assert!(harness.take(4));
    harness.advance(1_000);
    let before = harness.dump();
    assert_eq!(harness.available(), 10, "expired permits do not count");
    assert_eq!(harness.dump(), before);
}

#[test]
fn the_value_of_a_deleted_limiter_does_not_count() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    assert_eq!(harness.java_available(0), 10);
    harness.lose(0);
    assert!(harness.set("try", 3, 1_000, 0));
    let id = harness.id();
    assert_eq!(harness.java_acquire(3, 0, id), Some(Ok(())));
    assert_eq!(harness.value().as_deref(), Some("0"));
    assert!(!harness.take(1));
}

#[test]
fn a_clock_that_is_ahead_admits_nothing_extra_and_locks_no_client_out() {
    let server = RedisServer::start();
    for skew in [3, 1_000, 2_000, 2_001, 90_000, 1_000_000] {
        let mut harness = limiter(&server, 10);
        let id = harness.id();
        assert_eq!(harness.java_acquire(10, skew, id), Some(Ok(())));
        assert!(!harness.take(1));
        harness.advance(999);
        assert!(!harness.take(1), "{skew} ms ahead");
        // Longer by the difference of the clocks, and at most three intervals.
        harness.advance(1 + if skew <= 2_000 { skew as u64 } else { 0 });
        assert!(harness.take(10), "{skew} ms ahead: {:?}", harness.log());
    }
}

#[test]
fn permits_count_for_a_full_interval_to_the_microsecond() {
    let server = RedisServer::start();
    for us in [0, 1, 500, 999] {
        let mut harness = limiter(&server, 3);
        harness.now += us;
        assert!(harness.take(3));
        harness.now += 999_999;
        assert!(!harness.take(1), "{us} us after a millisecond");
        harness.now += 1_000;
        assert!(harness.take(3), "{us} us after a millisecond");
    }
}

#[test]
fn a_clock_far_ahead_drops_no_entry_of_another_clock_too_early() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 3);
    let java = |harness: &mut super::Harness, skew| {
        let id = harness.id();
        harness.java_acquire(1, skew, id)
    };
    assert_eq!(java(&mut harness, 90_000), Some(Ok(())));
    assert_eq!(harness.available(), 2);
    assert!(harness.take(1));
    harness.advance(999);
    assert_eq!(java(&mut harness, 4_000), Some(Ok(())));
    harness.advance(1);
    assert!(harness.take(2), "the entry of this crate and Java's first one have expired");
    assert!(!harness.take(1));
    harness.advance(999);
    assert!(!harness.take(1));
    harness.advance(1);
    assert!(harness.take(3) && !harness.take(1));
}

#[test]
fn entries_of_several_clocks_far_ahead_are_dropped_within_three_intervals() {
    let server = RedisServer::start();
    for (step, tiny) in [(10, false), (500, false), (500, true), (990, false), (990, true)] {
        let mut harness = limiter(&server, 30);
        harness.tiny = tiny;
        // The farthest first, because a later one would drop the others.
        for skew in (1..=30).rev() {
            let id = harness.id();
            assert_eq!(harness.java_acquire(1, skew * step, id), Some(Ok(())));
        }
        // Neither a call nor a release in between restarts the time of an entry.
        let mut ms = 0;
        while !harness.take(30) {
            assert!(ms < 3_000, "{step}: {:?}", harness.log());
            if ms % 500 == 0 {
                harness.release(1);
            }
            harness.advance(50);
            ms += 50;
        }
        assert!(ms >= 1_000);
        assert!(!harness.take(1));
    }
}

#[test]
fn a_release_of_entries_far_ahead_does_not_restart_the_time_of_the_others() {
    let server = RedisServer::start();
    for by_id in [false, true] {
        let mut harness = limiter(&server, 30);
        let ids: Vec<_> = (0..10).map(|_| harness.id()).collect();
        for id in &ids {
            assert_eq!(harness.java_acquire(3, 90_000, *id), Some(Ok(())));
        }
        assert!(!harness.take(1));
        for id in &ids[..5] {
            harness.advance(150);
            if by_id {
                harness.release_taken(3, 3, id);
            } else {
                harness.release(2);
            }
        }
        harness.advance(249);
        assert!(!harness.take(30));
        harness.advance(1);
        assert!(harness.take(30), "{:?}", harness.log());
    }
}

#[test]
fn all_entries_far_ahead_can_be_released_from_a_long_log() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 100);
    let ids = [(); 2].map(|()| harness.id());
    for id in ids {
        assert!(harness.acquire(1, id).granted());
    }
    harness.now -= 10_000_000;
    let last = harness.id();
    assert!(harness.acquire(1, last).granted());
    for _ in 0..39 {
        assert!(harness.take(1));
    }
    for id in ids {
        harness.release_taken(1, 1, &id);
    }
    harness.release_taken(1, 1, &last);
    harness.release(1);
    assert_eq!(harness.available(), 62);
}

#[test]
fn entries_far_ahead_stay_if_others_may_have_been_added_among_them() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 4);
    let java = |harness: &mut super::Harness, permits, skew| {
        let id = harness.id();
        harness.java_acquire(permits, skew, id)
    };
    assert_eq!(java(&mut harness, 1, 100_000), Some(Ok(())));
    assert!(harness.take(1));
    // All clocks step back; then a Java client ahead drops one entry and adds another.
    harness.now -= 10_000_000;
    assert!(!harness.take(4));
    harness.advance(2);
    assert_eq!(java(&mut harness, 3, 100_000), Some(Ok(())));
    harness.advance(999);
    assert!(!harness.take(2));
    harness.advance(1_001);
    assert!(harness.take(4));
}

#[test]
fn a_host_whose_clock_is_ahead_does_not_sweep_later_entries_too_early() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    let java = |harness: &mut super::Harness, permits| {
        let id = harness.id();
        harness.java_acquire(permits, 500, id)
    };
    assert_eq!(java(&mut harness, 1), Some(Ok(())));
    assert!(harness.take(9));
    harness.advance(999);
    assert!(java(&mut harness, 1).is_some_and(|answer| answer.is_err()));
    harness.advance(1);
    assert_eq!(java(&mut harness, 1), Some(Ok(())));
}

#[test]
fn a_script_that_is_executed_twice_takes_once() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    let id = harness.id();
    let first = harness.acquire(4, id);
    assert_eq!(harness.acquire(4, id), first);
    harness.advance(300);
    assert!(harness.take(6));
    assert!(harness.acquire(4, id).granted(), "the acquire was granted before");
    assert_eq!(harness.log().len(), 2);
    harness.advance(700);
    assert_eq!(harness.available(), 4, "the entry keeps its time");
}

#[test]
fn permits_that_java_takes_twice_with_one_script_return() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    let id = harness.id();
    for _ in 0..2 {
        assert_eq!(harness.java_acquire(1, 0, id), Some(Ok(())));
    }
    assert_eq!(harness.value().as_deref(), Some("8"));
    assert!(harness.take(9) && !harness.take(1));
}

#[test]
fn a_change_of_the_type_leaves_no_keys_behind() {
    let server = RedisServer::start();
    for mode in ["set", "update"] {
        let mut harness = limiter(&server, 10);
        assert!(harness.take(4));
        harness.set(mode, 5, 2_000, 1);
        assert!(harness.take(5) && !harness.take(1));
        if mode == "update" {
            // The count is kept in case the type is changed back.
            assert_eq!([1, 3].map(|key| harness.ttl(key)), [Some(1_001); 2]);
            harness.set("update", 10, 1_000, 0);
            assert!(harness.take(6) && !harness.take(1));
            assert_eq!([1, 3].map(|key| harness.ttl(key)), [None; 2]);
            harness.set("update", 5, 2_000, 1);
            harness.advance(1_001);
        }
        let of_all: Vec<String> = harness.command(&["KEYS", "{LIMITER_NAME}:*s"]);
        let expired = harness.dump().iter().all(|(key, _)| !key.ends_with(":permits"));
        assert!(expired, "{mode}: {of_all:?}");
    }
}

#[test]
fn an_acquire_above_the_rate_is_rejected_and_writes_nothing() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    let before = harness.dump();
    let id = harness.id();
    assert_eq!(harness.acquire(11, id).status, ABOVE_RATE);
    assert_eq!(harness.dump(), before);
    harness.lose(0);
    assert_eq!(harness.acquire(1, id).status, NO_RATE);
    assert_eq!(harness.dump(), []);
}

#[test]
fn a_denied_request_writes_nothing_and_its_delay_is_exact() {
    let server = RedisServer::start();
    for (permits, waits_for) in [(1, 1), (2, 1), (3, 2), (10, 5)] {
        let mut harness = limiter(&server, 10);
        for _ in 0..5 {
            assert!(harness.take(2));
            harness.now += 30_300;
        }
        let before = harness.dump();
        let id = harness.id();
        let denied = harness.acquire(permits, id);
        assert_eq!(denied.remaining, 0);
        assert_eq!(harness.dump(), before);
        // Each entry stays for a full interval, in whole milliseconds.
        let leaves = harness.log()[waits_for - 1].score * 1_000 + 1_000_000;
        assert_eq!(harness.now + denied.wait, leaves);
        harness.now += denied.wait - 1;
        assert!(!harness.acquire(permits, id).granted());
        harness.now += 1;
        assert!(harness.acquire(permits, id).granted());
    }
}

#[test]
fn numbers_out_of_range_block_no_client() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 5);
    harness.command::<()>(&[
        "ZADD",
        "{LIMITER_NAME}:permits",
        "+inf",
        "a",
        "1e300",
        "b",
        "-inf",
        "c",
    ]);
    assert!(harness.take(5) && !harness.take(1));
    harness.advance(1_001);
    assert!(harness.take(5) && !harness.take(1));
    assert_eq!(harness.log().len(), 1);

    let longest = i64::MAX.to_string();
    for field in ["rate", "interval", "keepAliveTime"] {
        harness.command::<()>(&["HSET", "LIMITER_NAME", field, &longest]);
    }
    for _ in 0..40 {
        assert!(harness.take(1));
    }
    assert!(harness.value().unwrap().parse::<i64>().is_ok());
    let id = harness.id();
    assert_eq!(harness.java_acquire(1, 0, id), Some(Ok(())));
}

#[test]
fn an_invalid_rate_counts_as_no_rate_and_can_be_replaced() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 5);
    let id = harness.id();
    let invalid = ["many", "", "-1", "nan", "inf", "2.5", "1e3", "0x10", " 5", "+5", "5 "];
    let fields = ["rate", "interval", "type"].map(|field| invalid.map(|value| (field, value)));
    for (field, value) in fields.into_iter().flatten().chain([("interval", "0"), ("type", "2")]) {
        harness.command::<()>(&["HSET", "LIMITER_NAME", field, value]);
        let before = harness.dump();
        assert_eq!(harness.acquire(1, id).status, NO_RATE, "{field} {value:?}");
        assert_eq!(harness.config(), None, "{field} {value:?}");
        assert_eq!(harness.dump(), before);
        assert!(harness.set("try", 5, 1_000, 0), "{field} {value:?}");
        assert_eq!(harness.config(), Some([5, 1_000, 0, 0]));
        harness.command::<()>(&["HSET", "LIMITER_NAME", "keepAliveTime", value]);
        let keep_alive = harness.config().unwrap()[3];
        assert_eq!(keep_alive, if value == "2" { 2 } else { 0 }, "{value:?}");
        assert!(harness.take(1));
        harness.set("set", 5, 1_000, 0);
    }
    harness.command::<()>(&["HSET", "LIMITER_NAME", "rate", "0"]);
    assert_eq!(harness.acquire(1, id).status, ABOVE_RATE, "a rate of 0 admits no request");
}
