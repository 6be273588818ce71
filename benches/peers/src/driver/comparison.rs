//! This crate in comparison with itself at another commit, to see what a change costs. Printed, and
//! not part of the documentation.

use std::fmt::Write as _;

use crate::{
    measure::{Entry, Round, Workload},
    statistics::{Metric, find, ratios},
    subjects::{Kind, OTHER_COMMIT},
};

const METRICS: [(&str, Metric); 6] = [
    ("decisions per second", |round| round.per_second),
    ("p50", |round| round.p50),
    ("p99", |round| round.p99),
    ("CPU of Redis", |round| round.redis),
    ("CPU of the client", |round| round.client),
    ("commands of Redis", |round: &Round| round.commands),
];

/// Returns a table of ratios, of this commit to the other one: the median of the rounds, the least
/// and the greatest. What lies on both sides of 1 is within the noise.
pub fn table(entries: &[Entry], commit: &str) -> String {
    let mut text =
        format!("Ratios to commit {commit}: median (least to greatest of the rounds)\n\n");
    let names: Vec<_> = METRICS.iter().map(|(name, _)| *name).collect();
    let _ = writeln!(text, "| limiter | workload | {} |", names.join(" | "));
    let _ = writeln!(text, "|{}", "---|".repeat(METRICS.len() + 2));
    for entry in entries.iter().filter(|entry| entry.subject.kind == Kind::Ours) {
        for workload in Workload::ALL {
            let cells = METRICS.map(|(_, metric)| cell(entries, entry, workload, metric));
            if cells.iter().any(|cell| !cell.is_empty()) {
                let (label, workload) = (entry.subject.label, workload.label());
                let _ = writeln!(text, "| {label} | {workload} | {} |", cells.join(" | "));
            }
        }
        if let Some(ratio) = bytes(entries, entry) {
            let _ = writeln!(text, "| {} | bytes per key: {ratio:.2} |", entry.subject.label);
        }
    }
    text
}

fn cell(entries: &[Entry], entry: &Entry, workload: Workload, metric: Metric) -> String {
    let (own, other) = (entry.subject.id, other_id(entry));
    let ratios = ratios(entries, workload, metric, (own, &other));
    match ratios[..] {
        [] => String::new(),
        [least, .., greatest] => {
            format!("{:.2} ({least:.2} to {greatest:.2})", ratios[ratios.len() / 2])
        }
        [only] => format!("{only:.2}"),
    }
}

fn bytes(entries: &[Entry], entry: &Entry) -> Option<f64> {
    let other = find(entries, &other_id(entry))?.results.bytes_per_key?;
    Some(entry.results.bytes_per_key? / other)
}

fn other_id(entry: &Entry) -> String {
    format!("{OTHER_COMMIT}{}", entry.subject.id)
}
