//! The deadline of a call, however many commands the call takes, and the grace after it for a
//! process that did not run meanwhile.

use std::{
    collections::VecDeque,
    sync::Mutex,
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Handle, Id},
    time::{sleep, timeout},
};

use crate::sync::{lock, race};

/// The deadline of calls that no request waits for. It is longer than the deadline of requests,
/// because a late call in the background delays no request, and a failed one is sent again.
const BACKGROUND_DEADLINE: Duration = Duration::from_secs(1);
/// The time after the deadline during which the reply to a call that lingers is awaited. Redis
/// pauses for seconds (a failover, a fork, `CLIENT PAUSE`), and a reply after half a minute is one
/// of a connection that is usually given up.
const MAX_LINGER: Duration = Duration::from_secs(30);
/// The time that a call has after this process did not run. To write commands and to read replies
/// takes microseconds; on a busy machine, the runtime may first run all other tasks.
const GRACE: Duration = Duration::from_millis(20);
/// A timer that is later than this shows that the process was stopped, or that a task blocked its
/// runtime. Timers have a resolution of 1 ms.
const LATE: Duration = Duration::from_millis(5);
/// The number of pauses of the process during the grace that a call survives.
const MAX_PAUSES: usize = 3;
/// The longest deadline: an `Instant` cannot tell every later time. 30 years.
const MAX_WITHIN: Duration = Duration::from_secs(30 * 365 * 86_400);

/// The last times at which a runtime ran again after it did not, in order. All calls share them,
/// and the first one after its last chance counts for a call: so a call of several commands has the
/// grace once, also in a process that is always late.
static RESUMED: Mutex<VecDeque<(Option<Id>, Instant)>> = Mutex::new(VecDeque::new());
/// The time for which they are kept: no call asks later for an instant before its end.
const KEPT: Duration = Duration::from_secs(1);

/// The time within which a call gets its reply, however many commands it takes.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    within: Duration,
    end: Instant,
    is_background: bool,
    is_shared: bool,
    lingers: bool,
}

impl Deadline {
    /// Starts now.
    pub fn new(within: Duration) -> Self {
        Self::starting(Instant::now(), within)
    }

    pub fn starting(start: Instant, within: Duration) -> Self {
        let end = start + within.min(MAX_WITHIN);
        let (is_background, is_shared, lingers) = (false, false, false);
        Self { within, end, is_background, is_shared, lingers }
    }

    /// Starts now, for a call that no request waits for: its failures say nothing about requests.
    pub fn in_background() -> Self {
        Self { is_background: true, ..Self::new(BACKGROUND_DEADLINE) }
    }

    /// Returns the same deadline for a call whose callers fail, and record that, each for itself.
    /// If it lingers, its reply is of use after the deadline, too: the call is not written later,
    /// but its reply is awaited for up to [`MAX_LINGER`] more.
    pub fn shared(self, lingers: bool) -> Self {
        Self { is_shared: true, lingers, ..self }
    }

    pub(crate) fn is_shared(self) -> bool {
        self.is_shared
    }

    pub fn lingers(self) -> bool {
        self.lingers
    }

    pub(crate) fn is_background(self) -> bool {
        self.is_background
    }

    /// Returns the whole time, from the start.
    pub fn within(self) -> Duration {
        self.within
    }

    pub(crate) fn start(self) -> Instant {
        self.end - self.within.min(MAX_WITHIN)
    }

    pub fn end(self) -> Instant {
        self.end
    }

    /// Returns the time until the callers fail.
    pub(crate) fn left(self) -> Duration {
        self.last_end().saturating_duration_since(Instant::now())
    }

    /// Returns whether the callers have failed, or fail now.
    pub(crate) fn is_over(self) -> bool {
        let now = Instant::now();
        self.end <= now && self.last_end() <= now
    }

    /// Returns whether a call that begins now is too late. If the deadline is over for a while, the
    /// process did not run meanwhile: its callers have not failed yet, and get the grace.
    pub fn is_too_late(self) -> bool {
        self.is_too_late_at(Instant::now())
    }

    /// The same at an instant that was read just now.
    pub(crate) fn is_too_late_at(self, now: Instant) -> bool {
        let late = now.saturating_duration_since(self.end);
        if late >= LATE && !self.has_grace() {
            resume();
        }
        !late.is_zero() && self.is_over()
    }

    /// Waits for a reply until the callers fail.
    pub async fn wait_for<T>(self, reply: impl Future<Output = T>) -> Option<T> {
        race(reply, self.over()).await
    }

