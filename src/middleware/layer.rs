//! The Tower layer and its settings. The path of a request is in `passage.rs`.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, request::Parts, response};
use http_body::Body;
use tower_layer::Layer;

use crate::{
    algorithm::Algorithm,
    limiter::{FailurePolicy, IntoLimiter, Limiter, MaxWait, VendorState},
    middleware::{
        custom::Custom,
        extractor::{KeyExtractor, PeerIp},
        http::{BoxError, Headers, Http, MapRejection, Meter, ResponseBody, Usage},
        passage::{IntoMatch, Pricing, RateLimit, Shared, matcher},
        protocol::ProtocolBase,
        rejection::{MissingKey, Rejection},
        rule::Rule,
    },
    observe::Observer,
    quota::Quota,
    store::AnyStore,
};

/// A layer that limits the requests to a service, per key.
///
/// # Examples
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
///
/// let limiter = Limiter::new(
///     "api",
///     MemoryStore::new(),
///     Algorithm::token_bucket(),
///     Quota::per_second(10).burst(20),
/// );
/// let app: Router = Router::new()
///     .route("/", get(|| async { "hello" }))
///     .layer(RateLimitLayer::new(limiter, key::header("x-api-key")));
/// ```
///
/// # Methods
///
/// | to | call |
/// |---|---|
/// | limit each client address | [`per_ip`](RateLimitLayer::per_ip) |
/// | limit by any key | [`new`](RateLimitLayer::new) |
/// | limit the requests in flight | [`concurrency`](RateLimitLayer::concurrency) |
/// | choose limits, keys and costs for each request | [`by_rule`](RateLimitLayer::by_rule) |
/// | charge more than 1 | [`cost`](RateLimitLayer::cost), [`settle_by`](RateLimitLayer::settle_by) |
/// | wait instead of rejecting | [`max_wait`](RateLimitLayer::max_wait) |
/// | let requests through, or keep them out | [`exempt`](RateLimitLayer::exempt), [`forbid`](RateLimitLayer::forbid) |
/// | change headers and rejections | [`headers`](RateLimitLayer::headers), [`map_rejection`](RateLimitLayer::map_rejection) |
/// | choose what happens while the store fails | [`on_failure`](RateLimitLayer::on_failure) |
/// | observe a new limit first | [`dry_run`](RateLimitLayer::dry_run) |
/// | limit requests that are not HTTP | [`custom`](RateLimitLayer::custom) |
///
/// # Details
///
/// A request over the quota is rejected by default. It can wait instead, if
/// [`max_wait`](RateLimitLayer::max_wait) or a leaky bucket allows it. The limiter holds the
/// counts. All services of a layer and of its clones share the counts, and the bounds on waiting
/// requests. The inner service must be `Clone`: see [below](#services-that-are-not-clone).
///
/// # Readiness
///
/// The response future polls the readiness of the service after the decision: `poll_ready` of
/// [`RateLimit`] is always ready and never fails. So a rejection never waits for the service. A
/// request holds no readiness while a [`Rule`] looks up its charge, while the store decides, or
/// while the request waits. The response future returns errors of the service's `poll_ready`, and
/// the request is not charged then. Each request polls a clone of the service, and calls that same
/// clone.
///
/// | | outside of the layer | inside |
/// |---|---|---|
/// | `ConcurrencyLimit` | bounds all requests, including those that wait or are rejected; a rejection waits for a permit | only requests that proceed take a permit |
/// | `LoadShed` | never sheds: the layer is always ready | sheds admitted requests if the service is not ready for them; they stay charged |
/// | `Buffer` | never fills, and so bounds nothing | bounds the requests that the service has not taken yet; others wait until it has room |
///
/// The number of admitted requests that wait for the readiness of the service is not bounded by the
/// layer. If the quotas do not bound it enough, put `LoadShed` inside. To bound all requests,
/// including those that wait or are rejected, use a `ConcurrencyLimit` outside, or the bound of the
/// server.
///
/// # Services that are not `Clone`
///
/// Each request calls a clone of the inner service. Around a service that cannot be cloned, such as
/// `BoxService`, the compiler says "the trait bound `BoxService<..>: Clone` is not satisfied", or
/// "the method `ready` exists for struct `RateLimit<BoxService<..>>`, but its trait bounds were not
/// satisfied". Box it as a `BoxCloneService`, or put a `BufferLayer` inside of the layer, whose
/// error type is `BoxError`:
///
/// ```
/// use http::{Request, Response};
/// use tower::{BoxError, Service, ServiceBuilder, buffer::BufferLayer, util::BoxService};
/// use tower_ratelimit::{Limiter, RateLimitLayer, key, layer::ResponseBody};
///
/// type Boxed = BoxService<Request<String>, Response<String>, BoxError>;
///
/// fn limited(
///     limiter: Limiter,
///     service: Boxed,
/// ) -> impl Service<Request<String>, Response = Response<ResponseBody<String>>> + Clone {
///     ServiceBuilder::new()
///         .layer(RateLimitLayer::new(limiter, key::Global))
///         .layer(BufferLayer::new(1_024)) // admitted requests that the service has not taken yet
///         .service(service)
/// }
/// ```
///
/// # Responses
///
/// | | response | `Retry-After` | for gRPC |
/// |---|---|---|---|
/// | the quota is used up | 429, `quota-exceeded` | whole seconds, at least 1 | `RESOURCE_EXHAUSTED`, with `RetryInfo` |
/// | the cost is above what the quota can ever grant | 429, `quota-exceeded` | none | `RESOURCE_EXHAUSTED`, not to be retried |
/// | the request has no key, or is invalid | 400 | none | `INVALID_ARGUMENT` |
/// | the client is [forbidden](RateLimitLayer::forbid) | 403 | none | `PERMISSION_DENIED` |
/// | the service is misconfigured | 500 | none | `INTERNAL` |
/// | the store does not decide, and the [policy](RateLimitLayer::on_failure) is `Closed` or `Wait` | 503, `temporary-reduced-capacity` | 1 | `UNAVAILABLE`, with `RetryInfo` |
///
/// A request is gRPC if it is a `POST` with the content type `application/grpc`. Any version of
/// HTTP counts, since calls that tonic-web translates from gRPC-Web can arrive over HTTP/1.1. Its
/// rejection is a response with status 200, trailers as its headers, and no body.
///
/// Every rejection carries `Cache-Control: no-store`, so that no cache returns it to other clients.
///
/// Responses carry the headers `RateLimit` and `RateLimit-Policy` of
/// draft-ietf-httpapi-ratelimit-headers-11, added to those of other layers. Of stacked layers, the
/// outer one also counts requests that the inner one rejects.
///
/// Handlers and other layers can read the [`Decision`](crate::Decision) from the
/// [extensions](RateLimitLayer::extensions), which are off by default.
///
/// # Example: a custom error body
///
/// ```
/// use http::header::CONTENT_TYPE;
/// use tower_ratelimit::{
///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Rejection,
/// };
///
/// # let quota = Quota::per_second(10);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
/// let layer = RateLimitLayer::new(limiter, key::Global).map_rejection(
///     |rejection, head, mut response| match rejection {
///         Rejection::Denied(_) => {
///             response.headers_mut().remove(CONTENT_TYPE);
///             response.map(|_| format!("{} is busy", head.uri).into())
///         }
///         _ => response,
///     },
/// );
/// # let _ = layer;
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct RateLimitLayer<P = Http>(Arc<Shared<P>>);

