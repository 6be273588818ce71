//! Tests of the format: keys, bytes and times to live.

use tower_ratelimit_redisson::Keys;

use super::{
    harness::{Harness, RedisServer},
    limiter,
};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<_> = hex.bytes().filter(|byte| *byte != b' ').collect();
    digits
        .chunks(2)
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap())
        .collect()
}

fn add(harness: &mut Harness, score: u64, member: &[u8]) {
    let key = harness.keys.all[3].clone();
    redis::cmd("ZADD").arg(key).arg(score).arg(member).exec(&mut harness.connection).unwrap();
}

#[test]
fn this_crate_writes_the_bytes_of_redisson() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 5);
    let id = bytes("d64522dd71f1a6bac0526658be2ef3f4").try_into().unwrap();
    assert!(harness.acquire(1, id).granted());

    let log = harness.log();
    assert_eq!(log[0].member, bytes("10 d64522dd71f1a6bac0526658be2ef3f4 01000000"));
    assert_eq!((log.len(), log[0].score), (1, 1_700_000_000_000));
    assert_eq!(harness.value().as_deref(), Some("4"));
    let mut fields: Vec<(String, String)> = harness.command(&["HGETALL", "LIMITER_NAME"]);
    fields.sort_unstable();
    let expected = [("interval", "1000"), ("keepAliveTime", "0"), ("rate", "5"), ("type", "0")];
    assert_eq!(fields, expected.map(|(field, value)| (field.to_owned(), value.to_owned())));
    let mut keys: Vec<String> = harness.command(&["KEYS", "*"]);
    keys.sort_unstable();
    assert_eq!(keys, ["LIMITER_NAME", "{LIMITER_NAME}:permits", "{LIMITER_NAME}:value"]);
    for (key, kind) in [("LIMITER_NAME", "hash"), ("{LIMITER_NAME}:permits", "zset")] {
        assert_eq!(harness.command::<String>(&["TYPE", key]), kind);
    }
}

#[test]
fn java_and_rust_clients_draw_from_one_limit() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 10);
    assert!(harness.take(4));
    let id = harness.id();
    assert_eq!(harness.java_acquire(5, 0, id), Some(Ok(())));
    assert_eq!(harness.java_available(0), 1);
    assert_eq!(harness.available(), 1);
    assert!(!harness.take(2));
    assert!(harness.take(1));
    let id = harness.id();
    harness.advance(400);
    assert_eq!(harness.java_acquire(1, 0, id), Some(Err(603)));
    harness.advance(600);
    assert_eq!(harness.java_acquire(10, 0, id), Some(Ok(())));
    assert!(!harness.take(1));
}

#[test]
fn entries_of_older_releases_are_read_by_their_length() {
    let server = RedisServer::start();
    for (member, permits) in [
        ("c3f5484f 03000000", 3),
        ("0800000000000000 0102030405060708 04000000", 4),
        ("08 0102030405060708 05000000", 5),
        ("10 000102030405060708090a0b0c0d0e0f 06000000", 6),
        ("10 000102030405060708090a0b0c0d0e0f 07000000 of the future", 7),
        ("11 000102030405060708090a0b0c0d0e0f10 02000000", 2),
    ] {
        let mut harness = limiter(&server, 10);
        let member = bytes(&member.replace("of the future", "6162"));
        let now = harness.now_ms();
        add(&mut harness, now, &member);
        assert_eq!(harness.available(), 10 - permits, "{member:?}");
        assert!(harness.take(10 - permits as u32) && !harness.take(1));
        assert_eq!(harness.value().as_deref(), Some("0"));
        harness.release(1);
        assert!(harness.take(1) && !harness.take(1), "{member:?}");
        harness.advance(1_001);
        assert!(harness.take(10), "{member:?}");
    }
}

#[test]
fn an_unreadable_entry_counts_0_and_is_dropped_after_its_interval() {
    let server = RedisServer::start();
    for member in
        ["", "ff", "10 00", "10 000102030405060708090a0b0c0d0e0f fbffffff", "616263646566"]
    {
        let mut harness = limiter(&server, 3);
        let now = harness.now_ms();
        add(&mut harness, now, &bytes(member));
        assert_eq!(harness.available(), 3);
        assert!(harness.take(2));
        harness.release(1);
        assert!(harness.take(2) && !harness.take(1), "{member:?}");
        harness.advance(1_000);
        assert!(harness.take(3));
        assert_eq!(harness.log().len(), 1, "{member:?}");
    }
}

