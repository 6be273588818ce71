//! The state of a store, as its `health` reports it. The connections find it out.

use std::{fmt, sync::Arc, time::SystemTime};

/// The state of a store, without a call to it. The counters start with the store; clones share
/// them. A store in memory is always `ready`, with counters of 0. With the feature
/// `serde`, it is [serialized](crate::guide::configuration#results-as-json).
///
/// # Examples
///
/// ```
/// use tower_ratelimit::store;
///
/// let health = store::lazy("memory:")?.health();
/// assert!(health.is_available);
/// println!("{health}"); // for a page of the service
/// # Ok::<(), tower_ratelimit::store::StoreError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Health {
    /// Public as [`status`](Health::status).
    pub(super) status: Status,
    /// True while decisions are sent to Redis (the circuit is closed). While it is false, decisions
    /// fail immediately, and the store sends one probe at a time until Redis answers again.
    ///
    /// * It becomes false after five calls in a row, over at least a deadline, without an answer in
    ///   time.
    /// * It becomes true when Redis runs a script within the deadline of these calls. The script is
    ///   a probe, sent 100 ms after the previous one, or a call of a clone with a longer deadline.
    ///   The probe contains a write command. Errors such as LOADING, BUSY or READONLY do not count.
    ///
    /// Without traffic it stays true, because only failed calls change it; before the first answer,
    /// [`status`](Health::status) is `unknown`. To test whether Redis answers now, call
    /// [`ping`](crate::store::AnyStore::ping).
    ///
    /// An error that Redis sends is an answer, for example READONLY: `errors` and `last_error`
    /// report it. A clone with a longer deadline stays available while Redis answers its own calls.
    /// In a cluster, the value is true if it is true for each node that has keys; decisions fail
    /// for the keys of the other nodes.
    pub is_available: bool,
    /// The number of calls in a row without an answer, 0 after an answer in time. At 5 or more,
    /// over at least a deadline, Redis becomes unavailable. Probes and the releases of dropped
    /// requests are not included. In a cluster, it is the number of the node with the most.
    pub consecutive_failures: u32,
    /// The number of calls of limiters that failed in the last minute, to 10 s, including calls
    /// that were not sent, and calls that this process sent or read too late. Above 0 while the
    /// status is `ready`, some calls fail: for example about one damaged key.
    pub recent_failures: u64,
    /// The text of the last error that `timeouts`, `interrupted` and `errors` count. It stays when
    /// Redis answers again.
    #[cfg_attr(feature = "serde", serde(serialize_with = "text"))]
    pub last_error: Option<Arc<str>>,
    /// The time of `last_error`, by the clock of this process.
    #[cfg_attr(feature = "serde", serde(rename = "last_error_at_unix_ms"))]
    #[cfg_attr(feature = "serde", serde(serialize_with = "crate::time::unix_ms"))]
    pub last_error_at: Option<SystemTime>,
    /// The number of answers from Redis, including errors.
    pub answers: u64,
    /// The number of calls without an answer within their deadlines, and of attempts to connect
    /// that took too long. Calls that this process delayed itself are not included.
    pub timeouts: u64,
    /// The number of calls whose connection ended before the answer. They are not repeated, because
    /// Redis may have counted them.
    pub interrupted: u64,
    /// The number of other failed attempts to connect, and of errors that Redis sent. Redirections
    /// to other nodes are not included.
    pub errors: u64,
    /// The number of calls that failed immediately because Redis was unavailable.
    pub skipped: u64,
    /// The number of times that a server became unavailable.
    pub outages: u64,
}

/// The state of a server, as [`Health::status`] describes it. The variants are in order, from the
/// best state to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "a store in memory is always ready"))]
pub(crate) enum Status {
    Ready,
    Unknown,
    Rejecting,
    Unavailable,
    Slow,
    LoginRejected,
    Silent,
    Refused,
    Unreachable,
}

impl Status {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Unknown => "unknown",
            Self::Rejecting => "rejecting",
            Self::Unavailable => "unavailable",
            Self::Slow => "slow",
            Self::LoginRejected => "login_rejected",
            Self::Silent => "silent",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
        }
    }
}

/// Writes a sentence about the server.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "the store decides",
            Self::Unknown => "Redis has not answered yet",
            Self::Rejecting => "Redis rejects decisions",
            Self::Unavailable => "Redis does not answer",
            Self::Slow => "Redis answers, but makes no decision in time",
            Self::LoginRejected => "Redis rejects the login",
            Self::Silent => "Redis accepts connections, but does not answer",
            Self::Refused => "Redis refuses connections",
            Self::Unreachable => "Redis cannot be reached",
        })
    }
}

