//! `Observer`: receives the events; `Observers`, those of a store, a limiter or a layer. Where one
//! is added is described in `observe`.

use std::{fmt, ops::Deref, ptr, sync::Arc};

use super::event::Event;
use crate::sync::call_foreign;

/// Receives events from limiters, layers and stores. A closure `|event: &Event<'_>| ..` is an
/// observer, too.
///
/// # Calls
///
/// An observer is called in the tasks of requests, and, over Redis, in the [thread of the
/// background](crate::guide::connections#threads-and-connections). The crate holds no lock
/// meanwhile, so an observer may call limiters and stores, and add observers. It must be fast, and
/// must not block: in that thread it would delay the renewals of all permits. If it panics, the
/// request goes on.
///
/// A check is reported when it is decided: in memory with the first poll of its future, in Redis
/// with the answer. If the future is dropped before that answer:
///
/// * [`check`](crate::Limiter::check) has no event
/// * [`try_acquire`](crate::Limiter::try_acquire), `acquire`, `reserve`, `hold` and layers await
///   the answer in the background, which is [`Event::Decided`], and then [`Event::Released`] if
///   units were spent, reserved or held
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tower_ratelimit::{MemoryStore, observe::{Event, Observer}};
///
/// #[derive(Default)]
/// struct Count(AtomicU64);
///
/// impl Observer for Count {
///     fn on_event(&self, _event: &Event<'_>) {
///         self.0.fetch_add(1, Ordering::Relaxed);
///     }
/// }
///
/// MemoryStore::new().add_observer(Arc::new(Count::default()));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not observe events",
    label = "not an observer",
    note = "add a type that implements `Observer`, or a closure that names the type of its \
            parameter: `|event: &Event<'_>| ..`"
)]
pub trait Observer: Send + Sync + 'static {
    /// Receives an event.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::observe::{Event, Observer};
    ///
    /// struct Print;
    ///
    /// impl Observer for Print {
    ///     fn on_event(&self, event: &Event<'_>) {
    ///         println!("{event:?}"); // must return soon: the request waits for it
    ///     }
    /// }
    /// ```
    fn on_event(&self, event: &Event<'_>);

    /// Returns the observer that gets the events of one limiter instead of this one; `None` if this
    /// one gets them.
    ///
    /// It is called when a limiter is made, with its name. So an observer can find the counters of
    /// each limiter once, and not for each event. [`Event::Rejected`] and the events that have no
    /// limiter stay with this one.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tower_ratelimit::observe::{Event, Observer};
    ///
    /// struct PerLimiter;
    ///
    /// impl Observer for PerLimiter {
    ///     fn on_event(&self, _event: &Event<'_>) {} // those without a limiter
    ///
    ///     fn of_limiter(&self, limiter: &'static str) -> Option<Arc<dyn Observer>> {
    ///         Some(Arc::new(move |event: &Event<'_>| println!("{limiter}: {event:?}")))
    ///     }
    /// }
    /// ```
    fn of_limiter(&self, limiter: &'static str) -> Option<Arc<dyn Observer>> {
        let _ = limiter;
        None
    }
}

#[diagnostic::do_not_recommend]
impl<F> Observer for F
where
    F: Fn(&Event<'_>) + Send + Sync + 'static,
{
    fn on_event(&self, event: &Event<'_>) {
        self(event);
    }
}

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
