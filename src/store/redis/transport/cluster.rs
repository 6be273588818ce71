//! A cluster: which of its nodes is asked about a key.
//!
//! Each node has a [`Link`] of its own, so that one that does not answer keeps nobody waiting but for its own keys,
//! and not even those for long.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::{BuildHasher, RandomState},
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::{Cmd, FromRedisValue, ServerErrorKind, Value};
use tokio::{
    runtime::Handle,
    sync::Notify,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    answers::is_answer,
    breaker::{Breaker, Counters, Health},
    connection::{Connection, Question},
    endpoint::{ANSWER_TIMEOUT, Address, Endpoint, Mapping, Place},
    link::{Deadline, Link},
    probe::Probe,
    release::Queue,
    route::Route,
    server::Server,
};
use crate::{error::StoreError, store::lock};

const SLOTS: usize = 1 << 14;

/// The nodes that are asked at once which node has which slots: the first answer counts.
const ASKED_FOR_SLOTS: usize = 3;
/// The same while no slot is known, or none of the known nodes could tell.
const SEEDS_ASKED_FOR_SLOTS: usize = 16;
/// The pause between two such questions.
const LEARN_EVERY: Duration = Duration::from_millis(100);
/// After this time, and up to a quarter more, the slots are read again, whatever the nodes answer.
const LEARN_AFTER: Duration = Duration::from_secs(30);
/// The same for a while after a connection was made anew: if another server has the address of a dead master, the
/// cluster may not have promoted a replica yet.
const LEARN_SOON: Duration = Duration::from_secs(2);
const UNSETTLED: Duration = Duration::from_secs(60);
/// A request is sent to other nodes at once up to this number of times. Then it pauses each time.
const MAX_HOPS: usize = 4;
const PAUSE: Duration = Duration::from_millis(5);
/// The first and the longest pause of a request whose keys are on two nodes. A quarter of the deadline is the most for
/// the first one, so with the default deadline there are three commands.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Cluster {
    /// The nodes that were named, perhaps by names that the cluster does not use.
    seeds: Vec<Endpoint>,
    mapping: Mapping,
    connections: usize,
    counters: Arc<Counters>,
    map: RwLock<Map>,
    made: Instant,
    learning: Mutex<Learning>,
    /// The slots are read again after this time, in microseconds since the store was made.
    outdated_at: AtomicU64,
    /// Until then the slots are read often, in microseconds since the store was made.
    unsettled_until: AtomicU64,
    /// Notified when the nodes have answered who has which slots, or none of them has.
    learned: Notify,
    /// Whether those that are known could not tell.
    asks_seeds: AtomicBool,
}

/// What is known of the cluster. A key whose slot nobody is known to have is asked of any node, which tells who has
/// it.
struct Map {
    /// Those that have slots; besides, the seeds, while nobody answers who could tell.
    nodes: HashMap<Place, Arc<Node>>,
    slots: Box<[Option<Arc<Node>>]>,
    /// Whether a node has told which node has which slots.
    has_owners: bool,
}

/// Whether a node is being asked which node has which slots.
struct Learning {
    is_running: bool,
    /// No node is asked again before this instant.
    next: Instant,
}

/// What [`Cluster::learn`] found.
#[derive(PartialEq, Eq)]
enum Learn {
    /// Nodes are asked from now on.
    Begun,
    /// They are being asked.
    Running,
    /// They were asked a moment ago.
    Recent,
}

struct Node {
    place: Place,
    /// The host by which the cluster, or the URL, names it.
    host: String,
    link: Arc<Link>,
    /// The number of connections after which the slots were read.
    connections_known: AtomicUsize,
}

impl Cluster {
    /// `seeds` are some of the nodes, at least one. `mapping` is for the addresses that nodes name.
    pub(crate) fn new(seeds: Vec<Endpoint>, connections: usize, mapping: Mapping) -> Self {
        let map = Map { nodes: HashMap::new(), slots: vec![None; SLOTS].into(), has_owners: false };
        Self {
            seeds,
            mapping,
            connections,
            counters: Arc::default(),
            map: RwLock::new(map),
            made: Instant::now(),
            learning: Mutex::new(Learning { is_running: false, next: Instant::now() }),
            outdated_at: AtomicU64::new(u64::MAX),
            unsettled_until: AtomicU64::new(0),
            learned: Notify::new(),
            asks_seeds: AtomicBool::new(false),
        }
    }

