//! What each algorithm admits, delays and denies of the same requests.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

use crate::{
    arrivals::{Fate, Outcome, Scenario, scenarios},
    svg::{Axis, MARGIN, Picture, WIDTH},
};

/// The length of the time that a bar counts, in seconds.
const BIN: f64 = 0.2;

/// What a picture says of an algorithm beside its name.
#[derive(Clone, Copy)]
pub enum Setting {
    Nothing,
    Burst,
    OneBucket,
}

impl Setting {
    /// Returns the setting in words; the burst is the default, which is the limit.
    fn of(self, limit: u64) -> String {
        match self {
            Self::Nothing => String::new(),
            Self::Burst => format!(", burst {}", grouped(limit)),
            Self::OneBucket => ", 1 bucket".to_owned(),
        }
    }
}

/// Draws one algorithm under all scenarios.
pub async fn algorithm(name: &str, algorithm: Algorithm, setting: Setting) -> String {
    let title = format!("{name}: 10 per second{}", setting.of(10));
    let label = format!("{title}. What it admits, delays and denies of four sequences of requests");
    let mut picture = Picture::new(&title, label);
    let delays = matches!(algorithm, Algorithm::LeakyBucket);
    picture.legend(match delays {
        true => &[("allowed", "leaves at once"), ("waited", "leaves late"), ("denied", "denied")],
        false => &[("allowed", "admitted"), ("denied", "denied")],
    });
    let up = if delays { "departures" } else { "admitted" };
    let text = format!("Requests per {BIN} s: {up} above the line, denied below");
    picture.y += 14.0;
    picture.text(MARGIN, picture.y, "", &text);
    picture.y += 8.0;
    for (i, scenario) in scenarios().iter().enumerate() {
        let outcome = Outcome::of(scenario, algorithm).await;
        // The first rows have the scale in common, and the last one, of 1,000 requests, its own.
        let last = i == 3;
        let pixels = if last { 0.34 } else { 4.5 };
        panel(&mut picture, scenario, &outcome, setting, pixels);
    }
    picture.finish()
}

fn panel(
    picture: &mut Picture,
    scenario: &Scenario,
    outcome: &Outcome,
    setting: Setting,
    pixels: f64,
) {
    let limit = scenario.quota.limit();
    let (window, name) = scenario.window;
    let denied = outcome.count(|fate| matches!(fate, Fate::Denied(_)));
    let [admitted, denied] =
        [scenario.times.len() - denied, denied].map(|count| grouped(count as u64));
    let quota = match window {
        1.0 => String::new(),
        _ => format!("{} per {name}{}: ", grouped(limit), setting.of(limit)),
    };
    let result = match outcome.longest_delay {
        0.0 => format!("{admitted} admitted, {denied} denied"),
        delay => format!("{admitted} admitted, delayed up to {delay:.1} s; {denied} denied"),
    };
    picture.heading(&format!("{quota}{}", scenario.title), &result);
    let late = if outcome.longest_delay > 0.0 { 1.0 } else { 0.0 };
    let mut seconds = scenario.seconds + late;
    for fate in &outcome.fates {
        let (Fate::Admitted(at) | Fate::Waited(at) | Fate::Denied(at)) = fate;
        seconds = seconds.max(at.ceil());
    }
    let axis = Axis { x: 64.0, width: WIDTH - 64.0 - MARGIN, seconds };
    let bins = bins(outcome, seconds);
    let up = bins.iter().map(|bin| bin[0] + bin[1]).fold(0.0, f64::max);
    let down = bins.iter().map(|bin| bin[2]).fold(0.0, f64::max);
    let (most, from) = outcome.most_within(window);
    let most = most as u64;
    let mut text = format!("{} in {name}", grouped(most));
    if most > limit {
        text += &format!(", over the limit of {}", grouped(limit));
    }
    picture.y += 34.0;
    picture.bracket(axis.at(from), axis.at(from + window).min(axis.at(seconds)), picture.y, &text);
    let zero = picture.y + up * pixels + 4.0;
    for (count, y) in [(up, zero - up * pixels), (down, zero + down * pixels)] {
        if count > 0.0 {
            picture.line((axis.x, y), (axis.x + axis.width, y), "grid");
            if y < zero || (up + down) * pixels > 22.0 {
                picture.anchored(axis.x - 8.0, y + 6.0, "", "end", &count.to_string());
            }
        }
    }
    draw_bins(picture, &axis, zero, &bins, pixels);
    let bottom = zero + down * pixels;
    axis.draw(picture, zero, bottom, 1);
    picture.y = bottom + 28.0;
}

