//! The rows of the table, with the expectations that they miss. It does not run the faults.

use std::{error::Error, fmt, sync::atomic::Ordering::SeqCst, time::Duration};

use crate::load::{EVENTS, Loss, Report};

#[derive(Debug, Default)]
pub struct Row {
    pub fault: String,
    pub requests: usize,
    pub errors: usize,
    pub worst: Duration,
    /// The number of keys that were admitted more often than their limit.
    pub over: usize,
    /// The time from the promotion or the end of the fault to the first answer.
    pub first: Option<Duration>,
    pub remark: Vec<String>,
    pub missed: Vec<String>,
}

pub fn head() -> String {
    let head = line(
        "fault",
        ["requests", "errors", "worst ms", "keys over", "first ms"].map(str::to_owned),
        "remark",
    );
    let rule = line("-".repeat(WIDTH).as_str(), [(); 5].map(|()| "-".repeat(9)), "---");
    format!("{head}\n{rule}")
}

const WIDTH: usize = 46;

fn line(fault: &str, numbers: [String; 5], remark: &str) -> String {
    let numbers: String = numbers.iter().map(|number| format!(" {number:>9} |")).collect();
    format!("| {fault:<WIDTH$} |{numbers} {remark} |")
}

impl Row {
    /// Summarizes a load. Only admissions within `losses` may exceed a limit.
    pub fn of(fault: &str, report: &Report, losses: &[Loss]) -> Self {
        let mut row = Self {
            fault: fault.to_owned(),
            requests: report.records.len(),
            errors: report.errors(),
            worst: report.worst(),
            over: report.over(&[]),
            ..Self::default()
        };
        row.remark.extend(report.failures());
        let events = EVENTS.load(SeqCst);
        if events > 0 {
            row.remark(format!("{events} events"));
        }
        let over = report.over(losses);
        row.expect(over == 0, || {
            format!("{over} keys are over their limit although their counts were not lost")
        });
        row
    }

    /// Makes a row for a fault that could not be injected or ended.
    pub fn failed(fault: &str, error: &dyn Error) -> Self {
        let missed = vec![error.to_string()];
        Self { fault: fault.to_owned(), missed, ..Self::default() }
    }

    pub fn first(mut self, first: Option<Duration>) -> Self {
        self.first = first;
        self.expect(first.is_some(), || "no decision after the end of the fault".to_owned());
        self
    }

    pub fn remark(&mut self, text: impl Into<String>) {
        self.remark.push(text.into());
    }

    /// Adds a missed expectation if `is_met` is false.
    pub fn expect(&mut self, is_met: bool, what: impl FnOnce() -> String) {
        if !is_met {
            self.missed.push(what());
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.first.map_or("-".to_owned(), |time| time.as_millis().to_string());
        let numbers = [
            self.requests.to_string(),
            self.errors.to_string(),
            self.worst.as_millis().to_string(),
            self.over.to_string(),
            first,
        ];
        let missed = self.missed.iter().map(|text| format!("MISSED: {text}"));
        let remark: Vec<_> = self.remark.iter().cloned().chain(missed).collect();
        f.write_str(&line(&self.fault, numbers, &remark.join("; ")))
    }
}
