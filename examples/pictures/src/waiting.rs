//! Requests that wait: with reservations, and by trying again. And two processes with and without
//! a common store.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};
use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

use crate::svg::{Axis, MARGIN, Picture, WIDTH};

const REQUESTS: u32 = 12;

/// One request: when it arrived, when it was checked again, and when it proceeded.
struct Wait {
    arrival: f64,
    checks: Vec<f64>,
    end: f64,
}

fn limiter() -> Limiter {
    let quota = Quota::per_second(4).burst(1);
    Limiter::new("vendor", MemoryStore::new(), Algorithm::token_bucket(), quota)
}

fn arrival(i: u32) -> Duration {
    Duration::from_millis(50) * i
}

/// Sends all requests, each in a task, and returns them in the order of their arrival.
async fn run<F>(wait: impl Fn(u32, Instant) -> F) -> Vec<Wait>
where
    F: Future<Output = Wait> + Send + 'static,
{
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..REQUESTS {
        tasks.spawn(wait(i, start));
    }
    let mut waits = tasks.join_all().await;
    waits.sort_by(|a, b| a.arrival.total_cmp(&b.arrival));
    waits
}

async fn reserved() -> Vec<Wait> {
    let limiter = limiter();
    run(|i, start| {
        let limiter = limiter.clone();
        async move {
            sleep_until(start + arrival(i)).await;
            let decision = limiter.try_acquire("vendor", 1, Duration::from_secs(60)).await;
            assert!(decision.expect("memory decides").is_allowed());
            let arrival = arrival(i).as_secs_f64();
            Wait { arrival, checks: vec![arrival], end: start.elapsed().as_secs_f64() }
        }
    })
    .await
}

/// Sleeps for `retry_after` and some jitter after each denial, as clients do without reservations.
async fn retried() -> Vec<Wait> {
    let limiter = limiter();
    run(|i, start| {
        let limiter = limiter.clone();
        let mut random = fastrand::Rng::with_seed(7 + u64::from(i));
        async move {
            sleep_until(start + arrival(i)).await;
            let mut checks = vec![];
            loop {
                checks.push(start.elapsed().as_secs_f64());
                let decision = limiter.check("vendor").await.expect("memory decides");
                let Some(retry_after) = decision.retry_after() else {
                    let arrival = arrival(i).as_secs_f64();
                    return Wait { arrival, checks, end: start.elapsed().as_secs_f64() };
                };
                sleep(retry_after + Duration::from_millis(random.u64(0..100))).await;
            }
        }
    })
    .await
}

pub async fn waiting() -> String {
    let mut picture = Picture::new(
        "12 requests wait for 4 per second",
        "12 requests wait: with reservations they proceed in order after one check each, and \
         without them in another order, after many checks",
    );
    picture.legend(&[("waited", "waits"), ("allowed", "proceeds"), ("denied", "denied check")]);
    for (title, waits) in [
        ("With reservations", reserved().await),
        ("Trying again after each denial", retried().await),
    ] {
        panel(&mut picture, title, &waits);
    }
    picture.finish()
}

fn panel(picture: &mut Picture, title: &str, waits: &[Wait]) {
    let checks: usize = waits.iter().map(|wait| wait.checks.len()).sum();
    let overtaken = (0..waits.len())
        .filter(|&i| waits[i + 1..].iter().any(|later| later.end < waits[i].end))
        .count();
    let last = waits.iter().map(|wait| wait.end).fold(0.0, f64::max);
    let result = format!("{checks} checks, {overtaken} requests are overtaken, {last:.1} s in all");
    picture.heading(title, &result);
    let axis = Axis::wide(4.0);
    for wait in waits {
        let y = picture.y + 8.0;
        picture.rect(
            axis.at(wait.arrival),
            y - 2.0,
            axis.at(wait.end) - axis.at(wait.arrival),
            4.0,
            "waited",
        );
        for at in &wait.checks[..wait.checks.len() - 1] {
            picture.rect(axis.at(*at) - 1.5, y - 5.0, 3.0, 10.0, "denied");
        }
        if wait.end <= axis.seconds {
            picture.circle(axis.at(wait.end), y, 5.0, "allowed");
        }
        picture.y += 15.0;
    }
    let y = picture.y + 4.0;
    axis.draw(picture, y, y, 1);
    picture.y = y + 28.0;
}

/// What two processes admit per second, with a count each and with a common one.
pub async fn processes() -> String {
    let mut picture = Picture::new(
        "Two processes, one limit of 10 per second",
        "Admitted requests per second of two processes: with a count each they admit 20, with one \
         store 10",
    );
    picture.legend(&[("allowed", "process 1"), ("other", "process 2")]);
    let quota = Quota::per_second(10).burst(1);
    let limiter = |store| Limiter::new("api", store, Algorithm::token_bucket(), quota);
    let apart = [limiter(MemoryStore::new()), limiter(MemoryStore::new())];
    let shared = limiter(MemoryStore::new());
    for (title, limiters) in [
        ("Each process counts for itself", apart),
        ("Both use one store", [shared.clone(), shared]),
    ] {
        let rows = admitted(&limiters).await;
        columns(&mut picture, title, &rows);
    }
    picture.finish()
}

/// Sends 60 requests per second to the first process and more and more to the second one.
async fn admitted(limiters: &[Limiter; 2]) -> [[f64; 8]; 2] {
    let start = Instant::now();
    let mut counts = [[0.0; 8]; 2];
    let mut next = [0.0, 0.013];
    let mut random = fastrand::Rng::with_seed(1);
    loop {
        let process = usize::from(next[1] < next[0]);
        let at = next[process];
        if at >= 7.999 {
            return counts;
        }
        sleep_until(start + Duration::from_secs_f64(at)).await;
        if limiters[process].check("client").await.expect("memory decides").is_allowed() {
            counts[process][start.elapsed().as_secs() as usize] += 1.0;
        }
        let rate = [60.0, 20.0 + 10.0 * at][process];
        next[process] += 2.0 * random.f64() / rate;
    }
}

fn columns(picture: &mut Picture, title: &str, rows: &[[f64; 8]; 2]) {
    let most = (0..8).map(|i| rows[0][i] + rows[1][i]).fold(0.0, f64::max);
    picture.heading(title, &format!("up to {most} admitted in a second"));
    let axis = Axis { x: MARGIN, width: WIDTH - 2.0 * MARGIN - 70.0, seconds: 8.0 };
    let scale = 5.0;
    let zero = picture.y + most * scale + 4.0;
    for (i, (one, two)) in rows[0].iter().zip(&rows[1]).enumerate() {
        let x = axis.at(i as f64) + 6.0;
        let width = axis.width / 8.0 - 12.0;
        let (one, two) = (one * scale, two * scale);
        picture.rect(x, zero - one, width, one, "allowed");
        picture.rect(x, zero - one - two, width, (two - 1.5).max(0.0), "other"); // and a gap
    }
    let y = zero - 10.0 * scale;
    picture.limit((axis.x, y), (axis.x + axis.width, y));
    picture.text(axis.x + axis.width + 8.0, y + 6.0, "ink", "limit 10");
    axis.draw(picture, zero, zero, 2);
    picture.y = zero + 28.0;
}