impl RateLimitLayer {
    /// Limits HTTP requests.
    ///
    /// The key extractor is, for example, [`key::header`](crate::key::header()),
    /// [`key::PeerIp`](crate::key::PeerIp), [`key::Global`](struct@crate::key::Global), a
    /// closure over the head of the request, or a tuple of extractors.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::header("x-api-key"));
    /// # let _ = layer;
    /// ```
    pub fn new(limiter: impl IntoLimiter, key: impl KeyExtractor<Parts>) -> Self {
        Self::of(Http::new(Pricing::by_key(limiter, key)))
    }

    /// Limits the HTTP requests of each client address, with counts in the memory of the process.
    ///
    /// The limiter is a token bucket over a new [`MemoryStore`](crate::MemoryStore), named
    /// `default`. Its key, [`key::PeerIp`](crate::key::PeerIp), needs the address of the peer: with
    /// axum 0.8, serve the router with `into_make_service_with_connect_info::<SocketAddr>()`.
    ///
    /// **Behind a proxy, all clients would share one quota**: there, use
    /// [`new`](RateLimitLayer::new) with [`key::ClientIp`](crate::key::ClientIp).
    ///
    /// # Panics
    ///
    /// If the quota counts [concurrent](Quota::concurrent) units: use
    /// [`concurrency`](RateLimitLayer::concurrency).
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tower_ratelimit::{Quota, RateLimitLayer};
    ///
    /// let app: Router = Router::new()
    ///     .route("/", get(|| async { "hello" }))
    ///     .layer(RateLimitLayer::per_ip(Quota::per_second(10).burst(20)));
    /// ```
    #[track_caller]
    pub fn per_ip(quota: Quota) -> Self {
        let store = AnyStore::of_process();
        Self::new(Limiter::new("default", store, Algorithm::token_bucket(), quota), PeerIp)
    }

