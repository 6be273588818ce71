//! An open connection: the handle that takes its commands, and the future that drives it.

use std::{
    future::{self, poll_fn},
    pin::Pin,
    sync::{Arc, Mutex, Weak},
    task::Poll,
};

use redis::{
    Cmd, Pipeline, RedisFuture, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::task::AbortHandle;

use super::traffic::Traffic;
use crate::sync::lock;

/// An open connection after the login. It ends when all clones are dropped, even if a reply is
/// missing.
#[derive(Clone)]
pub(crate) struct Session {
    pub(super) driver: Arc<Driver>,
    pub(crate) commands: MultiplexedConnection,
    pub(crate) traffic: Arc<Traffic>,
}

/// The future that reads and writes for a connection.
pub(crate) type DriverFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) struct Driver {
    /// `None` once a line drives the connection. The task holds it, so that the connection is
    /// closed when the runtime ends.
    future: Weak<Mutex<Option<DriverFuture>>>,
    task: AbortHandle,
    /// Logs in again with new credentials, if there is a provider of them.
    renewal: Option<AbortHandle>,
    traffic: Arc<Traffic>,
}

impl Driver {
    pub(super) fn spawn(
        future: impl Future<Output = ()> + Send + 'static,
        renewal: Option<impl Future<Output = ()> + Send + 'static>,
        traffic: Arc<Traffic>,
    ) -> Self {
        let future = Arc::new(Mutex::new(Some(Box::pin(future) as DriverFuture)));
        let held = Arc::downgrade(&future);
        let task = tokio::spawn(poll_fn(move |cx| match &mut *lock(&future) {
            Some(future) => future.as_mut().poll(cx),
            None => Poll::Ready(()),
        }));
        let renewal = renewal.map(|renewal| tokio::spawn(renewal).abort_handle());
        Self { future: held, task: task.abort_handle(), renewal, traffic }
    }
}

impl Session {
    /// Returns the future that drives the connection. The caller has to poll it from now on.
    pub(crate) fn take_driver(&self) -> DriverFuture {
        let driver = self.driver.future.upgrade().and_then(|future| lock(&future).take());
        driver.unwrap_or_else(|| Box::pin(future::ready(()))) // its runtime has ended
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.traffic.end();
        self.task.abort();
        self.renewal.iter().for_each(AbortHandle::abort);
    }
}

impl ConnectionLike for Session {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        self.commands.req_packed_command(command)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.commands.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.commands.get_db()
    }
}
