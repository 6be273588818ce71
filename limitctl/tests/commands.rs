//! The commands against a private Redis: what they print, as text and JSON, and their exit codes.

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../tests/support/server.rs"]
mod server;

use std::{fs, net::IpAddr, process::Command, time::Duration};

use serde_json::Value;
use server::RedisServer;
use tempfile::TempDir;
use tower_ratelimit::{Algorithm, Key, Limiter, Quota, RedisStore, key, store::RedisConfig};

const LIMITS: &str = "
[limits.api]
algorithm = 'token-bucket'
quota = '3/h'

[limits.login]
algorithm = 'sliding-log'
quota = '5/h'
";

/// A server, and a file with limits.
struct Site {
    server: RedisServer,
    folder: TempDir,
}

/// What the program has printed.
#[derive(Debug)]
struct Output {
    code: i32,
    text: String,
    errors: String,
}

impl Output {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

impl Site {
    fn new() -> Self {
        let site = Self { server: RedisServer::start(), folder: tempfile::tempdir().unwrap() };
        fs::write(site.file(), LIMITS).unwrap();
        site
    }

    fn file(&self) -> String {
        self.folder.path().join("limits.toml").to_str().unwrap().to_owned()
    }

    fn url(&self) -> String {
        format!("{}?deadline=30s", self.server.url())
    }

    /// Runs the program with the store and the file of this site.
    fn run(&self, args: &[&str]) -> Output {
        run(args, &[("RATE_LIMIT_STORE", &self.url()), ("RATE_LIMIT_FILE", &self.file())])
    }

    fn store(&self) -> RedisStore {
        let config = RedisConfig::from_url(&self.url()).unwrap();
        RedisStore::new(config.denial_ttl(Duration::ZERO)).unwrap()
    }

    /// The limiter `api` of the service.
    fn api(&self) -> Limiter {
        Limiter::new("api", self.store(), Algorithm::token_bucket(), Quota::per_hour(3))
    }
}

fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_limitctl"));
    command.env_remove("RATE_LIMIT_STORE").env_remove("RATE_LIMIT_FILE");
    let output = command.args(args).envs(variables.iter().copied()).output().unwrap();
    Output {
        code: output.status.code().unwrap(),
        text: String::from_utf8(output.stdout).unwrap(),
        errors: String::from_utf8(output.stderr).unwrap(),
    }
}

async fn use_up(limiter: &Limiter, key: Key<'static>) {
    while limiter.check(&key).await.unwrap().is_allowed() {}
}

#[tokio::test]
async fn a_peek_shows_what_is_left_under_each_limit() {
    let site = Site::new();
    let _ = site.api().check(key::header("x-api-key").key("k1")).await.unwrap();
    let found = site.run(&["peek", "header:x-api-key=k1"]);
    let words: Vec<Vec<_>> =
        found.text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(found.code, 0, "{}", found.errors);
    assert_eq!(words[0], ["key", "header:x-api-key=k1"]);
    assert_eq!(words[2][..5], ["api", "token-bucket", "3/h", "allowed", "2"]);
    assert_eq!(words[3][..6], ["login", "sliding-log", "5/h", "no", "state", "5"]);
    assert!(!found.text.contains('\x1b'), "colours without a terminal: {:?}", found.text);
}

#[tokio::test]
async fn a_peek_as_json_has_times_in_seconds_and_changes_nothing() {
    let site = Site::new();
    let address: IpAddr = "2001:db8::7".parse().unwrap();
    use_up(&site.api(), key::PeerIp.key(address)).await;
    for _ in 0..2 {
        let found = site.run(&["--json", "--limit", "api", "peek", "ip:2001:db8::ffff"]);
        let json = found.json();
        assert_eq!(found.code, 0, "{}", found.errors);
        assert_eq!(json["command"], "peek");
        assert_eq!(json["key"], "ip=2001:db8::/64");
        assert_eq!(json["seen"], true);
        let [limit] = &**json["limits"].as_array().unwrap() else { panic!("{json}") };
        assert_eq!(limit["limit"], "api");
        assert_eq!(limit["algorithm"], "token-bucket");
        assert_eq!(limit["quota"], "3/h");
        assert_eq!(limit["allowed"], false);
        assert_eq!(limit["remaining"], 0);
        assert_eq!(limit["blocked_for"], Value::Null);
        let retry_after = limit["retry_after"].as_f64().unwrap();
        assert!(retry_after > 0.0 && retry_after <= 1_200.0, "{retry_after}");
    }
}

