//! A clock of the server that a test sets: however busy the machine is, nothing expires by itself.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tower_ratelimit::store::RedisConfig;

use super::server::RedisServer;

const DAY: Duration = Duration::from_secs(86_400);

/// Settings with Lua in front of each script: `TIME` returns an instant of tomorrow, plus the
/// microseconds in the key `clock`.
pub fn settable(server: &RedisServer) -> RedisConfig {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    // Keys expire by the real clock: not before the test ends.
    let base = (now + DAY).as_micros();
    let line = format!(
        "local redis = setmetatable({{call = function(name, ...) \
         if name ~= 'TIME' then return redis.call(name, ...) end \
         local time = {base} + (redis.call('GET', 'clock') or 0) \
         return {{string.format('%.0f', math.floor(time / 1000000)), \
         string.format('%.0f', time % 1000000)}} end}}, {{__index = redis}})"
    );
    super::config(&server.url()).denial_ttl(Duration::ZERO).script_header(&line)
}

/// Sets the clock of the server to this number of microseconds after the beginning of the test.
pub fn set(server: &RedisServer, micros: i64) {
    let set = redis::cmd("SET").arg("clock").arg(micros).exec(&mut server.connection());
    set.expect("the server runs");
}
