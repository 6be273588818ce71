//! Limits the rate of the events about the availability of Redis: the first change is reported
//! immediately, and an unstable Redis does not flood the logs. The breaker decides when the state
//! changes.

use std::{
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use super::{error::TransportError, events};
use crate::{store::Status, sync::lock};

/// The time for which there is at most one pair of events: unavailable, and available again.
const PERIOD: Duration = Duration::from_secs(10);

/// A state of Redis, and the number of changes since the last report.
#[derive(Clone, Debug)]
struct Report {
    state: State,
    changes: u32,
}

#[derive(Clone, Debug)]
pub(crate) enum State {
    Unavailable(Status, TransportError),
    /// After an outage of this length.
    Available(Duration),
    /// The node no longer has slots.
    Retired,
    /// It rejects scripts.
    Rejects(TransportError),
    /// It executes scripts again, after rejecting some for this time.
    Decides(Duration),
}

impl State {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Unavailable(..) | Self::Rejects(_))
    }
}

#[derive(Debug)]
pub(crate) struct Reports {
    /// The address of the server, or the name of the master.
    server: Option<Arc<str>>,
    period: Mutex<Option<Period>>,
}

/// The reports in a period, and the change that is left for its end.
#[derive(Debug)]
struct Period {
    ends: Instant,
    has_unavailable: bool,
    has_available: bool,
    held_back: Option<Report>,
}

impl Period {
    /// Begins with a report.
    fn new(now: Instant, first: &State) -> Self {
        let has_unavailable = first.is_failure();
        let has_available = !has_unavailable;
        Self { ends: now + PERIOD, has_unavailable, has_available, held_back: None }
    }

    /// Takes a change. Returns it to be reported now, or holds it back.
    fn change(&mut self, state: State) -> Option<Report> {
        let reported = match state.is_failure() {
            true => &mut self.has_unavailable,
            false => &mut self.has_available,
        };
        if self.held_back.is_none() && !mem::replace(reported, true) {
            return Some(Report { state, changes: 1 });
        }
        let changes = self.held_back.as_ref().map_or(0, |it| it.changes) + 1;
        self.held_back = Some(Report { state, changes });
        None
    }
}

impl Reports {
    pub(crate) fn new(server: Option<Arc<str>>) -> Self {
        Self { server, period: Mutex::new(None) }
    }

    /// Reports a change, at the latest at the end of the period.
    pub(crate) fn change(self: &Arc<Self>, state: State) {
        if !cfg!(feature = "tracing") {
            return;
        }
        let (report, ends) = self.next(state, Instant::now());
        if let Some(report) = report {
            self.emit(&report);
        }
        if let (Some(ends), Ok(runtime)) = (ends, Handle::try_current()) {
            let reports = self.clone();
            runtime.spawn(async move {
                sleep_until(ends).await;
                if let Some(report) = reports.held_back(ends) {
                    reports.emit(&report);
                }
            });
        }
    }

    /// Reports that an outage lasts.
    pub(crate) fn remind(&self, cause: Status, error: &TransportError, outage: Duration) {
        events::still_unavailable(self.server.as_deref(), cause, outage, error);
    }

    /// Reports that the server still rejects scripts.
    pub(crate) fn remind_rejects(&self, error: &TransportError, outage: Duration) {
        events::still_rejects(self.server.as_deref(), outage, error);
    }

    /// Returns the report for now; and, if this is the first change that was held back, the end of
    /// the period.
    fn next(&self, state: State, now: Instant) -> (Option<Report>, Option<Instant>) {
        let period = &mut *lock(&self.period);
        match period {
            Some(current) if now < current.ends => {
                let is_first = current.held_back.is_none();
                let report = current.change(state);
                let is_first = is_first && current.held_back.is_some();
                (report, is_first.then_some(current.ends))
            }
            _ => {
                // A change is left over if the runtime that had to report it did not run.
                let left = period.take().and_then(|it| it.held_back).map_or(0, |it| it.changes);
                *period = Some(Period::new(now, &state));
                (Some(Report { state, changes: left + 1 }), None)
            }
        }
    }

    /// Returns the change that was held back in the period that ends at `ends`. It begins the next
    /// period.
    fn held_back(&self, ends: Instant) -> Option<Report> {
        let period = &mut *lock(&self.period);
        let report = period.as_mut().filter(|it| it.ends == ends)?.held_back.take()?;
        *period = Some(Period::new(ends, &report.state));
        Some(report)
    }

    fn emit(&self, report: &Report) {
        let (server, changes) = (self.server.as_deref(), report.changes);
        match &report.state {
            State::Unavailable(cause, error) => {
                events::unavailable(server, *cause, changes, error);
            }
            State::Available(outage) => events::available(server, changes, *outage),
            State::Retired => events::retired(server, changes),
            State::Rejects(error) => events::rejects(server, changes, error),
            State::Decides(outage) => events::decides(server, changes, *outage),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable() -> State {
        State::Unavailable(Status::Unavailable, TransportError::circuit_open())
    }

    /// Returns the reports about changes at these seconds: the time, the availability and the
    /// number of changes.
    fn reported(changes: &[f64]) -> Vec<(f64, bool, u32)> {
        let reports = Reports::new(None);
        let start = Instant::now();
        let mut all = vec![];
        let mut add = |at: Instant, report: Option<Report>| {
            if let Some(Report { state, changes }) = report {
                let is_available = matches!(state, State::Available(_));
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
            let state = match is_available {
                true => State::Available(Duration::ZERO),
                false => unavailable(),
            };
            let (report, ends) = reports.next(state, now);
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
    fn changes_that_an_ended_runtime_did_not_report_are_in_the_next_report() {
        let reports = Reports::new(None);
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
