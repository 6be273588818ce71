//! The example `outbound`: callers that share the quota of a vendor.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::LazyLock,
};

use crate::support::{self, server::RedisServer};

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| support::example("outbound"));

const VENDOR: &str =
    "vendor: allows 240 requests in any 12 s, and bans the callers for 5 s if they exceed that";

fn start(flags: &[&str]) -> Child {
    Command::new(&*PROGRAM)
        .args(flags)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the example starts")
}

/// The figures of the last line: the bans, and the used part of the quota. The first lines must be
/// the rules.
fn end(process: Child, limit: &str) -> (u32, f64) {
    let output = process.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    let rules: Vec<_> = stdout.lines().take(2).collect();
    assert_eq!(rules[0], VENDOR);
    assert!(rules[1].starts_with("callers: 3 ") && rules[1].ends_with(limit), "{}", rules[1]);
    let figures = stdout
        .lines()
        .last()
        .and_then(|text| {
            text.strip_prefix("bans: ")?.strip_suffix(" %")?.split_once(", quota used: ")
        })
        .unwrap_or_else(|| panic!("{stdout}"));
    (figures.0.parse().unwrap(), figures.1.parse().unwrap())
}

/// In a run shorter than the vendor's window, late requests on a busy machine cannot cause a ban:
/// only too many departures can.
#[test]
fn the_layer_keeps_callers_from_being_banned() {
    let redis = RedisServer::start();
    let in_memory = start(&["--seconds", "6"]);
    let in_redis = start(&["--seconds", "6", "--redis", &redis.url()]);
    let without_limit = start(&["--seconds", "6", "--without-limit"]);
    for (run, process) in [("in memory", in_memory), ("in Redis", in_redis)] {
        let (bans, used) = end(process, "they share 39 requests per 2 s, evenly spaced");
        assert_eq!(bans, 0, "{run}");
        assert!(used >= 80.0, "{run}: {used} %");
    }
    assert!(end(without_limit, "without a limit").0 > 0);
}

#[test]
fn a_429_of_the_vendor_holds_back_all_callers() {
    let redis = RedisServer::start();
    let flags = ["--seconds", "5", "--quota", "400/2s"];
    let in_memory = start(&flags);
    let in_redis = start(&[&flags[..], &["--redis", &redis.url()]].concat());
    for process in [in_memory, in_redis] {
        let output = process.wait_with_output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        assert!(stdout.contains("they share 400 requests per 2 s"), "{stdout}");
        let line = stdout.lines().rfind(|line| line.contains(" rejected, bans: "));
        let figures = line.and_then(|line| line.rsplit_once(" last 12 s, ")?.1.split_once(' '));
        let (rejected, bans) = figures.expect("the line of the last second");
        assert_eq!(bans, "rejected, bans: 1", "{stdout}");
        // Those that were in flight when the ban began.
        assert!(rejected.parse::<u32>().unwrap() <= 24, "{stdout}");
    }
}

#[test]
fn an_unreachable_redis_is_reported_once() {
    let output = start(&["--redis", "redis://127.0.0.1:1/"]).wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.starts_with("error: cannot use the Redis server"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
