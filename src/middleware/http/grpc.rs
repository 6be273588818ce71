//! gRPC: which requests are gRPC calls, their deadlines, and their rejections. A rejection is HTTP
//! 200 with trailers only; `google.rpc.QuotaFailure` names the limit, and `google.rpc.RetryInfo`
//! and gRPC proposal A6 report when to retry.

use std::time::Duration;

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
    request::Parts,
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::{body::RejectionBody, headers::RATELIMIT_POLICY, problem};
use crate::middleware::rejection::Rejection;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

const QUOTA_FAILURE: &str = "type.googleapis.com/google.rpc.QuotaFailure";
const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// The characters that a `grpc-message` must escape.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// The units of a `grpc-timeout`.
const UNITS: [(&str, Duration); 6] = [
    ("H", Duration::from_secs(3_600)),
    ("M", Duration::from_secs(60)),
    ("S", Duration::from_secs(1)),
    ("m", Duration::from_millis(1)),
    ("u", Duration::from_micros(1)),
    ("n", Duration::from_nanos(1)),
];

/// The codes of `google.rpc.Code`.
const INVALID_ARGUMENT: u8 = 3;
const PERMISSION_DENIED: u8 = 7;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;
const UNAUTHENTICATED: u8 = 16;

/// Returns whether the request is a gRPC call: a `POST` with the content type of gRPC. A gRPC-Web
/// request is not a gRPC call, because its trailers are in the body.
///
/// The version of HTTP is ignored: calls that tonic-web translates from gRPC-Web still have version
/// 1.1, and so do calls that are built in the same process. A client that forges the content type
/// of a `POST` changes only its own response, which no cache stores.
pub(super) fn is_grpc(head: &Parts) -> bool {
    if head.method != Method::POST {
        return false;
    }
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

/// Returns the time for which the client waits for the response.
pub(super) fn timeout(head: &Parts) -> Option<Duration> {
    let text = head.headers.get(TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (_, unit) = UNITS.iter().find(|(name, _)| *name == unit)?;
    Some(*unit * digits.parse().ok()?)
}

/// Makes the response to a gRPC request: trailers as headers, and no body.
pub(super) fn response(mut headers: HeaderMap, rejection: &Rejection) -> Response<RejectionBody> {
    let code = match rejection {
        Rejection::Denied(_) | Rejection::CostAboveQuota { .. } => RESOURCE_EXHAUSTED,
        Rejection::Store(_) => UNAVAILABLE,
        Rejection::Request(error) => match error.status() {
            StatusCode::UNAUTHORIZED => UNAUTHENTICATED,
            StatusCode::FORBIDDEN => PERMISSION_DENIED,
            StatusCode::TOO_MANY_REQUESTS => RESOURCE_EXHAUSTED,
            StatusCode::SERVICE_UNAVAILABLE => UNAVAILABLE,
            status if status.is_server_error() => INTERNAL,
            _ => INVALID_ARGUMENT,
        },
    };
    // One number in the text, the details and the header: clients wait exactly this time.
    let millis = rejection.retry_after().map(|time| time.as_nanos().div_ceil(1_000_000) as u64);
    let message = match (rejection, millis) {
        (Rejection::Denied(_), Some(millis)) => {
            rejection.text(&format!("Try again in {} s", millis as f64 / 1e3))
        }
        _ => rejection.text(&rejection.detail()),
    };
    headers.insert(CONTENT_TYPE, GRPC);
    headers.insert(STATUS, u16::from(code).into());
    let escaped = utf8_percent_encode(&message, ESCAPED).to_string();
    headers.insert(MESSAGE, HeaderValue::try_from(escaped).expect("printable ASCII"));
    headers.remove(RETRY_AFTER);
    if let Some(millis) = millis {
        // The header contains a signed integer of 32 bits.
        headers.insert(PUSHBACK, millis.min(i32::MAX as u64).into());
    } else if code == RESOURCE_EXHAUSTED && !matches!(rejection, Rejection::Denied(_)) {
        headers.insert(PUSHBACK, HeaderValue::from_static("-1")); // no retry
    }
    // Over HTTP, only this header reports the whole quota.
    let shows_quota = headers.contains_key(RATELIMIT_POLICY);
    let details = [quota_failure(rejection, shows_quota), millis.map(retry_info)];
    if details.iter().any(Option::is_some) {
        let status = status(code, &message, details.iter().flatten());
        let details = base64(&status);
        headers.insert(DETAILS, HeaderValue::try_from(details).expect("printable ASCII"));
    }
    problem::of(StatusCode::OK, headers, RejectionBody::default())
}

/// Encodes bytes as base64 (RFC 4648), without padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let number = group.iter().fold(0, |number, &byte| number << 8 | usize::from(byte));
        let number = number << (8 * (3 - group.len()));
        let digits = (0..=group.len()).map(|i| DIGITS[number >> (18 - 6 * i) & 63]);
        text.extend(digits.map(char::from));
    }
    text
}

/// Encodes a `google.rpc.Status` as protobuf.
fn status<'a>(code: u8, message: &str, details: impl Iterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let status = [number(1, code.into()), bytes(2, message.as_bytes())].concat();
    status.into_iter().chain(details.flat_map(|detail| bytes(3, detail))).collect()
}

/// Encodes the limit that denies the request, as an `Any`: its name, and its quota if the layer
/// shows it.
fn quota_failure(rejection: &Rejection, shows_quota: bool) -> Option<Vec<u8>> {
    let (limiter, description) = match rejection {
        Rejection::Denied(decision) if shows_quota && !decision.is_blocked() => {
            (decision.limiter(), decision.quota().to_string())
        }
        Rejection::Denied(decision) => (decision.limiter(), rejection.title().to_owned()),
        Rejection::CostAboveQuota { limiter, .. } => (&**limiter, rejection.detail().into_owned()),
        Rejection::Request(_) | Rejection::Store(_) => return None,
    };
    let violation = [bytes(1, limiter.as_bytes()), bytes(2, description.as_bytes())].concat();
    Some(any(QUOTA_FAILURE, &bytes(1, &violation)))
}

fn retry_info(millis: u64) -> Vec<u8> {
    let delay = [number(1, millis / 1_000), number(2, millis % 1_000 * 1_000_000)].concat();
    any(RETRY_INFO, &bytes(1, &delay))
}

fn any(kind: &str, message: &[u8]) -> Vec<u8> {
    [bytes(1, kind.as_bytes()), bytes(2, message)].concat()
}

/// Encodes a field that is a number.
fn number(field: u8, value: u64) -> Vec<u8> {
    [vec![field << 3], varint(value)].concat()
}

/// Encodes a field that is text or a message.
fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    [&[field << 3 | 2], &*varint(value.len() as u64), value].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = vec![];
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_that_of_rfc_4648_without_padding() {
        for (text, encoded) in [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg"),
            ("fooba", "Zm9vYmE"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text.as_bytes()), encoded);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8");
    }
}
