//! Rejections: why the layer responds instead of the service, errors in requests, and the setting
//! for requests without a key. The responses that report a rejection are in `http/`.

use std::{borrow::Cow, error::Error as StdError, fmt, time::Duration};

use http::StatusCode;

use crate::{
    decision::{Decision, whole_seconds},
    error::{Error, StoreError},
    observe::Event,
};

/// The text for clients of a misconfigured service: the mistake itself is for its developers.
const MISCONFIGURED: &str = "The service is not set up correctly; its log names the mistake.";

/// `Retry-After` of a rejection because the store did not decide.
const STORE_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The reason for a rejection: the layer responds instead of the service.
///
/// A handler that checks a limiter itself can return it: with the feature `axum`, it implements
/// `IntoResponse`; for other servers, call [`to_response`](Rejection::to_response).
///
/// Its text says what happened, and names the limiter: `rate limit exceeded; try again in 60 s
/// (limiter "api")`. The time is [rounded up](Rejection::retry_after_secs), as in the default
/// response. A client that limits itself can tell by it that its own limiter has rejected. The text
/// contains no error of the store, and no mistake of a [misconfigured](RequestError::Misconfigured)
/// service.
///
/// # Examples
///
/// ```
/// use axum::{Router, extract::{Path, State}, routing::get};
/// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, layer::Rejection};
///
/// async fn report(
///     State(limiter): State<Limiter>,
///     Path(user): Path<u64>,
/// ) -> Result<String, Rejection> {
///     let decision = limiter.check(user).cost(10).await?; // an error of the store is a 503
///     if !decision.is_allowed() {
///         return Err(Rejection::Denied(decision)); // a 429
///     }
///     Ok(format!("the report of user {user}"))
/// }
///
/// let quota = Quota::per_hour(100);
/// let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_window(), quota);
/// let app: Router = Router::new().route("/report/{user}", get(report)).with_state(limiter);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// The quota is used up: 429.
    Denied(Decision),
    /// The request costs more than the quota can ever grant: 429, without `Retry-After`.
    #[non_exhaustive]
    CostAboveQuota {
        /// The name of the limiter.
        limiter: Cow<'static, str>,
        /// The cost of the request.
        cost: u64,
        /// The largest cost that the quota can grant to one request.
        max: u64,
    },
    /// The request has no key or is invalid: 400. The service is misconfigured: 500. A [rule or a
    /// list](RequestError::WithStatus) denies the request: its status.
    Request(RequestError),
    /// The store did not decide, and the [policy](crate::FailurePolicy) rejects the request: 503.
    Store(StoreError),
}

impl Rejection {
    /// Returns the time after which a retry can succeed; `None` if a retry does not help, or if the
    /// time is unknown, because units are [held](crate::Limiter::hold). If the key is blocked, it
    /// is the end of the block, also if the request may wait.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, layer::Rejection};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").cost(3).await?;
    /// let rejection = Rejection::Denied(limiter.check("alice").await?);
    /// assert_eq!(rejection.retry_after(), Some(Duration::from_secs(3_600)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            // The later of the two: only the first has the jitter, and the end of the block can be
            // later, or the only time that is known.
            Self::Denied(decision) => decision.retry_after().max(decision.blocked_for()),
            Self::Store(_) => Some(STORE_RETRY_AFTER),
            Self::CostAboveQuota { .. } | Self::Request(_) => None,
        }
    }

    /// Returns the name of the limiter, if the rejection concerns one.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, layer::Rejection};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let rejection = Rejection::Denied(limiter.check("alice").await?);
    /// assert_eq!(rejection.limiter(), Some("api"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn limiter(&self) -> Option<&str> {
        match self {
            Self::Denied(decision) => Some(decision.limiter()),
            Self::CostAboveQuota { limiter, .. } => Some(limiter),
            Self::Store(error) => error.limiter(),
            Self::Request(_) => None,
        }
    }

    /// Returns the event that reports the rejection.
    pub(crate) fn event(&self) -> Event<'_> {
        let error = if let Self::Request(error) = self { Some(error.message()) } else { None };
        let (reason, limiter) = match self {
            Self::Denied(_) => ("denied", self.limiter()),
            Self::CostAboveQuota { .. } => ("cost_above_quota", self.limiter()),
            Self::Store(_) => ("store", None),
            Self::Request(RequestError::MissingKey { .. }) => ("missing_key", None),
            Self::Request(RequestError::Invalid { .. }) => ("invalid", None),
            Self::Request(RequestError::Misconfigured { .. }) => ("misconfigured", None),
            Self::Request(RequestError::WithStatus { reason, .. }) => (*reason, None),
        };
        Event::Rejected { reason, limiter, error }
    }

    /// Returns what happened, as in the title of a response.
    pub(crate) fn title(&self) -> &'static str {
        match self {
            Self::Denied(decision) if decision.is_blocked() => "This client is blocked",
            Self::Denied(decision) if decision.quota().is_concurrent() => {
                "Too many concurrent requests"
            }
            Self::Denied(_) => "Rate limit exceeded",
            Self::CostAboveQuota { .. } => "The request is too large",
            Self::Request(error) => error.status().canonical_reason().unwrap_or_default(),
            Self::Store(_) => "The rate limit cannot be checked right now",
        }
    }

    /// Returns what the client can do, or what is wrong with its request.
    pub(crate) fn detail(&self) -> Cow<'_, str> {
        match self {
            Self::Denied(_) => match self.retry_after_secs() {
                Some(seconds) => format!("Try again in {seconds} s.").into(),
                None => "Try again when earlier requests have ended.".into(),
            },
            Self::CostAboveQuota { cost, max, .. } => {
                format!("It counts as {cost}, and at most {max} are allowed.").into()
            }
            Self::Request(RequestError::Misconfigured { .. }) => MISCONFIGURED.into(),
            Self::Request(error) => error.message().into(),
            Self::Store(_) => "Try again later.".into(),
        }
    }

    /// Returns a rejection whose text for clients is the mistake of a misconfigured service.
    pub(crate) fn detailed(&self) -> Self {
        match self.clone() {
            Self::Request(RequestError::Misconfigured { message }) => {
                let (status, reason) = (StatusCode::INTERNAL_SERVER_ERROR, "misconfigured");
                Self::Request(RequestError::WithStatus { status, message, reason })
            }
            rejection => rejection,
        }
    }

    /// Returns what happened, with this detail, as one line for clients.
    pub(crate) fn text(&self, detail: &str) -> String {
        match self {
            Self::Request(RequestError::Misconfigured { .. }) => as_clause(MISCONFIGURED),
            Self::Request(error) => error.to_string(),
            _ => format!("{}; {}", as_clause(self.title()), as_clause(detail)),
        }
    }

    /// Returns [`retry_after`](Rejection::retry_after) in whole seconds, as the header
    /// `Retry-After` contains it: rounded up, and at least 1.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, layer::Rejection};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let _ = limiter.check("alice").cost(3).await?;
    /// let rejection = Rejection::Denied(limiter.check("alice").await?);
    /// assert_eq!(rejection.retry_after_secs(), Some(3_600));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after().map(whole_seconds)
    }
}

