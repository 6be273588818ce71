//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns what is in a mutex that is never locked: it only makes its owner `Sync`.
pub(crate) fn get_mut<T: ?Sized>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex, even after a panic elsewhere: the data behind the locks of this crate is valid at
/// every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
