//! The responses of vendors, as their documentation shows them: a sample or more for each row of
//! the table in `docs/vendors.md`, and what they say.

use http::{HeaderMap, StatusCode};
use tower_ratelimit::http::VendorState;

const DATE: &str = "Wed, 25 Nov 2026 12:00:00 GMT"; // 1795608000
const PAGE: &str = include_str!("../../docs/vendors.md");

/// A vendor, a unit, the status and the headers of a response; what remains, and the milliseconds
/// of the block.
type Sample = (&'static str, &'static str, u16, &'static [(&'static str, &'static str)], Expected);

type Expected = (Option<u64>, Option<u128>);

const REQUESTS: &str = "requests";

#[rustfmt::skip]
const SAMPLES: &[Sample] = &[
    ("GitHub", REQUESTS, 200, &[("x-ratelimit-limit", "5000"), ("x-ratelimit-remaining", "4987"), ("x-ratelimit-used", "13"), ("x-ratelimit-reset", "1795608900"), ("x-ratelimit-resource", "core")], (Some(4_987), None)),
    ("GitHub", REQUESTS, 403, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1795608900")], (Some(0), Some(900_000))),
    ("GitHub", REQUESTS, 403, &[("x-ratelimit-remaining", "4987"), ("retry-after", "60")], (Some(4_987), Some(60_000))),
    ("GitLab", REQUESTS, 429, &[("ratelimit-limit", "60"), ("ratelimit-name", "throttle_authenticated_web"), ("ratelimit-observed", "67"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "1795608030"), ("ratelimit-resettime", "Wed, 25 Nov 2026 12:00:30 GMT"), ("retry-after", "30")], (Some(0), Some(30_000))),
    ("X", REQUESTS, 429, &[("x-rate-limit-limit", "900"), ("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "1795608010")], (Some(0), Some(10_000))),
    ("X", REQUESTS, 429, &[("x-rate-limit-remaining", "12"), ("x-rate-limit-reset", "1795608010"), ("x-user-limit-24hour-limit", "50"), ("x-user-limit-24hour-remaining", "0"), ("x-user-limit-24hour-reset", "1795609000")], (Some(0), Some(1_000_000))),
    ("OpenAI", REQUESTS, 200, &[("x-ratelimit-limit-requests", "60"), ("x-ratelimit-limit-tokens", "150000"), ("x-ratelimit-remaining-requests", "59"), ("x-ratelimit-remaining-tokens", "149984"), ("x-ratelimit-reset-requests", "1s"), ("x-ratelimit-reset-tokens", "6m0s")], (Some(59), None)),
    ("OpenAI", "tokens", 200, &[("x-ratelimit-remaining-requests", "59"), ("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-remaining-project-tokens", "7"), ("x-ratelimit-reset-tokens", "6m0s")], (Some(0), Some(360_000))),
    ("OpenAI", REQUESTS, 429, &[("x-ratelimit-remaining-requests", "59"), ("x-ratelimit-reset-requests", "1s"), ("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-reset-tokens", "6m0s")], (Some(59), Some(360_000))),
    ("Azure OpenAI", REQUESTS, 429, &[("x-ratelimit-remaining-requests", "9"), ("x-ratelimit-reset-requests", "1"), ("retry-after", "2"), ("retry-after-ms", "1300")], (Some(9), Some(1_300))),
    ("Azure", REQUESTS, 429, &[("x-ms-ratelimit-remaining-subscription-reads", "11999"), ("x-ms-retry-after-ms", "4500")], (Some(11_999), Some(4_500))),
    ("Azure", REQUESTS, 200, &[("x-ms-ratelimit-remaining-subscription-writes", "1198"), ("x-ms-ratelimit-remaining-resource", "Microsoft.Compute/HighCostGet3Min;159")], (Some(1_198), None)),
    ("Anthropic", REQUESTS, 200, &[("anthropic-ratelimit-requests-limit", "50"), ("anthropic-ratelimit-requests-remaining", "49"), ("anthropic-ratelimit-requests-reset", "2026-11-25T12:00:02Z"), ("anthropic-ratelimit-tokens-remaining", "0"), ("anthropic-ratelimit-tokens-reset", "2026-11-25T12:00:31Z")], (Some(49), None)),
    ("Anthropic", "input-tokens", 200, &[("anthropic-ratelimit-requests-remaining", "49"), ("anthropic-ratelimit-input-tokens-limit", "40000"), ("anthropic-ratelimit-input-tokens-remaining", "0"), ("anthropic-ratelimit-input-tokens-reset", "2026-11-25T12:00:31Z")], (Some(0), Some(31_000))),
    ("Anthropic", "output-tokens", 429, &[("anthropic-ratelimit-output-tokens-remaining", "8000"), ("anthropic-ratelimit-output-tokens-reset", "2026-11-25T12:00:00Z"), ("retry-after", "17")], (Some(8_000), Some(17_000))),
    ("Anthropic", REQUESTS, 529, &[("retry-after", "5")], (None, Some(5_000))),
    ("Mistral", REQUESTS, 200, &[("x-ratelimit-limit-req-minute", "60"), ("x-ratelimit-remaining-req-minute", "58"), ("x-ratelimit-remaining-tokens-minute", "499000")], (Some(58), None)),
    ("Mistral", "tokens", 200, &[("x-ratelimit-remaining-req-minute", "58"), ("x-ratelimit-remaining-tokens-minute", "499000"), ("x-ratelimit-remaining-tokens-month", "1000")], (Some(1_000), None)),
    ("Groq", REQUESTS, 429, &[("retry-after", "2"), ("x-ratelimit-limit-requests", "14400"), ("x-ratelimit-remaining-requests", "14370"), ("x-ratelimit-reset-requests", "2m59.56s"), ("x-ratelimit-reset-tokens", "7.66s")], (Some(14_370), Some(2_000))),
    ("Groq", REQUESTS, 200, &[("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-reset-requests", "2m59.56s")], (Some(0), Some(179_560))),
    ("Cerebras", REQUESTS, 200, &[("x-ratelimit-remaining-requests-day", "0"), ("x-ratelimit-reset-requests-day", "33.382867"), ("x-ratelimit-remaining-tokens-minute", "50000")], (Some(0), Some(33_382))),
    ("Fireworks", "tokens-prompt", 200, &[("x-ratelimit-remaining-requests", "5999"), ("x-ratelimit-remaining-tokens-prompt", "0"), ("x-ratelimit-reset-tokens-prompt", "3")], (Some(0), Some(3_000))),
    ("Cohere", REQUESTS, 200, &[("x-trial-endpoint-call-limit", "10"), ("x-trial-endpoint-call-remaining", "9")], (Some(9), None)),
    ("OpenRouter", REQUESTS, 429, &[("x-ratelimit-limit", "20"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1795608060000")], (Some(0), Some(60_000))),
    ("Shopify", REQUESTS, 200, &[("x-shopify-shop-api-call-limit", "32/40")], (Some(8), None)),
    ("Shopify", REQUESTS, 429, &[("x-shopify-shop-api-call-limit", "40/40"), ("retry-after", "2.0")], (Some(0), Some(2_000))),
    ("BigCommerce", REQUESTS, 429, &[("x-rate-limit-requests-left", "0"), ("x-rate-limit-requests-quota", "150"), ("x-rate-limit-time-reset-ms", "3000"), ("x-rate-limit-time-window-ms", "30000")], (Some(0), Some(3_000))),
    ("Slack", REQUESTS, 429, &[("retry-after", "30")], (None, Some(30_000))),
    ("Discord", REQUESTS, 429, &[("x-ratelimit-limit", "5"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1795608001.123"), ("x-ratelimit-reset-after", "1.25"), ("x-ratelimit-bucket", "abcd1234"), ("x-ratelimit-scope", "user")], (Some(0), Some(1_250))),
    ("Discord", REQUESTS, 429, &[("retry-after", "65"), ("x-ratelimit-global", "true"), ("x-ratelimit-scope", "global")], (None, Some(65_000))),
    ("Twitch", REQUESTS, 429, &[("ratelimit-limit", "800"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "1795608020")], (Some(0), Some(20_000))),
    ("Atlassian", REQUESTS, 429, &[("x-ratelimit-limit", "100"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "2026-11-25T12:02Z"), ("x-ratelimit-nearlimit", "true")], (Some(0), Some(120_000))),
    ("Atlassian", REQUESTS, 200, &[("x-ratelimit-remaining", "7"), ("x-ratelimit-interval-seconds", "60"), ("x-ratelimit-fillrate", "2")], (Some(7), None)),
    ("HubSpot", REQUESTS, 200, &[("x-hubspot-ratelimit-daily", "250000"), ("x-hubspot-ratelimit-daily-remaining", "249000"), ("x-hubspot-ratelimit-interval-milliseconds", "10000"), ("x-hubspot-ratelimit-max", "100"), ("x-hubspot-ratelimit-remaining", "98"), ("x-hubspot-ratelimit-secondly", "10"), ("x-hubspot-ratelimit-secondly-remaining", "9")], (Some(9), None)),
    ("HubSpot", REQUESTS, 429, &[("x-hubspot-ratelimit-interval-milliseconds", "10000"), ("x-hubspot-ratelimit-max", "100"), ("x-hubspot-ratelimit-remaining", "0")], (Some(0), Some(10_000))),
    ("Salesforce", REQUESTS, 200, &[("sforce-limit-info", "api-usage=18/5000")], (Some(4_982), None)),
    ("Salesforce", REQUESTS, 200, &[("sforce-limit-info", "api-usage=25/5000; per-app-api-usage=17/250(appName=sample-app)")], (Some(233), None)),
    ("Zendesk", REQUESTS, 200, &[("x-rate-limit", "700"), ("x-rate-limit-remaining", "699"), ("ratelimit-limit", "700"), ("ratelimit-remaining", "699"), ("ratelimit-reset", "41"), ("zendesk-ratelimit-tickets-index", "total=100; remaining=99; resets=44")], (Some(99), None)),
    ("Zendesk", REQUESTS, 429, &[("zendesk-ratelimit-tickets-index", "total=100; remaining=0; resets=44"), ("x-rate-limit-remaining", "699")], (Some(0), Some(44_000))),
    ("Binance", REQUESTS, 418, &[("x-mbx-used-weight-1m", "1201"), ("retry-after", "120")], (None, Some(120_000))),
    ("Bybit", REQUESTS, 200, &[("x-bapi-limit", "100"), ("x-bapi-limit-status", "0"), ("x-bapi-limit-reset-timestamp", "1795608000750")], (Some(0), Some(750))),
    ("KuCoin", REQUESTS, 429, &[("gw-ratelimit-limit", "500"), ("gw-ratelimit-remaining", "0"), ("gw-ratelimit-reset", "489")], (Some(0), Some(489))),
    ("Gate.io", REQUESTS, 429, &[("x-gate-ratelimit-limit", "10"), ("x-gate-ratelimit-requests-remain", "0"), ("x-gate-ratelimit-reset-timestamp", "1795608003")], (Some(0), Some(3_000))),
    ("Upbit", REQUESTS, 200, &[("remaining-req", "group=default; min=1800; sec=29")], (Some(29), None)),
    ("Okta", REQUESTS, 429, &[("x-rate-limit-limit", "600"), ("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "1795608015")], (Some(0), Some(15_000))),
    ("Auth0", REQUESTS, 429, &[("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1795608001")], (Some(0), Some(1_000))),
    ("Reddit", REQUESTS, 200, &[("x-ratelimit-remaining", "595.5"), ("x-ratelimit-reset", "120"), ("x-ratelimit-used", "4")], (Some(595), None)),
    ("Linear", REQUESTS, 200, &[("x-ratelimit-requests-limit", "1500"), ("x-ratelimit-requests-remaining", "0"), ("x-ratelimit-requests-reset", "1795608060000"), ("x-complexity", "12"), ("x-ratelimit-complexity-remaining", "9")], (Some(0), Some(60_000))),
    ("Linear", "complexity", 200, &[("x-ratelimit-complexity-remaining", "0"), ("x-ratelimit-complexity-reset", "1795608060000")], (Some(0), Some(60_000))),
    ("Docker Hub", REQUESTS, 200, &[("ratelimit-limit", "100;w=21600"), ("ratelimit-remaining", "76;w=21600"), ("docker-ratelimit-source", "192.0.2.1")], (Some(76), None)),
    ("Vimeo", REQUESTS, 429, &[("x-ratelimit-limit", "100"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "2026-11-25T12:00:50+00:00")], (Some(0), Some(50_000))),
    ("Fastly", REQUESTS, 429, &[("fastly-ratelimit-remaining", "0"), ("fastly-ratelimit-reset", "1795608008")], (Some(0), Some(8_000))),
    ("Cloudflare", REQUESTS, 429, &[("ratelimit", r#""default";r=0;t=30"#), ("ratelimit-policy", r#""default";q=1200;w=300"#)], (Some(0), Some(30_000))),
    ("Contentful", REQUESTS, 429, &[("x-contentful-ratelimit-hour-limit", "36000"), ("x-contentful-ratelimit-hour-remaining", "35999"), ("x-contentful-ratelimit-second-limit", "10"), ("x-contentful-ratelimit-second-remaining", "0"), ("x-contentful-ratelimit-reset", "1")], (Some(0), Some(1_000))),
    ("Trello", REQUESTS, 429, &[("x-rate-limit-api-key-interval-ms", "10000"), ("x-rate-limit-api-key-max", "300"), ("x-rate-limit-api-key-remaining", "285"), ("x-rate-limit-api-token-interval-ms", "10000"), ("x-rate-limit-api-token-remaining", "0"), ("x-rate-limit-db-query-time-remaining", "7200000")], (Some(0), Some(10_000))),
    ("DigitalOcean", REQUESTS, 429, &[("ratelimit-limit", "5000"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "1795608100")], (Some(0), Some(100_000))),
    ("Heroku", REQUESTS, 200, &[("ratelimit-remaining", "2400"), ("ratelimit-multiplier", "1")], (Some(2_400), None)),
    ("Etsy", REQUESTS, 200, &[("x-limit-per-second", "10"), ("x-remaining-this-second", "9"), ("x-limit-per-day", "10000"), ("x-remaining-today", "8012")], (Some(9), None)),
    ("Pipedrive", REQUESTS, 429, &[("x-ratelimit-limit", "40"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "2"), ("x-daily-ratelimit-token-remaining", "0")], (Some(0), Some(2_000))),
    ("Xero", REQUESTS, 200, &[("x-appminlimit-remaining", "9988"), ("x-daylimit-remaining", "4966"), ("x-minlimit-remaining", "58")], (Some(58), None)),
    ("Strava", REQUESTS, 200, &[("x-ratelimit-limit", "200,2000"), ("x-ratelimit-usage", "120,1995"), ("x-readratelimit-limit", "100,1000"), ("x-readratelimit-usage", "10,100")], (Some(5), None)),
    ("Riot Games", REQUESTS, 200, &[("x-app-rate-limit", "20:1,100:120"), ("x-app-rate-limit-count", "1:1,90:120"), ("x-method-rate-limit", "2000:60"), ("x-method-rate-limit-count", "1:60")], (Some(10), None)),
    ("Imgur", REQUESTS, 200, &[("x-ratelimit-userlimit", "500"), ("x-ratelimit-userremaining", "0"), ("x-ratelimit-userreset", "1795608040"), ("x-ratelimit-clientremaining", "12480")], (Some(0), Some(40_000))),
    ("Yelp", REQUESTS, 429, &[("ratelimit-dailylimit", "5000"), ("ratelimit-remaining", "0"), ("ratelimit-resettime", "2026-11-25T12:10:00+00:00")], (Some(0), Some(600_000))),
    ("Sentry", REQUESTS, 200, &[("x-sentry-rate-limit-limit", "40"), ("x-sentry-rate-limit-remaining", "39"), ("x-sentry-rate-limit-reset", "1795608001"), ("x-sentry-rate-limit-concurrentlimit", "25"), ("x-sentry-rate-limit-concurrentremaining", "24")], (Some(39), None)),
    ("RapidAPI", REQUESTS, 429, &[("x-ratelimit-requests-limit", "1000"), ("x-ratelimit-requests-remaining", "0"), ("x-ratelimit-requests-reset", "1800")], (Some(0), Some(1_800_000))),
    ("Kong", REQUESTS, 429, &[("x-ratelimit-remaining-minute", "0"), ("x-ratelimit-limit-minute", "5"), ("x-ratelimit-remaining-hour", "42"), ("ratelimit-remaining", "0"), ("ratelimit-reset", "13")], (Some(0), Some(13_000))),
    ("Zoom", REQUESTS, 429, &[("x-ratelimit-category", "Heavy"), ("x-ratelimit-limit", "10"), ("x-ratelimit-remaining", "0"), ("retry-after", "2026-11-25T12:00:10Z")], (Some(0), Some(10_000))),
    ("Fitbit", REQUESTS, 429, &[("fitbit-rate-limit-limit", "150"), ("fitbit-rate-limit-remaining", "0"), ("fitbit-rate-limit-reset", "1478")], (Some(0), Some(1_478_000))),
    ("Toggl", REQUESTS, 200, &[("x-toggl-quota-remaining", "0"), ("x-toggl-quota-resets-in", "847")], (Some(0), Some(847_000))),
    ("Walmart", REQUESTS, 429, &[("x-current-token-count", "0"), ("x-next-replenish-time", "1795608009000")], (Some(0), Some(9_000))),
    ("ip-api", REQUESTS, 200, &[("x-rl", "0"), ("x-ttl", "44")], (Some(0), Some(44_000))),
    ("Mastodon", REQUESTS, 429, &[("x-ratelimit-limit", "300"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "2026-11-25T12:05:00.180297Z")], (Some(0), Some(300_180))),
    ("urlscan.io", REQUESTS, 429, &[("x-rate-limit-remaining", "0"), ("x-rate-limit-reset", "2026-11-25T12:01:00.000Z"), ("x-rate-limit-reset-after", "59")], (Some(0), Some(59_000))),
    ("ListenBrainz", REQUESTS, 429, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset-in", "6"), ("x-ratelimit-reset", "1795608007")], (Some(0), Some(6_000))),
    ("Ticketmaster", REQUESTS, 200, &[("rate-limit", "5000"), ("rate-limit-available", "0"), ("rate-limit-over", "0"), ("rate-limit-reset", "1795608060000")], (Some(0), Some(60_000))),
    ("Bucket4j", REQUESTS, 429, &[("x-rate-limit-retry-after-seconds", "12")], (None, Some(12_000))),
    ("crates.io", REQUESTS, 429, &[("retry-after", "Wed, 25 Nov 2026 12:00:30 GMT")], (None, Some(30_000))),
    ("Amazon SP-API", REQUESTS, 429, &[("x-amzn-ratelimit-limit", "0.5")], (None, Some(1_000))),
];

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in [&[("date", DATE)], lines].concat() {
        headers.append(name, value.parse().unwrap());
    }
    headers
}

#[test]
fn the_responses_of_vendors_are_read_as_they_are_meant() {
    for (vendor, unit, status, lines, expected) in SAMPLES {
        let status = StatusCode::from_u16(*status).unwrap();
        let state = VendorState::from_response_of(unit, status, &headers(lines));
        let said = (state.remaining(), state.blocked_for().map(|time| time.as_millis()));
        assert_eq!(said, *expected, "{vendor}: {lines:?}");
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
    for vendor in &documented {
        assert!(SAMPLES.iter().any(|(name, ..)| name == vendor), "{vendor}");
    }
    for (vendor, ..) in SAMPLES {
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
    let many = 400_000;
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
