//! Faults of a cluster, its nodes and its seeds.

use std::{error::Error, time::Duration};

use tokio::runtime::Handle;
use tower_ratelimit::{Algorithm, Charge, Decision, Limiter, Quota, store::RedisConfig};

use super::{Rows, decisions, fresh::Fresh};
use crate::{
    cluster::{Cluster, free_port},
    load::{Key, Load, Loss, Moment, Report, Settings, forgetful, now, until},
    namespace::{self, Namespace},
    server::RedisServer,
    table::Row,
};

const SECOND: Duration = Duration::from_secs(1);
const LAG: Duration = Duration::from_millis(500);
/// The longest time in which a store may use the address of a dead master.
const TIME_TO_LEAVE: Duration = Duration::from_secs(45);
/// A short timeout, so that a failure is detected soon.
const SETTINGS: [&str; 2] = ["--cluster-node-timeout", "1500"];

fn start(cluster: &Cluster) -> Result<Load, Box<dyn Error>> {
    start_with(cluster, Settings::default())
}

fn start_with(cluster: &Cluster, settings: Settings) -> Result<Load, Box<dyn Error>> {
    let mut load = Load::new(settings);
    for _ in 0..2 {
        load.add(&forgetful(RedisConfig::cluster(cluster.urls()))?);
    }
    load.until_decided(load.started)?;
    load.run_for(2 * SECOND);
    Ok(load)
}

/// Returns the index of the master that had the key at the start.
fn master_of(cluster: &Cluster, key: Key) -> usize {
    cluster.master_of(&format!("{{{}}}", key.name()))
}

/// Summarizes a load. The first answer is the first decision about a key of the first master.
fn row(fault: &str, cluster: &Cluster, report: &Report, end: Duration, losses: &[Loss]) -> Row {
    let mut row = Row::of(fault, report, losses)
        .first(report.first_of(end, |key| master_of(cluster, key) == 0));
    let first = losses.first().map_or(end, |loss| loss.end);
    let mut others =
        report.between(first..end).filter(|record| master_of(cluster, record.key) != 0).peekable();
    if others.peek().is_some() {
        let (mut made, mut failed) = (0, 0);
        for record in others {
            (made, failed) = (made + 1, failed + usize::from(record.is_failed()));
        }
        row.remark(format!("of other masters' keys, {failed} of {made} failed meanwhile"));
    }
    row
}

pub fn kill() -> Rows {
    let mut cluster = Cluster::start(3, true, &SETTINGS);
    let load = start(&cluster)?;
    let killed = now();
    cluster.masters[0].server.kill();
    let promoted = until("the replica is promoted", || cluster.replicas[0].is_master())?;
    load.until_decided(promoted)?;
    load.run_for(3 * SECOND);
    let report = load.finish()?;
    let losses = [killed - LAG..killed];
    Ok(vec![row("cluster: kill -9 of a master", &cluster, &report, promoted, &losses)])
}

pub fn stop() -> Rows {
    let cluster = Cluster::start(3, true, &SETTINGS);
    let load = start(&cluster)?;
    let stopped = now();
    cluster.masters[0].server.freeze();
    let promoted = until("the replica is promoted", || cluster.replicas[0].is_master())?;
    load.run_for(2 * SECOND);
    cluster.masters[0].server.thaw();
    until("the old master is a replica", || !cluster.masters[0].is_master())?;
    load.run_for(SECOND);
    let report = load.finish()?;
    let losses = [stopped - LAG..stopped];
    Ok(vec![row("cluster: SIGSTOP of a master", &cluster, &report, promoted, &losses)])
}

/// The number of stores that start with a seed that does not answer.
const FRESH: usize = 40;

/// Starts stores with three seeds, of which one does not answer.
fn start_fresh(fault: &str, cluster: &Cluster, bad: &str) -> Result<Row, Box<dyn Error>> {
    let mut row = Row { fault: format!("cluster: {fault} seed of three"), ..Row::default() };
    let seeds = [bad.to_owned(), cluster.masters[0].url(), cluster.masters[1].url()];
    let fresh = Fresh::start(FRESH, || Ok(forgetful(RedisConfig::cluster(&seeds))?))?;
    // A machine that pauses for a moment may fail one of them.
    fresh.add_to(&mut row, FRESH / 20);
    Ok(row)
}

