use std::{
    mem,
    sync::Arc,
    task::{Context, Poll},
};

use tower_service::Service;

use crate::{
    future::ResponseFuture,
    protocol::{Exchange, Http},
    shared::Shared,
};

/// A service whose requests are limited. See [`RateLimitLayer`](crate::RateLimitLayer).
#[derive(Debug)]
pub struct RateLimit<S, P = Http> {
    inner: S,
    shared: Arc<Shared<P>>,
}

impl<S, P> RateLimit<S, P> {
    pub(crate) fn new(inner: S, shared: Arc<Shared<P>>) -> Self {
        Self { inner, shared }
    }
}

impl<S: Clone, P> Clone for RateLimit<S, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<S, P, Req> Service<Req> for RateLimit<S, P>
where
    S: Service<Req> + Clone,
    P: Exchange<Req, S::Response>,
{
    type Response = P::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S, P, Req>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        // The instance that was polled ready is the one to call: a clone of it need not be ready.
        let clone = self.inner.clone();
        let ready = mem::replace(&mut self.inner, clone);
        ResponseFuture::new(ready, self.shared.clone(), request)
    }
}
