//! The scripts by scripted time, alone and between those of Java clients.

mod cost;
mod defects;
mod format;
mod promise;
mod template;
mod world;

use self::world::{RedisServer, World};

/// A limiter of so many permits per second.
fn limiter(server: &RedisServer, rate: u64) -> World {
    let mut world = World::new(server);
    world.forget();
    assert!(world.set("try", rate, 1_000, 0));
    world
}