pub fn seeds() -> Rows {
    let cluster = Cluster::start(3, true, &[]);
    let dead = format!("redis://127.0.0.1:{}", free_port());
    let port = free_port().to_string();
    let stopped = RedisServer::start_with(&["--port", &port, "--bind", "127.0.0.1"]);
    stopped.freeze();
    Ok(vec![
        start_fresh("one dead", &cluster, &dead)?,
        start_fresh("one stopped", &cluster, &format!("redis://127.0.0.1:{port}"))?,
    ])
}

pub fn seed_blackholed() -> Rows {
    let _namespace = Namespace::start()?;
    let cluster = Cluster::start(3, true, &[]);
    Ok(vec![start_fresh("one blackholed", &cluster, &namespace::blackhole())?])
}

pub fn reshard() -> Rows {
    let cluster = Cluster::start(3, false, &[]);
    let keys = Settings { group: Duration::from_secs(3_600), keys: 24, ..Settings::default() };
    let load = start_with(&cluster, Settings { limit: 300, ..keys })?;
    let begin = now();
    for number in 0..keys.keys {
        let key = format!("{{{}}}", Key { group: 0, number }.name());
        let (slot, from) = (cluster.slot(&key), cluster.master_of(&key));
        let to = (from + 1) % cluster.masters.len();
        cluster.begin_to_move(slot, from, to);
        load.run_for(SECOND / 10);
        cluster.end_moving(slot, from, to);
    }
    let end = now();
    load.until_decided(end)?;
    load.run_for(SECOND);
    let report = load.finish()?;
    let mut row =
        Row::of("cluster: 24 slots move under load", &report, &[]).first(report.first(end));
    let made = report.between(begin..end).count();
    row.expect(row.errors * 100 <= made, || format!("more than 1 % of {made} requests failed"));
    Ok(vec![row])
}

pub fn open_slot() -> Rows {
    const DECISIONS: u64 = 50;
    let cluster = Cluster::start(3, true, &[]);
    let store = forgetful(RedisConfig::cluster(cluster.urls()))?;
    let limiter =
        |name| Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_day(1_000));
    let (one, other) = (limiter("one"), limiter("other"));
    let check = |limiter: &Limiter| Handle::current().block_on(limiter.check("alice"));
    until("the key exists", || check(&one).is_ok())?;
    let (slot, from) = (cluster.slot("{alice}"), cluster.master_of("{alice}"));
    cluster.begin_to_move(slot, from, (from + 1) % cluster.masters.len());
    let commands = || -> u64 { cluster.masters.iter().map(|node| commands(&node.server)).sum() };
    let both = Charge::new(&one, "alice").also(&other);
    let decide =
        |fault: &str, attempt: &dyn Fn(u64) -> Result<Decision, tower_ratelimit::Error>| {
            let (before, mut texts) = (commands(), vec![]);
            let mut row = Row { fault: fault.to_owned(), ..Row::default() };
            for number in 0..DECISIONS {
                let start = now();
                if let Err(error) = attempt(number) {
                    texts.push(chain(&error));
                }
                row.worst = row.worst.max(now() - start);
            }
            let commands = (commands() - before) as f64 / DECISIONS as f64;
            (row.requests, row.errors) = (DECISIONS as usize, texts.len());
            row.remark(format!("{commands:.1} commands per decision"));
            row.remark.extend(texts.last().cloned());
            row.expect(commands <= 3.0, || format!("{commands:.1} commands per decision"));
            (row, texts)
        };
    let alternate = |number| check(if number % 2 == 0 { &one } else { &other });
    let (mut single, texts) = decide("cluster: slot left open, one limit", &alternate);
    single.expect(texts.is_empty(), || "decisions about one limit failed".to_owned());
    let combined = |_| Handle::current().block_on(both.check());
    let (mut several, texts) = decide("cluster: slot left open, two limits", &combined);
    // On a busy machine, an answer may come too late to name the slot.
    let is_named = texts
        .iter()
        .all(|text| text.contains(&format!("slot {slot} ")) || text.contains("no answer from"));
    several.expect(is_named, || format!("an error does not name the slot {slot}"));
    Ok(vec![single, several])
}

