//! Releases, which return units that requests have spent or reserved. The client decides when
//! those in the background are sent.

use std::{
    any::Any,
    pin::Pin,
    sync::{Arc, Mutex},
};

use redis::Value;
use tower_ratelimit_engine::script;

use super::{
    connections::{Batch, Item, Job},
    wire,
};
use crate::{
    algorithm::{Params, Release},
    error::StoreError,
    store::Offer,
    sync::lock,
};

/// Calls that release units of a key.
pub(crate) type ReleaseFuture = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// Returns a job that releases units of a key, unless another request takes them before. One call
/// can carry many of them. `until_executed` is dropped when it was executed, or was given up;
/// `returned` is called when a release that Redis has kept at first returns the units.
pub(super) fn job(
    params: &Params,
    key: &str,
    release: Release,
    offer: Option<Arc<Offer>>,
    until_executed: impl Any + Send,
    returned: impl Fn() + Send + Sync + 'static,
) -> Job {
    let (head, script) = wire::command(1, |arguments| script::release(key, params, arguments));
    let until_executed = Mutex::new(Some(until_executed));
    let item = ReleaseItem { release, offer, until_executed, returned };
    Job::Batch(Batch::new(head, &script.text, item))
}

struct ReleaseItem<H, R> {
    release: Release,
    /// Lets other requests take the reservation until the release is sent.
    offer: Option<Arc<Offer>>,
    /// Dropped when the release was executed for the first time, or was given up.
    until_executed: Mutex<Option<H>>,
    returned: R,
}

impl<H: Send, R: Fn() + Send + Sync> Item for ReleaseItem<H, R> {
    fn write(&self) -> Vec<u8> {
        let Self { release, offer, .. } = self;
        match offer {
            Some(offer) if !offer.end() => vec![],
            _ => script::release_item(release, offer.as_ref().is_some_and(|it| it.is_for_others())),
        }
    }

    fn executed(&self, reply: &Value) -> bool {
        let until_executed = lock(&self.until_executed).take();
        let is_first = until_executed.is_some();
        drop(until_executed);
        if wire::is_kept(reply) {
            return self.offer.as_ref().is_some_and(|offer| offer.begin_again());
        }
        if !is_first {
            (self.returned)();
        }
        false
    }
}

/// Returns a job that releases units of a key by separate calls.
pub(super) fn task(key: &str, run: impl Fn() -> ReleaseFuture + Send + Sync + 'static) -> Job {
    let run = move || -> Pin<Box<dyn Future<Output = bool> + Send>> {
        let released = run();
        Box::pin(async move { released.await.err().is_none_or(|error| error.may_have_run()) })
    };
    Job::task(key.to_owned(), Box::new(run))
}
