//! The example `redisson`: it calls each method and shows the keys.

use std::process::Command;

use crate::support::{self, server::RedisServer};

fn redis<T: redis::FromRedisValue>(server: &RedisServer, words: &[&str]) -> T {
    redis::cmd(words[0]).arg(&words[1..]).query(&mut server.connection()).unwrap()
}

#[test]
fn the_example_calls_each_method_and_leaves_its_keys_in_redis() {
    let server = RedisServer::start();
    let program = support::example("redisson");
    for _ in 0..2 {
        let output =
            Command::new(&program).args(["--redis", &support::patient(&server)]).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        for text in ["LIMITER_NAME", "rate 5", "{LIMITER_NAME}:value", "{LIMITER_NAME}:permits"] {
            assert!(stdout.contains(text), "{text} is missing in {stdout}");
        }
        let keys: Vec<String> = redis(&server, &["KEYS", "*"]);
        assert!(keys.contains(&"LIMITER_NAME".to_owned()), "{keys:?}");
        for key in keys {
            let ttl: i64 = redis(&server, &["PTTL", &key]);
            assert!(ttl > 0, "{key} does not expire");
        }
    }
    let output = Command::new(&program).args(["--redis", "redis://127.0.0.1:1/"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(stderr.starts_with("error: cannot use the Redis server"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