#[tokio::test]
async fn a_peek_shows_what_permits_hold() {
    let site = Site::new();
    let limiter = site.api();
    let key = key::header("x-api-key").key("k1");
    let permits = [limiter.hold(&key, 2).await.unwrap(), limiter.hold(&key, 1).await.unwrap()];
    let peek = ["--limit", "api", "peek", "header:x-api-key=k1"];
    let found = site.run(&peek);
    assert!(found.text.contains("denied until permits end"), "{}", found.text);
    assert!(found.text.contains("0 + 3 held"), "{}", found.text);
    let json = site.run(&[&["--json"], &peek[..]].concat()).json();
    assert_eq!(
        (&json["limits"][0]["held"], &json["limits"][0]["retry_after"]),
        (&3.into(), &Value::Null)
    );
    drop(permits);
}

#[tokio::test]
async fn a_limit_on_concurrency_shows_what_is_in_flight() {
    let site = Site::new();
    let limits = "streams = { algorithm = 'concurrency', quota = '2 concurrent' }";
    fs::write(site.file(), limits).unwrap();
    let quota = Quota::concurrent(2);
    let streams = Limiter::new("streams", site.store(), Algorithm::concurrency(), quota);
    let first = streams.hold("alice", 1).await.unwrap().admitted().unwrap();
    let found = site.run(&["peek", "text:alice"]);
    assert_eq!(found.code, 0, "{}", found.errors);
    assert!(found.text.contains("streams  concurrency  2 concurrent  allowed"), "{}", found.text);
    assert!(found.text.contains("1 + 1 in flight"), "{}", found.text);

    let second = streams.hold("alice", 1).await.unwrap().admitted().unwrap();
    let found = site.run(&["top"]);
    assert!(found.text.contains("; 1 key with state"), "{}", found.text);
    assert!(found.text.contains("alice  denied until requests end"), "{}", found.text);
    assert!(found.text.contains("0 + 2 in flight"), "{}", found.text);
    let json = site.run(&["--json", "peek", "text:alice"]).json();
    let state = &json["limits"][0];
    assert_eq!((&state["held"], &state["remaining"]), (&2.into(), &0.into()));
    assert_eq!((&state["seen"], &state["retry_after"]), (&true.into(), &Value::Null));

    let reset = site.run(&["reset", "text:alice"]);
    assert_eq!(reset.code, 0, "{}", reset.errors);
    assert!(reset.text.contains("alice is reset, 2 remaining; it was denied"), "{}", reset.text);
    assert!(reset.text.contains("hold them again with their next renewal"), "{}", reset.text);
    assert!(!reset.text.contains("remember a denial"), "{}", reset.text);
    let third = streams.hold("alice", 1).await.unwrap().admitted().unwrap();

    let blocked = site.run(&["block", "text:alice", "--for", "1h"]);
    assert!(blocked.text.starts_with("streams: alice is blocked for "), "{}", blocked.text);
    assert!(streams.hold("alice", 1).await.unwrap().into_result().unwrap_err().is_blocked());
    let lifted = site.run(&["unblock", "text:alice"]);
    assert!(lifted.text.starts_with("streams: alice is unblocked, 1 remaining"), "{}", lifted.text);
    drop((first, second, third));

    // A wrong algorithm is named in both directions, and a mistyped key has no state.
    let _ = site.api().check("bob").await.unwrap();
    let peek = ["--algorithm", "concurrency", "--quota", "9 concurrent", "peek"];
    let found = site.run(&[&["--limit", "api"], &peek[..], &["text:bob"]].concat());
    assert_eq!(found.code, 3);
    assert!(found.errors.contains("api has counted bob with token-bucket"), "{}", found.errors);
    let _held = streams.hold("carol", 1).await.unwrap().admitted().unwrap();
    let peek = ["--algorithm", "token-bucket", "--quota", "9/s", "peek", "text:carol"];
    let found = site.run(&[&["--limit", "streams"], &peek[..]].concat());
    assert!(found.errors.contains("streams has counted carol with concurrency"), "{found:?}");
    assert_eq!(site.run(&["peek", "text:dave"]).code, 3);
}

