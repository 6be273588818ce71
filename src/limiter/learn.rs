//! Learning from a vendor: adopts what its response says about its limit. It knows no headers:
//! `middleware/vendor.rs` reads them.

use std::{fmt, time::Duration};

use super::{backoff::FIRST_BLOCK, charge::Charge, handle::Limiter, version::MaxWait};
use crate::{
    algorithm::{self, Action},
    decision::KeyState,
    error::Error,
    keys::Key,
    store::{Reporting, StoreRequest, Task},
};

/// The longest block, if no setting changes it, whatever a vendor says.
const DEFAULT_MAX_BLOCK: Duration = Duration::from_secs(3_600);

/// The state of a vendor's limit, as its response describes it: the units that remain, and the time
/// for which it rejects requests. [`Limiter::learn`] and
/// [`RateLimitLayer::learn`](crate::RateLimitLayer::learn) adopt it.
///
/// The default says nothing.
///
/// # Examples
///
/// ```
/// # use std::time::Duration;
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, VendorState};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let rejected = VendorState::default().with_block(Duration::from_secs(30));
/// limiter.learn("vendor", rejected).await?;
/// assert!(limiter.check("vendor").await?.is_blocked());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "it does nothing until a limiter learns it"]
pub struct VendorState {
    remaining: Option<u64>,
    blocked_for: Option<Duration>,
    /// Whether the block is the first one of an unknown length.
    is_unknown: bool,
    max_block: Duration,
    /// Whether the vendor has accepted the request, if a response says so.
    accepts: Option<bool>,
    resource: Option<Resource>,
}

/// The name of a resource, in place, so that the state is copied like a number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Resource {
    bytes: [u8; 40],
    length: usize,
}

impl Resource {
    fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; 40];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        Some(Self { bytes, length: name.len() })
    }

    fn name(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name().fmt(f)
    }
}

impl Default for VendorState {
    fn default() -> Self {
        Self {
            remaining: None,
            blocked_for: None,
            is_unknown: false,
            max_block: DEFAULT_MAX_BLOCK,
            accepts: None,
            resource: None,
        }
    }
}

impl VendorState {
    /// Creates the state of a response that rejects nothing.
    pub(crate) fn of_response(accepts: bool, remaining: Option<u64>) -> Self {
        Self { accepts: Some(accepts), remaining, ..Self::default() }
    }

