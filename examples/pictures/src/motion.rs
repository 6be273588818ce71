//! A picture that moves: three algorithms decide about the same requests, in real time.

use tower_ratelimit::Algorithm;

use crate::{
    algorithms::{bins, draw_bins},
    arrivals::{Fate, Outcome, scenarios},
    svg::{Axis, MARGIN, Picture, WIDTH},
};

/// Where the time begins.
const LEFT: f64 = 64.0;

/// A cover that becomes narrower shows the decisions. Without motion, there is no cover.
const STYLE: &str = "
.cover{fill:#fff;transform:scaleX(0);transform-origin:right;transform-box:fill-box}
.now{stroke:#818b98;stroke-width:2;opacity:0}
@media (prefers-reduced-motion:no-preference){
.cover{animation:show 8s linear infinite}
.now{animation:move 8s linear infinite}
}
@keyframes show{0%{transform:scaleX(1)}62.5%,100%{transform:scaleX(0)}}
@keyframes move{0%{opacity:1}62.5%{opacity:1;transform:translateX(512px)}63%,100%{opacity:0}}
@media (prefers-color-scheme:dark){
.cover{fill:#0d1117}
}";

pub async fn motion() -> String {
    let scenario = &scenarios()[2];
    let title = "10 per second, aimed at the boundary";
    let mut picture = Picture::new(title, "What three algorithms admit of the same requests");
    picture.style(STYLE);
    picture.legend(&[("allowed", "admitted"), ("denied", "denied")]);
    let axis = Axis { x: LEFT, width: WIDTH - LEFT - MARGIN, seconds: scenario.seconds };
    let top = picture.y;
    let rows = [
        ("Fixed window", Algorithm::fixed_window()),
        ("Token bucket, burst 10", Algorithm::token_bucket()),
        ("Sliding log", Algorithm::sliding_log()),
    ];
    let mut covers = vec![];
    for (name, algorithm) in rows {
        let outcome = Outcome::of(scenario, algorithm).await;
        let denied = outcome.count(|fate| matches!(fate, Fate::Denied(_)));
        let admitted = scenario.times.len() - denied;
        let most = outcome.most_within(scenario.window.0).0;
        let result = format!("{admitted} admitted, {denied} denied; {most} in one second");
        picture.heading(name, &result);
        let bins = bins(&outcome, scenario.seconds);
        let [up, down] = [0, 2].map(|row| bins.iter().map(|bin| bin[row]).fold(0.0, f64::max));
        let zero = picture.y + up * 4.0 + 4.0;
        draw_bins(&mut picture, &axis, zero, &bins, 4.0);
        // A little more than the bars, whose last row of pixels shines through otherwise.
        covers.push((picture.y, zero + down * 4.0 + 2.0 - picture.y));
        axis.draw(&mut picture, zero, zero + down * 4.0, 1);
        picture.y = zero + down * 4.0 + 26.0;
    }
    for (y, height) in covers {
        picture.rect(axis.x, y, axis.width, height, "cover");
    }
    picture.line((axis.x, top), (axis.x, picture.y), "now");
    picture.finish()
}
