//! Faults of one server.

use std::{error::Error, fs, thread, time::Duration};

use redis::RedisResult;
use tower_ratelimit::store::RedisConfig;

use super::{Rows, decisions};
use crate::{
    cluster::free_port,
    load::{Load, Moment, Report, Settings, forgetful, now, until},
    proxy::Proxy,
    server::RedisServer,
    table::Row,
};

/// The duration of a fault that does not end by itself.
const FAULT: Duration = Duration::from_secs(3);
const SECOND: Duration = Duration::from_secs(1);
const EACH_WRITE_ON_DISK: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

/// A server, and two stores with load.
struct Trial {
    server: RedisServer,
    load: Load,
}

impl Trial {
    fn start(settings: &[&str]) -> Result<Self, Box<dyn Error>> {
        let port = free_port().to_string();
        let address = ["--port", &port, "--bind", "127.0.0.1"];
        let server = RedisServer::start_with(&[&address, settings].concat());
        Self::with(server, &format!("redis://127.0.0.1:{port}"))
    }

    fn with(server: RedisServer, url: &str) -> Result<Self, Box<dyn Error>> {
        let mut load = Load::new(Settings::default());
        for _ in 0..2 {
            load.add(&forgetful(RedisConfig::from_url(url))?);
        }
        load.until_decided(load.started)?;
        load.run_for(SECOND);
        Ok(Self { server, load })
    }

    fn command(&self, words: &[&str]) -> RedisResult<()> {
        redis::cmd(words[0]).arg(&words[1..]).exec(&mut self.server.connection())
    }

    fn persistence(&self) -> String {
        let mut command = redis::cmd("INFO");
        let info = command.arg("persistence").query(&mut self.server.connection());
        info.unwrap_or_default()
    }

    /// Writes a snapshot, and waits until it ends with this status.
    fn save(&self, what: &str, status: &str) -> Result<Moment, Box<dyn Error>> {
        self.command(&["BGSAVE"])?;
        until(what, || {
            let info = self.persistence();
            info.contains("rdb_bgsave_in_progress:0")
                && info.contains(&format!("rdb_last_bgsave_status:{status}"))
        })
    }

    /// Waits for decisions after the end of the fault, and summarizes the load. `outages` is the
    /// number that each store may report: 1 if the server gave no answers, else 0.
    fn row(self, fault: &str, end: Moment, outages: u64) -> Result<(Row, Report), Box<dyn Error>> {
        self.load.until_decided(end)?;
        self.load.run_for(SECOND);
        let seen = self.load.outages();
        let report = self.load.finish()?;
        let mut row = Row::of(fault, &report, &[]).first(report.first(end));
        row.remark(format!("{seen} outages"));
        row.expect(seen <= outages, || format!("{seen} outages, where {outages} are expected"));
        Ok((row, report))
    }
}

/// Injects a fault that one command begins and another one ends.
fn between(fault: &str, begin: &[&str], end: &[&str]) -> Rows {
    let trial = Trial::start(&[])?;
    trial.command(begin)?;
    trial.load.run_for(FAULT);
    trial.command(end)?;
    Ok(vec![trial.row(fault, now(), 0)?.0])
}

pub fn kill() -> Rows {
    let mut trial = Trial::start(&EACH_WRITE_ON_DISK)?;
    trial.server.kill();
    trial.load.run_for(FAULT);
    trial.server.restart();
    Ok(vec![trial.row("kill -9 for 3 s", now(), 1)?.0])
}

pub fn stop() -> Rows {
    let trial = Trial::start(&[])?;
    trial.server.freeze();
    trial.load.run_for(FAULT);
    trial.server.thaw();
    Ok(vec![trial.row("SIGSTOP for 3 s", now(), 1)?.0])
}

pub fn client_kill() -> Rows {
    let trial = Trial::start(&[])?;
    let (begin, mut kills) = (now(), 0_usize);
    let mut connection = trial.server.connection();
    while now() - begin < Duration::from_secs(5) {
        let kill = ["KILL", "TYPE", "normal", "SKIPME", "yes"];
        redis::cmd("CLIENT").arg(&kill).exec(&mut connection)?;
        kills += 1;
        thread::sleep(Duration::from_millis(30));
    }
    let (mut row, report) = trial.row("CLIENT KILL each 30 ms for 5 s", now(), 0)?;
    let max = kills * 2 * Settings::default().tasks;
    row.remark(format!("{kills} kills, {:.2} errors each", report.errors() as f64 / kills as f64));
    row.expect(report.errors() <= max, || "more requests failed than were under way".to_owned());
    Ok(vec![row])
}

