//! One key for all requests.

use super::{Key, KeyExtractor};
use crate::middleware::rejection::RequestError;

/// One key for all requests, which then share one quota.
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let layer = RateLimitLayer::new(limiter, key::Global); // all requests together
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Global {}

/// The extractor [`Global`](struct@Global).
#[allow(non_upper_case_globals)]
pub const Global: Global = Global {};

impl Global {
    /// Returns the key, for [`Limiter::peek`](crate::Limiter::peek),
    /// [`reset`](crate::Limiter::reset) and other calls.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.reset(key::Global.key()).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn key(&self) -> Key<'static> {
        Key::from("global")
    }
}

impl<H> KeyExtractor<H> for Global {
    fn extract(&self, _: &H) -> Result<Key<'static>, RequestError> {
        Ok(self.key())
    }
}
