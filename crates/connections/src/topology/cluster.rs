//! A cluster: the map from slots to nodes, and the redirections to other nodes.
//!
//! Each node has a [`Node`] with a breaker of its own, so that a node that does not answer delays
//! only requests for its own keys, and only until the breaker opens.

use std::{
    collections::{HashMap, HashSet},
    error::Error,
    fmt,
    hash::{BuildHasher, RandomState},
    mem,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::{Cmd, FromRedisValue, ServerErrorKind, Value};
use tokio::{sync::Notify, task::JoinSet, time::sleep};

use super::{
    super::{
        health::{NodeHealth, Probe, Tell},
        home,
        link::{
            ANSWER_TIMEOUT, Address, Command, Connection, Deadline, Endpoint, Mapping, Place,
            ServerState, TransportError, is_no_cluster, is_reply,
        },
    },
    node::{Common, Node},
    server::Server,
};
use crate::{sync::lock, time::random_fraction};

const SLOTS: usize = 1 << 14;

/// The number of nodes that are queried for the slot map at the same time. The first reply counts,
/// so that one node that hangs delays nothing, and two do not either.
const NODES_PER_REFRESH: usize = 3;
/// The same while no slot is known, or none of the known nodes knows the slots: many of the
/// configured seeds may be gone.
const SEEDS_PER_REFRESH: usize = 16;
/// The pause between two refreshes. While slots move, each `MOVED` asks for one.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);
/// The slot map is read again after this time, and up to a quarter more, whatever the nodes answer:
/// a node that was added has no key yet, so nothing redirects to it. The random part keeps the
/// processes of a service apart.
const REFRESH_AFTER: Duration = Duration::from_secs(30);
/// The same for [`UNSETTLED`] after a connection was made anew. If another server has taken the
/// address of a dead master, the cluster may not have promoted a replica yet.
const REFRESH_SOON: Duration = Duration::from_secs(2);
const UNSETTLED: Duration = Duration::from_secs(60);
/// The number of nodes that get a request without a pause. From then on, a pause precedes each
/// node. A stale map needs one hop, and a slot that moves a second; more are a loop between nodes
/// that disagree, which ends with the deadline.
const MAX_HOPS: usize = 4;
const HOP_PAUSE: Duration = Duration::from_millis(5);
/// The first and the longest pause of a request whose keys are on two nodes. The first pause is at
/// most a quarter of the deadline: so the default deadline has time for three commands.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// The time that such a pause leaves for the last command; at most an eighth of the deadline.
const LAST_COMMAND: Duration = Duration::from_millis(25);

pub(crate) struct Cluster {
    /// The configured nodes, perhaps under names that the cluster does not use.
    seeds: Vec<Endpoint>,
    mapping: Mapping,
    common: Common,
    map: RwLock<Map>,
    refresh: Mutex<RefreshState>,
    /// Notified after each refresh, also after a failed one.
    refreshed: Notify,
}

/// The known part of the cluster. A command for an unknown slot goes to any node, which redirects
/// it.
struct Map {
    /// The nodes with slots; and the seeds, while no node can send the slot map.
    nodes: HashMap<Place, Arc<ClusterNode>>,
    slots: Box<[Option<Arc<ClusterNode>>]>,
    /// True if a node has sent the slot map.
    has_owners: bool,
}

struct RefreshState {
    is_running: bool,
    /// The earliest time of the next refresh.
    next: Instant,
    /// The time of the next regular refresh, after the first one.
    due: Option<Instant>,
    /// The end of the time with frequent refreshes.
    unsettled_until: Instant,
    /// True if the last refresh failed, so that the next one includes the seeds.
    asks_seeds: bool,
    /// The error of a server that is no cluster, if that made the last refresh fail.
    no_cluster: Option<TransportError>,
}

/// The result of [`Cluster::refresh`].
#[derive(PartialEq, Eq)]
enum Refresh {
    Begun,
    /// Another refresh is running.
    Running,
    /// The last refresh ended a moment ago.
    Recent,
}

struct ClusterNode {
    place: Place,
    /// The host in the cluster's slot map, or in the URL.
    host: String,
    node: Arc<Node>,
    /// The number of connections at the last refresh that this node caused.
    connections_known: AtomicUsize,
}

/// The path of a command through the cluster.
struct Redirects {
    slot: usize,
    /// The next node.
    node: Arc<ClusterNode>,
    /// True if the slot moves to this node.
    is_asking: bool,
    /// The node from which the slot moves.
    source: Option<Arc<ClusterNode>>,
    pause: Duration,
}

impl Cluster {
    /// `seeds` are some of the nodes, at least one. `mapping` is for the addresses that nodes name.
    pub(crate) fn new(seeds: Vec<Endpoint>, mapping: Mapping, common: Common) -> Self {
        let map = Map { nodes: HashMap::new(), slots: vec![None; SLOTS].into(), has_owners: false };
        let now = Instant::now();
        let refresh = RefreshState {
            is_running: false,
            next: now,
            due: None,
            unsettled_until: now,
            asks_seeds: false,
            no_cluster: None,
        };
        let (map, refresh) = (RwLock::new(map), Mutex::new(refresh));
        Self { seeds, mapping, common, map, refresh, refreshed: Notify::new() }
    }

    pub(crate) fn health(&self, deadline: Duration) -> NodeHealth {
        let nodes: Vec<_> = self.nodes().iter().map(|it| it.node.health(deadline)).collect();
        // A node that has not been used says nothing about the cluster.
        let used = nodes.iter().map(|it| it.state).filter(|it| *it != ServerState::Unknown).max();
        NodeHealth {
            state: used.unwrap_or(ServerState::Unknown),
            is_available: nodes.iter().all(|it| it.is_available),
            consecutive_failures: nodes.iter().map(|it| it.consecutive_failures).max().unwrap_or(0),
        }
    }

    fn nodes(&self) -> Vec<Arc<ClusterNode>> {
        self.read(|map| map.nodes.values().cloned().collect())
    }

    /// Executes a command at the node that has the keys.
    pub(crate) async fn execute<T: FromRedisValue>(
        self: &Arc<Self>,
        deadline: Deadline,
        command: Command<'_>,
    ) -> Result<(T, Connection), TransportError> {
        let slot = slot_of(command.key());
        if !self.knows_slots() && self.owner(slot).node.is_available_for(deadline.within()) {
            self.ensure_slots(deadline).await?;
        }
        let (node, pause) = (self.owner(slot), (deadline.within() / 4).min(FIRST_PAUSE));
        let mut redirects = Redirects { slot, node, is_asking: false, source: None, pause };
        let mut hops = 0;
        loop {
            let node = &redirects.node;
            let reply = node.node.execute(deadline, command.asking(redirects.is_asking)).await;
            self.refresh_if_outdated(node);
            match reply {
                Ok(reply) => return Ok(reply),
                Err(error) => redirects.follow(self, deadline, error).await?,
            }
            hops += 1;
            if hops >= MAX_HOPS {
                sleep(HOP_PAUSE).await;
            }
        }
    }

    /// Proves that each node with slots can execute the scripts of the owner.
    pub(crate) async fn ping(self: &Arc<Self>, deadline: Deadline) -> Result<(), TransportError> {
        self.ensure_slots(deadline).await?;
        if !self.knows_slots() {
            let slots = slots_command();
            let node = self.some_nodes().swap_remove(0);
            let (_, _): (Value, _) = node.node.execute(deadline, Command::new(&slots)).await?;
        }
        let mut pings = JoinSet::new();
        for probe in self.probes() {
            let cluster = self.clone();
            pings.spawn(async move {
                let by_text = probe.by_text();
                let ((), _) = cluster.execute(deadline, Command::new(&by_text)).await?;
                cluster.execute::<()>(deadline, probe.command()).await.map(drop)
            });
        }
        pings.join_all().await.into_iter().collect()
    }

    /// Returns a slot of each node with slots.
    pub(crate) async fn places(
        self: &Arc<Self>,
        deadline: Deadline,
    ) -> Result<Vec<u16>, TransportError> {
        self.ensure_slots(deadline).await?;
        let mut seen = HashSet::new();
        let places: Vec<u16> = self.read(|map| {
            let owners = (0..).zip(&map.slots);
            let owned =
                owners.filter_map(|(slot, owner)| Some((slot, Arc::as_ptr(owner.as_ref()?))));
            owned.filter(|(_, owner)| seen.insert(*owner)).map(|(slot, _)| slot).collect()
        });
        // While the slots are unknown, any node answers, or its error says why none can.
        Ok(if places.is_empty() { vec![0] } else { places })
    }

    /// Returns a probe for each node with slots.
    fn probes(&self) -> Vec<Probe> {
        let mut owners: Vec<Arc<ClusterNode>> = vec![];
        let mut probes = vec![];
        let nodes = self
            .read(|map| map.slots.iter().flatten().map(Arc::as_ptr).collect::<HashSet<_>>().len());
        // Even a node with one slot of 16,384 is found almost certainly.
        for number in 0..32 * SLOTS {
            let tag = number.to_string();
            let owner = self.owner(slot_of(tag.as_bytes()));
            if !owners.iter().any(|node| Arc::ptr_eq(node, &owner)) {
                owners.push(owner);
                probes.push(self.common.owner.ping(&tag));
            }
            if owners.len() >= nodes {
                break;
            }
        }
        probes
    }

    /// Returns the node of a slot, or any node if it is unknown.
    pub(crate) fn node_of(&self, slot: usize) -> Arc<Node> {
        self.owner(slot).node.clone()
    }

    fn owner(&self, slot: usize) -> Arc<ClusterNode> {
        let owner = self.read(|map| map.slots[slot].clone());
        owner.unwrap_or_else(|| self.some_nodes().swap_remove(0))
    }

    /// Returns the node that a redirection names. `sender` has sent it.
    fn redirect_target(
        &self,
        redirect: &TransportError,
        sender: &ClusterNode,
    ) -> Option<Arc<ClusterNode>> {
        let (address, _) = redirect.redis()?.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let host = named_host(host, &sender.host)?;
        Some(self.node_at(host, port.parse().ok()?))
    }

    fn node_at(&self, host: &str, port: u16) -> Arc<ClusterNode> {
        self.node_named(host, &self.seeds[0].at((self.mapping)(host, port)))
    }

    /// Tells the states of all breakers, each in order with its changes.
    pub(crate) fn tell_breakers(&self, tell: &Arc<Tell>) {
        self.nodes().iter().for_each(|it| it.node.tell_breaker(tell));
    }

    fn seed_node(&self, seed: &Endpoint) -> Arc<ClusterNode> {
        let host = match seed.place() {
            Place::Tcp((host, _)) => host,
            Place::Unix(_) => "",
        };
        self.node_named(host, seed)
    }

    fn node_named(&self, host: &str, endpoint: &Endpoint) -> Arc<ClusterNode> {
        let place = endpoint.place();
        if let Some(node) = self.read(|map| map.nodes.get(place).cloned()) {
            return node;
        }
        let server = Server::One(endpoint.clone());
        let node = Arc::new(ClusterNode {
            place: place.clone(),
            host: host.to_owned(),
            node: Arc::new(Node::new(server, self.common.clone())),
            connections_known: AtomicUsize::new(0),
        });
        node.node.announce();
        self.change(|map| map.nodes.entry(place.clone()).or_insert(node).clone())
    }

    /// Starts a task that reads the slot map, if none is running or has ended a moment ago. If
    /// there are other nodes, the doubted node is not queried.
    fn refresh(self: &Arc<Self>, doubted: Option<&Arc<ClusterNode>>) -> Refresh {
        {
            let refresh = &mut *lock(&self.refresh);
            let now = Instant::now();
            if now < refresh.next {
                return if refresh.is_running { Refresh::Running } else { Refresh::Recent };
            }
            (refresh.is_running, refresh.next) = (true, now + ANSWER_TIMEOUT);
        }
        home::spawn(self.clone().read_slots(doubted.cloned()));
        Refresh::Begun
    }

    async fn read_slots(self: Arc<Self>, doubted: Option<Arc<ClusterNode>>) {
        let mut nodes = self.some_nodes();
        if let Some(doubted) = doubted
            && nodes.len() > 1
        {
            nodes.retain(|node| !Arc::ptr_eq(node, &doubted));
        }
        let asks_seeds = lock(&self.refresh).asks_seeds;
        let is_lost = asks_seeds || !self.knows_slots();
        let asked_nodes = if is_lost { SEEDS_PER_REFRESH } else { NODES_PER_REFRESH };
        let mut replies = JoinSet::new();
        for node in nodes.into_iter().take(asked_nodes) {
            replies.spawn(async move { node.slots().await });
        }
        let (mut owners, mut no_cluster) = (vec![], None);
        while owners.is_empty()
            && let Some(reply) = replies.join_next().await
        {
            match reply {
                Ok(Ok(found)) => owners = found,
                Ok(Err(error)) if error.redis().is_some_and(is_no_cluster) => {
                    no_cluster = Some(error)
                }
                _ => {}
            }
        }
        replies.detach_all(); // these replies still prove that the connections work
        let has_failed = owners.is_empty();
        // Before the seeds leave the map: else a command could bring them back.
        lock(&self.refresh).asks_seeds = has_failed;
        if !has_failed {
            self.adopt(owners);
        }
        {
            let (now, refresh) = (Instant::now(), &mut *lock(&self.refresh));
            let after = if now < refresh.unsettled_until { REFRESH_SOON } else { REFRESH_AFTER };
            refresh.due = Some(now + after.mul_f64(1.0 + random_fraction() / 4.0));
            (refresh.is_running, refresh.next) = (false, now + REFRESH_PAUSE);
            refresh.no_cluster = no_cluster.filter(|_| has_failed);
        }
        self.refreshed.notify_waiters();
    }

    /// Waits for the first slot map, if no slot is known yet. Without it, any node could redirect a
    /// request, but a node that does not answer would fail it. Fails if a server is no cluster.
    async fn ensure_slots(self: &Arc<Self>, deadline: Deadline) -> Result<(), TransportError> {
        if self.knows_slots() {
            return Ok(());
        }
        let refreshed = self.refreshed.notified();
        let is_recent = self.refresh(None) == Refresh::Recent;
        if is_recent || deadline.wait_for(refreshed).await.is_some() {
            return lock(&self.refresh).no_cluster.clone().map_or(Ok(()), Err);
        }
        let mut error = TransportError::timeout(deadline.within()).unsent();
        for seed in &self.seeds {
            error = self.seed_node(seed).node.record_timeout(deadline, None);
        }
        Err(error)
    }

    pub(crate) fn knows_slots(&self) -> bool {
        self.read(|map| map.has_owners)
    }

    /// Refreshes the slot map now and then, and after a new connection to a node: another server
    /// may have its address.
    fn refresh_if_outdated(self: &Arc<Self>, node: &ClusterNode) {
        let connections = node.node.connections_made();
        let is_new = node.connections_known.load(Relaxed) != connections;
        let is_old = {
            let (now, refresh) = (Instant::now(), &mut *lock(&self.refresh));
            if is_new && node.node.has_reconnected() {
                refresh.unsettled_until = now + UNSETTLED;
            }
            refresh.due.is_some_and(|due| due <= now)
        };
        // A refresh that began before the connection was made may have an old reply.
        if (is_new || is_old) && self.refresh(None) == Refresh::Begun {
            node.connections_known.store(connections, Relaxed);
        }
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
            node.node.retire(); // connections are closed with no lock held
        }
    }

    /// Returns the nodes that may know the slot map, in random order: the available ones. The seeds
    /// come first if no node is available, or the last refresh failed.
    fn some_nodes(&self) -> Vec<Arc<ClusterNode>> {
        let mut nodes = self.nodes();
        nodes.retain(|it| it.node.is_available());
        let mut seeds = vec![];
        if nodes.is_empty() || lock(&self.refresh).asks_seeds {
            seeds.extend(self.seeds.iter().map(|seed| self.seed_node(seed)));
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

impl Redirects {
    /// Chooses the next node after an error, or returns the error.
    async fn follow(
        &mut self,
        cluster: &Arc<Cluster>,
        deadline: Deadline,
        error: TransportError,
    ) -> Result<(), TransportError> {
        let Some(kind) = error.server_kind() else {
            if !error.redis().is_some_and(is_reply) {
                cluster.refresh(Some(&self.node));
            }
            return Err(error);
        };
        match kind {
            kind if deadline.is_over() && kind != ServerErrorKind::TryAgain => Err(error),
            ServerErrorKind::Moved => self.follow_moved(cluster, error),
            ServerErrorKind::Ask => self.follow_ask(cluster, error),
            ServerErrorKind::TryAgain => self.wait_for_move(cluster, deadline, error).await,
            ServerErrorKind::ClusterDown => {
                cluster.refresh(Some(&self.node));
                Err(error)
            }
            _ => Err(error),
        }
    }

    /// Follows a `MOVED`: another node has the slot.
    fn follow_moved(
        &mut self,
        cluster: &Arc<Cluster>,
        error: TransportError,
    ) -> Result<(), TransportError> {
        cluster.refresh(None);
        let Some(next) = cluster.redirect_target(&error, &self.node) else { return Err(error) };
        let source = self.source.take();
        if self.is_asking && source.is_some_and(|source| Arc::ptr_eq(&source, &next)) {
            return Err(OpenSlot::error(self.slot, error)); // this node knows of no move
        }
        cluster.change(|map| map.slots[self.slot] = Some(next.clone()));
        (self.node, self.is_asking) = (next, false);
        Ok(())
    }

    /// Follows an `ASK`: the slot moves to another node, and the key may be there.
    fn follow_ask(
        &mut self,
        cluster: &Cluster,
        error: TransportError,
    ) -> Result<(), TransportError> {
        let Some(next) = cluster.redirect_target(&error, &self.node) else { return Err(error) };
        self.pause *= 2; // this took a command, too
        self.source = Some(mem::replace(&mut self.node, next));
        self.is_asking = true;
        Ok(())
    }

    /// Waits while the slot moves and its keys are on two nodes.
    async fn wait_for_move(
        &mut self,
        cluster: &Cluster,
        deadline: Deadline,
        error: TransportError,
    ) -> Result<(), TransportError> {
        let last = LAST_COMMAND.min(deadline.within() / 8);
        let pause = self.pause.min(deadline.left().saturating_sub(last));
        if pause.is_zero() {
            return Err(OpenSlot::error(self.slot, error));
        }
        sleep(pause).await;
        self.pause = (2 * self.pause).min(MAX_PAUSE);
        if !self.is_asking {
            self.node = cluster.owner(self.slot);
        }
        Ok(())
    }
}

/// A slot whose move from one node to another has begun but not ended.
#[derive(Debug)]
struct OpenSlot {
    slot: usize,
    cause: TransportError,
}

impl OpenSlot {
    /// Returns the error of a command that no node has executed.
    fn error(slot: usize, cause: TransportError) -> TransportError {
        TransportError::other(Self { slot, cause }).unsent()
    }
}

impl fmt::Display for OpenSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot, .. } = self;
        write!(
            f,
            "slot {slot} of the cluster is open: its move to another node has begun but not \
             ended; if no move is in progress, run redis-cli --cluster fix"
        )
    }
}

