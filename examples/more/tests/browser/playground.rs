//! What the page of the playground does. Each test also fails if the console has an error.

use std::{env, fs, path::PathBuf};

use fantoccini::key::Key;
use serde_json::{Value, json};

use crate::driver::Page;

const LANES: [&str; 6] = [
    "fixed-window",
    "sliding-log",
    "sliding-window",
    "token-bucket",
    "leaky-bucket",
    "concurrency",
];

impl Page {
    /// Stops the traffic, and makes the window long and the burst large.
    async fn only_bursts(&self) {
        self.click("[data-kind=off]").await;
        self.until("playground.state().traffic.kind === 'off'").await;
        self.slide("window_ms", Key::End, "window_ms", 10_000).await;
        self.find("#size").await.send_keys(&char::from(Key::End).to_string()).await.unwrap();
    }

    async fn start_again(&self) {
        let start = self.value("playground.state().start").await;
        self.click("#restart").await;
        self.until(&format!("playground.state().start > {start}")).await;
        for lane in LANES {
            self.until(&format!("{} === 0", self.decided(lane))).await;
        }
    }

    /// Sends 2,000 requests at once, and waits until all are decided and shown.
    async fn burst(&self) {
        self.click("#burst").await;
        self.until_decided(2_000).await;
    }

    /// Waits until each lane shows this number of decisions.
    async fn until_decided(&self, requests: u64) {
        for lane in LANES {
            self.until(&format!("{} === {requests}", self.decided(lane))).await;
        }
    }

    /// Moves the slider of a count to a number of 1 to 10.
    async fn slide_to(&self, id: &str, count: usize) {
        let slider = self.find(&format!("#{id}")).await;
        let keys = [vec![Key::Home], vec![Key::Right; count - 1]].concat();
        let keys: String = keys.into_iter().map(char::from).collect();
        slider.send_keys(&keys).await.unwrap();
    }

    /// Waits until a number of a lane is as text.
    async fn until_text(&self, lane: &str, name: &str, text: &str) {
        let stat = format!("[data-lane={lane}] [data-stat={name}]");
        self.until(&format!("document.querySelector('{stat}').textContent === '{text}'")).await;
    }

    /// Returns the expression for the decisions that a lane shows.
    fn decided(&self, lane: &str) -> String {
        let shown = ["admitted", "waited", "denied"].map(|name| shown(lane, name));
        shown.join(" + ")
    }

    async fn shown(&self, lane: &str, name: &str) -> Value {
        self.value(&shown(lane, name)).await
    }

    /// Returns the counts by the events of the crate.
    async fn counts(&self) -> Value {
        let response = reqwest::get(format!("{}/counts", self.url)).await.unwrap();
        serde_json::from_slice(&response.bytes().await.unwrap()).unwrap()
    }
}

/// Returns the expression for a number of a lane.
fn shown(lane: &str, name: &str) -> String {
    let stat = format!("[data-lane={lane}] [data-stat={name}]");
    format!("+document.querySelector('{stat}').textContent.replaceAll(',', '')")
}

#[tokio::test]
async fn a_burst_draws_the_denials_that_the_server_counts() {
    let page = Page::open(&[]).await;
    page.only_bursts().await;
    page.start_again().await;
    page.burst().await;
    // Of 2,000 requests at once, against a limit of 1,000.
    for lane in ["fixed-window", "sliding-log", "sliding-window"] {
        assert_eq!(page.shown(lane, "denied").await, 1_000, "{lane}");
    }
    let counts = page.counts().await;
    for lane in LANES {
        let drawn = page.value(&format!("playground.drawn('{lane}')")).await;
        assert_eq!(drawn["denied"], counts[lane]["denied"], "{lane}");
        assert_eq!(page.shown(lane, "denied").await.as_f64(), drawn["denied"].as_f64(), "{lane}");
        let allowed = drawn["admitted"].as_u64().unwrap() + drawn["waiting"].as_u64().unwrap();
        assert_eq!(allowed, counts[lane]["allowed"], "{lane}");
        // The canvas shows them.
        let colour = "getComputedStyle(document.documentElement).getPropertyValue('--denied')";
        let has_colour = format!(
            "(() => {{
                const canvas = document.querySelector('[data-lane={lane}] canvas');
                const wanted = {colour}.trim().match(/\\w\\w/g).map((part) => parseInt(part, 16));
                const {{ width, height }} = canvas;
                const {{ data }} = canvas.getContext('2d').getImageData(0, 0, width, height);
                for (let i = 0; i < data.length; i += 4)
                    if (wanted.every((part, k) => Math.abs(data[i + k] - part) < 8)) return true;
            }})()"
        );
        page.until(&has_colour).await;
    }
    page.close().await;
}

