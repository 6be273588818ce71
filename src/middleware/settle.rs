//! `Settle`: the handle by which a service settles what its request holds, and the owner that ends
//! the rest with the request.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use crate::{error::Error, limiter::Holds, sync::lock};

/// A handle by which a service settles the units that its request holds. Clones settle the same
/// request.
///
/// A layer with [`settle_handle`](crate::RateLimitLayer::settle_handle) inserts it into the
/// extensions of requests. What is not settled when the response is there counts as used.
#[derive(Clone)]
pub struct Settle(Arc<Mutex<Holds>>);

impl Settle {
    /// Ends the hold of the limiter of this name: `used` units were used. Unused units are
    /// returned, missing ones are spent. It returns immediately; with a `RedisStore`, the end is
    /// sent in the background.
    ///
    /// If the request was not counted, because it is exempt, was denied in a dry run, or proceeds
    /// under [`FailurePolicy::Open`](crate::FailurePolicy::Open), this does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if the request holds no units of a limiter of this name, and
    /// [`Error::HoldEnded`] if they were settled before, or if the request has ended.
    pub fn settle(&self, limiter: &str, used: u64) -> Result<(), Error> {
        // Ended without the lock: observers can call anything.
        let parts = lock(&self.0).take(limiter)?;
        parts.into_iter().for_each(|part| part.end(used));
        Ok(())
    }

    /// Returns whether units of the request count as used already: see
    /// [`Permit::is_expired`](crate::Permit::is_expired).
    #[must_use]
    pub fn is_expired(&self) -> bool {
        lock(&self.0).is_expired()
    }
}

impl fmt::Debug for Settle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settle").finish_non_exhaustive()
    }
}

/// The owner of what a request holds. The drop ends what is not settled, as used.
#[derive(Debug)]
pub(crate) struct RequestHolds(Settle);

impl RequestHolds {
    pub(crate) fn new(holds: Holds) -> Self {
        Self(Settle(Arc::new(Mutex::new(holds))))
    }

    pub(crate) fn handle(&self) -> Settle {
        self.0.clone()
    }

    /// Ends what is still held: the units were not used.
    pub(crate) fn cancel(self) {
        self.take_all().end(|_| 0);
    }

    fn take_all(&self) -> Holds {
        lock(&self.0.0).take_all()
    }
}

impl Drop for RequestHolds {
    fn drop(&mut self) {
        drop(self.take_all());
    }
}
