//! A master with two replicas, and three Sentinels that watch them, on free ports.

pub mod fake;

use std::{
    fs,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
};

use tempfile::TempDir;

use super::{
    certificates::Certificates,
    cluster::{free_port, until},
    permissions,
    server::{RedisServer, program},
};

pub const NAME: &str = "limits";

/// Users of the Sentinels with the password `secret`: the documented one, and one that may not
/// subscribe.
fn users() -> String {
    let listener = permissions("listener")[2..].join(" ");
    let reader = listener.replace("&+switch-master ", "").replace(" +subscribe", "");
    format!("user listener {listener}\nuser reader {reader}\n")
}

pub struct Watched {
    /// The first one is the master at the start.
    pub servers: Vec<(RedisServer, u16)>,
    ports: [u16; 3],
    sentinels: Vec<Sentinel>,
    password: Option<&'static str>,
    /// The ports of the Sentinels for TLS, and their settings for it.
    tls: Option<([u16; 3], String)>,
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
    /// Starts the servers; [`watch`](Watched::watch) starts the Sentinels.
    pub fn start(password: Option<&'static str>) -> Self {
        Self::start_with(password, &[])
    }

    /// Starts servers that use only TLS, except for the commands of the test.
    pub fn start_with_tls(certificates: &Certificates) -> Self {
        let (mut settings, mut tls) = (vec!["--port".to_owned(), "0".to_owned()], String::new());
        for (name, value) in certificates.settings() {
            tls.push_str(&format!("{name} {value}\n"));
            settings.extend([format!("--{name}"), value]);
        }
        let settings: Vec<_> = settings.iter().map(|setting| &**setting).collect();
        let watched = Self::start_at("--tls-port", None, &settings);
        Self { tls: Some(([free_port(), free_port(), free_port()], tls)), ..watched }
    }

    /// Starts servers with these settings.
    pub fn start_with(password: Option<&'static str>, more: &[&str]) -> Self {
        Self::start_at("--port", password, more)
    }

