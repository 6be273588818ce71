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
    instance::Instance,
    load::{Load, Moment, Outcome, Record, Report, Settings, now, until},
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
        until("the new master decides", || decisions().is_some_and(|count| count > before))
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

/// The decisions around a failover and its announcement.
struct Followed {
    commanded: Moment,
    promoted: Moment,
    announced: Moment,
    /// The time from the promotion to the first decision of the new master.
    first: Option<Duration>,
    /// The decisions of the old master until the announcement.
    at_announcement: u64,
}

/// Commands a failover, and waits until `at_latest` after its announcement.
fn follow(trial: &Trial, at_latest: Duration) -> Result<Followed, Box<dyn Error>> {
    let announcement = trial.deployment.announcement()?;
    let commanded = now();
    let before = [0, 1, 2].map(|server| trial.decisions(server).unwrap_or_default());
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
        announced.is_some_and(|announced| now() > announced + at_latest)
    })?;
    let announced = announced.unwrap_or_default();
    Ok(Followed { commanded, promoted, announced, first, at_announcement })
}

/// Commands a failover. The new master decides at most `at_latest` after the announcement.
fn planned_by(fault: &str, mut trial: Trial, at_latest: Duration) -> Rows {
    let followed = follow(&trial, at_latest)?;
    let Followed { commanded, promoted, announced, first, at_announcement } = followed;
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
    let begin = report.records.first().map_or(commanded, |record| record.start);
    let rate = report.between(begin..commanded).count() as f64 / (commanded - begin).as_secs_f64();
    let max = (rate * at_latest.as_secs_f64()) as u64;
    row.expect(on_the_old <= max, || {
        format!("{on_the_old} decisions on the old master, more than in {at_latest:?} ({max})")
    });
    Ok(vec![row])
}

pub fn planned_ten() -> Rows {
    let trial = Trial::start()?;
    let mut losses = vec![];
    // The last moment at which each server was known to have the counts of the master.
    let mut had_all = [now(); 3];
    let (mut master, mut last) = (0, now());
    for _ in 0..10 {
        for (server, had_all) in had_all.iter_mut().enumerate() {
            if server == master || trial.deployment.is_replica_of(server, master) {
                *had_all = now();
            }
        }
        let (new, moment) = announced_failover(&trial)?;
        losses.push(had_all[new] - LAG..moment + SECOND / 2);
        (master, last) = (new, moment);
    }
    trial.load.until_decided(now())?;
    trial.load.run_for(SECOND);
    let report = trial.load.finish()?;
    let mut row = Row::of("ten planned failovers", &report, &losses).first(report.first(last));
    let time = losses.last().map_or(Duration::ZERO, |loss| loss.end) - losses[0].start;
    row.remark(format!("in {:.0} s, of {} keys", time.as_secs_f64(), report.keys()));
    Ok(vec![row])
}

/// Commands a failover, and waits for decisions of the new master. Returns its index, and the
/// moment of the announcement.
fn announced_failover(trial: &Trial) -> Result<(usize, Moment), Box<dyn Error>> {
    let announcement = trial.deployment.announcement()?;
    trial.deployment.fail_over()?;
    let (moment, port) = announcement.recv_timeout(20 * SECOND)?;
    let new = trial.deployment.servers.iter().position(|server| server.port == port);
    let new = new.ok_or("another server was announced")?;
    trial.until_deciding(new, trial.decisions(new)?)?;
    Ok((new, moment))
}

/// The results of requests that wait.
#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    admitted: AtomicU64,
    failed: AtomicU64,
    is_over: AtomicBool,
}

