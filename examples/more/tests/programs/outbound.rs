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

/// What a vendor has counted at the end of a run.
struct Figures {
    bans: u32,
    rejected: u32,
    /// The used part of the quota, in percent.
    used: f64,
}

impl Figures {
    fn parse(stdout: &str, name: &str) -> Self {
        let figures = || {
            let line = stdout.lines().rfind(|line| line.starts_with(name))?;
            let (bans, rest) =
                line.strip_prefix(name)?.strip_prefix(": bans: ")?.split_once(',')?;
            let (rejected, used) = rest.strip_prefix(" rejected: ")?.split_once(',')?;
            let used = used.strip_prefix(" quota used: ")?.strip_suffix(" %")?;
            let (bans, rejected) = (bans.parse().ok()?, rejected.parse().ok()?);
            Some(Self { bans, rejected, used: used.parse().ok()? })
        };
        figures().unwrap_or_else(|| panic!("{stdout}"))
    }
}

/// The figures of the vendors with and without the layer. The first lines must be the rules.
fn end(process: Child, limit: &str) -> [Figures; 2] {
    let output = process.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    let rules: Vec<_> = stdout.lines().take(2).collect();
    assert_eq!(rules[0], VENDOR);
    assert!(
        rules[1].starts_with("with the layer: 3 ") && rules[1].ends_with(limit),
        "{}",
        rules[1]
    );
    ["with the layer", "without it"].map(|name| Figures::parse(&stdout, name))
}

/// In a run shorter than the vendor's window, late requests on a busy machine cannot cause a ban:
/// only too many departures can.
#[test]
fn the_layer_keeps_callers_from_being_banned_and_those_without_it_are() {
    let redis = RedisServer::start();
    let in_memory = start(&["--seconds", "6"]);
    let in_redis = start(&["--seconds", "6", "--redis", &support::patient(&redis)]);
    for (run, process) in [("in memory", in_memory), ("in Redis", in_redis)] {
        let [with, without] = end(process, "they share 39 requests per 2 s, evenly spaced");
        assert_eq!((with.bans, with.rejected), (0, 0), "{run}");
        assert!(with.used > 40.0, "{run}: {} %", with.used); // a busy machine uses less
        assert!(without.bans > 0, "{run}");
    }
}

#[test]
fn a_429_of_the_vendor_holds_back_all_callers() {
    let redis = RedisServer::start();
    let flags = ["--seconds", "5", "--quota", "400/2s"];
    let in_memory = start(&flags);
    let in_redis = start(&[&flags[..], &["--redis", &support::patient(&redis)]].concat());
    for process in [in_memory, in_redis] {
        let [with, _] = end(process, "they share 400 requests per 2 s, evenly spaced");
        // Those that were in flight when the ban began.
        assert!(with.bans == 1 && with.rejected <= 24, "{} {}", with.bans, with.rejected);
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