#[tokio::test]
async fn a_changed_quota_changes_what_is_admitted() {
    let page = Page::open(&[]).await;
    page.only_bursts().await;
    for (end, limit) in [(Key::Home, 1), (Key::End, 2_000)] {
        page.slide("limit", end, "limit", limit).await;
        page.start_again().await;
        page.burst().await;
        for lane in ["fixed-window", "sliding-log", "sliding-window"] {
            assert_eq!(page.shown(lane, "admitted").await, limit, "{lane}");
            assert_eq!(page.shown(lane, "most").await, limit, "{lane}");
        }
    }
    page.close().await;
}

#[tokio::test]
async fn requests_are_in_flight_for_their_duration() {
    let page = Page::open(&[]).await;
    page.only_bursts().await;
    page.slide("duration_ms", Key::End, "duration_ms", 10_000).await;
    page.start_again().await;
    page.burst().await;
    for (name, number) in
        [("flight", 500), ("most", 500), ("denied", 1_500), ("remaining", 0), ("waited", 0)]
    {
        assert_eq!(page.shown("concurrency", name).await, number, "{name}");
    }
    page.until_text("concurrency", "verdict", "✓ promised: at most 500 at a time").await;
    page.until_text("concurrency", "flight", "0").await;
    page.until_text("concurrency", "remaining", "500").await;
    page.click("#burst").await;
    page.until_decided(4_000).await;
    assert_eq!(page.shown("concurrency", "admitted").await, 1_000);
    assert_eq!(page.shown("concurrency", "most").await, 500);
    page.close().await;
}

#[tokio::test]
async fn replicas_share_the_places_in_redis_and_requests_wait_for_them() {
    let page = Page::open(&["--redis"]).await;
    page.click("[data-kind=off]").await;
    page.slide("replicas", Key::End, "replicas", 4).await;
    page.slide("duration_ms", Key::End, "duration_ms", 10_000).await;
    page.slide_to("in_flight", 5).await;
    page.until("playground.state().settings.in_flight === 5").await;
    page.slide_to("size", 10).await;
    page.start_again().await;
    page.click("#burst").await;
    page.until_decided(10).await;
    for (name, number) in [("flight", 5), ("most", 5), ("denied", 5)] {
        assert_eq!(page.shown("concurrency", name).await, number, "{name}");
    }

    page.slide("duration_ms", Key::Home, "duration_ms", 50).await;
    page.slide("max_wait_ms", Key::End, "max_wait_ms", 5_000).await;
    page.start_again().await;
    page.click("#burst").await;
    page.until_decided(10).await;
    page.until_text("concurrency", "flight", "0").await;
    let waited = page.shown("concurrency", "waited").await.as_u64().unwrap();
    assert!(waited > 0);
    assert_eq!(page.shown("concurrency", "denied").await, 0);
    page.close().await;
}

#[tokio::test]
async fn rates_hold_units_and_settle_those_that_are_used() {
    let page = Page::open(&[]).await;
    page.only_bursts().await;
    page.slide("duration_ms", Key::End, "duration_ms", 10_000).await;
    page.click("#holds").await;
    page.until("playground.state().settings.holds").await;
    page.start_again().await;
    page.burst().await;
    let can_hold = ["fixed-window", "sliding-log", "sliding-window"];
    for lane in can_hold {
        page.until_text(lane, "held", "1,000").await;
        assert_eq!(page.shown(lane, "remaining").await, 0, "{lane}");
        assert_eq!(page.shown(lane, "most").await, 0, "{lane}");
    }
    page.until_text("token-bucket", "admitted", "1,000").await;
    let cannot = "cannot hold, and spends at once";
    page.until_text("leaky-bucket", "verdict", cannot).await;
    // Half of the units are used.
    for lane in can_hold {
        page.until_text(lane, "held", "0").await;
        page.until_text(lane, "most", "500").await;
    }
    page.until_text("sliding-log", "remaining", "500").await;
    page.close().await;
}

