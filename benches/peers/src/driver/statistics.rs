//! Medians and ratios of rounds.

use std::collections::BTreeMap;

use crate::measure::{Entry, Round, Workload};

/// A value of a round.
pub type Metric = fn(&Round) -> f64;

pub fn find<'a>(entries: &'a [Entry], id: &str) -> Option<&'a Entry> {
    entries.iter().find(|entry| entry.subject.id == id)
}

/// The values of all rounds, by round.
pub fn values(entry: &Entry, workload: Workload, metric: Metric) -> BTreeMap<usize, f64> {
    let rounds = entry.results.outcomes.get(&workload).map(|outcome| &outcome.rounds);
    rounds.into_iter().flatten().map(|(&round, values)| (round, metric(values))).collect()
}

pub fn median(entry: &Entry, workload: Workload, metric: Metric) -> Option<f64> {
    middle(values(entry, workload, metric).into_values().collect())
}

/// The median of the ratios within each round of one subject to another.
pub fn ratio(
    entries: &[Entry],
    workload: Workload,
    metric: Metric,
    (of, to): (&str, &str),
) -> Option<f64> {
    let of = values(find(entries, of)?, workload, metric);
    let to = values(find(entries, to)?, workload, metric);
    middle(of.iter().filter_map(|(round, of)| Some(of / to.get(round)?)).collect())
}

fn middle(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
