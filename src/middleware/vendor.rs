//! Reads what a vendor's response says about its limit: the headers of the dialects that APIs use.
//! A limiter adopts it: `limiter/learn.rs`. The headers that this crate writes are in
//! `http/headers.rs`.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};

use crate::limiter::VendorState;

/// The block after a `429` that says no time.
const UNKNOWN_BLOCK: Duration = Duration::from_secs(1);

/// Numbers from here on are instants in seconds since 1970: as a time, it would be 31 years.
const FIRST_EPOCH: f64 = 1e9;

/// Numbers from here on are instants in milliseconds.
const FIRST_EPOCH_MS: f64 = 1e12;

/// A longer time is no information. Blocks are bounded anyway.
const LONGEST: f64 = 1e10;

impl VendorState {
    /// Reads the head of a response. Headers that are malformed, or not known, are ignored.
    ///
    /// | | headers |
    /// |---|---|
    /// | IETF drafts from 08 on | `RateLimit: "default";r=50;t=30`; of several items, the one with the fewest units left. `RateLimit-Policy` says which items count other units than requests: they are ignored |
    /// | IETF draft 07 | `RateLimit: limit=100, remaining=50, reset=5` |
    /// | IETF drafts up to 06 | `RateLimit-Remaining`, `RateLimit-Reset` |
    /// | GitHub, X and others | `X-RateLimit-Remaining`, `X-RateLimit-Reset`, also spelled `X-Rate-Limit-*` |
    /// | OpenAI | `x-ratelimit-remaining-requests`, `x-ratelimit-reset-requests` |
    /// | all | `Retry-After`, `retry-after-ms` |
    ///
    /// A reset is a number of seconds, an instant in seconds or milliseconds since 1970, a date, or
    /// a duration such as `6m0s` or `20ms`. An instant is compared with the `Date` of the response,
    /// so the clocks need not agree.
    ///
    /// The vendor rejects requests
    ///
    /// - for the `Retry-After` of a 4xx or a 5xx, such as a 403 for a secondary limit of GitHub. A
    ///   403 without one, and with units left, is no matter of limits.
    /// - until the reset, if 0 units remain, whatever the status
    /// - for a second, after a 429 that says neither
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, StatusCode};
    /// use std::time::Duration;
    /// use tower_ratelimit::http::VendorState;
    ///
    /// let mut headers = HeaderMap::new();
    /// headers.insert("ratelimit", "\"default\";r=0;t=30".parse().unwrap());
    /// let state = VendorState::from_response(StatusCode::OK, &headers);
    /// assert_eq!(state.blocked_for(), Some(Duration::from_secs(30)));
    /// ```
    pub fn from_response(status: StatusCode, headers: &HeaderMap) -> Self {
        read("requests", status, headers, SystemTime::now())
    }

    /// Reads the head of a response like [`from_response`](Self::from_response), for a limit that
    /// counts other units than requests: OpenAI reports `tokens` in
    /// `x-ratelimit-remaining-tokens`, and the IETF drafts have policies with such a unit.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{HeaderMap, StatusCode};
    /// use tower_ratelimit::http::VendorState;
    ///
    /// let mut headers = HeaderMap::new();
    /// headers.insert("x-ratelimit-remaining-requests", "59".parse().unwrap());
    /// headers.insert("x-ratelimit-remaining-tokens", "149984".parse().unwrap());
    /// let state = VendorState::from_response_of("tokens", StatusCode::OK, &headers);
    /// assert_eq!(state.remaining(), Some(149_984));
    /// ```
    pub fn from_response_of(unit: &str, status: StatusCode, headers: &HeaderMap) -> Self {
        read(unit, status, headers, SystemTime::now())
    }
}

/// What remains, and the time until more does.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Left {
    remaining: u64,
    reset: Option<Duration>,
}

fn read(unit: &str, status: StatusCode, headers: &HeaderMap, local: SystemTime) -> VendorState {
    // The clock of the vendor, by which it computes instants.
    let date = text(headers, header::DATE.as_str());
    let now = date.and_then(|it| httpdate::parse_http_date(it).ok()).unwrap_or(local);
    let left = left(unit, headers, now);
    let mut state = VendorState::default();
    if let Some(Left { remaining, .. }) = left {
        state = state.with_remaining(remaining);
    }
    match block(status, headers, left, now) {
        Some(time) => state.with_block(time),
        None => state,
    }
}

/// Returns the time for which the vendor rejects requests.
fn block(
    status: StatusCode,
    headers: &HeaderMap,
    left: Option<Left>,
    now: SystemTime,
) -> Option<Duration> {
    let rejects = status.is_client_error() || status.is_server_error();
    let retry_after = retry_after(headers, now).filter(|_| rejects);
    let until_reset = || left.filter(|left| left.remaining == 0)?.reset;
    let unknown = || (status == StatusCode::TOO_MANY_REQUESTS).then_some(UNKNOWN_BLOCK);
    retry_after.or_else(until_reset).filter(|time| !time.is_zero()).or_else(unknown)
}

fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let millis = number(text(headers, "retry-after-ms").unwrap_or_default());
    let exact = millis.and_then(|millis| duration(millis / 1e3));
    exact.or_else(|| time(text(headers, header::RETRY_AFTER.as_str())?, now))
}

