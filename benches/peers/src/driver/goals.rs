//! The goals for this crate, and how the measurements compare with them.

use crate::{
    measure::{Entry, Round, Workload},
    statistics::{Metric, find, median, ratio},
};

/// A row of the table of goals.
pub struct Goal {
    pub measurement: String,
    pub goal: String,
    pub before: Option<String>,
    pub now: Option<String>,
    pub ratio: Option<String>,
    pub reached: Option<bool>,
}

const GCRA: [&str; 3] = ["tower-rate-limit-redis", "throttled", "redis-rate"];
const COUNTER: [&str; 1] = ["tower-rate-limiter"];
const OTHER_LANGUAGES: [&str; 3] = ["bucket4j", "redisson-java", "rate-limiter-flexible"];

const RATE_NAME: &str = "decisions per second";
const RATE: Metric = |round: &Round| round.per_second;
const P50: Metric = |round: &Round| round.p50;
const P99: Metric = |round: &Round| round.p99;
const REDIS: Metric = |round: &Round| round.redis;
const CLIENT: Metric = |round: &Round| round.client;

/// All goals that have a measurement.
pub fn goals(entries: &[Entry]) -> Vec<Goal> {
    let table = Table { entries };
    let mut goals = table.latency_goals();
    for id in ["token-bucket", "fixed-window"] {
        goals.extend(table.goals_of_common_algorithm(id));
    }
    goals.extend(table.goals_of_other_algorithms());
    goals.extend(table.goals_of_redisson());
    goals.retain(|goal| goal.now.is_some());
    goals
}

struct Table<'a> {
    entries: &'a [Entry],
}

