//! Limits from text: reading, writing, and reports of errors.

use std::time::Duration;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use tower_ratelimit::{
    Algorithm, MemoryStore, Quota,
    config::{ConfigError, Limit, Limits, Refill},
};

use crate::support::ALGORITHMS;

#[derive(Debug, Deserialize, PartialEq)]
struct Config {
    limits: Limits,
}

/// A field and its value, with the same text in TOML and JSON.
type Field = (&'static str, &'static str);

/// The header is in line 1, and each field has a line.
fn in_toml(name: &str, fields: &[Field]) -> String {
    let lines: String = fields.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
    format!("[limits.{name:?}]\n{lines}")
}

/// The name is in line 1; each field and the end have a line.
fn in_json(name: &str, fields: &[Field]) -> String {
    let lines: Vec<_> = fields.iter().map(|(name, value)| format!("{name:?}: {value}")).collect();
    format!("{{\"limits\": {{{name:?}: {{\n{}\n}}}}}}", lines.join(",\n"))
}

/// Returns the line and the message.
fn toml_error(text: &str) -> (usize, String) {
    let error = toml::from_str::<Config>(text).unwrap_err();
    let report = error.to_string();
    let position = report.lines().next().unwrap().strip_prefix("TOML parse error at line ");
    let (line, column) = position.unwrap().split_once(", column ").unwrap();
    assert!(column.parse::<usize>().unwrap() > 0);
    (line.parse().unwrap(), error.message().to_owned())
}

fn json_error(text: &str) -> (usize, String) {
    let error = serde_json::from_str::<Config>(text).unwrap_err();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let report = error.to_string();
    (error.line(), report.strip_suffix(&position).unwrap().to_owned())
}

fn errors(name: &str, fields: &[Field]) -> [(usize, String); 2] {
    [toml_error(&in_toml(name, fields)), json_error(&in_json(name, fields))]
}

fn line_of(field: &str, fields: &[Field]) -> usize {
    let index = fields.iter().position(|(name, _)| *name == field);
    index.unwrap_or_else(|| panic!("{field} is in {fields:?}")) + 2
}

