//! `Decision`: the result of a check; and `Outcome`: a decision with the receipts of the units that
//! the request has taken. They know no store. The state of a key, without a decision, is in
//! `decision/key_state.rs`.

mod key_state;
mod limit;
#[cfg(feature = "serde")]
mod ser;

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

pub use self::key_state::KeyState;
pub(crate) use self::limit::Limit;

use crate::{
    algorithm::{Action, EngineReply, HoldReceipt, Kind, PerLimit},
    quota::Quota,
};

/// The wait of a denied request if it is unknown: that of an infinite wait of the engine.
const UNKNOWN: u64 = i64::MAX as u64;

/// The result of a check: whether the request is allowed, and the state of its key afterwards.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let quota = Quota::per_second(2);
/// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
///
/// let first = limiter.check("alice").await?;
/// assert!(first.is_allowed());
/// assert_eq!(first.remaining(), 1);
/// assert_eq!(first.reset_after(), Duration::from_millis(500));
///
/// limiter.check("alice").await?;
/// let third = limiter.check("alice").await?;
/// assert!(!third.is_allowed());
/// assert_eq!(third.retry_after(), Some(Duration::from_millis(500)));
/// assert_eq!(third.to_string(), r#"denied by "api" (2/s): 0 left, retry after 500ms"#);
/// # Ok(())
/// # }
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | know whether the request may proceed | [`is_allowed`](Decision::is_allowed), after its [`delay`](Decision::delay) |
/// | say when to try again | [`retry_after`](Decision::retry_after), [`retry_after_secs`](Decision::retry_after_secs) |
/// | say what is left | [`remaining`](Decision::remaining), [`reset_after`](Decision::reset_after) |
/// | name the limit | [`limiter`](Decision::limiter), [`quota`](Decision::quota) |
/// | know who decided | [`source`](Decision::source) |
/// | answer over HTTP | [`headers`](Decision::headers) |
/// | log it | `{}` for a line, `{:?}` for all fields |
///
/// # Details
///
/// With [`extensions`](crate::RateLimitLayer::extensions), a layer inserts it into the extensions
/// of the request and of the response. With the feature `serde`, it is
/// [serialized](crate::guide::configuration#results-as-json), with times in milliseconds.
#[derive(Clone, PartialEq, Eq, Hash)]
#[must_use = "a denied request must not proceed"]
pub struct Decision {
    // Not a `Policy` and an `EngineReply`, which would take more memory. Times are in microseconds.
    limit: &'static Limit,
    cost: u64,
    /// The delay of an allowed request; the time until a denied one would be allowed, or
    /// [`UNKNOWN`].
    wait: u64,
    remaining: u64,
    replenish: u64,
    reset: u64,
    /// The time since the store decided. An hour is enough: no call takes longer.
    age: u32,
    // Not two fields of a byte: a copy by 16 bytes waits until single bytes are written.
    status: Status,
    /// What few decisions say.
    rare: Option<Arc<Rare>>,
}

/// The source of a decision, times 2, and 1 if the request is allowed. From the bit `LIMIT_BIT` on,
/// the index of the limit that binds.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Status(u32);

const LIMIT_BIT: u32 = 8;

/// The parts of a decision that most decisions do not have: they take no time to copy then.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Rare {
    /// The time until the block of the key ends; 0 without one.
    blocked: u64,
    /// The units of the key that are held.
    held: u64,
    /// The quota, if it is not that of `limit`.
    quota: Option<Quota>,
    /// What is left of each of several limits.
    counts: Box<[Count]>,
}

/// What is left of one of several limits, after a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Count {
    pub(crate) limiter: &'static str,
    pub(crate) remaining: u64,
    replenish: u64,
}

impl Count {
    pub(crate) fn new(limiter: &'static str, reply: &EngineReply) -> Self {
        let EngineReply { remaining, replenish, .. } = *reply;
        Self { limiter, remaining: remaining as u64, replenish: replenish as u64 }
    }

    pub(crate) const fn replenish_after(&self) -> Duration {
        Duration::from_micros(self.replenish)
    }
}

/// The limit that a request is checked against.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Policy<'a> {
    pub(crate) limit: &'static Limit,
    /// `None` for a limiter in a foreign format.
    pub(crate) algorithm: Option<Kind>,
    /// The quota, if it is not that of `limit`.
    pub(crate) own_quota: Option<&'a Quota>,
    pub(crate) cost: u64,
    pub(crate) source: Source,
}

