//! Keys, bytes and times to live.

use proptest::prelude::*;

use super::{
    super::keys::Keys,
    limiter,
    world::{RedisServer, World},
};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<_> = hex.bytes().filter(|it| *it != b' ').collect();
    digits
        .chunks(2)
        .map(|it| u8::from_str_radix(std::str::from_utf8(it).unwrap(), 16).unwrap())
        .collect()
}

fn add(world: &mut World, score: u64, member: &[u8]) {
    let key = world.keys.all[3].clone();
    redis::cmd("ZADD").arg(key).arg(score).arg(member).exec(&mut world.connection).unwrap();
}

#[test]
fn what_is_written_is_what_redisson_writes() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 5);
    let id = bytes("d64522dd71f1a6bac0526658be2ef3f4").try_into().unwrap();
    assert!(world.acquire(1, id).granted());

    let log = world.log();
    assert_eq!(log[0].member, bytes("10 d64522dd71f1a6bac0526658be2ef3f4 01000000"));
    assert_eq!((log.len(), log[0].score), (1, 1_700_000_000_000));
    assert_eq!(world.value().as_deref(), Some("4"));
    let mut fields: Vec<(String, String)> = world.command(&["HGETALL", "LIMITER_NAME"]);
    fields.sort_unstable();
    let expected = [("interval", "1000"), ("keepAliveTime", "0"), ("rate", "5"), ("type", "0")];
    assert_eq!(fields, expected.map(|(field, value)| (field.to_owned(), value.to_owned())));
    let mut keys: Vec<String> = world.command(&["KEYS", "*"]);
    keys.sort_unstable();
    assert_eq!(keys, ["LIMITER_NAME", "{LIMITER_NAME}:permits", "{LIMITER_NAME}:value"]);
    for (key, kind) in [("LIMITER_NAME", "hash"), ("{LIMITER_NAME}:permits", "zset")] {
        assert_eq!(world.command::<String>(&["TYPE", key]), kind);
    }
}

#[test]
fn a_java_client_goes_on_with_what_is_left_here_and_the_other_way_round() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 10);
    assert!(world.take(4));
    let id = world.id();
    assert_eq!(world.java_acquire(5, 0, id), Some(Ok(())));
    assert_eq!(world.java_available(0), 1);
    assert_eq!(world.available(), 1);
    assert!(!world.take(2));
    assert!(world.take(1));
    let id = world.id();
    world.advance(400);
    assert_eq!(world.java_acquire(1, 0, id), Some(Err(603)));
    world.advance(600);
    assert_eq!(world.java_acquire(10, 0, id), Some(Ok(())));
    assert!(!world.take(1));
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
        let mut world = limiter(&server, 10);
        let member = bytes(&member.replace("of the future", "6162"));
        let now = world.now_ms();
        add(&mut world, now, &member);
        assert_eq!(world.available(), 10 - permits, "{member:?}");
        assert!(world.take(10 - permits as u32) && !world.take(1));
        assert_eq!(world.value().as_deref(), Some("0"));
        world.release(1);
        assert!(world.take(1) && !world.take(1), "{member:?}");
        world.advance(1_001);
        assert!(world.take(10), "{member:?}");
    }
}

#[test]
fn what_is_no_entry_counts_for_nothing_and_is_gone_after_its_interval() {
    let server = RedisServer::start();
    for member in
        ["", "ff", "10 00", "10 000102030405060708090a0b0c0d0e0f fbffffff", "616263646566"]
    {
        let mut world = limiter(&server, 3);
        let now = world.now_ms();
        add(&mut world, now, &bytes(member));
        assert_eq!(world.available(), 3);
        assert!(world.take(2));
        world.release(1);
        assert!(world.take(2) && !world.take(1), "{member:?}");
        world.advance(1_000);
        assert!(world.take(3));
        assert_eq!(world.log().len(), 1, "{member:?}");
    }
}

#[test]
fn a_limiter_that_does_not_expire_leaves_keys_that_do_not_expire() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 3);
    assert!(world.take(1));
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [None; 3]);
}

#[test]
fn the_time_to_live_of_the_limiter_is_that_of_all_its_keys() {
    let server = RedisServer::start();
    let mut world = limiter(&server, 3);
    assert!(world.expire("60000"));
    assert!(world.take(1));
    world.advance(500);
    assert!(world.take(1));
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(59_500); 3]);
    assert!(!world.take(3));
    world.release(1);
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(59_500); 3]);
    world.set("update", 7, 1_000, 0);
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(59_500); 3]);

    assert!(world.expire(""));
    assert!(!world.expire(""));
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [None; 3]);

    // Not by a script: the hash alone.
    world.expire("60000");
    world.command::<()>(&["HDEL", "expiries", "LIMITER_NAME"]);
    assert!(world.take(1));
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [None; 3]);

    world.expire("60000");
    world.advance(60_000);
    assert_eq!(world.dump().len(), 0);
}