impl Counts {
    /// Sends waiting requests, one after the other.
    async fn send(self: Arc<Self>, limiter: Limiter) {
        while !self.is_over.load(SeqCst) {
            self.requests.fetch_add(1, SeqCst);
            match limiter.try_acquire("key", 1, 5 * SECOND).await {
                Ok(decision) if decision.is_allowed() => {
                    self.admitted.fetch_add(1, SeqCst);
                    continue;
                }
                Ok(_) => {}
                Err(_) => {
                    self.failed.fetch_add(1, SeqCst);
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn admitted(&self) -> u64 {
        self.admitted.load(SeqCst)
    }
}

/// Commands a failover, which loses the reservations of requests that wait for a bucket.
pub fn planned_waiting() -> Rows {
    const RATE: u32 = 20;
    const WAITING: u64 = 40;
    let deployment = Deployment::start(&Plan::default())?;
    let store = deployment.store()?;
    let quota = Quota::per_second(RATE.into()).burst(1);
    let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
    let counts = Arc::new(Counts::default());
    let mut tasks = JoinSet::new();
    let begin = now();
    for _ in 0..WAITING {
        tasks.spawn_on(counts.clone().send(limiter.clone()), &Handle::current());
    }
    until("all requests wait", || counts.admitted() > WAITING)?;
    let first = deployment.fail_over_until_decided(|| {})?;
    let since = counts.admitted();
    until("all requests wait again", || counts.admitted() > since + 2 * WAITING)?;
    let (end, count) = (now(), counts.admitted());
    counts.is_over.store(true, SeqCst);
    Handle::current().block_on(tasks.join_all());

    let allowed = ((end - begin).as_secs_f64() * f64::from(RATE)) as u64 + 1;
    let excess = count.saturating_sub(allowed);
    let mut row = Row {
        fault: "planned failover, 40 requests wait, burst 1".to_owned(),
        requests: counts.requests.load(SeqCst) as usize,
        errors: counts.failed.load(SeqCst) as usize,
        over: usize::from(excess > 0),
        first: Some(first),
        ..Row::default()
    };
    row.remark(format!("{count} admitted where {allowed} are allowed: {excess} more"));
    // The burst, the requests that waited, and the requests that the old master admitted until the
    // store left it.
    let max = 1 + WAITING + u64::from(2 * RATE);
    row.expect(excess <= max, || format!("{excess} more than the quota"));
    Ok(vec![row])
}

/// A trial whose master has failed and was replaced.
struct Replaced {
    trial: Trial,
    failed: Moment,
    /// The index of the new master.
    new: usize,
    promoted: Moment,
    announced: (Moment, u16),
}

impl Replaced {
    /// Makes the master fail. Waits until the new one decides for this process, and for another one
    /// that begins then.
    fn after(
        fail: impl FnOnce(&mut Instance) -> Result<(), Box<dyn Error>>,
    ) -> Result<Self, Box<dyn Error>> {
        let mut trial = Trial::start()?;
        let announcement = trial.deployment.announcement()?;
        let failed = now();
        fail(&mut trial.deployment.servers[0])?;
        let (new, promoted) = trial.deployment.until_promoted(&[0])?;
        trial.until_deciding(new, 0)?;
        let announced = announcement.recv_timeout(20 * SECOND)?;
        let store = trial.deployment.store()?;
        trial.load.add(&store);
        trial.load.until_decided(now())?;
        trial.load.run_for(SECOND);
        Ok(Self { trial, failed, new, promoted, announced })
    }

    /// Waits until the old master is a replica.
    fn until_demoted(&self) -> Result<(), Box<dyn Error>> {
        self.trial.deployment.until_demoted(0)?;
        self.trial.load.run_for(SECOND);
        Ok(())
    }

    fn row(self, fault: &str) -> Result<Row, Box<dyn Error>> {
        let report = self.trial.load.finish()?;
        let losses = [self.failed - LAG..self.failed];
        let mut row = Row::of(fault, &report, &losses).first(report.first(self.promoted));
        row.remark(after(self.promoted, self.announced));
        Ok(row)
    }
}

pub fn master_kill() -> Rows {
    let mut replaced = Replaced::after(|master| {
        master.kill();
        Ok(())
    })?;
    replaced.trial.deployment.servers[0].restart()?;
    replaced.until_demoted()?;
    Ok(vec![replaced.row("kill -9 of the master")?])
}

/// Describes the time of an announcement.
fn after(promoted: Moment, (announced, _): (Moment, u16)) -> String {
    let time = announced.saturating_sub(promoted).as_millis();
    format!("announced {time} ms after the promotion")
}

pub fn master_stop() -> Rows {
    let replaced = Replaced::after(|master| master.stop())?;
    let (trial, new) = (&replaced.trial, replaced.new);
    let before = trial.decisions(new)?;
    trial.deployment.servers[0].resume()?;
    replaced.until_demoted()?;
    let is_deciding = trial.decisions(new)? > before;
    let mut row = replaced.row("SIGSTOP of the master")?;
    row.expect(is_deciding, || "the new master is left".to_owned());
    Ok(vec![row])
}

/// Starts a trial whose master takes about 10 s to load its data, and replies with LOADING
/// meanwhile.
fn slow_to_load() -> Result<Trial, Box<dyn Error>> {
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
    let trial = Trial::with(deployment, &store)?;
    let fill = "for i = 1, 10000 do redis.call('SET', 'key' .. i, string.rep('v', 100)) end";
    let master = &trial.deployment.servers[0];
    master.query::<()>(&["EVAL", fill, "0"])?;
    master.query::<()>(&["SAVE"])?;
    Ok(trial)
}

pub fn master_loading() -> Rows {
    let mut trial = slow_to_load()?;
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
    row.expect(is_loading, || "the store waited until the old master had loaded".to_owned());
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

/// The moments of a cut.
struct Cut {
    begin: Moment,
    promoted: Moment,
    announced: (Moment, u16),
    healed: Moment,
    demoted: Moment,
}

/// Cuts off the master for 8 s, together with a Sentinel and a client. The counts of this client
/// are lost until the demotion, or for `lost_for` after the cut.
fn cut_off(fault: &str, settings: &[&str], lost_for: Option<Duration>) -> Rows {
    let namespace = Namespace::start()?;
    let (inside, outside) = (namespace.host(), namespace::outside());
    let servers = [&inside, &outside, &outside].map(|host| (host.clone(), vec![]));
    let sentinels = [inside.clone(), outside.clone(), outside];
    let plan = Plan { servers: servers.into(), sentinels, settings };
    let deployment = Deployment::start(&plan)?;
    let store = deployment.store()?;
    let mut load = Load::new(Settings::default());
    let client = Client::start(&inside, load.started, &deployment.sentinel_urls())?;
    load.add(&store);
    load.until_decided(load.started)?;
    load.run_for(2 * SECOND);

    let cut = cut_and_heal(&namespace, &deployment, &load)?;
    let of_client = client.finish()?;
    let lost_until = lost_for.map_or(cut.demoted, |time| cut.begin + time);
    Ok(vec![cut_off_row(fault, load.finish()?, &cut, &of_client, lost_until)])
}

fn cut_and_heal(
    namespace: &Namespace,
    deployment: &Deployment,
    load: &Load,
) -> Result<Cut, Box<dyn Error>> {
    let announcement = deployment.announcement()?;
    let begin = now();
    namespace.cut()?;
    let (_, promoted) = deployment.until_promoted(&[0])?;
    let announced = announcement.recv_timeout(20 * SECOND)?;
    load.until_decided(promoted)?;
    load.run_for((begin + 8 * SECOND).saturating_sub(now()));
    namespace.heal()?;
    let healed = now();
    let demoted = deployment.until_demoted(0)?;
    load.run_for(3 * SECOND);
    Ok(Cut { begin, promoted, announced, healed, demoted })
}

/// Summarizes the requests of all clients. Those `of_client` are the requests of the client that
/// was cut off.
fn cut_off_row(
    fault: &str,
    mut report: Report,
    cut: &Cut,
    of_client: &[Record],
    lost_until: Moment,
) -> Row {
    let Cut { begin, promoted, announced, healed, demoted } = cut;
    let first = report.first(*promoted);
    report.records.extend(of_client.iter().cloned());
    report.records.sort_by_key(|record| record.end);

    let mut row = Row::of(fault, &report, &[*begin - LAG..lost_until]).first(first);
    let admitted = of_client.iter().filter(|record| {
        record.outcome == Outcome::Admitted && (*begin..*healed).contains(&record.end)
    });
    let back = of_client.iter().find(|record| record.start >= *demoted && !record.is_failed());
    row.remark(after(*promoted, *announced));
    row.remark(format!(
        "of {} keys; the client that was cut off was admitted {} times, and decided again {} ms \
         after the demotion",
        report.keys(),
        admitted.count(),
        back.map_or("never".to_owned(), |record| (record.end - *demoted).as_millis().to_string()),
    ));
    let (max, limit) = (report.max_admitted(), Settings::default().limit);
    row.expect(max <= 2 * limit, || format!("a key was admitted {max} times of {limit}"));
    row.expect(back.is_some(), || "the client that was cut off does not decide again".to_owned());
    row
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
        deployment.servers[0].query::<i64>(&["CLIENT", "KILL", "TYPE", "normal"])?;
        load.run_for(SECOND);
    }
    load.until_decided(last)?;
    let report = load.finish()?;
    let mut row = Row::of(fault, &report, &[]).first(report.first(last));
    fresh.add_to(&mut row, 0);
    let max = KILLS * Settings::default().tasks;
    row.expect(report.errors() <= max, || {
        format!("{} requests failed in {KILLS} new connections", report.errors())
    });
    Ok(vec![row])
}
