//! The dashboard, the alerts and the table of the metrics name what an exporter renders after a
//! run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Arc,
    time::Duration,
};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde_json::Value;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, RedisStore, key, observe,
};

use crate::support::{counting, get, recorder::observed, server::RedisServer};

const DASHBOARD: &str = include_str!("../../docs/grafana.json");
const ALERTS: &str = include_str!("../../docs/alerts.yml");
const PAGE: &str = include_str!("../../docs/monitoring.md");
const ON_CALL: &str = include_str!("../../docs/on-call.md");
/// Where the pages are, as the alerts name them.
const PAGES: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/HEAD/docs/");

/// Returns the labels of each metric after a run in which everything happens.
async fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &[0.1])
        .unwrap()
        .set_buckets_for_metric(Matcher::Suffix("_checks".to_owned()), &[1.0])
        .unwrap()
        .build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let metrics = Arc::new(observe::metrics());

    let store = observed(MemoryStore::new(), metrics.clone());
    let quota = Quota::per_second(50).burst(1);
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
    let layer = RateLimitLayer::new(&limiter, key::Global);
    for _ in 0..2 {
        let _ = layer.layer(counting(&Arc::default())).oneshot(get(&[])).await.unwrap();
    }
    for _ in 0..2 {
        let _ = limiter.try_acquire("key", 1, Duration::from_secs(60)).await.unwrap();
    }
    drop(limiter.reserve("key", 1, Duration::from_secs(60)).await.unwrap());

    let mut server = RedisServer::start();
    let store = observed(RedisStore::connect(&server.url()).await.unwrap(), metrics);
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), Quota::per_hour(1));
    let _ = limiter.check("key").await.unwrap();
    server.kill();
    assert!(limiter.check("other").await.is_err());

    let text = recorder.handle().render();
    let mut all = BTreeMap::<_, BTreeSet<_>>::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (series, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.split(',').filter_map(|it| Some(it.split_once('=')?.0.to_owned()));
        all.entry(name.to_owned()).or_default().extend(labels);
    }
    all
}

/// Returns the queries of the panels and variables.
fn queries(value: &Value) -> Vec<String> {
    match value {
        Value::Array(values) => values.iter().flat_map(queries).collect(),
        Value::Object(fields) => {
            let is_query = |name: &str| name == "expr" || name == "definition";
            let text = |(name, value): (&String, &Value)| match value.as_str() {
                Some(text) if is_query(name) => vec![text.to_owned()],
                _ => queries(value),
            };
            fields.iter().flat_map(text).collect()
        }
        _ => vec![],
    }
}

/// Returns the words of a query outside of quotes and variables.
fn words(query: &str) -> Vec<&str> {
    let unquoted = query.split('"').step_by(2);
    let is_word = |char: char| char.is_ascii_alphanumeric() || "_$".contains(char);
    let words = unquoted.flat_map(|part| part.split(move |char| !is_word(char)));
    words.filter(|word| word.starts_with(|first: char| first.is_ascii_alphabetic())).collect()
}

#[tokio::test]
async fn the_dashboard_uses_exported_metrics_and_labels() {
    let exported = exported().await;
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    assert!(dashboard["schemaVersion"].as_u64() >= Some(36));
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert_eq!(variables[0]["type"], "datasource");
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    for panel in panels {
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        assert!(!queries(&panel["targets"]).is_empty(), "{}", panel["title"]);
    }
    let queries = queries(&dashboard);
    let keywords = ["sum", "max", "by", "rate", "increase", "histogram_quantile", "label_values"];
    let mut used = BTreeSet::new();
    for query in &queries {
        assert_eq!(query.matches(['(', '[', '{']).count(), query.matches([')', ']', '}']).count());
        let words = words(query);
        let names: Vec<_> = words.iter().filter(|it| it.starts_with("tower_ratelimit")).collect();
        assert!(!names.is_empty(), "{query}");
        for name in &names {
            assert!(exported.contains_key(**name), "{query}: {name} in {exported:?}");
            used.insert(family(name));
        }
        let labels = exported[*names[0]].clone();
        for word in words.iter().filter(|it| !keywords.contains(it) && !names.contains(it)) {
            assert!(labels.contains(*word), "{query}: label {word} of {labels:?}");
        }
    }
    let families: BTreeSet<_> = exported.keys().map(|name| family(name)).collect();
    assert_eq!(used, families, "the dashboard shows all metrics");
}

