//! The `--help` of all examples.

use std::process::Command;

use crate::support;

#[test]
fn the_help_of_each_example_fits_into_100_columns() {
    for name in [
        "api_client",
        "configured",
        "demo",
        "failover",
        "grpc",
        "llm_gateway",
        "outbound",
        "plans",
        "playground",
        "redisson",
        "replay",
        "server",
        "streams",
    ] {
        let output = Command::new(support::example(name)).arg("--help").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains("Usage: "), "{help}");
        let long: Vec<_> = help.lines().filter(|line| line.chars().count() > 100).collect();
        assert!(long.is_empty(), "{name}: {long:?}");
    }
}
