//! Builds the examples, and starts Redis servers for them. No tests.

use std::{path::PathBuf, process::Command};

use tower_ratelimit::RedisStore;

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../../../tests/support/server.rs"]
pub mod server;

/// Returns the program of an example, built again if it is out of date: `cargo test` builds
/// examples only if it runs all tests of their package.
pub fn example(name: &str) -> PathBuf {
    build(&["--example", name]).join("examples").join(name)
}

/// Returns a program that is a package, likewise.
pub fn program(name: &str) -> PathBuf {
    build(&["--bin", name]).join(name)
}

/// Builds a target. Returns the folder of the programs.
fn build(target: &[&str]) -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    // With the flags of `make test`, which has built it.
    build.args(["build", "--quiet", "--workspace", "--all-features"]).args(target);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    // `cargo test` sets these for the tests, and the build script of `ring` depends on them: with
    // them, `ring` and its dependents would be built again, also by the next `cargo test`.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARGO_PKG_")) {
        build.env_remove(name);
    }
    build.env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_MANIFEST_LINKS");
    build.env_remove("CARGO_MANIFEST_PATH");
    assert!(build.status().unwrap().success());
    let tests = std::env::current_exe().unwrap();
    tests.ancestors().nth(2).unwrap().to_owned()
}

/// Returns the URL with a deadline that a busy machine can keep.
pub fn patient(server: &server::RedisServer) -> String {
    server.url() + "?deadline=30s"
}

pub async fn redis_store(server: &server::RedisServer) -> RedisStore {
    RedisStore::connect(&patient(server)).await.expect("the server runs")
}
