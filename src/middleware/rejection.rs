//! Rejections: why the layer responds instead of the service, errors in requests, and the setting
//! for requests without a key. The responses that report a rejection are in `http/`.

use std::{borrow::Cow, error::Error as StdError, fmt, time::Duration};

use crate::{
    decision::Decision,
    error::{Error, StoreError},
};

/// `Retry-After` of a rejection because the store did not decide.
const STORE_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The reason for a rejection: the layer responds instead of the service.
///
/// The extensions of the response contain it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// The quota is used up: 429.
    Denied(Decision),
    /// The request costs more than the quota can ever grant: 429, without `Retry-After`.
    #[non_exhaustive]
    CostAboveQuota {
        /// The name of the limiter.
        limiter: &'static str,
        /// The cost of the request.
        cost: u32,
        /// The largest cost that the quota can grant to one request.
        max: u32,
    },
    /// The request has no key or is invalid: 400. The service is misconfigured: 500.
    Request(RequestError),
    /// The store did not decide, and the [policy](crate::FailurePolicy) rejects the request: 503.
    Store(StoreError),
}

impl Rejection {
    /// Returns the time after which a retry can succeed; `None` if a retry never succeeds.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Denied(decision) => decision.retry_after(),
            Self::Store(_) => Some(STORE_RETRY_AFTER),
            Self::CostAboveQuota { .. } | Self::Request(_) => None,
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(decision) => {
                let retry_after = decision.retry_after().unwrap_or_default();
                write!(f, "the quota is used up; try again in {retry_after:?}")
            }
            Self::CostAboveQuota { cost, max, .. } => {
                write!(f, "the request costs {cost}, but the quota grants at most {max} at once")
            }
            Self::Request(error) => write!(f, "{error}"),
            Self::Store(_) => f.write_str("requests cannot be counted at the moment"),
        }
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
            // The text of this error contains a name in Redis, which clients must not see.
            Error::NoRate { .. } => {
                Self::Request(RequestError::misconfigured("the rate limiter has no rate in Redis"))
            }
            _ => Self::Request(RequestError::misconfigured(error.to_string())),
        }
    }
}

/// The reason why a request cannot be charged.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestError {
    /// The request has no key; the message names the missing part. [`MissingKey`] sets what the
    /// layer does with the request. If the layer rejects it, the response is 400 with this message.
    MissingKey(Cow<'static, str>),
    /// The request is invalid. The response is 400 with this message.
    Invalid(Cow<'static, str>),
    /// The service is misconfigured. The response is 500 with this message, which is written for
    /// developers: [`map_rejection`](crate::RateLimitLayer::map_rejection) can hide it from
    /// clients.
    Misconfigured(Cow<'static, str>),
}

impl RequestError {
    /// Makes an error for a request without a key; the message names the missing part.
    pub fn missing_key(message: impl Into<Cow<'static, str>>) -> Self {
        Self::MissingKey(message.into())
    }

    /// Makes an error for an invalid request: the response is 400 with this message.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Invalid(message.into())
    }

    /// Makes an error for a misconfigured service: the response is 500 with this message.
    pub fn misconfigured(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Misconfigured(message.into())
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingKey(message) | Self::Invalid(message) | Self::Misconfigured(message) => {
                f.write_str(message)
            }
        }
    }
}

impl StdError for RequestError {}

/// The treatment of a request without a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// The layer rejects the request, by default with 400.
    #[default]
    Reject,
    /// The request proceeds and is not counted.
    Exempt,
    /// All requests without a key share one key. With [`by_rule`](crate::RateLimitLayer::by_rule)
    /// this is an error (500): there, the rule charges requests without a key.
    Share,
}
