//! The logins of a connection whose credentials come from a provider. The crate `redis` performs
//! them; this notices that a server has rejected one.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use redis::{
    RedisResult,
    auth::{BasicAuth, StreamingCredentialsProvider},
};

use super::traffic::Traffic;

/// The source of the user and the password.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) provider: Arc<dyn StreamingCredentialsProvider>,
    /// Called with the name of a server that rejects new credentials on an open connection.
    pub(crate) on_rejected: Arc<dyn Fn(&str) + Send + Sync>,
}

type Updates = Pin<Box<dyn futures_core::Stream<Item = RedisResult<BasicAuth>> + Send>>;

/// The provider for one connection. It reports a login that the server rejects.
#[derive(Clone)]
pub(super) struct Logins {
    pub(super) credentials: Credentials,
    pub(super) server: Arc<str>,
    pub(super) traffic: Arc<Traffic>,
}

/// The logins of a connection. The crate takes the next credentials when a login was accepted, and
/// drops this if it was rejected, or if the connection has ended.
struct Login {
    updates: Updates,
    of: Logins,
    /// The number of credentials so far. The crate logs in with the first ones when it connects.
    count: usize,
    /// True until the crate asks for the next credentials.
    is_under_way: bool,
}

impl StreamingCredentialsProvider for Logins {
    fn subscribe(&self) -> Updates {
        let (updates, of) = (self.credentials.provider.subscribe(), self.clone());
        Box::pin(Login { updates, of, count: 0, is_under_way: false })
    }
}

impl futures_core::Stream for Login {
    type Item = RedisResult<BasicAuth>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.is_under_way = false;
        let next = ready!(self.updates.as_mut().poll_next(cx));
        self.is_under_way = matches!(next, Some(Ok(_)));
        self.count += 1;
        Poll::Ready(next)
    }
}

impl Drop for Login {
    fn drop(&mut self) {
        if self.is_under_way && self.count > 1 && !self.of.traffic.has_ended() {
            (self.of.credentials.on_rejected)(&self.of.server);
        }
    }
}
