//! What vendors' headers say about their limits, by samples of real responses; and `Retry-After`
//! that is spread. That limiters adopt it is tested over both stores in `contract`.

use std::{collections::BTreeSet, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use proptest::prelude::*;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer,
    http::{Rejection, VendorState},
    key,
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
fn github_reports_an_epoch_and_rejects_with_403() {
    let quota = |remaining| {
        [
            ("date", DATE),
            ("x-ratelimit-limit", "5000"),
            ("x-ratelimit-remaining", remaining),
            ("x-ratelimit-used", "13"),
            ("x-ratelimit-reset", "1795608900"), // 15 minutes later
            ("x-ratelimit-resource", "core"),
        ]
    };
    assert_eq!(read(200, &quota("4987")), (Some(4_987), None));
    assert_eq!(read(403, &quota("0")), (Some(0), Some(900_000)));
    assert_eq!(read(429, &quota("0")), (Some(0), Some(900_000)));
    // A token without permission: no matter of limits.
    assert_eq!(read(403, &quota("4987")), (Some(4_987), None));
    // A secondary limit.
    let secondary = [&quota("4987")[..], &[("retry-after", "60")]].concat();
    assert_eq!(read(403, &secondary), (Some(4_987), Some(60_000)));
}

#[test]
fn openai_reports_requests_and_tokens() {
    let lines = [
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-limit-tokens", "150000"),
        ("x-ratelimit-remaining-requests", "59"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-requests", "1s"),
        ("x-ratelimit-reset-tokens", "6m0s"),
    ];
    assert_eq!(read(200, &lines), (Some(59), None));
    let tokens = VendorState::from_response_of("tokens", StatusCode::OK, &headers(&lines));
    assert_eq!(said(tokens), (Some(0), Some(360_000)));
    let retry = [&lines[..], &[("retry-after", "2"), ("retry-after-ms", "1300")]].concat();
    assert_eq!(read(429, &retry), (Some(59), Some(1_300)));
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
        ("999999999999999999999", None),
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
fn x_spells_its_headers_with_two_hyphens() {
    let lines =
        [("date", DATE), ("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "1795608010")];
    assert_eq!(read(429, &lines), (Some(0), Some(10_000)));
}

#[test]
fn retry_after_counts_for_rejections() {
    for status in [403, 418, 429, 500, 503] {
        assert_eq!(read(status, &[("retry-after", "120")]), (None, Some(120_000)));
    }
    for status in [200, 202, 301] {
        assert_eq!(read(status, &[("retry-after", "120")]), (None, None));
    }
    let date = [("date", DATE), ("retry-after", "Wed, 25 Nov 2026 12:02:00 GMT")];
    assert_eq!(read(429, &date), (None, Some(120_000)));
    let obsolete = [("date", DATE), ("retry-after", "Wednesday, 25-Nov-26 12:02:00 GMT")];
    assert_eq!(read(429, &obsolete), (None, Some(120_000)));
    // A 429 that says no time, or one that is over.
    assert_eq!(read(429, &[]), (None, Some(1_000)));
    assert_eq!(read(429, &[("retry-after", "0")]), (None, Some(1_000)));
    assert_eq!(read(429, &[("retry-after", "later")]), (None, Some(1_000)));
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
    use tower_ratelimit::http::Headers::{RateLimit, Triple, XRateLimit, XRateLimitEpoch};
    for dialect in [RateLimit, Triple, XRateLimit, XRateLimitEpoch] {
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
        "x-rate-limit-remaining",
        "x-ratelimit-remaining",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset",
        "x-ratelimit-reset-requests",
    ];
    let value = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40),
        r#"[0-9.dhmsn"\\;,=: rtqu-]{0,40}"#.prop_map(String::into_bytes),
        "[0-9]{1,25}(\\.[0-9]{0,25})?(ms|s|m|h|d)?".prop_map(String::into_bytes),
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
