//! A master with two replicas, and three Sentinels that watch them, on free ports.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

use super::{
    cluster::{free_port, until},
    server::{RedisServer, program},
};

pub const NAME: &str = "limits";

pub struct Watched {
    /// The master comes first, in the beginning.
    pub servers: Vec<(RedisServer, u16)>,
    ports: [u16; 3],
    sentinels: Vec<Sentinel>,
    password: Option<&'static str>,
}

struct Sentinel {
    process: Child,
    _folder: TempDir,
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.process.kill().expect("the Sentinel runs");
        self.process.wait().expect("the Sentinel ends");
    }
}

impl Watched {
    /// Without the Sentinels, which [`watch`](Watched::watch) starts.
    pub fn start(password: Option<&'static str>) -> Self {
        let mut servers = vec![];
        let mut master = None;
        for _ in 0..3 {
            let port = free_port();
            let text = port.to_string();
            let mut settings =
                vec!["--port", &text, "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"];
            if let Some(password) = password {
                settings.extend(["--requirepass", password, "--masterauth", password]);
            }
            let master = master.get_or_insert(text.clone());
            if *master != text {
                settings.extend(["--replicaof", "127.0.0.1", master]);
            }
            servers.push((RedisServer::start_with(&settings), port));
        }
        let ports = [free_port(), free_port(), free_port()];
        Self { servers, ports, sentinels: vec![], password }
    }

    pub fn watch(&mut self) {
        let master = self.servers[0].1;
        until("the replicas have all", || {
            self.info(0).contains("connected_slaves:2")
                && (1..3).all(|it| self.info(it).contains("master_link_status:up"))
        });
        let auth = self.password.map(|it| format!("sentinel auth-pass {NAME} {it}\n"));
        for port in self.ports {
            let folder = tempfile::tempdir().expect("a folder for the Sentinel");
            let settings = folder.path().join("sentinel.conf");
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\n\
                 sentinel monitor {NAME} 127.0.0.1 {master} 2\n\
                 sentinel down-after-milliseconds {NAME} 1000\n\
                 sentinel failover-timeout {NAME} 5000\n{}",
                folder.path().display(),
                auth.as_deref().unwrap_or_default(),
            );
            fs::write(&settings, text).expect("settings of the Sentinel");
            let process = Command::new(program())
                .arg(settings)
                .arg("--sentinel")
                .stdout(Stdio::null())
                .spawn()
                .expect("the server runs as a Sentinel");
            self.sentinels.push(Sentinel { process, _folder: folder });
        }
        until("the Sentinels know all", || {
            self.ports.iter().all(|&port| {
                let told = ask_sentinel(port, "MASTER").unwrap_or_default();
                let is = |name: &str, value: &str| {
                    told.chunks(2).any(|it| it[0] == name && it[1] == value)
                };
                is("num-slaves", "2") && is("num-other-sentinels", "2") && is("flags", "master")
            })
        });
    }

    pub fn sentinel_urls(&self) -> [String; 3] {
        self.ports.map(|port| format!("redis://127.0.0.1:{port}"))
    }

    pub fn master_url(&self) -> String {
        let password = self.password.map(|it| format!(":{it}@"));
        format!("redis://{}{NAME}", password.unwrap_or_default())
    }

    /// The port of the master that a Sentinel names.
    pub fn master(&self) -> Option<u16> {
        let told = ask_sentinel(self.ports[0], "GET-MASTER-ADDR-BY-NAME").ok()?;
        told.get(1)?.parse().ok()
    }

    /// Whether the replicas have all that the master has, in the beginning.
    pub fn is_replicated(&self) -> bool {
        let info = self.info(0);
        let offset = info.lines().find_map(|it| it.strip_prefix("master_repl_offset:"));
        let Some(offset) = offset else { return false };
        let offset = format!("offset={offset},");
        info.lines().filter(|it| it.starts_with("slave")).all(|it| it.contains(&offset))
    }

    fn info(&self, place: usize) -> String {
        // A Sentinel that makes it a replica closes its connections.
        self.ask(place, &["INFO", "replication"]).unwrap_or_default()
    }

    pub fn is_master(&self, place: usize) -> bool {
        !self.info(place).contains("role:slave")
    }

    fn ask<T: redis::FromRedisValue>(&self, place: usize, words: &[&str]) -> redis::RedisResult<T> {
        let client = redis::Client::open(self.servers[place].0.url()).unwrap();
        let info = client.get_connection_info().clone();
        let settings = info.redis_settings().clone();
        let settings = match self.password {
            Some(password) => settings.set_password(password),
            None => settings,
        };
        let client = redis::Client::open(info.set_redis_settings(settings)).unwrap();
        let mut connection = client.get_connection()?;
        redis::cmd(words[0]).arg(&words[1..]).query(&mut connection)
    }
}

fn ask_sentinel(port: u16, question: &str) -> redis::RedisResult<Vec<String>> {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}"))?;
    redis::cmd("SENTINEL").arg(question).arg(NAME).query(&mut client.get_connection()?)
}