    fn start_at(port_setting: &str, password: Option<&'static str>, more: &[&str]) -> Self {
        let mut servers = vec![];
        let mut master = None;
        for _ in 0..3 {
            let port = free_port();
            let text = port.to_string();
            let mut settings =
                vec![port_setting, &text, "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"];
            settings.extend(more);
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
        Self { servers, ports, sentinels: vec![], password, tls: None }
    }

    pub fn watch(&mut self) {
        let master = self.servers[0].1;
        until("the replicas have all data", || {
            self.info(0).contains("connected_slaves:2")
                && (1..3).all(|replica| self.info(replica).contains("master_link_status:up"))
        });
        let auth = self.password.map(|password| format!("sentinel auth-pass {NAME} {password}\n"));
        for (index, port) in self.ports.into_iter().enumerate() {
            let tls = self.tls.as_ref();
            let tls = tls.map(|(ports, settings)| format!("tls-port {}\n{settings}", ports[index]));
            let folder = tempfile::tempdir().expect("a folder for the Sentinel");
            let settings = folder.path().join("sentinel.conf");
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\n\
                 sentinel monitor {NAME} 127.0.0.1 {master} 2\n\
                 sentinel down-after-milliseconds {NAME} 1000\n\
                 sentinel failover-timeout {NAME} 5000\n{}{}{}",
                folder.path().display(),
                users(),
                auth.as_deref().unwrap_or_default(),
                tls.unwrap_or_default(),
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
        until("the Sentinels know all servers", || {
            self.ports.iter().all(|&port| {
                let reply = sentinel(port, "MASTER").unwrap_or_default();
                let is = |name: &str, value: &str| {
                    reply.chunks(2).any(|pair| pair[0] == name && pair[1] == value)
                };
                is("num-slaves", "2") && is("num-other-sentinels", "2") && is("flags", "master")
            })
        });
    }

    pub fn sentinel_urls(&self) -> [String; 3] {
        self.ports.map(|port| format!("redis://127.0.0.1:{port}"))
    }

    pub fn tls_sentinel_urls(&self) -> [String; 3] {
        let (ports, _) = self.tls.as_ref().expect("the Sentinels use TLS");
        ports.map(|port| format!("rediss://localhost:{port}"))
    }

    /// The URLs of the Sentinels for a user.
    pub fn sentinel_urls_as(&self, user: &str) -> [String; 3] {
        self.ports.map(|port| format!("redis://{user}:secret@127.0.0.1:{port}"))
    }

    pub fn master_url(&self) -> String {
        let password = self.password.map(|password| format!(":{password}@"));
        format!("redis://{}{NAME}", password.unwrap_or_default())
    }

    /// The port of the master that a Sentinel names.
    pub fn master(&self) -> Option<u16> {
        let reply = sentinel(self.ports[0], "GET-MASTER-ADDR-BY-NAME").ok()?;
        reply.get(1)?.parse().ok()
    }

    /// Promotes a replica.
    pub fn fail_over(&self) {
        assert!(self.try_fail_over(), "a replica can be promoted");
    }

    /// Promotes a replica, if one can be promoted.
    pub fn try_fail_over(&self) -> bool {
        let reply: redis::RedisResult<redis::Value> =
            query_sentinel(self.ports[0], &["SENTINEL", "FAILOVER", NAME]);
        reply.is_ok()
    }

    /// Ends the connections to the Sentinels that are subscribed to their announcements. Returns
    /// their number.
    pub fn kill_subscriptions(&self) -> usize {
        let kill = |port| -> usize {
            query_sentinel(port, &["CLIENT", "KILL", "TYPE", "pubsub"]).expect("the Sentinel runs")
        };
        self.ports.map(kill).iter().sum()
    }

    /// The number of connections that are subscribed to the announcements of each Sentinel.
    pub fn subscriptions(&self) -> [usize; 3] {
        self.ports.map(|port| {
            let list: redis::RedisResult<String> =
                query_sentinel(port, &["CLIENT", "LIST", "TYPE", "pubsub"]);
            list.map_or(0, |list| list.lines().count())
        })
    }

    /// The number of commands that each Sentinel denied to a user.
    pub fn denied_commands(&self) -> [usize; 3] {
        self.ports.map(|port| {
            let log: redis::Value = query_sentinel(port, &["ACL", "LOG"]).expect("it runs");
            log.as_sequence().map_or(0, <[_]>::len)
        })
    }

    /// Receives a message when a Sentinel announces another master.
    pub fn announcement(&self) -> mpsc::Receiver<()> {
        let (sender, receiver) = mpsc::channel();
        for port in self.ports {
            let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
            let mut connection = client.get_connection().expect("the Sentinel runs");
            let sender = sender.clone();
            thread::spawn(move || {
                let mut subscription = connection.as_pubsub();
                subscription.subscribe("+switch-master")?;
                subscription.get_message()?;
                let _ = sender.send(());
                Ok::<_, redis::RedisError>(())
            });
        }
        receiver
    }

    /// Ends the first Sentinel. From then on, the second one is used.
    pub fn end_the_first_sentinel(&mut self) {
        self.sentinels.remove(0);
        self.ports[0] = self.ports[1];
    }

    /// The number of decisions that each server received. The first master is asked last: what it
    /// decides while the others are asked comes before what they decide.
    pub fn decisions(&self) -> [u64; 3] {
        let [third, second, first] = [2, 1, 0].map(|index| {
            let stats = loop {
                // A Sentinel that changes the role of a server closes its connections.
                match self.query::<String>(index, &["INFO", "commandstats"]) {
                    Ok(stats) => break stats,
                    Err(error) => assert!(error.is_io_error(), "{error}"),
                }
            };
            let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
            line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
        });
        [first, second, third]
    }

    /// Returns true if the replicas have all data of the first master.
    pub fn is_replicated(&self) -> bool {
        let info = self.info(0);
        let offset = info.lines().find_map(|line| line.strip_prefix("master_repl_offset:"));
        let Some(offset) = offset else { return false };
        let offset = format!("offset={offset},");
        info.lines().filter(|line| line.starts_with("slave")).all(|line| line.contains(&offset))
    }

    /// Returns true if a server reports that it is a master.
    pub fn reports_master(&self, index: usize) -> bool {
        self.info(index).contains("role:master")
    }

    /// Returns true if a server is loading its data.
    pub fn is_loading(&self, index: usize) -> bool {
        let info: String = self.query(index, &["INFO", "persistence"]).unwrap_or_default();
        info.contains("loading:1")
    }

    fn info(&self, index: usize) -> String {
        // A Sentinel that makes a server a replica closes its connections.
        self.query(index, &["INFO", "replication"]).unwrap_or_default()
    }

    pub fn is_master(&self, index: usize) -> bool {
        !self.info(index).contains("role:slave")
    }

    pub fn query<T: redis::FromRedisValue>(
        &self,
        index: usize,
        words: &[&str],
    ) -> redis::RedisResult<T> {
        let client = redis::Client::open(self.servers[index].0.url()).unwrap();
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

fn sentinel(port: u16, command: &str) -> redis::RedisResult<Vec<String>> {
    query_sentinel(port, &["SENTINEL", command, NAME])
}

fn query_sentinel<T: redis::FromRedisValue>(port: u16, words: &[&str]) -> redis::RedisResult<T> {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}"))?;
    redis::cmd(words[0]).arg(&words[1..]).query(&mut client.get_connection()?)
}