/// Returns a sentence as a part of a line: with a small first letter, and without the full stop.
fn as_clause(sentence: &str) -> String {
    sentence[..1].to_ascii_lowercase() + sentence[1..].trim_end_matches('.')
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(&self.detail()))?;
        self.limiter().map_or(Ok(()), |limiter| write!(f, " (limiter {limiter:?})"))
    }
}

impl StdError for Rejection {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        match error {
            Error::CostAboveQuota { limiter, cost, max } => {
                Self::CostAboveQuota { limiter, cost, max }
            }
            Error::Store(error) => Self::Store(error),
            Error::Config(error) => Self::Request(RequestError::misconfigured(error.to_string())),
            _ => Self::Request(RequestError::misconfigured(error.to_string())),
        }
    }
}

/// The reason why a request cannot be charged.
///
/// # Examples
///
/// ```
/// use http::request::Parts;
/// use tower_ratelimit::{Key, layer::RequestError};
///
/// fn tenant(head: &Parts) -> Result<Key<'static>, RequestError> {
///     let host = head.headers.get("host").and_then(|host| host.to_str().ok());
///     let host = host.ok_or_else(|| RequestError::missing_key("the request has no host"))?;
///     Ok(Key::scoped("tenant", host))
/// }
/// # let _ = tenant;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestError {
    /// The request has no key; the message names the missing part. [`MissingKey`] sets what the
    /// layer does with the request. If the layer rejects it, the response is 400 with this message.
    #[non_exhaustive]
    MissingKey {
        /// The detail of the response.
        message: Cow<'static, str>,
    },
    /// The request is invalid. The response is 400 with this message.
    #[non_exhaustive]
    Invalid {
        /// The detail of the response.
        message: Cow<'static, str>,
    },
    /// The service is misconfigured: the message says to its developers what to correct. The
    /// response is 500 and does not contain it, except with
    /// [`error_details`](crate::RateLimitLayer::error_details). Observers and the log get the
    /// message. Without a subscriber of `tracing`, it is printed to stderr, at most once per 10 s
    /// for each layer.
    #[non_exhaustive]
    Misconfigured {
        /// The mistake, and how to correct it.
        message: Cow<'static, str>,
    },
    /// The request is rejected with this status, for another reason than its quota.
    #[non_exhaustive]
    WithStatus {
        /// The status of the response.
        status: StatusCode,
        /// The detail of the response.
        message: Cow<'static, str>,
        /// The reason that observers get: `missing_key` by [`MissingKey::reject_with`], else
        /// `forbidden`.
        reason: &'static str,
    },
}

impl RequestError {
    /// Makes an error for a request without a key; the message names the missing part.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Rejection, RequestError};
    ///
    /// let error = RequestError::missing_key("send x-api-key");
    /// assert_eq!(Rejection::Request(error).to_response().status(), 400);
    /// ```
    pub fn missing_key(message: impl Into<Cow<'static, str>>) -> Self {
        Self::MissingKey { message: message.into() }
    }

