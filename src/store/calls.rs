//! `StoreCalls`: what each store does for its limiters.

use std::{fmt, future, sync::Arc};

use tokio::time::Instant;

use super::{
    AnyStore, EndedHold, Health, HoldGuard, Names, Offer, Ping, RenewableHold, Settings,
    StoreFuture, StoreRequest, Task,
};
use crate::{
    algorithm::Release,
    decision::Outcome,
    keys::Key,
    observe::{Observer, Observers},
};

/// A store, as its limiters call it. Methods with a default are for a store that has something to
/// wait for, or servers.
pub trait StoreCalls: fmt::Debug + Send + Sync + 'static {
    /// Decides, and changes the counts, in one atomic step: the one way to a decision. A request
    /// has at least one limit; its limits are of this store and differ from each other. The store
    /// bounds the time of the answer. If the future is dropped, the request may have been counted.
    ///
    /// A limiter has an `AnyStore`, which also reports the answer; a store does not.
    fn decide(&self, request: &StoreRequest<'_>) -> StoreFuture<Outcome>;

    /// Returns units that a request of a key has spent or reserved, in the background, if possible.
    /// The release names the request by the instant in its receipt. Until it is sent, others can
    /// take the reservation of an offer. The result completes when the units are back; the release
    /// continues if it is dropped.
    fn release_in_background(
        &self,
        settings: &Arc<Settings>,
        key: &Key<'_>,
        release: Release,
        offer: Option<Arc<Offer>>,
    ) -> Option<Task>;

    /// Keeps an admitted hold until its guard ends it. `None` if this store renews no holds: then
    /// [`end_hold`](StoreCalls::end_hold) ends it.
    fn keep_hold(&self, _hold: &dyn Fn() -> RenewableHold) -> Option<Box<dyn HoldGuard>> {
        None
    }

    /// Ends a hold that the store has not kept. It does not wait, and cannot fail.
    fn end_hold(&self, _hold: &EndedHold<'_>) {}

    /// Forgets a key.
    fn reset(&self, settings: &Arc<Settings>, key: &Key<'_>) -> StoreFuture<()>;

    /// Returns the end of the block of a key, if the store knows the block without a call.
    fn blocked_until(&self, _settings: &Arc<Settings>, _key: &Key<'_>) -> Option<Instant> {
        None
    }

    /// Runs a task that waits for answers of this store to its end, if a runtime lives that long.
    fn spawn_background(&self, task: Task);

    /// Waits until all that was returned in the background is back, or was given up.
    fn flush(&self) -> Task {
        Box::pin(future::ready(()))
    }

    /// Proves that the store can decide.
    fn ping(&self) -> Ping {
        Box::pin(future::ready(Ok(())))
    }

    /// Returns the state of the store, without a call.
    fn health(&self) -> Health {
        Health::ready()
    }

    /// Returns the registry of the names of the limiters over this store. Two stores are the same,
    /// and decide together, if they share it.
    fn names(&self) -> &Names;

    /// Returns the observers that the limiters over the store inherit.
    fn observers(&self) -> Observers;

    fn add_observer(&self, observer: Arc<dyn Observer>);

    /// Returns the store that decides about fractions of the quotas while this one fails; `None`
    /// if no other store would be better.
    fn fallback(&self) -> Option<AnyStore> {
        None
    }
}
