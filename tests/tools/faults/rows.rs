//! The faults, in the order of the table.

mod clock;
mod cluster;
mod fresh;
mod sentinel;
mod standalone;

use std::error::Error;

use crate::{server::RedisServer, table::Row};

pub type Rows = Result<Vec<Row>, Box<dyn Error>>;

/// A name, and the lines of the table that belong to it.
pub struct Run {
    pub name: &'static str,
    /// True if it needs network namespaces.
    pub needs_root: bool,
    /// Installs missing programs; it runs where the network can be reached.
    pub prepare: fn() -> Result<(), Box<dyn Error>>,
    pub run: fn() -> Rows,
}

const fn run(name: &'static str, run: fn() -> Rows) -> Run {
    Run { name, needs_root: false, prepare: || Ok(()), run }
}

const fn isolated(name: &'static str, run: fn() -> Rows) -> Run {
    Run { needs_root: true, ..self::run(name, run) }
}

const fn with_clock(name: &'static str, run: fn() -> Rows) -> Run {
    Run { prepare: clock::install, ..self::run(name, run) }
}

pub const ROWS: &[Run] = &[
    run("kill", standalone::kill),
    run("stop", standalone::stop),
    run("client-kill", standalone::client_kill),
    run("idle-close", standalone::idle_close),
    run("pause-write", standalone::pause_write),
    run("pause-all", standalone::pause_all),
    run("delay", standalone::delay),
    run("oom", standalone::oom),
    run("misconf", standalone::misconf),
    run("busy", standalone::busy),
    run("loading", standalone::loading),
    run("noreplicas", standalone::noreplicas),
    run("readonly", standalone::readonly),
    run("planned", sentinel::planned),
    run("planned-no-subscription", sentinel::planned_without_subscription),
    run("planned-ten", sentinel::planned_ten),
    run("planned-waiting", sentinel::planned_waiting),
    run("master-kill", sentinel::master_kill),
    run("master-stop", sentinel::master_stop),
    run("master-loading", sentinel::master_loading),
    isolated("master-cut-off", sentinel::master_cut_off),
    isolated("master-cut-off-min-replicas", sentinel::master_cut_off_with_min_replicas),
    isolated("sentinel-blackholed", sentinel::sentinel_blackholed),
    run("sentinel-dead", sentinel::sentinel_dead),
    run("sentinel-stopped", sentinel::sentinel_stopped),
    run("cluster-kill", cluster::kill),
    run("cluster-stop", cluster::stop),
    run("cluster-seeds", cluster::seeds),
    isolated("cluster-seed-blackholed", cluster::seed_blackholed),
    run("cluster-reshard", cluster::reshard),
    run("cluster-open-slot", cluster::open_slot),
    run("cluster-stranger", cluster::stranger),
    run("cluster-stranger-partial-coverage", cluster::stranger_with_partial_coverage),
    run("cluster-full-coverage", cluster::full_coverage),
    run("cluster-partial-coverage", cluster::partial_coverage),
    with_clock("clock-behind", clock::behind),
    with_clock("clock-ahead", clock::ahead),
];

/// Counts the states that scripts have read. Probes read none.
fn decisions(server: &RedisServer) -> u64 {
    server.calls("mget") + server.calls("get")
}
