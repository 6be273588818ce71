//! The example `configured`: limits from a file.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::LazyLock,
};

use tempfile::TempDir;

use crate::support;

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| support::example("configured"));

/// The report of a limit that the routes use and the file lacks.
const MISSING: &str = "limit \"login\" is missing: add it to the configuration";

const LIMITS: &str = include_str!("../../../limits.toml");

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("limits.toml");
    fs::write(&file, text).unwrap();
    (folder, file)
}

fn check(file: &Path) -> Output {
    Command::new(&*PROGRAM).arg("--check").arg(file).output().unwrap()
}

fn status(address: &str, request: &str) -> String {
    answer(address, request)["HTTP/1.1 ".len()..][..3].to_owned()
}

fn answer(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "{request} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn each_group_of_routes_has_its_limit() {
    let text = LIMITS.replace("127.0.0.1:3000", "127.0.0.1:0").replace("1000/h", "10/h");
    let (_folder, file) = file(&text);
    let mut server = Command::new(&*PROGRAM);
    let mut server = Server(server.arg(file).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on http://").expect("the first line");

    assert_eq!(status(address, "GET /nowhere"), "404");
    let login: Vec<_> = (0..7).map(|_| status(address, "POST /login")).collect();
    let expected = ["200", "200", "200", "200", "200", "429", "429"];
    assert_eq!(login, expected, "a request that is not found counts as a login");
    let api = ["/api/users", "/api/orders", "/api/users", "/api/orders"];
    let api = api.map(|path| status(address, &format!("GET {path}")));
    assert_eq!(api, ["200", "200", "429", "429"], "8 of 10 requests were counted before");
}

/// Replaces a file at once: the server never reads a part of it.
fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, file).unwrap();
}

/// Reads lines until one contains the text. Returns them.
fn until(output: &mut impl BufRead, text: &str) -> String {
    let mut lines = String::new();
    while !lines.contains(text) {
        let read = output.read_line(&mut lines).unwrap();
        assert!(read > 0, "{text} is missing in {lines}");
    }
    lines
}

#[test]
fn a_change_of_the_file_applies_without_a_restart_and_a_mistake_changes_nothing() {
    let text = LIMITS.replace("127.0.0.1:3000", "127.0.0.1:0");
    let (_folder, file) = file(&text);
    let mut server = Command::new(&*PROGRAM);
    server.arg(&file).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = Server(server.spawn().unwrap());
    let mut stdout = BufReader::new(server.0.stdout.take().unwrap());
    let mut stderr = BufReader::new(server.0.stderr.take().unwrap());
    let first = until(&mut stdout, "\n");
    let address = first.trim().strip_prefix("listening on http://").expect("the first line");
    let logins = |count| (0..count).map(|_| status(address, "POST /login")).collect::<Vec<_>>();
    assert_eq!(logins(6).concat(), "200".repeat(5) + "429");

    for (mistake, report) in [
        ("7/minn", "26 | quota = \"7/minn\""),
        ("7/min burst 2", "a sliding-log admits up to its limit at once"),
    ] {
        replace(&file, &text.replace("5/min", mistake));
        let reported = until(&mut stderr, "the limits stay as they were\n");
        assert!(reported.contains(report), "{reported}");
    }
    replace(&file, &text.replace("127.0.0.1:0", "127.0.0.1:1"));
    until(&mut stderr, "listen: another address takes a restart\nthe limits stay as they were\n");
    assert_eq!(logins(1).concat(), "429");

    replace(&file, &text.replace("5/min", "7/min"));
    until(&mut stdout, "login: 7/min, sliding-log\nthe limits have changed\n");
    until(&mut stderr, "limit changed: login: 5/min -> 7/min");
    assert_eq!(logins(3).concat(), "200200429", "the first five count");
}

#[test]
fn the_metrics_and_the_denied_keys_are_served() {
    let text = LIMITS.replace("127.0.0.1:3000", "127.0.0.1:0");
    let (_folder, file) = file(&text);
    let mut server = Command::new(&*PROGRAM);
    server.arg(file).args(["--metrics", "127.0.0.1:0"]).stdout(Stdio::piped());
    let mut server = Server(server.spawn().unwrap());
    let mut stdout = BufReader::new(server.0.stdout.take().unwrap());
    let line = until(&mut stdout, "\n");
    let admin = line.strip_prefix("metrics: http://").and_then(|rest| rest.split('/').next());
    let line = until(&mut stdout, "\n");
    let address = line.trim().strip_prefix("listening on http://").expect("the second line");
    let logins: Vec<_> = (0..6).map(|_| status(address, "POST /login")).collect();
    assert_eq!(logins.last().unwrap(), "429");
    let admin = admin.expect("the first line");
    assert!(answer(admin, "GET /top-denied").contains("login    ip=127.0.0.1\n"));
    let denied =
        r#"tower_ratelimit_decisions_total{limiter="login",outcome="denied",source="store"} 1"#;
    assert!(answer(admin, "GET /metrics").contains(denied));
}

#[test]
fn the_check_prints_the_limits() {
    let output = Command::new(&*PROGRAM).arg("--check").output().unwrap();
    assert!(output.status.success());
    let expected = "all: 1000/h, sliding-window\n\
         api: 10/s burst 20, token-bucket\n\
         login: 5/min, sliding-log\n";
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

#[test]
fn errors_in_the_file_are_explained() {
    let unused = "[limits.sms]\nalgorithm = 'leaky-bucket'\nquota = '1/s'\n[limits.login]";
    for (from, to, complaint) in [
        ("buckets = 4", "buckets = 400", "| buckets = 400 "),
        ("5/min", "5/minn", "quota \"5/minn\": the unit \"minn\" is unknown"),
        ("[limits.login]", "[limits.logins]", "[limits.logins] limits no route"),
        ("[limits.login]\nalgorithm = \"sliding-log\"\nquota = \"5/min\"", "", MISSING),
        ("[limits.login]", unused, "[limits.sms] limits no route"),
        ("listen =", "adress = 1\nlisten =", "unknown field `adress`"),
    ] {
        let text = LIMITS.replace(from, to);
        let (_folder, file) = file(&text);
        let output = check(&file);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr.starts_with(&format!("error: {}: ", file.display())), "{stderr}");
        assert!(stderr.contains(complaint), "{stderr}");
    }
    let output = check(Path::new("/nowhere/limits.toml"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: /nowhere/limits.toml: cannot read the file: "), "{stderr}");
}
