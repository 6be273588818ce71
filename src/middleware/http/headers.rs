//! Decisions as header fields (draft-ietf-httpapi-ratelimit-headers-11) and rejections as responses
//! with a problem description (RFC 9457).

use std::time::{Duration, SystemTime};

use bytes::{BufMut, Bytes};
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
};

use crate::{
    decision::{Decision, Source},
    error::RequestError,
    limiter::{AnyLimiter, Charge},
    middleware::http::grpc,
    middleware::protocol::Rejection,
    quota::Quota,
};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// RFC 6585: a cache must not store a 429. It would store the 200 of a gRPC status.
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

const PROBLEMS: &str = "https://iana.org/assignments/http-problem-types#";

/// The largest Integer of a structured field (RFC 9651): it has at most 15 digits.
const LARGEST_INTEGER: u64 = 999_999_999_999_999;

/// Limit, remaining, reset.
type Triple = [HeaderName; 3];

const TRIPLE: Triple = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
const X_TRIPLE: Triple = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

/// The header fields that tell a client how its quota stands. See
/// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
///
/// Of a request that has waited, they tell what remained when its turn was booked. With a burst above the
/// limit, more can remain than the limit that they tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Headers {
    /// `RateLimit` and `RateLimit-Policy` of draft-ietf-httpapi-ratelimit-headers-11. The fields of stacked
    /// layers stand side by side.
    Draft11,
    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset` of the drafts up to 06: the limit, what
    /// remains, and the seconds until the key is as if never seen. Of stacked layers the one with the least
    /// remaining tells.
    Triple,
    /// The same three as `X-RateLimit-*`, which many APIs send.
    XRateLimit {
        /// What `X-RateLimit-Reset` counts.
        reset: Reset,
    },
}

/// What the field `X-RateLimit-Reset` counts: there is no common form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reset {
    /// Seconds since 1970-01-01 UTC, as GitHub does.
    Epoch,
    /// Seconds from now.
    Delta,
}

/// What is told in header fields. The names of limiters need no escaping: see
/// [`Limiter::named`](crate::Limiter::named).
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    pub(crate) headers: Box<[Headers]>,
    /// Of the limiter, if there is always the same one.
    policy: Option<HeaderValue>,
}

impl Default for Fields {
    fn default() -> Self {
        Self { headers: [Headers::Draft11].into(), policy: None }
    }
}

impl Fields {
    pub(crate) fn of(limiter: &AnyLimiter) -> Self {
        let policy = limiter.quota().map(|quota| policy(limiter.name(), quota));
        Self { policy, ..Self::default() }
    }

    /// Adds to the fields of a response that the service, or a layer inside of it, has made.
    pub(crate) fn add(&self, headers: &mut HeaderMap, decision: &Decision, charge: &Charge) {
        if self.headers.is_empty() || decision.source() == Source::Open {
            return;
        }
        // The time that the request has waited is over.
        let replenish_after = decision.replenish_after().saturating_sub(decision.delay());
        let t = (!replenish_after.is_zero()).then_some(replenish_after);
        self.tell(headers, decision, charge, t);
        if decision.remaining() == 0
            && let Some(other) = headers.get(RETRY_AFTER)
            && let Some(seconds) = other.to_str().ok().and_then(|it| it.parse::<u64>().ok())
            && seconds < whole_seconds(replenish_after)
        {
            headers.insert(RETRY_AFTER, whole_seconds(replenish_after).into());
        }
    }

    fn tell(
        &self,
        headers: &mut HeaderMap,
        decision: &Decision,
        charge: &Charge,
        t: Option<Duration>,
    ) {
        for kind in &self.headers {
            match kind {
                Headers::Draft11 => {
                    self.append_policies(headers, charge, Some(decision));
                    headers.append(RATELIMIT, ratelimit(decision, t));
                }
                Headers::Triple => insert(headers, &TRIPLE, decision, Reset::Delta),
                Headers::XRateLimit { reset } => insert(headers, &X_TRIPLE, decision, *reset),
            }
        }
    }

    fn append_policies(
        &self,
        headers: &mut HeaderMap,
        charge: &Charge,
        decision: Option<&Decision>,
    ) {
        let is_local = decision.is_some_and(|it| it.source() == Source::Local);
        // Where it is known by the decision alone.
        let decided = decision.map(Decision::quota);
        match &self.policy {
            Some(policy) if !is_local => drop(headers.append(RATELIMIT_POLICY, policy.clone())),
            _ => {
                for (i, limiter) in charge.limiters().enumerate() {
                    // One limiter can be charged for two keys.
                    let is_first = charge.limiters().take(i).all(|it| it.name() != limiter.name());
                    if let Some(quota) = limiter.quota().or(decided).filter(|_| is_first) {
                        headers.append(RATELIMIT_POLICY, policy(limiter.name(), quota));
                    }
                }
            }
        }
    }

    /// The fields of a refusal.
    fn refused(&self, rejection: &Rejection, charge: &Charge) -> HeaderMap {
        let mut headers = HeaderMap::new();
        forbid_storing(&mut headers);
        match rejection {
            Rejection::Denied(decision) if !self.headers.is_empty() => {
                let retry_after = decision.retry_after();
                headers.insert(RETRY_AFTER, whole_seconds(retry_after.unwrap_or_default()).into());
                self.tell(&mut headers, decision, charge, retry_after);
            }
            Rejection::CostAboveQuota { .. } if self.headers.contains(&Headers::Draft11) => {
                self.append_policies(&mut headers, charge, None);
            }
            Rejection::Store(_) if !self.headers.is_empty() => {
                let retry_after = rejection.retry_after();
                headers.insert(RETRY_AFTER, whole_seconds(retry_after.unwrap_or_default()).into());
            }
            _ => {}
        }
        headers
    }

    pub(crate) fn grpc_refusal(&self, rejection: &Rejection, charge: &Charge) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.headers_mut() = self.refused(rejection, charge);
        grpc::add_status(response.headers_mut(), rejection);
        response
    }

    pub(crate) fn refusal(&self, rejection: &Rejection, charge: &Charge) -> Response<Bytes> {
        let mut headers = self.refused(rejection, charge);
        headers.insert(CONTENT_TYPE, PROBLEM_JSON);
        let (status, kind, title, detail) = match rejection {
            Rejection::Denied(decision) => {
                let seconds = whole_seconds(decision.retry_after().unwrap_or_default());
                let detail = format!("Try again in {seconds} s.");
                (StatusCode::TOO_MANY_REQUESTS, "quota-exceeded", "The quota is used up", detail)
            }
            Rejection::CostAboveQuota { cost, most, .. } => {
                let detail = format!(
                    "The request costs {cost}, and the quota never grants more than {most} at once."
                );
                let title = "The request costs more than the quota";
                (StatusCode::TOO_MANY_REQUESTS, "quota-exceeded", title, detail)
            }
            Rejection::Store(_) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "temporary-reduced-capacity",
                "Requests cannot be counted at the moment",
                String::from("Try again later."),
            ),
            Rejection::Request(error) => {
                let status = match error {
                    RequestError::Misconfigured(_) => StatusCode::INTERNAL_SERVER_ERROR,
                    _ => StatusCode::BAD_REQUEST,
                };
                (status, "", status.canonical_reason().unwrap_or_default(), error.to_string())
            }
        };
        let kind = match kind {
            "" => String::from("about:blank"),
            kind => format!("{PROBLEMS}{kind}"),
        };
        let policies = match rejection {
            Rejection::Denied(decision) => violated(decision.limiter()),
            Rejection::CostAboveQuota { limiter, .. } => violated(limiter),
            _ => String::new(),
        };
        let (code, detail) = (status.as_u16(), json_string(&detail));
        let mut response = Response::new(Bytes::from(format!(
            "{{\"type\":\"{kind}\",\"title\":\"{title}\",\"status\":{code},\"detail\":{detail}{policies}}}"
        )));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }
}

/// Forbids caches to store a rejection, unless its headers say how to cache it.
pub(crate) fn forbid_storing(headers: &mut HeaderMap) {
    headers.entry(CACHE_CONTROL).or_insert(NO_STORE);
}

fn violated(limiter: &str) -> String {
    format!(",\"violated-policies\":[\"{limiter}\"]")
}

/// The limiter's `RateLimit-Policy`.
fn policy(name: &str, quota: Quota) -> HeaderValue {
    let mut policy = format!("\"{name}\";q={}", quota.limit());
    let window = quota.window();
    if window.subsec_nanos() == 0 {
        // The field has no way to say anything but whole seconds.
        policy.push_str(&format!(";w={}", window.as_secs()));
    }
    HeaderValue::from_maybe_shared(Bytes::from(policy)).expect("printable ASCII")
}

/// The `RateLimit` of a decision.
fn ratelimit(decision: &Decision, t: Option<Duration>) -> HeaderValue {
    let mut digits = itoa::Buffer::new();
    let mut buffer = [0; 128]; // a name has at most 64 characters
    let mut text = &mut buffer[..];
    text.put_slice(b"\"");
    text.put_slice(decision.limiter().as_bytes());
    text.put_slice(b"\";r=");
    text.put_slice(digits.format(remaining(decision)).as_bytes());
    if let Some(t) = t {
        text.put_slice(b";t=");
        text.put_slice(digits.format(whole_seconds(t)).as_bytes());
    }
    let rest = text.len();
    let text = &buffer[..buffer.len() - rest];
    HeaderValue::from_bytes(text).expect("printable ASCII")
}

/// Unless another layer has less remaining.
fn insert(headers: &mut HeaderMap, names: &Triple, decision: &Decision, reset: Reset) {
    let [limit, left, until] = names;
    let other = headers.get(left).and_then(|other| other.to_str().ok()?.parse().ok());
    let own = remaining(decision);
    if other.is_some_and(|other: u64| other <= own) {
        return;
    }
    let mut time = decision.reset_after().saturating_sub(decision.delay());
    if reset == Reset::Epoch {
        time += SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    }
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    headers.insert(limit, decision.quota().limit().into());
    headers.insert(left, own.into());
    headers.insert(until, seconds.into());
}

/// What remains, as far as a header can report it: Redisson's rates go up to 2^53, of 16 digits. The
/// other numbers are shorter: a limit has 10 digits, and the times are below 10^15 s.
fn remaining(decision: &Decision) -> u64 {
    decision.remaining().min(LARGEST_INTEGER)
}

/// At least 1, so that nobody is told to come back at once.
fn whole_seconds(time: Duration) -> u64 {
    (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(1)
}

fn json_string(text: &str) -> String {
    let mut json = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c.is_control() => json.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => json.push(c),
        }
    }
    json.push('"');
    json
}
