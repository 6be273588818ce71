//! The master that Redis Sentinels name: which server it is, and when that changes.
//!
//! A keeper per Sentinel holds a connection, asks each second and when it is poked, and subscribes
//! to announcements. A new connection to the master waits for answers to questions that were sent
//! after it was asked for. A watcher compares the latest answers, and makes the connections to the
//! old master void when another one is named.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    convert::Infallible,
    fmt::Write,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use redis::{Cmd, FromRedisValue, Msg, PushInfo, PushKind, RedisError, Value, aio::SendError};
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    answers::is_answer,
    endpoint::{
        ANSWER_TIMEOUT as ROLE_TIMEOUT, Address, CONNECT_TIMEOUT, Channel, Endpoint, Mapping,
        Place, race,
    },
};
use crate::{store::lock, time::with_jitter};

/// The pause between two questions to a Sentinel, which is drawn out by up to a tenth.
const QUESTION_PAUSE: Duration = Duration::from_millis(900);
/// The least pause: an announcement leads to a question, and a Sentinel may send any number of
/// these.
const LEAST_PAUSE: Duration = Duration::from_millis(5);
/// A Sentinel that does not answer within this time counts as failed.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// After the first answer, the other Sentinels have this time, or twice what the first took: less
/// than the default deadline of a decision, because it delays the first one while a Sentinel is
/// unreachable.
const GRACE: Duration = Duration::from_millis(50);
/// The same while fewer than half of the Sentinels have answered: one that lies may be the fastest.
const LONG_GRACE: Duration = Duration::from_millis(250);
/// The pause after an attempt that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// While the server that is named refuses connections or is no master, an attempt goes on for this
/// time: less than the default deadline, so that callers get its error.
const SEARCH_WITHIN: Duration = Duration::from_millis(75);
/// While the server that is named does not answer, the Sentinels are asked again after this pause.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);
/// The most Sentinels that are learnt from others.
const MAX_LEARNT: usize = 16;
/// The number of questions to a Sentinel after which it is asked which others there are.
const LEARN_EVERY: usize = 10;
/// A watcher that has not moved on for this time is in a runtime that does not run.
const MAX_STANDSTILL: Duration = Duration::from_secs(5);

const ANNOUNCEMENT: &str = "+switch-master";

/// The Sentinels of a master. The watcher ends when this is dropped.
pub(crate) struct Sentinels(Arc<Shared>);

struct Shared {
    name: String,
    /// How to connect to the master, but for its address.
    template: Endpoint,
    mapping: Mapping,
    /// How many of the nodes were given; they come first. The others are learnt.
    given: usize,
    nodes: Mutex<Vec<Arc<Node>>>,
    /// Changes with each report.
    news: watch::Sender<()>,
    master: Mutex<Master>,
    watcher: Mutex<Option<Watcher>>,
    has_warned: AtomicBool,
    /// The last address that could not be followed.
    refused: Mutex<Option<Address>>,
}

/// The server that decisions are sent to.
#[derive(Default)]
struct Master {
    address: Option<Address>,
    /// Its name and its address, for errors.
    named: Option<Arc<String>>,
    /// The number of changes. A connection is void if there was one since it was made.
    generation: u64,
}

struct Watcher {
    task: AbortHandle,
    moved: Arc<Mutex<Instant>>,
}

/// A Sentinel.
struct Node {
    endpoint: Endpoint,
    poke: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    report: Report,
    connection: Option<Channel>,
    id: Option<String>,
    /// The others that it knows.
    peers: Option<Vec<Peer>>,
}

struct Peer {
    id: String,
    address: Address,
}

/// What is known of a Sentinel's answer, and when the question was sent.
#[derive(Clone, Debug, Default)]
enum Report {
    /// It is asked for the first time, or again after its connection ended.
    #[default]
    Awaited,
    Named(Address, Instant),
    /// It knows no master of that name.
    Unknown(Instant),
    Failed(RedisError, Instant),
}

/// Whether it makes sense to wait for more answers.
#[derive(Debug, PartialEq, Eq)]
enum Wait {
    /// The rest would change nothing.
    Over,
    /// For a moment.
    Grace,
    /// For longer, because most Sentinels have not answered.
    LongGrace,
    Needed,
}

