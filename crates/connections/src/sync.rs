//! Locks, races, and the tasks of others.

use std::{
    future::{self, poll_fn},
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Poll, ready},
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

/// Returns the output of the first future, or nothing if the second future ends before.
pub(crate) async fn race<T>(
    first: impl Future<Output = T>,
    second: impl Future<Output = ()>,
) -> Option<T> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    poll_fn(|cx| {
        if let Poll::Ready(value) = first.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        ready!(second.as_mut().poll(cx));
        // The first may have ended between the two polls.
        Poll::Ready(match first.as_mut().poll(cx) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    })
    .await
}