    pub(crate) fn health(&self, deadline: Duration) -> Health {
        self.read(|map| {
            let links = || map.nodes.values().map(|node| &node.link);
            let is_available = links().all(|link| link.is_available_for(deadline));
            let failures = links().map(|link| link.consecutive_failures()).max();
            self.counters.health(is_available, failures.unwrap_or(0))
        })
    }

    /// Where a connection was made.
    pub(crate) fn runtime(&self) -> Option<Handle> {
        self.read(|map| map.nodes.values().find_map(|node| node.link.runtime()))
    }

    /// Asks the node that has the keys, wherever that is.
    pub(crate) async fn ask<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        question: Question<'_>,
    ) -> Result<(T, Connection), StoreError> {
        let slot = slot_of(question.key());
        if !self.knows_slots() && self.owner(slot).link.is_available_for(deadline.within()) {
            self.know_slots(deadline).await?;
        }
        let (mut node, mut is_asking) = (self.owner(slot), false);
        let (mut hops, mut pause) = (0, (deadline.within() / 4).min(FIRST_PAUSE));
        // The node from which the slot moves.
        let mut source: Option<Arc<Node>> = None;
        Queue::resume(&node.link, || Route::Cluster(self.clone()));
        loop {
            let answer = node.link.ask(deadline, question.asking(is_asking)).await;
            self.learn_if_outdated(&node);
            let error = match answer {
                Err(error) => error,
                answer => return answer,
            };
            let Some(kind) = error.server_kind() else {
                if !error.redis().is_some_and(is_answer) {
                    self.learn(Some(&node));
                }
                return Err(error);
            };
            match kind {
                kind if deadline.is_over() && kind != ServerErrorKind::TryAgain => {
                    return Err(error);
                }
                ServerErrorKind::Moved => {
                    self.learn(None);
                    let Some(next) = self.named(&error, &node) else { return Err(error) };
                    if is_asking && source.is_some_and(|source| Arc::ptr_eq(&source, &next)) {
                        return Err(OpenSlot::error(slot, error)); // the other node knows of no move
                    }
                    source = None;
                    self.change(|map| map.slots[slot] = Some(next.clone()));
                    (node, is_asking) = (next, false);
                }
                ServerErrorKind::Ask => {
                    let Some(next) = self.named(&error, &node) else { return Err(error) };
                    source = Some(node);
                    pause = 2 * pause; // this took a command, too
                    (node, is_asking) = (next, true);
                }
                // The slot moves from one node to another, and not all of the keys are here.
                ServerErrorKind::TryAgain => {
                    if deadline.left() <= pause {
                        return Err(OpenSlot::error(slot, error));
                    }
                    sleep(pause).await;
                    pause = (2 * pause).min(MAX_PAUSE);
                    if !is_asking {
                        node = self.owner(slot);
                    }
                }
                ServerErrorKind::ClusterDown => {
                    self.learn(Some(&node));
                    return Err(error);
                }
                _ => return Err(error),
            }
            hops += 1;
            if hops >= MAX_HOPS {
                sleep(PAUSE).await;
            }
        }
    }

    /// Proves that each node that has slots can decide, by a probe for a key beside one with this prefix.
    pub(crate) async fn ping(
        self: &Arc<Self>,
        deadline: Deadline,
        prefix: &str,
    ) -> Result<(), StoreError> {
        self.know_slots(deadline).await?;
        if !self.knows_slots() {
            let slots = slots_command();
            let node = self.some_nodes().swap_remove(0);
            let (_, _): (Value, _) = node.link.ask(deadline, Question::new(&slots)).await?;
        }
        let mut probes: Vec<(Arc<Node>, Probe)> = vec![];
        let nodes = self
            .read(|map| map.slots.iter().flatten().map(Arc::as_ptr).collect::<HashSet<_>>().len());
        // A node with one slot of 16,384 is found with all but certainty.
        for number in 0..32 * SLOTS {
            let key = format!("{prefix}:{{{number}}}");
            let owner = self.owner(slot_of(key.as_bytes()));
            if !probes.iter().any(|(node, _)| Arc::ptr_eq(node, &owner)) {
                probes.push((owner, Probe::beside(key.as_bytes())));
            }
            if probes.len() >= nodes {
                break;
            }
        }
        let mut pings = JoinSet::new();
        for (_, probe) in probes {
            let cluster = self.clone();
            pings.spawn(async move {
                let by_text = probe.by_text();
                let ((), _) = cluster.ask(deadline, Question::new(&by_text)).await?;
                cluster.ask::<()>(deadline, probe.question()).await.map(drop)
            });
        }
        pings.join_all().await.into_iter().collect()
    }

    /// The connections to the node that has a key.
    pub(crate) fn link_of(&self, key: &[u8]) -> Arc<Link> {
        self.owner(slot_of(key)).link.clone()
    }

    fn owner(&self, slot: usize) -> Arc<Node> {
        let owner = self.read(|map| map.slots[slot].clone());
        owner.unwrap_or_else(|| self.some_nodes().swap_remove(0))
    }

    /// The node that an answer of `teller` names.
    fn named(&self, redirect: &StoreError, teller: &Node) -> Option<Arc<Node>> {
        let (address, _) = redirect.redis()?.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let host = match host {
            "?" => return None, // not even the teller knows
            "" => &teller.host,
            _ => host,
        };
        Some(self.node_at(host, port.parse().ok()?))
    }

    fn node_at(&self, host: &str, port: u16) -> Arc<Node> {
        self.node_named(host, &self.seeds[0].at((self.mapping)(host, port)))
    }

    fn node(&self, seed: &Endpoint) -> Arc<Node> {
        let host = match &seed.place {
            Place::Tcp((host, _)) => host,
            Place::Unix(_) => "",
        };
        self.node_named(host, seed)
    }

    fn node_named(&self, host: &str, endpoint: &Endpoint) -> Arc<Node> {
        let place = &endpoint.place;
        if let Some(node) = self.read(|map| map.nodes.get(place).cloned()) {
            return node;
        }
        let breaker = Arc::new(Breaker::of_node(place.to_string(), self.counters.clone()));
        let server = Arc::new(Server::One(endpoint.clone()));
        let link = Arc::new(Link::with(server, self.connections, breaker));
        let connections_known = AtomicUsize::new(0);
        let node =
            Arc::new(Node { place: place.clone(), host: host.to_owned(), link, connections_known });
        self.change(|map| map.nodes.entry(place.clone()).or_insert(node).clone())
    }

    /// Asks which node has which slots, unless that was asked just now; not the node that is in doubt, if there are
    /// others.
    fn learn(self: &Arc<Self>, doubted: Option<&Arc<Node>>) -> Learn {
        {
            let learning = &mut *lock(&self.learning);
            let now = Instant::now();
            if now < learning.next {
                return if learning.is_running { Learn::Running } else { Learn::Recent };
            }
            *learning = Learning { is_running: true, next: now + ANSWER_TIMEOUT };
        }
        let (cluster, doubted) = (self.clone(), doubted.cloned());
        tokio::spawn(async move {
            let mut nodes = cluster.some_nodes();
            if let Some(doubted) = doubted
                && nodes.len() > 1
            {
                nodes.retain(|node| !Arc::ptr_eq(node, &doubted));
            }
            let is_lost = cluster.asks_seeds.load(Relaxed) || !cluster.knows_slots();
            let asked_nodes = if is_lost { SEEDS_ASKED_FOR_SLOTS } else { ASKED_FOR_SLOTS };
            let mut asked = JoinSet::new();
            for node in nodes.into_iter().take(asked_nodes) {
                asked.spawn(async move { node.slots().await });
            }
            let mut owners = None;
            while owners.is_none()
                && let Some(answer) = asked.join_next().await
            {
                owners = answer.ok().flatten();
            }
            asked.detach_all(); // their answers tell that the connections are whole
            cluster.asks_seeds.store(owners.is_none(), Relaxed);
            if let Some(owners) = owners {
                cluster.adopt(owners);
            }
            let next = Instant::now() + LEARN_EVERY;
            *lock(&cluster.learning) = Learning { is_running: false, next };
            let part = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
            let is_unsettled = cluster.now() < cluster.unsettled_until.load(Relaxed);
            let after = if is_unsettled { LEARN_SOON } else { LEARN_AFTER };
            let after = after.mul_f64(1.0 + part / 4.0).as_micros() as u64;
            cluster.outdated_at.store(cluster.now() + after, Relaxed);
            cluster.learned.notify_waiters();
        });
        Learn::Begun
    }

    /// Waits for the first answer which node has which slots, if no slot is known yet. Any node could redirect a request,
    /// but a node that does not answer would fail it.
    async fn know_slots(self: &Arc<Self>, deadline: Deadline) -> Result<(), StoreError> {
        if self.knows_slots() {
            return Ok(());
        }
        let asked = Instant::now();
        let learned = self.learned.notified();
        if self.learn(None) == Learn::Recent || timeout(deadline.left(), learned).await.is_ok() {
            return Ok(());
        }
        let mut error = StoreError::timeout(deadline.within()).unsent();
        for seed in &self.seeds {
            error = self.node(seed).link.timed_out(asked, deadline);
        }
        Err(error)
    }

    fn knows_slots(&self) -> bool {
        self.read(|map| map.has_owners)
    }

    /// Reads the slots again after a new connection to a node, as another server may have its address now, and now
    /// and then.
    fn learn_if_outdated(self: &Arc<Self>, node: &Node) {
        let connections = node.link.connections_made();
        let is_new = node.connections_known.load(Relaxed) != connections;
        let is_old = self.now() >= self.outdated_at.load(Relaxed);
        if is_new && connections > self.connections {
            let until = self.now() + UNSETTLED.as_micros() as u64;
            self.unsettled_until.store(until, Relaxed);
        }
        // A question that was sent before the connection was made may have an old answer.
        if (is_new || is_old) && self.learn(None) == Learn::Begun {
            node.connections_known.store(connections, Relaxed);
        }
    }

    /// In microseconds since the store was made.
    fn now(&self) -> u64 {
        self.made.elapsed().as_micros() as u64
    }

    fn adopt(&self, owners: Vec<(RangeInclusive<usize>, Address)>) {
        let owners: Vec<_> = owners
            .into_iter()
            .map(|(slots, (host, port))| (slots, self.node_at(&host, port)))
            .collect();
        let gone = self.change(|map| {
            for (slots, node) in owners {
                map.slots[slots].fill(Some(node));
            }
            map.has_owners = true;
            let owners: HashSet<_> = map.slots.iter().flatten().map(Arc::as_ptr).collect();
            map.nodes.extract_if(|_, node| !owners.contains(&Arc::as_ptr(node))).collect::<Vec<_>>()
        });
        for (_, node) in gone {
            node.link.leave(); // connections are closed with no lock held
        }
    }

    /// Those who can be asked about the whole, in random order: who answers; if nobody does, or none could tell,
    /// the seeds first.
    fn some_nodes(&self) -> Vec<Arc<Node>> {
        let mut nodes: Vec<_> = self.read(|map| map.nodes.values().cloned().collect());
        nodes.retain(|node| node.link.is_available());
        let mut seeds = vec![];
        if nodes.is_empty() || self.asks_seeds.load(Relaxed) {
            seeds.extend(self.seeds.iter().map(|seed| self.node(seed)));
            nodes.retain(|node| !seeds.iter().any(|seed| Arc::ptr_eq(seed, node)));
        }
        let random = RandomState::new();
        for part in [&mut seeds, &mut nodes] {
            part.sort_by_cached_key(|node| random.hash_one(&node.place));
        }
        seeds.append(&mut nodes);
        seeds
    }

    fn read<T>(&self, read: impl FnOnce(&Map) -> T) -> T {
        read(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Map) -> T) -> T {
        change(&mut self.map.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A slot whose move from one node to another has begun and not ended.
#[derive(Debug)]
struct OpenSlot {
    slot: usize,
    cause: StoreError,
}

impl OpenSlot {
    /// No node has run the command.
    fn error(slot: usize, cause: StoreError) -> StoreError {
        StoreError::unavailable(Self { slot, cause }).unsent()
    }
}

impl fmt::Display for OpenSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot, .. } = self;
        write!(
            f,
            "slot {slot} of the cluster is open: its move to another node has begun and not ended; if no move is \
             under way, run redis-cli --cluster fix"
        )
    }
}

