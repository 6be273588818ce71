//! The offset between the clock of a server and that of the process, estimated from the server's
//! replies.

use std::time::{Duration, Instant};

/// Lifetime of an estimate: clocks drift, by up to some 0.05 % while NTP slews one of them: 5 ms in
/// this time.
const PERIOD: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct ClockOffset {
    start: Instant,
    /// The least offset in this period and in the one before, in microseconds. The reply with the
    /// least offset had the lowest latency.
    least: [f64; 2],
    period: Instant,
}

impl ClockOffset {
    pub(crate) fn new(now: Instant) -> Self {
        Self { start: now, least: [f64::INFINITY; 2], period: now }
    }

    /// Returns the time since `instant` of the server's clock, in microseconds, for a command that
    /// was sent, and replied to, at these instants.
    pub(crate) fn age(&mut self, [sent, now]: [Instant; 2], instant: f64) -> f64 {
        let periods = (now - self.period).as_nanos() / PERIOD.as_nanos();
        if periods > 0 {
            self.least = [f64::INFINITY, if periods == 1 { self.least[0] } else { f64::INFINITY }];
            self.period = now;
        }
        let offset = (now - self.start).as_micros() as f64 - instant;
        self.least[0] = self.least[0].min(offset);
        // The server executed the command after it was sent, even if its clock was set.
        let max = (now - sent).as_micros() as f64;
        (offset - self.least[0].min(self.least[1])).min(max)
    }
}
