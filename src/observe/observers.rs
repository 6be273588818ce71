//! The observers of a store, a limiter or a layer, and how an event is passed to all of them.

use std::{fmt, ops::Deref, ptr, sync::Arc};

use super::{Observer, Operation, StoreFailed};
use crate::error::Error;

/// The observers of a store, a limiter or a layer.
#[derive(Clone, Default)]
pub struct Observers(Option<Arc<[Arc<dyn Observer>]>>);

impl Observers {
    /// Adds an observer, unless it is one of these already.
    pub(crate) fn add(&mut self, observer: Arc<dyn Observer>) {
        if !self.contains(&observer) {
            self.0 = Some(self.iter().cloned().chain([observer]).collect());
        }
    }

    /// Returns the observers for the events of one limiter.
    fn of_limiter(&self, limiter: &'static str) -> Self {
        let of = |observer: &Arc<dyn Observer>| {
            observer.of_limiter(limiter).unwrap_or_else(|| observer.clone())
        };
        Self(self.0.as_ref().map(|observers| observers.iter().map(of).collect()))
    }

    /// Reports the failure of a store; other errors are not reported.
    pub(crate) fn store_failed(
        &self,
        limiter: &str,
        operation: impl Into<Operation>,
        error: &Error,
    ) {
        let Error::Store(error) = error else { return };
        let (operation, kind) = (operation.into(), error.kind());
        let event = StoreFailed { limiter, operation, kind, error };
        self.each(|observer| observer.store_failed(&event));
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Passes an event to all of them, for example by `each(|observer| observer.decided(&event))`.
    #[inline]
    pub(crate) fn each(&self, pass: impl Fn(&dyn Observer)) {
        self.iter().for_each(|observer| pass(&**observer));
    }

    pub(crate) fn contains(&self, observer: &Arc<dyn Observer>) -> bool {
        self.iter().any(|known| ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(observer)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Observer>> {
        self.0.iter().flat_map(|observers| observers.iter())
    }
}

/// The observers of a limiter.
#[derive(Clone, Debug, Default)]
pub struct LimiterObservers {
    /// As they were added, for events that are not of one limiter.
    pub(crate) added: Observers,
    /// The observers for the events of the limiter.
    of_limiter: Observers,
}

impl LimiterObservers {
    pub(crate) fn new(added: Observers, limiter: &'static str) -> Self {
        Self { of_limiter: added.of_limiter(limiter), added }
    }

    pub(crate) fn add(&mut self, observer: Arc<dyn Observer>, limiter: &'static str) {
        if !self.added.contains(&observer) {
            self.of_limiter.add(observer.of_limiter(limiter).unwrap_or_else(|| observer.clone()));
            self.added.add(observer);
        }
    }
}

impl Deref for LimiterObservers {
    type Target = Observers;

    fn deref(&self) -> &Observers {
        &self.of_limiter
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observers({})", self.iter().count())
    }
}
