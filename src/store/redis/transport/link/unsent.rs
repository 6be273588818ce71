//! The commands of a channel whose connection ended before they were written. They go over the next
//! connection, before all later commands. They are sent again by a node.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::Waker,
};

use crate::sync::lock;

/// The commands of a channel that are to be sent again, by the numbers of their tickets.
#[derive(Default)]
pub(crate) struct Unsent {
    /// The number of tickets so far. `Relaxed`: calls that need an order are begun one after the
    /// other, by one task or with a lock between them, so their numbers are in that order.
    tickets: AtomicU64,
    waiting: Mutex<UnsentNumbers>,
}

#[derive(Default)]
struct UnsentNumbers {
    numbers: BTreeSet<u64>,
    /// That of the line which waits for them.
    waker: Option<Waker>,
}

/// The place of a command among those of a channel. The drop gives it up.
pub(crate) struct LineTicket {
    unsent: Arc<Unsent>,
    number: u64,
}

impl Unsent {
    pub(crate) fn ticket(self: &Arc<Self>) -> LineTicket {
        LineTicket { unsent: self.clone(), number: 1 + self.tickets.fetch_add(1, Relaxed) }
    }

    /// Lets the later commands wait for this one.
    pub(crate) fn add(&self, number: u64) {
        if number > 0 {
            lock(&self.waiting).numbers.insert(number);
        }
    }

    /// Returns the number of the first command that is to be sent again. `waker` is woken when that
    /// changes.
    pub(crate) fn first(&self, waker: &Waker) -> Option<u64> {
        let (first, old) = {
            let waiting = &mut *lock(&self.waiting);
            (*waiting.numbers.first()?, waiting.waker.replace(waker.clone()))
        };
        drop(old); // not under the lock: it can drop a line with its commands
        Some(first)
    }

    /// Lets no command wait any more.
    pub(crate) fn clear(&self) {
        lock(&self.waiting).numbers.clear();
    }

    /// Records that a command has its place in a line, or is given up.
    pub(crate) fn remove(&self, number: u64) {
        let waker = {
            let waiting = &mut *lock(&self.waiting);
            if waiting.numbers.remove(&number) { waiting.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl LineTicket {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for LineTicket {
    fn drop(&mut self) {
        self.unsent.remove(self.number);
    }
}
