//! The observers of a store, a limiter or a layer, and how an event is passed to all of them.

use std::{fmt, ops::Deref, ptr, sync::Arc};

use super::{event::Event, observer::Observer};
use crate::sync::call_foreign;

/// The observers of a store, a limiter or a layer.
#[derive(Clone, Default)]
pub struct Observers(Option<Arc<[Arc<dyn Observer>]>>);

impl Observers {
    /// Adds an observer. Returns false if it is one of these already.
    pub(crate) fn add(&mut self, observer: Arc<dyn Observer>) -> bool {
        let is_new = !self.contains(&observer);
        if is_new {
            self.0 = Some(self.iter().cloned().chain([observer]).collect());
        }
        is_new
    }

    /// Returns the observers for the events of one limiter.
    fn of_limiter(&self, limiter: &'static str) -> Self {
        let of = |observer: &Arc<dyn Observer>| {
            observer.of_limiter(limiter).unwrap_or_else(|| observer.clone())
        };
        Self(self.0.as_ref().map(|observers| observers.iter().map(of).collect()))
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Passes an event to all of them. The caller holds no lock: an observer can call anything. One
    /// that panics loses no units, and no event of the others.
    #[inline]
    pub(crate) fn report(&self, event: &Event<'_>) {
        let Some(observers) = &self.0 else { return };
        observers.iter().for_each(|observer| call_foreign(|| observer.on_event(event)));
    }

    fn contains(&self, observer: &Arc<dyn Observer>) -> bool {
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
