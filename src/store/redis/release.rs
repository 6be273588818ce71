//! Releases, which return units that requests have spent or reserved. The transport decides when
//! those in the background are sent.

use std::pin::Pin;

use super::{
    script,
    transport::{Batch, Client, Command, Deadline, Job},
};
use crate::{
    algorithm::{Params, Release},
    error::StoreError,
};

/// Calls that release units of a key.
pub(crate) type ReleaseFuture = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// Releases units of a key before the deadline.
pub(super) async fn execute(
    client: &Client,
    deadline: Deadline,
    params: &Params,
    key: &str,
    release: Release,
) -> Result<(), StoreError> {
    let (mut command, script) = script::release(key, params);
    command.arg(script::release_item(&release));
    let command = Command::script(&command, &script.text);
    let (_, _): (script::Reply, _) = client.execute(deadline, command).await?;
    Ok(())
}

/// Returns a job that releases units of a key. One call can carry many of them.
pub(super) fn job(params: &Params, key: &str, release: Release) -> Job {
    let (head, script) = script::release(key, params);
    Job::Batch(Batch::new(head, &script.text, script::release_item(&release).into()))
}

/// Returns a job that releases units of a key by separate calls.
pub(super) fn task(key: &str, run: impl Fn() -> ReleaseFuture + Send + Sync + 'static) -> Job {
    let run = move || -> Pin<Box<dyn Future<Output = bool> + Send>> {
        let released = run();
        Box::pin(async move { released.await.err().is_none_or(|error| error.may_have_run()) })
    };
    Job::task(key.to_owned(), Box::new(run))
}
