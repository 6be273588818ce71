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
    middle(&sorted(values(entry, workload, metric).into_values()))
}

/// The median of the ratios within each round of one subject to another.
pub fn ratio(
    entries: &[Entry],
    workload: Workload,
    metric: Metric,
    subjects: (&str, &str),
) -> Option<f64> {
    middle(&ratios(entries, workload, metric, subjects))
}

/// The ratios within each round of one subject to another, from the least to the greatest.
pub fn ratios(
    entries: &[Entry],
    workload: Workload,
    metric: Metric,
    (of, to): (&str, &str),
) -> Vec<f64> {
    let values = |id| find(entries, id).map(|entry| values(entry, workload, metric));
    let (Some(of), Some(to)) = (values(of), values(to)) else { return Vec::new() };
    sorted(of.iter().filter_map(|(round, of)| Some(of / to.get(round)?)))
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values
}

fn middle(sorted: &[f64]) -> Option<f64> {
    sorted.get(sorted.len() / 2).copied()
}
