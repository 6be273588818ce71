//! What happens while the dashboard is recorded: steady traffic, a client that floods until an
//! operator blocks it, streams, a Redis that is stopped, and an operator who changes a limit.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, SystemTime},
};

use pictures::dashboard::Mark;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{http::Request, programs::Programs};

pub const SECONDS: u32 = 300;
/// The seconds before the first value, so that it has a rate.
pub const WARM_UP: u32 = 20;

/// The seconds of each event.
const FLOOD: (u32, u32) = (45, 120);
const BLOCK: u32 = 90;
const OUTAGE: (u32, u32) = (165, 185);
/// The operator forgets a limit, and then raises it.
const MISTAKE: u32 = 232;
const RAISE: u32 = 247;

/// A flooding client does not wait for longer.
const PATIENCE: Duration = Duration::from_millis(300);

pub fn marks() -> Vec<Mark> {
    let mark = |name: &str, (from, to)| Mark { name: name.to_owned(), from, to };
    vec![
        mark("a client floods; it is blocked after 45 s", FLOOD),
        mark("Redis is stopped for 20 s", OUTAGE),
        mark("a limit is raised, after a mistake in the file", (RAISE, RAISE)),
    ]
}

/// Runs until the end. Returns the time of the first value.
pub async fn run(mut programs: Programs) -> SystemTime {
    let begin = Instant::now();
    let start = SystemTime::now() + Duration::from_secs(WARM_UP.into());
    let at = |second: u32| begin + Duration::from_secs((WARM_UP + second).into());
    let (server, streams) = (programs.server.address, programs.streams.address);
    let configured = programs.configured.address;
    // After the last value, so that it is like the others.
    let end = at(SECONDS + 3);
    let always = (begin, end);

    let mut traffic = JoinSet::new();
    for client in ["ada", "ben", "cleo", "dan", "eve", "finn"] {
        let header = format!("x-client: {client}");
        traffic.spawn(repeat(5.0, always, move || get(server, header.clone())));
    }
    traffic.spawn(repeat(60.0, (at(FLOOD.0), at(FLOOD.1)), move || async move {
        let _ = timeout(PATIENCE, get(server, "x-client: mallory".to_owned())).await;
    }));
    for customer in ["ada", "ben", "cleo", "dan"] {
        let header = format!("x-customer: {customer}");
        traffic.spawn(repeat(0.07, always, move || stream(streams, header.clone())));
    }
    traffic.spawn(repeat(6.0, always, move || send(configured, address(), "GET /api/users")));
    for client in 1..=4 {
        let client = Ipv4Addr::new(127, 0, 2, client);
        traffic.spawn(repeat(2.0, always, move || send(configured, client, "POST /login")));
    }

    sleep_until(at(BLOCK)).await;
    programs.block("mallory", "60s");
    sleep_until(at(OUTAGE.0)).await;
    programs.redis.kill();
    sleep_until(at(OUTAGE.1)).await;
    programs.redis.restart();
    sleep_until(at(MISTAKE)).await;
    programs.change_logins(None);
    sleep_until(at(RAISE)).await;
    programs.change_logins(Some("300/min"));
    sleep_until(end).await;
    start
}

/// Calls at random instants, `rate` times per second on average, without waiting for the ends.
async fn repeat<F>(rate: f64, (from, to): (Instant, Instant), call: impl Fn() -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    let mut next = from;
    while next < to {
        sleep_until(next).await;
        calls.spawn(call());
        while calls.try_join_next().is_some() {}
        next += Duration::from_secs_f64(-fastrand::f64().max(1e-9).ln() / rate);
    }
    sleep_until(to).await; // the last calls go on
}

/// A failed request is part of what is recorded, in the metrics of the server.
async fn get(to: SocketAddr, header: String) {
    let request = Request { to, from: Ipv4Addr::LOCALHOST, start: "GET /", header: &header };
    let _ = request.send().await;
}

async fn send(to: SocketAddr, from: Ipv4Addr, start: &str) {
    let _ = Request { to, from, start, header: "" }.send().await;
}

/// A stream, which some clients leave before its end.
async fn stream(to: SocketAddr, header: String) {
    let request = Request { to, from: Ipv4Addr::LOCALHOST, start: "GET /events", header: &header };
    let patience = if fastrand::u8(..4) == 0 { fastrand::f64() * 30.0 } else { 60.0 };
    tokio::select! {
        _ = request.send() => {}
        () = sleep(Duration::from_secs_f64(patience)) => {}
    }
}

/// Returns the address of one of many clients: each has keys of its own.
fn address() -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 1, fastrand::u8(1..))
}
