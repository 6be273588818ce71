//! Observability: events of limiters, layers and stores, and ready-made observers.
//!
//! | observer | what it does |
//! |---|---|
//! | [`Metrics`], with the feature `metrics` | counts for Prometheus and other systems |
//! | [`TopDenied`] | lists the keys that are denied most |
//! | your own [`Observer`] | feeds any other system |
//!
//! An observer is set on a store, before limiters are made over it. It receives the events of the
//! store, of these limiters and of their layers. Requests that a [`Rule`](crate::layer::Rule)
//! rejects have no limiter: [`RateLimitLayer::observe`](crate::RateLimitLayer::observe) sets an
//! observer for them.
//!
//! | event | method | reported by |
//! |---|---|---|
//! | a check was decided, by a store or by a failure policy | [`decided`](Observer::decided) | limiter |
//! | a request waits, and its wait ends | [`wait_began`](Observer::wait_began), [`wait_ended`](Observer::wait_ended) | limiter |
//! | units of a request are returned | [`released`](Observer::released) | limiter |
//! | a call of the store failed | [`store_failed`](Observer::store_failed) | limiter |
//! | a key was blocked, unblocked or reset | [`key_changed`](Observer::key_changed) | limiter |
//! | a limiter got another quota or algorithm | [`settings_changed`](Observer::settings_changed) | limiter |
//! | a configuration was reloaded, or rejected | [`reloaded`](Observer::reloaded) | `Limiters` |
//! | a request was rejected | [`rejected`](Observer::rejected) | layer |
//! | the number of keys in memory changed | [`keys_held`](Observer::keys_held) | [`MemoryStore`](crate::MemoryStore) |
//! | a call to Redis was sent | [`batch_sent`](Observer::batch_sent) | `RedisStore` |
//! | a circuit breaker opened or closed | [`breaker_changed`](Observer::breaker_changed) | `RedisStore` |
//!
//! Without an observer, a check only tests a pointer. The feature `tracing` also checks, on each
//! denial and each Redis call, whether the subscriber records the event.
//!
//! # Examples
//!
//! ```
//! use std::sync::{Arc, atomic::{AtomicU64, Ordering::Relaxed}};
//! use tower_ratelimit::{
//!     Algorithm, Limiter, MemoryStore, Quota,
//!     observe::{Decided, Observer, Outcome},
//! };
//!
//! #[derive(Default)]
//! struct CountDenials(AtomicU64);
//!
//! impl Observer for CountDenials {
//!     fn decided(&self, event: &Decided<'_>) {
//!         if matches!(event.outcome(), Outcome::Denied | Outcome::Blocked) {
//!             self.0.fetch_add(1, Relaxed);
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_ratelimit::Error> {
//! let denials = Arc::new(CountDenials::default());
//! let store = MemoryStore::new().observe(denials.clone());
//! let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_hour(1));
//! limiter.check("alice").await?;
//! limiter.check("alice").await?;
//! assert_eq!(denials.0.load(Relaxed), 1);
//! # Ok(())
//! # }
//! ```

pub(crate) mod log;
#[cfg(feature = "metrics")]
mod metrics;
mod observers;
mod top_denied;

use std::{fmt, sync::Arc, time::Duration};

#[cfg(feature = "metrics")]
pub use self::metrics::Metrics;
pub(crate) use self::observers::{LimiterObservers, Observers};
pub use self::top_denied::{DeniedKey, TopDenied};
use crate::{
    algorithm::{Action, Algorithm},
    decision::Decision,
    error::{ConfigError, ErrorKind, StoreError},
    keys::Key,
    quota::Quota,
};

/// Receives events from limiters, layers and stores. Each method does nothing by default.
///
/// The methods are called in the tasks of requests, under no lock: they may call limiters and
/// stores, but must be fast, and must not block or panic. Future versions may add methods and event
/// fields.
///
/// A check is reported when it is decided: in memory with the first poll of its future, in Redis
/// with the answer. If the future is dropped before that answer:
///
/// * [`check`](crate::Limiter::check) and `check_n` have no event
/// * `check_within` has no event of its decision; if Redis has spent units or reserved an instant
///   for it, these are [`released`](Observer::released)
/// * [`try_acquire`](crate::Limiter::try_acquire), `acquire` and layers await the answer in the
///   background, which is [`decided`](Observer::decided), and then [`released`](Observer::released)
///   if units were spent
pub trait Observer: Send + Sync + 'static {
    /// Returns the observer that gets the events of one limiter instead of this one; `None` if this
    /// one gets them.
    ///
    /// It is called when a limiter is made, with its name. So an observer can find the counters of
    /// each limiter once, and not for each event.
    fn of_limiter(&self, limiter: &'static str) -> Option<Arc<dyn Observer>> {
        let _ = limiter;
        None
    }

    /// A check was decided. A check of several limits has one event, for the limiter that the
    /// decision names. A request that waits by retries has one for each of its checks. `peek`,
    /// `spend`, `refund`, `block` and `unblock` have none.
    fn decided(&self, event: &Decided<'_>) {
        let _ = event;
    }

    /// A request began to wait for quota.
    fn wait_began(&self, event: &WaitBegan<'_>) {
        let _ = event;
    }

    /// A request ended its wait: it proceeds, was denied, or was dropped.
    fn wait_ended(&self, event: &WaitEnded<'_>) {
        let _ = event;
    }

    /// Units that a request has spent or reserved are returned: it was cancelled, was dropped while
    /// it waited, or used less than it was charged.
    fn released(&self, event: &Released<'_>) {
        let _ = event;
    }

    /// A call of the store failed. If the [policy](crate::FailurePolicy) lets the request proceed,
    /// or decides in memory, [`decided`](Observer::decided) follows.
    fn store_failed(&self, event: &StoreFailed<'_>) {
        let _ = event;
    }

    /// A key was blocked, unblocked or reset by this process. There is no event if the call failed,
    /// or if its future was dropped before the answer.
    fn key_changed(&self, event: &KeyChanged<'_>) {
        let _ = event;
    }

    /// A limiter got another quota or algorithm: by [`set_quota`](crate::Limiter::set_quota) or by
    /// a reload. There is no event if the settings stay the same.
    fn settings_changed(&self, event: &SettingsChanged<'_>) {
        let _ = event;
    }

    /// The limits of a configuration were reloaded, or rejected. The change of each limiter is a
    /// [`settings_changed`](Observer::settings_changed).
    fn reloaded(&self, event: &Reloaded<'_>) {
        let _ = event;
    }

    /// A layer rejected a request. There is no event in a [dry
    /// run](crate::RateLimitLayer::dry_run).
    fn rejected(&self, event: &Rejected<'_>) {
        let _ = event;
    }

    /// The number of keys in a store in memory has changed. If threads change the number at the
    /// same time, the last event can contain an earlier number.
    fn keys_held(&self, event: &KeysHeld) {
        let _ = event;
    }

    /// A call with checks of one limiter is sent to Redis.
    fn batch_sent(&self, event: &BatchSent<'_>) {
        let _ = event;
    }

    /// The circuit breaker of a server was opened or closed. The state when the observer is set is
    /// reported, too. This method must not add an observer to the store.
    fn breaker_changed(&self, event: &BreakerChanged<'_>) {
        let _ = event;
    }
}

