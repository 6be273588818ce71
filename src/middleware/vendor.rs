//! Reads what a vendor's response says about its limit: the headers of the dialects that APIs use.
//! A limiter adopts it: `limiter/learn.rs`. The headers that this crate writes are in
//! `http/headers.rs`.

mod dialects;
mod fields;
mod time;

use std::{
    cmp::Reverse,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, StatusCode, header};

use self::{
    dialects::Said,
    fields::{Left, text},
};
use crate::limiter::VendorState;

/// Headers that name the resource whose limit the others describe.
const RESOURCE: [&str; 2] = ["x-ratelimit-resource", "x-ratelimit-bucket"];

impl VendorState {
    /// Reads the head of a response. Headers that are malformed, or not known, are ignored.
    ///
    /// | | headers |
    /// |---|---|
    /// | IETF drafts from 08 on | `RateLimit: "default";r=50;t=30`. `RateLimit-Policy` says which items count other units than requests: they are ignored |
    /// | IETF draft 07 | `RateLimit: limit=100, remaining=50, reset=5` |
    /// | most vendors | `..RateLimit-..Remaining..` with `..RateLimit-..Reset..`, also spelled `Rate-Limit`, whatever their prefix. They can name a window or an owner, such as `-Minute` or `-User` |
    /// | some others | the forms of their own, such as `X-Shopify-Shop-Api-Call-Limit: 32/40` |
    /// | all | `Retry-After`, `retry-after-ms` |
    ///
    /// [The guide](crate::guide::vendors) lists vendors. Of several limits, the one with the fewest
    /// units left counts.
    ///
    /// A reset is a number of seconds, an instant since 1970 in seconds or smaller units, a date of
    /// HTTP or of RFC 3339, or a duration such as `6m0s` or `20ms`. An instant is compared with the
    /// `Date` of the response, so the clocks need not agree.
    ///
    /// The vendor rejects requests
    ///
    /// - for the `Retry-After` of any status from 400 on. One of a lower status is about a redirect
    ///   or a job. A 403 without one, and with units left, is no matter of limits.
    /// - until the reset, if 0 units remain, whatever the status
    /// - after a 429 that says neither, until the reset of a limit of another unit with 0 units
    ///   left, or for an [unknown time](VendorState::with_unknown_block)
    ///
    /// A time that is too long to be one, such as a `Retry-After` of 20 digits, is the longest
    /// block. Bodies are not read.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, HeaderValue, StatusCode};
    /// use std::time::Duration;
    /// use tower_ratelimit::VendorState;
    ///
    /// let mut headers = HeaderMap::new();
    /// headers.insert("ratelimit", HeaderValue::from_static("\"default\";r=0;t=30"));
    /// let state = VendorState::from_response(StatusCode::OK, &headers);
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(30)));
    /// ```
    pub fn from_response(status: StatusCode, headers: &HeaderMap) -> Self {
        read("requests", status, headers, SystemTime::now())
    }

    /// Reads the head of a response like [`from_response`](Self::from_response), for a limit that
    /// counts other units than requests: the headers name them, such as `tokens` in
    /// `x-ratelimit-remaining-tokens` and `input-tokens` in
    /// `anthropic-ratelimit-input-tokens-remaining`, and so do the policies of the IETF drafts.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, HeaderValue, StatusCode};
    /// use tower_ratelimit::VendorState;
    ///
    /// let mut headers = HeaderMap::new();
    /// headers.insert("x-ratelimit-remaining-requests", HeaderValue::from_static("59"));
    /// headers.insert("x-ratelimit-remaining-tokens", HeaderValue::from_static("149984"));
    /// let state = VendorState::from_response_of("tokens", StatusCode::OK, &headers);
    /// assert_eq!(state.remaining(), Some(149_984));
    /// ```
    pub fn from_response_of(unit: &str, status: StatusCode, headers: &HeaderMap) -> Self {
        read(unit, status, headers, SystemTime::now())
    }
}

fn read(unit: &str, status: StatusCode, headers: &HeaderMap, local: SystemTime) -> VendorState {
    // The clock of the vendor, by which it computes instants.
    let now = text(headers, header::DATE.as_str()).and_then(time::date).unwrap_or(local);
    let said = dialects::read(headers, now);
    let of_unit = said.left.iter().filter(|(of, _)| of == unit).map(|(_, left)| *left);
    // Of several limits, the one with the fewest units binds, and among equals the one that resets
    // last.
    let all = of_unit.chain(fields::left(unit, headers));
    let left = all.min_by_key(|left| (left.remaining, Reverse(left.reset)));
    let mut state = VendorState::of_response(status.as_u16() < 400, left.map(|it| it.remaining));
    if let Some(resource) = RESOURCE.iter().find_map(|name| text(headers, name)) {
        state = state.with_resource(resource);
    }
    match block(status, left, &said) {
        Some(time) => state.with_block(time),
        None if status == StatusCode::TOO_MANY_REQUESTS => state.with_unknown_block(),
        None => state,
    }
}

/// Returns the time for which the vendor rejects requests, if the response says so.
fn block(status: StatusCode, left: Option<Left>, said: &Said) -> Option<Duration> {
    let some = |time: &Duration| !time.is_zero();
    let retry_after = said.retry_after.filter(|_| status.as_u16() >= 400).filter(some);
    let until_reset = || left.filter(|left| left.remaining == 0)?.reset.filter(some);
    // Whatever its unit, a limit with nothing left has rejected the request.
    let of_others = || {
        let empty = said.left.iter().filter(|(_, left)| left.remaining == 0);
        let resets = empty.filter_map(|(_, left)| left.reset).chain(said.reset);
        resets.max().filter(some).filter(|_| status == StatusCode::TOO_MANY_REQUESTS)
    };
    retry_after.or_else(until_reset).or_else(of_others)
}