#[tokio::test]
async fn a_mistyped_key_has_no_state() {
    let site = Site::new();
    let _ = site.api().check(key::header("x-api-key").key("k1")).await.unwrap();
    for command in ["peek", "unblock", "reset"] {
        let found = site.run(&["--limit", "api", command, "header:x-api-key=k2"]);
        assert_eq!(found.code, 3, "{command}");
        assert!(
            found.errors.contains("no state of the key header:x-api-key=k2 under api"),
            "{}",
            found.errors
        );
        assert!(found.errors.contains("never seen"), "{}", found.errors);
    }
    let found = site.run(&["--limit", "api", "--json", "peek", "header:x-api-key=k2"]);
    assert_eq!((found.code, &found.json()["seen"]), (3, &Value::Bool(false)));
    // A block is possible before the first request, but says so.
    let found = site.run(&["--limit", "api", "block", "--for", "10m", "header:x-api-key=k2"]);
    assert_eq!(found.code, 0);
    assert!(found.errors.contains("no state of the key"), "{}", found.errors);
}

#[tokio::test]
async fn a_wrong_algorithm_is_named() {
    let site = Site::new();
    let _ = site.api().check("alice").await.unwrap();
    let flags = ["--limit", "api", "--algorithm", "sliding-log", "--quota", "3/h"];
    let found = site.run(&[&flags[..], &["peek", "text:alice"]].concat());
    assert_eq!(found.code, 3);
    assert!(found.errors.contains("api has counted alice with token-bucket"), "{}", found.errors);
}

#[tokio::test]
async fn a_block_holds_until_it_is_lifted() {
    let site = Site::new();
    let api = site.api();
    let _ = api.check("alice").await.unwrap();
    let dry = site.run(&["--limit", "api", "--dry-run", "block", "--for", "1h30m", "text:alice"]);
    assert!(dry.text.contains("would be blocked for 1 h 30 min; now allowed"), "{}", dry.text);
    assert!(dry.text.contains("nothing was changed"), "{}", dry.text);
    assert!(api.peek("alice").await.unwrap().blocked_for().is_none());

    let blocked = site.run(&["--limit", "api", "block", "text:alice", "--for", "1h30m"]);
    assert_eq!(blocked.code, 0, "{}", blocked.errors);
    assert!(blocked.text.starts_with("api: alice is blocked for 1 h"), "{}", blocked.text);
    assert!(api.check("alice").await.unwrap().is_blocked());
    let shorter = site.run(&["--limit", "api", "block", "text:alice", "--for", "1m"]);
    assert!(shorter.text.contains("which is longer"), "{}", shorter.text);

    let lifted = site.run(&["--limit", "api", "unblock", "text:alice"]);
    assert_eq!(lifted.code, 0, "{}", lifted.errors);
    assert!(lifted.text.starts_with("api: alice is unblocked, 2 remaining\n"), "{}", lifted.text);
    assert!(api.check("alice").await.unwrap().is_allowed());
    let again = site.run(&["--limit", "api", "unblock", "text:alice"]);
    assert!(again.text.contains("was not blocked"), "{}", again.text);
}

