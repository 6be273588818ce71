//! Permits that are taken and returned at once: what each costs Redis. Printed; docs/benchmarks.md
//! quotes it.

use std::fmt::Write as _;

use crate::{
    measure::{Entry, Workload},
    statistics::{median, ratios},
};

const RIVAL: &str = "redisson-semaphore";

/// Returns a table of the medians, and of the ratios to Redisson within each round.
pub fn table(entries: &[Entry]) -> String {
    let mut text = "| permits | workload | per second | p50, us | p99, us | CPU of Redis, us | \
                    x Redisson | commands of Redis |\n|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for workload in [Workload::Many, Workload::Hot] {
        for entry in entries {
            let value = |metric| median(entry, workload, metric).unwrap_or(f64::NAN);
            let pair = (entry.subject.id, RIVAL);
            let ratios = ratios(entries, workload, |round| round.redis, pair);
            let ratio = match ratios[..] {
                [] => String::new(),
                [least, .., most] => {
                    format!("{:.2} ({least:.2} to {most:.2})", ratios[ratios.len() / 2])
                }
                [only] => format!("{only:.2}"),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {:.1} k | {:.0} | {:.0} | {:.2} | {ratio} | {:.2} |",
                entry.subject.label,
                workload.label(),
                value(|round| round.per_second) / 1e3,
                value(|round| round.p50),
                value(|round| round.p99),
                value(|round| round.redis),
                value(|round| round.commands),
            );
        }
    }
    text
}