/// The origin of a decision.
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, store::Source};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// match limiter.check("alice").await?.source() {
///     Source::Store | Source::Cached => {} // exact
///     Source::Local => println!("Redis does not answer; this process counts"),
///     _ => println!("not counted"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Source {
    /// The limiter's store.
    Store,
    /// A denial by the limiter's store that the process remembers: see
    /// [`RedisConfig::denial_ttl`](crate::store::RedisConfig::denial_ttl). Its times are reduced by
    /// the time since the denial, and [`remaining`](Decision::remaining) is that of the last denial
    /// of the key. [`retry_after`](Decision::retry_after) is exact for a check of the same cost,
    /// wait and limits as one that was denied; for others it is a lower bound.
    Cached,
    /// A store in memory with a fraction of the quota, because the limiter's store failed:
    /// [`FailurePolicy::Local`](crate::FailurePolicy::Local).
    Local,
    /// No store, because it failed: the request proceeds under
    /// [`FailurePolicy::Open`](crate::FailurePolicy::Open). Remaining units and times are 0.
    Open,
}

impl Source {
    /// In the order of the variants.
    pub(crate) const ALL: [Self; 4] = [Self::Store, Self::Cached, Self::Local, Self::Open];

    /// Returns the name, as in a label: `store`, `cached`, `local` or `open`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::store::Source;
    ///
    /// assert_eq!(Source::Cached.as_str(), "cached");
    /// ```
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Cached => "cached",
            Self::Local => "local",
            Self::Open => "open",
        }
    }
}

/// Writes the name, as in a label.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl Status {
    #[inline]
    const fn new(source: Source, is_allowed: bool) -> Self {
        Self((source as u32) << 1 | is_allowed as u32)
    }
}

impl Rare {
    #[cold]
    fn new(blocked: i64, held: i64, quota: Option<&Quota>) -> Option<Arc<Self>> {
        let (blocked, held, quota) = (blocked as u64, held as u64, quota.copied());
        Self { blocked, held, quota, counts: Box::default() }.shared()
    }

    /// Equal decisions have equal parts: there is none that says nothing.
    fn shared(self) -> Option<Arc<Self>> {
        (self != Self::default()).then(|| Arc::new(self))
    }
}

impl Decision {
    #[inline(always)]
    pub(crate) fn new(limit: Policy<'_>, reply: EngineReply, age: f64) -> Self {
        let Policy { limit, own_quota: quota, cost, source, .. } = limit;
        let EngineReply { admitted, wait, remaining, replenish, reset, blocked, hold, .. } = reply;
        // Only a denied request, which may wait for holds to end, and calls other than a hold ask.
        let held = if hold.is_some() { 0 } else { reply.held };
        let is_rare = blocked > 0 || held > 0 || quota.is_some();
        Self {
            limit,
            cost,
            wait: wait.map_or(UNKNOWN, |wait| wait as u64),
            remaining: remaining as u64,
            replenish: replenish as u64,
            reset: reset as u64,
            age: age as u32,
            status: Status::new(source, admitted),
            rare: if is_rare { Rare::new(blocked, held, quota) } else { None },
        }
    }

    /// Returns the decision of a request that proceeds uncounted, because the store did not decide.
    pub(crate) fn uncounted(limit: Policy<'_>) -> Self {
        let limit = Policy { source: Source::Open, ..limit };
        Self::new(limit, EngineReply::uncounted(0), 0.0)
    }

    /// Returns a denial of a request of this cost and wait, which describes its key as this
    /// decision does, after `age`. The times are in microseconds.
    #[cfg(feature = "redis")]
    pub(crate) fn remembered(&self, age: u64, cost: u64, wait: u64) -> Self {
        Self {
            cost,
            status: Status::new(Source::Cached, self.is_allowed()),
            wait,
            replenish: self.replenish.saturating_sub(age),
            reset: self.reset.saturating_sub(age),
            rare: self.rare.as_ref().and_then(|rare| {
                let blocked = rare.blocked.saturating_sub(age);
                Rare { blocked, ..(**rare).clone() }.shared()
            }),
            ..self.clone()
        }
    }

    /// Returns the decision as that of a request to several limits, of which this one binds.
    pub(crate) fn of_limit(mut self, index: usize) -> Self {
        self.status.0 = self.status.0 & ((1 << LIMIT_BIT) - 1) | (index as u32) << LIMIT_BIT;
        self
    }

