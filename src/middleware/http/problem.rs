//! Rejections as HTTP responses with problem details (RFC 9457). Rejections of gRPC requests are in
//! `grpc.rs`.

use http::{HeaderMap, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};

use super::body::RejectionBody;
use crate::middleware::rejection::Rejection;

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

const NO_TYPE: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str =
    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

struct Problem {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: String,
    /// The name of a limiter, which needs no escaping.
    violated_policy: Option<&'static str>,
}

/// Makes the response to a request that is not gRPC.
pub(super) fn response(mut headers: HeaderMap, rejection: &Rejection) -> Response<RejectionBody> {
    let problem = Problem::new(rejection);
    headers.insert(CONTENT_TYPE, PROBLEM_JSON);
    let mut response = Response::new(problem.to_json().into());
    *response.status_mut() = problem.status;
    *response.headers_mut() = headers;
    response
}

impl Problem {
    fn new(rejection: &Rejection) -> Self {
        match rejection {
            Rejection::Denied(decision) => {
                let detail = match decision.retry_after_secs() {
                    Some(seconds) => format!("Try again in {seconds} s."),
                    None => String::from("Try again when earlier requests have ended."),
                };
                let title = match decision.is_blocked() {
                    true => "This client is blocked",
                    false => "Rate limit exceeded",
                };
                Self::quota_exceeded(title, detail, decision.limiter())
            }
            Rejection::CostAboveQuota { limiter, cost, max } => {
                let detail = format!("It counts as {cost}, and at most {max} are allowed.");
                Self::quota_exceeded("The request is too large", detail, limiter)
            }
            Rejection::Store(_) => Self {
                status: StatusCode::SERVICE_UNAVAILABLE,
                kind: REDUCED_CAPACITY,
                title: "The service cannot accept this request right now",
                detail: String::from("Try again later."),
                violated_policy: None,
            },
            Rejection::Request(error) => {
                let status = error.status();
                Self {
                    status,
                    kind: NO_TYPE,
                    title: status.canonical_reason().unwrap_or_default(),
                    detail: error.to_string(),
                    violated_policy: None,
                }
            }
        }
    }

    fn quota_exceeded(title: &'static str, detail: String, limiter: &'static str) -> Self {
        Self {
            status: StatusCode::TOO_MANY_REQUESTS,
            kind: QUOTA_EXCEEDED,
            title,
            detail,
            violated_policy: Some(limiter),
        }
    }

    /// Returns the body. It ends with a newline, for terminals.
    fn to_json(&self) -> String {
        let Self { status, kind, title, detail, violated_policy } = self;
        let (code, detail) = (status.as_u16(), json_string(detail));
        let policies = violated_policy
            .map(|policy| format!(",\"violated-policies\":[\"{policy}\"]"))
            .unwrap_or_default();
        format!(
            "{{\"type\":\"{kind}\",\"title\":\"{title}\",\"status\":{code},\"detail\":{detail}\
             {policies}}}\n"
        )
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