#[tokio::test]
async fn the_page_works_with_the_keyboard_alone() {
    let page = Page::open(&[]).await;
    page.press('7').await;
    page.until("document.querySelector('[data-kind=off]').ariaPressed === 'true'").await;
    page.press('b').await;
    page.until(&format!("{} === 500", page.decided("sliding-log"))).await;
    page.press('p').await;
    page.until("document.getElementById('pause').ariaPressed === 'true'").await;
    let start = page.value("playground.state().start").await;
    page.press('r').await;
    page.until(&format!("playground.state().start > {start}")).await;

    // The tab key reaches each control once, in order.
    let mut reached = Vec::new();
    page.value("(document.activeElement.blur(), 0)").await;
    loop {
        page.press(Key::Tab).await;
        let focused = page
            .value(
                "document.activeElement.id || document.activeElement.dataset.kind \
                 || document.activeElement.ariaLabel || document.activeElement.className",
            )
            .await;
        let focused = focused.as_str().unwrap().to_owned();
        if focused.is_empty() || reached.contains(&focused) || reached.len() > 60 {
            break;
        }
        reached.push(focused);
    }
    for id in [
        "pause",
        "theme",
        "boundary",
        "drawn",
        "Decide with Sliding log",
        "Decide with Concurrency",
        "burst",
        "limit",
        "duration_ms",
        "in_flight",
        "holds",
    ] {
        assert!(reached.iter().any(|reached| reached == id), "{id}: {reached:?}");
    }

    // The traffic can be drawn, too.
    page.press('6').await;
    page.until("!document.getElementById('draw').hidden").await;
    page.value("(document.querySelector('#bars [tabindex=\"0\"]').focus(), 0)").await;
    page.press(Key::Right).await;
    let before = page.value("+document.activeElement.ariaValueNow").await.as_f64().unwrap();
    page.press(Key::Up).await;
    page.until(&format!("playground.state().traffic.rates?.[1] === {before} + 50")).await;
    page.close().await;
}

#[tokio::test]
async fn each_control_has_a_name_for_screen_readers() {
    let page = Page::open(&[]).await;
    page.until("document.querySelector('canvas').ariaLabel").await;
    let tree = page.developer_tools("Accessibility.getFullAXTree", json!({})).await;
    let nodes = tree["nodes"].as_array().unwrap();
    let roles = ["button", "slider", "combobox", "checkbox", "image", "article", "link"];
    let mut seen = std::collections::BTreeSet::new();
    for node in nodes.iter().filter(|node| node["ignored"] == false) {
        let role = node["role"]["value"].as_str().unwrap_or_default();
        let Some(&role) = roles.iter().find(|known| **known == role) else { continue };
        seen.insert(role);
        let name = node["name"]["value"].as_str().unwrap_or_default();
        assert!(!name.trim().is_empty(), "a {role} without a name: {node}");
    }
    assert_eq!(seen.len(), roles.len(), "{seen:?}");
    page.press('d').await;
    page.until("document.getElementById('summary').textContent.includes('Sliding log')").await;
    page.close().await;
}

#[tokio::test]
async fn redis_can_be_killed_and_revived_from_the_page() {
    let page = Page::open(&["--redis"]).await;
    page.click("[data-kind=steady]").await;
    page.until(&format!("{} > 0", shown("sliding-log", "admitted"))).await;
    page.until(&format!("{} > 0", shown("sliding-log", "calls"))).await;
    page.click("#redis").await;
    page.until("document.getElementById('store').className.includes('bad')").await;
    page.until("playground.drawn('sliding-log').failed > 0").await;
    page.until_text("sliding-log", "remaining", "–").await;
    page.click("#redis").await;
    page.until("!document.getElementById('store').className.includes('bad')").await;
    let admitted = page.shown("sliding-log", "admitted").await.as_u64().unwrap();
    page.until(&format!("{} > {admitted}", shown("sliding-log", "admitted"))).await;
    page.close().await;
}