#[test]
fn the_keys_of_a_limiter_that_does_not_expire_do_not_expire() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 3);
    assert!(harness.take(1));
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [None; 3]);
}

#[test]
fn all_keys_have_the_time_to_live_of_the_limiter() {
    let server = RedisServer::start();
    let mut harness = limiter(&server, 3);
    assert!(harness.expire("60000"));
    assert!(harness.take(1));
    harness.advance(500);
    assert!(harness.take(1));
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(59_500); 3]);
    assert!(!harness.take(3));
    harness.release(1);
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(59_500); 3]);
    harness.set("update", 7, 1_000, 0);
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(59_500); 3]);

    assert!(harness.expire(""));
    assert!(!harness.expire(""));
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [None; 3]);

    // The hash alone, without the script.
    harness.expire("60000");
    harness.command::<()>(&["HDEL", "expiries", "LIMITER_NAME"]);
    assert!(harness.take(1));
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [None; 3]);

    harness.expire("60000");
    harness.advance(60_000);
    assert_eq!(harness.dump().len(), 0);
}

#[test]
fn a_limiter_with_a_keep_alive_time_expires_when_it_is_not_called() {
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.reset();
    assert!(harness.set_and_keep_alive("try", 2, 1_000, 0, "5000"));
    assert_eq!(harness.ttl(0), Some(5_000));
    harness.advance(4_000);
    assert!(harness.take(2));
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(5_000); 3]);
    harness.advance(900);
    assert!(!harness.take(1), "a denied request extends the time too");
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(5_000); 3]);
    harness.advance(900);
    assert_eq!(harness.available(), 2);
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(4_100); 3]);

    assert!(harness.set("update", 2, 1_000, 0), "an update keeps the time");
    assert_eq!(harness.command::<String>(&["HGET", "LIMITER_NAME", "keepAliveTime"]), "5000");
    harness.set("set", 2, 1_000, 0);
    assert_eq!(harness.ttl(0), None, "set_rate removes the time");
}

#[test]
fn a_keep_alive_time_below_the_interval_loses_no_permits() {
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.reset();
    harness.set_and_keep_alive("try", 2, 1_000, 0, "100");
    assert!(harness.take(2));
    harness.advance(999);
    assert!(!harness.take(1));
}

#[test]
fn the_keys_of_a_client_expire_an_interval_after_its_last_acquire() {
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.reset();
    harness.set("try", 2, 1_000, 1);
    assert!(harness.take(1));
    harness.advance(400);
    assert!(harness.take(1) && !harness.take(1));
    assert_eq!([0, 2, 4].map(|key| harness.ttl(key)), [None, Some(1_001), Some(1_001)]);
    let keys: Vec<String> = harness.command(&["KEYS", "*:client"]);
    assert_eq!(keys.len(), 2, "{keys:?}");

    assert!(!harness.expire(""), "no key had a time to live to clear");
    assert_eq!([2, 4].map(|key| harness.ttl(key)), [Some(1_001); 2]);
    harness.advance(1_001);
    assert_eq!(harness.dump().iter().map(|(key, _)| &**key).collect::<Vec<_>>(), ["LIMITER_NAME"]);
    assert!(harness.take(2));

    // The time to live of the limiter does not matter.
    assert!(harness.expire("60000"));
    assert_eq!([0, 2, 4].map(|key| harness.ttl(key)), [Some(60_000), Some(1_001), Some(1_001)]);
    harness.advance(1_000);
    assert!(harness.take(1));
    assert_eq!([0, 2, 4].map(|key| harness.ttl(key)), [Some(59_000), Some(1_001), Some(1_001)]);
    harness.set_and_keep_alive("update", 2, 1_000, 1, "90000");
    assert_eq!([0, 2, 4].map(|key| harness.ttl(key)), [Some(90_000), Some(1_001), Some(1_001)]);
    harness.advance(500);
    assert!(harness.take(1) && !harness.take(1));
    assert_eq!([0, 2, 4].map(|key| harness.ttl(key)), [Some(90_000), Some(1_001), Some(1_001)]);
    assert!(harness.expire("500"));
    assert_eq!([0, 2, 4].map(|key| harness.ttl(key)), [Some(500); 3]);
}

#[test]
fn each_client_has_a_rate_of_its_own() {
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.reset();
    harness.set("try", 2, 1_000, 1);
    assert!(harness.take(2) && !harness.take(1));
    harness.keys = Keys::new("LIMITER_NAME", "another").unwrap();
    assert!(harness.take(2) && !harness.take(1));
}
