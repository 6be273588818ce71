//! The Tower layer and its settings. What happens to a request is in `service.rs` and `future.rs`.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Response, request::Parts};
use tower_layer::Layer;

use crate::{
    algorithm::micros,
    limiter::AnyLimiter,
    limiter::MaxWait,
    middleware::admission::Shared,
    middleware::extractor::KeyExtractor,
    middleware::failure_policy::FailurePolicy,
    middleware::rule::Rule,
    middleware::service::RateLimit,
    middleware::{
        custom::Custom,
        http::{Headers, Http},
        protocol::{IntoCost, MissingKey, Protocol, Rejection},
    },
};

/// Limits the requests to a service, per key.
///
/// A request over the quota is answered instead of going on, or waits for its turn, if
/// [`max_wait`](RateLimitLayer::max_wait) or a leaky bucket lets it. Counts are the limiter's, and however
/// often the layer is applied or cloned, its services share them, and the number of those who wait. The
/// service must be `Clone`.
///
/// # Readiness
///
/// The layer asks the service for readiness after the decision, in the response future: `poll_ready` of
/// [`RateLimit`] is always ready and never fails. So a rejection never waits for the service, and a request holds no
/// readiness while a [`Rule`] looks up its charge, while the store decides, or while it waits. An error of the service's
/// `poll_ready` comes out of the response future, and the request is not charged then. Each request asks a clone of the
/// service, and calls that same clone.
///
/// | | outside of the layer | inside |
/// |---|---|---|
/// | `ConcurrencyLimit` | bounds all requests, those that wait for their turn or are rejected included; a rejection waits for a permit | only requests that go on take a permit |
/// | `LoadShed` | never sheds: the layer is always ready | sheds admitted requests that the service is not ready for; they stay charged |
/// | `Buffer` | never fills, and so bounds nothing | bounds the requests that the service has not taken yet; others wait until it has room |
///
/// The layer does not bound how many admitted requests wait for the readiness of the service. If the quotas do not
/// bound them enough, put `LoadShed` inside. To bound all requests, also those that wait or are rejected, use a
/// `ConcurrencyLimit` outside, or the server's own bound.
///
/// # Answers
///
/// | | answer | `Retry-After` | to gRPC |
/// |---|---|---|---|
/// | the quota is used up | 429, `quota-exceeded` | whole seconds, at least 1 | `RESOURCE_EXHAUSTED`, with `RetryInfo` |
/// | the cost is above what the quota can ever grant | 429, `quota-exceeded` | none | `RESOURCE_EXHAUSTED`, not to be retried |
/// | the request has no key, or a wrong one | 400 | none | `INVALID_ARGUMENT` |
/// | the service is set up wrong | 500 | none | `INTERNAL` |
/// | the store gives no answer, and the [policy](RateLimitLayer::on_failure) is `Closed` | 503, `temporary-reduced-capacity` | 1 | `UNAVAILABLE`, with `RetryInfo` |
///
/// A request is gRPC if it is a `POST` with the content type `application/grpc`, over any version of
/// HTTP, since calls that tonic-web translates from gRPC-Web may arrive over HTTP/1.1. Its rejection is
/// a response with status 200, trailers as its headers, and no body.
///
/// Every rejection carries `Cache-Control: no-store`, so that no cache answers other clients with it.
///
/// Responses carry the fields `RateLimit` and `RateLimit-Policy` of
/// draft-ietf-httpapi-ratelimit-headers-11, added to those of other layers. (Where layers are stacked, the
/// outer one counts a request that the inner one then refuses.) The
/// [`Decision`](crate::Decision) is in the extensions of the request and of the response.
///
/// # Examples
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
///
/// let limiter = Limiter::new(
///     MemoryStore::new(),
///     Algorithm::token_bucket(),
///     Quota::per_second(10).burst(20),
/// );
/// let app: Router = Router::new()
///     .route("/", get(|| async { "hello" }))
///     .layer(RateLimitLayer::new(limiter, key::Header::new("x-api-key")));
/// ```
///
/// # Example: another body
///
/// ```
/// use axum::body::Bytes; // or `bytes::Bytes`, which is the same
/// use http::header::CONTENT_TYPE;
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, Rejection, key};
///
/// # let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
/// let layer = RateLimitLayer::new(limiter, key::Global).map_refusal(|rejection, head, mut response| {
///     match rejection {
///         Rejection::Denied(_) => {
///             response.headers_mut().remove(CONTENT_TYPE);
///             response.map(|_| Bytes::from(format!("{} is busy", head.uri)))
///         }
///         _ => response,
///     }
/// });
/// # let _ = layer;
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct RateLimitLayer<P = Http>(Arc<Shared<P>>);

