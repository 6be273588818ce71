//! A reqwest client with a quota for each host. It knows no vendor.

use std::{
    future::{Ready, ready},
    time::Duration,
};

use reqwest::{Client, Request, Response, StatusCode, Url, redirect::Policy as Redirects};
use tower::{BoxError, ServiceBuilder, ServiceExt, retry::Policy, util::BoxCloneService};
use tower_ratelimit::{
    Limiter, RateLimitLayer,
    http::{Rejection, VendorState},
};

/// Returns a client whose clones share the quota. Requests wait for the quota of their host and for
/// the end of its blocks. With retries, a request takes at most `deadline` in all. Redirects are
/// returned: the limit would not count a request that the client sends by itself.
pub fn client(
    limiter: Limiter,
    deadline: Duration,
) -> BoxCloneService<Request, Response, BoxError> {
    let client = Client::builder().redirect(Redirects::none()).build();
    let limit = RateLimitLayer::custom(limiter.clone(), host, reject).max_wait(deadline);
    ServiceBuilder::new()
        .timeout(deadline)
        .retry(WhenBusy)
        .layer(limit)
        // Inside the limit, so that all responses are those of vendors.
        .and_then(move |response| learn(limiter.clone(), response))
        .service(client.expect("TLS and the resolver are available"))
        .boxed_clone()
}

/// Returns the key of a request: its scheme, host and port.
fn host(request: &Request) -> String {
    key(request.url())
}

pub fn key(url: &Url) -> String {
    url.origin().ascii_serialization()
}

/// Makes the response to a request that is not sent. Its extensions contain the `Rejection`.
fn reject(rejection: &Rejection, _: &Request) -> Response {
    let mut response = rejection.to_response().map(|body| body.into_bytes());
    response.extensions_mut().insert(rejection.clone());
    response.into()
}

/// A `429` of a vendor whose host is blocked, so that the request can be sent again.
#[derive(Clone)]
struct Blocked;

/// Blocks a host for all callers, on all replicas, if it has too many requests. `.learn(..)` of the
/// layer does the same; here, the retry must know whether the store has failed.
async fn learn(limiter: Limiter, mut response: Response) -> Result<Response, BoxError> {
    let state = VendorState::from_response(response.status(), response.headers());
    let host = key(response.url());
    match limiter.learn(&host, state).await {
        Ok(()) if response.status() == StatusCode::TOO_MANY_REQUESTS => {
            response.extensions_mut().insert(Blocked);
        }
        Ok(()) => {}
        Err(error) => eprintln!("cannot block {host}: {error}"),
    }
    Ok(response)
}

/// Sends a request again after the `429` of a vendor. The limit lets it wait until the block ends,
/// or rejects it immediately if that is after the deadline.
#[derive(Clone)]
struct WhenBusy;

impl Policy<Request, Response, BoxError> for WhenBusy {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request,
        result: &mut Result<Response, BoxError>,
    ) -> Option<Ready<()>> {
        let response = result.as_ref().ok()?;
        response.extensions().get::<Blocked>().map(|_| ready(()))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        request.try_clone() // `None` if the body is a stream
    }
}
