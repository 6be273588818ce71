//! The home of the work that no request waits for: one thread of the process, with a runtime of its
//! own. A task of the application that computes, and a runtime that ends or is not driven, do not
//! delay it. It sends no command.

use std::{
    future, io,
    sync::{Mutex, OnceLock, mpsc},
    thread,
    time::Duration,
};

use tokio::{
    runtime::{self, Builder, Handle},
    task::{AbortHandle, JoinSet},
    time::sleep,
};

use crate::sync::lock;

/// The pause before a task that has panicked starts again: it could panic again at once.
const RESTART_AFTER: Duration = Duration::from_millis(100);

static HOME: OnceLock<Handle> = OnceLock::new();

/// Starts the thread, unless it runs. It ends with the process.
pub fn start() -> io::Result<&'static Handle> {
    static STARTING: Mutex<()> = Mutex::new(());
    if let Some(home) = HOME.get() {
        return Ok(home);
    }
    let _starting = lock(&STARTING);
    if let Some(home) = HOME.get() {
        return Ok(home);
    }
    let (sender, made) = mpsc::channel();
    // A runtime must not be dropped in a runtime of the caller, so the thread makes it.
    let run = move || match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            let _ = sender.send(Ok(runtime.handle().clone()));
            runtime.block_on(future::pending::<()>());
        }
        Err(error) => _ = sender.send(Err(error)),
    };
    thread::Builder::new().name("ratelimit-redis".to_owned()).spawn(run)?;
    let handle = made.recv().map_err(io::Error::other)??;
    Ok(HOME.get_or_init(|| handle))
}

fn handle() -> &'static Handle {
    start().expect("the settings of a store have started the thread")
}

/// Returns whether a runtime is that of the home.
pub(crate) fn is(runtime: runtime::Id) -> bool {
    HOME.get().is_some_and(|home| home.id() == runtime)
}

/// Runs a task.
pub fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
    handle().spawn(observed(task)).abort_handle()
}

/// Runs the task that `make` returns; another one after it has panicked.
pub fn supervise<F>(make: impl Fn() -> F + Send + 'static) -> AbortHandle
where
    F: Future<Output = ()> + Send + 'static,
{
    spawn(async move {
        loop {
            let mut task = JoinSet::new();
            task.spawn(observed(make()));
            match task.join_next().await {
                Some(Err(error)) if error.is_panic() => sleep(RESTART_AFTER).await,
                _ => return,
            }
        }
    })
}

/// Lets a task report its events where the caller reports its own.
#[cfg(feature = "tracing")]
fn observed<F: Future>(task: F) -> impl Future<Output = F::Output> {
    tracing::instrument::WithSubscriber::with_current_subscriber(task)
}

#[cfg(not(feature = "tracing"))]
fn observed<F: Future>(task: F) -> impl Future<Output = F::Output> {
    task
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    };

    use super::*;

    #[test]
    fn a_task_that_panics_starts_again_and_delays_no_other() {
        let (starts, (sender, ends)) = (Arc::<AtomicUsize>::default(), mpsc::channel());
        let (made, reported) = (starts.clone(), sender.clone());
        supervise(move || {
            let (number, sender) = (made.fetch_add(1, SeqCst), reported.clone());
            async move {
                assert!(number > 0, "scripted: the first task panics");
                sender.send("restarted").unwrap();
            }
        });
        spawn(async move { sender.send("other").unwrap() });
        assert_eq!([ends.recv(), ends.recv()], [Ok("other"), Ok("restarted")]);
        assert!(ends.recv().is_err(), "a task that has ended does not start again");
        assert_eq!(starts.load(SeqCst), 2);
    }

    #[test]
    fn all_tasks_run_in_one_thread() {
        let (sender, ids) = mpsc::channel();
        for _ in 0..2 {
            let sender = sender.clone();
            let ids = || (thread::current().id(), Handle::current().id());
            spawn(async move { sender.send(ids()).unwrap() });
        }
        let (first, second) = (ids.recv().unwrap(), ids.recv().unwrap());
        assert_eq!(first, second);
        assert!(is(first.1) && first.0 != thread::current().id());
    }
}