impl Error for OpenSlot {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}

impl ClusterNode {
    /// Returns the slot map that the node knows.
    async fn slots(&self) -> Result<Vec<(RangeInclusive<usize>, Address)>, TransportError> {
        let slots = slots_command();
        let deadline = Deadline::new(ANSWER_TIMEOUT);
        let (ranges, _): (Vec<Vec<Value>>, _) =
            self.node.execute(deadline, Command::new(&slots)).await?;
        Ok(ranges.iter().filter_map(|it| owned(it, &self.host)).collect())
    }
}

fn slots_command() -> Cmd {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// Returns a range of slots and its master. `sender` is the host of the node that has sent them.
fn owned(range: &[Value], sender: &str) -> Option<(RangeInclusive<usize>, Address)> {
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = range else {
        return None;
    };
    let [host, Value::Int(port), ..] = &master[..] else { return None };
    let host = match host {
        Value::BulkString(host) => str::from_utf8(host).ok()?,
        Value::Nil => "",
        _ => return None,
    };
    let host = named_host(host, sender)?;
    let slots = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
    (*slots.end() < SLOTS && slots.start() <= slots.end())
        .then_some((slots, (host.to_owned(), u16::try_from(*port).ok()?)))
}

/// Returns the host that a node names; if it is empty, that of the node itself. `?` is unknown to
/// the node.
fn named_host<'a>(host: &'a str, sender: &'a str) -> Option<&'a str> {
    match host {
        "?" => None,
        "" => Some(sender),
        _ => Some(host),
    }
}

/// Returns the CRC-16/XMODEM of the text in the first pair of braces. If there is none, or it is
/// empty, of the key.
pub(crate) fn slot_of(key: &[u8]) -> usize {
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
            ("shop:{foo}", 12182),
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
            owned(&[Value::Int(0), Value::Int(5), master, Value::Array(vec![])], "sender")
        };
        let owner = |host: &str| Some((0..=5, (host.to_owned(), 7000)));
        assert_eq!(range(text("10.0.0.1"), 7000), owner("10.0.0.1"));
        assert_eq!(range(text("2001:db8::1"), 7000), owner("2001:db8::1"));
        assert_eq!(range(text(""), 7000), owner("sender"));
        assert_eq!(range(Value::Nil, 7000), owner("sender"));
        assert_eq!(range(text("?"), 7000), None);
        assert_eq!(range(text("10.0.0.1"), 70_000), None);
        let master = || Value::Array(vec![text("a"), Value::Int(1)]);
        assert_eq!(owned(&[Value::Int(0), Value::Int(16_384), master()], ""), None);
        assert_eq!(owned(&[Value::Int(-1), Value::Int(5), master()], ""), None);
        assert_eq!(owned(&[Value::Int(1)], ""), None);
    }
}
