//! Refusals of gRPC requests: HTTP 200 with nothing but trailers (gRPC over HTTP/2), and what a client
//! needs to know when to come back (`google.rpc.RetryInfo`, gRPC proposal A6).

use std::time::Duration;

use base64::{Engine, prelude::BASE64_STANDARD_NO_PAD};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{CONTENT_TYPE, RETRY_AFTER},
    request::Parts,
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::{error::RequestError, middleware::protocol::Rejection};

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// What a message must not hold as it is.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// The codes of `google.rpc.Code`.
const INVALID_ARGUMENT: u8 = 3;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

/// Returns whether the request is a gRPC call: a `POST` with the content type of gRPC. gRPC-Web is
/// not one, since its trailers are in the body.
///
/// The version of HTTP does not count: a call that tonic-web has translated from gRPC-Web still has
/// version 1.1, and so has a call that a client in the same process builds. A client that forges
/// the content type of a `POST` changes its own answer only, which no cache stores.
pub(crate) fn is_grpc(head: &Parts) -> bool {
    if head.method != Method::POST {
        return false;
    }
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let rest = kind.and_then(|kind| kind.strip_prefix(b"application/grpc"));
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

/// How long the client waits for its answer.
pub(crate) fn timeout(head: &Parts) -> Option<Duration> {
    let text = head.headers.get(TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let value = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3_600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

/// Puts the status into the header fields of a response without a body.
pub(crate) fn add_status(headers: &mut HeaderMap, rejection: &Rejection) {
    let code = match rejection {
        Rejection::Denied(_) | Rejection::CostAboveQuota { .. } => RESOURCE_EXHAUSTED,
        Rejection::Store(_) => UNAVAILABLE,
        Rejection::Request(RequestError::Misconfigured(_)) => INTERNAL,
        Rejection::Request(_) => INVALID_ARGUMENT,
    };
    let message = rejection.to_string();
    headers.insert(CONTENT_TYPE, GRPC);
    headers.insert(STATUS, u16::from(code).into());
    let escaped = utf8_percent_encode(&message, ESCAPED).to_string();
    headers.insert(MESSAGE, HeaderValue::try_from(escaped).expect("printable ASCII"));
    headers.remove(RETRY_AFTER);
    if let Some(retry_after) = rejection.retry_after() {
        // The field is a signed integer of 32 bits; a client waits exactly so long.
        let millis = retry_after.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128);
        headers.insert(PUSHBACK, (millis as u64).into());
        let details = BASE64_STANDARD_NO_PAD.encode(status(code, &message, retry_after));
        headers.insert(DETAILS, HeaderValue::try_from(details).expect("printable ASCII"));
    } else if code == RESOURCE_EXHAUSTED {
        headers.insert(PUSHBACK, HeaderValue::from_static("-1")); // it shall not retry
    }
}

/// A `google.rpc.Status` with a `RetryInfo`, as protobuf.
fn status(code: u8, message: &str, retry_after: Duration) -> Vec<u8> {
    let mut delay = vec![];
    number(&mut delay, 1, retry_after.as_secs());
    number(&mut delay, 2, retry_after.subsec_nanos().into());
    let mut retry_info = vec![];
    bytes(&mut retry_info, 1, &delay);
    let mut any = vec![];
    bytes(&mut any, 1, RETRY_INFO.as_bytes());
    bytes(&mut any, 2, &retry_info);
    let mut status = vec![];
    number(&mut status, 1, code.into());
    bytes(&mut status, 2, message.as_bytes());
    bytes(&mut status, 3, &any);
    status
}

fn number(message: &mut Vec<u8>, field: u8, value: u64) {
    message.push(field << 3);
    varint(message, value);
}

fn bytes(message: &mut Vec<u8>, field: u8, value: &[u8]) {
    message.push(field << 3 | 2);
    varint(message, value.len() as u64);
    message.extend_from_slice(value);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}