    /// Returns the index of the limit that binds, in the order of the request.
    pub(crate) const fn limit_index(&self) -> usize {
        (self.status.0 >> LIMIT_BIT) as usize
    }

    /// Returns the denial of a request that others have kept from a check: units may be left.
    pub(crate) fn out_of_line(mut self) -> Self {
        if self.is_allowed() {
            (self.status.0, self.wait) = (self.status.0 & !1, UNKNOWN);
        }
        self
    }

    pub(crate) fn proceeds_immediately(&self) -> bool {
        self.is_allowed() && self.wait == 0
    }

    /// Returns the time since the store decided.
    pub(crate) const fn age(&self) -> Duration {
        Duration::from_micros(self.age as u64)
    }

    /// Returns the rest of the delay.
    pub(crate) const fn remaining_delay(&self) -> Duration {
        self.delay().saturating_sub(self.age())
    }

    /// Returns whether the request may proceed, after [`delay`](Decision::delay).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let decision = limiter.check("alice").await?;
    /// if decision.is_allowed() {
    ///     println!("{} more", decision.remaining());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.status.0 & 1 == 1
    }

    /// Returns whether the key is [blocked](crate::Limiter::block). A request that may wait for the
    /// end of the block is allowed, with a [`delay`](Decision::delay).
    ///
    /// If another limit of the request binds, this is false.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.block("mallory", Duration::from_secs(600)).await?;
    /// let decision = limiter.check("mallory").await?;
    /// assert!(decision.is_blocked() && !decision.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        !self.block_rest().is_zero()
    }

    /// Returns the time until the block of the key ends, counted from the decision; `None` without
    /// a block. For a request that may wait, [`retry_after`](Decision::retry_after) is shorter: the
    /// time after which the request may wait for the end.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.block("mallory", Duration::from_secs(600)).await?;
    /// let decision = limiter.check("mallory").await?;
    /// assert_eq!(decision.blocked_for(), Some(Duration::from_secs(600)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn blocked_for(&self) -> Option<Duration> {
        Some(self.block_rest()).filter(|rest| !rest.is_zero())
    }

    /// Returns the time until the block of the key ends.
    pub(crate) fn block_rest(&self) -> Duration {
        Duration::from_micros(self.rare.as_ref().map_or(0, |rare| rare.blocked))
    }

    /// Returns the time after which an allowed request may proceed.
    ///
    /// It is zero, except with a leaky bucket, or if the check allows a wait.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// let queue = Limiter::new("queue", MemoryStore::new(), Algorithm::leaky_bucket(), quota);
    /// assert!(queue.check("alice").await?.delay().is_zero());
    /// assert_eq!(queue.check("alice").await?.delay(), Duration::from_secs(1_200));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn delay(&self) -> Duration {
        if self.is_allowed() { Duration::from_micros(self.wait) } else { Duration::ZERO }
    }

    /// Returns the time after which the same request is allowed, if no other request spends units
    /// before. Exact to the microsecond. If a key is [blocked](crate::Limiter::block), it is a
    /// lower bound: the decision then describes the block, and not the count.
    ///
    /// It is `None` if the request is allowed, or if the time is unknown, because units that are
    /// [held](crate::Limiter::hold) have to be returned first. So ask
    /// [`is_allowed`](Decision::is_allowed), not this method, whether the request may proceed.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// for _ in 0..3 {
    ///     assert_eq!(limiter.check("alice").await?.retry_after(), None); // allowed
    /// }
    /// let denied = limiter.check("alice").await?;
    /// assert_eq!(denied.retry_after(), Some(Duration::from_secs(3_600)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        if self.is_allowed() || self.wait == UNKNOWN {
            None
        } else {
            Some(Duration::from_micros(self.wait))
        }
    }

    /// Delays the retry-after of a denial, or the end of its block, by a part of it.
    pub(crate) fn delay_retry(&mut self, part: f64) {
        if let Some(time) = self.retry_after().max(self.blocked_for()) {
            let micros = time.as_micros() as f64 * (1.0 + part);
            self.wait = (micros as u64).min(UNKNOWN - 1);
        }
    }

    /// Changes the delay of an allowed request, which has exchanged its instant for another one.
    pub(crate) fn move_delay(&mut self, from: Instant, to: Instant) {
        let micros = |from, to: Instant| to.saturating_duration_since(from).as_micros() as u64;
        self.wait = (self.wait + micros(from, to)).saturating_sub(micros(to, from));
    }

    /// Returns whether the request was denied until units that are held are returned.
    pub(crate) const fn waits_for_holds(&self) -> bool {
        !self.is_allowed() && self.wait == UNKNOWN
    }

    /// Returns the units of the key that are held.
    pub(crate) fn held(&self) -> u64 {
        self.rare.as_ref().map_or(0, |rare| rare.held)
    }

    /// Returns [`retry_after`](Decision::retry_after) in whole seconds, as the header `Retry-After`
    /// contains it: rounded up, and at least 1.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").cost(3).await?;
    /// let denied = limiter.check("alice").await?;
    /// assert_eq!(denied.retry_after_secs(), Some(3_600));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn retry_after_secs(&self) -> Option<u64> {
        match self.retry_after() {
            Some(time) => Some(whole_seconds(time)),
            None => None,
        }
    }

    /// Returns the number of requests of cost 1 that would be allowed now, after this decision.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.check("alice").await?.remaining(), 2);
    /// assert_eq!(limiter.check("alice").cost(2).await?.remaining(), 0);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Returns the time until [`remaining`](Decision::remaining) grows; zero if it is at its
    /// maximum.
    ///
    /// It counts from the decision, and not from the end of the delay. So does
    /// [`reset_after`](Decision::reset_after).
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let decision = limiter.check("alice").await?;
    /// assert_eq!(decision.replenish_after(), Duration::from_secs(3_600));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn replenish_after(&self) -> Duration {
        Duration::from_micros(self.replenish)
    }

    /// Returns the time until the key is in its initial state. While units are held, this is the
    /// time if all holds end now, and all of their units are used. Of a limit on concurrency, it is
    /// zero. A denial by a block reports the time until the block ends; used units can count for
    /// longer.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let decision = limiter.check("alice").await?;
    /// assert_eq!(decision.reset_after(), Duration::from_secs(3_600));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset)
    }

    /// Returns the name of the limiter that decided; of several limiters, the one that binds.
    ///
    /// That is the limiter that denies for longest. If all of them allow the request, it is the one
    /// with the fewest units remaining, whatever its unit is, and among equals the one with the
    /// longest wait. The decision describes this limiter, except for the delay, which is that of
    /// the request.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.check("alice").await?.limiter(), "api");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn limiter(&self) -> &'static str {
        self.limit.name
    }

    /// Returns the quota that the request was checked against.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.check("alice").await?.quota(), Quota::per_hour(3));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.rare.as_ref().and_then(|rare| rare.quota).unwrap_or(self.limit.quota)
    }

    /// Returns the origin of the decision.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, store::Source};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let decision = limiter.check("alice").await?;
    /// assert_eq!(decision.source(), Source::Store); // and not a policy in its place
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn source(&self) -> Source {
        Source::ALL[(self.status.0 >> 1 & 3) as usize]
    }

    /// Sets what is left of all limits, if there are several.
    pub(crate) fn set_counts(&mut self, counts: Vec<Count>) {
        if counts.len() > 1 {
            Arc::make_mut(self.rare.get_or_insert_default()).counts = counts.into();
        }
    }

    /// Forgets what is left of the other limits.
    pub(crate) fn without_counts(mut self) -> Self {
        if let Some(rare) = self.rare.take() {
            self.rare = Rare { counts: Box::default(), ..*rare }.shared();
        }
        self
    }

    /// Returns what is left of each limit of the request. A remembered denial knows the limit that
    /// has denied.
    pub(crate) fn counts(&self) -> impl Iterator<Item = Count> {
        let Self { limit: Limit { name: limiter, .. }, remaining, replenish, .. } = *self;
        let all = self.rare.as_ref().map_or(&[][..], |rare| &rare.counts);
        let own = all.is_empty().then_some(Count { limiter, remaining, replenish });
        all.iter().copied().chain(own)
    }

    /// Returns the cost of the request.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// assert_eq!(limiter.check("alice").cost(2).await?.cost(), 2);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn cost(&self) -> u64 {
        self.cost
    }
}

