//! The responses of vendors, as their documentation shows them: a sample or more for each row of
//! the table in `docs/vendors.md`, and what they say.

use http::{HeaderMap, StatusCode};
use tower_ratelimit::VendorState;

const DATE: &str = "Wed, 25 Nov 2026 12:00:00 GMT"; // 1795608000
const PAGE: &str = include_str!("../../docs/vendors.md");

/// Samples, with an empty line between them: the vendor, a unit, the status, what remains and the
/// milliseconds of the block; then the headers.
const SAMPLES: &str = include_str!("vendors.txt");

struct Sample {
    vendor: &'static str,
    unit: &'static str,
    status: StatusCode,
    expected: (Option<u64>, Option<u128>),
    headers: HeaderMap,
}

fn samples() -> impl Iterator<Item = Sample> {
    SAMPLES.split("\n\n").map(|text| {
        let mut lines = text.lines();
        let head: Vec<_> = lines.next().unwrap().split(" | ").collect();
        let [vendor, unit, status, remaining, block] = head[..] else { panic!("{text}") };
        let lines: Vec<_> = lines.map(|line| line.split_once(": ").unwrap()).collect();
        Sample {
            vendor,
            unit,
            status: status.parse().unwrap(),
            expected: (remaining.parse().ok(), block.parse().ok()),
            headers: headers(&lines),
        }
    })
}

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in [&[("date", DATE)], lines].concat() {
        headers.append(name, value.parse().unwrap());
    }
    headers
}

#[test]
fn the_responses_of_vendors_are_read_as_they_are_meant() {
    for Sample { vendor, unit, status, expected, headers } in samples() {
        let state = VendorState::from_response_of(unit, status, &headers);
        let said = (state.remaining(), state.blocked_for().map(|time| time.as_millis()));
        assert_eq!(said, expected, "{vendor}: {headers:?}");
    }
}

/// The vendors in the first column of the table.
fn documented() -> Vec<&'static str> {
    let table = PAGE.split("| vendor | header |").nth(1).expect("the table of vendors");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.flat_map(|row| row.split('|').nth(1).unwrap().split(',')).map(str::trim).collect()
}

#[test]
fn each_vendor_of_the_documentation_has_a_sample() {
    let documented = documented();
    assert!(documented.len() > 50, "{documented:?}");
    let sampled: Vec<_> = samples().map(|sample| sample.vendor).collect();
    for vendor in &documented {
        assert!(sampled.contains(vendor), "{vendor}");
    }
    for vendor in &sampled {
        assert!(documented.contains(vendor), "{vendor}");
    }
}

#[test]
fn a_response_names_its_resource() {
    let search = headers(&[("x-ratelimit-remaining", "3"), ("x-ratelimit-resource", "search")]);
    let state = VendorState::from_response(StatusCode::OK, &search);
    assert_eq!(state.resource(), Some("search"));
    assert_eq!(state.of_resource("search"), state);
    assert_eq!(state.of_resource("core"), VendorState::default());
    let none =
        VendorState::from_response(StatusCode::OK, &headers(&[("x-ratelimit-remaining", "3")]));
    assert_eq!(none.resource(), None);
    assert_eq!(none.of_resource("core"), none);
    assert_eq!(
        VendorState::default().with_resource(&"r".repeat(40)).resource().map(str::len),
        Some(40)
    );
    assert_eq!(VendorState::default().with_resource(&"r".repeat(41)).resource(), None);
}

/// What takes a time in proportion to the length takes a second; a scan per item would take hours.
#[test]
fn headers_of_any_length_are_read_once() {
    let many = 100_000;
    let join = |item: fn(usize) -> String| (0..many).map(item).collect::<Vec<_>>().join(",");
    let policies = join(|i| format!("p{i};q=9;w=1;qu=bytes"));
    let items = join(|i| format!("p{i};r=1")) + ",other;r=7";
    let quotes = "\"\\\"".repeat(many);
    let params = format!("a{};r=5", ";x=1".repeat(many));
    let units = "1s".repeat(many);
    let digits = "9".repeat(many);
    let lists = "7,".repeat(many);
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("ratelimit", &items),
        ("ratelimit", &quotes),
        ("ratelimit", &params),
        ("ratelimit-policy", &policies),
        ("x-ratelimit-remaining", &lists),
        ("x-ratelimit-reset", &units),
        ("retry-after", &digits),
        ("sforce-limit-info", &"1/9,".repeat(many)),
        ("zendesk-ratelimit-x", &"remaining;".repeat(many)),
        ("x-app-rate-limit", &lists),
        ("x-app-rate-limit-count", &lists),
    ] {
        headers.append(name, value.parse().unwrap());
    }
    let state = VendorState::from_response(StatusCode::TOO_MANY_REQUESTS, &headers);
    assert_eq!(state.remaining(), Some(0));
    assert_eq!(state.blocked_for().map(|time| time.as_secs()), Some(3_600));
    let bytes = VendorState::from_response_of("bytes", StatusCode::OK, &headers);
    assert_eq!(bytes.remaining(), Some(1));
}

#[test]
fn thousands_of_headers_are_read_once() {
    let mut headers = HeaderMap::new();
    for i in 0..20_000 {
        let name = format!("v{i}-ratelimit-remaining-u{i}").parse::<http::HeaderName>().unwrap();
        headers.insert(name, "3".parse().unwrap());
        headers.append("x-ratelimit-remaining", "4".parse().unwrap());
    }
    let state = VendorState::from_response(StatusCode::OK, &headers);
    assert_eq!(state.remaining(), Some(4));
    let of_unit = VendorState::from_response_of("u19999", StatusCode::OK, &headers);
    assert_eq!(of_unit.remaining(), Some(3));
}
