//! A private Redis Cluster, on free ports.

use std::{
    collections::BTreeSet,
    net::TcpListener,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use redis::{Cmd, FromRedisValue, Value};

use super::server::RedisServer;

pub const SLOTS: u16 = 1 << 14;

/// A placeholder in settings for an unused port, which is below that of the node by this number.
pub const ANNOUNCED: &str = "ANNOUNCED";
pub const ANNOUNCED_BELOW: u16 = 9_999;

/// Returns a free port. The port 10,000 above it, which the nodes of a cluster use, is free, too.
/// Both are outside the range of outgoing connections. No other test of the process gets the port,
/// even while its server is down.
pub fn free_port() -> u16 {
    static TAKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = 10_000 + rand() % 10_000;
        let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if [port, port + 10_000].into_iter().all(is_free) && TAKEN.lock().unwrap().insert(port) {
            return port;
        }
    }
}

fn rand() -> u16 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(()) as u16
}

pub struct Node {
    pub server: RedisServer,
    pub port: u16,
    pub id: String,
}

impl Node {
    fn start(settings: &[&str]) -> Self {
        let port = free_port();
        let text = port.to_string();
        let has_tls = settings.contains(&"--tls-cluster");
        let announced = (port - ANNOUNCED_BELOW).to_string();
        let settings: Vec<_> = settings
            .iter()
            .map(|&setting| if setting == ANNOUNCED { &*announced } else { setting })
            .collect();
        let own = [
            if has_tls { "--tls-port" } else { "--port" },
            &text,
            "--bind",
            "127.0.0.1",
            "--cluster-enabled",
            "yes",
            "--repl-diskless-sync-delay",
            "0",
        ];
        let server = RedisServer::start_with(&[&own, &*settings].concat());
        let mut node = Self { server, port, id: String::new() };
        node.id = node.query(&["CLUSTER", "MYID"]);
        node
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn query<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_query(words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub fn try_query<T: FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let client = redis::Client::open(self.server.url())?;
        let mut connection = client.get_connection()?;
        connection.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut cmd = Cmd::new();
        cmd.arg(words).query(&mut connection)
    }

    fn info(&self, section: &str, line: &str) -> bool {
        let info = self.try_query::<String>(&["INFO", section]);
        info.is_ok_and(|info| info.lines().any(|other| other == line))
    }

    pub fn is_master(&self) -> bool {
        self.info("replication", "role:master")
    }

    /// Returns true if the node has all data of its master.
    fn is_in_sync(&self) -> bool {
        self.info("replication", "master_link_status:up")
    }

    /// Returns true if the replicas have all data of the node.
    pub fn is_replicated(&self) -> bool {
        let info: String = self.query(&["INFO", "replication"]);
        let offset = info.lines().find_map(|line| line.strip_prefix("master_repl_offset:"));
        let offset = format!("offset={},", offset.expect("it has an offset"));
        info.lines().filter(|line| line.starts_with("slave")).all(|line| line.contains(&offset))
    }

    /// The number of clients that are connected to the node.
    pub fn clients(&self) -> usize {
        self.query::<String>(&["CLIENT", "LIST", "TYPE", "NORMAL"]).lines().count()
    }

    pub fn is_up(&self) -> bool {
        let info = self.try_query::<String>(&["CLUSTER", "INFO"]);
        info.is_ok_and(|info| info.contains("cluster_state:ok"))
    }
}

/// Masters that share the slots evenly, in order, and a replica of each if requested.
pub struct Cluster {
    pub masters: Vec<Node>,
    pub replicas: Vec<Node>,
}

impl Cluster {
    pub fn start(masters: u16, has_replicas: bool, settings: &[&str]) -> Self {
        let start = || (0..masters).map(|_| Node::start(settings)).collect::<Vec<_>>();
        let cluster =
            Self { masters: start(), replicas: if has_replicas { start() } else { vec![] } };
        for (index, master) in (0..).zip(&cluster.masters) {
            // CLUSTER ADDSLOTSRANGE is not in 6.2.
            let slots: Vec<_> = (index * SLOTS / masters..(index + 1) * SLOTS / masters)
                .map(|slot| slot.to_string())
                .collect();
            let words: Vec<_> = ["CLUSTER", "ADDSLOTS"]
                .into_iter()
                .chain(slots.iter().map(|slot| &**slot))
                .collect();
            let () = master.query(&words);
        }
        for (epoch, node) in (1..).zip(cluster.nodes()) {
            let () = node.query(&["CLUSTER", "SET-CONFIG-EPOCH", &format!("{epoch}")]);
        }
        let count = cluster.nodes().count();
        let start = Instant::now();
        // A node does not repeat its greeting to a node that answered late.
        while !cluster.nodes().all(|node| node.known() == count) {
            assert!(start.elapsed() < Duration::from_secs(120), "the nodes do not meet");
            for node in cluster.nodes().skip(1).filter(|node| node.known() < count) {
                let port = cluster.masters[0].port.to_string();
                let () = node.query(&["CLUSTER", "MEET", "127.0.0.1", &port]);
            }
            thread::sleep(Duration::from_millis(300));
        }
        for (master, replica) in cluster.masters.iter().zip(&cluster.replicas) {
            let () = replica.query(&["CLUSTER", "REPLICATE", &master.id]);
        }
        cluster.until("the cluster is up", |node| node.is_up() && node.knows(&cluster.replicas));
        for replica in &cluster.replicas {
            until("the replica has all data", || replica.is_in_sync());
        }
        cluster
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.masters.iter().chain(&self.replicas)
    }

    pub fn urls(&self) -> Vec<String> {
        self.nodes().map(Node::url).collect()
    }

    fn until(&self, what: &str, is_so: impl Fn(&Node) -> bool) {
        for node in self.nodes() {
            until(what, || is_so(node));
        }
    }

    pub fn begin_to_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, from, to) = (slot.to_string(), &self.masters[from], &self.masters[to]);
        let () = to.query(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from.id]);
        let () = from.query(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to.id]);
    }

    pub fn end_moving(&self, slot: u16, from: usize, to: usize) {
        let (slot, from, to) = (slot.to_string(), &self.masters[from], &self.masters[to]);
        loop {
            let keys: Vec<String> = from.query(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.is_empty() {
                break;
            }
            for key in &keys {
                let port = to.port.to_string();
                let _: String = from.query(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
            }
        }
        for node in [to, from].into_iter().chain(&self.masters) {
            let () = node.query(&["CLUSTER", "SETSLOT", &slot, "NODE", &to.id]);
        }
    }

    pub fn slot(&self, key: &str) -> u16 {
        // Tests stop the first master.
        self.masters[1].query(&["CLUSTER", "KEYSLOT", key])
    }

    /// The index of the master that had the key at the start.
    pub fn master_of(&self, key: &str) -> usize {
        usize::from(self.slot(key)) * self.masters.len() / usize::from(SLOTS)
    }
}

impl Node {
    /// The number of nodes that the node knows.
    fn known(&self) -> usize {
        let nodes: String = self.query(&["CLUSTER", "NODES"]);
        nodes.lines().filter(|line| !line.contains("handshake")).count()
    }

    fn knows(&self, replicas: &[Self]) -> bool {
        let slots: Vec<Vec<Value>> = self.query(&["CLUSTER", "SLOTS"]);
        replicas.is_empty() || slots.iter().all(|range| range.len() == 4)
    }
}

pub fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(120), "still not true: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
