//! Faults of a master and its replicas, and of the Sentinels that watch them.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{runtime::Handle, task::JoinSet, time::sleep};
use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};

use super::{Rows, fresh::Fresh};
use crate::{
    client::Client,
    deployment::{Deployment, Plan},
    load::{Load, Moment, Settings, now, until},
    namespace::{self, Namespace},
    table::Row,
};

const SECOND: Duration = Duration::from_secs(1);
/// The longest replication lag at a promotion.
const LAG: Duration = Duration::from_millis(500);

/// A deployment, and a store with load.
struct Trial {
    deployment: Deployment,
    load: Load,
}

impl Trial {
    fn start() -> Result<Self, Box<dyn Error>> {
        let deployment = Deployment::start(&Plan::default())?;
        let store = deployment.store()?;
        Self::with(deployment, &store)
    }

    fn with(deployment: Deployment, store: &RedisStore) -> Result<Self, Box<dyn Error>> {
        let mut load = Load::new(Settings::default());
        load.add(store);
        load.until_decided(load.started)?;
        load.run_for(2 * SECOND);
        Ok(Self { deployment, load })
    }

    /// Returns the number of script calls of a server.
    fn decisions(&self, server: usize) -> Result<u64, Box<dyn Error>> {
        let mut count = None;
        until("the server answers", || {
            // A server that becomes a replica closes its connections.
            count = self.deployment.servers[server].decisions();
            count.is_some()
        })?;
        Ok(count.unwrap_or_default())
    }

    /// Waits until a server decides more than before.
    fn until_deciding(&self, server: usize, before: u64) -> Result<Moment, Box<dyn Error>> {
        let decisions = || self.deployment.servers[server].decisions();
        until("the new master decides", || decisions().is_some_and(|it| it > before))
    }
}

pub fn planned() -> Rows {
    let deployment = Deployment::start(&Plan::default())?;
    let store = deployment.store()?;
    planned_by("planned failover", Trial::with(deployment, &store)?, SECOND / 2)
}

pub fn planned_without_subscription() -> Rows {
    let deployment = Deployment::start(&Plan::default())?;
    let store = deployment.store_without_subscription()?;
    let trial = Trial::with(deployment, &store)?;
    planned_by("planned failover, no subscription", trial, 2 * SECOND)
}

/// Commands a failover. The new master decides at most `at_latest` after the announcement.
fn planned_by(fault: &str, mut trial: Trial, at_latest: Duration) -> Rows {
    let announcement = trial.deployment.announcement()?;
    let commanded = now();
    let before = [0, 1, 2].map(|it| trial.decisions(it).unwrap_or_default());
    trial.deployment.fail_over()?;
    let (new, promoted) = trial.deployment.until_promoted(&[0])?;
    let mut announced = None;
    let (mut at_announcement, mut first) = (0, None);
    until("the new master is announced, and the time to follow is over", || {
        let Some(decisions) = trial.deployment.servers[new].decisions() else { return false };
        if first.is_none() && decisions > before[new] {
            first = Some(now().saturating_sub(promoted));
        }
        if announced.is_none() {
            announced = announcement.try_recv().ok().map(|(moment, _)| moment);
            let decisions = trial.deployment.servers[0].decisions();
            at_announcement = decisions.unwrap_or(at_announcement);
        }
        announced.is_some_and(|it| now() > it + at_latest)
    })?;
    let announced = announced.unwrap_or_default();
    // Another process, which begins now. If the first one has not followed, both decide.
    let store = trial.deployment.store()?;
    trial.load.add(&store);
    trial.deployment.until_demoted(0)?;
    trial.load.until_decided(now())?;
    trial.load.run_for(SECOND);
    let on_the_old = trial.decisions(0)?.saturating_sub(at_announcement);
    let report = trial.load.finish()?;

    let losses = [commanded - LAG..announced + at_latest];
    let mut row = Row::of(fault, &report, &losses);
    row.first = first;
    row.expect(first.is_some(), || format!("the new master does not decide within {at_latest:?}"));
    row.remark(format!(
        "announced {} ms after the promotion, then {on_the_old} decisions on the old master",
        announced.saturating_sub(promoted).as_millis()
    ));
    let begin = report.records.first().map_or(commanded, |it| it.start);
    let rate = report.between(begin..commanded).count() as f64 / (commanded - begin).as_secs_f64();
    let most = (rate * at_latest.as_secs_f64()) as u64;
    row.expect(on_the_old <= most, || {
        format!("{on_the_old} decisions on the old master, more than in {at_latest:?} ({most})")
    });
    Ok(vec![row])
}

