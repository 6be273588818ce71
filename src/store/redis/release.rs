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
/// can carry many of them. `held` is dropped when it was executed, or was given up.
pub(super) fn job(
    params: &Params,
    key: &str,
    release: Release,
    offer: Option<Arc<Offer>>,
    held: impl Any + Send,
) -> Job {
    let (head, script) = wire::command(1, |arguments| script::release(key, params, arguments));
    let item = ReleaseItem { release, offer, held: Mutex::new(Some(held)) };
    Job::Batch(Batch::new(head, &script.text, item))
}

struct ReleaseItem<H> {
    release: Release,
    /// Lets other requests take the reservation until the release is sent.
    offer: Option<Arc<Offer>>,
    /// Dropped when the release was executed for the first time, or was given up.
    held: Mutex<Option<H>>,
}

impl<H: Send> Item for ReleaseItem<H> {
    fn write(&self) -> Vec<u8> {
        let Self { release, offer, .. } = self;
        match offer {
            Some(offer) if !offer.end() => vec![],
            _ => script::release_item(release, offer.as_ref().is_some_and(|it| it.is_for_others())),
        }
    }

    fn executed(&self, reply: &Value) -> bool {
        let held = lock(&self.held).take();
        drop(held);
        let is_kept = wire::is_kept(reply);
        is_kept && self.offer.as_ref().is_some_and(|offer| offer.begin_again())
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
