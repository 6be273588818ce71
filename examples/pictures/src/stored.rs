//! Pictures of a store in Redis: a batch, remembered denials, and a failure.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tower_ratelimit::{
    Algorithm, FailurePolicy, Limiter, Quota, RedisStore,
    store::{RedisConfig, Source},
};

use crate::{
    svg::{Axis, MARGIN, Picture, WIDTH},
    wire::{Call, Server, Wire},
};

fn limiter(wire: &Wire, quota: Quota) -> Limiter {
    let config = RedisConfig::from_connection(wire.clone());
    let store = RedisStore::new(config).expect("valid settings");
    Limiter::new("api", store, Algorithm::token_bucket(), quota)
}

/// Many checks share calls to Redis.
pub async fn batch() -> String {
    let mut picture = Picture::new(
        "Checks share calls to Redis",
        "200 checks in 10 ms take few calls: while calls are under way, the next one collects keys",
    );
    let server = Server::start();
    let wire = Wire::new(&server, Duration::from_millis(5));
    let limiter = limiter(&wire, Quota::per_hour(10));
    let _ = limiter.check("first").await.expect("Redis decides"); // loads the script
    let (before, start) = (wire.calls().len(), wire.now());
    let (begin, mut tasks) = (Instant::now(), JoinSet::new());
    for i in 0..200_u32 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            sleep_until(begin + Duration::from_micros(50) * i).await;
            assert!(limiter.check(i).await.expect("Redis decides").is_allowed());
        });
    }
    tasks.join_all().await;
    let calls = wire.calls().split_off(before);
    let text = format!("200 checks in 10 ms, {} calls of 5 ms each", calls.len());
    picture.heading(&text, "The bars are calls, the numbers their keys");
    let axis = Axis::wide(20.0);
    for call in &calls {
        let (x, end) = (axis.at((call.begin - start) * 1e3), axis.at((call.end - start) * 1e3));
        picture.rect(x, picture.y + 4.0, end - x, 14.0, "allowed");
        picture.text(end + 8.0, picture.y + 17.0, "ink", &call.keys.to_string());
        picture.y += 24.0;
    }
    let y = picture.y + 6.0;
    picture.line((axis.x, y), (axis.x + axis.width, y), "axis");
    for ms in [0, 10, 20] {
        let anchor = ["start", "middle", "end"][ms / 10];
        picture.anchored(axis.at(ms as f64), y + 22.0, "", anchor, &format!("{ms} ms"));
    }
    picture.y = y + 28.0;
    picture.finish()
}

/// A flood on an exhausted key costs a call per second.
pub async fn denials() -> String {
    let mut picture = Picture::new(
        "A remembered denial",
        "200 requests of one exhausted key in 4 seconds: Redis gets one call per second",
    );
    let server = Server::start();
    let wire = Wire::new(&server, Duration::from_millis(1));
    let limiter = limiter(&wire, Quota::per_hour(1));
    let _ = limiter.check("client").await.expect("Redis decides");
    let before = wire.calls().len();
    let start = Instant::now();
    let mut sources = vec![];
    for i in 0..200_u32 {
        sleep_until(start + Duration::from_millis(20) * i).await;
        let decision = limiter.check("client").await.expect("Redis decides");
        assert!(!decision.is_allowed());
        sources.push((f64::from(i) * 0.02, decision.source()));
    }
    let calls: Vec<Call> = wire.calls().split_off(before);
    let text = format!("{} requests of a key without units left", sources.len());
    picture.legend(&[("denied", "denied by Redis"), ("other", "denied in the process")]);
    picture.heading(&text, &format!("{} calls to Redis in 4 s", calls.len()));
    let axis = Axis::wide(4.0);
    let y = picture.y + 40.0;
    for (at, source) in sources {
        let is_cached = source == Source::Cached;
        let (height, width, class) =
            if is_cached { (18.0, 1.6, "other") } else { (36.0, 4.0, "denied") };
        picture.rect(axis.at(at), y - height, width, height, class);
    }
    axis.draw(&mut picture, y, y, 1);
    picture.y = y + 28.0;
    picture.finish()
}

/// The requests of a real run, by [`record_failure`]: breakers and connections follow the clock of
/// the system. Each line has the time and the duration in milliseconds, and the decision.
const FAILURE: &str = include_str!("failure.txt");
const SILENT: (f64, f64) = (2.0, 5.0);