pub fn planned_ten() -> Rows {
    let trial = Trial::start()?;
    let deployment = &trial.deployment;
    let mut losses = vec![];
    // The last moment at which each server was known to have the counts of the master.
    let mut had_all = [now(); 3];
    let (mut master, mut last) = (0, now());
    for _ in 0..10 {
        for (server, had_all) in had_all.iter_mut().enumerate() {
            if server == master || deployment.is_replica_of(server, master) {
                *had_all = now();
            }
        }
        let announcement = deployment.announcement()?;
        deployment.fail_over()?;
        let (moment, port) = announcement.recv_timeout(20 * SECOND)?;
        let new = deployment.servers.iter().position(|it| it.port == port);
        let new = new.ok_or("another server was announced")?;
        trial.until_deciding(new, trial.decisions(new)?)?;
        losses.push(had_all[new] - LAG..moment + SECOND / 2);
        (master, last) = (new, moment);
    }
    trial.load.until_decided(now())?;
    trial.load.run_for(SECOND);
    let report = trial.load.finish()?;
    let mut row = Row::of("ten planned failovers", &report, &losses).first(report.first(last));
    let time = losses.last().map_or(Duration::ZERO, |it| it.end) - losses[0].start;
    row.remark(format!("in {:.0} s, of {} keys", time.as_secs_f64(), report.keys()));
    Ok(vec![row])
}