impl Table<'_> {
    fn latency_goals(&self) -> Vec<Goal> {
        vec![
            self.at_most_before(Workload::Single, "token-bucket", ("p50", P50), 0.7),
            self.at_most_before(Workload::Far, "token-bucket", ("p50", P50), 1.0),
        ]
    }

    fn goals_of_common_algorithm(&self, id: &str) -> Vec<Goal> {
        let mut goals = vec![
            self.rate(Workload::Many, id, 4.0),
            self.rate_of_peers(Workload::Many, id, ("each GCRA limiter", &GCRA), 2.0),
            self.rate_of_peers(Workload::Many, id, ("a script of `INCR`", &COUNTER), 1.5),
            self.rate_of_peers(
                Workload::Many,
                id,
                ("each library in another language", &OTHER_LANGUAGES),
                3.0,
            ),
            self.at_most_before(Workload::Many, id, ("p99", P99), 0.4),
            self.rate(Workload::Hot, id, 15.0),
            self.rate_of_peers(Workload::Hot, id, ("bucket4j", &["bucket4j"]), 1.0),
            self.rate(Workload::Flood, id, 50.0),
        ];
        for (workload, metric, limit) in [
            (Workload::Many, ("CPU of Redis", REDIS), 2.5),
            (Workload::Hot, ("CPU of Redis", REDIS), 0.2),
            (Workload::Many, ("CPU of the client", CLIENT), 1.0),
            (Workload::Hot, ("CPU of the client", CLIENT), 0.6),
        ] {
            goals.push(self.at_most(workload, id, metric, limit));
        }
        goals.push(self.commands_of_flood(id));
        goals.push(self.bytes(id, 120.0));
        goals
    }

    fn goals_of_other_algorithms(&self) -> Vec<Goal> {
        let others = ["leaky-bucket", "sliding-window", "sliding-window-10", "sliding-log"];
        let many = others.iter().map(|id| self.rate(Workload::Many, id, 3.0));
        let hot = others.iter().map(|&id| {
            let factor = if id == "leaky-bucket" { 5.0 } else { 10.0 };
            self.rate(Workload::Hot, id, factor)
        });
        many.chain(hot).collect()
    }

    /// The CPU of Redis in relation to that of Redisson itself.
    fn goals_of_redisson(&self) -> Vec<Goal> {
        let workloads = [Workload::Many, Workload::Hot, Workload::Flood];
        let goal = |workload| {
            let ratio = ratio(self.entries, workload, REDIS, ("redisson", "redisson-java"));
            Goal {
                goal: "at most 1 x that of Redisson".to_owned(),
                ratio: ratio.map(|ratio| format!("{ratio:.2} x Redisson")),
                reached: ratio.map(|ratio| ratio <= 1.0),
                ..self.row(workload, "redisson", ("CPU of Redis", REDIS))
            }
        };
        workloads.map(goal).into()
    }

    /// Decisions per second, at least `factor` times those of before.
    fn rate(&self, workload: Workload, id: &str, factor: f64) -> Goal {
        let before = format!("before-{id}");
        let ratio = ratio(self.entries, workload, RATE, (id, &before));
        Goal {
            goal: format!("at least {factor} x before"),
            ratio: ratio.map(|ratio| format!("{ratio:.1} x")),
            reached: ratio.map(|ratio| ratio >= factor),
            ..self.row(workload, id, (RATE_NAME, RATE))
        }
    }

    /// Decisions per second, at least `factor` times those of the fastest of some peers.
    fn rate_of_peers(
        &self,
        workload: Workload,
        id: &str,
        (label, peers): (&str, &[&str]),
        factor: f64,
    ) -> Goal {
        let ratios = peers.iter().filter_map(|peer| {
            ratio(self.entries, workload, RATE, (id, peer)).map(|ratio| (ratio, *peer))
        });
        let least = ratios.min_by(|a, b| a.0.total_cmp(&b.0));
        Goal {
            goal: format!("at least {factor} x {label}"),
            before: None,
            ratio: least.map(|(ratio, peer)| format!("{ratio:.1} x {peer}")),
            reached: least.map(|(ratio, _)| ratio >= factor),
            ..self.row(workload, id, (RATE_NAME, RATE))
        }
    }

    /// At most `factor` times the value of before.
    fn at_most_before(
        &self,
        workload: Workload,
        id: &str,
        metric: (&str, Metric),
        factor: f64,
    ) -> Goal {
        let before = format!("before-{id}");
        let ratio = ratio(self.entries, workload, metric.1, (id, &before));
        Goal {
            goal: format!("at most {factor} x before"),
            ratio: ratio.map(|ratio| format!("{ratio:.2} x")),
            reached: ratio.map(|ratio| ratio <= factor),
            ..self.row(workload, id, metric)
        }
    }

    fn at_most(&self, workload: Workload, id: &str, metric: (&str, Metric), limit: f64) -> Goal {
        let now = find(self.entries, id).and_then(|entry| median(entry, workload, metric.1));
        let before = format!("before-{id}");
        let ratio = ratio(self.entries, workload, metric.1, (id, &before));
        Goal {
            goal: format!("at most {limit} us"),
            ratio: ratio.map(|ratio| format!("{ratio:.2} x")),
            reached: now.map(|now| now <= limit),
            ..self.row(workload, id, metric)
        }
    }

    /// Redis executes no command while a denial is remembered, which is for a second at most.
    fn commands_of_flood(&self, id: &str) -> Goal {
        let value = |id: &str| {
            let entry = find(self.entries, id)?;
            median(entry, Workload::Flood, |round| round.commands * 1e3)
        };
        let (before, now) = (value(&format!("before-{id}")), value(id));
        let text = |commands: f64| format!("{commands:.2}");
        Goal {
            measurement: format!(
                "{}, {}: commands of Redis per 1,000 decisions, those in scripts included",
                self.label(id),
                Workload::Flood.label()
            ),
            goal: "at most 1".to_owned(),
            before: before.map(text),
            now: now.map(text),
            ratio: None,
            reached: now.map(|now| now <= 1.0),
        }
    }

    fn bytes(&self, id: &str, limit: f64) -> Goal {
        let bytes = |id: &str| find(self.entries, id).and_then(|entry| entry.results.bytes_per_key);
        let (now, before) = (bytes(id), bytes(&format!("before-{id}")));
        let ratio = now.zip(before).map(|(now, before)| now / before);
        let text = |bytes: f64| format!("{bytes:.0}");
        Goal {
            measurement: format!("{}: bytes per key in Redis", self.label(id)),
            goal: format!("at most {limit}"),
            before: before.map(text),
            now: now.map(text),
            ratio: ratio.map(|ratio| format!("{ratio:.2} x")),
            reached: now.map(|now| now.round() <= limit),
        }
    }

    /// A row with the values of before and now, and without a goal.
    fn row(&self, workload: Workload, id: &str, (name, metric): (&str, Metric)) -> Goal {
        let value = |id: &str| {
            let value = find(self.entries, id).and_then(|entry| median(entry, workload, metric))?;
            Some(match name {
                RATE_NAME => format!("{:.0} k", value / 1e3),
                _ if value < 10.0 => format!("{value:.2} us"),
                _ => format!("{value:.0} us"),
            })
        };
        Goal {
            measurement: format!("{}, {}: {name}", self.label(id), workload.label()),
            goal: String::new(),
            before: value(&format!("before-{id}")),
            now: value(id),
            ratio: None,
            reached: None,
        }
    }

    fn label(&self, id: &str) -> &str {
        find(self.entries, id).map_or("", |entry| entry.subject.label)
    }
}