const BUCKET: Field = ("algorithm", r#""token-bucket""#);
const FIXED: Field = ("algorithm", r#""fixed-window""#);
const SLIDING: Field = ("algorithm", r#""sliding-window""#);
const QUOTA: Field = ("quota", r#""10/s""#);

fn read(fields: &[Field]) -> Limit {
    let from_toml: Config = toml::from_str(&in_toml("api", fields)).unwrap();
    let from_json: Config = serde_json::from_str(&in_json("api", fields)).unwrap();
    assert_eq!(from_toml, from_json);
    from_toml.limits.get("api").unwrap()
}

#[test]
fn each_algorithm_is_read_with_its_settings() {
    for (fields, algorithm) in [
        (&[FIXED][..], Algorithm::FixedWindow),
        (&[("algorithm", r#""sliding-log""#)], Algorithm::SlidingLog),
        (&[("algorithm", r#""leaky-bucket""#)], Algorithm::LeakyBucket),
        (&[SLIDING], Algorithm::sliding_window()),
        (&[SLIDING, ("buckets", "100")], Algorithm::sliding_window().buckets(100)),
        (&[BUCKET], Algorithm::token_bucket()),
        (&[BUCKET, ("overdraft", "5")], Algorithm::token_bucket().overdraft(5)),
        (
            &[("refill", r#""interval""#), BUCKET, ("overdraft", "0")],
            Algorithm::token_bucket().refill(Refill::Interval),
        ),
        (&[("refill", r#""continuous""#), BUCKET], Algorithm::token_bucket()),
    ] {
        let limit = Limit::try_new(algorithm, Quota::per_second(10)).unwrap();
        assert_eq!(read(&[fields, &[QUOTA]].concat()), limit);
        assert_eq!(read(&[&[QUOTA], fields].concat()), limit);
    }
    let limit = read(&[BUCKET, ("quota", r#""100/min burst 20""#)]);
    assert_eq!(limit.quota(), Quota::per_minute(100).burst(20));
}

/// The fields of a limit, the one with the error, and the start of the message.
const ERRORS: &[(&[Field], &str, &str)] = &[
    (
        &[BUCKET, ("quota", r#""0/s""#)],
        "quota",
        r#"quota "0/s": the limit is 0, but must be at least 1"#,
    ),
    (
        &[BUCKET, ("quota", r#""10 a s""#)],
        "quota",
        r#"quota "10 a s": write LIMIT/WINDOW or LIMIT/WINDOW burst BURST, such as 10/s"#,
    ),
    (
        &[BUCKET, ("quota", r#""10/s, bust 20""#)],
        "quota",
        r#"quota "10/s, bust 20": "bust" is unexpected behind the window; write LIMIT/WINDOW or"#,
    ),
    (
        &[BUCKET, ("quota", "10")],
        "quota",
        r#"invalid type: integer `10`, expected `quota` to be text, such as "10/s""#,
    ),
    (
        &[("algorithm", r#""magic""#), QUOTA],
        "algorithm",
        r#"algorithm "magic": use fixed-window, sliding-window, sliding-log, token-bucket,"#,
    ),
    (
        &[QUOTA, ("algorithm", "true")],
        "algorithm",
        "invalid type: boolean `true`, expected `algorithm` to be a name, such as \
     \"token-bucket\"",
    ),
    (
        &[SLIDING, ("buckets", "0"), QUOTA],
        "buckets",
        "a sliding window has 1 to 100 buckets, not 0",
    ),
    (&[("buckets", "101"), QUOTA], "buckets", "a sliding window has 1 to 100 buckets, not 101"),
    (
        &[SLIDING, QUOTA, ("buckets", "-1")],
        "buckets",
        "invalid value: integer `-1`, expected `buckets` to be a number from 1 to 100",
    ),
    (
        &[SLIDING, QUOTA, ("buckets", r#""4""#)],
        "buckets",
        r#"invalid type: string "4", expected `buckets` to be a number from 1 to 100"#,
    ),
    (
        &[BUCKET, ("overdraft", "-1"), QUOTA],
        "overdraft",
        "invalid value: integer `-1`, expected `overdraft` to be a number of tokens",
    ),
    (
        &[BUCKET, ("overdraft", "1.5"), QUOTA],
        "overdraft",
        "invalid type: floating point `1.5`, expected `overdraft` to be a number of tokens",
    ),
    (
        &[BUCKET, QUOTA, ("refill", r#""hourly""#)],
        "refill",
        r#"invalid value: string "hourly", expected `refill` to be "continuous" or "interval""#,
    ),
    (
        &[BUCKET, ("buckets", "4"), QUOTA],
        "buckets",
        "`buckets` is not a setting of token-bucket; remove it, or use sliding-window",
    ),
    (
        &[FIXED, QUOTA, ("overdraft", "0")],
        "overdraft",
        "`overdraft` is not a setting of fixed-window; remove it, or use token-bucket",
    ),
    (
        &[SLIDING, QUOTA, ("refill", r#""interval""#)],
        "refill",
        "`refill` is not a setting of sliding-window; remove it, or use token-bucket",
    ),
    (
        &[FIXED, ("quota", r#""10/s burst 20""#)],
        "quota",
        "quota \"10/s burst 20\": a fixed-window admits up to its limit at once and has no other \
     burst; omit the burst",
    ),
    (
        &[BUCKET, ("overdraft", "70368744177660"), QUOTA],
        "quota",
        r#"an overdraft of 70368744177660 is too large for the quota "10/s""#,
    ),
    (
        &[BUCKET, ("bucket", "4"), QUOTA],
        "bucket",
        "unknown field `bucket`, expected one of `algorithm`, `quota`, `buckets`, `refill`, \
     `overdraft`",
    ),
    (
        &[BUCKET, ("burst", "20"), QUOTA],
        "burst",
        "unknown field `burst`: it is part of `quota`; write for example quota = \"10/s burst 20\"",
    ),
    (
        &[BUCKET, ("per_second", "20"), QUOTA],
        "per_second",
        "unknown field `per_second`: it is part of `quota`",
    ),
    (
        &[BUCKET, QUOTA, ("max_wait", "20")],
        "max_wait",
        "unknown field `max_wait`: it is a setting of the layer",
    ),
    (
        &[QUOTA, ("algorithm", r#""token_bucket""#)],
        "algorithm",
        r#"algorithm "token_bucket": use fixed-window, sliding-window, sliding-log, token-bucket,"#,
    ),
    (
        &[BUCKET, ("quota", r#""10/s/min""#)],
        "quota",
        r#"quota "10/s/min": "/min" is unexpected behind the window; write LIMIT/WINDOW or"#,
    ),
    (
        &[BUCKET, ("quota", r#""10/s 100/min""#)],
        "quota",
        r#"quota "10/s 100/min": "100/min" is unexpected behind the window; write LIMIT/WINDOW or"#,
    ),
    (
        &[BUCKET, ("quota", r#""-10/s""#)],
        "quota",
        r#"quota "-10/s": the limit "-10" is not a whole number; use digits"#,
    ),
    (
        &[BUCKET, ("quota", "-10")],
        "quota",
        r#"invalid type: integer `-10`, expected `quota` to be text, such as "10/s""#,
    ),
    (
        &[BUCKET, ("quota", r#"["10/s", "100/min"]"#)],
        "quota",
        r#"invalid type: sequence, expected `quota` to be text, such as "10/s""#,
    ),
    (
        &[SLIDING, ("buckets", "4294967296"), QUOTA],
        "buckets",
        "invalid value: integer `4294967296`, expected `buckets` to be a number from 1 to 100",
    ),
    (
        &[BUCKET, ("refill", "true"), QUOTA],
        "refill",
        r#"invalid type: boolean `true`, expected `refill` to be "continuous" or "interval""#,
    ),
    (
        &[BUCKET, ("overdraft", r#""5""#), QUOTA],
        "overdraft",
        r#"invalid type: string "5", expected `overdraft` to be a number of tokens, up to 2^46"#,
    ),
    (
        &[BUCKET, ("Quota", r#""10/s""#)],
        "Quota",
        "unknown field `Quota`, expected one of `algorithm`, `quota`, `buckets`, `refill`,",
    ),
    (
        &[BUCKET, ("quota", r#""10 concurrent""#)],
        "quota",
        "quota \"10 concurrent\": a token-bucket counts units per window; use the algorithm \
     concurrency, or a quota such as 10/s",
    ),
];

#[test]
fn an_error_is_reported_with_its_line_and_field() {
    for (fields, field, expected) in ERRORS {
        for (line, message) in errors("api", fields) {
            assert!(message.starts_with(expected), "{message}");
            assert_eq!(line, line_of(field, fields), "{message}");
        }
    }
}

/// The fields of a TOML table are read in the order of their names, those of JSON as written.
#[test]
fn of_two_conflicting_fields_the_one_read_last_is_reported() {
    let burst = ("quota", r#""10/s burst 20""#);
    let large = ("overdraft", "70368744177660");
    for (fields, in_toml, in_json) in [
        ([burst, FIXED, ("buckets", "1")], "buckets", "algorithm"),
        ([large, QUOTA, BUCKET], "quota", "algorithm"),
        ([BUCKET, QUOTA, large], "quota", "overdraft"),
        ([("refill", r#""interval""#), QUOTA, FIXED], "refill", "algorithm"),
    ] {
        let lines = errors("api", &fields).map(|(line, _)| line);
        assert_eq!(lines, [line_of(in_toml, &fields), line_of(in_json, &fields)], "{fields:?}");
    }
}

#[test]
fn a_missing_field_is_reported_with_the_line_of_its_limit() {
    for (fields, complaint) in [
        (&[BUCKET][..], r#"missing field `quota`, such as "10/s""#),
        (&[QUOTA, ("buckets", "2")], r#"missing field `algorithm`, such as "token-bucket""#),
        (&[], r#"missing field `algorithm`, such as "token-bucket""#),
    ] {
        let [from_toml, from_json] = errors("api", fields);
        assert_eq!(from_toml, (1, complaint.to_owned()));
        let end = in_json("api", fields).lines().count();
        assert_eq!(from_json, (end, complaint.to_owned()));
    }
    let complaint =
        r#"invalid type: string "10/s", expected a limit, which has `algorithm` and `quota`"#;
    let [from_toml, from_json] = [
        toml_error("[limits]\n\napi = \"10/s\""),
        json_error("{\"limits\": {\n\n\"api\": \"10/s\"}}"),
    ];
    assert_eq!([from_toml, from_json], [(); 2].map(|()| (3, complaint.to_owned())));
}

#[test]
fn a_limit_that_is_no_table_is_reported_with_its_line() {
    for (value, found) in [
        ("10", "integer `10`"),
        ("true", "boolean `true`"),
        (r#"["10/s"]"#, "sequence"),
        (r#""token-bucket 10/s""#, r#"string "token-bucket 10/s""#),
    ] {
        let complaint =
            format!("invalid type: {found}, expected a limit, which has `algorithm` and `quota`");
        let from_toml = toml_error(&format!("[limits]\n\napi = {value}"));
        let from_json = json_error(&format!("{{\"limits\": {{\n\n\"api\": {value}}}}}"));
        assert_eq!([from_toml, from_json], [(); 2].map(|()| (3, complaint.clone())));
    }
    let (line, message) = toml_error("\nlimits = \"api\"");
    let complaint = r#"invalid type: string "api", expected limits by name"#;
    assert_eq!((line, &*message), (2, complaint));
}

#[test]
fn a_name_that_is_not_valid_is_reported_with_its_line() {
    let long = "a".repeat(65);
    for name in ["", "a b", "a:b", "caf\u{e9}", &long] {
        for (line, message) in errors(name, &[BUCKET, QUOTA]) {
            let complaint = format!("limiter name {name:?}: use 1 to 64 of the characters");
            assert!(message.starts_with(&complaint), "{message}");
            assert_eq!(line, 1);
        }
    }
}

#[test]
fn duplicates_are_errors() {
    let limit = in_toml("api", &[BUCKET, QUOTA]);
    assert_eq!(toml_error(&format!("{limit}\n{limit}")), (5, "duplicate key".to_owned()));
    let twice = [BUCKET, QUOTA, QUOTA];
    assert_eq!(toml_error(&in_toml("api", &twice)), (4, "duplicate key".to_owned()));

    assert_eq!(json_error(&in_json("api", &twice)), (4, "duplicate field `quota`".to_owned()));
    let limit = r#""api": {"algorithm": "token-bucket", "quota": "10/s"}"#;
    let text = format!("{{\"limits\": {{\n{limit},\n{limit}}}}}");
    let complaint = r#"limit "api": two limits have this name; rename one"#;
    assert_eq!(json_error(&text), (3, complaint.to_owned()));
}

#[test]
fn a_limit_alone_has_the_lines_of_its_errors() {
    let text = "algorithm = 'fixed-window'\nquota = '10/s'\nrefill = 'interval'";
    let error = toml::from_str::<Limit>(text).unwrap_err().to_string();
    assert!(error.starts_with("TOML parse error at line 3, column 10\n"), "{error}");
    let text = "{\"algorithm\": \"fixed-window\",\n\"quota\": \"10/s burst 20\"\n}";
    let error = serde_json::from_str::<Limit>(text).unwrap_err();
    assert_eq!(error.line(), 2, "{error}");
}

#[test]
fn an_algorithm_alone_is_its_name_or_a_table_with_its_settings() {
    #[derive(Debug, Deserialize, PartialEq, Serialize)]
    struct Flags {
        algorithm: Algorithm,
    }
    let buckets = Algorithm::sliding_window().buckets(4);
    let overdraft = Algorithm::token_bucket().overdraft(5);
    for (algorithm, json) in [
        (Algorithm::LeakyBucket, r#""leaky-bucket""#),
        (Algorithm::token_bucket(), r#""token-bucket""#),
        (buckets, r#"{"algorithm":"sliding-window","buckets":4}"#),
        (overdraft, r#"{"algorithm":"token-bucket","refill":"continuous","overdraft":5}"#),
    ] {
        assert_eq!(serde_json::to_string(&algorithm).unwrap(), json);
        assert_eq!(serde_json::from_str::<Algorithm>(json).unwrap(), algorithm);
        let toml = toml::to_string(&Flags { algorithm }).unwrap();
        assert_eq!(toml::from_str::<Flags>(&toml).unwrap(), Flags { algorithm }, "{toml}");
    }
    let sparse = r#"{"algorithm": "token-bucket", "overdraft": 5}"#;
    assert_eq!(serde_json::from_str::<Algorithm>(sparse).unwrap(), overdraft);
    for (text, complaint) in [
        (r#""token_bucket""#, r#"algorithm "token_bucket": use fixed-window, sliding-window,"#),
        ("4", "invalid type: integer `4`, expected an algorithm, such as \"token-bucket\", or a"),
        ("{}", "missing field `algorithm`, such as \"token-bucket\""),
        (
            r#"{"algorithm": "leaky-bucket", "buckets": 4}"#,
            "`buckets` is not a setting of leaky-bucket; remove it, or use sliding-window",
        ),
        (
            r#"{"algorithm": "leaky-bucket", "quota": "10/s"}"#,
            "unknown field `quota`: it is no setting of an algorithm",
        ),
        (r#"{"buckets": 400}"#, "a sliding window has 1 to 100 buckets, not 400"),
    ] {
        let error = serde_json::from_str::<Algorithm>(text).unwrap_err();
        assert!(error.to_string().starts_with(complaint), "{error}");
        assert_eq!(error.line(), 1, "{error}");
    }
}

#[test]
fn limits_are_collected_extended_and_taken_apart() {
    let limit = |n| Limit::try_new(Algorithm::FixedWindow, Quota::per_second(n)).unwrap();
    let mut limits: Limits =
        [("b", limit(1)), ("a", limit(2)), ("b", limit(3))].into_iter().collect();
    assert_eq!(limits.iter().collect::<Vec<_>>(), [("a", limit(2)), ("b", limit(3))]);
    limits.extend([("c".to_owned(), limit(4)), ("a".to_owned(), limit(5))]);
    let mut names = vec![];
    for (name, _) in &limits {
        names.push(name);
    }
    assert_eq!(names, ["a", "b", "c"]);
    assert_eq!(limits.iter().collect::<Limits>(), limits);
    let owned: Vec<(String, Limit)> = limits.clone().into_iter().collect();
    assert_eq!(owned[0], ("a".to_owned(), limit(5)));
    assert_eq!(owned.into_iter().collect::<Limits>(), limits);
}

#[test]
fn the_names_of_collected_limits_are_checked_before_anything_changes() {
    let limit = Limit::try_new(Algorithm::FixedWindow, Quota::per_second(1)).unwrap();
    let limits: Limits = [("a b", limit), ("api", limit)].into_iter().collect();
    let store = MemoryStore::new();
    let error = limits.limiters(&store).unwrap_err();
    assert!(matches!(&error, ConfigError::Name { limiter, .. } if limiter == "a b"), "{error}");
    let limiters = limits.iter().filter(|(name, _)| *name == "api").collect::<Limits>();
    let limiters = limiters.limiters(&store).unwrap();
    let error = limiters.reload(&limits).unwrap_err();
    assert!(matches!(error, ConfigError::Name { limiter, .. } if limiter == "a b"));
    assert!(limiters.get("a b").is_err() && limiters.get("api").is_ok());
}

#[test]
fn quotas_alone_are_text() {
    #[derive(Deserialize, Debug)]
    struct Flags {
        quota: Quota,
    }
    let flags: Flags = toml::from_str("quota = \"5/10s\"").unwrap();
    assert_eq!(serde_json::to_string(&flags.quota).unwrap(), "\"5/10s\"");
    for (text, complaint) in [
        ("\n\"0/s\"", "quota \"0/s\": the limit is 0, but must be at least 1 at line 2 column 5"),
        (
            "\n10",
            "invalid type: integer `10`, expected a quota as text, such as \"10/s burst 20\" at",
        ),
    ] {
        let error = serde_json::from_str::<Quota>(text).unwrap_err().to_string();
        assert!(error.starts_with(complaint), "{error}");
    }
}

#[test]
fn the_page_shows_what_is_read_and_reported() {
    let page = include_str!("../../docs/configuration.md");
    let start = page.find("[limits.api]").unwrap();
    let text = page[start..].split("```").next().unwrap();
    assert_eq!(toml::from_str::<Config>(text).unwrap().limits.iter().count(), 2);
    let error = toml::from_str::<Config>(&text.replace("buckets = 4  ", "buckets = 400"));
    let report = error.unwrap_err().to_string();
    assert!(page.contains(&report), "{report}");
}

#[tokio::test]
async fn limiters_count_apart_over_one_store() {
    let limits: Limits = toml::from_str(
        r#"
        api = { algorithm = "token-bucket", quota = "2/h" }
        login = { algorithm = "sliding-log", quota = "1/h" }
        "#,
    )
    .unwrap();
    let store = MemoryStore::new();
    let limiters = limits.limiters(&store).unwrap();
    for (name, limit) in limits.iter() {
        let limiter = limiters.get(name).unwrap();
        assert_eq!(limiter.name(), name);
        assert_eq!((limiter.algorithm(), limiter.quota()), (limit.algorithm(), limit.quota()));
        assert!(limiter.check("ada").await.unwrap().is_allowed());
    }
    assert!(limiters.get("api").unwrap().check("ada").await.unwrap().is_allowed());
    assert!(!limiters.get("login").unwrap().check("ada").await.unwrap().is_allowed());
    let error = limiters.get("sms").unwrap_err();
    assert_eq!(error.to_string(), "limit \"sms\" is missing: add it to the configuration");
}

#[test]
fn a_name_that_is_taken_leaves_the_other_names_free() {
    let limit = Limit::try_new(Algorithm::FixedWindow, Quota::per_second(1)).unwrap();
    let mut limits = Limits::default();
    for name in ["api", "login"] {
        assert_eq!(limits.insert(name, limit), Ok(None));
    }
    let store = MemoryStore::new();
    let login = limit.limiter("login", store.clone()).unwrap();
    let error = limits.limiters(&store).unwrap_err();
    assert!(matches!(error, ConfigError::NameTaken { limiter, .. } if limiter == "login"));
    drop(login);
    let limiters = limits.limiters(&store).unwrap();
    for name in ["api", "login"] {
        assert_eq!(limiters.get(name).unwrap().name(), name);
    }
}

fn quota() -> impl Strategy<Value = Quota> {
    const MS: u64 = 1_000;
    const DAY: u64 = 86_400_000_000;
    let window = prop_oneof![
        MS..=366 * DAY,
        (1_u64..=366).prop_map(|days| days * DAY),
        Just(1_000 * MS),
        Just(60_000 * MS),
    ];
    let burst = prop::option::of(0_u64..1 << 47);
    (0_u64..1 << 47, window, burst).prop_filter_map("out of range", |(limit, window, burst)| {
        let quota = Quota::try_new(limit, Duration::from_micros(window)).ok()?;
        burst.map_or(Some(quota), |burst| quota.try_burst(burst).ok())
    })
}

fn algorithm() -> impl Strategy<Value = Algorithm> {
    let refill = prop_oneof![Just(Refill::Continuous), Just(Refill::Interval)];
    let overdraft = prop_oneof![0_u64..10, 0_u64..1 << 47];
    prop_oneof![
        prop::sample::select(&ALGORITHMS),
        (1_u32..=100).prop_map(|buckets| Algorithm::sliding_window().buckets(buckets)),
        (refill, overdraft).prop_map(|(refill, overdraft)| Algorithm::token_bucket()
            .refill(refill)
            .overdraft(overdraft)),
    ]
}

fn limit() -> impl Strategy<Value = Limit> {
    (algorithm(), quota()).prop_filter_map("conflicting settings", |(algorithm, quota)| {
        let plain = || Quota::try_new(quota.limit(), quota.window()).ok();
        let limit = Limit::try_new(algorithm, quota);
        limit.or_else(|_| Limit::try_new(algorithm, plain().unwrap())).ok()
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn serialized_limits_are_read_back_equal(
        all in prop::collection::btree_map("[A-Za-z0-9_./-]{1,64}", limit(), 0..4),
    ) {
        let mut limits = Limits::default();
        for (name, limit) in &all {
            limits.insert(name, *limit).unwrap();
        }
        prop_assert_eq!(limits.iter().count(), all.len());
        let toml = toml::to_string(&limits).unwrap();
        prop_assert_eq!(&toml::from_str::<Limits>(&toml).unwrap(), &limits, "{}", toml);
        let json = serde_json::to_string(&limits).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Limits>(&json).unwrap(), &limits, "{}", json);
        for (_, limit) in limits.iter() {
            let json = serde_json::to_string(&limit.quota()).unwrap();
            prop_assert_eq!(serde_json::from_str::<Quota>(&json).unwrap(), limit.quota());
            let json = serde_json::to_string(&limit.algorithm()).unwrap();
            prop_assert_eq!(serde_json::from_str::<Algorithm>(&json).unwrap(), limit.algorithm());
        }
    }

    #[test]
    fn the_names_that_can_be_read_are_those_of_limiters(
        name in prop_oneof!["[ -~]{0,2}", "[A-Za-z0-9_./-]{60,70}", any::<String>()],
    ) {
        let limit = Limit::try_new(Algorithm::FixedWindow, Quota::per_second(1)).unwrap();
        let read = Limits::default().insert(&name, limit).map(drop);
        let named = limit.limiter(&name, MemoryStore::new()).map(drop);
        prop_assert_eq!(read, named);
    }
}