/// Writes a line for a log or a terminal, such as `allowed by "api" (5/min): 4 left`. Times are
/// rounded up: to whole milliseconds below 10 seconds, to whole seconds from there.
impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_allowed() { "allowed" } else { "denied" };
        write!(f, "{verdict} by {:?} ({}): ", self.limiter(), self.quota())?;
        if self.source() == Source::Open {
            return f.write_str("not counted, because the store failed");
        }
        write!(f, "{} left", self.remaining())?;
        let blocked = if self.is_blocked() { ", the key is blocked" } else { "" };
        match self.retry_after() {
            Some(time) => write!(f, "{blocked}, retry after {:?}", rounded(time)),
            None if !self.is_allowed() => write!(f, "{blocked}, the time to retry is unknown"),
            None if self.delay().is_zero() => Ok(()),
            None => write!(f, "{blocked}, proceeds after {:?}", rounded(self.delay())),
        }
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision")
            .field("is_allowed", &self.is_allowed())
            .field("delay", &self.delay())
            .field("retry_after", &self.retry_after())
            .field("is_blocked", &self.is_blocked())
            .field("remaining", &self.remaining())
            .field("replenish_after", &self.replenish_after())
            .field("reset_after", &self.reset_after())
            .field("limiter", &self.limiter())
            .field("quota", &self.quota())
            .field("cost", &self.cost())
            .field("source", &self.source())
            .finish()
    }
}