/// Counts the requests of each bin that are admitted at once, admitted late, and denied.
pub fn bins(outcome: &Outcome, seconds: f64) -> Vec<[f64; 3]> {
    let mut bins = vec![[0.0_f64; 3]; (seconds / BIN).round() as usize];
    for fate in &outcome.fates {
        let (row, at) = match fate {
            Fate::Admitted(at) => (0, at),
            Fate::Waited(at) => (1, at),
            Fate::Denied(at) => (2, at),
        };
        bins[(at / BIN + 1e-6) as usize][row] += 1.0;
    }
    bins
}

/// Draws what is admitted above `zero`, and what is denied below it.
pub fn draw_bins(picture: &mut Picture, axis: &Axis, zero: f64, bins: &[[f64; 3]], pixels: f64) {
    let width = axis.at(BIN) - axis.x;
    for (i, bin) in bins.iter().enumerate() {
        let x = axis.x + width * i as f64 + 1.5;
        let heights = bin.map(|count| count * pixels);
        for (height, y, class) in [
            (heights[0], zero - heights[0], "allowed"),
            (heights[1], zero - heights[0] - heights[1], "waited"),
            (heights[2], zero, "denied"),
        ] {
            if height > 0.0 {
                let least = height.max(3.0); // a few requests of a thousand are visible
                let y = if class == "denied" { y } else { y + height - least };
                picture.rect(x, y, width - 3.0, least, class);
            }
        }
    }
}

/// Returns a number below a million with a comma between the thousands.
fn grouped(number: u64) -> String {
    match (number / 1_000, number % 1_000) {
        (0, rest) => rest.to_string(),
        (thousands, rest) => format!("{thousands},{rest:03}"),
    }
}

/// Compares what the algorithms let through in one window when a client aims at the boundary.
pub async fn boundary() -> String {
    let scenario = &scenarios()[2];
    let mut picture = Picture::new(
        "A client that aims at the boundary",
        "The most requests in any second under a limit of 10 per second, by algorithm, when a \
         client aims at the boundary",
    );
    picture.y += 22.0;
    let text = "The most requests in any second under 10 per second";
    picture.text(MARGIN, picture.y, "", text);
    let rows = [
        ("fixed window", Algorithm::fixed_window()),
        ("token bucket, burst 10", Algorithm::token_bucket()),
        ("sliding window, 1 bucket", Algorithm::sliding_window()),
        ("sliding log", Algorithm::sliding_log()),
        ("leaky bucket, burst 10", Algorithm::leaky_bucket()),
    ];
    bars(&mut picture, scenario, &rows).await;
    picture.finish()
}

/// How the units of a sliding window come back, by its number of buckets.
pub async fn buckets() -> String {
    let mut picture = Picture::new(
        "What the buckets of a sliding window do",
        "10 units are used at once; they return later and more slowly with fewer buckets",
    );
    picture.y += 22.0;
    let text = "Units left under 10 per second; 10 are used at 0.5 s";
    picture.text(MARGIN, picture.y, "", text);
    let window = |buckets| Algorithm::sliding_window().buckets(buckets);
    for (name, algorithm) in [
        ("1 bucket", window(1)),
        ("4 buckets", window(4)),
        ("10 buckets", window(10)),
        ("sliding log", Algorithm::sliding_log()),
    ] {
        let limiter = Limiter::new("api", MemoryStore::new(), algorithm, Quota::per_second(10));
        picture.y += 22.0;
        let axis = Axis { x: 170.0, width: WIDTH - 170.0 - MARGIN, seconds: 3.0 };
        let (zero, base) = (picture.y + 44.0, picture.y + 50.0);
        picture.text(MARGIN, zero - 14.0, "ink", name);
        for units in [0, 10] {
            let y = zero - 4.0 * f64::from(units);
            picture.line((axis.x - 5.0, y), (axis.x, y), "axis");
            picture.anchored(axis.x - 10.0, y + 6.0, "", "end", &units.to_string());
        }
        picture.line((axis.x, zero - 44.0), (axis.x, base), "axis");
        let start = Instant::now();
        let mut points = vec![];
        for ms in (0..=3_000_u32).step_by(10) {
            sleep_until(start + Duration::from_millis(ms.into())).await;
            if ms == 500 {
                let decision = limiter.check("client").cost(10).await.expect("memory decides");
                assert!(decision.is_allowed());
            }
            let left = limiter.peek("client").await.expect("memory decides").remaining();
            points.push((axis.at(f64::from(ms) / 1_000.0), zero - 4.0 * left as f64));
        }
        picture.path(&points, "line");
        axis.draw(&mut picture, base, base, 1);
        picture.y = base + 24.0;
    }
    picture.finish()
}

