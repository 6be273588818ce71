//! What vendors' headers say about their limits, by their forms (by vendor: `vendors.rs`); and
//! `Retry-After` that is spread. That limiters adopt it is tested over both stores in `contract`.

use std::{collections::BTreeSet, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use proptest::prelude::*;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, VendorState, key, layer::Rejection,
};

use crate::support::{counting, get, header, in_memory, items, json};

const DATE: &str = "Wed, 25 Nov 2026 12:00:00 GMT"; // 1795608000

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

/// What remains, and the milliseconds of the block.
fn said(state: VendorState) -> (Option<u64>, Option<u128>) {
    (state.remaining(), state.blocked_for().map(|time| time.as_millis()))
}

fn read(status: u16, lines: &[(&'static str, &str)]) -> (Option<u64>, Option<u128>) {
    let status = StatusCode::from_u16(status).unwrap();
    said(VendorState::from_response(status, &headers(lines)))
}

#[test]
fn resets_are_durations_with_units() {
    for (text, millis) in [
        ("20ms", Some(20)),
        ("8.64s", Some(8_640)),
        ("1m30.5s", Some(90_500)),
        ("59m0s", Some(3_540_000)),
        ("1h2m3s", Some(3_600_000)), // bounded
        ("2d", Some(3_600_000)),
        ("", None),
        ("6m0", None),
        ("m", None),
        ("5 parsecs", None),
        ("-5", None),
        ("1e3", None),
        ("inf", None),
        ("999999999999999999999", Some(3_600_000)),
        ("99999999999d", Some(3_600_000)),
    ] {
        let lines = [("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-reset-requests", text)];
        assert_eq!(read(200, &lines), (Some(0), millis), "{text}");
    }
}

#[test]
fn the_ietf_drafts_are_read() {
    // 08 to 11, as Cloudflare sends it.
    let cloudflare = [("ratelimit", r#""default";r=50;t=30"#)];
    assert_eq!(read(200, &cloudflare), (Some(50), None));
    assert_eq!(read(429, &[("ratelimit", r#""default";r=0;t=30"#)]), (Some(0), Some(30_000)));
    // Several items, in one line or in several: the one with the fewest units.
    let several = [
        ("ratelimit", r#""day,;\"";r=900;t=3000;pk=:YWJj:, "burst" ; r=3 ; t=7"#),
        ("ratelimit", r#""hour";r=40"#),
    ];
    assert_eq!(read(200, &several), (Some(3), None));
    let exhausted = [("ratelimit", r#""a";r=0;t=3, "b";r=0;t=9"#)];
    assert_eq!(read(200, &exhausted), (Some(0), Some(9_000)));
    // Units other than requests.
    let units = [
        ("ratelimit-policy", r#""n";q=10;w=60, "size";q=65535;qu="content-bytes";w=10"#),
        ("ratelimit", r#""size";r=0;t=8, "n";r=9;t=6"#),
    ];
    assert_eq!(read(200, &units), (Some(9), None));
    let bytes = VendorState::from_response_of("content-bytes", StatusCode::OK, &headers(&units));
    assert_eq!(said(bytes), (Some(0), Some(8_000)));
    // 07.
    let seven =
        [("ratelimit", "limit=100, remaining=0, reset=5"), ("ratelimit-policy", "100;w=10")];
    assert_eq!(read(200, &seven), (Some(0), Some(5_000)));
    // Up to 06.
    let six =
        [("ratelimit-limit", "10, 10;w=1"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "5")];
    assert_eq!(read(429, &six), (Some(0), Some(5_000)));
}

#[test]
fn x_ratelimit_resets_are_deltas_epochs_or_dates() {
    let read = |name: &'static str, reset| {
        let lines = [("date", DATE), ("x-ratelimit-remaining", "0"), (name, reset)];
        read(200, &lines)
    };
    assert_eq!(read("x-ratelimit-reset", "45"), (Some(0), Some(45_000)));
    assert_eq!(read("x-ratelimit-reset", "0.25"), (Some(0), Some(250)));
    assert_eq!(read("x-ratelimit-reset", "1795608045"), (Some(0), Some(45_000)));
    assert_eq!(read("x-ratelimit-reset", "1795608045250"), (Some(0), Some(45_250)));
    assert_eq!(read("x-ratelimit-reset", "Wed, 25 Nov 2026 12:00:45 GMT"), (Some(0), Some(45_000)));
    // It is over.
    assert_eq!(read("x-ratelimit-reset", "1795607999"), (Some(0), None));
    assert_eq!(read("x-ratelimit-reset", "soon"), (Some(0), None));
}

#[test]
fn retry_after_counts_for_rejections() {
    for status in [400, 401, 403, 413, 418, 420, 429, 500, 502, 503, 504, 529, 599] {
        assert_eq!(read(status, &[("retry-after", "120")]), (None, Some(120_000)));
    }
    for status in [200, 202, 301, 307] {
        assert_eq!(read(status, &[("retry-after", "120")]), (None, None));
    }
    let date = [("date", DATE), ("retry-after", "Wed, 25 Nov 2026 12:02:00 GMT")];
    assert_eq!(read(429, &date), (None, Some(120_000)));
    let obsolete = [("date", DATE), ("retry-after", "Wednesday, 25-Nov-26 12:02:00 GMT")];
    assert_eq!(read(429, &obsolete), (None, Some(120_000)));
    for (text, millis) in [
        ("0.5", 500),
        ("2.0", 2_000),
        ("30s", 30_000),
        ("1795608060", 60_000),
        ("1795608060000", 60_000),
        ("2026-11-25T12:00:30Z", 30_000),
        ("10000000000", 3_600_000), // no instant, so it is a time: bounded
        ("10000000001", 3_600_000),
        ("1000000000000", 3_600_000),
        ("100000000000000000000000", 3_600_000),
        ("Thu, 25 Nov 9999 12:02:00 GMT", 3_600_000),
    ] {
        let lines = [("date", DATE), ("retry-after", text)];
        assert_eq!(read(429, &lines), (None, Some(millis)), "{text}");
    }
    let invalid = [("retry-after-ms", "soon"), ("retry-after", "7")];
    assert_eq!(read(429, &invalid), (None, Some(7_000)));
    // A proxy has added a line of its own, before or behind that of the vendor.
    for lines in [["1", "90"], ["90", "1"], ["0", "90"], ["later", "90"]] {
        assert_eq!(read(429, &lines.map(|it| ("retry-after", it))), (None, Some(90_000)));
    }
    // A 429 that says no time, or one that is over.
    assert_eq!(read(429, &[]), (None, Some(1_000)));
    assert_eq!(read(429, &[("retry-after", "0")]), (None, Some(1_000)));
    for text in ["later", "-5", "1e9", "inf", ""] {
        assert_eq!(read(429, &[("retry-after", text)]), (None, Some(1_000)), "{text}");
    }
    // The reset of a limit of which it says no more, or of another unit with nothing left.
    assert_eq!(read(429, &[("x-ratelimit-reset", "20")]), (None, Some(20_000)));
    assert_eq!(read(200, &[("x-ratelimit-reset", "20")]), (None, None));
    // Without the clock of the vendor, that of the process counts.
    assert_eq!(read(429, &[("retry-after", "Wed, 25 Nov 1999 12:02:00 GMT")]), (None, Some(1_000)));
}

#[test]
fn a_block_is_at_most_an_hour_or_as_long_as_it_is_set() {
    let day = headers(&[("retry-after", "86400")]);
    let state = VendorState::from_response(StatusCode::TOO_MANY_REQUESTS, &day);
    assert_eq!(state.blocked_for(), Some(Duration::from_secs(3_600)));
    let state = state.max_block(Duration::MAX);
    assert_eq!(state.blocked_for(), Some(Duration::from_secs(86_400)));
    assert_eq!(said(VendorState::default()), (None, None));
}

/// The headers of this crate.
#[tokio::test(start_paused = true)]
async fn the_headers_of_a_layer_are_read_as_they_are_meant() {
    use tower_ratelimit::layer::Headers::{Draft06, Draft11, XRateLimit, XRateLimitEpoch};
    for dialect in [Draft11, Draft06, XRateLimit, XRateLimitEpoch] {
        let layer = RateLimitLayer::new(in_memory(Quota::per_minute(2)), key::Global);
        let service = layer.headers([dialect]).layer(counting(&Default::default()));
        let mut states = vec![];
        for _ in 0..3 {
            let response = service.clone().oneshot(get(&[])).await.unwrap();
            states.push(VendorState::from_response(response.status(), response.headers()));
        }
        assert_eq!(said(states[0]), (Some(1), None), "{dialect:?}");
        assert_eq!(said(states[2]), (Some(0), Some(30_000)), "{dialect:?}");
    }
}

fn lines() -> impl Strategy<Value = Vec<(HeaderName, Vec<u8>)>> {
    let names = [
        "date",
        "ratelimit",
        "ratelimit-policy",
        "ratelimit-remaining",
        "ratelimit-reset",
        "retry-after",
        "retry-after-ms",
        "remaining-req",
        "sforce-limit-info",
        "x-rate-limit-interval-ms",
        "x-rate-limit-remaining",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset",
        "x-ratelimit-reset-requests",
        "x-ratelimit-resource",
        "x-ratelimit-used",
        "x-shopify-shop-api-call-limit",
        "zendesk-ratelimit-tickets",
    ];
    let value = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40),
        r#"[0-9.dhmsn"\\;,=: rtqu-]{0,40}"#.prop_map(String::into_bytes),
        "[0-9]{1,25}(\\.[0-9]{0,25})?(ms|s|m|h|d)?".prop_map(String::into_bytes),
        "[0-9]{1,5}-[0-9]{1,3}-[0-9]{1,3}[T ][0-9:.]{0,12}[Z+-]?[0-9:]{0,6}"
            .prop_map(String::into_bytes),
        "[a-z]{0,4}=?[0-9]{0,20}[/;:,=][0-9]{0,20}".prop_map(String::into_bytes),
        r#"("[a-z\\",;]{0,4}"(;[rtq]=[0-9]{0,20}){0,3},? ?){0,3}"#.prop_map(String::into_bytes),
        Just(DATE.as_bytes().to_vec()),
    ];
    let name = proptest::sample::select(names.to_vec()).prop_map(HeaderName::from_static);
    proptest::collection::vec((name, value), 0..8)
}

proptest! {
    #[test]
    fn any_headers_are_read_without_a_panic(
        lines in lines(),
        status in 100_u16..600,
        unit in "requests|tokens|[ -~]{0,9}",
    ) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                headers.append(name, value);
            }
        }
        let status = StatusCode::from_u16(status).unwrap();
        let state = VendorState::from_response_of(&unit, status, &headers);
        let block = state.max_block(Duration::MAX).blocked_for();
        prop_assert!(block.is_none_or(|time| time <= Duration::from_secs(10_000_000_000)));
        prop_assert!(state.blocked_for() <= Some(Duration::from_secs(3_600)));
        prop_assert!(status != StatusCode::TOO_MANY_REQUESTS || block.is_some());
    }
}

fn jittered(jitter: f64) -> RateLimitLayer {
    let limiter =
        Limiter::new("default", MemoryStore::new(), Algorithm::fixed_window(), Quota::per_hour(1));
    RateLimitLayer::new(limiter, key::Global).retry_jitter(jitter)
}

/// All times of a response agree. They are spread over the whole tenth, and never too early.
#[tokio::test(start_paused = true)]
async fn retry_after_is_spread_upwards() {
    let layer = jittered(0.1).extensions(true);
    let service = layer.layer(counting(&Default::default()));
    service.clone().oneshot(get(&[])).await.unwrap();
    let mut times = BTreeSet::new();
    for _ in 0..200 {
        let response = service.clone().oneshot(get(&[])).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let retry_after: u64 = header(&response, "retry-after")[0].parse().unwrap();
        assert!((3_600..=3_960).contains(&retry_after), "{retry_after}");
        let time = ("t".to_owned(), retry_after as i64);
        assert!(items(&response, "ratelimit")[0].1.contains(&time));
        let rejection = response.extensions().get::<Rejection>().unwrap();
        assert_eq!(rejection.retry_after_secs(), Some(retry_after));
        let body = json(response).await;
        assert!(body["detail"].as_str().unwrap().contains(&retry_after.to_string()), "{body}");
        times.insert(retry_after);
    }
    // With 361 equally likely values, each bound fails once in 10^9 runs, or less often.
    assert!(times.len() >= 80, "{} values of 200", times.len());
    assert!(times.first().unwrap() < &3_650 && times.last().unwrap() > &3_910, "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_exact_by_default() {
    let service = jittered(0.0).layer(counting(&Default::default()));
    service.clone().oneshot(get(&[])).await.unwrap();
    for _ in 0..20 {
        let response = service.clone().oneshot(get(&[])).await.unwrap();
        assert_eq!(header(&response, "retry-after"), ["3600"]);
    }
}

#[test]
#[should_panic(expected = "retry_jitter: 1.5 is not from 0 to 1")]
fn a_jitter_above_1_panics() {
    let _ = jittered(1.5);
}
