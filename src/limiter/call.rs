//! What the calls of limiters and charges have in common: the units that they ask for, and the rest
//! of a call that its first poll has not ended. The calls are in `check.rs`, `acquire.rs` and
//! `hold.rs`.

use std::{
    borrow::Cow,
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use super::{charge::Charge, handle::Limiter};
use crate::{decision::Outcome, error::Error, keys::Key, store::StoreFuture};

/// What a call asks for.
pub(super) enum Demand<'a, K> {
    /// Units of one limiter. The key is converted by the first poll, which moves it less often.
    Units(&'a Limiter, K, u64),
    /// The costs of a charge; `Some` replaces that of the limit that was added last.
    Charge(&'a Charge, Option<u64>),
}

impl<'a, K> Demand<'a, K> {
    pub(super) fn cost(&mut self, units: u64) {
        match self {
            Self::Units(.., cost) => *cost = units,
            Self::Charge(_, cost) => *cost = Some(units),
        }
    }

    /// Returns an error if a store may answer later.
    pub(super) fn check_immediate(&self) -> Result<(), Error> {
        match self {
            Self::Units(limiter, ..) => limiter.check_immediate(),
            Self::Charge(charge, _) => charge.limiters().try_for_each(|limiter| {
                limiter.own().map_err(|_| Error::Unsupported)?.check_immediate()
            }),
        }
    }

    pub(super) fn into_charge<'k>(self) -> Cow<'a, Charge>
    where
        K: Into<Key<'k>>,
    {
        match self {
            Self::Units(limiter, key, cost) => Cow::Owned(Charge::of_units(limiter, key, cost)),
            Self::Charge(charge, cost) => charge.with_cost(cost),
        }
    }
}

/// The rest of a call. Boxed, so that the future of a check in memory is small.
type Rest<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A call: what it asks for, and from its first poll on what is left of it.
pub(super) enum Call<'a, K, T> {
    Starting(Demand<'a, K>),
    Waiting(Rest<'a, T>),
    Done,
}

impl<'a, K, T> Call<'a, K, T> {
    /// Returns what the call asks for, at its first poll. It is done then, unless the caller sets a
    /// rest.
    #[inline]
    pub(super) fn start(&mut self) -> Option<Demand<'a, K>> {
        if !matches!(self, Self::Starting(_)) {
            return None;
        }
        match mem::replace(self, Self::Done) {
            Self::Starting(demand) => Some(demand),
            _ => unreachable!("matched above"),
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

    #[inline(never)]
    pub(super) fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, Error>> {
        let Self::Waiting(rest) = self else { panic!("polled after completion") };
        let result = ready!(rest.as_mut().poll(cx));
        *self = Self::Done;
        Poll::Ready(result)
    }
}

impl<K, T> fmt::Debug for Call<'_, K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting(_) => "Starting",
            Self::Waiting(_) => "Waiting",
            Self::Done => "Done",
        })
    }
}

/// Returns the outcome, if it is there and no error. The future has the answer otherwise.
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