pub fn idle_close() -> Rows {
    let port = free_port().to_string();
    let settings = ["--port", &port, "--bind", "127.0.0.1", "--timeout", "1"];
    let server = RedisServer::start_with(&settings);
    let pause = Duration::from_millis(2_500);
    let mut load = Load::new(Settings { tasks: 1, pause, ..Settings::default() });
    load.add(&forgetful(RedisConfig::from_url(&format!("redis://127.0.0.1:{port}")))?);
    load.run_for(5 * pause);
    let report = load.finish()?;
    drop(server);
    let mut row = Row::of("timeout 1, a request each 2.5 s", &report, &[]);
    row.expect(row.errors == 0, || "a request failed on a connection closed before".to_owned());
    row.first = report.first(report.records.first().map_or(now(), |record| record.start));
    Ok(vec![row])
}

/// Pauses clients for 5 s, in which the server does not answer them.
fn pause(fault: &str, kind: &str) -> Rows {
    let trial = Trial::start(&[])?;
    let begin = now();
    trial.command(&["CLIENT", "PAUSE", "5000", kind])?;
    trial.load.run_for(Duration::from_secs(5));
    let end = begin + Duration::from_secs(5);
    let (mut row, report) = trial.row(fault, end, 1)?;
    let waited = report.between(begin..end).filter(|record| record.took() > SECOND / 20).count();
    row.remark(format!("{waited} requests waited"));
    Ok(vec![row])
}

pub fn pause_write() -> Rows {
    pause("CLIENT PAUSE 5000 WRITE", "WRITE")
}

pub fn pause_all() -> Rows {
    pause("CLIENT PAUSE 5000 ALL", "ALL")
}

pub fn delay() -> Rows {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server);
    let trial = Trial::with(server, &proxy.url())?;
    let before = decisions(&trial.server);
    proxy.delay_replies(Duration::from_millis(120));
    trial.load.run_for(Duration::from_secs(10));
    proxy.delay_replies(Duration::ZERO);
    let (end, counted) = (now(), decisions(&trial.server) - before);
    let (mut row, _) = trial.row("replies 120 ms late for 10 s", end, 1)?;
    row.remark(format!("{counted} requests counted meanwhile"));
    Ok(vec![row])
}

pub fn oom() -> Rows {
    let begin = ["CONFIG", "SET", "maxmemory", "1"];
    between("OOM for 3 s", &begin, &["CONFIG", "SET", "maxmemory", "0"])
}

pub fn misconf() -> Rows {
    // With a snapshot that is due after an hour, a snapshot that fails stops the writes.
    let trial = Trial::start(&["--save", "3600 1"])?;
    let obstacle = trial.server.socket().with_file_name("dump.rdb");
    fs::create_dir(&obstacle)?;
    trial.save("a snapshot fails", "err")?;
    trial.load.run_for(FAULT);
    fs::remove_dir(&obstacle)?;
    let end = trial.save("a snapshot is written", "ok")?;
    Ok(vec![trial.row("MISCONF for 3 s", end, 0)?.0])
}

pub fn busy() -> Rows {
    let trial = Trial::start(&["--busy-reply-threshold", "100"])?;
    let mut connection = trial.server.connection();
    let script = thread::spawn(move || {
        redis::cmd("EVAL").arg(&["while true do end", "0"]).exec(&mut connection)
    });
    trial.load.run_for(FAULT);
    trial.command(&["SCRIPT", "KILL"])?;
    let _ = script.join(); // it was killed
    Ok(vec![trial.row("BUSY for 3 s", now(), 1)?.0])
}

pub fn loading() -> Rows {
    let slowly = ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"];
    let mut trial = Trial::start(&[&slowly[..], &["--rdbcompression", "no"]].concat())?;
    let fill = "for i = 1, 3000 do redis.call('SET', 'key' .. i, string.rep('v', 100)) end";
    trial.command(&["EVAL", fill, "0"])?;
    let _ = trial.command(&["SHUTDOWN", "SAVE"]); // closes the connection
    trial.server.kill();
    trial.server.restart();
    let end =
        until("the server has loaded its data", || trial.persistence().contains("\nloading:0"))?;
    Ok(vec![trial.row("LOADING for some 3 s after a restart", end, 1)?.0])
}

pub fn noreplicas() -> Rows {
    let begin = ["CONFIG", "SET", "min-replicas-to-write", "1"];
    between("NOREPLICAS for 3 s", &begin, &["CONFIG", "SET", "min-replicas-to-write", "0"])
}

pub fn readonly() -> Rows {
    let closed_port = free_port().to_string();
    between(
        "READONLY for 3 s",
        &["REPLICAOF", "127.0.0.1", &closed_port],
        &["REPLICAOF", "NO", "ONE"],
    )
}
