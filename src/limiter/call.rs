//! What the calls of limiters and charges have in common: the units that they ask for, and the rest
//! of a call that its first poll has not ended. The calls are in `check.rs`, `acquire.rs` and
//! `hold.rs`.

use std::{
    borrow::Cow,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use super::{
    charge::Charge,
    handle::{AnyLimiter, Limiter},
};
use crate::{decision::Outcome, error::Error, store::StoreFuture, sync::POLLED};

pub(super) const BEGUN: &str = "a call is set before it is polled";

/// The rest of a call. Boxed, so that the future of a check in memory is small.
type Rest<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A call: what it asks for, and from its first poll on what is left of it.
pub(super) enum Call<'a, K, T> {
    /// Units of one limiter. The first poll takes and converts the key: no poll moves the call.
    Units(&'a Limiter, Option<K>, u64),
    /// The costs of a charge; `Some` replaces the cost of the limit that was added last.
    Charge(&'a Charge, Option<u64>),
    Waiting(Rest<'a, T>),
    Done,
}

impl<'a, K, T> Call<'a, K, T> {
    #[inline]
    pub(super) fn cost(&mut self, units: u64) {
        match self {
            Self::Units(_, Some(_), cost) => *cost = units,
            Self::Charge(_, cost) => *cost = Some(units),
            _ => panic!("{BEGUN}"),
        }
    }

    /// Returns an error if a store may answer later.
    #[inline]
    pub(super) fn check_immediate(&self) -> Result<(), Error> {
        let later = match self {
            Self::Units(limiter, Some(_), _) if limiter.store().is_immediate() => None,
            Self::Units(limiter, Some(_), _) => Some(limiter.name()),
            Self::Charge(charge, _) => {
                let later = charge.limiters().find(|limiter| !limiter.is_immediate());
                later.map(AnyLimiter::name)
            }
            _ => panic!("{BEGUN}"),
        };
        match later {
            None => Ok(()),
            Some(name) => Err(Error::NotImmediate { limiter: name.to_owned().into() }),
        }
    }

    /// Takes the units of one limiter, before the first poll.
    #[inline]
    pub(super) fn take_units(&mut self) -> Option<(&'a Limiter, K, u64)> {
        let Self::Units(limiter, key, units) = self else { return None };
        Some((*limiter, key.take()?, *units))
    }

    /// Takes the charge, before the first poll.
    #[inline]
    pub(super) fn take_charge(&mut self) -> Option<Cow<'a, Charge>> {
        let Self::Charge(charge, cost) = *self else { return None };
        *self = Self::Done;
        Some(match cost {
            Some(units) => Cow::Owned(charge.clone().cost(units)),
            None => Cow::Borrowed(charge),
        })
    }

    /// Polls the answer to `asked`. Ends the call with an outcome; `rest` goes on with what is not
    /// there yet, or with an error. Boxed only then: most answers are there at once.
    pub(super) fn poll_answer<A, R: Future<Output = Result<T, Error>> + Send + 'a>(
        &mut self,
        cx: &mut Context<'_>,
        asked: A,
        mut answer: StoreFuture<Outcome>,
        done: impl FnOnce(A, Outcome) -> T,
        rest: impl FnOnce(A, StoreFuture<Outcome>) -> R,
    ) -> Poll<Result<T, Error>> {
        match Pin::new(&mut answer).poll(cx) {
            Poll::Ready(Ok(outcome)) => Poll::Ready(Ok(done(asked, outcome))),
            Poll::Ready(Err(error)) => self.go_on(cx, rest(asked, StoreFuture::ready(Err(error)))),
            Poll::Pending => {
                *self = Self::Waiting(Box::pin(rest(asked, answer)));
                Poll::Pending // the answer has the waker, and lets other tasks run first
            }
        }
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
