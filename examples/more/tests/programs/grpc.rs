//! The example `grpc`: a tonic server, and a client that prints its retry delay.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::LazyLock,
};

use crate::support;

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| support::example("grpc"));

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(flags: &[&str]) -> Output {
    Command::new(&*PROGRAM).args(flags).output().unwrap()
}

#[test]
fn the_client_prints_its_retry_delay() {
    let mut server = Command::new(&*PROGRAM);
    server.args(["--listen", "127.0.0.1:0", "--quota", "2/h"]).stdout(Stdio::piped());
    let mut server = Server(server.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").expect("the first line");

    let output = run(&["--call", "4", "--server", url]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}");
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines[..2], ["1: Ok", "2: Ok"]);
    let mut last = 1_800.0;
    for (line, number) in lines[2..].iter().zip(3..) {
        let delay = line
            .strip_prefix(&format!("{number}: ResourceExhausted, retry in "))
            .and_then(|rest| rest.strip_suffix(" s"))
            .unwrap_or_else(|| panic!("{line}"));
        let delay: f64 = delay.parse().unwrap();
        assert!(0.0 < delay && delay <= last, "{line}");
        last = delay;
    }
    assert_eq!(lines.len(), 4);
}

#[test]
fn failures_are_explained() {
    for (flags, complaint) in [
        (&["--quota", "0/s"][..], "the limit is 0"),
        (
            &["--call", "1", "--server", "http://127.0.0.1:1"],
            "cannot connect to http://127.0.0.1:1",
        ),
        (&["--call", "1", "--server", "not a URL"], "invalid URI"),
        (&["--call", "1", "--quota", "1/s"], "cannot be used with"),
    ] {
        let output = run(flags);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(complaint), "{stderr}");
    }
}
