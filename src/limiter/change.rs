//! Changes of a key that are made whatever is left of its quota. Checks are in `check.rs`.

use std::time::Duration;

use super::{handle::Limiter, version::MaxWait};
use crate::{
    algorithm::{Action, LONGEST_BLOCK, micros},
    decision::KeyState,
    error::Error,
    keys::Key,
    observe::{Event, log},
    store::report_failed,
};

impl Limiter {
    /// Spends `n` units of the quota of `key`, even if fewer are left: for a cost that is known
    /// only after the request was served.
    ///
    /// If more is spent than is left, later requests are denied or wait until the debt is repaid. A
    /// fixed window forgets the debt when it ends. Waiting requests keep their reservations. If an
    /// estimate is known before the request is served, [hold](Limiter::hold) it.
    ///
    /// Returns the state of the key afterwards. If `n` is 0, nothing is spent.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(1000);
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// if tokens.check("alice").cost(200).await?.is_allowed() {
    ///     let used = 1_450; // as the response reports
    ///     tokens.spend("alice", used - 200).await?;
    /// }
    /// assert!(!tokens.check("alice").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn spend(&self, key: impl Into<Key<'_>>, n: u64) -> Result<KeyState, Error> {
        self.change(Action::Spend, &key.into(), n).await
    }

    /// Grants `n` units to `key`, up to the units that were spent.
    ///
    /// A refund refers to no decision, so it returns units that any request has spent: the key gets
    /// `n` units more than its quota. To return the unused units of one request,
    /// [hold](Limiter::hold) them.
    ///
    /// The sliding algorithms return the units that were spent first, so that later ones still
    /// count for their full time. A fixed window returns units of the current window. Reservations
    /// of waiting requests are not returned.
    ///
    /// In a sliding log, a refund takes time for each request whose units it returns. In Redis,
    /// half of a log of 100,000 requests takes 10 ms, in which no other call is executed.
    ///
    /// Returns the state of the key afterwards. If `n` is 0, nothing is granted.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
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
    /// limiter.refund("alice", 1).await?; // the work has failed
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn refund(&self, key: impl Into<Key<'_>>, n: u64) -> Result<KeyState, Error> {
        self.change(Action::Refund, &key.into(), n).await
    }

    /// Spends or grants units, whatever is left.
    async fn change(&self, action: Action, key: &Key<'_>, n: u64) -> Result<KeyState, Error> {
        if n == 0 {
            return self.peek(key).await;
        }
        let outcome = self.decide(action, key, n, MaxWait::NONE).await?;
        Ok(KeyState::changed(outcome.decision))
    }

    /// Blocks `key` for `duration`, regardless of its remaining quota. Use it for abusive clients,
    /// or when an upstream answers 429 with `Retry-After`. Requests that a layer exempts, or that
    /// cost 0, proceed.
    ///
    /// The block takes one call. It begins now, by the clock of the store, and holds for all
    /// processes that share the store. Until it ends,
    ///
    /// - [`check`](Limiter::check) is denied, and [`is_blocked`](crate::Decision::is_blocked) is
    ///   true
    /// - a request that may wait for long enough proceeds after the end of the block: with
    ///   [`try_acquire`](Limiter::try_acquire), [`acquire`](Limiter::acquire), a layer with a
    ///   [`max_wait`](crate::RateLimitLayer::max_wait), or in a leaky bucket, whose requests wait
    ///   up to the time in which it drains
    /// - a request that is already waiting checks again when it becomes due; in another process
    ///   only if that process has learned of the block
    ///
    /// The count of the key stays, and its quota is restored as usual. [`spend`](Limiter::spend)
    /// and [`refund`](Limiter::refund) change it, and so does a [`Permit`](crate::Permit) that
    /// ends; new holds are denied. A second block never shortens the first one. A block is at
    /// most 100 years long. It ends at an instant of the clock of the store: if the clock is set
    /// back, the block is longer. [`unblock`](Limiter::unblock) ends it, and so does
    /// [`reset`](Limiter::reset), which also deletes the count. Another algorithm does not know it.
    ///
    /// If the key is counted by a layer, pass the key that its extractor makes: see
    /// [`reset`](Limiter::reset). Returns the state of the key afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_second(9);
    /// let vendor = Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let retry_after = Duration::from_secs(30); // from the response of the vendor
    /// vendor.block("api.example.com", retry_after).await?;
    ///
    /// let denied = vendor.check("api.example.com").await?;
    /// assert!(denied.is_blocked());
    /// assert_eq!(denied.retry_after(), Some(retry_after));
    ///
    /// vendor.unblock("api.example.com").await?;
    /// assert!(vendor.check("api.example.com").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn block(
        &self,
        key: impl Into<Key<'_>>,
        duration: Duration,
    ) -> Result<KeyState, Error> {
        let key = key.into();
        let micros = micros(duration).min(LONGEST_BLOCK);
        let state = self.change(Action::Block { duration: micros }, &key, 1).await?;
        self.report_change(&Event::Blocked { limiter: self.name(), key: &key, duration });
        Ok(state)
    }

    /// Ends the [block](Limiter::block) of `key`, if there is one. Its count stays.
    ///
    /// Other processes may deny the key for up to
    /// [`denial_ttl`](crate::store::RedisConfig::denial_ttl) more. Requests that wait for the end
    /// of the block keep their instants and their units, so the key can stay denied because of
    /// them: [`reset`](Limiter::reset) frees it.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
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
    /// limiter.unblock("mallory").await?;
    /// assert!(limiter.check("mallory").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn unblock(&self, key: impl Into<Key<'_>>) -> Result<KeyState, Error> {
        let key = key.into();
        let state = self.change(Action::Unblock, &key, 1).await?;
        self.report_change(&Event::Unblocked { limiter: self.name(), key: &key });
        Ok(state)
    }

    /// Deletes the state of `key`: its next request counts as its first.
    ///
    /// Requests that are waiting keep their instants. Units that are [held](Limiter::hold) are
    /// forgotten: in Redis until the next renewal, in memory until their permits end, which then
    /// spend what was used. Other processes may deny the key for up to
    /// [`denial_ttl`](crate::store::RedisConfig::denial_ttl) more. For a key that a layer counts,
    /// pass the key that its extractor makes: each has a method `key`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), Quota::per_second(10));
    /// let api_key = key::header("x-api-key");
    /// let layer = RateLimitLayer::new(&limiter, (api_key.clone(), key::PeerIp));
    /// # let _ = layer;
    ///
    /// let address: std::net::IpAddr = "2001:db8::7".parse()?; // the layer counts 2001:db8::/64
    /// limiter.reset((api_key.key("k1"), key::PeerIp.key(address))).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the store fails.
    ///
    /// # Cancel safety
    ///
    /// As for [`check`](Limiter::check).
    pub async fn reset(&self, key: impl Into<Key<'_>>) -> Result<(), Error> {
        let key = key.into();
        let answer = self.store().as_dyn().reset(&self.current().settings, &key);
        let report = |error: &_| report_failed(self.observers(), self.name(), "reset", error);
        answer.await.inspect_err(report)?;
        self.report_change(&Event::Reset { limiter: self.name(), key: &key });
        Ok(())
    }

    fn report_change(&self, event: &Event<'_>) {
        self.observers().report(event);
        log::key_changed(event);
    }
}
