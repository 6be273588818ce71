//! The deadline of a call, however many commands the call takes.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use tokio::time::timeout;

/// The deadline of calls that no request waits for.
const BACKGROUND_DEADLINE: Duration = Duration::from_secs(1);
/// The longest extra time for a reply where the process notices the deadline late.
const MAX_GRACE: Duration = Duration::from_millis(20);

/// The time within which a call gets its reply, however many commands it takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    start: Instant,
    within: Duration,
    is_background: bool,
}

impl Deadline {
    /// Starts now.
    pub(crate) fn new(within: Duration) -> Self {
        Self { start: Instant::now(), within, is_background: false }
    }

    /// Starts now, for a call that no request waits for: its failures say nothing about requests.
    pub(crate) fn in_background() -> Self {
        Self { is_background: true, ..Self::new(BACKGROUND_DEADLINE) }
    }

    pub(crate) fn is_background(self) -> bool {
        self.is_background
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// Returns the whole time, from the start.
    pub(crate) fn within(self) -> Duration {
        self.within
    }

    pub(crate) fn left(self) -> Duration {
        self.left_at(Instant::now())
    }

    pub(crate) fn left_at(self, now: Instant) -> Duration {
        self.within.saturating_sub(now.saturating_duration_since(self.start))
    }

    /// Waits for a reply until the deadline.
    ///
    /// If the deadline is noticed late, the process did not run for a while, and the reply may wait
    /// to be read. The call then has the same time again to read it, up to [`MAX_GRACE`].
    pub(crate) async fn wait_for<T>(self, reply: impl Future<Output = T>) -> Option<T> {
        let mut reply = pin!(reply);
        if let Ok(reply) = timeout(self.left(), reply.as_mut()).await {
            return Some(reply);
        }
        timeout(self.grace(), reply).await.ok()
    }

    /// Returns the extra time for a reply if the deadline is noticed now.
    pub(crate) fn grace(self) -> Duration {
        self.start.elapsed().saturating_sub(self.within).min(MAX_GRACE)
    }

    pub(crate) fn start(self) -> Instant {
        self.start
    }
}