/// Returns the name without the suffix of a part of a histogram.
fn family(name: &str) -> &str {
    let suffixes = ["_bucket", "_sum", "_count"];
    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

#[tokio::test]
async fn the_page_on_monitoring_lists_the_metrics_with_their_labels() {
    let mut exported_labels = BTreeMap::<String, BTreeSet<String>>::new();
    for (name, mut labels) in exported().await {
        labels.remove("le");
        exported_labels.entry(family(&name).to_owned()).or_default().extend(labels);
    }
    let rows = PAGE.lines().filter(|line| line.starts_with("| `tower_ratelimit_"));
    let listed: BTreeMap<String, BTreeSet<String>> = rows
        .map(|row| {
            let cells: Vec<_> = row.split('|').map(|cell| cell.trim().replace('`', "")).collect();
            let labels = cells[3].split(", ").filter(|label| !label.is_empty());
            (cells[1].clone(), labels.map(String::from).collect())
        })
        .collect();
    assert_eq!(listed, exported_labels);
    for code in PAGE.split('`').skip(1).step_by(2).filter(|code| code.contains("ratelimit_")) {
        for name in words(code).iter().filter(|word| word.starts_with("tower_ratelimit_")) {
            assert!(listed.contains_key(family(name)), "{code}: {name}");
        }
    }
}

/// An alert, as the page and the file of rules describe it.
#[derive(Clone, Debug, PartialEq)]
struct Alert {
    name: String,
    severity: String,
    /// Empty on the page, which has the condition in words.
    expr: String,
    /// The minutes for which the expression must be true.
    minutes: Option<u32>,
    action: String,
}

/// Returns the rest of a line of YAML after an indent and a field.
fn field<'a>(line: Option<&'a str>, start: &str) -> &'a str {
    let rest = line.and_then(|line| line.strip_prefix(start));
    rest.unwrap_or_else(|| panic!("{line:?} does not begin with {start:?}"))
}

/// Reads the rules. They are in a small part of YAML: each field on a line, in one order, and text
/// that needs quotes in single ones.
fn rules() -> Vec<Alert> {
    let mut lines = ALERTS.lines().filter(|line| !line.starts_with('#')).peekable();
    for head in ["groups:", "  - name: tower-ratelimit", "    rules:"] {
        assert_eq!(lines.next(), Some(head));
    }
    let mut rules = vec![];
    while lines.peek().is_some() {
        let name = field(lines.next(), "      - alert: ").to_owned();
        let expr = field(lines.next(), "        expr: ").to_owned();
        assert!(!expr.contains(": ") && !expr.contains(" #"), "{expr} needs quotes");
        let minutes = lines.next_if(|line| line.starts_with("        for: ")).map(|line| {
            let minutes = field(Some(line), "        for: ").strip_suffix('m').unwrap();
            minutes.parse().unwrap()
        });
        assert_eq!(lines.next(), Some("        labels:"));
        let severity = field(lines.next(), "          severity: ").to_owned();
        assert!(["page", "ticket"].contains(&&*severity), "{severity}");
        assert_eq!(lines.next(), Some("        annotations:"));
        let action = field(lines.next(), "          action: '").strip_suffix('\'').unwrap();
        assert!(!action.contains('\''), "{action} needs other quotes");
        let start = format!("          runbook_url: '{PAGES}");
        let link = field(lines.next(), &start).strip_suffix('\'').unwrap();
        let (page, heading) = link.split_once('#').unwrap_or((link, ""));
        let text = fs::read_to_string(Path::new("docs").join(page)).expect(page);
        let headings = text.lines().filter_map(|line| line.strip_prefix("## "));
        let mut anchors = headings.map(|line| line.to_lowercase().replace(' ', "-"));
        assert!(heading.is_empty() || anchors.any(|it| it == heading), "{name}: {link}");
        rules.push(Alert { name, severity, expr, minutes, action: action.to_owned() });
    }
    rules
}

/// Returns the alerts in the table of the page.
fn listed() -> Vec<Alert> {
    let table = PAGE.split("| alert | severity | condition | action |\n").nth(1).unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let [_, name, severity, condition, action, _] =
            row.split('|').map(str::trim).collect::<Vec<_>>()[..]
        else {
            panic!("{row}")
        };
        let minutes = condition.split_once(", for ").map(|(_, rest)| rest.split(' ').next());
        let minutes = minutes.map(|number| number.unwrap().parse().unwrap());
        let (name, severity) = (name.to_owned(), severity.to_owned());
        Alert { name, severity, expr: String::new(), minutes, action: plain(action) }
    })
    .collect()
}

/// Returns the text without links and code marks.
fn plain(markdown: &str) -> String {
    let mut parts = markdown.split("][");
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        text += part.split_once(']').unwrap().1;
    }
    text.replace(['[', '`'], "")
}