/// Sends requests for 8 seconds to a real server that is stopped by a signal from 2 to 5 s.
pub async fn record_failure() -> String {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.expect("Redis decides");
    let limiter = Limiter::new("api", store, Algorithm::token_bucket(), QUOTA)
        .on_failure(FailurePolicy::local(0.5));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..320_u32 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let at = Duration::from_millis(25) * i;
            sleep_until(start + at).await;
            let decision = limiter.check("client").await.expect("the policy decides");
            let source = match decision.source() {
                Source::Local => "local",
                Source::Cached => "cached",
                _ => "store",
            };
            let end = if decision.is_allowed() { "allowed" } else { "denied" };
            (at.as_millis(), (start + at).elapsed().as_millis(), source, end)
        });
    }
    for (at, signal) in [(SILENT.0, "STOP"), (SILENT.1, "CONT")] {
        sleep_until(start + Duration::from_secs_f64(at - 0.005)).await;
        server.signal(signal);
    }
    let mut decisions = tasks.join_all().await;
    decisions.sort_by_key(|(at, ..)| *at);
    let line = |(at, took, source, end)| format!("{at} {took} {source} {end}\n");
    decisions.into_iter().map(line).collect()
}

const QUOTA: Quota = Quota::per_second(20).burst(1);

/// Redis does not answer for three seconds.
pub fn failure() -> String {
    let mut picture = Picture::new(
        "Redis does not answer for 3 s",
        "While Redis does not answer, a share of the quota applies in the process; when it answers \
         again, so does the quota",
    );
    let decisions: Vec<(f64, f64, &str, bool)> = FAILURE
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            let mut word = || words.next().expect("four words");
            let ms = |word: &str| word.parse::<f64>().expect("a number") / 1e3;
            (ms(word()), ms(word()), word(), word() == "allowed")
        })
        .collect();
    picture.legend(&[
        ("allowed", "admitted by Redis"),
        ("waited", "by the share of 0.5"),
        ("denied", "denied"),
    ]);
    picture.heading(
        "40 requests per second, 20 allowed",
        "Admitted and denied per quarter of a second",
    );
    let axis = Axis { x: 54.0, width: WIDTH - 54.0 - MARGIN, seconds: 8.0 };
    let mut bins = [[0.0_f64; 3]; 32];
    for (at, _, source, is_allowed) in &decisions {
        let row = match (*is_allowed, *source) {
            (false, _) => 2,
            (true, "local") => 1,
            (true, _) => 0,
        };
        bins[(at * 4.0) as usize][row] += 1.0;
    }
    let top = picture.y + 22.0;
    let (scale, zero) = (9.0, top + 8.0 * 9.0);
    let bottom = zero + 10.0 * 9.0;
    let (x, end) = (axis.at(SILENT.0), axis.at(SILENT.1));
    picture.rect(x, top - 4.0, end - x, bottom - top + 4.0, "shade");
    picture.anchored(f64::midpoint(x, end), top + 16.0, "ink", "middle", "no answer");
    for (count, y) in [(5.0, zero - 5.0 * scale), (10.0, bottom)] {
        picture.line((axis.x, y), (axis.x + axis.width, y), "grid");
        picture.anchored(axis.x - 8.0, y + 6.0, "", "end", &format!("{count}"));
    }
    let width = axis.width / 32.0;
    for (i, bin) in bins.iter().enumerate() {
        let x = axis.x + width * i as f64 + 1.5;
        let [redis, local, denied] = bin.map(|it| it * scale);
        picture.rect(x, zero - redis, width - 3.0, redis, "allowed");
        picture.rect(x, zero - redis - local, width - 3.0, local, "waited");
        picture.rect(x, zero, width - 3.0, denied, "denied");
    }
    axis.draw(&mut picture, zero, bottom, 1);
    picture.y = bottom + 40.0;
    let slow = decisions.iter().filter(|(_, took, ..)| *took > 0.05).count();
    let open = decisions.iter().find(|(at, took, ..)| *at > SILENT.0 + 0.02 && *took < 0.05);
    let back = decisions.iter().find(|(at, _, source, _)| *at > SILENT.1 && *source == "store");
    let lines = [
        format!("{slow} requests wait for their deadlines of 100 ms"),
        format!("{:.2} s: the circuit opens; no request waits", open.map_or(0.0, |it| it.0)),
        format!("{:.2} s: a probe has an answer; Redis decides", back.map_or(0.0, |it| it.0)),
    ];
    for line in lines {
        picture.y += 24.0;
        picture.text(MARGIN, picture.y, "", &line);
    }
    picture.finish()
}
