//! Tests of the scripts with scripted time, alone and interleaved with the scripts of Java clients.
//! Tests of the public methods are in `tests/redis`.

mod cost;
mod defects;
mod format;
mod harness;
mod oracle;
mod template;

use self::harness::{Harness, RedisServer};

/// Creates a limiter with `rate` permits per second.
fn limiter(server: &RedisServer, rate: u64) -> Harness {
    let mut harness = Harness::new(server);
    harness.reset();
    assert!(harness.set("try", rate, 1_000, 0));
    harness
}
