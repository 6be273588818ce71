//! Reports the waits for limiters to their observers. The store reports the answers to requests.

use std::time::Instant;

use crate::observe::{Event, Observers};

/// A wait that was reported. Its end is reported when it is dropped.
pub(crate) struct Wait {
    observers: Observers,
    limiter: &'static str,
    began: Instant,
}

impl Wait {
    /// Reports that a request waits for a limiter. Returns nothing if there is no observer.
    pub(crate) fn begin(observers: &Observers, limiter: &'static str) -> Option<Self> {
        if observers.is_empty() {
            return None;
        }
        observers.report(&Event::WaitBegan { limiter });
        Some(Self { observers: observers.clone(), limiter, began: Instant::now() })
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let (limiter, duration) = (self.limiter, self.began.elapsed());
        self.observers.report(&Event::WaitEnded { limiter, duration });
    }
}
