//! Locks, and wakers.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    task::Waker,
};

/// Returns what is in a mutex that is never locked: it only makes its owner `Sync`.
pub(crate) fn get_mut<T: ?Sized>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex, even after a panic elsewhere: the data behind the locks of this crate is valid at
/// every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls all wakers, also those behind one that panics: it is foreign code, and its panic has been
/// reported. Tasks whose wakers are not called would sleep for ever.
pub(crate) fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    for waker in wakers {
        drop(catch_unwind(AssertUnwindSafe(|| waker.wake())));
    }
}
