//! Reports the events of limiters to their observers: waits, holds, releases and changes. The store
//! reports the answers to requests. It changes no answer.

use std::time::Instant;

use crate::{
    algorithm::Algorithm,
    keys::Key,
    observe::{Event, Observers, log},
    quota::Quota,
    store::{StoreFuture, report_failed},
};

/// Reports another quota or algorithm of a limiter.
pub(super) fn report_settings(
    observers: &Observers,
    limiter: &str,
    from: (Algorithm, Quota),
    to: (Algorithm, Quota),
) {
    observers.report(&Event::SettingsChanged { limiter, from, to });
    log::settings_changed(limiter, from, to);
}

/// Reports that units of a key are returned.
pub(crate) fn report_released(observers: &Observers, limiter: &str, key: &Key<'_>, units: u64) {
    observers.report(&Event::Released { limiter, key, units });
}

/// Reports that units of a key are held.
#[inline]
pub(super) fn report_hold_began(observers: &Observers, limiter: &str, key: &Key<'_>, held: u64) {
    observers.report(&Event::HoldBegan { limiter, key, held });
}

/// Reports that a permit of units has ended, and how many of them were held and used.
#[inline]
pub(super) fn report_hold_ended(
    observers: &Observers,
    limiter: &str,
    key: &Key<'_>,
    [held, used]: [u64; 2],
) {
    observers.report(&Event::HoldEnded { limiter, key, held, used });
}

/// Reports that a call has blocked, unblocked or reset a key.
pub(super) fn report_key_changed(observers: &Observers, event: &Event<'_>) {
    observers.report(event);
    log::key_changed(event);
}

/// Reports the failure of a call that decides nothing.
pub(super) fn reported_failure(
    observers: &Observers,
    limiter: &'static str,
    operation: &'static str,
    answer: StoreFuture<()>,
) -> StoreFuture<()> {
    if observers.is_empty() || matches!(answer, StoreFuture::Ready(Some(Ok(())))) {
        return answer;
    }
    let observers = observers.clone();
    StoreFuture::pending(async move {
        let result = answer.await;
        if let Err(error) = &result {
            report_failed(&observers, limiter, operation, error);
        }
        result
    })
}

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
