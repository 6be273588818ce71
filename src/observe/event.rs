//! `Event`: what happens in limiters, layers and stores. It is built only where observers get it.

use std::time::Duration;

use crate::{
    algorithm::Algorithm,
    decision::Decision,
    error::{ConfigError, StoreError},
    keys::Key,
    quota::Quota,
};

/// An event of a limiter, a layer or a store. Future versions may add events and fields.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use tower_ratelimit::{MemoryStore, observe::Event};
///
/// let denials = |event: &Event<'_>| match event {
///     Event::Decided { decision, key, .. } if !decision.is_allowed() => println!("{key:?}"),
///     Event::StoreFailed { error, .. } => println!("{error}"),
///     _ => {}
/// };
/// MemoryStore::new().add_observer(Arc::new(denials));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A check was decided, by a store or by a [failure policy](crate::FailurePolicy). A check of
    /// several limits has one event, for the limiter that the decision names. A request that waits
    /// by retries has one for each of its checks; one that waits for held units has none for the
    /// checks that find too few. `peek`, `spend`, `refund`, `block` and `unblock` have none.
    #[non_exhaustive]
    Decided {
        /// The decision, which names the limiter and the source.
        decision: &'a Decision,
        /// The key at that limiter; `None` if the check contained several keys of the limiter,
        /// because the decision does not name one of them.
        key: Option<&'a Key<'a>>,
        /// The time from the call to the answer of a store outside of the process; `None` if the
        /// decision was made in the memory of the process.
        duration: Option<Duration>,
    },
    /// A request began to wait for quota.
    #[non_exhaustive]
    WaitBegan {
        /// The name of the limiter.
        limiter: &'a str,
    },
    /// A request ended its wait: it proceeds, was denied, or was dropped.
    #[non_exhaustive]
    WaitEnded {
        /// The name of the limiter, as when the wait began.
        limiter: &'a str,
        /// The length of the wait.
        duration: Duration,
    },
    /// Units that a request has spent, reserved or held are returned: it was dropped before it
    /// proceeded.
    #[non_exhaustive]
    Released {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The number of units. A bucket returns only those that it has not refilled since.
        units: u64,
    },
    /// Units are [held](crate::Limiter::hold) from now on, until [`HoldEnded`](Event::HoldEnded).
    #[non_exhaustive]
    HoldBegan {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The number of units.
        held: u64,
    },
    /// Units are not held any more: their [`Permit`](crate::Permit) was settled, cancelled or
    /// dropped.
    #[non_exhaustive]
    HoldEnded {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The number of units that were held.
        held: u64,
        /// The number of units that were used. It is `held` if the permit was dropped.
        used: u64,
    },
    /// Units are not held any more although their permit lives: no renewal reached the store within
    /// the [lifetime](crate::Limiter::hold_lifetime) of the hold. They count as used; those of a
    /// [limit on concurrency](crate::Algorithm::Concurrency) are available to other requests. The
    /// request may exceed the limit from then on.
    #[non_exhaustive]
    HoldExpired {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The number of units.
        held: u64,
    },
    /// The store has lost units that are held: the key was [reset](crate::Limiter::reset), or a
    /// server has lost its memory. A renewal holds them again; an end spends what was used.
    #[non_exhaustive]
    HoldLost {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The number of units.
        held: u64,
    },
    /// All units of an ended permit count as used, instead of those that were. Its end did not
    /// reach the store before the hold expired, or before the store was dropped. Or the reply was
    /// lost, too many ends were waiting for the store, or another version has written the state of
    /// the key. Until the hold expires, the units stay held. If the store executed an end whose
    /// reply was lost, the unused units are returned all the same. Units that count [at a
    /// time](crate::Algorithm::Concurrency) are only held for too long.
    #[non_exhaustive]
    HoldUnsettled {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The number of units that were held.
        held: u64,
        /// The number of units that were used.
        used: u64,
    },
    /// Redis has decided about a check, a hold or a peek otherwise than this process has computed
    /// from the state of the key. What Redis has decided applies: the decision has a `remaining` of
    /// 0, and no time to retry. It happens only by a mistake in this crate, or if another program
    /// has changed the script. If Redis has admitted a request that holds units or waits, its check
    /// fails with [`ErrorKind::Different`](crate::store::ErrorKind::Different), and its units count
    /// until they expire.
    #[non_exhaustive]
    DecisionDiffered {
        /// The name of the limiter; of several limiters, of one whose decision differs.
        limiter: &'a str,
        /// The name of the key in Redis.
        key: &'a str,
        /// Whether Redis has admitted the request.
        admitted: bool,
    },
    /// A call of the store failed. If the [failure policy](crate::FailurePolicy) lets the request
    /// proceed, or decides in memory, [`Decided`](Event::Decided) follows.
    #[non_exhaustive]
    StoreFailed {
        /// The name of the limiter; of several limiters, of the first.
        limiter: &'a str,
        /// The operation that failed, as in a label: `check`, `peek`, `spend`, `refund`, `reset`,
        /// `block` or `unblock`. A hold is a `check`.
        operation: &'static str,
        /// The error, with its sources and its [kind](StoreError::kind).
        error: &'a StoreError,
    },
    /// This process [blocked](crate::Limiter::block) a key. There is no event if the call failed,
    /// or if its future was dropped before the answer.
    #[non_exhaustive]
    Blocked {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
        /// The length of the block. If an earlier one lasts longer, that one stays.
        duration: Duration,
    },
    /// This process ended the block of a key by [`unblock`](crate::Limiter::unblock), if there was
    /// one. Failures are as for [`Blocked`](Event::Blocked).
    #[non_exhaustive]
    Unblocked {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
    },
    /// This process [deleted](crate::Limiter::reset) the state of a key. Failures are as for
    /// [`Blocked`](Event::Blocked).
    #[non_exhaustive]
    Reset {
        /// The name of the limiter.
        limiter: &'a str,
        /// The key.
        key: &'a Key<'a>,
    },
    /// A limiter got another quota or algorithm: by [`set_quota`](crate::Limiter::set_quota) or by
    /// a reload. There is no event if the settings stay the same.
    #[non_exhaustive]
    SettingsChanged {
        /// The name of the limiter.
        limiter: &'a str,
        /// The algorithm and the quota before.
        from: (Algorithm, Quota),
        /// The algorithm and the quota from now on.
        to: (Algorithm, Quota),
    },
    /// The limits of a configuration were reloaded, or rejected. The change of each limiter is a
    /// [`SettingsChanged`](Event::SettingsChanged).
    #[non_exhaustive]
    Reloaded {
        /// The reason for which the limits stay as they were; `None` if the new ones apply.
        error: Option<&'a ConfigError>,
    },
    /// A layer rejected a request. There is no event in a [dry
    /// run](crate::RateLimitLayer::dry_run).
    #[non_exhaustive]
    Rejected {
        /// The reason, as in a label:
        ///
        /// | reason | the request |
        /// |---|---|
        /// | `denied` | exceeds the quota, or its key is [blocked](crate::Limiter::block) |
        /// | `cost_above_quota` | costs more than the quota can ever grant |
        /// | `missing_key` | has no key, whatever the status of the rejection |
        /// | `invalid` | is invalid |
        /// | `forbidden` | is forbidden, by a list or a rule |
        /// | `misconfigured` | cannot be counted, because the service is misconfigured |
        /// | `store` | is not decided, because the store failed |
        reason: &'static str,
        /// The name of the limiter that denied the request, or whose quota is below its cost.
        limiter: Option<&'a str>,
        /// The error in the request, or the mistake of a misconfigured service and what to do.
        error: Option<&'a str>,
    },
    /// The number of keys in a [`MemoryStore`](crate::MemoryStore) has changed. If threads change
    /// the number at the same time, the last event can contain an earlier number.
    #[non_exhaustive]
    KeysHeld {
        /// The number of keys.
        keys: usize,
        /// The maximum.
        max_keys: usize,
    },
    /// A call with checks of one limiter is sent to Redis.
    #[non_exhaustive]
    BatchSent {
        /// The name of the limiter.
        limiter: &'a str,
        /// The number of checks in the call, at least 1.
        checks: usize,
    },
    /// The circuit breaker of a Redis server was opened or closed. The state when the observer is
    /// added is reported, too.
    #[non_exhaustive]
    BreakerChanged {
        /// The address of the server, or the name of the master behind Sentinels; empty for a
        /// connection of the application.
        server: &'a str,
        /// True if the breaker is open: the server does not answer, and calls fail immediately.
        is_open: bool,
    },
}