/// Reads the first dialect that says what remains.
fn left(unit: &str, headers: &HeaderMap, now: SystemTime) -> Option<Left> {
    if let Some(left) = fields(unit, headers) {
        return Some(left);
    }
    // Others than requests are only in headers that name them.
    let of_unit = [
        (format!("x-ratelimit-remaining-{unit}"), format!("x-ratelimit-reset-{unit}")),
        (format!("ratelimit-remaining-{unit}"), format!("ratelimit-reset-{unit}")),
    ];
    let of_requests = ["ratelimit", "x-ratelimit", "x-rate-limit"]
        .map(|prefix| (format!("{prefix}-remaining"), format!("{prefix}-reset")));
    let of_requests = of_requests.into_iter().filter(|_| unit == "requests");
    of_requests.chain(of_unit).find_map(|(remaining, reset)| {
        let remaining = units(text(headers, &remaining)?)?;
        let reset = text(headers, &reset).and_then(|reset| time(reset, now));
        Some(Left { remaining, reset })
    })
}

/// Reads `RateLimit` of the drafts from 07 on. Of several items, the one with the fewest units
/// binds, and among equals the one that resets last.
fn fields(unit: &str, headers: &HeaderMap) -> Option<Left> {
    let all = |name: &str| {
        let lines = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
        lines.flat_map(|line| split(line, ',')).map(item).collect::<Vec<_>>()
    };
    let items = all("ratelimit");
    // Draft 07 is a dictionary. Its members have other keys than the parameters of later drafts.
    let member = |key| items.iter().find(|(name, _)| *name == key).and_then(|(_, it)| it.value);
    if let Some(remaining) = member("remaining").and_then(units) {
        let reset = member("reset").and_then(number).and_then(duration);
        return (unit == "requests").then_some(Left { remaining, reset });
    }
    let policies = all("ratelimit-policy");
    let unit_of = |name: &str| {
        let policy = policies.iter().find(|(policy, _)| *policy == name);
        policy.and_then(|(_, policy)| policy.param("qu")).map_or("requests", unquoted)
    };
    let of_unit = items.iter().filter(|(name, _)| unit_of(name) == unit);
    let left = of_unit.filter_map(|(_, item)| {
        let remaining = units(item.param("r")?)?;
        Some(Left { remaining, reset: item.param("t").and_then(number).and_then(duration) })
    });
    left.min_by_key(|left| (left.remaining, std::cmp::Reverse(left.reset)))
}

/// An item of a list, or a member of a dictionary.
struct Item<'a> {
    /// Behind the `=` of a member.
    value: Option<&'a str>,
    params: Vec<(&'a str, &'a str)>,
}

impl<'a> Item<'a> {
    fn param(&self, key: &str) -> Option<&'a str> {
        self.params.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }
}

/// Reads a name, its value and its parameters.
fn item(text: &str) -> (&str, Item<'_>) {
    let mut parts = split(text, ';').into_iter();
    let head = parts.next().unwrap_or_default();
    let (name, value) = match head.starts_with('"') {
        true => (unquoted(head), None),
        false => pair(head),
    };
    let params = parts.filter_map(|part| match pair(part) {
        (key, Some(value)) => Some((key, value)),
        _ => None,
    });
    (name, Item { value, params: params.collect() })
}

fn pair(text: &str) -> (&str, Option<&str>) {
    match text.split_once('=') {
        Some((key, value)) => (key.trim(), Some(value.trim())),
        None => (text.trim(), None),
    }
}

/// Returns the text of a string. Escapes stay: both headers have the same ones.
fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

/// Splits a text at a separator outside of strings.
fn split(text: &str, separator: char) -> Vec<&str> {
    let (mut in_string, mut is_escaped) = (false, false);
    let parts = text.split(move |char| {
        let is_end = char == separator && !in_string;
        in_string ^= char == '"' && !is_escaped;
        is_escaped = char == '\\' && in_string && !is_escaped;
        is_end
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    Some(headers.get(name)?.to_str().ok()?.trim())
}

/// Reads a number of units. Some vendors count fractions: a part of a unit is none.
fn units(text: &str) -> Option<u64> {
    number(text).map(|units| units as u64)
}

/// Reads a number that is not negative. Unlike `f64::parse`, without `inf` and exponents.
fn number(text: &str) -> Option<f64> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|number: &f64| is_number && number.is_finite())
}

fn duration(seconds: f64) -> Option<Duration> {
    (0.0..=LONGEST).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

/// Reads the time until a reset: a number, a duration with units, or a date.
fn time(text: &str, now: SystemTime) -> Option<Duration> {
    let until = |instant: SystemTime| instant.duration_since(now).unwrap_or_default();
    let epoch = |seconds| Some(until(SystemTime::UNIX_EPOCH.checked_add(duration(seconds)?)?));
    match number(text) {
        Some(millis) if millis >= FIRST_EPOCH_MS => epoch(millis / 1e3),
        Some(seconds) if seconds >= FIRST_EPOCH => epoch(seconds),
        Some(seconds) => duration(seconds),
        None => with_units(text).or_else(|| Some(until(httpdate::parse_http_date(text).ok()?))),
    }
}

/// Reads a duration as Go writes it, such as `6m0s`, `1h2m3.5s` or `20ms`.
fn with_units(mut text: &str) -> Option<Duration> {
    let mut seconds = if text.is_empty() { return None } else { 0.0 };
    while !text.is_empty() {
        let (digits, rest) = text.split_at(text.find(|it: char| it.is_ascii_alphabetic())?);
        let end = rest.find(|it: char| !it.is_ascii_alphabetic()).unwrap_or(rest.len());
        let (unit, rest) = rest.split_at(end);
        seconds += number(digits)?
            * match unit {
                "d" => 86_400.0,
                "h" => 3_600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        text = rest;
    }
    duration(seconds)
}
