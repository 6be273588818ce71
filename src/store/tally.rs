//! A count of what has begun and not ended, which can be awaited.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use tokio::sync::Notify;

#[derive(Clone, Default)]
pub(crate) struct Tally(Arc<Counted>);

#[derive(Default)]
struct Counted {
    count: AtomicUsize,
    /// Notified when there are none.
    none: Notify,
}

/// One of them. It ends when it is dropped.
pub(crate) struct Open(Arc<Counted>);

impl Tally {
    pub(crate) fn begin(&self) -> Open {
        self.0.count.fetch_add(1, SeqCst);
        Open(self.0.clone())
    }

    /// Waits until there are none, if only for an instant.
    pub(crate) async fn done(&self) {
        let notified = self.0.none.notified();
        if self.0.count.load(SeqCst) > 0 {
            notified.await;
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, SeqCst) == 1 {
            self.0.none.notify_waiters();
        }
    }
}