/// Commands a failover, which loses the reservations of requests that wait for a bucket.
pub fn planned_waiting() -> Rows {
    const RATE: u32 = 20;
    const WAITING: u64 = 40;
    let deployment = Deployment::start(&Plan::default())?;
    let store = deployment.store()?;
    let quota = Quota::per_second(RATE).burst(1);
    let limiter = Limiter::new(store, Algorithm::token_bucket(), quota);
    let is_over = Arc::new(AtomicBool::new(false));
    let counts = [(); 3].map(|()| Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    let begin = now();
    for _ in 0..WAITING {
        let (limiter, is_over) = (limiter.clone(), is_over.clone());
        let [requests, admitted, failed] = counts.clone();
        tasks.spawn_on(
            async move {
                while !is_over.load(SeqCst) {
                    requests.fetch_add(1, SeqCst);
                    match limiter.try_acquire("key", 1, 5 * SECOND).await {
                        Ok(decision) if decision.is_allowed() => {
                            admitted.fetch_add(1, SeqCst);
                        }
                        Ok(_) => sleep(Duration::from_millis(20)).await,
                        Err(_) => {
                            failed.fetch_add(1, SeqCst);
                            sleep(Duration::from_millis(20)).await;
                        }
                    }
                }
            },
            &Handle::current(),
        );
    }
    let [requests, admitted, failed] = &counts;
    until("all wait", || admitted.load(SeqCst) > WAITING)?;
    deployment.fail_over()?;
    let (new, promoted) = deployment.until_promoted(&[0])?;
    let decides = || deployment.servers[new].decisions().is_some_and(|it| it > 0);
    let first = until("the new master decides", decides)?;
    let since = admitted.load(SeqCst);
    until("all wait again", || admitted.load(SeqCst) > since + 2 * WAITING)?;
    let (end, count) = (now(), admitted.load(SeqCst));
    is_over.store(true, SeqCst);
    Handle::current().block_on(async { while tasks.join_next().await.is_some() {} });

    let allowed = ((end - begin).as_secs_f64() * f64::from(RATE)) as u64 + 1;
    let excess = count.saturating_sub(allowed);
    let mut row = Row {
        fault: "planned failover, 40 requests wait, burst 1".to_owned(),
        requests: requests.load(SeqCst) as usize,
        errors: failed.load(SeqCst) as usize,
        over: usize::from(excess > 0),
        first: Some(first.saturating_sub(promoted)),
        ..Row::default()
    };
    row.remark(format!("{count} admitted where {allowed} are allowed: {excess} more"));
    // The burst, the requests that waited, and what the old master admitted until it was left.
    let most = 1 + WAITING + u64::from(2 * RATE);
    row.expect(excess <= most, || format!("{excess} more than the quota"));
    Ok(vec![row])
}

pub fn master_kill() -> Rows {
    let mut trial = Trial::start()?;
    let announcement = trial.deployment.announcement()?;
    let killed = now();
    trial.deployment.servers[0].kill();
    let (new, promoted) = trial.deployment.until_promoted(&[0])?;
    trial.until_deciding(new, 0)?;
    let announced = announcement.recv_timeout(20 * SECOND)?;
    let store = trial.deployment.store()?;
    trial.load.add(&store);
    trial.load.until_decided(now())?;
    trial.load.run_for(SECOND);
    trial.deployment.servers[0].restart()?;
    trial.deployment.until_demoted(0)?;
    trial.load.run_for(SECOND);
    let report = trial.load.finish()?;
    let row = Row::of("kill -9 of the master", &report, &[killed - LAG..killed]);
    let mut row = row.first(report.first(promoted));
    row.remark(after(promoted, announced));
    Ok(vec![row])
}

/// Describes the time of an announcement.
fn after(promoted: Moment, (announced, _): (Moment, u16)) -> String {
    let time = announced.saturating_sub(promoted).as_millis();
    format!("announced {time} ms after the promotion")
}

pub fn master_stop() -> Rows {
    let mut trial = Trial::start()?;
    let announcement = trial.deployment.announcement()?;
    let stopped = now();
    trial.deployment.servers[0].stop()?;
    let (new, promoted) = trial.deployment.until_promoted(&[0])?;
    trial.until_deciding(new, 0)?;
    let announced = announcement.recv_timeout(20 * SECOND)?;
    let store = trial.deployment.store()?;
    trial.load.add(&store);
    trial.load.until_decided(now())?;
    trial.load.run_for(SECOND);
    let before = trial.decisions(new)?;
    trial.deployment.servers[0].resume()?;
    trial.deployment.until_demoted(0)?;
    trial.load.run_for(SECOND);
    let is_deciding = trial.decisions(new)? > before;
    let report = trial.load.finish()?;
    let row = Row::of("SIGSTOP of the master", &report, &[stopped - LAG..stopped]);
    let mut row = row.first(report.first(promoted));
    row.remark(after(promoted, announced));
    row.expect(is_deciding, || "the new master is left".to_owned());
    Ok(vec![row])
}

pub fn master_loading() -> Rows {
    // About 10 s for the keys below, in which it answers that it loads.
    let settings = [
        "--key-load-delay",
        "1000",
        "--loading-process-events-interval-bytes",
        "1024",
        "--rdbcompression",
        "no",
    ];
    let deployment = Deployment::start(&Plan { settings: &settings, ..Plan::default() })?;
    let store = deployment.store()?;
    let mut trial = Trial::with(deployment, &store)?;
    let fill = "for i = 1, 10000 do redis.call('SET', 'key' .. i, string.rep('v', 100)) end";
    let master = &trial.deployment.servers[0];
    master.ask::<()>(&["EVAL", fill, "0"])?;
    master.ask::<()>(&["SAVE"])?;
    let announcement = trial.deployment.announcement()?;
    let killed = now();
    trial.deployment.servers[0].kill();
    trial.deployment.servers[0].restart()?;
    trial.deployment.fail_over()?;
    let (new, promoted) = trial.deployment.until_promoted(&[0])?;
    let announced = announcement.recv_timeout(20 * SECOND)?;
    trial.until_deciding(new, 0)?;
    let is_loading = trial.deployment.servers[0].info("persistence", "\nloading:1");
    trial.load.run_for(2 * SECOND);
    let report = trial.load.finish()?;
    let losses = [killed - LAG..killed];
    let row = Row::of("LOADING of a restarted master, another promoted", &report, &losses);
    let mut row = row.first(report.first(promoted));
    row.remark(after(promoted, announced));
    row.expect(is_loading, || "the old master was waited for until it had loaded".to_owned());
    Ok(vec![row])
}

pub fn master_cut_off() -> Rows {
    cut_off("master cut off with a Sentinel and a client", &[], None)
}

pub fn master_cut_off_with_min_replicas() -> Rows {
    let settings = ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"];
    // Redis compares the lag, in whole seconds, once a second.
    cut_off("the same, min-replicas-to-write 1", &settings, Some(4 * SECOND))
}

/// Cuts off the master for 8 s, together with a Sentinel and a client. The counts of this client
/// are lost until the demotion, or for `lost_for` after the cut.
fn cut_off(fault: &str, settings: &[&str], lost_for: Option<Duration>) -> Rows {
    let namespace = Namespace::start()?;
    let (inside, outside) = (namespace.place(), namespace::outside());
    let servers = [&inside, &outside, &outside].map(|it| (it.clone(), vec![]));
    let sentinels = [inside.clone(), outside.clone(), outside];
    let plan = Plan { servers: servers.into(), sentinels, settings };
    let deployment = Deployment::start(&plan)?;
    let store = deployment.store()?;
    let mut load = Load::new(Settings::default());
    let client = Client::start(&inside, load.started, &deployment.sentinel_urls())?;
    load.add(&store);
    load.until_decided(load.started)?;
    load.run_for(2 * SECOND);

    let announcement = deployment.announcement()?;
    let cut = now();
    namespace.cut()?;
    let (_, promoted) = deployment.until_promoted(&[0])?;
    let announced = announcement.recv_timeout(20 * SECOND)?;
    load.until_decided(promoted)?;
    load.run_for((cut + 8 * SECOND).saturating_sub(now()));
    namespace.heal()?;
    let healed = now();
    let demoted = deployment.until_demoted(0)?;
    load.run_for(3 * SECOND);
    let of_client = client.finish()?;
    let mut report = load.finish()?;
    let first = report.first(promoted);
    report.records.extend(of_client.iter().cloned());
    report.records.sort_by_key(|it| it.end);

    let lost_until = lost_for.map_or(demoted, |it| cut + it);
    let mut row = Row::of(fault, &report, &[cut - LAG..lost_until]).first(first);
    let admitted = of_client.iter().filter(|it| {
        it.outcome == crate::load::Outcome::Admitted && (cut..healed).contains(&it.end)
    });
    row.remark(after(promoted, announced));
    row.remark(format!(
        "of {} keys; the client that was cut off was admitted {} times, and decided again {} ms \
         after the demotion",
        report.keys(),
        admitted.count(),
        of_client
            .iter()
            .find(|it| it.start >= demoted && !it.is_failed())
            .map_or("never".to_owned(), |it| (it.end - demoted).as_millis().to_string()),
    ));
    let (most, limit) = (report.most_admitted(), Settings::default().limit);
    row.expect(most <= 2 * limit, || format!("a key was admitted {most} times of {limit}"));
    row.expect(of_client.iter().any(|it| it.start >= demoted && !it.is_failed()), || {
        "the client that was cut off does not come back".to_owned()
    });
    Ok(vec![row])
}

pub fn sentinel_blackholed() -> Rows {
    let _namespace = Namespace::start()?;
    let deployment = Deployment::start(&Plan::default())?;
    let mut urls = deployment.sentinel_urls();
    urls[0] = namespace::blackhole();
    first_sentinel("blackholed Sentinel, first in the list", &deployment, &urls)
}

pub fn sentinel_dead() -> Rows {
    let mut deployment = Deployment::start(&Plan::default())?;
    deployment.sentinels[0].kill();
    let urls = deployment.sentinel_urls();
    first_sentinel("dead Sentinel, first in the list", &deployment, &urls)
}

pub fn sentinel_stopped() -> Rows {
    let deployment = Deployment::start(&Plan::default())?;
    deployment.sentinels[0].stop()?;
    let urls = deployment.sentinel_urls();
    first_sentinel("stopped Sentinel, first in the list", &deployment, &urls)
}

/// Pings and decides with new stores, and closes the connections of another store five times.
fn first_sentinel(fault: &str, deployment: &Deployment, urls: &[String]) -> Rows {
    const STORES: usize = 6;
    const KILLS: usize = 5;
    let store = || deployment.store_by(urls.to_vec());
    let fresh = Fresh::start(STORES, store)?;

    let mut load = Load::new(Settings::default());
    load.add(&store()?);
    load.until_decided(load.started)?;
    load.run_for(SECOND);
    let mut last = now();
    for _ in 0..KILLS {
        last = now();
        deployment.servers[0].ask::<i64>(&["CLIENT", "KILL", "TYPE", "normal"])?;
        load.run_for(SECOND);
    }
    load.until_decided(last)?;
    let report = load.finish()?;
    let mut row = Row::of(fault, &report, &[]).first(report.first(last));
    fresh.add_to(&mut row, 0);
    let most = KILLS * Settings::default().tasks;
    row.expect(report.errors() <= most, || {
        format!("{} requests failed in {KILLS} new connections", report.errors())
    });
    Ok(vec![row])
}