impl std::error::Error for OpenSlot {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}

impl Node {
    /// Who has which slots, as far as the node knows.
    async fn slots(&self) -> Option<Vec<(RangeInclusive<usize>, Address)>> {
        let slots = slots_command();
        let answer = self.link.ask(Deadline::new(ANSWER_TIMEOUT), Question::new(&slots)).await;
        let (ranges, _): (Vec<Vec<Value>>, _) = answer.ok()?;
        let owners: Vec<_> = ranges.iter().filter_map(|it| owned(it, &self.host)).collect();
        (!owners.is_empty()).then_some(owners)
    }
}

fn slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// A range of slots and its master, as the node at `teller` names it.
fn owned(range: &[Value], teller: &str) -> Option<(RangeInclusive<usize>, Address)> {
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = range else {
        return None;
    };
    let [host, Value::Int(port), ..] = &master[..] else { return None };
    let host = match host {
        Value::BulkString(host) => str::from_utf8(host).ok()?,
        Value::Nil => "",
        _ => return None,
    };
    let host = match host {
        "?" => return None, // not even the node knows
        "" => teller,
        _ => host,
    };
    let slots = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
    (*slots.end() < SLOTS && slots.start() <= slots.end())
        .then_some((slots, (host.to_owned(), u16::try_from(*port).ok()?)))
}

