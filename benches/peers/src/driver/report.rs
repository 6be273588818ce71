//! The tables of a run, in Markdown.

use std::{fmt::Write as _, fs, io};

use crate::{
    measure::{Entry, Outcome, Round, Workload},
    programs::root,
    statistics::{Metric, find, median, ratio, values},
    subjects::Kind,
};

const BEGIN: &str = "<!-- written by make bench-peers -->\n";
const END: &str = "<!-- end of what make bench-peers writes -->";

/// The measured values by which subjects are compared: the name, and whether more is better.
const COMPARED: [(&str, Metric, bool); 5] = [
    ("decisions per second", |round| round.per_second, true),
    ("p50", |round| round.p50, false),
    ("p99", |round| round.p99, false),
    ("CPU of Redis", |round| round.redis, false),
    ("CPU of the client", |round| round.client, false),
];

/// Smaller differences are within the noise.
const NOISE: f64 = 0.05;

/// Everything that is known of a run.
pub struct Run<'a> {
    pub entries: &'a [Entry],
    /// The machine, the versions, the load and the rounds.
    pub conditions: String,
}

impl Run<'_> {
    pub fn markdown(&self) -> String {
        let mut text = format!("\n{}\n\n", self.conditions);
        for workload in Workload::ALL {
            self.write_workload(&mut text, workload);
        }
        self.write_differences(&mut text);
        self.write_losses(&mut text);
        text
    }

    fn write_workload(&self, text: &mut String, workload: Workload) {
        let _ = writeln!(text, "### Workload: {}\n", workload.label());
        text.push_str(
            "| limiter | decisions per second: median (best) | x our token bucket | p50, us | \
             p99, us | CPU of Redis, us | CPU of the client, us |\n|---|---|---|---|---|---|---|\n",
        );
        for entry in self.entries {
            if let Some(outcome) = entry.results.outcomes.get(&workload) {
                let _ = writeln!(text, "{}", self.row(entry, workload, outcome));
            }
        }
        text.push('\n');
    }

    fn row(&self, entry: &Entry, workload: Workload, outcome: &Outcome) -> String {
        let rates = values(entry, workload, |round| round.per_second);
        let best = rates.into_values().fold(0.0, f64::max);
        let Some(middle) = median(entry, workload, |round| round.per_second) else {
            let reason = outcome.failures.last().map_or("no round", String::as_str);
            return format!("| {} | not run: {} | | | | | |", entry.subject.label, quoted(reason));
        };
        let to_ours = |round: &Round| round.per_second;
        let to_ours = ratio(self.entries, workload, to_ours, (entry.subject.id, "token-bucket"));
        let mut row = format!(
            "| {}{} | {:.0} k ({:.0} k) | {} |",
            entry.subject.label,
            note(entry, workload, outcome),
            middle / 1e3,
            best / 1e3,
            to_ours.map_or(String::new(), |ratio| format!("{ratio:.2}")),
        );
        for (_, metric, _) in &COMPARED[1..] {
            let value = median(entry, workload, *metric).unwrap_or(f64::NAN);
            let digits = if value < 10.0 { 2 } else { 0 };
            let _ = write!(row, " {value:.digits$} |");
        }
        row
    }

    fn write_differences(&self, text: &mut String) {
        text.push_str("### Promises and differences\n\n");
        text.push_str(
            "| limiter | algorithm | bytes per key | over the limit | what it does not \
             do |\n|---|---|---|---|---|\n",
        );
        for entry in self.entries {
            let (subject, results) = (entry.subject, &entry.results);
            let bytes = results.bytes_per_key.map_or(String::new(), |bytes| format!("{bytes:.0}"));
            let over = match results.over {
                _ if subject.kind == Kind::Baseline => String::new(),
                over => over.map_or(String::new(), |over| over.to_string()),
            };
            let lacks = match &results.not_run {
                Some(reason) => format!("not run: {}", quoted(reason)),
                None => subject.lacks.to_owned(),
            };
            let (label, algorithm) = (subject.label, subject.algorithm);
            let _ = writeln!(text, "| {label} | {algorithm} | {bytes} | {over} | {lacks} |");
        }
        text.push('\n');
    }

    /// Where another library is better than ours with the same kind of algorithm.
    fn write_losses(&self, text: &mut String) {
        text.push_str("### Where other libraries are better\n\n");
        text.push_str(
            "In comparison with our limiter of the same kind, by more than 5 %. The table above \
             shows which of these libraries are not exact.\n\n",
        );
        let mut losses = Vec::new();
        for entry in self.entries {
            let Kind::Peer { rival } = entry.subject.kind else { continue };
            for workload in [Workload::Many, Workload::Hot, Workload::Flood] {
                losses.extend(self.losses(entry, rival, workload));
            }
            losses.extend(self.loss_in_bytes(entry, rival));
        }
        if losses.is_empty() {
            losses.push("- nowhere in this run".to_owned());
        }
        let _ = writeln!(text, "{}", losses.join("\n"));
    }

    fn losses(&self, entry: &Entry, rival: &str, workload: Workload) -> Option<String> {
        let better = COMPARED.iter().filter_map(|(name, metric, more_is_better)| {
            let ratio = ratio(self.entries, workload, *metric, (entry.subject.id, rival))?;
            let gain = if *more_is_better { ratio } else { ratio.recip() };
            (gain > 1.0 + NOISE).then(|| format!("{name} {}", times(ratio)))
        });
        let better: Vec<String> = better.collect();
        let (label, workload) = (entry.subject.label, workload.label());
        (!better.is_empty()).then(|| format!("- {label}, {workload}: {}", better.join(", ")))
    }

    fn loss_in_bytes(&self, entry: &Entry, rival: &str) -> Option<String> {
        let ours = find(self.entries, rival)?.results.bytes_per_key?;
        let ratio = entry.results.bytes_per_key? / ours;
        let label = entry.subject.label;
        (ratio < 1.0 - NOISE).then(|| format!("- {label}: bytes per key {ratio:.2} x"))
    }
}

/// What has to be known about the figures of a row.
fn note(entry: &Entry, workload: Workload, outcome: &Outcome) -> String {
    let admitted = median(entry, workload, |round| round.admitted).unwrap_or_default();
    let mut notes = Vec::new();
    let is_limiter = entry.subject.kind != Kind::Baseline;
    if is_limiter && (admitted - workload.admits()).abs() > 0.001 {
        notes.push(format!("{:.0} % admitted", admitted * 100.0));
    }
    if let Some(reason) = outcome.failures.last() {
        notes.push(format!("{} rounds, and {}", outcome.rounds.len(), quoted(reason)));
    }
    if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) }
}

fn times(ratio: f64) -> String {
    if ratio < 0.01 { "below 0.01 x".to_owned() } else { format!("{ratio:.2} x") }
}

/// A text of another program, for a cell of a table.
fn quoted(text: &str) -> String {
    let text: String = text.chars().take(160).collect();
    format!("`{}`", text.replace('`', "'").replace('|', "/"))
}

/// Replaces what an earlier run has written to the documentation.
pub fn write_to_docs(markdown: &str) -> io::Result<()> {
    let path = root().join("docs/benchmarks.md");
    let text = fs::read_to_string(&path)?;
    let parts = text.split_once(BEGIN).and_then(|(head, rest)| Some((head, rest.split_once(END)?)));
    let Some((head, (_, tail))) = parts else {
        return Err(io::Error::other("docs/benchmarks.md has no markers for the tables"));
    };
    fs::write(path, format!("{head}{BEGIN}{markdown}\n{END}{tail}"))
}
