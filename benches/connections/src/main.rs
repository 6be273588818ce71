//! Shows what the clients of the crate `redis` do in eight faults, and what the connections of this
//! crate do instead. docs/connections.md explains the table. It starts private servers on free
//! ports and in temporary folders, and takes about a minute.
//!
//! ```text
//! make connections
//! make connections EXPERIMENTS="late order"   # some of them
//! ```
//!
//! The exit code is not 0 if this crate does not have one of the properties.

#[allow(dead_code)]
#[path = "../../../tests/support/cluster.rs"]
mod cluster;
mod experiments;
#[allow(dead_code)]
#[path = "../../../tests/support/proxy.rs"]
mod proxy;
#[allow(dead_code)]
#[path = "../../../tests/support/server.rs"]
mod server;
mod sides;

use std::{env, error::Error, process::ExitCode};

use experiments::ALL;

/// The result of an experiment.
struct Row {
    property: &'static str,
    redis: String,
    ours: String,
    /// True if this crate has the property.
    is_kept: bool,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let names: Vec<_> = env::args().skip(1).collect();
    let is_selected = |name: &str| names.is_empty() || names.iter().any(|it| it == name);
    println!("| property | the crate `redis` | this crate |");
    println!("|---|---|---|");
    let mut is_kept = true;
    for (name, run) in ALL.iter().filter(|(name, _)| is_selected(name)) {
        match run() {
            Ok(row) => {
                println!("| `{name}`: {} | {} | {} |", row.property, row.redis, row.ours);
                is_kept &= row.is_kept;
            }
            Err(error) => {
                eprintln!("{name} cannot be run: {error}");
                is_kept = false;
            }
        }
    }
    if is_kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
