//! Where and when a run was made.

use std::{fs, process::Command, thread};

use crate::programs::root;

/// The processor and the versions, in one sentence.
pub fn description() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("an unknown processor", |(_, model)| model);
    let cores = thread::available_parallelism().map_or(0, usize::from);
    let server = std::env::var_os("REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
    let server = output(Command::new(server).arg("--version"));
    let version = server.split_whitespace().find_map(|word| word.strip_prefix("v="));
    format!("{cores} cores of {model}, Redis {}", version.unwrap_or("of an unknown version"))
}

/// The commit of this crate that is measured.
pub fn commit() -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--exclude=*"]).current_dir(root());
    output(&mut git)
}

pub fn date() -> String {
    output(Command::new("date").args(["-u", "+%F"]))
}

/// The number of processes that ran or waited for a processor, over the last minute.
pub fn load() -> String {
    let loads = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    loads.split(' ').next().unwrap_or("unknown").to_owned()
}

fn output(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).trim().to_owned()
}