#[tokio::test]
async fn the_rules_of_the_alerts_are_those_of_the_page_and_use_exported_metrics_and_labels() {
    let (rules, exported) = (rules(), exported().await);
    let described = rules.iter().map(|rule| Alert { expr: String::new(), ..rule.clone() });
    assert_eq!(described.collect::<Vec<_>>(), listed());
    let keywords = [
        "sum",
        "max",
        "by",
        "rate",
        "increase",
        "histogram_quantile",
        "and",
        "or",
        "offset",
        "m",
        "d",
    ];
    for Alert { name, expr, .. } in &rules {
        assert_eq!(expr.matches(['(', '[', '{']).count(), expr.matches([')', ']', '}']).count());
        let words = words(expr);
        let (metrics, others): (Vec<&str>, Vec<&str>) =
            words.iter().partition(|word| word.starts_with("tower_ratelimit_"));
        assert!(!metrics.is_empty(), "{name}");
        let labels: BTreeSet<_> = metrics
            .iter()
            .flat_map(|metric| exported.get(*metric).unwrap_or_else(|| panic!("{name}: {metric}")))
            .collect();
        for word in others.iter().filter(|word| !keywords.contains(word)) {
            assert!(labels.contains(&(*word).to_owned()), "{name}: label {word} of {labels:?}");
        }
    }
}

/// Returns the text of all files in a folder that end in this way.
fn sources(folder: &Path, ending: &str) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text += &sources(&path, ending);
        } else if path.to_string_lossy().ends_with(ending) {
            text += &fs::read_to_string(path).unwrap();
        }
    }
    text
}

/// Returns the beginnings of the texts of events that an operator must act on.
fn warnings(source: &str) -> Vec<&str> {
    let events = ["tracing::warn!(", "tracing::error!("];
    let events = events.iter().flat_map(|event| source.split(event).skip(1));
    let texts = events.filter_map(|event| {
        let mut literals = event.split('"').skip(1).step_by(2);
        let text = literals.find(|text| *text != "tower_ratelimit")?;
        text.split([';', ':', '{', '\\']).next()
    });
    texts.filter(|text| !text.is_empty()).collect() // some begin with a status
}

#[test]
fn the_diagnosis_has_the_texts_of_all_warnings_and_states() {
    let page = ON_CALL.replace('\n', " ");
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let source = sources(&src, ".rs");
    let warnings = warnings(&source);
    assert!(warnings.len() >= 9, "{warnings:?}");
    let health = fs::read_to_string(src.join("store/health.rs")).unwrap();
    let states: Vec<_> = health
        .lines()
        .filter_map(|line| Some(line.split_once("=> \"Redis ")?.1.split_once('"')?.0))
        .filter(|state| !state.starts_with("has not") && !state.starts_with("rejects decisions"))
        .map(|state| format!("Redis {state}"))
        .collect();
    assert_eq!(states.len(), 6, "{states:?}");
    for text in warnings.into_iter().chain(states.iter().map(|state| &**state)) {
        assert!(page.contains(&format!("`{text}")), "{text:?} is not in the diagnosis");
    }
}

#[test]
fn the_texts_on_call_are_in_the_events_and_errors() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = ["src", "crates/connections/src"].map(|it| sources(&root.join(it), ".rs")).concat();
    let text = text + &sources(&root.join("scripts"), ".lua");
    let lines = text.lines().map(|line| line.trim_start().trim_end_matches('\\'));
    let text: String = lines.collect();
    // Redis or the system words these, and the codes of errors.
    let of_others = [
        "Connection refused",
        "can't run this command",
        "can't access at least one of the keys",
        "max number of clients",
        "No permissions to access a key",
        "no permissions to access one of the keys",
    ];
    let table = ON_CALL.split("| text | meaning | confirm | repair |\n").nth(1).unwrap();
    let rows: Vec<_> = table.lines().skip(1).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 15);
    for row in rows {
        assert_eq!(row.matches(" | ").count(), 3, "{row}");
        for quoted in row.split(" | ").next().unwrap().split('`').skip(1).step_by(2) {
            let is_code = quoted.bytes().all(|it| it.is_ascii_uppercase());
            let stage = quoted.strip_prefix("cannot ").unwrap_or("-");
            let is_stage = text.contains(&format!("cannot(\"{stage}\"")); // of connecting
            let is_known =
                is_code || is_stage || of_others.contains(&quoted) || text.contains(quoted);
            assert!(is_known, "no event or error has the text {quoted:?}");
        }
    }
}
