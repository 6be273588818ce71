//! `Observer`: receives the events. Where it is added is described in `observe`.

use std::sync::Arc;

use super::event::Event;

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