#[tokio::test]
async fn a_reset_lets_a_client_go() {
    let site = Site::new();
    let api = site.api();
    let address: IpAddr = "203.0.113.7".parse().unwrap();
    let client = key::PeerIp.key(address).and(&Key::scoped("route", "/users/{id}"));
    use_up(&api, client.clone()).await;
    let parts = ["ip:203.0.113.7", "route:/users/{id}"];
    let dry = site.run(&[&["--limit", "api", "--dry-run", "--json", "reset"], &parts[..]].concat());
    let json = dry.json();
    assert_eq!((&json["dry_run"], &json["limits"][0]["changed"]), (&true.into(), &false.into()));
    assert_eq!(json["limits"][0]["would_change"], true);
    assert_eq!(json["limits"][0]["after"], Value::Null);
    assert!(!api.check(&client).await.unwrap().is_allowed());

    let reset = site.run(&[&["--limit", "api", "--json", "reset"], &parts[..]].concat());
    let json = reset.json();
    assert_eq!(reset.code, 0, "{}", reset.errors);
    assert_eq!(json["key"], "ip=203.0.113.7|route=/users/%7Bid%7D");
    assert_eq!(json["limits"][0]["before"]["remaining"], 0);
    assert_eq!(json["limits"][0]["after"]["remaining"], 3);
    assert!(api.check(&client).await.unwrap().is_allowed());
}

#[tokio::test]
async fn the_top_has_the_blocked_keys_and_those_with_the_least_remaining_first() {
    let site = Site::new();
    let api = site.api();
    for (name, requests) in [("a", 1), ("b", 3), ("c", 2)] {
        for _ in 0..requests {
            let _ = api.check(name).await.unwrap();
        }
    }
    api.block("d", Duration::from_secs(600)).await.unwrap();
    let found = site.run(&["--limit", "api", "top", "--count", "3"]);
    assert_eq!(found.code, 0, "{}", found.errors);
    assert!(found.text.contains("4 keys with state, by a scan of all keys"), "{}", found.text);
    let keys: Vec<_> = found.text.lines().skip(2).map(|line| &line[..1]).collect();
    assert_eq!(keys, ["d", "b", "c"]);

    let found = site.run(&["--json", "top", "--max-scans", "0"]);
    let json = found.json();
    assert_eq!(json["limits"][0]["complete"], false);
    assert_eq!(json["limits"][1]["limit"], "login");
}

/// Puts text where the state of a key of the limit `api` is.
fn damage(site: &Site, key: &str) {
    let name = format!("ratelimit:api:token-bucket:{{{key}}}");
    let mut connection = site.server.connection();
    redis::cmd("SET").arg(name).arg("x").arg("EX").arg(600).exec(&mut connection).unwrap();
}