/// CRC-16/XMODEM of what is in the first pair of braces, if there is anything, else of the key.
fn slot_of(key: &[u8]) -> usize {
    let tag = key.iter().position(|it| *it == b'{').and_then(|open| {
        let tag = &key[open + 1..];
        let close = tag.iter().position(|it| *it == b'}')?;
        (close > 0).then_some(&tag[..close])
    });
    let mut sum = 0_u16;
    for byte in tag.unwrap_or(key) {
        sum ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            sum = if sum & 0x8000 == 0 { sum << 1 } else { sum << 1 ^ 0x1021 };
        }
    }
    usize::from(sum) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // As CLUSTER KEYSLOT answers.
        for (key, slot) in [
            ("", 0),
            ("123456789", 12739),
            ("foo", 12182),
            ("ratelimit:default:token-bucket:{foo}", 12182),
            ("{}foo", 9500),
            ("{foo", 13308),
            ("{foo}{bar}:turns", 12182),
        ] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    #[test]
    fn an_owner_is_read() {
        let text = |text: &str| Value::BulkString(text.into());
        let range = |host, port| {
            let master = Value::Array(vec![host, Value::Int(port), text("id")]);
            owned(&[Value::Int(0), Value::Int(5), master, Value::Array(vec![])], "teller")
        };
        let owner = |host: &str| Some((0..=5, (host.to_owned(), 7000)));
        assert_eq!(range(text("10.0.0.1"), 7000), owner("10.0.0.1"));
        assert_eq!(range(text("2001:db8::1"), 7000), owner("2001:db8::1"));
        assert_eq!(range(text(""), 7000), owner("teller"));
        assert_eq!(range(Value::Nil, 7000), owner("teller"));
        assert_eq!(range(text("?"), 7000), None);
        assert_eq!(range(text("10.0.0.1"), 70_000), None);
        let master = || Value::Array(vec![text("a"), Value::Int(1)]);
        assert_eq!(owned(&[Value::Int(0), Value::Int(16_384), master()], ""), None);
        assert_eq!(owned(&[Value::Int(-1), Value::Int(5), master()], ""), None);
        assert_eq!(owned(&[Value::Int(1)], ""), None);
    }
}