#[test]
fn a_limiter_that_is_kept_alive_expires_when_nobody_asks_any_more() {
    let server = RedisServer::start();
    let mut world = World::new(&server);
    world.forget();
    assert!(world.set_and_keep_alive("try", 2, 1_000, 0, "5000"));
    assert_eq!(world.ttl(0), Some(5_000));
    world.advance(4_000);
    assert!(world.take(2));
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(5_000); 3]);
    world.advance(900);
    assert!(!world.take(1), "a denied request keeps it alive as well");
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(5_000); 3]);
    world.advance(900);
    assert_eq!(world.available(), 2);
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(4_100); 3]);

    assert!(world.set("update", 2, 1_000, 0), "it stays as it is");
    assert_eq!(world.command::<String>(&["HGET", "LIMITER_NAME", "keepAliveTime"]), "5000");
    world.set("set", 2, 1_000, 0);
    assert_eq!(world.ttl(0), None, "it is not kept alive any more");
}

#[test]
fn a_time_to_keep_alive_that_is_too_short_loses_nothing() {
    let server = RedisServer::start();
    let mut world = World::new(&server);
    world.forget();
    world.set_and_keep_alive("try", 2, 1_000, 0, "100");
    assert!(world.take(2));
    world.advance(999);
    assert!(!world.take(1));
}

#[test]
fn the_keys_of_a_client_expire_an_interval_after_its_last_acquire() {
    let server = RedisServer::start();
    let mut world = World::new(&server);
    world.forget();
    world.set("try", 2, 1_000, 1);
    assert!(world.take(1));
    world.advance(400);
    assert!(world.take(1) && !world.take(1));
    assert_eq!([0, 2, 4].map(|key| world.ttl(key)), [None, Some(1_001), Some(1_001)]);
    let keys: Vec<String> = world.command(&["KEYS", "*:client"]);
    assert_eq!(keys.len(), 2, "{keys:?}");

    assert!(!world.expire(""), "there was nothing to take back");
    assert_eq!([2, 4].map(|key| world.ttl(key)), [Some(1_001); 2]);
    world.advance(1_001);
    assert_eq!(world.dump().iter().map(|(key, _)| &**key).collect::<Vec<_>>(), ["LIMITER_NAME"]);
    assert!(world.take(2));

    // However long the limiter itself is there.
    assert!(world.expire("60000"));
    assert_eq!([0, 2, 4].map(|key| world.ttl(key)), [Some(60_000), Some(1_001), Some(1_001)]);
    world.advance(1_000);
    assert!(world.take(1));
    assert_eq!([0, 2, 4].map(|key| world.ttl(key)), [Some(59_000), Some(1_001), Some(1_001)]);
    world.set_and_keep_alive("update", 2, 1_000, 1, "90000");
    assert_eq!([0, 2, 4].map(|key| world.ttl(key)), [Some(90_000), Some(1_001), Some(1_001)]);
    world.advance(500);
    assert!(world.take(1) && !world.take(1));
    assert_eq!([0, 2, 4].map(|key| world.ttl(key)), [Some(90_000), Some(1_001), Some(1_001)]);
    assert!(world.expire("500"));
    assert_eq!([0, 2, 4].map(|key| world.ttl(key)), [Some(500); 3]);
}

#[test]
fn another_client_has_the_rate_for_itself() {
    let server = RedisServer::start();
    let mut world = World::new(&server);
    world.forget();
    world.set("try", 2, 1_000, 1);
    assert!(world.take(2) && !world.take(1));
    world.keys = Keys::new("LIMITER_NAME", "another").unwrap();
    assert!(world.take(2) && !world.take(1));
}

/// By the rules of Redis Cluster.
fn slot(key: &str) -> u16 {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty());
    let crc = tag.unwrap_or(key).bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    });
    crc % 16_384
}

#[test]
fn names_whose_keys_would_be_in_several_slots_are_refused() {
    assert_eq!(slot("123456789"), 0x31c3);
    for name in ["", "a}b", "}", "x{y", "{}z", "{", "}{a}x{", "{}{a}"] {
        assert_eq!(Keys::new(name, "client").is_ok(), name == "}{a}x{", "{name}");
    }
    let user = Keys::new("user:{42}", "client").unwrap();
    assert_eq!(user.all[..3], ["user:{42}", "user:{42}:value", "user:{42}:value:client"]);
}

proptest! {
    #[test]
    fn the_keys_of_a_name_that_is_not_refused_are_in_one_slot(
        name in "[ab{}]{0,8}",
        client in "[ab{}]{0,4}",
    ) {
        match Keys::new(&name, &client) {
            Ok(keys) => prop_assert!(keys.all.iter().all(|key| slot(key) == slot(&name))),
            // Redisson's own keys would not be.
            Err(_) if name.contains('{') => {
                let value = format!("{name}:value");
                prop_assert!(slot(&value) != slot(&name));
            }
            Err(_) => {
                let value = format!("{{{name}}}:value");
                prop_assert!(name.is_empty() || slot(&value) != slot(&name));
            }
        }
    }
}