    /// Sets the number of units that remain.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, VendorState};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.learn("vendor", VendorState::default().with_remaining(1)).await?;
    /// assert_eq!(limiter.peek("vendor").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub const fn with_remaining(mut self, units: u64) -> Self {
        self.remaining = Some(units);
        self
    }

    /// Sets the time for which the vendor rejects requests.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::VendorState;
    ///
    /// let state = VendorState::default().with_block(Duration::from_secs(30));
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(30)));
    /// ```
    pub const fn with_block(mut self, duration: Duration) -> Self {
        (self.blocked_for, self.is_unknown) = (Some(duration), false);
        self
    }

    /// Says that the vendor rejects requests, for an unknown time. The key is blocked for a second,
    /// and after each further rejection for twice as long, up to a minute, until the vendor accepts
    /// a request, or has rejected none for ten minutes.
    ///
    /// Each process counts the rejections that it has seen, for up to 10,000 keys. The block itself
    /// holds for all processes of the store.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::VendorState;
    ///
    /// let state = VendorState::default().with_unknown_block();
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(1)));
    /// ```
    pub const fn with_unknown_block(mut self) -> Self {
        (self.blocked_for, self.is_unknown) = (Some(FIRST_BLOCK), true);
        self
    }

    /// Sets the name of the resource whose limit the response describes. A name of more than 40
    /// bytes is none.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::VendorState;
    ///
    /// let state = VendorState::default().with_resource("search");
    /// assert_eq!(state.resource(), Some("search"));
    /// ```
    pub fn with_resource(mut self, name: &str) -> Self {
        self.resource = Resource::new(name);
        self
    }

    /// Bounds the blocks that a limiter learns. The default is an hour: after it, one request finds
    /// out whether the vendor still rejects.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::VendorState;
    ///
    /// let state = VendorState::default().with_block(Duration::from_secs(86_400));
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(3_600)));
    /// let state = state.max_block(Duration::from_secs(7_200));
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(7_200)));
    /// ```
    pub const fn max_block(mut self, max: Duration) -> Self {
        self.max_block = max;
        self
    }

    /// Returns the number of units that remain, if the response says so.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::VendorState;
    ///
    /// assert_eq!(VendorState::default().remaining(), None);
    /// assert_eq!(VendorState::default().with_remaining(7).remaining(), Some(7));
    /// ```
    #[must_use]
    pub const fn remaining(&self) -> Option<u64> {
        self.remaining
    }

    /// Returns the time for which the vendor rejects requests, if the response says that it does:
    /// at most [`max_block`](Self::max_block). For an
    /// [unknown time](Self::with_unknown_block), it is the first block.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::VendorState;
    ///
    /// let state = VendorState::default().with_block(Duration::from_secs(30));
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(30)));
    /// ```
    #[must_use]
    pub fn blocked_for(&self) -> Option<Duration> {
        let time = self.blocked_for.filter(|time| !time.is_zero())?;
        Some(time.min(self.max_block))
    }

    /// Returns the resource whose limit the response describes, if it names one: GitHub does so in
    /// `x-ratelimit-resource`, and Discord in `x-ratelimit-bucket`. Each has a limit of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::VendorState;
    ///
    /// let state = VendorState::default().with_resource("core");
    /// assert_eq!(state.resource(), Some("core"));
    /// ```
    #[must_use]
    pub fn resource(&self) -> Option<&str> {
        self.resource.as_ref().map(Resource::name)
    }

    /// Forgets what the response says, if it describes the limit of another resource than this one.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, HeaderValue, StatusCode};
    /// use tower_ratelimit::VendorState;
    ///
    /// let mut headers = HeaderMap::new(); // of a response
    /// headers.insert("x-ratelimit-remaining", HeaderValue::from_static("3"));
    /// headers.insert("x-ratelimit-resource", HeaderValue::from_static("search"));
    /// let state = VendorState::from_response(StatusCode::OK, &headers);
    /// assert_eq!(state.of_resource("search").remaining(), Some(3));
    /// assert_eq!(state.of_resource("core"), VendorState::default());
    /// ```
    pub fn of_resource(self, name: &str) -> Self {
        match self.resource() {
            Some(other) if other != name => Self { max_block: self.max_block, ..Self::default() },
            _ => self,
        }
    }

    /// Returns whether the vendor has accepted a request.
    fn is_success(&self) -> bool {
        let accepts = self.accepts.unwrap_or(self.remaining > Some(0));
        accepts && self.blocked_for().is_none()
    }
}

