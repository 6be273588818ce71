//! Passes values on in the order in which they were added, with no lock held meanwhile: the
//! receiver may block a little, or add further values.

use std::{
    collections::VecDeque,
    sync::{Mutex, TryLockError},
};

use crate::sync::lock;

pub(super) struct Outbox<T> {
    values: Mutex<VecDeque<T>>,
    /// Locked by the thread that passes values on. Others leave theirs to it.
    passing: Mutex<()>,
}

impl<T> Outbox<T> {
    /// Adds a value. To fix its order beside another change, call this under the lock of that
    /// change, and [`deliver`](Self::deliver) after it.
    pub(super) fn add(&self, value: T) {
        lock(&self.values).push_back(value);
    }

    /// Passes all values on, unless a thread is doing so, perhaps this one.
    pub(super) fn deliver(&self, pass: impl Fn(T)) {
        // Again, because another thread may add a value after the last look and before the end of
        // the delivery, and leave it to this one.
        while !lock(&self.values).is_empty() {
            let _passing = match self.passing.try_lock() {
                Ok(passing) => passing,
                Err(TryLockError::Poisoned(passing)) => passing.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            while let Some(value) = { lock(&self.values).pop_front() } {
                pass(value);
            }
        }
    }
}

impl<T> Default for Outbox<T> {
    fn default() -> Self {
        Self { values: Mutex::default(), passing: Mutex::default() }
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
