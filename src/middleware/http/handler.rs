//! Responses of handlers that check a limiter themselves: the same as those of a layer.

use http::{HeaderMap, Response};

use super::{body::ResponseBody, headers::HeaderWriter, problem};
use crate::{
    decision::Decision,
    middleware::rejection::{Rejection, RequestError},
    observe::log::{self, Throttle},
};

impl Rejection {
    /// Returns the response that a layer gives by default: status, headers and problem details. Its
    /// extensions contain the rejection, so that a client that limits itself can tell it from a
    /// response of the server.
    ///
    /// With the feature `axum`, a rejection also implements `IntoResponse`. For gRPC, return a
    /// status of tonic instead. The mistake of a [misconfigured](RequestError::Misconfigured)
    /// service is logged, as by a layer.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, layer::Rejection};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(1);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// limiter.spend("alice", 1).await?;
    ///
    /// let decision = limiter.check("alice").await?;
    /// assert!(!decision.is_allowed());
    /// let response = Rejection::Denied(decision).to_response();
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers()["retry-after"], "60");
    /// assert!(matches!(response.extensions().get(), Some(Rejection::Denied(_))));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn to_response(&self) -> Response<ResponseBody> {
        static MISTAKES: Throttle = Throttle::new();
        match self {
            Self::Request(RequestError::Misconfigured { message: error }) => {
                log::misconfigured(&MISTAKES, error);
            }
            Self::Store(error) => log::hidden(error),
            _ => {}
        }
        let headers = HeaderWriter::new(None).for_rejection(self, None);
        let mut response = problem::response(headers, self).map(ResponseBody::rejection);
        response.extensions_mut().insert(self.clone());
        response
    }
}

/// The response of [`to_response`](Rejection::to_response).
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Rejection {
    fn into_response(self) -> axum::response::Response {
        self.to_response().map(axum::body::Body::new)
    }
}

impl Decision {
    /// Returns the headers that a layer adds by default: `RateLimit` and `RateLimit-Policy`; after
    /// a denial, also `Retry-After` and `Cache-Control: no-store`. There are none if the
    /// [source](Decision::source) is [`Source::Open`](crate::store::Source::Open).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(10);
    /// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let headers = limiter.check("alice").await?.headers();
    /// assert_eq!(headers["ratelimit"], "\"api\";r=9;t=6");
    /// assert_eq!(headers["ratelimit-policy"], "\"api\";q=10;w=60");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let writer = HeaderWriter::new(None);
        if !self.is_allowed() {
            return writer.for_rejection(&Rejection::Denied(self.clone()), None);
        }
        let mut headers = HeaderMap::new();
        writer.add(&mut headers, self, None);
        headers
    }
}
