//! The time for which a server has not answered. It knows neither commands nor replies.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::sync::lock;

/// The time of the first command since the last reply of a connection. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Silence(Arc<Mutex<Option<Instant>>>);

impl Silence {
    /// Records a command.
    pub(super) fn begin(&self, now: Instant) {
        lock(&self.0).get_or_insert(now);
    }

    /// Records a reply, or that there is no command that has one.
    pub(super) fn end(&self) {
        *lock(&self.0) = None;
    }

    pub(super) fn time(&self) -> Duration {
        lock(&self.0).map_or(Duration::ZERO, |since| since.elapsed())
    }
}
