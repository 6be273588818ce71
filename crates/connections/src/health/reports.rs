//! Bounds the rate of the events about the availability of Redis: the first change is reported
//! immediately, and an unstable Redis does not flood the logs. The breaker knows when the state
//! changes.

use std::{
    mem,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::time::sleep_until;

use super::{
    super::{
        home,
        link::{ServerState, TransportError},
    },
    owner::{Event, Owner},
};
use crate::sync::lock;

/// The time for which there is at most one pair of events: unavailable, and available again.
const PERIOD: Duration = Duration::from_secs(10);

/// The last change, and the number of changes since the last report.
#[derive(Clone, Debug)]
struct ChangeReport {
    last: ServerChange,
    changes: u32,
}

#[derive(Clone, Debug)]
pub(super) enum ServerChange {
    Unavailable(ServerState, TransportError),
    /// After an outage of this length.
    Available(Duration),
    /// The node no longer has slots.
    Retired,
    /// It rejects scripts.
    Rejects(TransportError),
    /// It executes scripts again, after rejecting some for this time.
    Executes(Duration),
}

impl ServerChange {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Unavailable(..) | Self::Rejects(_))
    }
}

pub(super) struct Reports {
    /// The address of the server, or the name of the master.
    server: Arc<str>,
    owner: Arc<dyn Owner>,
    period: Mutex<Option<Period>>,
}

/// The reports in a period, and the change that is left for its end.
#[derive(Debug)]
struct Period {
    ends: Instant,
    /// Whether there was a report of the end of an outage, and of a failure.
    has_reported: [bool; 2],
    held_back: Option<ChangeReport>,
}

impl Period {
    /// Begins with a report.
    fn new(now: Instant, first: &ServerChange) -> Self {
        let has_reported = [!first.is_failure(), first.is_failure()];
        Self { ends: now + PERIOD, has_reported, held_back: None }
    }

    /// Takes a change. Returns it to be reported now, or holds it back.
    fn change(&mut self, change: ServerChange) -> Option<ChangeReport> {
        let has_reported = &mut self.has_reported[usize::from(change.is_failure())];
        if self.held_back.is_none() && !mem::replace(has_reported, true) {
            return Some(ChangeReport { last: change, changes: 1 });
        }
        let changes = self.held_back.as_ref().map_or(0, |it| it.changes) + 1;
        self.held_back = Some(ChangeReport { last: change, changes });
        None
    }
}

impl Reports {
    pub(super) fn new(server: Arc<str>, owner: Arc<dyn Owner>) -> Self {
        Self { server, owner, period: Mutex::new(None) }
    }

    /// Reports a change, at the latest at the end of the period.
    pub(super) fn change(self: &Arc<Self>, change: ServerChange) {
        let (report, ends) = self.next(change, Instant::now());
        if let Some(report) = report {
            self.emit(&report);
        }
        if let Some(ends) = ends {
            let reports = self.clone();
            home::spawn(async move {
                sleep_until(ends.into()).await;
                if let Some(report) = reports.held_back(ends) {
                    reports.emit(&report);
                }
            });
        }
    }

    /// Returns the report for now; and, if this is the first change that was held back, the end of
    /// the period.
    fn next(&self, change: ServerChange, now: Instant) -> (Option<ChangeReport>, Option<Instant>) {
        let period = &mut *lock(&self.period);
        match period {
            Some(current) if now < current.ends => {
                let is_first = current.held_back.is_none();
                let report = current.change(change);
                let is_first = is_first && current.held_back.is_some();
                (report, is_first.then_some(current.ends))
            }
            _ => {
                // A change is left over if its report at the end of the period is late.
                let left = period.take().and_then(|it| it.held_back).map_or(0, |it| it.changes);
                *period = Some(Period::new(now, &change));
                (Some(ChangeReport { last: change, changes: left + 1 }), None)
            }
        }
    }

    /// Returns the change that was held back in the period that ends at `ends`. It begins the next
    /// period.
    fn held_back(&self, ends: Instant) -> Option<ChangeReport> {
        let period = &mut *lock(&self.period);
        let report = period.as_mut().filter(|it| it.ends == ends)?.held_back.take()?;
        *period = Some(Period::new(ends, &report.last));
        Some(report)
    }

    fn emit(&self, report: &ChangeReport) {
        let (server, changes) = (&*self.server, report.changes);
        self.owner.notify(&match &report.last {
            ServerChange::Unavailable(cause, error) => {
                Event::Unavailable { server, cause: *cause, changes, error }
            }
            ServerChange::Available(outage) => {
                Event::Available { server, changes, outage: *outage }
            }
            ServerChange::Retired => Event::Retired { server, changes },
            ServerChange::Rejects(error) => Event::Rejects { server, changes, error },
            ServerChange::Executes(outage) => Event::Executes { server, changes, outage: *outage },
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{super::owner::Nobody, *};

    fn unavailable() -> ServerChange {
        ServerChange::Unavailable(ServerState::Unavailable, TransportError::circuit_open())
    }

    /// Returns the reports about changes at these seconds: the time, the availability and the
    /// number of changes.
    fn reported(changes: &[f64]) -> Vec<(f64, bool, u32)> {
        let reports = Reports::new("".into(), Arc::new(Nobody));
        let start = Instant::now();
        let mut all = vec![];
        let mut add = |at: Instant, report: Option<ChangeReport>| {
            if let Some(ChangeReport { last, changes }) = report {
                let is_available = matches!(last, ServerChange::Available(_));
                all.push(((at - start).as_secs_f64(), is_available, changes));
            }
        };
        let mut timer = None;
        let mut is_available = true;
        for seconds in changes {
            let now = start + Duration::from_secs_f64(*seconds);
            if let Some(ends) = timer.take_if(|ends| *ends <= now) {
                add(ends, reports.held_back(ends));
            }
            is_available = !is_available;
            let change = match is_available {
                true => ServerChange::Available(Duration::ZERO),
                false => unavailable(),
            };
            let (report, ends) = reports.next(change, now);
            timer = timer.or(ends);
            add(now, report);
        }
        if let Some(ends) = timer {
            add(ends, reports.held_back(ends));
        }
        all
    }

    #[test]
    fn each_of_few_changes_is_reported_at_once() {
        let outage = [(0.0, false, 1), (3.0, true, 1)];
        assert_eq!(reported(&[0.0, 3.0]), outage);
        assert_eq!(
            reported(&[0.0, 3.0, 10.0, 12.0]),
            [&outage[..], &[(10.0, false, 1), (12.0, true, 1)]].concat()
        );
    }

    #[test]
    fn a_period_reports_one_pair_of_many_changes_and_the_last_state_at_its_end() {
        assert_eq!(
            reported(&[0.0, 1.0, 2.0, 3.0, 4.0]),
            [(0.0, false, 1), (1.0, true, 1), (10.0, false, 3)]
        );
        // The report at the end of a period is the first of the next one.
        assert_eq!(
            reported(&[0.0, 1.0, 2.0, 11.0, 12.0, 13.0]),
            [(0.0, false, 1), (1.0, true, 1), (10.0, false, 1), (11.0, true, 1), (20.0, true, 2)]
        );
    }

    #[test]
    fn changes_whose_report_is_late_are_in_the_next_report() {
        let reports = Reports::new("".into(), Arc::new(Nobody));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (seconds, is_reported) in [(0, true), (1, false), (2, false), (15, true)] {
            let (report, _) = reports.next(unavailable(), at(seconds));
            assert_eq!(report.is_some(), is_reported);
            if seconds == 15 {
                assert_eq!(report.unwrap().changes, 3);
            }
        }
    }
}
