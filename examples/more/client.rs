//! A reqwest client that keeps the limits of a vendor together with all other processes. It knows
//! no vendor. `docs/outgoing.md` explains it, and contains the same code.

use std::{
    future::{Ready, ready},
    time::Duration,
};

use reqwest::{Client, Request, Response, Url, redirect::Policy as Redirects};
use tokio::time::timeout;
use tower::{BoxError, ServiceBuilder, ServiceExt, retry::Policy, util::BoxCloneSyncService};
use tower_ratelimit::{
    Algorithm, FailurePolicy, Limiter, Quota, RateLimitLayer, VendorState,
    layer::{Custom, Rejection},
    store::AnyStore,
};

/// Make one for each store. Its clones share the limits, and so do other processes.
#[derive(Clone)]
pub struct ApiClient {
    store: AnyStore,
    service: BoxCloneSyncService<Request, Response, BoxError>,
}

impl ApiClient {
    /// Sends requests to each host at this rate, and at most `places` of them at a time. A request
    /// waits for each of the two for up to `max_wait`.
    pub fn new(store: AnyStore, rate: Quota, places: u64, max_wait: Duration) -> Self {
        let places = Quota::concurrent(places);
        let rate = Limiter::new("rate", store.clone(), Algorithm::token_bucket(), rate);
        let places = Limiter::new("places", store.clone(), Algorithm::concurrency(), places);
        // A redirect that reqwest follows would be a request that nothing counts.
        let http = Client::builder().redirect(Redirects::none()).timeout(Duration::from_secs(30));
        let http = http.build().expect("TLS and the resolver are available");
        let limits = [rate.clone(), places.clone()];
        let service = ServiceBuilder::new()
            .retry(WhenBlocked { retries: 3, max_wait })
            .layer(limit(places, max_wait))
            .layer(limit(rate, max_wait))
            // Inside of the limits, so that all responses are responses of vendors.
            .and_then(move |response| learn(limits.clone(), response))
            .service(http);
        Self { store, service: BoxCloneSyncService::new(service) }
    }

    /// Sends a request, later if necessary. The extensions of the response to a request that the
    /// vendor has not executed, and that cannot be sent in time, contain a `Rejection`.
    pub async fn send(&self, request: Request) -> Result<Response, BoxError> {
        self.service.clone().oneshot(request).await
    }

    /// Gives the places of requests that have ended back. Call it before the process exits, when
    /// none is in flight.
    pub async fn flush(&self) {
        let _ = timeout(Duration::from_secs(2), self.store.flush()).await;
    }
}

fn limit(limiter: Limiter, max_wait: Duration) -> RateLimitLayer<Custom<Request, Response>> {
    RateLimitLayer::custom(limiter, |request: &Request| host(request.url()), reject)
        .max_wait(max_wait)
        .max_waiting_per_key(1_000)
        .on_failure(FailurePolicy::Wait)
}

/// Returns the key of a request: its scheme, host and port.
pub fn host(url: &Url) -> String {
    url.origin().ascii_serialization()
}

/// Makes the response to a request that is not sent, with the `Rejection` in its extensions.
fn reject(rejection: &Rejection, _: &Request) -> Response {
    rejection.to_response().map(|body| body.into_bytes()).into()
}

/// The time for which a vendor rejects requests.
#[derive(Clone)]
struct Blocked(Duration);

/// Adopts what the vendor says about its limit. Also blocks the places, so that requests that wait
/// for one hear of the block.
async fn learn(limits: [Limiter; 2], mut response: Response) -> Result<Response, BoxError> {
    let state = VendorState::from_response(response.status(), response.headers());
    let host = host(response.url());
    for limit in &limits {
        if let Err(error) = limit.learn(&host, state).await {
            eprintln!("cannot learn from the response of {host}: {error}");
            return Ok(response);
        }
    }
    // Others were answered, or may have been executed.
    let is_rejected = [403, 418, 420, 429, 503, 529].contains(&response.status().as_u16());
    if let Some(time) = state.blocked_for().filter(|_| is_rejected) {
        response.extensions_mut().insert(Blocked(time));
    }
    Ok(response)
}

/// Sends a request again that the vendor has rejected, when the block is over: the limits let it
/// wait. If the block is too long, the caller gets the response of the vendor.
#[derive(Clone)]
struct WhenBlocked {
    retries: u32,
    max_wait: Duration,
}

impl Policy<Request, Response, BoxError> for WhenBlocked {
    type Future = Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request,
        result: &mut Result<Response, BoxError>,
    ) -> Option<Ready<()>> {
        let Blocked(time) = result.as_ref().ok()?.extensions().get()?;
        self.retries = self.retries.checked_sub(1)?;
        (*time <= self.max_wait).then(|| ready(()))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        request.try_clone() // `None` if the body is a stream
    }
}
