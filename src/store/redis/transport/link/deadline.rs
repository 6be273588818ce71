//! The deadline of a call, however many commands the call takes.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use tokio::time::timeout;

/// The deadline of calls that no request waits for. It is longer than the deadline of requests,
/// because a late call in the background delays no request, and a failed one is sent again.
const BACKGROUND_DEADLINE: Duration = Duration::from_secs(1);
/// The time after the deadline during which the reply to a call that lingers is awaited. Redis
/// pauses for seconds (a failover, a fork, `CLIENT PAUSE`), and a reply after half a minute is one
/// of a connection that is usually given up.
const MAX_LINGER: Duration = Duration::from_secs(30);
/// The longest extra time for a reply where the process notices the deadline late. To read replies
/// that have arrived takes microseconds; on a busy machine, the runtime may first run all other
/// tasks.
const MAX_GRACE: Duration = Duration::from_millis(20);
/// The longest deadline: an `Instant` cannot tell every later time. 30 years.
const MAX_WITHIN: Duration = Duration::from_secs(30 * 365 * 86_400);

/// The time within which a call gets its reply, however many commands it takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    within: Duration,
    end: Instant,
    /// The time until which a command is sent.
    sent_until: Instant,
    is_background: bool,
    is_shared: bool,
    lingers: bool,
}

impl Deadline {
    /// Starts now.
    pub(crate) fn new(within: Duration) -> Self {
        Self::starting(Instant::now(), within)
    }

    pub(crate) fn starting(start: Instant, within: Duration) -> Self {
        let end = start + within.min(MAX_WITHIN);
        let (sent_until, is_background, is_shared, lingers) = (end, false, false, false);
        Self { within, end, sent_until, is_background, is_shared, lingers }
    }

    /// Starts now, for a call that no request waits for: its failures say nothing about requests.
    pub(crate) fn in_background() -> Self {
        Self { is_background: true, ..Self::new(BACKGROUND_DEADLINE) }
    }

    /// Returns the deadline of a call whose reply is of use after it, too: the call is not sent
    /// later, but its reply is awaited for up to [`MAX_LINGER`] more. Its callers fail at their
    /// deadlines.
    pub(crate) fn lingering(self) -> Self {
        Self { is_shared: true, lingers: true, ..self }
    }

    /// Returns the same deadline for the callers of a call that lingers.
    pub(crate) fn strict(self) -> Self {
        Self { lingers: false, ..self }
    }

    /// Returns the deadline of a call for several callers, of which `self` is the latest and
    /// `first` the earliest: the call is not sent after the earliest.
    pub(crate) fn shared(self, first: Self, lingers: bool) -> Self {
        Self { sent_until: first.end, is_shared: true, lingers, ..self }
    }

    /// Returns whether the callers of the call record its timeout, each for itself.
    pub(crate) fn is_shared(self) -> bool {
        self.is_shared
    }

    /// Returns whether a command must not be sent any more.
    pub(crate) fn is_too_late(self) -> bool {
        self.sent_until <= Instant::now()
    }

    /// Returns the time in which a command can be sent.
    pub(crate) fn left_to_send(self) -> Duration {
        self.sent_until.saturating_duration_since(Instant::now())
    }

    pub(crate) fn lingers(self) -> bool {
        self.lingers
    }

    pub(crate) fn is_background(self) -> bool {
        self.is_background
    }

    pub(crate) fn is_over(self) -> bool {
        self.end <= Instant::now()
    }

    /// Returns the whole time, from the start.
    pub(crate) fn within(self) -> Duration {
        self.within
    }

    pub(crate) fn left(self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
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
        let more = if self.lingers { MAX_LINGER } else { self.grace() };
        timeout(more, reply).await.ok()
    }

    /// Returns the extra time for a reply if the deadline is noticed now.
    pub(crate) fn grace(self) -> Duration {
        self.end.elapsed().min(MAX_GRACE)
    }

    pub(crate) fn start(self) -> Instant {
        self.end - self.within.min(MAX_WITHIN)
    }

    pub(crate) fn end(self) -> Instant {
        self.end
    }
}