impl Limiter {
    /// Adopts what a vendor's response says about its limit, for a key that counts requests to that
    /// vendor. Never makes more available than the quota does.
    ///
    /// - If the vendor rejects requests, the key is [blocked](Limiter::block) until it stops doing
    ///   so. Then one request finds out whether the vendor accepts requests again, and the others
    ///   follow at the rate of the quota, not as a burst: the rest of the key is reserved for the
    ///   end of the block. [`unblock`](Limiter::unblock) does not return it, but
    ///   [`reset`](Limiter::reset) does. In windows, and in buckets that are refilled at once, this
    ///   costs a window, so it is done if the block is as long as that.
    /// - Otherwise, if the vendor has fewer units left than the key, the difference is spent. The
    ///   quota restores it as usual. [Concurrency](crate::Algorithm::Concurrency) has nothing to
    ///   spend.
    ///
    /// The units are those of the limiter: if a request costs more than the vendor counts, pass a
    /// state in the units of the limiter.
    ///
    /// The difference is computed from a peek and spent by a second call. If several calls for one
    /// key overlap, each may spend a difference, but together they spend at most what is left:
    /// requests are denied too early then, never too late, and no debt arises.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the state may be adopted or not.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, HeaderValue, StatusCode};
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, VendorState};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_hour(4_800).burst(100);
    /// let github = Limiter::new("github", MemoryStore::new(), Algorithm::token_bucket(), quota);
    ///
    /// let mut headers = HeaderMap::new(); // of a response
    /// headers.insert("x-ratelimit-remaining", HeaderValue::from_static("17"));
    /// github.learn("token", VendorState::from_response(StatusCode::OK, &headers)).await?;
    /// assert_eq!(github.peek("token").await?.remaining(), 17);
    ///
    /// headers.insert("retry-after", HeaderValue::from_static("60"));
    /// let state = VendorState::from_response(StatusCode::FORBIDDEN, &headers);
    /// github.learn("token", state).await?;
    /// assert_eq!(github.peek("token").await?.blocked_for(), Some(Duration::from_secs(60)));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn learn(&self, key: impl Into<Key<'_>>, state: VendorState) -> Result<(), Error> {
        let key = key.into();
        if let Some(time) = state.blocked_for() {
            let backoff = || self.backoff().next(&key, state.max_block);
            let time = if state.is_unknown { backoff() } else { time };
            let state = self.block(&key, time).await?;
            return self.reserve_restart(&key, &state).await;
        }
        if state.is_success() {
            self.backoff().end(&key);
        }
        if let Some(remaining) = state.remaining
            && !self.only_holds()
        {
            let excess = self.peek(&key).await?.remaining().saturating_sub(remaining);
            self.take(&key, excess, MaxWait::DEFAULT).await?;
        }
        Ok(())
    }

    /// Reserves what a blocked key has at the end of its block, but for one unit. A second call
    /// finds that unit alone, so it reserves nothing.
    async fn reserve_restart(&self, key: &Key<'_>, state: &KeyState) -> Result<(), Error> {
        let (quota, Some(block)) = (self.quota(), state.blocked_for()) else { return Ok(()) };
        // The time from the end of the block until the key is in its initial state.
        let late = state.reset_after().saturating_sub(block);
        let units = algorithm::restart_units(self.algorithm(), quota, block, late);
        self.take(key, units, MaxWait::up_to(block)).await
    }

    /// Spends units if they are left, or will be within a wait. This is no request, so its decision
    /// is not reported, neither to observers nor to the log.
    async fn take(&self, key: &Key<'_>, units: u64, max_wait: MaxWait) -> Result<(), Error> {
        if units == 0 {
            return Ok(());
        }
        let answer = {
            let version = self.current();
            let units = units.min(version.max_cost);
            if let Some(error) = version.refusal(Action::Check, units) {
                return Err(error);
            }
            let max_wait = version.resolve(max_wait);
            let limit = self.request(&version, Action::Check, key, units, max_wait);
            self.store().decide(&StoreRequest::new(Action::Check, &[limit], Reporting::Nothing))
        };
        answer.await.map(drop)
    }
}

impl Charge {
    /// Adopts the state of a vendor, for a charge of one limit of this crate; `None` if there is
    /// nothing to adopt. `known` is what remained of the limit after the request: if the vendor has
    /// as much left, no call is needed. A failure of the store is reported to its observers.
    pub(crate) fn learn(&self, state: VendorState, known: u64) -> Option<Task> {
        let (limiter, key) = self.single()?;
        let is_news = state.blocked_for().is_some()
            || state.remaining.is_some_and(|remaining| remaining < known)
            || state.is_success() && limiter.backoff().can_end(key);
        if !is_news {
            return None;
        }
        let (limiter, key) = (limiter.clone(), key.clone());
        Some(Box::pin(async move { drop(limiter.learn(key, state).await) }))
    }
}
