//! Rejections as HTTP responses with problem details (RFC 9457). Rejections of gRPC requests are in
//! `grpc.rs`.

use http::{HeaderMap, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};

use super::body::RejectionBody;
use crate::{
    decision::Decision,
    middleware::rejection::{Rejection, RequestError},
};

pub(super) const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

const NO_TYPE: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// The text of the most common rejection, before and behind the seconds, and behind the limiter:
/// joining five parts takes a third of the time of fifteen.
const DENIED: [&str; 3] = [
    "{\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\
      \"title\":\"Rate limit exceeded\",\"status\":429,\"detail\":\"Try again in ",
    " s.\",\"violated-policies\":[\"",
    "\"]}\n",
];

/// The problem of a rejection, without what all rejections have.
struct Problem<'a> {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: Detail<'a>,
    /// The name of a limiter, which needs no escaping.
    violated_policy: Option<&'static str>,
}

/// What happened to this request.
enum Detail<'a> {
    TryAgainAfter(u64),
    /// Units that are held have to be returned first.
    TryAgainAfterOthers,
    TryAgainLater,
    TooLarge {
        cost: u64,
        max: u64,
    },
    Request(&'a RequestError),
}

/// Makes the response to a request that is not gRPC.
pub(super) fn response(mut headers: HeaderMap, rejection: &Rejection) -> Response<RejectionBody> {
    headers.insert(CONTENT_TYPE, PROBLEM_JSON);
    let problem = Problem::new(rejection);
    let mut response = Response::new(problem.to_json().into());
    *response.status_mut() = problem.status;
    *response.headers_mut() = headers;
    response
}

/// Makes the response to a denied request of headers that are complete.
pub(super) fn of_denial<B>(headers: HeaderMap, body: B) -> Response<B> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    *response.headers_mut() = headers;
    response
}

/// Returns the body that [`Problem::to_json`] returns for a denial of the most common kind: without
/// a block, and until a known instant.
pub(super) fn denied(decision: &Decision) -> Option<RejectionBody> {
    let seconds = decision.retry_after_secs().filter(|_| !decision.is_blocked())?;
    let [before, behind, end] = DENIED;
    let mut digits = itoa::Buffer::new();
    let parts = [before, digits.format(seconds), behind, decision.limiter(), end];
    // An exact capacity, which needs no second allocation as `Bytes`.
    let mut body = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| body.extend_from_slice(part.as_bytes()));
    Some(body.into())
}

impl<'a> Problem<'a> {
    fn new(rejection: &'a Rejection) -> Self {
        match rejection {
            Rejection::Denied(decision) => {
                let detail = match decision.retry_after_secs() {
                    Some(seconds) => Detail::TryAgainAfter(seconds),
                    None => Detail::TryAgainAfterOthers,
                };
                let title = match decision.is_blocked() {
                    true => "This client is blocked",
                    false if decision.quota().is_concurrent() => "Too many concurrent requests",
                    false => "Rate limit exceeded",
                };
                Self::quota_exceeded(title, detail, decision.limiter())
            }
            Rejection::CostAboveQuota { limiter, cost, max } => {
                let detail = Detail::TooLarge { cost: *cost, max: *max };
                Self::quota_exceeded("The request is too large", detail, limiter)
            }
            Rejection::Store(_) => Self {
                status: StatusCode::SERVICE_UNAVAILABLE,
                kind: REDUCED_CAPACITY,
                title: "The service cannot accept this request right now",
                detail: Detail::TryAgainLater,
                violated_policy: None,
            },
            Rejection::Request(error) => {
                let status = error.status();
                Self {
                    status,
                    kind: NO_TYPE,
                    title: status.canonical_reason().unwrap_or_default(),
                    detail: Detail::Request(error),
                    violated_policy: None,
                }
            }
        }
    }

    fn quota_exceeded(title: &'static str, detail: Detail<'a>, limiter: &'static str) -> Self {
        Self {
            status: StatusCode::TOO_MANY_REQUESTS,
            kind: QUOTA_EXCEEDED,
            title,
            detail,
            violated_policy: Some(limiter),
        }
    }

    /// Returns the body, in one allocation for a denial. It ends with a newline, for terminals.
    fn to_json(&self) -> String {
        let (mut first, mut second) = (itoa::Buffer::new(), itoa::Buffer::new());
        let text;
        let detail = match &self.detail {
            Detail::TryAgainAfter(seconds) => {
                ["\"Try again in ", first.format(*seconds), " s.\"", "", ""]
            }
            Detail::TryAgainAfterOthers => {
                ["\"Try again when earlier requests have ended.\"", "", "", "", ""]
            }
            Detail::TryAgainLater => ["\"Try again later.\"", "", "", "", ""],
            Detail::TooLarge { cost, max } => [
                "\"It counts as ",
                first.format(*cost),
                ", and at most ",
                second.format(*max),
                " are allowed.\"",
            ],
            Detail::Request(error) => {
                text = json_string(&error.to_string());
                [&*text, "", "", "", ""]
            }
        };
        let (before, policy, after) = match self.violated_policy {
            Some(policy) => (",\"violated-policies\":[\"", policy, "\"]}\n"),
            None => ("", "", "}\n"),
        };
        let [d1, d2, d3, d4, d5] = detail;
        let Self { status, kind, title, .. } = self;
        // Joined at once: an exact capacity, which needs no second allocation as `Bytes`.
        [
            "{\"type\":\"",
            kind,
            "\",\"title\":\"",
            title,
            "\",\"status\":",
            status.as_str(),
            ",\"detail\":",
            d1,
            d2,
            d3,
            d4,
            d5,
            before,
            policy,
            after,
        ]
        .concat()
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Limiter, MemoryStore, Quota};

    #[test]
    fn the_prepared_text_of_a_denial_is_the_text_of_its_problem() {
        let (quota, store) = (Quota::per_hour(1), MemoryStore::new());
        let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
        let decisions = [(); 2].map(|()| limiter.check_now("alice").unwrap());
        assert!(!decisions[1].is_allowed());
        let body = denied(&decisions[1]).unwrap();
        let rejection = Rejection::Denied(decisions[1].clone());
        assert_eq!(body.into_bytes(), Problem::new(&rejection).to_json());
    }
}
