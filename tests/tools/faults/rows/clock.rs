//! A failover to a replica whose clock is behind or ahead.

use std::{error::Error, fs, path::PathBuf, time::Duration};

use tokio::{runtime::Handle, task::JoinSet, time::sleep};
use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore, store::RedisConfig};

use super::Rows;
use crate::{
    deployment::{Deployment, Plan},
    instance::Instance,
    load::{Moment, forgetful, now, reason, until},
    namespace::{Host, run},
    table::Row,
};

const SECOND: Duration = Duration::from_secs(1);
const OFFSET: Duration = Duration::from_secs(5);
const LIMIT: u32 = 16;
const WINDOW: Duration = Duration::from_secs(8);
/// The tolerated difference between two servers that are called every 20 ms.
const SLACK: Duration = Duration::from_millis(400);
const ALGORITHMS: [Algorithm; 3] =
    [Algorithm::token_bucket(), Algorithm::FixedWindow, Algorithm::sliding_window().buckets(4)];

pub fn behind() -> Rows {
    shifted("behind", "-5s")
}

pub fn ahead() -> Rows {
    shifted("ahead", "+5s")
}

/// The requests for one key, at most 20 ms apart.
#[derive(Default)]
struct Seen {
    admitted: Vec<Moment>,
    requests: usize,
    errors: usize,
    worst: Duration,
    reason: Option<String>,
}

async fn watch(limiter: Limiter, end: Moment) -> Seen {
    let mut seen = Seen::default();
    while now() < end {
        let start = now();
        match limiter.check("key").await {
            Ok(decision) if decision.is_allowed() => seen.admitted.push(now()),
            Ok(_) => {}
            Err(error) => {
                seen.errors += 1;
                seen.reason = Some(reason(&error));
            }
        }
        seen.requests += 1;
        seen.worst = seen.worst.max(now() - start);
        if seen.admitted.last().is_none_or(|last| *last < start) {
            sleep(Duration::from_millis(20)).await;
        }
    }
    seen
}

/// Uses up a quota on a deployment and on a server without a failover. Then it compares the nth
/// admissions of both.
fn shifted(direction: &str, offset: &str) -> Rows {
    let deployment = with_shifted_replica(direction, offset)?;
    let control = Instance::server(&Host::LOCAL, &[], &[])?;
    let of_control = forgetful(RedisConfig::from_url(&control.url()))?;
    let limiters = [limiters(&deployment.store()?)?, limiters(&of_control)?];
    let begin = now();
    limiters.iter().flatten().try_for_each(use_up)?;
    deployment.until_replicated()?;
    let first = deployment.fail_over_until_decided(|| {
        let _ = Handle::current().block_on(limiters[0][0].peek("other"));
    })?;
    let end = begin + WINDOW + OFFSET + SECOND;
    // The control runs longer, because its admissions may be later.
    let seen = watch_all(limiters, [end, end + OFFSET + SLACK]);
    let pairs = seen.chunks(2).zip(ALGORITHMS);
    let row = |(pair, algorithm): (&[Seen], Algorithm)| {
        let mut row = compared(direction, algorithm, &pair[0], &pair[1]);
        row.first = Some(first);
        row
    };
    Ok(pairs.map(row).collect())
}

/// Makes a limiter for each algorithm, once the store answers.
fn limiters(store: &RedisStore) -> Result<[Limiter; ALGORITHMS.len()], Box<dyn Error>> {
    until("the store answers", || Handle::current().block_on(store.ping()).is_ok())?;
    let quota = Quota::new(LIMIT.into(), WINDOW).burst(LIMIT.into());
    let named =
        |algorithm: Algorithm| Limiter::new(algorithm.name(), store.clone(), algorithm, quota);
    Ok(ALGORITHMS.map(named))
}

fn with_shifted_replica(direction: &str, offset: &str) -> Result<Deployment, Box<dyn Error>> {
    let environment = clock(offset)?;
    let servers = vec![(Host::LOCAL, vec![]), (Host::LOCAL, environment)];
    let deployment = Deployment::start(&Plan { servers, ..Plan::default() })?;
    check_clock(&deployment.servers[1], direction)?;
    Ok(deployment)
}