    /// Limits how many HTTP requests of a key are in flight, with counts in the memory of the
    /// process. A request counts until its response body has ended or is dropped. The future of the
    /// handler and the body are dropped before the place is free.
    ///
    /// The limiter is one of [`Algorithm::concurrency`] over a new
    /// [`MemoryStore`](crate::MemoryStore), named `concurrency`. For a limit over several
    /// processes, pass a limiter with a `RedisStore` to [`new`](RateLimitLayer::new). See
    /// [concurrency](crate::guide::concurrency).
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or above 2^46.
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tower_ratelimit::{RateLimitLayer, key};
    ///
    /// let app: Router = Router::new()
    ///     .route("/", get(|| async { "hello" }))
    ///     .layer(RateLimitLayer::concurrency(10, key::header("x-api-key")));
    /// ```
    #[track_caller]
    pub fn concurrency(limit: u64, key: impl KeyExtractor<Parts>) -> Self {
        let (store, quota) = (AnyStore::of_process(), Quota::concurrent(limit));
        Self::new(Limiter::new("concurrency", store, Algorithm::concurrency(), quota), key)
    }

    /// Limits HTTP requests by a [`Rule`], which computes the limits, keys and costs of each
    /// request. An async closure is not a rule: implement [`Rule`] for a type.
    ///
    /// # Examples
    ///
    /// Limits by plan, and a limit for all users together; health checks are exempt:
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, layer::RequestError,
    /// };
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    ///     is_pro: bool,
    /// }
    ///
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let free = limiter("free", Quota::per_second(10));
    /// let pro = limiter("pro", Quota::per_second(100));
    /// let all = limiter("all", Quota::per_second(10_000));
    ///
    /// let layer = RateLimitLayer::by_rule(move |head: &Parts| {
    ///     if head.uri.path() == "/health" {
    ///         return Ok(Charge::exempt());
    ///     }
    ///     let user = head.extensions.get::<User>();
    ///     let user = user.ok_or_else(|| RequestError::missing_key("log in first"))?;
    ///     let plan = if user.is_pro { &pro } else { &free };
    ///     Ok(Charge::new(plan, user.id).and(Charge::new(&all, "everybody")))
    /// });
    /// # let _ = layer;
    /// ```
    pub fn by_rule(rule: impl Rule<Parts>) -> Self {
        Self::of(Http::new(Pricing::by_rule(rule)))
    }

    /// Sets the headers that report the state of the quota to clients. The default is
    /// [`Headers::Draft11`]; that of a later version can be a later draft. If the list is empty,
    /// there is no `Retry-After` either.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{
    ///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Headers,
    /// };
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .headers([Headers::Draft11, Headers::XRateLimitEpoch]);
    /// let silent = layer.clone().headers([]);
    /// # let _ = silent;
    /// ```
    pub fn headers(self, headers: impl IntoIterator<Item = Headers>) -> Self {
        self.set(|shared| shared.protocol.headers.set_dialects(headers))
    }

