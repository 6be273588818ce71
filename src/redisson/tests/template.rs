//! Tests of the rate that limiters inherit from a template.

use super::harness::{Harness, RedisServer};

fn new_harness(server: &RedisServer, template_rate: &str) -> Harness {
    let mut harness = Harness::new(server);
    harness.reset();
    harness.template_rate = template_rate.to_owned();
    harness
}

fn fields(harness: &mut Harness) -> Vec<String> {
    let fields = ["rate", "interval", "type", "keepAliveTime", "template"];
    let values: Vec<Option<String>> =
        harness.command(&[&["HMGET", "LIMITER_NAME"], &fields[..]].concat());
    values.into_iter().map(Option::unwrap_or_default).collect()
}

#[test]
fn a_limiter_without_a_rate_inherits_the_rate_of_the_template() {
    let server = RedisServer::start();
    let mut harness = new_harness(&server, "3 1000 0 60000");
    assert_eq!((harness.available(), harness.config()), (3, Some([3, 1_000, 0, 60_000])));
    assert_eq!(harness.dump(), [], "available_permits and config write nothing");
    let id = harness.id();
    assert!(!harness.acquire(4, id).granted());
    assert_eq!(harness.dump(), [], "an acquire above the rate writes nothing");

    assert!(harness.take(2));
    assert_eq!(harness.steps, 1);
    assert_eq!(fields(&mut harness), ["3", "1000", "0", "60000", "3 1000 0"]);
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(60_000); 3]);
    assert!(!harness.take(2));
    let id = harness.id();
    assert_eq!(harness.java_acquire(1, 0, id), Some(Ok(())), "Java finds a rate");
    assert_eq!(harness.available(), 0);
}

#[test]
fn limiters_that_inherited_a_rate_inherit_its_change() {
    let server = RedisServer::start();
    let mut harness = new_harness(&server, "5 1000 0 60000");
    assert!(harness.take(5));
    harness.template_rate = "8 1000 0 60000".to_owned();
    assert_eq!(harness.available(), 3);
    assert!(harness.take(3) && !harness.take(1));
    assert_eq!(fields(&mut harness), ["8", "1000", "0", "60000", "8 1000 0"]);

    harness.advance(500);
    harness.template_rate = "2 2000 0 70000".to_owned();
    let id = harness.id();
    let denied = harness.acquire(1, id);
    assert!(!denied.granted(), "a lower rate forgets no debt");
    assert_eq!(denied.wait, 1_500_000);
    assert_eq!(fields(&mut harness), ["2", "2000", "0", "70000", "2 2000 0"]);
    assert_eq!(harness.value().as_deref(), Some("-6"));
    assert_eq!([0, 1, 3].map(|key| harness.ttl(key)), [Some(70_000); 3]);
    harness.advance(1_500);
    assert!(harness.take(2) && !harness.take(1));

    harness.template_rate = "1 2000 1 70000".to_owned();
    assert!(harness.take(1) && !harness.take(1), "each client has a rate of its own");
}

#[test]
fn a_rate_set_for_one_limiter_is_not_overwritten() {
    let server = RedisServer::start();
    for by in ["set", "update", "java", "hand"] {
        let mut harness = new_harness(&server, "5 1000 0 60000");
        assert!(harness.take(1));
        match by {
            "java" => harness.java_update(7, 1_000),
            "hand" => harness.command(&["HSET", "LIMITER_NAME", "rate", "7"]),
            // The current rate of the template.
            _ => assert!(harness.set(by, 5, 1_000, 0)),
        }
        let before = fields(&mut harness);
        harness.template_rate = "2 1000 0 60000".to_owned();
        harness.advance(1_000);
        assert!(harness.take(5), "{by}");
        assert_eq!(fields(&mut harness), before, "{by}");
        // A limiter whose rate was deleted inherits again.
        harness.lose(0);
        harness.advance(1_000);
        assert!(harness.take(2) && !harness.take(1), "{by}");
    }
}

#[test]
fn permits_still_count_after_the_rate_is_lost() {
    let server = RedisServer::start();
    let mut harness = new_harness(&server, "3 1000 0 60000");
    assert!(harness.take(2));
    harness.lose(0);
    assert!(!harness.take(2) && harness.take(1));
    // The value that a deleted limiter left behind does not count.
    harness.lose(0);
    harness.lose(3);
    assert!(harness.take(3) && !harness.take(1));
}