#[tokio::test]
async fn a_damaged_key_does_not_hide_the_others() {
    let site = Site::new();
    let api = site.api();
    for number in 0..40 {
        let _ = api.check(format!("user-{number}")).await.unwrap();
    }
    damage(&site, "broken");
    let found = site.run(&["--limit", "api", "top", "--count", "100"]);
    assert_eq!(found.code, 1, "{}", found.text);
    assert!(found.text.contains("40 keys with state"), "{}", found.text);
    assert_eq!(found.text.matches("\nuser-").count(), 40, "{}", found.text);
    assert!(found.errors.contains("api: broken is damaged: "), "{}", found.errors);
    let json = site.run(&["--limit", "api", "--json", "top"]).json();
    assert_eq!(json["limits"][0]["keys_with_state"], 40);
    assert!(json["limits"][0]["damaged"]["broken"].is_string(), "{json}");

    let found = site.run(&["peek", "text:broken"]);
    assert_eq!(found.code, 1);
    assert!(found.text.contains("3/h    damaged"), "{}", found.text);
    assert!(found.text.contains("sliding-log   5/h    no state"), "{}", found.text);
    assert!(found.errors.contains("{broken}"), "{}", found.errors);
    let alone = site.run(&["--limit", "api", "peek", "text:broken"]);
    assert_eq!(alone.code, 1);
    assert!(alone.errors.contains("{broken}"), "{}", alone.errors);

    let both = ["--limit", "api", "--limit", "login"];
    let blocked = site.run(&[&both[..], &["block", "--for", "1h", "text:broken"]].concat());
    assert_eq!(blocked.code, 1);
    assert!(blocked.text.contains("login: broken is blocked for 1 h"), "{}", blocked.text);
    assert!(blocked.errors.contains("error: api: "), "{}", blocked.errors);
    let alone = site.run(&["--limit", "api", "unblock", "text:broken"]);
    assert_eq!(alone.code, 1);
    let dry = site.run(&["--limit", "api", "--dry-run", "reset", "text:broken"]);
    assert!(dry.text.contains("api: broken would be reset; now damaged: "), "{}", dry.text);
    assert!(dry.text.contains("delete it"), "{}", dry.text);
    let reset = site.run(&["--limit", "api", "reset", "text:broken"]);
    assert_eq!(reset.code, 0, "{}", reset.errors);
    assert!(reset.text.starts_with("api: broken is reset; it was damaged: "), "{}", reset.text);
    assert!(reset.text.contains("delete it"), "{}", reset.text);
    assert!(api.check("broken").await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_state_of_another_version_is_named_and_only_a_reset_deletes_it() {
    let site = Site::new();
    let api = site.api();
    let _ = api.check("old").await.unwrap();
    let name = "ratelimit:api:token-bucket:{new}";
    let mut connection = site.server.connection();
    redis::cmd("SET").arg(name).arg("Znew").arg("EX").arg(600).exec(&mut connection).unwrap();
    damage(&site, "broken");
    let words = ["written by a newer version", "use the limitctl of the service's version"];
    let is_named = |text: &str| words.iter().all(|word| text.contains(word));

    let found = site.run(&["--limit", "api", "peek", "text:new"]);
    assert_eq!(found.code, 1);
    assert!(found.text.contains("3/h    of another version"), "{}", found.text);
    assert!(is_named(&found.errors) && !found.errors.contains("delete"), "{}", found.errors);
    let found = site.run(&["--limit", "api", "top"]);
    assert_eq!(found.code, 1);
    assert!(found.text.contains("\nold "), "{}", found.text);
    assert!(found.errors.contains("api: new is of another version: "), "{}", found.errors);
    assert!(found.errors.contains("api: broken is damaged: "), "{}", found.errors);
    let json = site.run(&["--limit", "api", "--json", "top"]).json();
    let [damaged, other] = ["damaged", "other_version"].map(|name| &json["limits"][0][name]);
    assert!(damaged["broken"].is_string() && damaged["new"].is_null(), "{json}");
    assert!(is_named(other["new"].as_str().unwrap()) && other["broken"].is_null(), "{json}");
    for change in [&["block", "--for", "1h"][..], &["unblock"], &["--dry-run", "reset"]] {
        let found = site.run(&[&["--limit", "api"], change, &["text:new"]].concat());
        let is_dry = change.contains(&"reset");
        assert_eq!(found.code, i32::from(!is_dry), "{found:?}");
        assert!(is_named(if is_dry { &found.text } else { &found.errors }), "{found:?}");
        let value: String = redis::cmd("GET").arg(name).query(&mut connection).unwrap();
        assert_eq!(value, "Znew", "{change:?}");
    }
    let reset = site.run(&["--limit", "api", "reset", "text:new"]);
    assert_eq!(reset.code, 0, "{}", reset.errors);
    let is = "api: new is reset; it was of another version: ";
    assert!(reset.text.starts_with(is), "{}", reset.text);
    assert!(api.check("new").await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_limit_with_damaged_keys_alone_does_not_hide_other_limits() {
    let site = Site::new();
    let login = Limiter::new("login", site.store(), Algorithm::sliding_log(), Quota::per_hour(5));
    let _ = login.check("alice").await.unwrap();
    damage(&site, "broken");
    let found = site.run(&["top"]);
    assert_eq!(found.code, 1, "{}", found.text);
    assert!(found.text.contains("login: sliding-log, 5/h; 1 key with state"), "{}", found.text);
    assert!(found.text.contains("\nalice "), "{}", found.text);
    assert!(found.errors.contains("api: broken is damaged: "), "{}", found.errors);
    let found = site.run(&["--json", "top"]);
    let json = found.json();
    assert_eq!(found.code, 1, "{json}");
    assert!(json["limits"][0]["damaged"]["broken"].is_string(), "{json}");
    assert_eq!(json["limits"][1]["keys"][0]["key"], "alice");
}

#[tokio::test]
async fn an_error_of_redis_is_not_taken_for_a_damaged_key() {
    let site = Site::new();
    let _ = site.api().check("alice").await.unwrap();
    let mut acl = redis::cmd("ACL");
    acl.arg(&["SETUSER", "limiter", "on", ">secret", "~ratelimit:*", "-@all", "+scan", "+del"]);
    acl.exec(&mut site.server.connection()).unwrap();
    let url = format!("{}&user=limiter&pass=secret", site.url());
    let file = site.file();
    let flags = ["--store", &*url, "--limits", &file, "--limit", "api"];
    for command in [&["peek", "text:alice"][..], &["reset", "text:alice"], &["top"]] {
        let failed = run(&[&flags[..], command].concat(), &[]);
        assert_eq!(failed.code, 1, "{failed:?}");
        assert!(failed.errors.contains("NOPERM"), "{failed:?}");
        assert!(!format!("{failed:?}").contains("damaged"), "{failed:?}");
    }
    assert_eq!(site.api().peek("alice").await.unwrap().remaining(), 2, "nothing is changed");
}

#[tokio::test]
async fn the_limits_with_keys_are_found_without_a_file() {
    let site = Site::new();
    let api = site.api();
    for name in ["a", "b", "c"] {
        let _ = api.check(name).await.unwrap();
    }
    let shop = RedisConfig::from_url(&site.url()).unwrap().prefix("shop:eu");
    let shop = RedisStore::new(shop).unwrap();
    let streams = Limiter::new("streams", shop, Algorithm::concurrency(), Quota::concurrent(2));
    let _held = streams.hold("alice", 1).await.unwrap().admitted().unwrap();
    let mut connection = site.server.connection();
    for name in ["other", "a:b:{c}", "shop:eu:streams:concurrency", "{a}:token-bucket"] {
        redis::cmd("SET").arg(name).arg("x").exec(&mut connection).unwrap();
    }
    let rows = |found: &Output| {
        assert_eq!(found.code, 0, "{}", found.errors);
        let rows = found.text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        rows.map(|row| row.join(" ")).collect::<Vec<_>>()
    };
    let url = site.url();
    let found = run(&["--store", &url, "limits"], &[]);
    let expected = [
        "prefix limit algorithm quota keys",
        "ratelimit api token-bucket - 3",
        "shop:eu streams concurrency - 1",
        "2 limits, by a scan of all keys of Redis",
    ];
    assert_eq!(rows(&found), expected);
    let found = run(&["--store", &url, "limits", "--prefix", "shop:eu"], &[]);
    assert_eq!(
        rows(&found)[1..],
        ["shop:eu streams concurrency - 1", "1 limit, by a scan of all keys of Redis"]
    );
    // The quotas are those of the file, which can have limits without keys.
    let found = site.run(&["limits", "--prefix", "ratelimit"]);
    let expected = ["ratelimit api token-bucket 3/h 3", "ratelimit login sliding-log 5/h 0"];
    assert_eq!(rows(&found)[1..3], expected);
    let json = run(&["--store", &url, "--json", "limits", "--max-scans", "0"], &[]).json();
    assert_eq!((&json["complete"], &json["limits"]), (&false.into(), &Value::Array(vec![])));
    let json = run(&["--store", &url, "--json", "limits"], &[]).json();
    assert_eq!(json["limits"][0]["keys"], 3);
    assert_eq!(json["limits"][0]["quota"], Value::Null);
}

#[test]
fn odd_and_long_input_is_a_mistake_and_no_panic() {
    let site = Site::new();
    let (long, part) = ("a".repeat(100_000), "a".repeat(60_000));
    for (parts, code) in [
        (format!("header:{long}=k1"), 2),
        (format!("header:x={long}"), 3),
        (format!("cookie:{part}={part}"), 3),
        (format!("query:{part}={part}"), 3),
        (format!("scope:{part}={part}"), 3),
        (format!("bearer:{long}"), 3),
        (format!("route:{long}"), 3),
        (format!("text:{long}"), 3),
        (format!("raw:{long}"), 2),
        (format!("ip:{long}"), 2),
        (long.clone(), 2),
        ("header:\u{e4}=k1".to_owned(), 2),
        ("header:x\n=k1".to_owned(), 2),
        ("text:".to_owned(), 3),
        ("raw:".to_owned(), 3),
        ("text:\u{1F980}\n".to_owned(), 3),
    ] {
        let found = site.run(&["peek", &parts]);
        let begin: String = parts.chars().take(20).collect();
        assert_eq!(
            found.code,
            code,
            "{begin}: {}",
            found.errors.chars().take(300).collect::<String>()
        );
    }
    for args in [
        &["block", "text:a", "--for", "99999999999w"][..],
        &["--limit", "api", "block", "text:a", "--for", "\u{661}h"],
        &["--limit", &long, "peek", "text:a"],
        &["--limit", &long, "--algorithm", "token-bucket", "--quota", "1/s", "peek", "text:a"],
        &["--limit", "api", "--algorithm", "token-bucket", "--quota", &long, "peek", "text:a"],
        &["--limit", "api", "--algorithm", &long, "--quota", "1/s", "peek", "text:a"],
        &["--ipv6-prefix", "129", "peek", "ip:::1"],
        &["--hashed-with", "A=B", "peek", "header:x=y"],
        &["--hashed-with", "", "peek", "header:x=y"],
        &["--limits", &long, "top"],
        &["--store", &long, "ping"],
        &["--store", "redis://h/?prefix=a{b", "ping"],
    ] {
        let found = site.run(args);
        let begin: String = found.errors.chars().take(300).collect();
        assert_eq!(found.code, 2, "{begin}");
        assert!(!found.errors.contains("panicked"), "{begin}");
    }
}

#[tokio::test]
async fn a_ping_names_the_permission_that_is_missing() {
    let site = Site::new();
    let ok = site.run(&["ping"]);
    assert_eq!(ok.code, 0, "{}", ok.errors);
    assert!(ok.text.starts_with("ok: "), "{}", ok.text);

    let rights = "on >secret ~ratelimit:* resetchannels -@all +evalsha +eval +time +mget \
                  +getrange +strlen +setrange +del +pexpireat";
    let mut acl = redis::cmd("ACL");
    acl.arg(&["SETUSER", "limiter"]).arg(rights.split_whitespace().collect::<Vec<_>>());
    acl.exec(&mut site.server.connection()).unwrap();
    let url = format!("{}&user=limiter&pass=secret", site.url());
    let failed = run(&["--store", &url, "ping"], &[]);
    assert_eq!(failed.code, 1);
    assert!(failed.errors.contains("ACL SETUSER limiter +set"), "{}", failed.errors);
    assert!(!failed.errors.contains("secret"), "{}", failed.errors);

    let failed = run(&["--store", &url, "--json", "ping"], &[]);
    assert!(failed.json()["error"].as_str().unwrap().contains("+set"));
    let file = site.file();
    let failed = run(&["--store", &url, "--limits", &file, "top"], &[]);
    assert_eq!(failed.code, 1);
    assert!(failed.errors.contains("scan"), "{}", failed.errors);
}

#[test]
fn a_wrong_command_line_names_the_flag_and_what_to_write() {
    let site = Site::new();
    let file = site.file();
    for (args, parts) in [
        (
            &["peek", "text:alice"][..],
            &["error: no limits; add --limit NAME", "RATE_LIMIT_FILE"][..],
        ),
        (&["ping"], &["--store: no URL", "RATE_LIMIT_STORE"]),
        (&["--store", "memory:", "ping"], &["--store: counts in memory"]),
        (&["--store", "redis://h/?dedline=1s", "ping"], &["--store: ", "`dedline` is unknown"]),
        (&["--limits", &file, "peek", "alice"], &["the key \"alice\"", "text:TEXT"]),
        (&["--limits", &file, "reset", "text:a"], &["--limit: ", "several limits", "api, login"]),
        (&["--limits", &file, "--limit", "apl", "top"], &["no limit \"apl\"", "api, login"]),
        (&["--limits", "/nowhere", "top"], &["--limits /nowhere: "]),
        (&["block", "text:alice"], &["--for <TIME>"]),
        (&["block", "text:alice", "--for", "ten"], &["--for <TIME>", "write for example"]),
        (
            &["--limit", "api", "--algorithm", "leaky", "--quota", "1/s", "top"],
            &["--algorithm", "leaky-bucket"],
        ),
        (&["--algorithm", "leaky-bucket", "--quota", "1/s", "top"], &["--limit: "]),
        (
            &["--limit", "api", "top"],
            &["error: --limit api: no algorithm and quota; add --algorithm", "`limitctl limits`"],
        ),
        (&["--hashed-with", "NO_SUCH_VARIABLE", "peek", "text:a"], &["--hashed-with: "]),
    ] {
        let output = run(args, &[]);
        assert_eq!(output.code, 2, "{args:?}: {}", output.errors);
        for part in parts {
            assert!(output.errors.contains(part), "{args:?}: {}", output.errors);
        }
    }
}

#[test]
fn a_mistake_in_the_file_is_reported_with_its_line() {
    let site = Site::new();
    fs::write(site.file(), LIMITS.replace("3/h", "3/fortnight")).unwrap();
    let output = site.run(&["top"]);
    assert_eq!(output.code, 2);
    assert!(output.errors.contains("line 4") && output.errors.contains("fortnight"));
    let start = |name| format!("error: {name} {}: ", site.file());
    assert!(output.errors.starts_with(&start("RATE_LIMIT_FILE")), "{}", output.errors);
    let output = run(&["--limits", &site.file(), "top"], &[]);
    assert!(output.errors.starts_with(&start("--limits")), "{}", output.errors);
}

#[tokio::test]
async fn the_file_can_be_json_or_the_table_alone() {
    let site = Site::new();
    let _ = site.api().check("alice").await.unwrap();
    let json = r#"{"limits": {"api": {"algorithm": "token-bucket", "quota": "3/h"}}}"#;
    let table = "api = { algorithm = 'token-bucket', quota = '3/h' }";
    for (name, text) in [("limits.json", json), ("table.toml", table)] {
        let path = site.folder.path().join(name);
        fs::write(&path, text).unwrap();
        let found = site.run(&["--limits", path.to_str().unwrap(), "--json", "peek", "text:alice"]);
        assert_eq!(found.json()["limits"][0]["remaining"], 2, "{}", found.errors);
    }
}

#[test]
fn the_help_fits_into_100_columns() {
    for args in [&["--help"][..], &["top", "--help"], &["block", "--help"]] {
        let help = run(args, &[]).text;
        assert!(help.contains("Usage: "), "{help}");
        let long: Vec<_> = help.lines().filter(|line| line.chars().count() > 100).collect();
        assert!(long.is_empty(), "{long:?}");
    }
}

#[test]
fn a_server_that_is_down_is_a_failure_of_redis() {
    let mut site = Site::new();
    site.server.kill();
    for args in [&["ping"][..], &["--limit", "api", "reset", "text:alice"], &["top"]] {
        let url = format!("{}?deadline=200ms", site.server.url());
        let output = site.run(&[&["--store", &url], args].concat());
        assert_eq!(output.code, 1, "{args:?}: {}", output.errors);
        assert!(output.errors.starts_with("error: "), "{}", output.errors);
    }
}
