//! What a template lends to the limiters of its keys.

use super::world::{RedisServer, World};

fn world(server: &RedisServer, lent: &str) -> World {
    let mut world = World::new(server);
    world.forget();
    world.lent = lent.to_owned();
    world
}

fn fields(world: &mut World) -> Vec<String> {
    let fields = ["rate", "interval", "type", "keepAliveTime", "template"];
    let values: Vec<Option<String>> =
        world.command(&[&["HMGET", "LIMITER_NAME"], &fields[..]].concat());
    values.into_iter().map(Option::unwrap_or_default).collect()
}

#[test]
fn a_limiter_without_a_rate_gets_that_of_the_template() {
    let server = RedisServer::start();
    let mut world = world(&server, "3 1000 0 60000");
    assert_eq!((world.available(), world.config()), (3, Some([3, 1_000, 0, 60_000])));
    assert_eq!(world.dump(), [], "to look writes nothing");
    let id = world.id();
    assert!(!world.acquire(4, id).granted());
    assert_eq!(world.dump(), [], "nor does what can never be");

    assert!(world.take(2));
    assert_eq!(world.steps, 1);
    assert_eq!(fields(&mut world), ["3", "1000", "0", "60000", "3 1000 0"]);
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(60_000); 3]);
    assert!(!world.take(2));
    let id = world.id();
    assert_eq!(world.java_acquire(1, 0, id), Some(Ok(())), "Java finds a limiter");
    assert_eq!(world.available(), 0);
}

#[test]
fn a_new_rate_of_the_template_reaches_the_limiters_that_it_lent_the_old_one() {
    let server = RedisServer::start();
    let mut world = world(&server, "5 1000 0 60000");
    assert!(world.take(5));
    world.lent = "8 1000 0 60000".to_owned();
    assert_eq!(world.available(), 3);
    assert!(world.take(3) && !world.take(1));
    assert_eq!(fields(&mut world), ["8", "1000", "0", "60000", "8 1000 0"]);

    world.advance(500);
    world.lent = "2 2000 0 70000".to_owned();
    let id = world.id();
    let denied = world.acquire(1, id);
    assert!(!denied.granted(), "a lower rate forgets no debt");
    assert_eq!(denied.wait, 1_500_000);
    assert_eq!(fields(&mut world), ["2", "2000", "0", "70000", "2 2000 0"]);
    assert_eq!(world.value().as_deref(), Some("-6"));
    assert_eq!([0, 1, 3].map(|key| world.ttl(key)), [Some(70_000); 3]);
    world.advance(1_500);
    assert!(world.take(2) && !world.take(1));

    world.lent = "1 2000 1 70000".to_owned();
    assert!(world.take(1) && !world.take(1), "each client has it for itself");
}

#[test]
fn a_rate_that_was_set_for_one_limiter_alone_stays() {
    let server = RedisServer::start();
    for by in ["set", "update", "java", "hand"] {
        let mut world = world(&server, "5 1000 0 60000");
        assert!(world.take(1));
        match by {
            "java" => world.java_update(7, 1_000),
            "hand" => world.command(&["HSET", "LIMITER_NAME", "rate", "7"]),
            // The same as the template's, for now.
            _ => assert!(world.set(by, 5, 1_000, 0)),
        }
        let before = fields(&mut world);
        world.lent = "2 1000 0 60000".to_owned();
        world.advance(1_000);
        assert!(world.take(5), "{by}");
        assert_eq!(fields(&mut world), before, "{by}");
        // Until it is gone.
        world.lose(0);
        world.advance(1_000);
        assert!(world.take(2) && !world.take(1), "{by}");
    }
}

#[test]
fn what_was_taken_counts_though_the_rate_is_lost() {
    let server = RedisServer::start();
    let mut world = world(&server, "3 1000 0 60000");
    assert!(world.take(2));
    world.lose(0);
    assert!(!world.take(2) && world.take(1));
    // But not what a limiter that is gone has left.
    world.lose(0);
    world.lose(3);
    assert!(world.take(3) && !world.take(1));
}
