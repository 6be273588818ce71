//! Measures this crate and other rate limiters in alternating rounds on one private Redis. Prints
//! the tables, and writes those of a whole run to `docs/benchmarks.md`. With `--commit`, it also
//! compares this crate with itself at another commit. `--permits` measures limits on concurrency.

mod child;
mod comparison;
mod machine;
mod measure;
mod permits;
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
use subjects::{Kind, OTHER_COMMIT, Subject};

const USAGE: &str = "arguments: [--quick] [--list] [--commit=COMMIT] [--permits] [NAME ..]

--quick           fewer and shorter rounds, to try the program
--list            prints the names of the subjects
--permits         permits that are taken and returned, instead of the other subjects
--commit=COMMIT   measures this crate at that commit, too, and prints the ratios
NAME              a subject, or the beginning of names; all by default

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
    let commit = options.iter().find_map(|option| option.strip_prefix("--commit="));
    let is_known = |option: &str| {
        ["--quick", "--list", "--permits"].contains(&option) || option.starts_with("--commit=")
    };
    if let Some(other) = options.iter().find(|option| !is_known(option)) {
        return Err(format!("no option {other}\n{USAGE}"));
    }
    let measures_permits = options.contains(&"--permits");
    let subjects = match measures_permits {
        true => subjects::PERMITS.iter().collect(),
        false => selected(&names, commit.is_some())?,
    };
    if options.contains(&"--list") {
        subjects.iter().for_each(|subject| println!("{:<32} {}", subject.id, subject.label));
        return Ok(());
    }
    let lengths = if options.contains(&"--quick") { QUICK } else { WHOLE };
    let load_before = machine::load();
    let mut entries = Bench::entries(&subjects, commit.unwrap_or_default());
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
    if measures_permits {
        println!("\n{conditions}\n\n{}", permits::table(&entries));
        return Ok(());
    }
    let markdown = Run { entries: &entries, conditions }.markdown();
    println!("{markdown}");
    if let Some(commit) = commit {
        println!("{}", comparison::table(&entries, commit));
    }
    if args.is_empty() {
        report::write_to_docs(&markdown).map_err(|error| error.to_string())?;
        println!("written to docs/benchmarks.md");
    }
    Ok(())
}

/// The subjects whose names begin with one of `names`, or all. Those of another commit come with
/// the subjects that they are compared with.
fn selected(names: &[&str], with_commit: bool) -> Result<Vec<&'static Subject>, String> {
    let own_name = |subject: &Subject| subject.id.trim_start_matches(OTHER_COMMIT);
    let all = subjects::all().filter(|subject| with_commit || subject.kind != Kind::OtherCommit);
    let all: Vec<&'static Subject> = all.collect();
    if let Some(unknown) =
        names.iter().find(|name| !all.iter().any(|subject| subject.id.starts_with(*name)))
    {
        return Err(format!("no subject {unknown}\n{USAGE}"));
    }
    let wanted = |subject: &&Subject| {
        names.is_empty() || names.iter().any(|name| own_name(subject).starts_with(name))
    };
    Ok(all.into_iter().filter(wanted).collect())
}
