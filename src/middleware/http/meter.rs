//! `Meter`: the trait of the types that determine from a response what its request has used, and
//! `Usage`, what they report. The frames come from `body.rs`.

use std::{borrow::Cow, sync::Arc};

use http::{HeaderMap, response};

use crate::{
    error::Error,
    middleware::passage::RequestHolds,
    observe::log::{self, Throttle},
};

/// Determines from a response what its request has used, for
/// [`RateLimitLayer::settle_by`](crate::RateLimitLayer::settle_by). Each response has its own
/// meter.
///
/// The meter sees the frames of the body as they pass. Nothing is buffered: a frame can end
/// anywhere, also in the middle of a line or of a character. The body is the one that the service
/// returns: compress it outside of the layer.
///
/// | implemented by | for |
/// |---|---|
/// | [`Usage`] | a response whose head says what was used |
/// | `Option<M>` | a response that may say nothing: then the estimate counts |
/// | `Box<dyn Meter>` | different kinds of responses |
///
/// # Examples
///
/// The trailers of a gRPC response:
///
/// ```
/// use http::{HeaderMap, request::Parts};
/// use tower_ratelimit::{
///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key,
///     layer::{Meter, Usage},
/// };
///
/// #[derive(Default)]
/// struct Rows(Option<u64>);
///
/// impl Meter for Rows {
///     fn trailers(&mut self, trailers: &HeaderMap) {
///         self.0 = trailers.get("x-rows").and_then(|rows| rows.to_str().ok()?.parse().ok());
///     }
///
///     fn usage(&mut self, _is_complete: bool) -> Option<Usage> {
///         Some(Usage::of("rows", self.0?))
///     }
/// }
///
/// # let quota = Quota::per_minute(100_000);
/// # let limiter = Limiter::new("rows", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// let layer = RateLimitLayer::new(limiter, key::Global)
///     .cost(|_: &Parts| 1_000)
///     .settle_by(|_| Rows::default());
/// # let _ = layer;
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not determine what a request has used",
    label = "not a `Meter`",
    note = "return a `Usage`, an `Option<Usage>` or a type that implements `Meter` from the closure"
)]
pub trait Meter: Send + 'static {
    /// Sees data of the body. By default, it is ignored.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Meter, Usage};
    ///
    /// struct Lines(u64);
    ///
    /// impl Meter for Lines {
    ///     fn data(&mut self, data: &[u8]) {
    ///         self.0 += data.iter().filter(|byte| **byte == b'\n').count() as u64;
    ///     }
    ///
    ///     fn usage(&mut self, _is_complete: bool) -> Option<Usage> {
    ///         Some(Usage::of("lines", self.0))
    ///     }
    /// }
    /// ```
    fn data(&mut self, data: &[u8]) {
        let _ = data;
    }

    /// Sees the trailers of the body. By default, they are ignored.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Meter, Usage};
    ///
    /// struct Status(Option<u64>);
    ///
    /// impl Meter for Status {
    ///     fn trailers(&mut self, trailers: &http::HeaderMap) {
    ///         self.0 = trailers.get("grpc-status").map(|status| u64::from(status == "0"));
    ///     }
    ///
    ///     fn usage(&mut self, _is_complete: bool) -> Option<Usage> {
    ///         Some(Usage::of("successes", self.0?))
    ///     }
    /// }
    /// ```
    fn trailers(&mut self, trailers: &HeaderMap) {
        let _ = trailers;
    }

    /// Returns what was used. It is called once, after all frames. If it returns `None`, or does
    /// not name a limiter, the estimate counts as used.
    ///
    /// `is_complete` is false if the client or the service has cut the body off: then the meter has
    /// seen only a part of it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Meter, Usage};
    ///
    /// struct Bytes(u64);
    ///
    /// impl Meter for Bytes {
    ///     fn data(&mut self, data: &[u8]) {
    ///         self.0 += data.len() as u64;
    ///     }
    ///
    ///     fn usage(&mut self, is_complete: bool) -> Option<Usage> {
    ///         is_complete.then(|| Usage::of("bytes", self.0)) // else the estimate counts
    ///     }
    /// }
    /// ```
    fn usage(&mut self, is_complete: bool) -> Option<Usage>;
}

/// What a request has used, by the names of its limiters.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::layer::Usage;
///
/// let usage = Usage::of("input", 1_900).and("output", 120);
/// # let _ = usage;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage(Vec<(Cow<'static, str>, u64)>);

impl Usage {
    /// Returns the usage of `used` units of the limiter of this name.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::Usage;
    ///
    /// let usage = Usage::of("tokens", 180);
    /// assert_ne!(usage, Usage::of("tokens", 181));
    /// ```
    #[must_use]
    pub fn of(limiter: impl Into<Cow<'static, str>>, used: u64) -> Self {
        Self::default().and(limiter, used)
    }

    /// Adds the usage of `used` units of another limiter. A name that the request holds no units of
    /// is ignored; if an estimate is left that no name settles, the log names it. If a name is
    /// repeated, the first number counts.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::Usage;
    ///
    /// let usage = Usage::of("tokens", 180).and("money", 65);
    /// # let _ = usage;
    /// ```
    #[must_use]
    pub fn and(mut self, limiter: impl Into<Cow<'static, str>>, used: u64) -> Self {
        self.0.push((limiter.into(), used));
        self
    }

    /// Settles what the request holds of these limiters. A wrong name beside an estimate that
    /// nothing settles is a mistake; a limit that only some plans have is none.
    pub(crate) fn settle(&self, holds: &mut RequestHolds) {
        static MISTAKES: Throttle = Throttle::new();
        let mut wrong = None;
        for (limiter, used) in &self.0 {
            // Or the service has settled it.
            if let Err(error @ Error::NotHeld { .. }) = holds.settle(limiter, *used) {
                wrong = Some(error);
            }
        }
        if let Some(error) = wrong.filter(|_| holds.has_estimate()) {
            log::unsettled(&MISTAKES, &error);
        }
    }
}

impl Meter for Usage {
    fn usage(&mut self, _: bool) -> Option<Usage> {
        Some(self.clone())
    }
}

impl<M: Meter> Meter for Option<M> {
    fn data(&mut self, data: &[u8]) {
        if let Some(meter) = self {
            meter.data(data);
        }
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        if let Some(meter) = self {
            meter.trailers(trailers);
        }
    }

    fn usage(&mut self, is_complete: bool) -> Option<Usage> {
        self.as_mut()?.usage(is_complete)
    }
}

impl<M: Meter + ?Sized> Meter for Box<M> {
    fn data(&mut self, data: &[u8]) {
        (**self).data(data);
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        (**self).trailers(trailers);
    }

    fn usage(&mut self, is_complete: bool) -> Option<Usage> {
        (**self).usage(is_complete)
    }
}

/// The closure of a layer, without its type.
pub(crate) type MakeMeter = Arc<dyn Fn(&response::Parts) -> Box<dyn Meter> + Send + Sync>;