async fn bars(picture: &mut Picture, scenario: &Scenario, rows: &[(&str, Algorithm)]) {
    const LEFT: f64 = 270.0;
    let unit = (WIDTH - LEFT - MARGIN - 40.0) / 20.0;
    let x = LEFT + unit * 10.0;
    picture.y += 30.0;
    picture.anchored(x, picture.y, "ink", "middle", "limit 10");
    let top = picture.y;
    for (name, algorithm) in rows {
        let most = Outcome::of(scenario, *algorithm).await.most_within(scenario.window.0).0;
        picture.y += 34.0;
        picture.text(MARGIN, picture.y, "ink", name);
        picture.rect(LEFT, picture.y - 16.0, unit * most as f64, 20.0, "allowed");
        picture.text(LEFT + unit * most as f64 + 8.0, picture.y, "ink", &most.to_string());
    }
    picture.limit((x, top + 8.0), (x, picture.y + 12.0));
    picture.y += 8.0;
}

/// The balance of a token bucket over time.
pub async fn balance() -> String {
    let mut picture = Picture::new(
        "The units left in a token bucket",
        "The units left in a token bucket of 5 per second with a burst of 10, over 6 seconds",
    );
    picture.legend(&[("allowed", "admitted"), ("denied", "denied")]);
    picture.heading("5 per second, burst 10", "");
    let quota = Quota::per_second(5).burst(10);
    let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let axis = Axis { x: 60.0, width: WIDTH - 60.0 - MARGIN, seconds: 6.0 };
    let (top, scale) = (picture.y + 8.0, 13.0);
    let zero = top + 10.0 * scale;
    for units in [0, 5, 10] {
        let y = zero - f64::from(units) * scale;
        picture.line((axis.x, y), (axis.x + axis.width, y), "grid");
        picture.anchored(axis.x - 10.0, y + 6.0, "", "end", &units.to_string());
    }
    let mut points = vec![];
    let mut dots = vec![];
    let start = Instant::now();
    let mut requests: Vec<f64> = vec![];
    requests.extend((0..12).map(|i| 1.0 + 0.06 * f64::from(i)));
    requests.extend((0..24).map(|i| 3.0 + 0.07 * f64::from(i)));
    for ms in (0..=6_000_u32).step_by(20) {
        let now = f64::from(ms) / 1_000.0;
        sleep_until(start + Duration::from_millis(ms.into())).await;
        let left = units(&limiter).await;
        points.push((axis.at(now), zero - left * scale));
        while requests.first().is_some_and(|at| *at <= now + 1e-9) {
            requests.remove(0);
            let is_allowed = limiter.check("client").await.expect("memory decides").is_allowed();
            let left = units(&limiter).await;
            points.push((axis.at(now), zero - left * scale));
            dots.push((axis.at(now), zero - left * scale, is_allowed));
        }
    }
    picture.path(&points, "line");
    for (x, y, is_allowed) in dots {
        if is_allowed {
            picture.circle(x, y, 3.5, "allowed");
        } else {
            picture.rect(x - 2.0, zero + 5.0, 4.0, 14.0, "denied");
        }
    }
    axis.draw(&mut picture, zero, zero + 16.0, 1);
    picture.y = zero + 46.0;
    picture.finish()
}

/// Returns the units left with their fraction: the time until the bucket is full says them exactly.
async fn units(limiter: &Limiter) -> f64 {
    let state = limiter.peek("client").await.expect("memory decides");
    10.0 - 5.0 * state.reset_after().as_secs_f64()
}