/// Rounds up a time for people: to whole milliseconds below 10 seconds, else to whole seconds.
const fn rounded(time: Duration) -> Duration {
    let unit = if time.as_secs() < 10 { 1_000 } else { 1_000_000 };
    Duration::from_micros((time.as_micros() as u64).div_ceil(unit) * unit)
}

/// Rounds up, to at least 1: a client that retries immediately would be denied again.
pub(crate) const fn whole_seconds(time: Duration) -> u64 {
    let seconds = time.as_secs() + (time.subsec_nanos() > 0) as u64;
    if seconds == 0 { 1 } else { seconds }
}

/// A decision, and the evidence of the units that the request has taken.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub(crate) decision: Decision,
    pub(crate) receipts: Receipts,
}

/// The receipts of all limits of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipts {
    /// The receipt of each limit, if they do not differ.
    shared: Receipt,
    /// The algorithms of the first four limits, if the receipts differ in nothing else.
    algorithms: [Option<Kind>; 4],
    /// Behind a thin pointer, as every outcome carries it.
    each: Option<Box<PerLimit<Receipt>>>,
}

/// The evidence by which a store finds the units that a request has taken of one limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Receipt {
    /// Nothing was taken.
    None,
    /// The instant at which the request proceeds, in microseconds by the clock of the store, and
    /// the algorithm. Another algorithm has not counted the request, and must return nothing.
    At(u64, Kind),
    /// The id of an acquire in the log of a foreign limiter.
    Id(u64),
    /// The units are held, by this algorithm.
    Hold(HoldReceipt, Kind),
}

impl Outcome {
    /// Returns the outcome of a request to one limit.
    #[inline(always)]
    pub(crate) fn new(limit: Policy<'_>, reply: EngineReply, action: Action, age: f64) -> Self {
        let receipt = Receipt::new(limit.algorithm, &reply, action);
        Self { decision: Decision::new(limit, reply, age), receipts: Receipts::shared(receipt) }
    }

