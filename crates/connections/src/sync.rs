//! Locks, and the tasks of others.

use std::{
    future,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::runtime::{Handle, RuntimeFlavor};

/// Locks a mutex, even after a panic elsewhere: the data behind the locks of this crate is valid at
/// every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets other workers of the runtime execute the task that was woken or spawned last. Tokio leaves
/// it to this worker, whose present task may compute for long before it returns to the runtime.
pub fn share_last_task() {
    if let Ok(runtime) = Handle::try_current()
        && runtime.runtime_flavor() != RuntimeFlavor::CurrentThread
    {
        runtime.spawn(future::ready(()));
    }
}
