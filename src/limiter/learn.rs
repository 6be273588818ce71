//! Learning from a vendor: adopts what its response says about its limit. It knows no headers:
//! `middleware/vendor.rs` reads them.

use std::{pin::Pin, time::Duration};

use super::{charge::Charge, handle::Limiter, max_wait::MaxWait};
use crate::{
    algorithm::Action,
    error::Error,
    keys::Key,
    store::{LimitRequest, StoreRequest},
};

/// The longest block, if no setting changes it, whatever a vendor says.
const DEFAULT_MAX_BLOCK: Duration = Duration::from_secs(3_600);

/// The state of a vendor's limit, as its response describes it: the units that remain, and the time
/// for which it rejects requests. [`Limiter::learn`] and
/// [`RateLimitLayer::learn`](crate::RateLimitLayer::learn) adopt it.
///
/// The default says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it does nothing until a limiter learns it"]
pub struct VendorState {
    remaining: Option<u64>,
    blocked_for: Option<Duration>,
    max_block: Duration,
}

impl Default for VendorState {
    fn default() -> Self {
        Self { remaining: None, blocked_for: None, max_block: DEFAULT_MAX_BLOCK }
    }
}

impl VendorState {
    /// Sets the number of units that remain.
    pub const fn with_remaining(mut self, units: u64) -> Self {
        self.remaining = Some(units);
        self
    }

    /// Sets the time for which the vendor rejects requests.
    pub const fn with_block(mut self, duration: Duration) -> Self {
        self.blocked_for = Some(duration);
        self
    }

    /// Bounds the blocks that a limiter learns. The default is an hour: after it, one request finds
    /// out whether the vendor still rejects.
    pub const fn max_block(mut self, max: Duration) -> Self {
        self.max_block = max;
        self
    }

    /// Returns the number of units that remain, if the response says so.
    #[must_use]
    pub const fn remaining(&self) -> Option<u64> {
        self.remaining
    }

    /// Returns the time for which the vendor rejects requests, if the response says that it does:
    /// at most [`max_block`](Self::max_block).
    #[must_use]
    pub fn blocked_for(&self) -> Option<Duration> {
        let time = self.blocked_for.filter(|time| !time.is_zero())?;
        Some(time.min(self.max_block))
    }
}

impl Limiter {
    /// Adopts what a vendor's response says about its limit, for a key that counts requests to that
    /// vendor. Never makes more available than the quota does.
    ///
    /// - If the vendor rejects requests, the key is [blocked](Limiter::block) until it stops doing
    ///   so.
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
    /// use http::{HeaderMap, StatusCode};
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, http::VendorState};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_hour(4_800).burst(100);
    /// let github = Limiter::new("github", MemoryStore::new(), Algorithm::token_bucket(), quota);
    ///
    /// let mut headers = HeaderMap::new(); // of a response
    /// headers.insert("x-ratelimit-remaining", "17".parse().unwrap());
    /// github.learn("token", VendorState::from_response(StatusCode::OK, &headers)).await?;
    /// assert_eq!(github.peek("token").await?.remaining(), 17);
    ///
    /// headers.insert("retry-after", "60".parse().unwrap());
    /// let state = VendorState::from_response(StatusCode::FORBIDDEN, &headers);
    /// github.learn("token", state).await?;
    /// assert_eq!(github.peek("token").await?.blocked_for(), Some(Duration::from_secs(60)));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn learn(&self, key: impl Into<Key<'_>>, state: VendorState) -> Result<(), Error> {
        let key = key.into();
        if let Some(time) = state.blocked_for() {
            self.block(key, time).await?;
        } else if let Some(remaining) = state.remaining
            && !self.only_holds()
        {
            let excess = self.peek(&key).await?.remaining().saturating_sub(remaining);
            self.take(&key, excess.min(self.max_cost())).await?;
        }
        Ok(())
    }

    /// Spends units if they are left. This is no request, so its decision is not reported, neither
    /// to observers nor to the log.
    async fn take(&self, key: &Key<'_>, units: u64) -> Result<(), Error> {
        if units == 0 {
            return Ok(());
        }
        let answer = {
            let version = self.current();
            let limit = self.request(&version, Action::Check, key, units, MaxWait::DEFAULT)?;
            let limits: &[LimitRequest<'_>] = &[limit];
            self.store().decide(&StoreRequest { action: Action::Check, limits })
        };
        answer.await.map(drop)
    }
}

/// A limiter that learns, for a layer.
pub(crate) type Learning = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Charge {
    /// Adopts the state of a vendor, for a charge of one limit of this crate; `None` if there is
    /// nothing to adopt. `known` is what remained of the limit after the request: if the vendor has
    /// as much left, no call is needed. A failure of the store is reported to its observers.
    pub(crate) fn learn(&self, state: VendorState, known: u64) -> Option<Learning> {
        let is_news = state.blocked_for().is_some()
            || state.remaining.is_some_and(|remaining| remaining < known);
        if !is_news {
            return None;
        }
        let (limiter, key) = self.single()?;
        let (limiter, key) = (limiter.clone(), key.clone());
        Some(Box::pin(async move { drop(limiter.learn(key, state).await) }))
    }
}