/// A check was decided.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Decided<'a> {
    /// The decision, which names the limiter and the source.
    pub decision: &'a Decision,
    /// The key at that limiter; `None` if the check contained several keys of the limiter, because
    /// the decision does not name one of them.
    pub key: Option<&'a Key<'a>>,
    /// The time from the call to the answer of a store outside of the process; `None` if the
    /// decision was made in the memory of the process.
    pub duration: Option<Duration>,
}

impl Decided<'_> {
    /// Returns the outcome of the check.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        match self.decision.is_allowed() {
            false if self.decision.is_blocked() => Outcome::Blocked,
            false => Outcome::Denied,
            true if self.decision.delay().is_zero() => Outcome::Allowed,
            true => Outcome::Waited,
        }
    }
}

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The request may proceed immediately.
    Allowed,
    /// The request may proceed after a [delay](Decision::delay).
    Waited,
    /// The request may not proceed: the quota is used up.
    Denied,
    /// The request may not proceed, because its key is [blocked](crate::Limiter::block).
    Blocked,
}

/// A key was blocked, unblocked or reset.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KeyChanged<'a> {
    /// The name of the limiter.
    pub limiter: &'a str,
    /// The key.
    pub key: &'a Key<'a>,
    /// The change.
    pub change: KeyChange,
}

/// A change of a key by a call, other than a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyChange {
    /// It was [blocked](crate::Limiter::block) for this time. If an earlier block lasts longer, it
    /// stays.
    Blocked(Duration),
    /// Its block was [ended](crate::Limiter::unblock), if there was one.
    Unblocked,
    /// Its state was [deleted](crate::Limiter::reset).
    Reset,
}

impl KeyChange {
    /// Returns the name, as in a label: `blocked`, `unblocked` or `reset`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Blocked(_) => "blocked",
            Self::Unblocked => "unblocked",
            Self::Reset => "reset",
        }
    }
}

/// A limiter got another quota or algorithm. It is printed as `login: 5/min -> 50/min`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SettingsChanged<'a> {
    /// The name of the limiter.
    pub limiter: &'a str,
    /// The algorithm and the quota before.
    pub from: (Algorithm, Quota),
    /// The algorithm and the quota from now on.
    pub to: (Algorithm, Quota),
}