fn use_up(limiter: &Limiter) -> Result<(), Box<dyn Error>> {
    let check = || Handle::current().block_on(limiter.check("key"));
    until("the quota is used up", || check().is_ok_and(|decision| !decision.is_allowed()))?;
    Ok(())
}

/// Watches the limiters of both stores until their ends. Returns, for each algorithm, the requests
/// on the first store and those on the second one.
fn watch_all(limiters: [[Limiter; ALGORITHMS.len()]; 2], ends: [Moment; 2]) -> Vec<Seen> {
    let mut tasks = JoinSet::new();
    for (store, (limiters, end)) in limiters.into_iter().zip(ends).enumerate() {
        for (index, limiter) in limiters.into_iter().enumerate() {
            let seen = async move { ((index, store), watch(limiter, end).await) };
            tasks.spawn_on(seen, &Handle::current());
        }
    }
    let mut seen = Handle::current().block_on(tasks.join_all());
    seen.sort_by_key(|(index, _)| *index);
    seen.into_iter().map(|(_, seen)| seen).collect()
}

/// Compares admissions with those of a server without a failover. They may be up to 5 s later, and
/// up to 5 s earlier if the clock is ahead.
fn compared(direction: &str, algorithm: Algorithm, seen: &Seen, control: &Seen) -> Row {
    let mut row = Row {
        fault: format!("clock 5 s {direction} after a failover, {algorithm}"),
        requests: seen.requests,
        errors: seen.errors,
        worst: seen.worst,
        ..Row::default()
    };
    row.remark.extend(seen.reason.clone());
    let count = |seen: &Seen| seen.admitted.len();
    let earlier = if direction == "ahead" { OFFSET + SLACK } else { SLACK };
    let later = OFFSET + SLACK;
    let pairs = seen.admitted.iter().zip(&control.admitted);
    let early = pairs.clone().filter(|(at, other)| **at + earlier < **other).count()
        + count(seen).saturating_sub(count(control));
    let late = pairs.filter(|(at, other)| **at > **other + later).count();
    row.over = usize::from(early > 0);
    row.remark(format!("{} admitted", count(seen)));
    let delay = seen
        .admitted
        .iter()
        .zip(&control.admitted)
        .map(|(at, other)| at.as_secs_f64() - other.as_secs_f64());
    let (min, max) = delay.fold((f64::MAX, f64::MIN), |(a, b), time| (a.min(time), b.max(time)));
    if min <= max {
        row.remark(format!("{min:+.1} to {max:+.1} s later than without a failover"));
    }
    row.expect(early == 0, || format!("{early} requests are admitted too early"));
    row.expect(late == 0, || format!("{late} requests are admitted too late"));
    row.expect(count(seen) > 0, || "the key is not admitted again".to_owned());
    row
}

fn library() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let files = folders.map(|folder| folder.path().join("faketime/libfaketime.so.1"));
    files.chain(["/usr/lib/faketime/libfaketime.so.1".into()]).find(|file| file.exists())
}

/// Installs libfaketime if it is missing.
pub fn install() -> Result<(), Box<dyn Error>> {
    match library() {
        Some(_) => Ok(()),
        None => run("apt-get", &["install", "-qy", "faketime"]),
    }
}

/// Returns the environment in which libfaketime shifts the clock of a server.
fn clock(offset: &str) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let library = library().ok_or("libfaketime is missing; install the package faketime")?;
    // Debian's server is linked to jemalloc, which reads the clock before libfaketime is
    // initialized. The allocator of libc replaces it.
    let preload = format!("{}:libc.so.6", library.display());
    Ok([("LD_PRELOAD", &*preload), ("FAKETIME", offset), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into())
}

/// Fails if the clock of the server is not shifted by 5 s.
fn check_clock(server: &Instance, direction: &str) -> Result<(), Box<dyn Error>> {
    let (seconds, _): (u64, u64) = server.query(&["TIME"])?;
    let expected = match direction {
        "ahead" => now() + OFFSET,
        _ => now() - OFFSET,
    };
    let difference = Duration::from_secs(seconds).abs_diff(expected);
    match difference <= SECOND + SLACK {
        true => Ok(()),
        false => Err(format!("the clock of the server is not 5 s {direction}").into()),
    }
}