    /// Waits for the reply to a command that was written, after the callers have failed.
    pub async fn linger<T>(self, reply: impl Future<Output = T>) -> Option<T> {
        match self.lingers {
            true => timeout(MAX_LINGER, reply).await.ok(),
            false => None,
        }
    }

    /// Waits until the callers fail: at the deadline, or [`GRACE`] after this process ran again, if
    /// that is later. So commands that are still in a queue can be written, and replies be read
    /// that arrived in the meantime.
    pub async fn over(self) {
        let now = Instant::now();
        self.is_too_late_at(now);
        if lateness_at(self.last_chance(), now).await >= LATE && !self.has_grace() {
            resume();
        }
        let mut late = lateness_at(self.last_end(), Instant::now()).await;
        if late >= LATE && !self.has_grace() {
            resume();
        }
        // Pauses come in a row, and what has arrived must be read before the callers fail.
        for _ in 0..MAX_PAUSES {
            let now = Instant::now();
            late = lateness_at(now + late.min(GRACE).max(self.left()), now).await;
            if late < LATE {
                return;
            }
        }
    }

    /// Returns the time from which on a pause of the process leaves less than the grace.
    fn last_chance(self) -> Instant {
        self.end - GRACE.min(self.within / 2)
    }

    /// Returns the end of the grace, if the process did not run shortly before the deadline.
    fn grace_end(self) -> Option<Instant> {
        let (runtime, last_chance) = (runtime(), self.last_chance());
        let resumed = lock(&RESUMED);
        let first = resumed.iter().find(|(id, at)| *id == runtime && *at >= last_chance);
        first.map(|(_, at)| *at + GRACE)
    }

    fn last_end(self) -> Instant {
        self.grace_end().map_or(self.end, |end| end.max(self.end))
    }

    /// Returns whether a server that had this time to answer had its share of the deadline. It had
    /// not if this process wrote the command late.
    pub(crate) fn is_fair(self, time: Duration) -> bool {
        time >= self.within - self.within / 4
    }

    /// Returns whether the process did not run shortly before the deadline.
    pub(crate) fn has_grace(self) -> bool {
        self.grace_end().is_some()
    }
}

/// Records that this runtime runs again.
fn resume() {
    let (runtime, now) = (runtime(), Instant::now());
    let resumed = &mut *lock(&RESUMED);
    while resumed.front().is_some_and(|(_, at)| now - *at > KEPT) {
        resumed.pop_front();
    }
    let is_known = |(id, at): &(Option<Id>, Instant)| *id == runtime && now - *at < LATE;
    if !resumed.iter().rev().any(is_known) {
        resumed.push_back((runtime, now));
    }
}

fn runtime() -> Option<Id> {
    Handle::try_current().ok().map(|runtime| runtime.id())
}

/// Sleeps until an instant. Returns how much later that ended; 0 if the instant was past before.
async fn lateness_at(due: Instant, now: Instant) -> Duration {
    let left = due.saturating_duration_since(now);
    if left.is_zero() {
        return left;
    }
    sleep(left).await;
    due.elapsed()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const WITHIN: Duration = Duration::from_millis(100);

    #[test]
    fn a_call_that_is_found_after_its_deadline_has_more_time_and_one_that_is_in_time_has_not() {
        let late = Deadline::starting(Instant::now() - 2 * WITHIN, WITHIN);
        assert!(!late.is_too_late());
        while !late.is_over() {
            assert!(late.left() <= GRACE);
            thread::sleep(GRACE);
        }
        let in_time = Deadline::new(600 * WITHIN);
        assert!(!in_time.is_too_late() && in_time.last_end() == in_time.end());
    }

    #[tokio::test]
    async fn a_reply_is_awaited_after_the_runtime_was_blocked() {
        let deadline = Deadline::new(WITHIN);
        let reply = async {
            thread::sleep(2 * WITHIN);
            sleep(Duration::from_millis(1)).await;
        };
        assert!(deadline.wait_for(reply).await.is_some());
        assert!(Deadline::new(GRACE).wait_for(std::future::pending::<()>()).await.is_none());
    }

    #[test]
    fn a_server_that_had_little_of_the_deadline_has_not_failed() {
        let deadline = Deadline::new(WITHIN);
        assert!(deadline.is_fair(WITHIN) && deadline.is_fair(WITHIN * 3 / 4));
        assert!(!deadline.is_fair(WITHIN / 2));
    }
}
