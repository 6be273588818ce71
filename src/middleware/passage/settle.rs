//! The last stage: the end of what a request holds. The service settles its units with `Settle`;
//! `RequestHolds`, their owner, ends the rest.

use std::{
    fmt, mem,
    panic::{RefUnwindSafe, UnwindSafe},
    sync::{Arc, Mutex},
};

use crate::{error::Error, limiter::Holds, sync::lock};

/// A handle by which a service settles the units that its request holds. Clones settle the same
/// request.
///
/// A layer with [`settle_handle`](crate::RateLimitLayer::settle_handle) inserts it into the
/// extensions of requests. What is not settled at the end of the response body counts as used.
///
/// # Examples
///
/// ```
/// use axum::Extension;
/// use tower_ratelimit::layer::Settle;
///
/// async fn answer(Extension(settle): Extension<Settle>) -> &'static str {
///     if let Err(error) = settle.settle("tokens", 730) {
///         eprintln!("{error}"); // the work is done: answer anyway
///     }
///     "42"
/// }
/// # let _: axum::routing::MethodRouter = axum::routing::get(answer);
/// ```
#[derive(Clone)]
pub struct Settle(Arc<Mutex<SharedHolds>>);

/// What a request holds, for its owner and for all handles. The drop of the last of them ends the
/// rest, as used.
#[derive(Debug)]
struct SharedHolds {
    holds: Holds,
    /// Whether the end of the request ends nothing.
    is_kept: bool,
}

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
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Error, layer::Settle};
    ///
    /// fn finish(settle: &Settle, input: u64, output: u64) -> Result<(), Error> {
    ///     settle.settle("input", input)?;
    ///     settle.settle("output", output)
    /// }
    /// # let _ = finish;
    /// ```
    pub fn settle(&self, limiter: &str, used: u64) -> Result<(), Error> {
        // Ended without the lock: observers can call anything.
        let mut named = lock(&self.0).holds.take(limiter)?;
        named.end(|_| used);
        Ok(())
    }

    /// Keeps the units beyond the end of the response, for work that outlives it, such as a
    /// WebSocket or a background task. They are held until they are settled, or until the last
    /// clone of the handle is dropped, which counts them as used. The layer settles nothing then;
    /// a response that is not [charged](crate::RateLimitLayer::charge_when) still returns them.
    ///
    /// After the end of the request, this does nothing.
    ///
    /// # Examples
    ///
    /// A WebSocket, whose connection begins with the response:
    ///
    /// ```
    /// use axum::{Extension, response::Response};
    /// use tower_ratelimit::layer::Settle;
    ///
    /// async fn connect(Extension(settle): Extension<Settle>) -> Response {
    ///     settle.keep();
    ///     tokio::spawn(async move {
    ///         let messages = 12; // of this connection
    ///         if let Err(error) = settle.settle("messages", messages) {
    ///             eprintln!("{error}");
    ///         }
    ///     });
    /// #   Response::default()
    ///     // ..
    /// }
    /// ```
    pub fn keep(&self) {
        lock(&self.0).is_kept = true;
    }

    /// Returns whether a hold of the request has expired: see
    /// [`Permit::is_expired`](crate::Permit::is_expired).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::Settle;
    ///
    /// fn may_go_on(settle: &Settle) -> bool {
    ///     !settle.is_expired() // look between two steps of a long job
    /// }
    /// # let _ = may_go_on;
    /// ```
    #[must_use]
    pub fn is_expired(&self) -> bool {
        lock(&self.0).holds.is_expired()
    }
}

impl fmt::Debug for Settle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settle").finish_non_exhaustive()
    }
}

/// The owner of what a request holds. The drop ends what is not settled, as used, unless the
/// service keeps it.
#[derive(Debug)]
pub struct RequestHolds {
    holds: Ownership,
    pub(crate) expects: Expects,
}

#[derive(Debug)]
enum Ownership {
    Sole(Holds),
    /// The service has a handle.
    Shared(Settle),
}

/// What the method of a request says about its response, if that is successful.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expects {
    Body,
    NoBody,
    Tunnel,
}

impl RequestHolds {
    /// Boxed, as few requests hold any.
    #[inline]
    pub(super) fn new(holds: Holds) -> Box<Self> {
        Box::new(Self { holds: Ownership::Sole(holds), expects: Expects::Body })
    }

    /// Returns a handle for the service.
    pub(crate) fn share(&mut self) -> Settle {
        match &mut self.holds {
            Ownership::Sole(holds) => {
                let shared = SharedHolds { holds: mem::take(holds), is_kept: false };
                let handle = Settle(Arc::new(Mutex::new(shared)));
                self.holds = Ownership::Shared(handle.clone());
                handle
            }
            Ownership::Shared(handle) => handle.clone(),
        }
    }

    /// Ends the hold of the limiter of this name: see [`Settle::settle`].
    pub(crate) fn settle(&mut self, limiter: &str, used: u64) -> Result<(), Error> {
        self.with(|holds| holds.take(limiter))?.end(|_| used);
        Ok(())
    }

    /// Returns all units: the service was not called.
    pub(super) fn release(&mut self) {
        self.with(Holds::take_all).end(|_| 0);
    }

    /// Returns whether the end of the request has anything to end.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        match &self.holds {
            Ownership::Sole(holds) => !holds.have_ended(),
            Ownership::Shared(Settle(shared)) => {
                let shared = lock(shared);
                !shared.is_kept && !shared.holds.have_ended()
            }
        }
    }

    /// Returns whether the end of the request counts an estimate as used.
    pub(crate) fn has_estimate(&mut self) -> bool {
        self.is_open() && self.with(|holds| holds.has_spent())
    }

    /// Ends what is still held of limits whose units can be spent, with the units that `used`
    /// returns for the number of units held. Units that count at a time stay held.
    #[inline]
    pub(crate) fn end_spent(&mut self, used: impl Fn(u64) -> u64) {
        if let Some(mut spent) = self.with(|holds| holds.has_spent().then(|| holds.take_spent())) {
            spent.end(used);
        }
    }

    /// Takes something out of the holds, which is to be ended without the lock: observers can call
    /// anything.
    #[inline]
    fn with<T>(&mut self, take: impl FnOnce(&mut Holds) -> T) -> T {
        match &mut self.holds {
            Ownership::Sole(holds) => take(holds),
            Ownership::Shared(Settle(shared)) => take(&mut lock(shared).holds),
        }
    }
}

// What is behind the locks of a store is valid at every step, so that a body with holds can be used
// wherever the body of the service can.
impl UnwindSafe for RequestHolds {}
impl RefUnwindSafe for RequestHolds {}

impl Drop for RequestHolds {
    fn drop(&mut self) {
        let Ownership::Shared(Settle(shared)) = &self.holds else { return };
        let mut shared = lock(shared);
        if !shared.is_kept {
            let holds = shared.holds.take_all();
            // Ended without the lock: observers can call anything.
            drop(shared);
            drop(holds);
        }
    }
}
