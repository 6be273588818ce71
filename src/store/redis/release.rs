//! Releases, which return units that requests have spent or reserved. The client decides when
//! those in the background are sent.

use std::{any::Any, pin::Pin};

use tower_ratelimit_engine::script;

use super::{
    connections::{Batch, Item, Job},
    wire,
};
use crate::{
    algorithm::{Params, Release},
    error::StoreError,
};

/// Calls that release units of a key.
pub(crate) type ReleaseFuture = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// Returns a job that releases units of a key. One call can carry many of them. `held` is dropped
/// when it is done or given up.
pub(super) fn job(
    params: &Params,
    key: &str,
    release: Release,
    held: impl Any + Send + Sync,
) -> Job {
    let (head, script) = wire::command(1, |arguments| script::release(key, params, arguments));
    let item = Item::new(script::release_item(&release), held);
    Job::Batch(Batch::new(head, &script.text, item))
}

/// Returns a job that releases units of a key by separate calls.
pub(super) fn task(key: &str, run: impl Fn() -> ReleaseFuture + Send + Sync + 'static) -> Job {
    let run = move || -> Pin<Box<dyn Future<Output = bool> + Send>> {
        let released = run();
        Box::pin(async move { released.await.err().is_none_or(|error| error.may_have_run()) })
    };
    Job::task(key.to_owned(), Box::new(run))
}