/// Writes the status, the calls that failed in the last minute, and the last error with its age, in
/// one line for a page such as `/health`:
///
/// ```text
/// the store decides, but 12 calls failed in the last minute; last error, 3 s ago: ..
/// ```
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_ready = self.status == Status::Ready;
        match self.consecutive_failures {
            1.. if is_ready => f.write_str("Redis has not answered the last calls")?,
            _ => self.status.fmt(f)?,
        }
        if self.recent_failures > 0 {
            let decides = is_ready && self.consecutive_failures == 0;
            let but = if decides { ", but" } else { ":" };
            let calls = if self.recent_failures == 1 { "call" } else { "calls" };
            write!(f, "{but} {} {calls} failed in the last minute", self.recent_failures)?;
        }
        let Some(error) = &self.last_error else { return Ok(()) };
        let age = self.last_error_at.and_then(|at| at.elapsed().ok()).unwrap_or_default();
        let (age, unit) = match age.as_secs() {
            seconds @ 0..120 => (seconds, "s"),
            seconds @ 120..7_200 => (seconds / 60, "min"),
            seconds => (seconds / 3_600, "h"),
        };
        write!(f, "; last error, {age} {unit} ago: {error}")
    }
}

impl Health {
    /// Returns what is known about the server, by the results of the store's own calls, as a label:
    ///
    /// | status | meaning |
    /// |---|---|
    /// | `ready` | the store decides |
    /// | `unknown` | Redis has not answered yet: the store has not been used, or its first calls failed |
    /// | `rejecting` | Redis answers, but rejects decisions, all or some: [`last_error`](Health::last_error) has the reason |
    /// | `unavailable` | Redis does not answer, for another reason than those below |
    /// | `slow` | Redis answers simple commands, but makes no decision in time: it is slow, or paused for writes (`CLIENT PAUSE WRITE`) |
    /// | `login_rejected` | Redis rejects the user or the password |
    /// | `silent` | Redis accepts connections, but does not answer: it hangs, or is paused |
    /// | `refused` | the address refuses connections: the server is stopped, or the address is wrong |
    /// | `unreachable` | no connection can be opened within the time: the host is down, or packets are dropped |
    ///
    /// In a cluster, the status is that of the node in the worst state; the table is in order, from
    /// the best state to the worst.
    ///
    /// When Redis becomes unavailable, the store opens another connection and sends a command that
    /// any server answers at once: so it tells a server that is stopped from one that hangs. Until
    /// the result is known, which can take some seconds, the status is `unavailable`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store;
    ///
    /// let health = store::lazy("memory:")?.health();
    /// assert_eq!(health.status(), "ready");
    /// # Ok::<(), tower_ratelimit::store::StoreError>(())
    /// ```
    #[must_use]
    pub fn status(&self) -> &'static str {
        self.status.as_str()
    }

    /// Returns the state of a store without a server.
    pub(super) fn ready() -> Self {
        Self {
            status: Status::Ready,
            is_available: true,
            consecutive_failures: 0,
            recent_failures: 0,
            last_error: None,
            last_error_at: None,
            answers: 0,
            timeouts: 0,
            interrupted: 0,
            errors: 0,
            skipped: 0,
            outages: 0,
        }
    }
}

#[cfg(feature = "serde")]
fn text<S: serde::Serializer>(text: &Option<Arc<str>>, serializer: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&text.as_deref(), serializer)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn its_line_tells_a_store_that_decides_from_one_that_also_fails_some_calls() {
        let mut health = Health::ready();
        assert_eq!(health.to_string(), "the store decides");
        health.last_error = Some("no answer within 100ms".into());
        health.last_error_at = Some(SystemTime::now() - Duration::from_secs(600));
        let error = "last error, 10 min ago: no answer within 100ms";
        assert_eq!(health.to_string(), format!("the store decides; {error}"));
        health.recent_failures = 2;
        let text = format!("the store decides, but 2 calls failed in the last minute; {error}");
        assert_eq!(health.to_string(), text);
        health.consecutive_failures = 2;
        let text = format!(
            "Redis has not answered the last calls: 2 calls failed in the last minute; {error}"
        );
        assert_eq!(health.to_string(), text);
        (health.status, health.recent_failures) = (Status::Refused, 1);
        let text = format!("Redis refuses connections: 1 call failed in the last minute; {error}");
        assert_eq!(health.to_string(), text);
    }
}
