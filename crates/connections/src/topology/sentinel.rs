//! The master that Redis Sentinels name, and its changes.
//!
//! A task per Sentinel keeps a connection, polls every second and on demand, and subscribes to
//! announcements. A new connection to the master waits for answers to queries that were sent after
//! the caller began. A watcher compares the latest answers. When they name another master, the
//! connections to the old one are outdated.

mod votes;

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    convert::Infallible,
    fmt::Write,
    io,
    sync::{
        Arc, Mutex, OnceLock,
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

use self::votes::{Report, Wait, wait};
use super::super::{
    health::{Event, Owner},
    home,
    link::{
        ANSWER_TIMEOUT as ROLE_TIMEOUT, Address, CONNECT_TIMEOUT, Endpoint, Mapping, Place,
        Session, is_reply,
    },
};
use crate::{
    sync::{lock, race},
    time::with_jitter,
};

/// The pause between two queries to a Sentinel, before jitter: about one per second and process, as
/// Sentinels ask each other. Announcements are faster; this is for those that are lost.
const POLL_PAUSE: Duration = Duration::from_millis(900);
/// The least pause between two queries. An announcement causes a query, and a Sentinel may send any
/// number of announcements.
const MIN_PAUSE: Duration = Duration::from_millis(5);
/// A Sentinel that does not answer within this time counts as failed. It answers from memory, in
/// microseconds. The time is below a second, the deadline of a ping, so that a ping that meets a
/// hung Sentinel still has half of it for the master.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// The time for more answers after the first one, at least twice the latency of the first. It is
/// half of a usual deadline, 100 ms, because it delays the first call while a Sentinel is
/// unreachable.
const GRACE: Duration = Duration::from_millis(50);
/// The same while fewer than half of the Sentinels have answered: the fastest answer may be wrong.
/// For example, an isolated Sentinel on the same host answers first, and names the old master.
const LONG_GRACE: Duration = Duration::from_millis(250);
/// The pause after a failed attempt: 50 per second at a Sentinel or master that refuses
/// connections.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// The time limit of an attempt while the named server rejects connections or is not a master. It
/// is below the default deadline, so that callers get the error of the attempt.
const SEARCH_WITHIN: Duration = Duration::from_millis(75);
/// The pause between two queries to the Sentinels while the named server does not answer: a
/// failover that was just commanded ends within a few of them.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);
/// The maximum number of Sentinels that are discovered through others, so that a broken or hostile
/// Sentinel cannot make a process open any number of connections. Deployments have three to seven.
const MAX_DISCOVERED: usize = 16;
/// The number of polls of a Sentinel between two queries for its peers: Sentinels are replaced by
/// people, not within seconds.
const DISCOVER_EVERY: usize = 10;

const ANNOUNCEMENT: &str = "+switch-master";

/// The Sentinels of a master. The watcher ends when this is dropped.
pub(crate) struct Sentinels(Arc<SentinelsInner>);

struct SentinelsInner {
    name: Arc<str>,
    /// The settings for connections to the master, without its address.
    template: Endpoint,
    mapping: Mapping,
    owner: Arc<dyn Owner>,
    /// The number of configured Sentinels. They come first; the others are discovered.
    configured: usize,
    sentinels: Mutex<Vec<Arc<Sentinel>>>,
    /// Changes with each report.
    reported: watch::Sender<()>,
    master: Mutex<Master>,
    /// Set by the first call.
    watcher: OnceLock<AbortHandle>,
    has_warned: AtomicBool,
    /// The last master that was unusable.
    unusable: Mutex<Option<Address>>,
}

/// The server that commands are sent to.
#[derive(Default)]
struct Master {
    address: Option<Address>,
    /// Its name and its address, for errors.
    named: Option<Arc<str>>,
    /// The number of changes. A connection of an earlier generation is outdated.
    generation: u64,
}

struct Sentinel {
    endpoint: Endpoint,
    /// Asks it for a poll without a pause.
    wake: Notify,
    state: Mutex<SentinelState>,
}

#[derive(Default)]
struct SentinelState {
    report: Report,
    connection: Option<Session>,
    id: Option<String>,
    /// The other Sentinels that it knows.
    peers: Option<Vec<Peer>>,
}

struct Peer {
    id: String,
    address: Address,
}

impl Sentinels {
    /// `configured` are the Sentinels, at least one, each with its own credentials and TLS
    /// settings. `template` has the settings for the login at the master `name`, without its
    /// address.
    pub(crate) fn new(
        configured: Vec<Endpoint>,
        name: String,
        template: Endpoint,
        mapping: Mapping,
        owner: Arc<dyn Owner>,
    ) -> Self {
        let mut sentinels: Vec<Arc<Sentinel>> = vec![];
        for endpoint in configured {
            if sentinels.iter().all(|it| it.endpoint.place() != endpoint.place()) {
                sentinels.push(Arc::new(Sentinel::new(endpoint)));
            }
        }
        Self(Arc::new(SentinelsInner {
            name: name.into(),
            template,
            mapping,
            owner,
            configured: sentinels.len(),
            sentinels: Mutex::new(sentinels),
            reported: watch::Sender::new(()),
            master: Mutex::default(),
            watcher: OnceLock::new(),
            has_warned: AtomicBool::new(false),
            unusable: Mutex::default(),
        }))
    }

    /// Returns the name of the master, and its address if it is known.
    pub(crate) fn name(&self) -> Arc<str> {
        let named = lock(&self.0.master).named.clone();
        named.unwrap_or_else(|| self.0.name.clone())
    }

    /// Connects to the master. Returns the connection and its generation, for
    /// [`is_outdated`](Self::is_outdated).
    pub(crate) async fn connect(&self) -> Result<(Session, u64), RedisError> {
        let shared = &self.0;
        let start = Instant::now();
        loop {
            let known = lock(&shared.master).generation;
            let mut failure = None;
            for address in shared.poll_all().await? {
                let connection = shared.open_master(&address);
                match race(connection, shared.until_other_master(&address)).await {
                    Some(Ok(connection)) => {
                        if let Some(generation) = shared.switch_to(known, address) {
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

    /// Returns whether a connection leads to an earlier master.
    pub(crate) fn is_outdated(&self, generation: u64) -> bool {
        lock(&self.0.master).generation != generation
    }

    /// Ensures that the Sentinels are watched.
    pub(crate) fn ensure_watching(&self) {
        self.0.ensure_watching();
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        if let Some(watcher) = self.0.watcher.get() {
            watcher.abort();
        }
    }
}

impl SentinelsInner {
    fn sentinels(&self) -> Vec<Arc<Sentinel>> {
        lock(&self.sentinels).clone()
    }

    fn reports(&self) -> Vec<Report> {
        self.sentinels().iter().map(|it| lock(&it.state).report.clone()).collect()
    }

    fn ensure_watching(self: &Arc<Self>) {
        self.watcher.get_or_init(|| {
            let shared = self.clone();
            home::supervise(move || shared.clone().watch())
        });
    }

    /// Polls all Sentinels. Returns the address that a majority names; without a majority, all
    /// addresses, the best first.
    async fn poll_all(self: &Arc<Self>) -> Result<Vec<Address>, RedisError> {
        self.ensure_watching();
        let asked = Instant::now();
        let mut reported = self.reported.subscribe();
        self.wake_all();
        let mut first_latency: Option<Duration> = None;
        loop {
            let until = match wait(&self.reports(), asked) {
                Wait::Over => break,
                Wait::Needed => ANSWER_TIMEOUT.saturating_mul(3),
                wait => {
                    let latency = *first_latency.get_or_insert_with(|| asked.elapsed());
                    let grace = if wait == Wait::Grace { GRACE } else { LONG_GRACE };
                    latency + grace.max(2 * latency)
                }
            };
            let left = until.saturating_sub(asked.elapsed());
            if timeout(left, reported.changed()).await.is_err() {
                break;
            }
        }
        let candidates = self.candidates().await;
        if candidates.is_empty() { Err(self.no_master()) } else { Ok(candidates) }
    }

    fn wake_all(&self) {
        self.sentinels().iter().for_each(|it| it.wake.notify_one());
    }

    /// Returns the address that the majority of the latest answers names. Without a majority,
    /// returns all addresses, by votes and then by configuration epoch, because an isolated
    /// Sentinel knows an old configuration. The first address with the role master counts, so that
    /// all processes choose the same.
    async fn candidates(&self) -> Vec<Address> {
        let mut votes: Vec<(Address, Vec<Arc<Sentinel>>)> = vec![];
        for sentinel in self.sentinels() {
            let Report::Named(address, _) = lock(&sentinel.state).report.clone() else { continue };
            match votes.iter_mut().find(|it| it.0 == address) {
                Some((_, voters)) => voters.push(sentinel),
                None => votes.push((address, vec![sentinel])),
            }
        }
        let all: usize = votes.iter().map(|(_, voters)| voters.len()).sum();
        if let Some((address, _)) = votes.iter().find(|(_, voters)| 2 * voters.len() > all) {
            return vec![address.clone()];
        }
        let mut ranked = vec![];
        for (address, voters) in votes {
            let mut newest = None;
            for sentinel in &voters {
                newest = newest.max(sentinel.epoch(&self.name).await);
            }
            ranked.push((Reverse((voters.len(), newest)), address));
        }
        ranked.sort();
        ranked.into_iter().map(|(_, address)| address).collect()
    }

    /// Connects to a server. Returns an error if its role is not master.
    async fn open_master(&self, address: &Address) -> Result<Session, RedisError> {
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
                "the master {name} at {host}:{port} does not report its role: {cause}; allow \
                 `+role`"
            ))
        })?;
        match role.first().and_then(|role| String::from_redis_value_ref(role).ok()) {
            Some(role) if role == "master" => Ok(connection),
            role => Err(error(format!(
                "cannot find the master {name}: the Sentinels name {host}:{port}, but its role is \
                 {}; wait for the end of the failover",
                role.unwrap_or_default(),
            ))),
        }
    }

    /// Waits until the Sentinels no longer name an address.
    async fn until_other_master(self: &Arc<Self>, address: &Address) {
        loop {
            sleep(SEARCH_PAUSE).await;
            if self.poll_all().await.is_ok_and(|candidates| !candidates.contains(address)) {
                return;
            }
        }
    }

    /// Sets the address of the master. If it changes, earlier connections are outdated. Returns the
    /// generation, or nothing if another change came after `known`.
    fn switch_to(&self, known: u64, address: Address) -> Option<u64> {
        let new = Place::Tcp(address.clone());
        let (old, generation) = {
            let master = &mut *lock(&self.master);
            if master.address.as_ref() == Some(&address) {
                return Some(master.generation);
            }
            if master.generation != known {
                return None;
            }
            let old = master.address.replace(address);
            master.named = Some(format!("{} ({new})", self.name).into());
            master.generation += 1;
            (old, master.generation)
        };
        if let Some(old) = old {
            let old = Place::Tcp(old);
            self.owner.notify(&Event::MasterChanged { master: &self.name, old: &old, new: &new });
        }
        Some(generation)
    }

    async fn watch(self: Arc<Self>) {
        let mut reported = self.reported.subscribe();
        let mut pollers: Vec<Poller> = vec![];
        loop {
            self.discover();
            let sentinels = self.sentinels();
            pollers.retain(|poller| {
                let is_known = sentinels.iter().any(|it| Arc::ptr_eq(it, &poller.sentinel));
                is_known && !poller.task.is_finished() // it ends if the mapping panics
            });
            for sentinel in sentinels {
                if !pollers.iter().any(|poller| Arc::ptr_eq(&sentinel, &poller.sentinel)) {
                    let task = home::spawn(self.clone().poll(sentinel.clone()));
                    pollers.push(Poller { sentinel, task });
                }
            }
            let _ = timeout(2 * CONNECT_TIMEOUT, self.compare()).await;
            let _ = timeout(POLL_PAUSE, reported.changed()).await;
        }
    }

    /// Compares the latest answers, and switches if they name another master.
    async fn compare(&self) {
        let (known, address) = {
            let master = lock(&self.master);
            (master.generation, master.address.clone())
        };
        // Of any age: a poller without an answer reports a failure.
        let (Some(address), Wait::Over) = (address, wait(&self.reports(), None)) else { return };
        let candidates = self.candidates().await;
        // Without a majority, the current master stays if its role is master.
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
                    self.switch_to(known, candidate);
                    return;
                }
                Err(error) => self.report_unusable(candidate, &error),
            }
        }
    }

    /// Reports once that the master that the Sentinels name is unusable.
    fn report_unusable(&self, address: Address, error: &RedisError) {
        if lock(&self.unusable).replace(address.clone()).as_ref() != Some(&address) {
            let address = Place::Tcp(address);
            let event = Event::MasterUnusable { master: &self.name, address: &address, error };
            self.owner.notify(&event);
        }
    }

    /// Polls a Sentinel, over a new connection after each error.
    async fn poll(self: Arc<Self>, sentinel: Arc<Sentinel>) {
        loop {
            let mut has_answered = false;
            let Err(error) = self.poll_until_error(&sentinel, &mut has_answered).await;
            lock(&sentinel.state).connection = None;
            // A connection that ends may be made anew at once: the vote of the Sentinel is waited
            // for. One that hangs, or rejects, has no vote, so that the others decide without it.
            if has_answered && !error.is_timeout() && !is_reply(&error) {
                self.report(&sentinel, Report::Awaited); // its connection has ended
            } else {
                self.report(&sentinel, Report::Failed(error, Instant::now()));
                let _ = timeout(with_jitter(POLL_PAUSE), sentinel.wake.notified()).await;
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    async fn poll_until_error(
        self: &Arc<Self>,
        sentinel: &Arc<Sentinel>,
        has_answered: &mut bool,
    ) -> Result<Infallible, RedisError> {
        let mut connection = self.connect_to(sentinel).await?;
        lock(&sentinel.state).connection = Some(connection.clone());
        self.ask_master(sentinel, &mut connection).await?;
        *has_answered = true;
        self.subscribe(&mut connection).await?;
        for number in 0.. {
            // The first of these finds changes from before the subscription.
            self.ask_master(sentinel, &mut connection).await?;
            if number % DISCOVER_EVERY == 0 {
                self.ask_peers(sentinel, &mut connection).await?;
            }
            sleep(MIN_PAUSE).await;
            let _ = timeout(with_jitter(POLL_PAUSE), sentinel.wake.notified()).await;
        }
        unreachable!("the numbers do not end")
    }

    async fn connect_to(self: &Arc<Self>, sentinel: &Arc<Sentinel>) -> Result<Session, RedisError> {
        let (shared, weak_sentinel) = (Arc::downgrade(self), Arc::downgrade(sentinel));
        let pushed = move |push: PushInfo| {
            match push.kind {
                PushKind::Disconnection => {
                    weak_sentinel.upgrade().inspect(|it| it.wake.notify_one());
                }
                PushKind::Message => {
                    let shared = shared.upgrade();
                    let message = Msg::from_push_info(push).map(|it| it.get_payload::<String>());
                    // A wrong announcement is harmless, because all Sentinels are polled.
                    if let (Some(shared), Some(Ok(message))) = (shared, message)
                        && message.split(' ').next() == Some(&shared.name)
                    {
                        shared.wake_all();
                    }
                }
                _ => {}
            }
            Ok::<(), SendError>(())
        };
        let pushes = Some(Arc::new(pushed) as _);
        sentinel.endpoint.open(CONNECT_TIMEOUT, Some(ANSWER_TIMEOUT), pushes).await
    }

    async fn ask_master(
        &self,
        sentinel: &Sentinel,
        connection: &mut Session,
    ) -> Result<(), RedisError> {
        let asked = Instant::now();
        let command = sentinel_command("GET-MASTER-ADDR-BY-NAME", Some(&self.name));
        let address: Option<Address> = command.query_async(connection).await?;
        let report = match address {
            Some((host, port)) => Report::Named((self.mapping)(&host, port), asked),
            None => Report::Unknown(asked),
        };
        self.report(sentinel, report);
        Ok(())
    }

    fn report(&self, sentinel: &Sentinel, report: Report) {
        lock(&sentinel.state).report = report;
        self.reported.send_replace(());
    }

    /// Subscribes to announcements. Without the permission, polling has to suffice.
    async fn subscribe(&self, connection: &mut Session) -> Result<(), RedisError> {
        let result = connection.commands.subscribe(ANNOUNCEMENT).await;
        let Err(error) = result else { return Ok(()) };
        if error.is_io_error() || error.is_unrecoverable_error() {
            return Err(error);
        }
        // Several pollers meet here, and one of them reports; no other memory depends on it.
        if !self.has_warned.swap(true, Relaxed) {
            self.owner.notify(&Event::NotSubscribed { master: &self.name, error: &error });
        }
        Ok(())
    }

    /// Asks a Sentinel for its id and its peers. Without the permission, none are discovered.
    async fn ask_peers(
        &self,
        sentinel: &Sentinel,
        connection: &mut Session,
    ) -> Result<(), RedisError> {
        let id = sentinel_command("MYID", None).query_async::<String>(connection).await;
        let id = permitted(id)?;
        let command = sentinel_command("SENTINELS", Some(&self.name));
        let peers: Option<Vec<HashMap<String, String>>> =
            permitted(command.query_async(connection).await)?;
        let read = |it: &HashMap<String, String>| {
            // A Sentinel that was replaced stays in the lists of the others, as down, until each of
            // them gets `SENTINEL RESET`.
            let is_down = it.get("flags").is_some_and(|flags| flags.contains("s_down"));
            let (host, port) = (it.get("ip")?, it.get("port")?.parse().ok()?);
            let (id, address) = (it.get("runid")?.clone(), (self.mapping)(host, port));
            (!is_down).then_some(Peer { id, address })
        };
        let peers = peers.unwrap_or_default().iter().filter_map(read).collect();
        let mut state = lock(&sentinel.state);
        (state.id, state.peers) = (id, Some(peers));
        drop(state);
        self.reported.send_replace(());
        Ok(())
    }

    /// Adds the Sentinels that the majority of the others knows, and removes discovered ones that
    /// it no longer knows. One wrong Sentinel has no majority.
    ///
    /// A Sentinel is known by its id, because one of them can have several addresses: the
    /// configured one, and the one that the others see. Counted twice, it would have two votes.
    fn discover(&self) {
        let sentinels = &mut *lock(&self.sentinels);
        let is_settled = |sentinel: &Arc<Sentinel>| {
            let state = lock(&sentinel.state);
            state.peers.is_some() || matches!(state.report, Report::Failed(..))
        };
        // Until each configured Sentinel has told its id or failed, its peers would name it again
        // under another address.
        if !sentinels[..self.configured].iter().all(is_settled) {
            return;
        }
        let ids = |sentinels: &[Arc<Sentinel>]| -> HashSet<String> {
            sentinels.iter().filter_map(|it| lock(&it.state).id.clone()).collect()
        };
        let (configured_ids, all_ids) = (ids(&sentinels[..self.configured]), ids(sentinels));
        let mut known_by: HashMap<(String, Address), usize> = HashMap::new();
        let mut lists = 0;
        for sentinel in sentinels.iter() {
            let Some(peers) = &lock(&sentinel.state).peers else { continue };
            lists += usize::from(!peers.is_empty());
            let peers: HashSet<_> =
                peers.iter().map(|it| (it.id.clone(), it.address.clone())).collect();
            peers.into_iter().for_each(|peer| *known_by.entry(peer).or_default() += 1);
        }
        if lists == 0 {
            return;
        }
        let template = sentinels[0].endpoint.clone();
        if matches!(template.place(), Place::Unix(_)) {
            return;
        }
        let mut endpoints: Vec<_> = known_by
            .into_iter()
            .filter(|((id, _), count)| {
                // No Sentinel lists itself, so one that has sent a list is missing in one of them.
                let others = lists - usize::from(all_ids.contains(id)).min(lists - 1);
                !configured_ids.contains(id) && 2 * count > others
            })
            .map(|((_, address), _)| template.at(address))
            .filter(|new| {
                let configured = &sentinels[..self.configured];
                configured.iter().all(|it| it.endpoint.place() != new.place())
            })
            .collect();
        // In an order that does not depend on the hash map, so that `truncate` keeps the same ones.
        endpoints.sort_by(|a, b| a.name().cmp(b.name()));
        endpoints.dedup_by(|a, b| a.place() == b.place());
        endpoints.truncate(MAX_DISCOVERED);
        let discovered = sentinels.split_off(self.configured);
        sentinels.extend(endpoints.into_iter().map(|endpoint| {
            let known = discovered.iter().find(|it| it.endpoint.place() == endpoint.place());
            known.cloned().unwrap_or_else(|| Arc::new(Sentinel::new(endpoint)))
        }));
    }

    /// Returns the error for the case that no Sentinel names a master.
    fn no_master(&self) -> RedisError {
        let (name, mut is_unknown, mut silent) = (&self.name, false, String::new());
        for sentinel in self.sentinels() {
            let why = match &lock(&sentinel.state).report {
                Report::Failed(error, _) => error.to_string(),
                Report::Awaited => "no answer yet".to_owned(),
                Report::Unknown(_) | Report::Named(..) => {
                    is_unknown = true;
                    continue;
                }
            };
            let comma = if silent.is_empty() { "" } else { ", " };
            let _ = write!(silent, "{comma}{} ({why})", sentinel.endpoint.name());
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

impl Sentinel {
    fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, wake: Notify::new(), state: Mutex::default() }
    }

    /// Returns the epoch of the configuration that it knows: each failover increases it.
    async fn epoch(&self, name: &str) -> Option<u64> {
        let mut connection = lock(&self.state).connection.clone()?;
        let command = sentinel_command("MASTER", Some(name));
        let master = command.query_async::<HashMap<String, String>>(&mut connection);
        timeout(GRACE, master).await.ok()?.ok()?.get("config-epoch")?.parse().ok()
    }
}

/// The task that polls a Sentinel. It ends when this is dropped.
struct Poller {
    sentinel: Arc<Sentinel>,
    task: AbortHandle,
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn sentinel_command(question: &str, name: Option<&str>) -> Cmd {
    let mut command = redis::cmd("SENTINEL");
    command.arg(question).arg(name);
    command
}

/// Returns nothing if the Sentinel replied with an error.
fn permitted<T>(result: Result<T, RedisError>) -> Result<Option<T>, RedisError> {
    match result {
        Err(error) if is_reply(&error) => Ok(None),
        result => result.map(Some),
    }
}

fn error(text: String) -> RedisError {
    io::Error::other(text).into()
}

#[cfg(test)]
mod tests;