    /// Makes an error for an invalid request: the response is 400 with this message.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Rejection, RequestError};
    ///
    /// let error = RequestError::invalid("x-cost is not a number");
    /// assert_eq!(Rejection::Request(error).to_response().status(), 400);
    /// ```
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Invalid { message: message.into() }
    }

    /// Makes an error for a misconfigured service: the response is 500, and the log of the service
    /// contains this message.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Rejection, RequestError};
    ///
    /// let error = RequestError::misconfigured("no layer has set the tenant"); // for the log
    /// assert_eq!(Rejection::Request(error).to_response().status(), 500);
    /// ```
    pub fn misconfigured(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Misconfigured { message: message.into() }
    }

    /// Makes an error for a client that is not let in at all: the response is 403 with this
    /// message.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{Rejection, RequestError};
    ///
    /// let error = RequestError::forbidden("this key was revoked");
    /// assert_eq!(Rejection::Request(error).to_response().status(), 403);
    /// ```
    pub fn forbidden(message: impl Into<Cow<'static, str>>) -> Self {
        Self::with_status(StatusCode::FORBIDDEN, message)
    }

    /// Makes an error for a request that is rejected for another reason than its quota: the
    /// response has this status, of 400 to 599, and this message.
    ///
    /// A gRPC response has the corresponding status: `UNAUTHENTICATED` for 401, `PERMISSION_DENIED`
    /// for 403.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{StatusCode, request::Parts};
    /// use tower_ratelimit::{
    ///     Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, layer::RequestError,
    /// };
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    ///     is_suspended: bool,
    /// }
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::by_rule(move |head: &Parts| {
    ///     let user = head.extensions.get::<User>();
    ///     let user = user.ok_or(RequestError::with_status(StatusCode::UNAUTHORIZED, "log in"))?;
    ///     if user.is_suspended {
    ///         return Err(RequestError::forbidden("the account is suspended"));
    ///     }
    ///     Ok(Charge::new(&limiter, user.id))
    /// });
    /// # let _ = layer;
    /// ```
    ///
    /// If the status is not one of 400 to 599, the error is [`Misconfigured`](Self::Misconfigured),
    /// which is logged: the response is 500. With another status, clients would think that the
    /// service has answered.
    pub fn with_status(status: StatusCode, message: impl Into<Cow<'static, str>>) -> Self {
        match is_error(status) {
            true => Self::WithStatus { status, message: message.into(), reason: "forbidden" },
            false => Self::misconfigured(wrong_status(status)),
        }
    }

    /// Returns the status of the response.
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::MissingKey { .. } | Self::Invalid { .. } => StatusCode::BAD_REQUEST,
            Self::Misconfigured { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            Self::WithStatus { status, .. } => *status,
        }
    }

    fn message(&self) -> &str {
        match self {
            Self::MissingKey { message }
            | Self::Invalid { message }
            | Self::Misconfigured { message }
            | Self::WithStatus { message, .. } => message,
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message())
    }
}

impl StdError for RequestError {}

/// The treatment of a request without a key.
///
/// # Examples
///
/// ```
/// # use http::StatusCode;
/// # use tower_ratelimit::{
/// #     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::MissingKey,
/// # };
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let layer = RateLimitLayer::new(limiter, key::header("x-api-key"))
///     .missing_key(MissingKey::reject_with(StatusCode::UNAUTHORIZED));
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingKey {
    /// The layer rejects the request with 400.
    #[default]
    Reject,
    /// The layer rejects the request with this status: see [`reject_with`](Self::reject_with).
    #[non_exhaustive]
    RejectWith(StatusCode),
    /// The request proceeds and is not counted.
    Exempt,
    /// All requests without a key share one key: `Key::scoped("anonymous", "")`. With
    /// [`by_rule`](crate::RateLimitLayer::by_rule) this is an error (500): there, the rule charges
    /// requests without a key.
    Share,
}

impl MissingKey {
    /// Rejects the request with this status, of 400 to 599, such as 401.
    ///
    /// [`map_rejection`](crate::RateLimitLayer::map_rejection) can add the header
    /// `WWW-Authenticate`, which a 401 should have.
    ///
    /// # Panics
    ///
    /// If the status is not one of 400 to 599: clients would think that the service has answered.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::{Quota, RateLimitLayer, key, layer::MissingKey};
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore};
    ///
    /// # let quota = Quota::per_second(10);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::header("x-api-key"))
    ///     .missing_key(MissingKey::reject_with(StatusCode::UNAUTHORIZED));
    /// # let _ = layer;
    /// ```
    #[must_use]
    #[track_caller]
    pub fn reject_with(status: StatusCode) -> Self {
        assert!(is_error(status), "{}", wrong_status(status));
        Self::RejectWith(status)
    }
}

fn is_error(status: StatusCode) -> bool {
    status.is_client_error() || status.is_server_error()
}

fn wrong_status(status: StatusCode) -> String {
    format!("a rejection has a status of 400 to 599, not {status}")
}
