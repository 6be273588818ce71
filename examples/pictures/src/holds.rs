//! Units that are held: an estimate that is settled, requests in flight, and the life of a permit
//! in Redis.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

use crate::svg::{Axis, Picture};

const SECOND: Duration = Duration::from_secs(1);

/// What remains of a bucket while an estimate is held, and after it is settled.
pub async fn settling() -> String {
    let quota = Quota::per_minute(600).burst(1_000);
    let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let start = Instant::now();
    let remaining = async |second: u64| {
        sleep_until(start + SECOND * second as u32).await;
        let state = tokens.peek("alice").await.expect("memory decides");
        (second as f64, state.remaining() as f64, state.held() as f64)
    };
    let mut points = vec![];
    for second in 0..5 {
        points.push(remaining(second).await);
    }
    let permit = tokens
        .hold("alice", 500)
        .await
        .expect("memory decides")
        .admitted()
        .expect("enough is left");
    for second in 5..15 {
        points.push(remaining(second).await);
    }
    drop(tokens.check("alice").cost(150).await.expect("memory decides"));
    for second in 15..35 {
        points.push(remaining(second).await);
    }
    points.push(remaining(35).await);
    permit.settle(180);
    for second in 35..=50 {
        points.push(remaining(second).await);
    }

    let mut picture = Picture::new(
        "An estimate of 500 tokens, of which 180 are used",
        "What remains of a bucket of 1,000: 500 while an estimate of 500 is held, and 320 more \
         when it is settled after 30 s with 180; other requests are counted beside it",
    );
    picture.legend(&[("allowed", "remaining"), ("other", "held")]);
    let (axis, top, height) = (Axis::wide(50.0), picture.y + 34.0, 200.0);
    let y = |units: f64| top + height * (1.0 - units / 1_000.0);
    let mut area = |class: &str, units: fn(&(f64, f64, f64)) -> f64| {
        let mut edge = vec![(axis.at(0.0), top + height)];
        for pair in points.windows(2) {
            let level = y(units(&pair[0]));
            edge.extend([(axis.at(pair[0].0), level), (axis.at(pair[1].0), level)]);
        }
        edge.push((axis.at(50.0), top + height));
        picture.path(&edge, class);
    };
    area("other", |(_, left, held)| left + held);
    area("allowed", |(_, left, _)| *left);
    picture.limit((axis.x, y(1_000.0)), (axis.x + axis.width, y(1_000.0)));
    picture.text(axis.x, top - 10.0, "", "burst 1,000");
    for (at, row, text) in
        [(5.0, 24.0, "hold 500"), (15.0, 46.0, "150 spent"), (35.0, -10.0, "settle 180")]
    {
        let x = axis.at(at);
        picture.line((x, top), (x, top + height), "grid");
        picture.anchored(x + 6.0, top + row, "ink", "start", text);
    }
    axis.draw(&mut picture, top + height, top + height, 10);
    picture.y = top + height + 30.0;
    picture.finish()
}

/// A request: when it arrived, began, unless it was denied, and ended.
struct Request {
    arrival: f64,
    start: Option<f64>,
    end: f64,
}

/// Requests with two places. The last one may not wait.
pub async fn concurrency() -> String {
    let quota = Quota::concurrent(2);
    let streams = Limiter::new("streams", MemoryStore::new(), Algorithm::concurrency(), quota);
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for (arrival, takes, max_wait) in [
        (0, 3_000, 60),
        (400, 1_600, 60),
        (800, 2_000, 60),
        (1_200, 1_200, 60),
        (1_600, 2_200, 60),
        (2_000, 600, 60),
        (2_500, 1_000, 0),
    ] {
        let streams = streams.clone();
        tasks.spawn(async move {
            sleep_until(start + Duration::from_millis(arrival)).await;
            let permit = streams.hold("alice", 1).max_wait(SECOND * max_wait).await;
            let permit = permit.expect("memory decides").admitted();
            let began = permit.is_some().then(|| start.elapsed().as_secs_f64());
            if permit.is_some() {
                sleep(Duration::from_millis(takes)).await;
            }
            drop(permit);
            let end = start.elapsed().as_secs_f64();
            Request { arrival: arrival as f64 / 1e3, start: began, end }
        });
    }
    let mut requests = tasks.join_all().await;
    requests.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));

    let mut picture = Picture::new(
        "Two requests in flight at a time",
        "Seven requests, two places: a request that may wait begins when another one ends, in the \
         order of arrival; one that may not is denied",
    );
    picture.legend(&[("waited", "waits"), ("allowed", "in flight"), ("denied", "denied")]);
    let axis = Axis::wide(7.0);
    picture.y += 16.0;
    for request in &requests {
        let y = picture.y + 8.0;
        let mut bar = |from: f64, to: f64, height: f64, class: &str| {
            picture.rect(
                axis.at(from),
                y - height / 2.0,
                axis.at(to) - axis.at(from),
                height,
                class,
            );
        };
        match request.start {
            Some(start) => {
                bar(request.arrival, start, 4.0, "waited");
                bar(start, request.end, 12.0, "allowed");
            }
            None => {
                let x = axis.at(request.arrival);
                picture.rect(x - 2.0, y - 7.0, 4.0, 14.0, "denied");
                picture.text(x + 10.0, y + 6.0, "", "has no max_wait, and no place is free");
            }
        }
        picture.y += 22.0;
    }
    let y = picture.y + 6.0;
    axis.draw(&mut picture, y, y, 1);
    picture.y = y + 28.0;
    picture.finish()
}

/// Until when Redis holds the units of two permits with a lifetime of 60 s.
pub fn permit() -> String {
    const LIFETIME: f64 = 60.0;
    // A new hold lives for a quarter of the lifetime, and each is renewed when half has passed.
    let renewals = |until: f64| {
        let mut all = vec![(0.0, LIFETIME / 4.0)];
        let mut at = LIFETIME / 8.0;
        while at < until {
            all.push((at, at + LIFETIME));
            at += LIFETIME / 2.0;
        }
        all
    };
    let mut picture = Picture::new(
        "Two permits in Redis, lifetime 60 s",
        "A permit is renewed while it is held, and its end frees its units at once; the units of a \
         process that dies are freed when the last renewal runs out",
    );
    picture.legend(&[("allowed", "units are held"), ("other", "from a renewal to its expiry")]);
    let axis = Axis::wide(120.0);
    for (title, result, ends, dies) in [
        ("The permit ends after 50 s", "Its end frees the units", 50.0, false),
        ("The process is killed after 50 s", "The last expiry frees the units", 50.0, true),
    ] {
        let renewals = renewals(ends);
        let last = renewals.last().map_or(0.0, |renewal| renewal.1);
        let freed = if dies { last } else { ends };
        picture.heading(title, &format!("{result}: at {freed} s"));
        let y = picture.y + 14.0;
        picture.rect(axis.at(0.0), y - 8.0, axis.at(freed) - axis.at(0.0), 16.0, "allowed");
        for (row, (from, until)) in renewals.iter().enumerate() {
            let y = y + 22.0 + 20.0 * row as f64;
            let end = axis.at(*until);
            picture.rect(axis.at(*from), y, end - axis.at(*from), 8.0, "other");
            picture.text(end + 8.0, y + 10.0, "", &format!("{until} s"));
        }
        let mark = axis.at(ends);
        picture.limit((mark, y - 14.0), (mark, y + 76.0));
        picture.y = y + 80.0;
    }
    let y = picture.y + 6.0;
    axis.draw(&mut picture, y, y, 20);
    picture.y = y + 28.0;
    picture.finish()
}