impl RateLimitLayer {
    /// Limits HTTP requests.
    ///
    /// The key comes from [`key::Header`](crate::key::Header), [`key::PeerIp`](crate::key::PeerIp),
    /// [`key::Global`](crate::key::Global), a closure over the head of the request, or a pair of them.
    pub fn new(limiter: impl Into<AnyLimiter>, key: impl KeyExtractor<Parts>) -> Self {
        Self(Arc::new(Shared::new(Http::by_key(limiter.into(), key))))
    }

    /// Limits HTTP requests by a [`Rule`], which says for each what it is charged: which limits, whose, and
    /// how much. An async closure is none: implement [`Rule`] for a type.
    ///
    /// # Examples
    ///
    /// Limits by plan, and one for all users together; the service's own probes are exempt:
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, RequestError};
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    ///     is_pro: bool,
    /// }
    ///
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
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
        Self(Arc::new(Shared::new(Http::by_rule(rule))))
    }

    /// Sets the header fields that tell a client how its quota stands: [`Headers::Draft11`] by default, others,
    /// or several; with none there is no `Retry-After` either.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Headers, Limiter, MemoryStore, Quota, RateLimitLayer, Reset, key};
    ///
    /// # let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .headers([Headers::Draft11, Headers::XRateLimit { reset: Reset::Epoch }]);
    /// let silent = layer.clone().headers([]);
    /// # let _ = silent;
    /// ```
    pub fn headers(self, headers: impl IntoIterator<Item = Headers>) -> Self {
        self.with(|http| http.fields.headers = headers.into_iter().collect())
    }

    /// Sets whether the extensions of requests and responses hold the
    /// [`Decision`](crate::Decision), and those of refusals the [`Rejection`]; they do by default.
    pub fn extensions(self, on: bool) -> Self {
        self.with(|http| http.extensions = on)
    }

    /// Sets which responses of the service are charged: all by default.
    ///
    /// Each request is charged before the service is called, so that many requests at once cannot pass the limit. If
    /// the closure returns `false`, the cost is returned, as by [`Charge::cancel`](crate::Charge::cancel). A
    /// request without a response stays charged: if the service fails, or the client disconnects.
    ///
    /// Count in a window: a bucket returns only what it has not refilled since the decision.
    ///
    /// The header fields report the state before the cost is returned.
    ///
    /// # Examples
    ///
    /// Five failed logins per minute, and as many that succeed as one likes:
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let limiter = Limiter::new(MemoryStore::new(), Algorithm::SlidingLog, Quota::per_minute(5));
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    /// # let _ = layer;
    /// ```
    pub fn charge_when(
        self,
        charge_when: impl Fn(&http::response::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.with(|http| http.charge_when = Some(Arc::new(charge_when)))
    }

    /// Sets whether the extensions of requests contain the [`Charge`](crate::Charge), for costs that are known later: the
    /// service can [settle](crate::Charge::settle) what it really used. They do not by default.
    ///
    /// The service can settle during the request or after its response, from any clone of the charge. With
    /// [`charge_when`](RateLimitLayer::charge_when), a response that is not charged returns what is still charged,
    /// and settling does nothing afterwards.
    ///
    /// The charge is exempt, and settling it does nothing, if the request was not counted: if it is
    /// [exempt](RateLimitLayer::exempt), if a [dry run](RateLimitLayer::dry_run) let it go on although it was denied, or
    /// under [`FailurePolicy::Open`]. Under [`FailurePolicy::Local`], it is settled in the memory of the process.
    ///
    /// If layers are stacked, the charge is that of the inner one. The header fields report the state before `settle`
    /// adjusted the cost.
    ///
    /// # Examples
    ///
    /// Tokens of a language model, of which a request is charged 500 beforehand:
    ///
    /// ```
    /// use axum::{Extension, Router, routing::post};
    /// use http::request::Parts;
    /// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer};
    ///
    /// async fn answer(Extension(charge): Extension<Charge>) -> Result<String, String> {
    ///     let used = 730; // as the model reports
    ///     charge.settle("tokens", used).await.map_err(|error| error.to_string())?;
    ///     Ok(String::from("42"))
    /// }
    ///
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::named(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let requests = limiter("requests", Quota::per_minute(60));
    /// let tokens = limiter("tokens", Quota::per_minute(100_000));
    /// let layer = RateLimitLayer::by_rule(move |_: &Parts| {
    ///     Charge::new(&requests, "alice").also(&tokens).cost(500)
    /// });
    /// let app: Router = Router::new().route("/", post(answer)).layer(layer.charge_handle(true));
    /// ```
    pub fn charge_handle(self, on: bool) -> Self {
        self.with(|http| http.charge_handle = on)
    }

    /// Sets a closure that every refusal passes through: it sees why the request was refused, the head
    /// of the request, and the response as it would be, and returns the response to send. Both have all of
    /// their body at once, as [`Bytes`]. That of a gRPC request's refusal is empty, and must stay so.
    /// A response that the closure returns without `Cache-Control` gets `no-store`.
    pub fn map_refusal(
        self,
        map: impl Fn(&Rejection, &Parts, Response<Bytes>) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.with(|http| http.map_refusal = Some(Arc::new(map)))
    }
}

impl<Req: 'static, Res: 'static> RateLimitLayer<Custom<Req, Res>> {
    /// Limits requests of any kind: `refusal` makes the response to one that may not go on.
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
    /// let limiter = Limiter::new(MemoryStore::new(), Algorithm::FixedWindow, Quota::per_hour(1));
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
        limiter: impl Into<AnyLimiter>,
        key: impl KeyExtractor<Req>,
        refusal: impl Fn(Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(Shared::new(Custom::by_key(limiter.into(), key, refusal))))
    }

    /// Limits requests of any kind by a [`Rule`].
    pub fn custom_by_rule(
        rule: impl Rule<Req>,
        refusal: impl Fn(Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self
    where
        Req: Send + Sync,
    {
        Self(Arc::new(Shared::new(Custom::by_rule(rule, refusal))))
    }
}

impl<P: Protocol> RateLimitLayer<P> {
    /// Sets what a request costs, 1 by default. The closure returns a `u32`, or a
    /// `Result<u32, RequestError>`. A [`Rule`] can set other costs.
    pub fn cost<C: IntoCost>(self, cost: impl Fn(&P::Head) -> C + Send + Sync + 'static) -> Self {
        self.with(|protocol| protocol.charging_mut().set_cost(cost))
    }

    /// Lets a request wait for its turn if that comes within `max_wait`, instead of being refused.
    ///
    /// Turns are booked when requests arrive: first come, first served, over all replicas. A request whose
    /// turn would come later is refused at once, and its retry-after is when it would be let wait (for
    /// [several keys](crate::Charge#waiting), when it could go on at once). Without
    /// this setting nobody waits, except in a leaky bucket, which lets wait for as long as a request has room
    /// in it; there `max_wait` is a further bound. So is the `grpc-timeout` of a gRPC request, in either case.
    ///
    /// A request that waits holds no readiness of the service, and if it is dropped it gives its turn back:
    /// see [`ResponseFuture`](crate::ResponseFuture).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new(MemoryStore::new(), Algorithm::SlidingLog, quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .max_wait(Duration::from_secs(2))
    ///     .max_waiting_per_key(20);
    /// # let _ = layer;
    /// ```
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        Arc::make_mut(&mut self.0).max_wait = MaxWait::UpTo(micros(max_wait));
        self
    }

    /// Sets by how much a waiting request may be late without asking again, 50 ms by default.
    ///
    /// A process that stands still (stopped, paused by its host, or overloaded) wakes after the instants that were
    /// reserved for its requests. If all of them went on then, the service would get more at once than the limiter
    /// promises. So lateness is measured when the wait ends: a request that is late by more than `max_lateness`
    /// releases its reservation and asks once more (over Redis after 20 ms), with what is left of its
    /// [`max_wait`](RateLimitLayer::max_wait). It goes on, waits again behind the others, or is denied. If nothing is
    /// left, it goes on only if the limiter allows it at this instant. A request that is late for the second time goes
    /// on.
    ///
    /// A stop between the end of the wait and the call of the service cannot be seen, nor one in the service or on the
    /// way to the server of a third party. A request that need not wait is never late.
    ///
    /// An answer of the store that arrives later than the reserved instant makes a request late, too: set
    /// `max_lateness` above the usual jitter of the answers.
    ///
    /// A sleep can be a millisecond late on an idle machine, and more on a busy one: with a `max_lateness` of less than
    /// 5 ms many requests ask twice. [`Duration::MAX`] lets all requests go on.
    /// [`Limiter::try_acquire`](crate::Limiter::try_acquire) and the like use the default.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// let quota = Quota::per_second(10).burst(1);
    /// let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .max_wait(Duration::from_secs(5))
    ///     .max_lateness(Duration::from_millis(20));
    /// # let _ = layer;
    /// ```
    pub fn max_lateness(mut self, max_lateness: Duration) -> Self {
        Arc::make_mut(&mut self.0).max_lateness = max_lateness;
        self
    }

    /// Sets how many requests may wait for their turns at once, 10,000 by default, those included that ask
    /// the store at the moment. While so many do, others go on if they need not wait, and are refused
    /// otherwise: their retry-after is when they could go on without waiting.
    ///
    /// It counts the requests of this layer's services in this process. One that waits takes about 0.9
    /// kB, one that asks Redis about four, its head and its body not included.
    pub fn max_waiting(mut self, most: usize) -> Self {
        Arc::make_mut(&mut self.0).waiters.set_most(most);
        self
    }

    /// Sets how many requests of one key may wait at once, by default 100, or as many as a leaky bucket
    /// holds. See [`max_waiting`](RateLimitLayer::max_waiting).
    ///
    /// With Redis, requests that are dropped while they wait are released in the background, up to 100 of one key in
    /// one call: about 0.5 us of the server for each request that waits for the key.
    pub fn max_waiting_per_key(mut self, most: usize) -> Self {
        Arc::make_mut(&mut self.0).waiters.set_most_per_key(most);
        self
    }

    /// Sets which requests go on without being counted.
    ///
    /// # Examples
    ///
    /// Browsers ask with `OPTIONS` whether a request to another origin is allowed:
    ///
    /// ```
    /// use http::{Method, request::Parts};
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
    /// let layer = RateLimitLayer::new(limiter, key::Global)
    ///     .exempt(|head: &Parts| head.method == Method::OPTIONS);
    /// # let _ = layer;
    /// ```
    pub fn exempt(self, exempt: impl Fn(&P::Head) -> bool + Send + Sync + 'static) -> Self {
        self.with(|protocol| protocol.charging_mut().set_exempt(exempt))
    }

    /// Sets whether all requests go on, whatever the layer decides; they are counted, and the
    /// [`Decision`](crate::Decision) is told as ever, in extensions and header fields. Nobody waits.
    ///
    /// So a new limit can be watched before it is enforced.
    pub fn dry_run(mut self, on: bool) -> Self {
        Arc::make_mut(&mut self.0).dry_run = on;
        self
    }

    /// Sets what happens to a request when the store gives no answer; it is refused by default.
    ///
    /// [`Decision::source`](crate::Decision::source) tells whether a decision came from the store.
    ///
    /// # Panics
    ///
    /// If a [share](FailurePolicy::Local) is not above 0 and at most 1.
    ///
    /// # Examples
    ///
    /// Each of four replicas keeps to a quarter of the quota while Redis is away:
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, FailurePolicy, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    ///
    /// # let limiter = Limiter::new(MemoryStore::new(), Algorithm::token_bucket(), Quota::per_second(10));
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .on_failure(FailurePolicy::Local { share: 0.25 });
    /// # let _ = layer;
    /// ```
    #[track_caller]
    pub fn on_failure(mut self, policy: FailurePolicy) -> Self {
        if let FailurePolicy::Local { share } = policy {
            assert!(share > 0.0 && share <= 1.0, "a share is above 0 and at most 1, not {share}");
        }
        Arc::make_mut(&mut self.0).on_failure = policy;
        self
    }

    /// Sets what happens to a request without a key; it is refused by default.
    pub fn missing_key(self, missing_key: MissingKey) -> Self {
        self.with(|protocol| protocol.charging_mut().missing_key = missing_key)
    }
}

impl<P: Clone> RateLimitLayer<P> {
    fn with(mut self, change: impl FnOnce(&mut P)) -> Self {
        change(&mut Arc::make_mut(&mut self.0).protocol);
        self
    }
}

impl<S, P> Layer<S> for RateLimitLayer<P> {
    type Service = RateLimit<S, P>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimit::new(inner, self.0.clone())
    }
}
