//! Rejections as HTTP responses with problem details (RFC 9457). Rejections of gRPC requests are in
//! `grpc.rs`.

use std::borrow::Cow;

use http::{HeaderMap, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};

use super::body::RejectionBody;
use crate::{decision::Decision, middleware::rejection::Rejection};

pub(super) const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

const NO_TYPE: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// The text of the most common rejection, before and behind the seconds, and behind the limiter:
/// joining five parts takes less time than [`problem`] takes.
const DENIED: [&str; 3] = [
    "{\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\
      \"title\":\"Rate limit exceeded\",\"status\":429,\"detail\":\"Try again in ",
    " s.\",\"violated-policies\":[\"",
    "\"]}\n",
];

/// Makes the response to a request that is not gRPC.
pub(super) fn response(mut headers: HeaderMap, rejection: &Rejection) -> Response<RejectionBody> {
    headers.insert(CONTENT_TYPE, PROBLEM_JSON);
    let (status, body) = problem(rejection);
    of(status, headers, body.into())
}

/// Makes a response of headers that are complete.
pub(super) fn of<B>(status: StatusCode, headers: HeaderMap, body: B) -> Response<B> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// Returns the body that [`problem`] returns for a denial of the most common kind: without a block,
/// and until a known instant.
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

/// Returns the status and the body of a rejection. The body ends with a newline, for terminals.
fn problem(rejection: &Rejection) -> (StatusCode, String) {
    let (status, kind, policy) = match rejection {
        Rejection::Denied(_) | Rejection::CostAboveQuota { .. } => {
            (StatusCode::TOO_MANY_REQUESTS, QUOTA_EXCEEDED, rejection.limiter())
        }
        Rejection::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, REDUCED_CAPACITY, None),
        Rejection::Request(error) => (error.status(), NO_TYPE, None),
    };
    let detail = match rejection {
        Rejection::Request(_) => Cow::Owned(escaped(&rejection.detail())),
        _ => rejection.detail(),
    };
    // The name of a limiter needs no escaping.
    let (before, policy, after) = match policy {
        Some(policy) => ("\",\"violated-policies\":[\"", policy, "\"]}\n"),
        None => ("\"", "", "}\n"),
    };
    // Joined at once: an exact capacity, which needs no second allocation as `Bytes`.
    let body = [
        "{\"type\":\"",
        kind,
        "\",\"title\":\"",
        rejection.title(),
        "\",\"status\":",
        status.as_str(),
        ",\"detail\":\"",
        &*detail,
        before,
        policy,
        after,
    ]
    .concat();
    (status, body)
}

/// Returns a text as in a string of JSON.
fn escaped(text: &str) -> String {
    let mut json = String::new();
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c.is_control() => json.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => json.push(c),
        }
    }
    json
}

#[cfg(test)]
mod tests {
    use super::{super::body::ResponseBody, *};
    use crate::{Algorithm, Limiter, MemoryStore, Quota};

    #[test]
    fn the_prepared_text_of_a_denial_is_the_text_of_its_problem() {
        let (quota, store) = (Quota::per_hour(1), MemoryStore::new());
        let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
        let decisions = [(); 2].map(|()| limiter.check("alice").now().unwrap());
        assert!(!decisions[1].is_allowed());
        let body = denied(&decisions[1]).unwrap();
        let rejection = Rejection::Denied(decisions[1].clone());
        let body = <ResponseBody>::rejection(body);
        assert_eq!(body.into_bytes(), problem(&rejection).1);
    }
}