impl Sentinels {
    /// `given` are the Sentinels, at least one, each with its own credentials and TLS settings;
    /// `template` is how to log in to the master `name`, without its address.
    pub(crate) fn new(
        given: Vec<Endpoint>,
        name: String,
        template: Endpoint,
        mapping: Mapping,
    ) -> Self {
        let mut nodes: Vec<Arc<Node>> = vec![];
        for endpoint in given {
            if nodes.iter().all(|it| it.endpoint.place != endpoint.place) {
                nodes.push(Arc::new(Node::new(endpoint)));
            }
        }
        Self(Arc::new(Shared {
            name,
            template,
            mapping,
            given: nodes.len(),
            nodes: Mutex::new(nodes),
            news: watch::Sender::new(()),
            master: Mutex::default(),
            watcher: Mutex::default(),
            has_warned: AtomicBool::new(false),
            refused: Mutex::default(),
        }))
    }

    /// Returns the name of the master, and its address if it is known.
    pub(crate) fn name(&self) -> Arc<String> {
        let named = lock(&self.0.master).named.clone();
        named.unwrap_or_else(|| Arc::new(self.0.name.clone()))
    }

    /// Connects to the master. Returns the connection with the number by which to ask whether it
    /// [is void](Self::is_void).
    pub(crate) async fn connect(&self) -> Result<(Channel, u64), RedisError> {
        let shared = &self.0;
        let start = Instant::now();
        loop {
            let known = lock(&shared.master).generation;
            let mut failure = None;
            for address in shared.ask().await? {
                let connection = shared.open_master(&address);
                match race(connection, shared.until_other(&address)).await {
                    Some(Ok(connection)) => {
                        if let Some(generation) = shared.follow(known, address) {
                            return Ok((connection, generation));
                        }
                        failure = None;
                        break; // the watcher was faster
                    }
                    Some(Err(error)) => failure = Some(error),
                    None => {}
                }
            }
            if let Some(failure) = failure.filter(|_| start.elapsed() >= SEARCH_WITHIN) {
                return Err(failure);
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Whether a connection leads to a server that is the master no longer.
    pub(crate) fn is_void(&self, generation: u64) -> bool {
        lock(&self.0.master).generation != generation
    }

    /// Sees to it that the Sentinels are watched, also if the runtime of the watcher has ended.
    pub(crate) fn keep_watching(&self) {
        self.0.keep_watching();
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        if let Some(watcher) = lock(&self.0.watcher).take() {
            watcher.task.abort();
        }
    }
}

impl Shared {
    fn nodes(&self) -> Vec<Arc<Node>> {
        lock(&self.nodes).clone()
    }

    fn reports(&self) -> Vec<Report> {
        self.nodes().iter().map(|node| lock(&node.state).report.clone()).collect()
    }

    fn keep_watching(self: &Arc<Self>) {
        let watcher = &mut *lock(&self.watcher);
        let moves = |it: &Watcher| lock(&it.moved).elapsed() < MAX_STANDSTILL;
        if watcher.as_ref().is_some_and(|it| !it.task.is_finished() && moves(it)) {
            return;
        }
        if let Some(watcher) = watcher.take() {
            watcher.task.abort();
        }
        // What they said may be old, and their connections end with the runtime.
        self.nodes().iter().for_each(|node| lock(&node.state).forget());
        let moved = Arc::new(Mutex::new(Instant::now()));
        let task = tokio::spawn(self.clone().watch(moved.clone())).abort_handle();
        *watcher = Some(Watcher { task, moved });
    }

    /// Asks all Sentinels. Returns the address that a majority names, or all of them, the best one
    /// first.
    async fn ask(self: &Arc<Self>) -> Result<Vec<Address>, RedisError> {
        self.keep_watching();
        let asked = Instant::now();
        let mut news = self.news.subscribe();
        self.poke();
        let mut first_took: Option<Duration> = None;
        loop {
            let until = match wait(&self.reports(), asked) {
                Wait::Over => break,
                Wait::Needed => ANSWER_TIMEOUT.saturating_mul(3),
                wait => {
                    let took = *first_took.get_or_insert_with(|| asked.elapsed());
                    let grace = if wait == Wait::Grace { GRACE } else { LONG_GRACE };
                    took + grace.max(2 * took)
                }
            };
            let left = until.saturating_sub(asked.elapsed());
            if timeout(left, news.changed()).await.is_err() {
                break;
            }
        }
        let candidates = self.candidates().await;
        if candidates.is_empty() { Err(self.nobody_named()) } else { Ok(candidates) }
    }

    fn poke(&self) {
        self.nodes().iter().for_each(|node| node.poke.notify_one());
    }

    /// The address that the majority of the latest answers names. Without a majority, all of them:
    /// those with the most votes first, and of these the one of the newest configuration, because a
    /// Sentinel that is cut off from the others knows an old one. The first whose role is master
    /// counts, so that all processes choose the same.
    async fn candidates(&self) -> Vec<Address> {
        let mut votes: Vec<(Address, Vec<Arc<Node>>)> = vec![];
        for node in self.nodes() {
            let Report::Named(address, _) = lock(&node.state).report.clone() else { continue };
            match votes.iter_mut().find(|it| it.0 == address) {
                Some((_, nodes)) => nodes.push(node),
                None => votes.push((address, vec![node])),
            }
        }
        let all: usize = votes.iter().map(|(_, nodes)| nodes.len()).sum();
        if let Some((address, _)) = votes.iter().find(|(_, nodes)| 2 * nodes.len() > all) {
            return vec![address.clone()];
        }
        let mut ranked = vec![];
        for (address, nodes) in votes {
            let mut newest = None;
            for node in &nodes {
                newest = newest.max(node.epoch(&self.name).await);
            }
            ranked.push((Reverse((nodes.len(), newest)), address));
        }
        ranked.sort();
        ranked.into_iter().map(|(_, address)| address).collect()
    }

    /// Connects to a server, and returns an error if it is no master.
    async fn open_master(&self, address: &Address) -> Result<Channel, RedisError> {
        let Self { name, .. } = self;
        let (host, port) = address;
        let endpoint = self.template.at(address.clone());
        let connection = endpoint.open(CONNECT_TIMEOUT, None, None).await;
        let mut connection = connection.map_err(|cause| match cause.is_io_error() {
            true => error(format!(
                "the master {name} at {host}:{port} cannot be reached: {cause}; check that it \
                 runs, and that the Sentinels name an address that clients can use"
            )),
            false => cause,
        })?;
        let role = redis::cmd("ROLE");
        let role = timeout(ROLE_TIMEOUT, role.query_async::<Vec<Value>>(&mut connection)).await;
        let role = role.map_err(|_| {
            error(format!(
                "the master {name} does not answer: {host}:{port}, no role; check that it runs"
            ))
        })?;
        let role = role.map_err(|cause| {
            error(format!(
                "the master {name} at {host}:{port} tells no role: {cause}; allow `+role`"
            ))
        })?;
        match role.first().and_then(|role| String::from_redis_value_ref(role).ok()) {
            Some(role) if role == "master" => Ok(connection),
            role => Err(error(format!(
                "the master {name} is not there: the Sentinels name {host}:{port}, but its role is \
                 {}; wait for the end of the failover",
                role.unwrap_or_default(),
            ))),
        }
    }

    /// Waits until the Sentinels do not name an address any more.
    async fn until_other(self: &Arc<Self>, address: &Address) {
        loop {
            sleep(SEARCH_PAUSE).await;
            if self.ask().await.is_ok_and(|candidates| !candidates.contains(address)) {
                return;
            }
        }
    }

    /// Makes an address that of the master; if it is another one, connections that were made before
    /// are void. Returns the generation, or nothing if there was a change since `known`.
    fn follow(&self, known: u64, address: Address) -> Option<u64> {
        let master = &mut *lock(&self.master);
        if master.address.as_ref() == Some(&address) {
            return Some(master.generation);
        }
        if master.generation != known {
            return None;
        }
        let place = Place::Tcp(address.clone());
        if let Some(old) = master.address.replace(address) {
            event::master_changed(&self.name, &Place::Tcp(old), &place);
        }
        master.named = Some(Arc::new(format!("{} ({place})", self.name)));
        master.generation += 1;
        Some(master.generation)
    }

    async fn watch(self: Arc<Self>, moved: Arc<Mutex<Instant>>) {
        let mut news = self.news.subscribe();
        let mut keepers: Vec<Keeper> = vec![];
        loop {
            *lock(&moved) = Instant::now();
            self.learn();
            let nodes = self.nodes();
            keepers.retain(|keeper| {
                let is_known = nodes.iter().any(|node| Arc::ptr_eq(node, &keeper.node));
                is_known && !keeper.task.is_finished() // it ends if the mapping panics
            });
            for node in nodes {
                if !keepers.iter().any(|keeper| Arc::ptr_eq(&node, &keeper.node)) {
                    let task = tokio::spawn(self.clone().keep(node.clone())).abort_handle();
                    keepers.push(Keeper { node, task });
                }
            }
            let _ = timeout(2 * CONNECT_TIMEOUT, self.look()).await;
            let _ = timeout(QUESTION_PAUSE, news.changed()).await;
        }
    }

    /// Follows if the Sentinels name another master.
    async fn look(&self) {
        let (known, address) = {
            let master = lock(&self.master);
            (master.generation, master.address.clone())
        };
        // Whatever they said last: a keeper that gets no answer reports that.
        let (Some(address), Wait::Over) = (address, wait(&self.reports(), None)) else { return };
        let candidates = self.candidates().await;
        // Without a majority, a master that says that it is one is not left.
        let is_open = candidates.len() > 1 && candidates.contains(&address);
        if is_open && self.open_master(&address).await.is_ok() {
            return;
        }
        for candidate in candidates {
            if candidate == address {
                return;
            }
            match self.open_master(&candidate).await {
                Ok(_) => {
                    self.follow(known, candidate);
                    return;
                }
                Err(error) => self.refused(candidate, &error),
            }
        }
    }

    /// Reports once that a server cannot be followed that the Sentinels name.
    fn refused(&self, address: Address, error: &RedisError) {
        if lock(&self.refused).as_ref() != Some(&address) {
            event::not_followed(&self.name, &Place::Tcp(address.clone()), error);
            *lock(&self.refused) = Some(address);
        }
    }

    /// Talks to a Sentinel, again and again.
    async fn keep(self: Arc<Self>, node: Arc<Node>) {
        loop {
            let mut has_answered = false;
            let Err(error) = self.talk(&node, &mut has_answered).await;
            lock(&node.state).connection = None;
            if has_answered && !error.is_timeout() && !is_answer(&error) {
                self.report(&node, Report::Awaited); // its connection has ended
            } else {
                self.report(&node, Report::Failed(error, Instant::now()));
                let _ = timeout(with_jitter(QUESTION_PAUSE), node.poke.notified()).await;
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    async fn talk(
        self: &Arc<Self>,
        node: &Arc<Node>,
        has_answered: &mut bool,
    ) -> Result<Infallible, RedisError> {
        let mut connection = self.reach(node).await?;
        lock(&node.state).connection = Some(connection.clone());
        self.question(node, &mut connection).await?;
        *has_answered = true;
        self.subscribe(&mut connection).await?;
        for number in 0.. {
            // The first time also for what changed before the subscription.
            self.question(node, &mut connection).await?;
            if number % LEARN_EVERY == 0 {
                self.question_peers(node, &mut connection).await?;
            }
            sleep(LEAST_PAUSE).await;
            let _ = timeout(with_jitter(QUESTION_PAUSE), node.poke.notified()).await;
        }
        unreachable!("the numbers do not end")
    }

    async fn reach(self: &Arc<Self>, node: &Arc<Node>) -> Result<Channel, RedisError> {
        let (shared, weak_node) = (Arc::downgrade(self), Arc::downgrade(node));
        let pushed = move |push: PushInfo| {
            match push.kind {
                PushKind::Disconnection => {
                    weak_node.upgrade().inspect(|node| node.poke.notify_one());
                }
                PushKind::Message => {
                    let shared = shared.upgrade();
                    let message = Msg::from_push_info(push).map(|it| it.get_payload::<String>());
                    // A lie does no harm: all Sentinels are asked.
                    if let (Some(shared), Some(Ok(message))) = (shared, message)
                        && message.split(' ').next() == Some(&shared.name)
                    {
                        shared.poke();
                    }
                }
                _ => {}
            }
            Ok::<(), SendError>(())
        };
        node.endpoint.open(CONNECT_TIMEOUT, Some(ANSWER_TIMEOUT), Some(Arc::new(pushed))).await
    }

    async fn question(&self, node: &Node, connection: &mut Channel) -> Result<(), RedisError> {
        let asked = Instant::now();
        let command = sentinel("GET-MASTER-ADDR-BY-NAME", Some(&self.name));
        let told: Option<Address> = command.query_async(connection).await?;
        let report = match told {
            Some((host, port)) => Report::Named((self.mapping)(&host, port), asked),
            None => Report::Unknown(asked),
        };
        self.report(node, report);
        Ok(())
    }

    fn report(&self, node: &Node, report: Report) {
        lock(&node.state).report = report;
        self.news.send_replace(());
    }

    /// Without the permission, the store asks each second.
    async fn subscribe(&self, connection: &mut Channel) -> Result<(), RedisError> {
        let result = connection.commands.subscribe(ANNOUNCEMENT).await;
        let Err(error) = result else { return Ok(()) };
        if error.is_io_error() || error.is_unrecoverable_error() {
            return Err(error);
        }
        if !self.has_warned.swap(true, Relaxed) {
            event::not_subscribed(&self.name, &error);
        }
        Ok(())
    }

    /// Asks which Sentinel it is, and which others there are; if that is not permitted, none are
    /// learnt.
    async fn question_peers(
        &self,
        node: &Node,
        connection: &mut Channel,
    ) -> Result<(), RedisError> {
        let id = permitted(sentinel("MYID", None).query_async::<String>(connection).await)?;
        let command = sentinel("SENTINELS", Some(&self.name));
        let told: Option<Vec<HashMap<String, String>>> =
            permitted(command.query_async(connection).await)?;
        let read = |it: &HashMap<String, String>| {
            let is_down = it.get("flags").is_some_and(|flags| flags.contains("s_down"));
            let (host, port) = (it.get("ip")?, it.get("port")?.parse().ok()?);
            let (id, address) = (it.get("runid")?.clone(), (self.mapping)(host, port));
            (!is_down).then_some(Peer { id, address })
        };
        let peers = told.unwrap_or_default().iter().filter_map(read).collect();
        let mut state = lock(&node.state);
        (state.id, state.peers) = (id, Some(peers));
        drop(state);
        self.news.send_replace(());
        Ok(())
    }

    /// Adds the Sentinels that most of the others know, and removes learnt ones that they do not
    /// know any more. One that lies about these has no majority.
    fn learn(&self) {
        let nodes = &mut *lock(&self.nodes);
        let is_settled = |node: &Arc<Node>| {
            let state = lock(&node.state);
            state.peers.is_some() || matches!(state.report, Report::Failed(..))
        };
        if !nodes[..self.given].iter().all(is_settled) {
            return;
        }
        let ids = |nodes: &[Arc<Node>]| -> HashSet<String> {
            nodes.iter().filter_map(|node| lock(&node.state).id.clone()).collect()
        };
        let (given_ids, all_ids) = (ids(&nodes[..self.given]), ids(nodes));
        let mut known_by: HashMap<(String, Address), usize> = HashMap::new();
        let mut lists = 0;
        for node in nodes.iter() {
            let Some(peers) = &lock(&node.state).peers else { continue };
            lists += usize::from(!peers.is_empty());
            let peers: HashSet<_> =
                peers.iter().map(|it| (it.id.clone(), it.address.clone())).collect();
            peers.into_iter().for_each(|peer| *known_by.entry(peer).or_default() += 1);
        }
        if lists == 0 {
            return;
        }
        let template = nodes[0].endpoint.clone();
        if matches!(template.place, Place::Unix(_)) {
            return;
        }
        let mut endpoints: Vec<_> = known_by
            .into_iter()
            .filter(|((id, _), count)| {
                let others = lists - usize::from(all_ids.contains(id)).min(lists - 1);
                !given_ids.contains(id) && 2 * count > others
            })
            .map(|((_, address), _)| template.at(address))
            .filter(|new| nodes[..self.given].iter().all(|it| it.endpoint.place != new.place))
            .collect();
        endpoints.sort_by_cached_key(|it| it.place.to_string());
        endpoints.dedup_by(|a, b| a.place == b.place);
        endpoints.truncate(MAX_LEARNT);
        let learnt = nodes.split_off(self.given);
        nodes.extend(endpoints.into_iter().map(|endpoint| {
            let known = learnt.iter().find(|it| it.endpoint.place == endpoint.place);
            known.cloned().unwrap_or_else(|| Arc::new(Node::new(endpoint)))
        }));
    }

    /// Why there is no address.
    fn nobody_named(&self) -> RedisError {
        let (name, mut is_unknown, mut silent) = (&self.name, false, String::new());
        for node in self.nodes() {
            let why = match &lock(&node.state).report {
                Report::Failed(error, _) => error.to_string(),
                Report::Awaited => "no answer yet".to_owned(),
                Report::Unknown(_) | Report::Named(..) => {
                    is_unknown = true;
                    continue;
                }
            };
            let comma = if silent.is_empty() { "" } else { ", " };
            let _ = write!(silent, "{comma}{} ({why})", node.endpoint.place);
        }
        error(match (is_unknown, silent.is_empty()) {
            (true, true) => format!("the Sentinels know no master named {name}; check the name"),
            (true, false) => format!(
                "the Sentinels that answered know no master named {name}: no answer from {silent}; \
                 check the name"
            ),
            (false, _) => format!(
                "no Sentinel names the master {name}: no answer from {silent}; \
                 check that they run, their addresses and the credentials"
            ),
        })
    }
}

impl Node {
    fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, poke: Notify::new(), state: Mutex::default() }
    }

    /// The number of the configuration that it knows: each failover has a higher one.
    async fn epoch(&self, name: &str) -> Option<u64> {
        let mut connection = lock(&self.state).connection.clone()?;
        let command = sentinel("MASTER", Some(name));
        let told = command.query_async::<HashMap<String, String>>(&mut connection);
        timeout(GRACE, told).await.ok()?.ok()?.get("config-epoch")?.parse().ok()
    }
}

impl State {
    fn forget(&mut self) {
        (self.report, self.connection) = (Report::Awaited, None);
    }
}

/// Ends with its value.
struct Keeper {
    node: Arc<Node>,
    task: AbortHandle,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Whether to wait for more answers to questions that were sent at `asked` or later.
fn wait(reports: &[Report], asked: impl Into<Option<Instant>>) -> Wait {
    let asked = asked.into();
    let is_fresh = |at: &Instant| asked.is_none_or(|asked| *at >= asked);
    let mut votes: HashMap<&Address, usize> = HashMap::new();
    let (mut answers, mut awaited, mut failed_before) = (0, 0, 0);
    for report in reports {
        match report {
            Report::Named(address, at) if is_fresh(at) => {
                answers += 1;
                *votes.entry(address).or_default() += 1;
            }
            Report::Unknown(at) if is_fresh(at) => answers += 1,
            Report::Failed(_, at) if is_fresh(at) => {}
            // It failed: those that answer decide without it.
            Report::Failed(..) => failed_before += 1,
            Report::Awaited | Report::Named(..) | Report::Unknown(_) => awaited += 1,
        }
    }
    let (most, all) = (votes.values().max().copied().unwrap_or(0), votes.values().sum::<usize>());
    let is_over = awaited == 0 && (answers > 0 || failed_before == 0);
    if is_over || 2 * most > all + awaited {
        Wait::Over
    } else if all > 0 && 2 * answers >= reports.len() {
        Wait::Grace
    } else if all > 0 {
        Wait::LongGrace
    } else {
        Wait::Needed
    }
}

fn sentinel(question: &str, name: Option<&str>) -> Cmd {
    let mut command = redis::cmd("SENTINEL");
    command.arg(question).arg(name);
    command
}

/// Returns nothing if the Sentinel answers with an error.
fn permitted<T>(result: Result<T, RedisError>) -> Result<Option<T>, RedisError> {
    match result {
        Err(error) if is_answer(&error) => Ok(None),
        result => result.map(Some),
    }
}

fn error(text: String) -> RedisError {
    io::Error::other(text).into()
}

mod event {
    use redis::RedisError;

    use super::Place;

    #[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
    pub(crate) fn master_changed(master: &str, old: &Place, new: &Place) {
        #[cfg(feature = "tracing")]
        tracing::info!(master, %old, %new, "the Redis Sentinels name another master");
    }

    #[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
    pub(crate) fn not_followed(master: &str, address: &Place, error: &RedisError) {
        #[cfg(feature = "tracing")]
        tracing::warn!(
            master,
            %address,
            error = error as &dyn std::error::Error,
            "cannot use the master that the Redis Sentinels name: decisions stay with the old one \
             until it is demoted, and are lost then"
        );
    }

    #[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
    pub(crate) fn not_subscribed(master: &str, error: &RedisError) {
        #[cfg(feature = "tracing")]
        tracing::warn!(
            master,
            error = error as &dyn std::error::Error,
            "cannot subscribe at a Redis Sentinel: it is asked each second which server is the \
             master; allow `+subscribe` and `&+switch-master`, and RESP3"
        );
    }
}

#[cfg(test)]
mod tests;