#[tokio::test]
async fn a_lost_connection_is_shown_and_stops_the_chart() {
    let mut page = Page::open(&[]).await;
    let pill = "document.getElementById('store').textContent";
    page.until(&format!("{pill} === 'counts in memory'")).await;
    page.end_playground();
    let lost = format!("{pill} === 'no connection to the playground'");
    page.until(&lost).await;
    page.until("document.getElementById('chart').className.includes('stale')").await;
    // The page goes on to try, and to draw, but the chart stands at the last message.
    page.until("playground.charted() === playground.received()").await;
    let drawn = page.value("playground.charted()").await;
    let closed = page.value("playground.closed()").await;
    page.until(&format!("playground.closed() > {closed} + 1")).await;
    assert_eq!(page.value(&lost).await, true);
    assert_eq!(page.value("playground.charted()").await, drawn);

    page.start_playground();
    page.until(&format!("{pill} === 'counts in memory'")).await;
    page.until("!document.getElementById('chart').className.includes('stale')").await;
    page.until(&format!("{} > 0", shown("sliding-log", "admitted"))).await;
    page.close_after(&["WebSocket connection to"]).await;
}

#[tokio::test]
async fn redis_can_be_killed_while_requests_are_in_flight() {
    let page = Page::open(&["--redis"]).await;
    page.click("[data-kind=off]").await;
    page.slide("duration_ms", Key::End, "duration_ms", 10_000).await;
    page.slide_to("in_flight", 5).await;
    page.until("playground.state().settings.in_flight === 5").await;
    page.slide_to("size", 10).await;
    page.start_again().await;
    page.click("#burst").await;
    page.until_decided(10).await;
    assert_eq!(page.shown("concurrency", "flight").await, 5);

    page.click("#redis").await;
    page.until("playground.state().redis.running === false").await;
    page.click("#burst").await;
    page.until("playground.drawn('concurrency').failed === 10").await;
    page.click("#redis").await;
    page.until("playground.state().redis.running").await;
    // The new server knows nothing of the places until they are renewed: it may grant them again.
    // The first requests can come before it is connected.
    let decided = page.decided("concurrency");
    while page.value(&format!("{decided} < 20")).await == true {
        let answers = format!("{decided} + playground.drawn('concurrency').failed");
        let before = page.value(&answers).await;
        page.click("#burst").await;
        page.until(&format!("{answers} === {before} + 10")).await;
    }
    let most = page.shown("concurrency", "most").await.as_u64().unwrap();
    assert!((5..=10).contains(&most), "{most} in flight");
    if most > 5 {
        page.until_text("concurrency", "verdict", "! above 5: Redis lost its counts").await;
    }

    // The ends of the requests from before the failure free no places of others.
    page.until_text("concurrency", "flight", "0").await;
    let before = page.value(&decided).await;
    page.click("#burst").await;
    page.until(&format!("{decided} === {before} + 10")).await;
    let flight = page.shown("concurrency", "flight").await.as_u64().unwrap();
    assert!((1..=5).contains(&flight), "{flight} in flight");
    assert!(page.shown("concurrency", "most").await.as_u64().unwrap() <= 10);
    page.close().await;
}

/// Also writes the pictures of the documentation, for `make screenshots`.
#[tokio::test]
async fn the_page_fits_each_width() {
    let page = Page::open(&[]).await;
    for (name, width, height, scheme) in [
        ("light", 1_280, 1_230, "light"),
        ("dark", 1_280, 1_230, "dark"),
        ("narrow", 360, 800, "light"),
    ] {
        let metrics = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500,
        });
        page.developer_tools("Emulation.setDeviceMetricsOverride", metrics).await;
        let scheme = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        page.developer_tools("Emulation.setEmulatedMedia", json!({ "features": scheme })).await;
        page.value("scrollTo(0, 0)").await;
        let overflow = "document.documentElement.scrollWidth - innerWidth";
        assert_eq!(page.value(overflow).await, 0, "{name}");
        let first_lane = "document.querySelector('[data-lane=fixed-window]')";
        let is_on_screen = format!("{first_lane}.getBoundingClientRect().bottom < innerHeight");
        page.until(&is_on_screen).await;
        if let Some(folder) = env::var_os("SCREENSHOTS") {
            page.press('r').await;
            page.until("playground.now() < playground.state().began + 2000").await;
            page.until("playground.charted() > playground.state().began + 6300").await;
            let picture = page.client.screenshot().await.unwrap();
            let file = PathBuf::from(folder).join(format!("playground-{name}.png"));
            fs::write(&file, picture).unwrap();
        }
    }
    page.close().await;
}

