//! The pictures in `docs/pictures` are those that the algorithms make, and that of the dashboard is
//! about the dashboard of today.

use std::{fs, path::Path};

use base64::{Engine, prelude::BASE64_STANDARD};
use pictures::dashboard::{panels, record};

const DASHBOARD: &str = include_str!("../../../docs/grafana.json");

#[tokio::test(start_paused = true)]
async fn the_pictures_are_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    for (name, text) in pictures::files().await {
        let written = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert!(written == text, "docs/pictures/{name} is outdated: cargo run -p pictures");
    }
}

/// docs.rs serves no pictures: the logo in rustdoc contains the mark.
#[test]
fn the_logo_of_the_docs_is_the_mark() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let code = fs::read_to_string(root.join("src/lib.rs")).unwrap();
    let mark = fs::read_to_string(root.join("docs/pictures/mark.svg")).unwrap();
    let logo = code.split("html_logo_url = \"").nth(1).and_then(|it| it.split('"').next());
    let logo: String =
        logo.unwrap().lines().map(|line| line.trim().trim_end_matches('\\')).collect();
    let encoded = BASE64_STANDARD.encode(mark);
    assert_eq!(logo, format!("data:image/svg+xml;base64,{encoded}"));
}

#[test]
fn the_record_has_the_panels_of_the_dashboard() {
    let mut recorded = record().panels;
    for query in recorded.iter_mut().flat_map(|panel| &mut panel.queries) {
        query.series.clear();
    }
    let remedy = "docs/grafana.json has changed: make record-dashboard";
    assert!(recorded == panels(DASHBOARD), "{remedy}");
}

/// A query without an answer would be a mistake in the dashboard.
#[test]
fn each_recorded_query_has_values() {
    let record = record();
    for panel in &record.panels {
        for query in &panel.queries {
            let values = query.series.iter().flat_map(|series| &series.values).flatten();
            assert!(values.count() > 0, "{}: {}", panel.title, query.text);
        }
        let series = panel.queries.iter().flat_map(|query| &query.series);
        let mut values = series.flat_map(|series| series.values.iter().flatten());
        assert!(values.any(|value| *value > 0.0), "{}: nothing happens", panel.title);
    }
    assert_eq!(record.to_string().parse(), Ok(record));
}