/// Counts the commands for decisions that a server received, including redirected and rejected
/// ones.
fn commands(server: &RedisServer) -> u64 {
    let stats = redis::cmd("INFO").arg("commandstats").query(&mut server.connection());
    let stats: String = stats.unwrap_or_default();
    let count = |line: &str| -> u64 {
        let values = line.split([':', ',']).filter_map(|pair| pair.split_once('='));
        let counts = values.filter(|(name, _)| ["calls", "rejected_calls"].contains(name));
        counts.filter_map(|(_, value)| value.parse::<u64>().ok()).sum()
    };
    let names = ["cmdstat_evalsha:", "cmdstat_eval:", "cmdstat_asking:"];
    stats.lines().filter(|line| names.iter().any(|name| line.starts_with(name))).map(count).sum()
}

/// Returns the texts of an error and its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

pub fn stranger() -> Rows {
    taken_address("cluster: a stranger at a dead master's address", "yes")
}

pub fn stranger_with_partial_coverage() -> Rows {
    taken_address("the same, partial coverage", "no")
}

/// Starts a standalone server at the address of a dead master. With full coverage, the other nodes
/// reject commands, and the slots are read again at once; otherwise, they are read again every 30
/// to 38 s.
fn taken_address(fault: &str, is_full: &str) -> Rows {
    let coverage = ["--cluster-require-full-coverage", is_full];
    let mut cluster = Cluster::start(3, true, &[SETTINGS, coverage].concat());
    let load = start(&cluster)?;
    let killed = now();
    cluster.masters[0].server.kill();
    let port = cluster.masters[0].port.to_string();
    let stranger = RedisServer::start_with(&["--port", &port, "--bind", "127.0.0.1"]);
    let promoted = until("the replica is promoted", || cluster.replicas[0].is_master())?;
    let new = &cluster.replicas[0].server;
    let (first, count, left) = watch_stranger(&load, &stranger, new, promoted);
    let is_left = now() >= left + SECOND;
    load.until_decided(left)?;
    load.run_for(SECOND);
    let report = load.finish()?;
    let mut row = Row::of(fault, &report, &[killed - LAG..left + SECOND / 10]);
    row.first = first;
    let after = left.saturating_sub(promoted).as_millis();
    row.remark(format!("{count} decisions on the stranger, until {after} ms after the promotion"));
    row.expect(is_left, || format!("the stranger is not left within {TIME_TO_LEAVE:?}"));
    row.expect(first.is_some(), || "the new master does not decide".to_owned());
    Ok(vec![row])
}

/// Waits until the stranger has not decided for a second. Returns the time until the first decision
/// of the new master, and the number and the moment of the last decisions of the stranger.
fn watch_stranger(
    load: &Load,
    stranger: &RedisServer,
    new: &RedisServer,
    promoted: Moment,
) -> (Option<Duration>, u64, Moment) {
    let mut first = None;
    let mut last = (decisions(stranger), now());
    while now() < last.1 + SECOND && now() < promoted + TIME_TO_LEAVE {
        if first.is_none() && decisions(new) > 0 {
            first = Some(now().saturating_sub(promoted));
        }
        let count = decisions(stranger);
        if count > last.0 {
            last = (count, now());
        }
        load.run_for(SECOND / 100);
    }
    (first, last.0, last.1)
}

pub fn full_coverage() -> Rows {
    coverage("cluster: a master is gone, full coverage", "yes")
}

pub fn partial_coverage() -> Rows {
    coverage("cluster: a master is gone, partial coverage", "no")
}

/// Kills a master that has no replica, and restarts it after 5 s.
fn coverage(fault: &str, is_full: &str) -> Rows {
    let disk = ["--appendonly", "yes", "--appendfsync", "always"];
    let coverage = ["--cluster-require-full-coverage", is_full];
    let mut cluster = Cluster::start(3, false, &[&SETTINGS[..], &disk, &coverage].concat());
    let load = start(&cluster)?;
    let killed = now();
    cluster.masters[0].server.kill();
    load.run_for(5 * SECOND);
    cluster.masters[0].server.restart();
    let end = until("the cluster is up", || cluster.nodes().all(|node| node.is_up()))?;
    load.until_decided(end)?;
    load.run_for(2 * SECOND);
    let report = load.finish()?;
    let loss = [killed..killed];
    let mut row = row(fault, &cluster, &report, end, &loss);
    let detected = killed + 3 * SECOND;
    let others = report.between(detected..killed + 5 * SECOND);
    let failed =
        others.filter(|record| master_of(&cluster, record.key) != 0 && record.is_failed()).count();
    if is_full == "no" {
        row.expect(failed == 0, || format!("{failed} requests for keys of other masters failed"));
    }
    Ok(vec![row])
}
