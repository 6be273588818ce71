//! Locks, calls of foreign code, and polls.

use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    task::Waker,
};

/// The panic of a future that is polled again.
pub(crate) const POLLED: &str = "polled after completion";

/// Returns what is in a mutex that is never locked: it only makes its owner `Sync`.
pub(crate) fn get_mut<T: ?Sized>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a value into an empty place.
#[inline(always)]
pub(crate) fn fill<T>(place: &mut Option<T>, value: T) {
    debug_assert!(place.is_none());
    // Not assigned: the drop of the value before, which is none, takes a copy.
    mem::forget(place.replace(value));
}

/// Locks a mutex, even after a panic elsewhere: the data behind the locks of this crate is valid at
/// every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls foreign code, whose panic must not keep this crate from what it does next. The panic has
/// been reported by its hook.
pub(crate) fn call_foreign(call: impl FnOnce()) {
    drop(catch_unwind(AssertUnwindSafe(call)));
}

/// Calls all wakers: tasks whose wakers are not called would sleep for ever.
pub(crate) fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(|waker| call_foreign(|| waker.wake()));
}
