//! The service that [`RateLimitLayer`](crate::RateLimitLayer) makes. The path of a request is in
//! `passage.rs`.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use tower_service::Service;

use crate::middleware::{
    http::Http,
    passage::{ResponseFuture, Shared},
    protocol::Protocol,
};

/// A service with limited requests. See [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The service is always ready: the response future polls the readiness of the inner service after
/// the decision. The future resolves to the response or the error of the inner service, to an error
/// of its `poll_ready`, or to a rejection. A rejection never waits for the inner service.
///
/// # Cancel safety
///
/// Dropping the future before its first poll spends nothing. If it is dropped before the inner
/// service is called, or if that service fails or panics instead of becoming ready, the units that
/// the request has spent or reserved are released exactly once; requests queued behind it keep
/// their reservations. In memory the release happens in the drop, with Redis in the background: see
/// [dropped requests](crate::guide::redis_capacity#dropped-requests). If the future is dropped
/// after the inner service is called, the cost stays spent, and what the request holds counts as
/// used.
///
/// # Examples
///
/// ```
/// use tower::Layer;
/// use tower_ratelimit::{Quota, RateLimitLayer, layer::RateLimit};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = RateLimitLayer::per_ip(Quota::per_second(10));
/// let service: RateLimit<axum::Router, _> = layer.layer(axum::Router::new());
/// # let _ = service;
/// # Ok(())
/// # }
/// ```
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
    P: Protocol<Req, S::Response>,
{
    type Response = P::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S, P, Req>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        ResponseFuture::new(self.inner.clone(), self.shared.clone(), request)
    }
}