    /// Returns the outcome of a request to several limits, from the reply of each of them.
    /// `binding` is the index of the limit that binds. With `counts`, the decision says what is
    /// left of each limit.
    #[inline(always)]
    pub(crate) fn of_several<'a>(
        limits: impl Iterator<Item = Policy<'a>> + Clone,
        replies: &[EngineReply],
        binding: usize,
        counts: bool,
        action: Action,
        age: f64,
    ) -> Self {
        let receipt =
            |(limit, reply): (Policy<'_>, _)| Receipt::new(limit.algorithm, reply, action);
        let receipts = limits.clone().zip(replies).map(receipt).collect();
        let limit = limits.clone().nth(binding).expect("a limit binds");
        let decision = Decision::new(limit, replies[binding], age).of_limit(binding);
        if !counts {
            return Self { decision, receipts };
        }
        let count = |(limit, reply): (Policy<'_>, &_)| Count::new(limit.limit.name, reply);
        let mut decision = decision;
        decision.set_counts(limits.zip(replies).map(count).collect());
        Self { decision, receipts }
    }

    /// Returns the outcome of a request that has taken nothing.
    pub(crate) fn of_nothing(decision: Decision) -> Self {
        Self { decision, receipts: Receipts::NONE }
    }
}

impl Receipt {
    #[inline]
    fn new(algorithm: Option<Kind>, reply: &EngineReply, action: Action) -> Self {
        match (algorithm, reply.hold) {
            _ if !reply.admitted => Self::None,
            (Some(algorithm), Some(hold)) => Self::Hold(hold, algorithm),
            (Some(algorithm), None) if action.commits() => {
                Self::At(reply.instant as u64, algorithm)
            }
            _ => Self::None,
        }
    }
}

impl Receipts {
    pub(crate) const NONE: Self = Self::shared(Receipt::None);

    /// Returns the receipts of a request that has the same one for each limit.
    #[inline]
    pub(crate) const fn shared(receipt: Receipt) -> Self {
        Self { shared: receipt, algorithms: [None; 4], each: None }
    }

    /// Returns whether a request may hold units.
    #[inline]
    pub(crate) fn may_hold(&self) -> bool {
        self.each.is_some() || matches!(self.shared, Receipt::Hold(..))
    }

    /// Forgets the holds, which are kept elsewhere.
    pub(crate) fn remove_holds(&mut self) {
        let each = self.each.iter_mut().flat_map(|each| each.iter_mut());
        let holds = each.chain([&mut self.shared]).filter(|it| matches!(it, Receipt::Hold(..)));
        holds.for_each(|receipt| *receipt = Receipt::None);
    }

    /// Returns the receipt of one limit, by its index in the request.
    pub(crate) fn get(&self, limit: usize) -> Receipt {
        let algorithm = self.algorithms.get(limit).copied().flatten();
        match (&self.each, self.shared, algorithm) {
            (Some(each), ..) => each[limit],
            (None, Receipt::At(instant, _), Some(algorithm)) => Receipt::At(instant, algorithm),
            (None, shared, _) => shared,
        }
    }
}

/// The receipts of limits, in the order of the request.
/// Most have the same one, or differ in their algorithms: no allocation.
impl FromIterator<Receipt> for Receipts {
    #[inline(always)]
    fn from_iter<I: IntoIterator<Item = Receipt>>(each: I) -> Self {
        let mut rest = each.into_iter();
        let Some(shared) = rest.next() else { return Self::NONE };
        let (mut algorithms, mut index) = ([None; 4], 0);
        while let Some(receipt) = rest.next() {
            index += 1;
            match (shared, receipt, algorithms.get_mut(index)) {
                (Receipt::At(same, _), Receipt::At(instant, kind), Some(algorithm))
                    if instant == same =>
                {
                    *algorithm = Some(kind);
                }
                _ if shared == receipt => {}
                _ => {
                    let before = Self { shared, algorithms, each: None };
                    let before = (0..index).map(|limit| before.get(limit));
                    let each = before.chain([receipt]).chain(rest).collect();
                    return Self { each: Some(Box::new(each)), ..Self::NONE };
                }
            }
        }
        Self { shared, algorithms, each: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_has_its_quota_even_if_the_process_knows_too_many() {
        let quotas = [1, 2, 3].map(Quota::per_second);
        let limit = Limit::of("many quotas", quotas[0]);
        let decide = |quota: Quota| {
            let (algorithm, source) = (None, Source::Store);
            let policy =
                Policy { limit, algorithm, own_quota: limit.other(&quota), cost: 1, source };
            Decision::new(policy, EngineReply::uncounted(0), 0.0)
        };
        assert_eq!(quotas.map(|quota| decide(quota).quota()), quotas);
        assert_ne!(decide(quotas[0]), decide(quotas[1]));
        assert_eq!(decide(quotas[1]).without_counts(), decide(quotas[1]));
    }

    #[test]
    fn a_decision_stays_small() {
        // A decision in memory is copied several times.
        assert_eq!(size_of::<Decision>(), 64);
        assert!(size_of::<Outcome>() <= 128, "a larger one is copied by a call of `memcpy`");
    }

    #[test]
    fn each_limit_has_its_receipt_and_four_that_differ_in_the_algorithm_take_no_allocation() {
        let [bucket, window] =
            [Kind::TokenBucket, Kind::FixedWindow].map(|kind| Receipt::At(7, kind));
        let later = Receipt::At(8, Kind::TokenBucket);
        for (all, is_inline) in [
            (&[bucket, bucket][..], true),
            (&[bucket; 5], true),
            (&[bucket, window, window, bucket], true),
            (&[bucket, window, window, bucket, window], false),
            (&[bucket, later], false),
            (&[Receipt::None, bucket], false),
        ] {
            let receipts: Receipts = all.iter().copied().collect();
            assert_eq!(receipts.each.is_none(), is_inline, "{all:?}");
            let found: Vec<_> = (0..all.len()).map(|limit| receipts.get(limit)).collect();
            assert_eq!(found, all);
        }
    }
}