#[tokio::test]
async fn compact_lanes_fit_one_screen_and_the_address_keeps_them() {
    let page = Page::open(&[]).await;
    let metrics = json!({ "width": 1_280, "height": 900, "deviceScaleFactor": 1, "mobile": false });
    page.developer_tools("Emulation.setDeviceMetricsOverride", metrics).await;
    let last_lane = "document.querySelector('[data-lane=concurrency]')";
    let is_on_screen = format!("{last_lane}.getBoundingClientRect().bottom <= innerHeight");
    page.until("document.getElementById('says').textContent").await;
    assert_eq!(page.value(&is_on_screen).await, false);
    page.press('c').await;
    page.until(&is_on_screen).await;
    page.until("location.hash.includes('compact=true')").await;
    page.client.refresh().await.unwrap();
    page.until("document.body.classList.contains('compact')").await;
    page.close().await;
}

#[tokio::test]
async fn the_first_chart_shows_what_came_before_the_page() {
    let page = Page::open(&[]).await;
    page.until("playground.charted() > 3000").await; // the next session began with this page
    page.client.refresh().await.unwrap();
    page.until("window.playground?.received()").await;
    let is_older = "performance.now() < playground.received()";
    assert_eq!(page.value(is_older).await, true);
    page.until(&format!("{} > 0", page.decided("sliding-log"))).await;
    page.close().await;
}

#[tokio::test]
async fn the_code_follows_the_settings_and_the_address_keeps_them() {
    let page = Page::open(&[]).await;
    assert_eq!(page.value("location.hash").await, "");
    page.click("[data-kind=steady]").await;
    page.slide("max_wait_ms", Key::End, "max_wait_ms", 5_000).await;
    let code = "document.getElementById('rust').textContent";
    page.until(&format!("{code}.includes('.max_wait(Duration::from_secs(5));')")).await;
    let quota = "let quota = Quota::new(1_000, Duration::from_secs(3));";
    assert_eq!(page.value(&format!("{code}.includes('{quota}')")).await, true);
    let toml = page.value("document.getElementById('toml').textContent").await;
    assert_eq!(toml, "[limits.api]\nalgorithm = \"token-bucket\"\nquota = \"1000/3s\"");
    page.click("[data-copy=rust]").await;
    page.until(&format!("getSelection().toString() === {code}")).await;

    page.until("location.hash.includes('max_wait_ms=5000')").await;
    page.client.refresh().await.unwrap();
    page.until("window.playground?.state()?.settings.max_wait_ms === 5000").await;
    page.until("playground.state().traffic.kind === 'steady'").await;
    page.close().await;
}

#[tokio::test]
async fn the_policy_changes_while_redis_is_down_and_a_lower_quota_loses_no_counts() {
    let page = Page::open(&["--redis"]).await;
    page.click("[data-kind=steady]").await;
    page.until(&format!("{} > 0", shown("sliding-log", "admitted"))).await;
    let verdict =
        "document.querySelector('[data-lane=sliding-log] [data-stat=verdict]').textContent";
    page.slide_to("limit", 10).await;
    page.until("playground.state().settings.limit === 10").await;
    let kept = format!("{verdict}.includes('never more than 10')");
    let last = format!("{verdict} === '! above 10: decided under the last quota'");
    page.until(&format!("{kept} || {last}")).await;
    assert_eq!(page.value(&format!("{verdict}.includes('lost')")).await, false);

    page.click("#redis").await;
    page.until("document.getElementById('store').className.includes('bad')").await;
    let start = page.value("playground.state().start").await;
    let policy = "document.getElementById('policy')";
    page.value(&format!("({policy}.value = 'open', {policy}.onchange(), 0)")).await;
    page.until(&format!("{verdict}.includes('let through uncounted')")).await;
    assert_eq!(page.value("playground.state().start").await, start);
    page.close().await;
}
