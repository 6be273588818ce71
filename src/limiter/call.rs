//! What the calls of limiters and charges have in common: the units that they ask for, and the rest
//! of a call that its first poll has not ended. The calls are in `check.rs`, `acquire.rs` and
//! `hold.rs`.

use std::{
    borrow::Cow,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use super::{charge::Charge, handle::Limiter};
use crate::{
    decision::Outcome,
    error::Error,
    store::{Store, StoreFuture},
};

pub(super) const POLLED: &str = "polled after completion";

/// The rest of a call. Boxed, so that the future of a check in memory is small.
type Rest<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A call: what it asks for, and from its first poll on what is left of it.
pub(super) enum Call<'a, K, T> {
    /// Units of one limiter. The first poll takes and converts the key: no poll moves the call.
    Units(&'a Limiter, Option<K>, u64),
    /// The costs of a charge; `Some` replaces that of the limit that was added last.
    Charge(&'a Charge, Option<u64>),
    Waiting(Rest<'a, T>),
    Done,
}

impl<'a, K, T> Call<'a, K, T> {
    #[inline]
    pub(super) fn cost(&mut self, units: u64) {
        match self {
            Self::Units(.., cost) => *cost = units,
            Self::Charge(_, cost) => *cost = Some(units),
            Self::Waiting(_) | Self::Done => {}
        }
    }

    /// Returns an error if a store may answer later.
    pub(super) fn check_immediate(&self) -> Result<(), Error> {
        let name = match self {
            Self::Units(limiter, ..) if !limiter.store().is_immediate() => limiter.name(),
            Self::Charge(charge, _) => {
                let later = charge.limiters().find(|limiter| !limiter.is_immediate());
                let Some(later) = later else { return Ok(()) };
                later.name()
            }
            _ => return Ok(()),
        };
        Err(Error::NotImmediate { limiter: name.to_owned().into() })
    }

    /// Takes the units of one limiter, before the first poll.
    #[inline]
    pub(super) fn take_units(&mut self) -> Option<(&'a Limiter, K, u64)> {
        let Self::Units(limiter, key, units) = self else { return None };
        Some((*limiter, key.take()?, *units))
    }

    /// Takes the charge, before the first poll.
    pub(super) fn take_charge(&mut self) -> Option<Cow<'a, Charge>> {
        let Self::Charge(charge, cost) = *self else { return None };
        *self = Self::Done;
        Some(charge.with_cost(cost))
    }

    /// Sets the rest of the call, and polls it.
    pub(super) fn go_on(
        &mut self,
        cx: &mut Context<'_>,
        rest: impl Future<Output = Result<T, Error>> + Send + 'a,
    ) -> Poll<Result<T, Error>> {
        *self = Self::Waiting(Box::pin(rest));
        self.poll_rest(cx)
    }

    pub(super) fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, Error>> {
        let Self::Waiting(rest) = self else { panic!("{POLLED}") };
        let result = ready!(rest.as_mut().poll(cx));
        *self = Self::Done;
        Poll::Ready(result)
    }
}

impl<K, T> fmt::Debug for Call<'_, K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Units(_, Some(_), _) | Self::Charge(..) => "Starting",
            Self::Waiting(_) => "Waiting",
            Self::Units(..) | Self::Done => "Done",
        })
    }
}

/// Returns the outcome, if it is there and no error. The future has the answer otherwise.
#[inline]
pub(super) fn poll_outcome(
    answer: &mut StoreFuture<Outcome>,
    cx: &mut Context<'_>,
) -> Option<Outcome> {
    match Pin::new(&mut *answer).poll(cx) {
        Poll::Ready(Ok(outcome)) => Some(outcome),
        Poll::Ready(Err(error)) => {
            *answer = StoreFuture::ready(Err(error));
            None
        }
        Poll::Pending => None,
    }
}
