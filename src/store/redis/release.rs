//! Releases, which return units that requests have spent or reserved: their form in a script call.
//! The transport decides when those in the background are sent.

use std::pin::Pin;

use redis::Cmd;

use super::{
    Script,
    transport::{Batch, Client, Command, Deadline, Job},
};
use crate::{
    algorithm::{Params, Release},
    store::StoreError,
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
    let mut command = head(params, key);
    command.arg(packed(release));
    let command = Command::script(&command, &Script::alone(params).text);
    let (_, _): (Vec<u64>, _) = client.execute(deadline, command).await?;
    Ok(())
}

/// Returns a job that releases units of a key. One call can carry many of them.
pub(super) fn job(params: &Params, key: &str, release: Release) -> Job {
    let text = &Script::alone(params).text;
    Job::Batch(Batch::new(head(params, key), text, packed(release).into()))
}

/// Returns a job that releases units of a key by calls of its own.
pub(super) fn task(key: &str, run: impl Fn() -> ReleaseFuture + Send + Sync + 'static) -> Job {
    let run = move || -> Pin<Box<dyn Future<Output = bool> + Send>> {
        let released = run();
        Box::pin(async move { released.await.err().is_none_or(|error| error.may_have_run()) })
    };
    Job::task(key.to_owned(), Box::new(run))
}

/// Returns the script call without its last argument, the packed releases.
fn head(params: &Params, key: &str) -> Cmd {
    let mut head = redis::cmd("EVALSHA");
    head.arg(&*Script::alone(params).hash).arg(1).arg(key).arg("release").arg(0).arg(0);
    for arg in params.args() {
        head.arg(arg as u64);
    }
    head
}

fn packed(release: Release) -> Vec<u8> {
    let Release { instant, units, kept } = release;
    let instant = instant.expect("a release names the request");
    [instant, units, kept].map(f64::to_le_bytes).concat()
}