impl fmt::Display for SettingsChanged<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limiter, from: (before, old), to: (after, new) } = self;
        write!(f, "{limiter}: ")?;
        match (before == after, before.name() == after.name()) {
            (true, _) => write!(f, "{old} -> {new}"),
            (_, true) => write!(f, "{old}, {before:?} -> {new}, {after:?}"),
            _ => write!(f, "{old}, {before} -> {new}, {after}"),
        }
    }
}

/// The limits of a configuration were reloaded, or rejected.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Reloaded<'a> {
    /// The reason for which the limits stay as they were; `None` if the new ones apply.
    pub error: Option<&'a ConfigError>,
}

/// A request began to wait for quota.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WaitBegan<'a> {
    /// The name of the limiter.
    pub limiter: &'a str,
}

/// A request ended its wait for quota.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WaitEnded<'a> {
    /// The name of the limiter, as when the wait began.
    pub limiter: &'a str,
    /// The length of the wait.
    pub duration: Duration,
}

/// Units of a request are returned.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Released<'a> {
    /// The name of the limiter.
    pub limiter: &'a str,
    /// The key.
    pub key: &'a Key<'a>,
    /// The number of units. A bucket returns only those that it has not refilled since.
    pub units: u64,
}

/// A call of the store failed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StoreFailed<'a> {
    /// The name of the limiter; of several limiters, of the first.
    pub limiter: &'a str,
    /// The operation that failed.
    pub operation: Operation,
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// The error, with its sources.
    pub error: &'a StoreError,
}

/// An operation of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// To decide about a request.
    Check,
    /// To return the decision that a check would make.
    Peek,
    /// To spend units, also more than are left.
    Spend,
    /// To return units that any request has spent.
    Refund,
    /// To return units that one request has spent or reserved.
    Release,
    /// To delete the state of a key.
    Reset,
    /// To block a key.
    Block,
    /// To end a block.
    Unblock,
}

impl Operation {
    /// Returns the name, as in a label: `check`, `peek`, `spend`, `refund`, `release`, `reset`,
    /// `block` or `unblock`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Peek => "peek",
            Self::Spend => "spend",
            Self::Refund => "refund",
            Self::Release => "release",
            Self::Reset => "reset",
            Self::Block => "block",
            Self::Unblock => "unblock",
        }
    }
}

impl From<Action> for Operation {
    fn from(action: Action) -> Self {
        match action {
            Action::Check => Self::Check,
            Action::Peek | Action::Observe => Self::Peek,
            Action::Spend => Self::Spend,
            Action::Refund => Self::Refund,
            Action::Block { .. } => Self::Block,
            Action::Unblock => Self::Unblock,
        }
    }
}

/// A layer rejected a request.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rejected<'a> {
    /// The reason.
    pub reason: Reason,
    /// The name of the limiter that denied the request, or whose quota is below its cost.
    pub limiter: Option<&'a str>,
}

/// The reason for a rejection. See [`Rejection`](crate::http::Rejection).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The quota is used up, or the key is [blocked](crate::Limiter::block).
    Denied,
    /// The request costs more than the quota can ever grant.
    CostAboveQuota,
    /// The request has no key.
    MissingKey,
    /// The request is invalid.
    Invalid,
    /// The client is forbidden, by a list or a rule, or requests without a key are.
    Forbidden,
    /// The service is misconfigured.
    Misconfigured,
    /// The store did not decide.
    Store,
}

impl Reason {
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 7] = [
        Self::Denied,
        Self::CostAboveQuota,
        Self::MissingKey,
        Self::Invalid,
        Self::Forbidden,
        Self::Misconfigured,
        Self::Store,
    ];

    /// Returns the name, as in a label: `denied`, `cost_above_quota`, `missing_key`, `invalid`,
    /// `forbidden`, `misconfigured` or `store`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::CostAboveQuota => "cost_above_quota",
            Self::MissingKey => "missing_key",
            Self::Invalid => "invalid",
            Self::Forbidden => "forbidden",
            Self::Misconfigured => "misconfigured",
            Self::Store => "store",
        }
    }
}

/// The number of keys in a store in memory.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KeysHeld {
    /// The number of keys.
    pub keys: usize,
    /// The maximum.
    pub max_keys: usize,
}

/// A call with checks of one limiter is sent to Redis.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BatchSent<'a> {
    /// The name of the limiter.
    pub limiter: &'a str,
    /// The number of checks in the call, at least 1.
    pub checks: usize,
}

/// The state of a circuit breaker.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BreakerChanged<'a> {
    /// The address of the server, or the name of the master behind Sentinels; empty for a
    /// connection of the application.
    pub server: &'a str,
    /// True if the breaker is open: the server does not answer, and calls fail immediately.
    pub is_open: bool,
}
