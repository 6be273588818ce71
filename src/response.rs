//! Decisions as header fields (draft-ietf-httpapi-ratelimit-headers-11) and rejections as responses
//! with a problem description (RFC 9457).

use std::time::Duration;

use bytes::{BufMut, Bytes};
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};

use crate::{decision::Decision, error::RequestError, grpc, protocol::Rejection, quota::Quota};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

const PROBLEMS: &str = "https://iana.org/assignments/http-problem-types#";

/// The header fields of one policy. Its name needs no escaping: see
/// [`Limiter::named`](crate::Limiter::named).
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    name: Box<str>,
    /// What `RateLimit` starts with.
    start: Box<str>,
    policy: HeaderValue,
}

impl Fields {
    pub(crate) fn new(name: &str, quota: Quota) -> Self {
        let mut policy = format!("\"{name}\";q={}", quota.limit());
        let window = quota.window();
        if window.subsec_nanos() == 0 {
            // The field has no way to say anything but whole seconds.
            policy.push_str(&format!(";w={}", window.as_secs()));
        }
        let policy = HeaderValue::from_maybe_shared(Bytes::from(policy)).expect("printable ASCII");
        Self { name: name.into(), start: format!("\"{name}\";r=").into(), policy }
    }

    /// Adds to the fields of a response that the service, or a layer inside of it, has made.
    pub(crate) fn add(&self, headers: &mut HeaderMap, decision: &Decision) {
        // The time that the request has waited is over.
        let replenish_after = decision.replenish_after().saturating_sub(decision.delay());
        self.append(headers, decision, (!replenish_after.is_zero()).then_some(replenish_after));
        if decision.remaining() == 0
            && let Some(other) = headers.get(RETRY_AFTER)
            && let Some(seconds) = other.to_str().ok().and_then(|it| it.parse::<u64>().ok())
            && seconds < whole_seconds(replenish_after)
        {
            headers.insert(RETRY_AFTER, whole_seconds(replenish_after).into());
        }
    }

    fn append(&self, headers: &mut HeaderMap, decision: &Decision, t: Option<Duration>) {
        headers.append(RATELIMIT_POLICY, self.policy.clone());
        let mut digits = itoa::Buffer::new();
        let mut buffer = [0; 128]; // a name has at most 64 characters
        let mut text = &mut buffer[..];
        text.put_slice(self.start.as_bytes());
        text.put_slice(digits.format(decision.remaining()).as_bytes());
        if let Some(t) = t {
            text.put_slice(b";t=");
            text.put_slice(digits.format(whole_seconds(t)).as_bytes());
        }
        let rest = text.len();
        let text = &buffer[..buffer.len() - rest];
        headers.append(RATELIMIT, HeaderValue::from_bytes(text).expect("printable ASCII"));
    }

    pub(crate) fn remove(&self, headers: &mut HeaderMap) {
        for name in [RATELIMIT, RATELIMIT_POLICY, RETRY_AFTER] {
            headers.remove(name);
        }
    }

    /// The fields of a refusal.
    fn refused(&self, rejection: &Rejection) -> HeaderMap {
        let mut headers = HeaderMap::new();
        match rejection {
            Rejection::Denied(decision) => {
                let retry_after = decision.retry_after();
                headers.insert(RETRY_AFTER, whole_seconds(retry_after.unwrap_or_default()).into());
                self.append(&mut headers, decision, retry_after);
            }
            Rejection::CostAboveQuota { .. } => {
                headers.append(RATELIMIT_POLICY, self.policy.clone());
            }
            Rejection::Store(_) | Rejection::Request(_) => {}
        }
        headers
    }

    pub(crate) fn grpc_refusal(&self, rejection: &Rejection) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.headers_mut() = self.refused(rejection);
        grpc::add_status(response.headers_mut(), rejection);
        response
    }

    pub(crate) fn refusal(&self, rejection: &Rejection) -> Response<Bytes> {
        let mut headers = self.refused(rejection);
        headers.insert(CONTENT_TYPE, PROBLEM_JSON);
        let (status, kind, title, detail) = match rejection {
            Rejection::Denied(decision) => {
                let seconds = whole_seconds(decision.retry_after().unwrap_or_default());
                let detail = format!("Try again in {seconds} s.");
                (StatusCode::TOO_MANY_REQUESTS, "quota-exceeded", "The quota is used up", detail)
            }
            Rejection::CostAboveQuota { cost, most } => {
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
            Rejection::Request(error @ RequestError::Misconfigured(_)) => {
                let title = "The rate limiter is set up wrong";
                (StatusCode::INTERNAL_SERVER_ERROR, "", title, error.to_string())
            }
            Rejection::Request(error) => {
                let title = "The request cannot be charged to anybody";
                (StatusCode::BAD_REQUEST, "", title, error.to_string())
            }
        };
        let mut response = Response::new(self.problem(status, kind, title, &detail));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }

    fn problem(&self, status: StatusCode, kind: &str, title: &str, detail: &str) -> Bytes {
        let (kind, policies) = match kind {
            "" => (String::from("about:blank"), String::new()),
            kind => {
                (format!("{PROBLEMS}{kind}"), format!(",\"violated-policies\":[\"{}\"]", self.name))
            }
        };
        let detail = json_string(detail);
        let status = status.as_u16();
        Bytes::from(format!(
            "{{\"type\":\"{kind}\",\"title\":\"{title}\",\"status\":{status},\"detail\":{detail}{policies}}}"
        ))
    }
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