    /// Sets whether the extensions of requests and responses contain the
    /// [`Decision`](crate::Decision), and the extensions of rejections the [`Rejection`]. The
    /// default is `false`, because each request would pay for it with 6 allocations.
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Extension, Router, routing::get};
    /// use tower_ratelimit::{Decision, Quota, RateLimitLayer};
    ///
    /// async fn quota(Extension(decision): Extension<Decision>) -> String {
    ///     format!("{} requests remain", decision.remaining())
    /// }
    ///
    /// let layer = RateLimitLayer::per_ip(Quota::per_second(10)).extensions(true);
    /// let app: Router = Router::new().route("/quota", get(quota)).layer(layer);
    /// ```
    pub fn extensions(self, on: bool) -> Self {
        self.set(|shared| shared.protocol.extensions = on)
    }

    /// Sets whether responses name the mistake of a misconfigured service, and how to correct it.
    /// The default is `false`: the log names it, and clients get a 500 with plain words.
    ///
    /// Use it in development. The mistake is a
    /// [`RequestError::Misconfigured`](crate::layer::RequestError::Misconfigured).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::per_ip(Quota::per_second(10))
    ///     .error_details(cfg!(debug_assertions)); // not in release builds
    /// # let _ = layer;
    /// ```
    pub fn error_details(self, on: bool) -> Self {
        self.set(|shared| shared.protocol.error_details = on)
    }

    /// Sets which responses of the service are charged. The default is all.
    ///
    /// The cost is [held](crate::Limiter::hold) before the service is called, so that concurrent
    /// requests cannot exceed the limit. With the response it is spent, or returned if the closure
    /// returns `false`. If there is no response, because the service fails or the client
    /// disconnects, the request is charged.
    ///
    /// A leaky bucket and a limiter that Redisson shares hold no units: requests are rejected with
    /// 500 then, and the log contains the mistake.
    ///
    /// The headers report the state before the cost is returned.
    ///
    /// # Examples
    ///
    /// Five failed logins per minute; successful logins are not limited:
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_minute(5);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    /// # let _ = layer;
    /// ```
    pub fn charge_when(
        self,
        charge_when: impl Fn(&response::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|shared| shared.protocol.charge_when = Some(Arc::new(charge_when)))
    }

    /// Sets whether the extensions of requests contain a [`Settle`](crate::layer::Settle), by which
    /// the service settles costs that are known later. The default is `false`.
    ///
    /// In a layer with a key extractor, the [cost](RateLimitLayer::cost) is the estimate that is
    /// held. A [`Rule`] says which costs are [estimates](crate::Charge::estimate).
    ///
    /// The service can settle from any clone of the handle, until the end of the response body: see
    /// [`settle_by`](RateLimitLayer::settle_by) for its end. What is not settled then counts as
    /// used; so does everything if there is no response, because the service fails or the client
    /// disconnects. To settle later than that, call [`keep`](crate::layer::Settle::keep). With
    /// [`charge_when`](RateLimitLayer::charge_when), all costs are estimates, and a response that
    /// is not charged returns what is not settled.
    ///
    /// The handle is there for each request. Settling does nothing if the request was not counted,
    /// because:
    ///
    /// * it is [exempt](RateLimitLayer::exempt), or its [cost](RateLimitLayer::cost) is 0
    /// * it was denied in a [dry run](RateLimitLayer::dry_run)
    /// * the store did not decide, and the policy is [`FailurePolicy::Open`]
    ///
    /// Under [`FailurePolicy::Local`], the units are held in the memory of the process.
    ///
    /// If layers are stacked, the handle is that of the inner one. The headers report the state
    /// before the cost was settled.
    ///
    /// # Examples
    ///
    /// Tokens of a language model, with an estimate of 500 per request:
    ///
    /// ```
    /// use axum::{Extension, Router, routing::post};
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, layer::Settle,
    /// };
    ///
    /// async fn answer(Extension(settle): Extension<Settle>) -> &'static str {
    ///     let used = 730; // as the model reports
    ///     if let Err(error) = settle.settle("tokens", used) {
    ///         eprintln!("{error}"); // the work is done: answer anyway
    ///     }
    ///     "42"
    /// }
    ///
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let requests = limiter("requests", Quota::per_minute(60));
    /// let tokens = limiter("tokens", Quota::per_minute(100_000));
    /// let layer = RateLimitLayer::by_rule(move |_: &Parts| {
    ///     Ok(Charge::new(&requests, "alice").also(&tokens).estimate(500))
    /// });
    /// let app: Router = Router::new().route("/", post(answer)).layer(layer.settle_handle(true));
    /// ```
    pub fn settle_handle(self, on: bool) -> Self {
        self.set(|shared| shared.protocol.settle_handle = on)
    }

    /// Sets how the response says what its request has used. The layer then settles what the
    /// request holds. The closure receives the head of each response, and returns its
    /// [`Meter`](crate::layer::Meter): a [`Usage`](crate::layer::Usage) if the head contains the
    /// numbers, or a type that sees the data and the trailers of the body.
    ///
    /// In a layer with a key extractor, the [cost](RateLimitLayer::cost) is the estimate that is
    /// held. A [`Rule`] says which costs are [estimates](crate::Charge::estimate). The closure is
    /// called only if the request holds units.
    ///
    /// The layer settles once, at the end of the body. If a client disconnects or a body fails, the
    /// layer settles what the meter has seen.
    ///
    /// | response | its end |
    /// |---|---|
    /// | with a body | its last frame, or its drop |
    /// | without a body: to `HEAD`, and 204 and 304 | the drop of the empty body |
    /// | 101, and a successful one to `CONNECT` | the response, unless the service calls [`keep`](crate::layer::Settle::keep) |
    /// | none, because the service fails or the request is dropped | the error, or the drop; the estimate counts as used |
    ///
    /// With [`settle_handle`](RateLimitLayer::settle_handle), the service can settle first; the
    /// layer then settles the other limiters. If a closure or a meter panics, the estimate counts
    /// as used. A response that is not [charged](RateLimitLayer::charge_when) has no meter.
    ///
    /// # Examples
    ///
    /// A service that reports the tokens in a header:
    ///
    /// ```
    /// use http::{Request, Response, request::Parts};
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_ratelimit::{
    ///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Usage,
    /// };
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::per_day(100_000);
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(&tokens, key::Global)
    ///     .cost(|_: &Parts| 500)
    ///     .settle_by(|response| {
    ///         let used = response.headers.get("x-tokens-used")?.to_str().ok()?.parse().ok()?;
    ///         Some(Usage::of("tokens", used))
    ///     });
    ///
    /// let service = layer.layer(service_fn(async |_: Request<String>| {
    ///     Response::builder().header("x-tokens-used", "180").body("42".to_owned())
    /// }));
    /// let response = service.oneshot(Request::new("What is 6 x 7?".to_owned())).await?;
    /// assert_eq!(tokens.peek("global").await?.held(), 500);
    /// drop(response); // sent, or cut off
    /// assert_eq!(tokens.peek("global").await?.remaining(), 99_820);
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle_by<M: Meter>(
        self,
        meter: impl Fn(&response::Parts) -> M + Send + Sync + 'static,
    ) -> Self {
        self.set(|shared| {
            shared.protocol.settle_by = Some(Arc::new(move |head| Box::new(meter(head))))
        })
    }

    /// Lets the limiter learn from the responses of the service, which is a client of a vendor with
    /// limits of its own: see [`Limiter::learn`]. The closure reads the status and the headers;
    /// [`VendorState::from_response`] knows those that vendors send.
    ///
    /// If the vendor rejects requests, the key is blocked before the response is returned, so that
    /// requests wait, or are rejected, until the vendor accepts them again. The other responses
    /// cost no call, except for one that says that the vendor has fewer units left than the key. If
    /// the store fails, the response is returned as it is, and observers get the failure.
    ///
    /// Put the layer around the client itself, inside of layers that retry. Nothing is learned for
    /// requests that are not counted, or charged to several limits: of those, only the service
    /// knows which one is the vendor's, and can call [`Limiter::learn`].
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{
    ///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, VendorState, key,
    /// };
    ///
    /// # let store = MemoryStore::new();
    /// let quota = Quota::per_hour(4_800).burst(100);
    /// let github = Limiter::new("github", store, Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(github, key::Global)
    ///     .max_wait(Duration::from_secs(60))
    ///     .learn(VendorState::from_response);
    /// # let _ = layer;
    /// ```
    pub fn learn(
        self,
        learn: impl Fn(StatusCode, &HeaderMap) -> VendorState + Send + Sync + 'static,
    ) -> Self {
        self.set(|shared| shared.protocol.learn = Some(Arc::new(learn)))
    }

    /// Sets a closure that can change every rejection. It receives the reason of the rejection, the
    /// head of the request and the default response, and returns the response to send: that one,
    /// changed, or another one, such as a response of axum.
    ///
    /// A body that is not complete immediately is collected, up to 64 KiB. If it is longer or
    /// fails, the response is 500, and the log describes the mistake. The body of a gRPC rejection
    /// is empty and must stay empty.
    ///
    /// The layer adds the headers of the limit that the response lacks: `Retry-After`,
    /// `Cache-Control: no-store`, and those of [`headers`](RateLimitLayer::headers).
    ///
    /// # Examples
    ///
    /// A body in JSON, by axum:
    ///
    /// ```
    /// use axum::{Json, response::IntoResponse};
    /// use serde_json::json;
    /// use tower_ratelimit::{Quota, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::per_ip(Quota::per_second(10))
    ///     .map_rejection(|rejection, _head, response| {
    ///         let retry = rejection.retry_after_secs();
    ///         let error = json!({"error": rejection.to_string(), "retry": retry});
    ///         (response.status(), Json(error)).into_response()
    ///     });
    /// # let _ = layer;
    /// ```
    pub fn map_rejection<F, B>(self, map: F) -> Self
    where
        F: Fn(&Rejection, &Parts, Response<ResponseBody>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.set(|shared| shared.protocol.map_rejection = Some(MapRejection::new(map)))
    }
}

impl<Req: 'static, Res: 'static> RateLimitLayer<Custom<Req, Res>> {
    /// Limits requests of any type. The closure `reject` makes the response to a rejected request.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Infallible> {
    /// let quota = Quota::per_hour(1);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::fixed_window(), quota);
    /// let mut shout = ServiceBuilder::new()
    ///     .layer(RateLimitLayer::custom(
    ///         limiter,
    ///         |name: &String| name.clone(),
    ///         |_rejection, name: &String| format!("not so fast, {name}"),
    ///     ))
    ///     .service(service_fn(async |name: String| Ok::<_, Infallible>(name.to_uppercase())));
    ///
    /// assert_eq!(shout.ready().await?.call("ada".to_owned()).await?, "ADA");
    /// assert_eq!(shout.ready().await?.call("ada".to_owned()).await?, "not so fast, ada");
    /// # Ok(())
    /// # }
    /// ```
    pub fn custom(
        limiter: impl IntoLimiter,
        key: impl KeyExtractor<Req>,
        reject: impl Fn(&Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self {
        Self::of(Custom::new(Pricing::by_key(limiter, key), reject))
    }

    /// Limits requests of any type by a [`Rule`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::custom_by_rule(
    ///     move |user: &String| Ok(Charge::new(&limiter, user)),
    ///     |rejection, user| format!("{user}: {rejection}"),
    /// );
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    pub fn custom_by_rule(
        rule: impl Rule<Req>,
        reject: impl Fn(&Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self
    where
        Req: Send + Sync,
    {
        Self::of(Custom::new(Pricing::by_rule(rule), reject))
    }

    /// Lets the limiter learn from the responses of the service, as in a layer for
    /// [HTTP](RateLimitLayer::learn). The closure reads the response.
    ///
    /// # Examples
    ///
    /// The client of reqwest:
    ///
    /// ```
    /// use reqwest::{Request, Response};
    /// use tower_ratelimit::{Limiter, RateLimitLayer, VendorState, layer::Custom};
    ///
    /// fn layer(limiter: Limiter) -> RateLimitLayer<Custom<Request, Response>> {
    ///     RateLimitLayer::custom(
    ///         limiter,
    ///         |request: &Request| request.url().origin().ascii_serialization(),
    ///         |rejection, _| rejection.to_response().map(|body| body.into_bytes()).into(),
    ///     )
    ///     .learn(|response: &Response| {
    ///         VendorState::from_response(response.status(), response.headers())
    ///     })
    /// }
    /// # let _ = layer;
    /// ```
    pub fn learn(self, learn: impl Fn(&Res) -> VendorState + Send + Sync + 'static) -> Self {
        self.set(|shared| shared.protocol.learn = Some(Arc::new(learn)))
    }

    /// Sets a closure that determines from a response what its request has used, so that the layer
    /// settles what the request holds. If it returns `None`, or does not name a limiter, the
    /// estimate counts as used; so does everything if there is no response.
    ///
    /// If the layer has a key extractor, the [cost](RateLimitLayer::cost) is the estimate that is
    /// held. A [`Rule`] says which costs are [estimates](crate::Charge::estimate).
    ///
    /// # Examples
    ///
    /// Jobs that say how many rows they have read:
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_ratelimit::{
    ///     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Usage,
    /// };
    ///
    /// struct Done {
    ///     rows: u64,
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::per_day(100_000);
    /// let rows = Limiter::new("rows", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::custom(&rows, key::Global, |_, _: &String| Done { rows: 0 })
    ///     .cost(|_| 1_000)
    ///     .settle_by(|done| Some(Usage::of("rows", done.rows)));
    ///
    /// let service = service_fn(async |_: String| Ok::<_, Infallible>(Done { rows: 120 }));
    /// layer.layer(service).oneshot("a query".to_owned()).await?;
    /// assert_eq!(rows.peek("global").await?.remaining(), 99_880);
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle_by(self, usage: impl Fn(&Res) -> Option<Usage> + Send + Sync + 'static) -> Self {
        self.set(|shared| shared.protocol.settle_by = Some(Arc::new(usage)))
    }
}

impl<P: ProtocolBase> RateLimitLayer<P> {
    /// Sets the cost of requests. The default is 1. To set another cost for some limits, or to
    /// reject a request, use a [`Rule`].
    ///
    /// In a layer with a rule, it is the cost of those limits for which the
    /// [`Charge`](crate::Charge) says none. A limit for which the rule says a cost or an
    /// [estimate](crate::Charge::estimate) keeps that one: this setting has no effect on it.
    ///
    /// A request with a cost of 0 proceeds without being counted. If a rule sets a cost of 0 for
    /// one of several limits, the others are charged.
    ///
    /// # Examples
    ///
    /// The cost of the layer is for the tokens; the rule says that a request is one request:
    ///
    /// ```
    /// use http::{Request, Response, request::Parts};
    /// use std::convert::Infallible;
    /// use tower::{Layer, ServiceExt, service_fn};
    /// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = MemoryStore::new();
    /// # let limiter = |name, quota| {
    /// #     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// # };
    /// let requests = limiter("requests", Quota::per_hour(60));
    /// let tokens = limiter("tokens", Quota::per_hour(100_000));
    /// let rule = {
    ///     let (requests, tokens) = (requests.clone(), tokens.clone());
    ///     move |_: &Parts| Ok(Charge::new(&requests, "alice").cost(1).also(&tokens))
    /// };
    /// let layer = RateLimitLayer::by_rule(rule).cost(|_: &Parts| 500);
    ///
    /// let service = layer.layer(service_fn(async |_: Request<String>| {
    ///     Ok::<_, Infallible>(Response::new(String::from("42")))
    /// }));
    /// service.oneshot(Request::new(String::from("What is 6 x 7?"))).await?;
    /// assert_eq!(requests.peek("alice").await?.remaining(), 59);
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 99_500);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cost(self, cost: impl Fn(&P::Head) -> u64 + Send + Sync + 'static) -> Self {
        self.set(|shared| shared.protocol.pricing_mut().cost = Some(Arc::new(cost)))
    }

    /// Lets a request wait for up to `max_wait` instead of being rejected.
    ///
    /// The store reserves an instant for the request when it arrives: first come, first served,
    /// over all replicas. Requests that would have to wait longer are rejected immediately. Their
    /// retry-after is the time after which they would be allowed to wait. For [several
    /// keys](crate::Charge#waiting), it is the time after which they would proceed immediately.
    ///
    /// Waiting needs a runtime of tokio with timers (`enable_time`, or `enable_all`). Without one,
    /// a request that has to wait panics.
    ///
    /// Without this setting requests do not wait, except in a leaky bucket, where a request waits
    /// if there is room in the bucket. There, `max_wait` is a further bound. The `grpc-timeout` of
    /// a gRPC request bounds the wait in either case.
    ///
    /// Choose no more than the timeout of the clients: those that leave have reserved instants,
    /// which only requests of the same process [take over](crate::guide::waiting#dropped-requests).
    ///
    /// A waiting request holds no readiness of the service. If it is dropped, its reservation is
    /// released: see [`RateLimit`](RateLimit#cancel-safety).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .max_wait(Duration::from_secs(2))
    ///     .max_waiting_per_key(20);
    /// # let _ = layer;
    /// ```
    pub fn max_wait(self, max_wait: Duration) -> Self {
        self.set(|shared| shared.max_wait = MaxWait::up_to(max_wait))
    }

    /// Sets the lateness up to which a waiting request proceeds without a second decision. The
    /// default is 50 ms.
    ///
    /// If a process does not run for a while (it is stopped, paused by its host, or overloaded), it
    /// continues after the instants that were reserved for its requests. If all of them proceeded
    /// then, the service would get more requests in a short time than the limiter promises. So
    /// lateness is measured when the wait ends: a request that is late by more than `max_lateness`
    /// releases its reservation and is decided once more (with Redis after 20 ms), with the rest of
    /// its [`max_wait`](RateLimitLayer::max_wait). It proceeds, waits again behind the others, or
    /// is denied. If no wait is left, it proceeds only if the limiter allows it at this instant. A
    /// request that is late for the second time proceeds.
    ///
    /// A stop between the end of the wait and the call of the service cannot be detected. Neither
    /// can a stop in the service, or on the way to a third-party server. A request without a wait
    /// is never late.
    ///
    /// An answer of the store that arrives after the reserved instant also makes a request late:
    /// set `max_lateness` above the usual jitter of the answers.
    ///
    /// A sleep can be a millisecond late on an idle machine, and more on a busy one. With a
    /// `max_lateness` below 5 ms, many requests are decided twice. With [`Duration::MAX`], late
    /// requests always proceed. [`Limiter::try_acquire`](crate::Limiter::try_acquire) and similar
    /// methods use the default.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_second(10).burst(1);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .max_wait(Duration::from_secs(5))
    ///     .max_lateness(Duration::from_millis(20));
    /// # let _ = layer;
    /// ```
    pub fn max_lateness(self, max_lateness: Duration) -> Self {
        self.set(|shared| shared.max_lateness = max_lateness)
    }

    /// Sets the maximum number of requests that wait at the same time. The default is 10,000.
    /// Requests that await a decision of the store count, too. At the maximum, requests that do not
    /// have to wait proceed, and others are rejected; their retry-after is the time after which
    /// they could proceed without waiting.
    ///
    /// The requests of all services of this layer in this process are counted. A waiting request
    /// takes about 1 kB, and one that awaits a decision of Redis about 5 kB, without its head and
    /// body.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .max_wait(Duration::from_secs(2))
    ///     .max_waiting(1_000);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    pub fn max_waiting(self, max: usize) -> Self {
        self.set(|shared| shared.wait_queue.set_max(max))
    }

    /// Sets the maximum number of requests of one key that wait at the same time. The default is
    /// 100, and for a leaky bucket the number of requests that it holds. See
    /// [`max_waiting`](RateLimitLayer::max_waiting).
    ///
    /// With Redis, the reservations of requests that are dropped while they wait are released in
    /// the background, up to 100 of one key in one call. A call takes the server about 0.5 us for
    /// each request that waits for the key.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .max_wait(Duration::from_secs(2))
    ///     .max_waiting_per_key(20);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    pub fn max_waiting_per_key(self, max: usize) -> Self {
        self.set(|shared| shared.wait_queue.set_max_per_key(max))
    }

    /// Sets which requests are rejected with 403, before they are counted. If this method is called
    /// several times, each closure forbids requests.
    ///
    /// The closure returns a `bool`. The closures of [`within`](crate::key::ClientIp::within) and
    /// [`one_of`](crate::key::Value::one_of) return a `Result<bool, RequestError>`: a request that
    /// they cannot read is rejected.
    ///
    /// For another status, use a [`Rule`] that returns
    /// [`RequestError::with_status`](crate::layer::RequestError::with_status).
    ///
    /// # Examples
    ///
    /// Forbids the clients of two networks and an API key, and exempts the own network:
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .forbid(key::PeerIp.within(["203.0.113.0/24", "2001:db8::/32"]))
    ///     .forbid(key::header("x-api-key").one_of(["a leaked key"]))
    ///     .exempt(key::PeerIp.within(["10.0.0.0/8"]));
    /// # let _ = layer;
    /// ```
    pub fn forbid<M: IntoMatch>(
        self,
        matches: impl Fn(&P::Head) -> M + Send + Sync + 'static,
    ) -> Self {
        self.set(|shared| shared.protocol.pricing_mut().forbidden.push(matcher(matches)))
    }

    /// Sets which requests proceed without being counted, unless they are
    /// [forbidden](RateLimitLayer::forbid). If this method is called several times, each closure
    /// exempts requests. The closure returns what that of [`forbid`](RateLimitLayer::forbid)
    /// returns.
    ///
    /// # Examples
    ///
    /// Exempts the `OPTIONS` requests that browsers send before requests to another origin:
    ///
    /// ```
    /// use http::{Method, request::Parts};
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .exempt(|head: &Parts| head.method == Method::OPTIONS);
    /// # let _ = layer;
    /// ```
    pub fn exempt<M: IntoMatch>(
        self,
        matches: impl Fn(&P::Head) -> M + Send + Sync + 'static,
    ) -> Self {
        self.set(|shared| shared.protocol.pricing_mut().exempt.push(matcher(matches)))
    }

    /// Sets whether all requests proceed, even if they are denied. The default is `false`. Requests
    /// are counted, and extensions and headers report the [`Decision`](crate::Decision), but no
    /// request waits.
    ///
    /// Use it to observe a new limit before it is enforced.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let is_enforced = false; // of the configuration
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp).dry_run(!is_enforced);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    pub fn dry_run(self, on: bool) -> Self {
        self.set(|shared| shared.dry_run = on)
    }

    /// Spreads the retry-after of denials: each is longer by a random part of it, up to `jitter`,
    /// which is from 0 to 1. The default is 0, the exact time.
    ///
    /// Clients that are denied together, because a window or a [block](crate::Limiter::block) ends
    /// for all of them, would otherwise come back together. The time is never shorter than the
    /// exact one. It is that of the [`Decision`](crate::Decision) in the rejection, so all parts of
    /// a response agree: `Retry-After`, the `t` of `RateLimit`, the body, the details of gRPC. The
    /// reset of [`Headers::Draft06`](crate::layer::Headers::Draft06) and
    /// [`XRateLimit`](crate::layer::Headers::XRateLimit) is that of the whole quota, and stays
    /// exact.
    ///
    /// `Retry-After` has whole seconds. For times below 10 s, a jitter of 0.1 is less than that:
    /// choose a larger one.
    ///
    /// # Panics
    ///
    /// If `jitter` is not from 0 to 1.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_minute(600);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::fixed_window(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global).retry_jitter(0.1);
    /// # let _ = layer;
    /// ```
    #[track_caller]
    pub fn retry_jitter(self, jitter: f64) -> Self {
        assert!((0.0..=1.0).contains(&jitter), "retry_jitter: {jitter} is not from 0 to 1");
        self.set(|shared| shared.retry_jitter = jitter)
    }

    /// Sets what the layer does with a request if the store does not decide. The default is to
    /// reject it. [`FailurePolicy::Wait`] needs a [`max_wait`](RateLimitLayer::max_wait).
    ///
    /// [`Decision::source`](crate::Decision::source) reports whether the store decided.
    ///
    /// # Examples
    ///
    /// Each of four replicas enforces a quarter of the quota while Redis is unavailable:
    ///
    /// ```
    /// use tower_ratelimit::{
    ///     Algorithm, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer, key,
    /// };
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .on_failure(FailurePolicy::local(0.25));
    /// # let _ = layer;
    /// ```
    pub fn on_failure(self, policy: FailurePolicy) -> Self {
        self.set(|shared| shared.on_failure = policy)
    }

    /// Adds an observer for the rejections of this layer, and no other events.
    ///
    /// Only a layer with a [`Rule`] needs it: a request that the rule rejects has no limiter, and
    /// so no store whose [observers](crate::observe) could receive the rejection. An observer of
    /// both receives each rejection once.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, observe,
    /// };
    ///
    /// # let quota = Quota::per_second(10);
    /// let metrics = Arc::new(observe::metrics());
    /// let store = MemoryStore::new();
    /// store.add_observer(metrics.clone());
    /// let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&limiter, "all")))
    ///     .observe(metrics);
    /// # let _ = layer;
    /// ```
    pub fn observe(self, observer: Arc<dyn Observer>) -> Self {
        self.set(|shared| {
            shared.observers.add(observer);
        })
    }

    /// Sets what the layer does with a request without a key. The default is to reject it.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{
    /// #     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::MissingKey,
    /// # };
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::header("x-api-key"))
    ///     .missing_key(MissingKey::Share); // all requests without a key are one client
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    pub fn missing_key(self, missing_key: MissingKey) -> Self {
        self.set(|shared| shared.protocol.pricing_mut().missing_key = missing_key)
    }

    fn of(protocol: P) -> Self {
        Self(Arc::new(Shared::new(protocol)))
    }

    fn set(mut self, change: impl FnOnce(&mut Shared<P>)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }
}

impl<S, P> Layer<S> for RateLimitLayer<P> {
    type Service = RateLimit<S, P>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.0.clone())
    }
}
