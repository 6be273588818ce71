//! Injects one fault after another into Redis under load, and prints a table of what callers see.
//! The exit code is not 0 if a row misses an expectation.
//!
//! ```text
//! make test-faults                              # some 9 minutes
//! make test-faults FAULTS=pause-write,planned   # these rows
//! make test-faults FAULTS=list                  # the names of all rows
//! ```
//!
//! The program runs in a network namespace and a process namespace of its own, so no server
//! outlives it. That needs root, or a system that permits user namespaces. Otherwise the rows that
//! cut networks are left out, and the others run on free ports of 127.0.0.1.

#![allow(missing_docs, unreachable_pub)]

mod client;
#[allow(dead_code)]
#[path = "../../support/cluster.rs"]
mod cluster;
mod deployment;
mod instance;
mod load;
mod namespace;
#[allow(dead_code)]
#[path = "../../support/proxy.rs"]
mod proxy;
mod rows;
#[allow(dead_code)]
#[path = "../../support/server.rs"]
mod server;
mod table;

use std::{
    env,
    error::Error,
    io::{self, Read},
    panic::{self, AssertUnwindSafe},
    process::{self, Command, ExitCode, Stdio},
    sync::atomic::Ordering::SeqCst,
    thread,
    time::Instant,
};

use rows::{ROWS, Rows, Run};
use table::Row;
use tokio::runtime::Runtime;

/// The variable that is set in the process with namespaces of its own.
const ISOLATED: &str = "FAULTS_ISOLATED";

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        [client::NAME, ..] => client::run(&words[1..]).map(|()| true),
        ["list"] => {
            ROWS.iter().for_each(|run| println!("{}", run.name));
            Ok(true)
        }
        _ => selected(&words).and_then(|runs| {
            if env::var_os(ISOLATED).is_some() {
                end_with_the_parent();
                return run_all(&runs, true);
            }
            for run in &runs {
                (run.prepare)().unwrap_or_else(|error| eprintln!("{}: {error}", run.name));
            }
            match isolated(&words)? {
                Some(is_kept) => Ok(is_kept),
                None => run_all(&runs, false),
            }
        }),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the faults cannot be tested: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the rows that the arguments name, or all rows.
fn selected(words: &[&str]) -> Result<Vec<&'static Run>, Box<dyn Error>> {
    let names: Vec<_> = words.iter().flat_map(|word| word.split(',')).collect();
    if let Some(name) = names.iter().find(|name| ROWS.iter().all(|run| run.name != **name)) {
        return Err(format!("no row is named {name:?}; `list` prints the names").into());
    }
    Ok(ROWS.iter().filter(|run| names.is_empty() || names.contains(&run.name)).collect())
}

/// Runs this program in namespaces of its own. Returns true if all expectations were met, `None` if
/// namespaces are not permitted.
fn isolated(words: &[&str]) -> Result<Option<bool>, Box<dyn Error>> {
    let mut unshare = vec!["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let is_permitted = |options: &[&str]| {
        let mut command = Command::new("unshare");
        let command = command.args(options).args(["ip", "link", "set", "lo", "up"]);
        command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    if !is_permitted(&unshare) {
        unshare.push("--map-root-user");
        if !is_permitted(&unshare) {
            return Ok(None);
        }
    }
    let mut child = Command::new("unshare")
        .args(unshare)
        .arg(env::current_exe()?)
        .args(words)
        .env(ISOLATED, "yes")
        .stdin(Stdio::piped()) // closed when this process ends
        .spawn()?;
    let stdin = child.stdin.take();
    let status = child.wait()?;
    drop(stdin);
    Ok(Some(status.success()))
}

/// Ends this process when its parent has ended. All processes in its namespace end with it.
fn end_with_the_parent() {
    thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut vec![]);
        process::exit(1);
    });
}

/// Returns true if all expectations were met.
fn run_all(runs: &[&Run], is_isolated: bool) -> Result<bool, Box<dyn Error>> {
    if is_isolated {
        namespace::start_loopback()?;
    }
    let runtime = Runtime::new()?;
    let _guard = runtime.enter();
    load::count_events()?;
    let start = Instant::now();
    println!("{}", table::head());
    let mut missed = vec![];
    let mut left_out = vec![];
    for run in runs {
        if run.needs_root && !is_isolated {
            left_out.push(run.name);
            continue;
        }
        load::EVENTS.store(0, SeqCst);
        for row in finished(run) {
            println!("{row}");
            missed.extend(row.missed.iter().map(|text| format!("{}: {text}", row.fault)));
        }
    }
    println!("\n{} s", start.elapsed().as_secs());
    if !left_out.is_empty() {
        println!(
            "left out: {}: network namespaces are not permitted; run this as root",
            left_out.join(", ")
        );
    }
    if !missed.is_empty() {
        println!("missed expectations:\n- {}", missed.join("\n- "));
    }
    Ok(missed.is_empty())
}

/// Runs the fault of a name. An error or a panic is a missed expectation.
fn finished(run: &Run) -> Vec<Row> {
    let rows: Rows = panic::catch_unwind(AssertUnwindSafe(|| (run.run)()))
        .unwrap_or_else(|_| Err("it panicked; see above".into()));
    rows.unwrap_or_else(|error| vec![Row::failed(run.name, &*error)])
}