impl<'a> Event<'a> {
    /// Returns the name of the limiter. [`Reloaded`](Event::Reloaded),
    /// [`KeysHeld`](Event::KeysHeld) and [`BreakerChanged`](Event::BreakerChanged) have none, and
    /// [`Rejected`](Event::Rejected) has one for some reasons.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::{MemoryStore, observe::Event};
    ///
    /// let names = |event: &Event<'_>| println!("{}", event.limiter().unwrap_or("no limiter"));
    /// MemoryStore::new().add_observer(Arc::new(names));
    /// ```
    #[must_use]
    pub fn limiter(&self) -> Option<&'a str> {
        match *self {
            Self::Decided { decision, .. } => Some(decision.limiter()),
            Self::WaitBegan { limiter }
            | Self::WaitEnded { limiter, .. }
            | Self::Released { limiter, .. }
            | Self::HoldBegan { limiter, .. }
            | Self::HoldEnded { limiter, .. }
            | Self::HoldExpired { limiter, .. }
            | Self::HoldLost { limiter, .. }
            | Self::HoldUnsettled { limiter, .. }
            | Self::DecisionDiffered { limiter, .. }
            | Self::StoreFailed { limiter, .. }
            | Self::Blocked { limiter, .. }
            | Self::Unblocked { limiter, .. }
            | Self::Reset { limiter, .. }
            | Self::SettingsChanged { limiter, .. }
            | Self::BatchSent { limiter, .. } => Some(limiter),
            Self::Rejected { limiter, .. } => limiter,
            Self::Reloaded { .. } | Self::KeysHeld { .. } | Self::BreakerChanged { .. } => None,
        }
    }
}
