//! Passes values on in the order in which they were added, with no lock held meanwhile: the
//! receiver may block a little, or add further values.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Mutex, MutexGuard},
};

use crate::sync::lock;

pub(super) struct Outbox<T>(Mutex<OutboxQueue<T>>);

struct OutboxQueue<T> {
    values: VecDeque<T>,
    /// True while a thread passes values on. Others leave theirs to it.
    is_delivering: bool,
}

impl<T> Outbox<T> {
    /// Adds a value. To fix its order beside another change, call this under the lock of that
    /// change, and [`deliver`](Self::deliver) after it.
    pub(super) fn add(&self, value: T) {
        lock(&self.0).values.push_back(value);
    }

    /// Passes all values on, unless another thread is doing so.
    pub(super) fn deliver(&self, pass: impl Fn(T)) {
        /// Lets others deliver, even if the receiver panics.
        struct Passing<'a, T>(&'a Outbox<T>);

        impl<T> Drop for Passing<'_, T> {
            fn drop(&mut self) {
                lock(&self.0.0).is_delivering = false;
            }
        }

        let begin = |mut waiting: MutexGuard<'_, OutboxQueue<T>>| {
            !waiting.values.is_empty() && !std::mem::replace(&mut waiting.is_delivering, true)
        };
        // Again, because another thread may add a value after the last look and before the end of
        // the delivery, and leave it to this one.
        while begin(lock(&self.0)) {
            let _passing = Passing(self);
            while let Some(value) = { lock(&self.0).values.pop_front() } {
                pass(value);
            }
        }
    }
}

impl<T> Default for Outbox<T> {
    fn default() -> Self {
        Self(Mutex::new(OutboxQueue { values: VecDeque::new(), is_delivering: false }))
    }
}

impl<T> fmt::Debug for Outbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn values_of_several_threads_are_passed_on_once_and_in_the_order_of_a_lock() {
        let (outbox, added, passed) = (Outbox::default(), Mutex::new(0), Mutex::new(vec![]));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1_000 {
                        {
                            let mut added = lock(&added);
                            *added += 1;
                            outbox.add(*added);
                        }
                        outbox.deliver(|value| {
                            thread::yield_now();
                            lock(&passed).push(value);
                        });
                    }
                });
            }
        });
        assert_eq!(*lock(&passed), (1..=4_000).collect::<Vec<_>>());
    }

    #[test]
    fn a_receiver_can_add_a_value_and_a_panic_ends_only_its_own_passing() {
        let (outbox, passed) = (Outbox::default(), Mutex::new(vec![]));
        let pass = |value| {
            lock(&passed).push(value);
            if value == 1 {
                outbox.add(2);
                outbox.deliver(|_| unreachable!("the outer delivery passes it on"));
            }
        };
        outbox.add(1);
        outbox.deliver(pass);
        assert_eq!(*lock(&passed), [1, 2]);
        outbox.add(3);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            outbox.deliver(|_| panic!("of the receiver"));
        }));
        assert!(panicked.is_err());
        outbox.add(4);
        outbox.deliver(pass);
        assert_eq!(*lock(&passed), [1, 2, 4]);
    }
}
