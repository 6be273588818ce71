//! Measures this crate, its older commit `9c44afa` and other rate limiters in alternating rounds on
//! one private Redis. Prints the tables, and writes those of a whole run to `docs/benchmarks.md`.

mod child;
mod goals;
mod machine;
mod measure;
mod programs;
mod proxy;
mod report;
#[allow(dead_code)]
#[path = "../../../../tests/support/server.rs"]
mod server;
mod statistics;
mod subjects;

use std::{env, process::ExitCode, time::Duration};

use measure::{Bench, Lengths};
use report::Run;
use subjects::Subject;

const USAGE: &str = "arguments: [--quick] [--list] [NAME ..]

--quick   fewer and shorter rounds, to try the program
--list    prints the names of the subjects
NAME      a subject, or the beginning of names; all by default

The tables are written to docs/benchmarks.md only without arguments.";

const WHOLE: Lengths = Lengths { rounds: 5, round: Duration::from_millis(1_000) };
const QUICK: Lengths = Lengths { rounds: 3, round: Duration::from_millis(200) };

fn main() -> ExitCode {
    match run(env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-peers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Vec<String>) -> Result<(), String> {
    let (options, names): (Vec<&str>, Vec<&str>) =
        args.iter().map(String::as_str).partition(|arg| arg.starts_with('-'));
    if let Some(other) = options.iter().find(|option| !["--quick", "--list"].contains(option)) {
        return Err(format!("no option {other}\n{USAGE}"));
    }
    let subjects = selected(&names)?;
    if options.contains(&"--list") {
        subjects.iter().for_each(|subject| println!("{:<32} {}", subject.id, subject.label));
        return Ok(());
    }
    let lengths = if options.contains(&"--quick") { QUICK } else { WHOLE };
    let load_before = machine::load();
    let mut entries = Bench::entries(&subjects);
    Bench::start(lengths)?.run(&mut entries);
    let conditions = format!(
        "Commit `{}`, {}: {}.\nLoad of the machine {load_before} at the start and {} at the end. \
         {} rounds of {} ms.",
        machine::commit(),
        machine::date(),
        machine::description(),
        machine::load(),
        lengths.rounds,
        lengths.round.as_millis(),
    );
    let markdown = Run { entries: &entries, conditions }.markdown();
    println!("{markdown}");
    if args.is_empty() {
        report::write_to_docs(&markdown).map_err(|error| error.to_string())?;
        println!("written to docs/benchmarks.md");
    }
    Ok(())
}

/// The subjects whose names begin with one of `names`, or all.
fn selected(names: &[&str]) -> Result<Vec<&'static Subject>, String> {
    let all: Vec<&'static Subject> = subjects::all().collect();
    if let Some(unknown) =
        names.iter().find(|name| !all.iter().any(|subject| subject.id.starts_with(*name)))
    {
        return Err(format!("no subject {unknown}\n{USAGE}"));
    }
    let wanted =
        |subject: &&Subject| names.is_empty() || names.iter().any(|n| subject.id.starts_with(n));
    Ok(all.into_iter().filter(wanted).collect())
}
