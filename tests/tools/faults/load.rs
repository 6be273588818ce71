//! A steady load on stores, and a record of each request.

use std::{
    collections::HashMap,
    error::Error,
    io,
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::{runtime::Handle, task::JoinHandle, time::sleep};
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RedisStore,
    store::{RedisConfig, StoreError},
};
use tracing::Level;

/// The time since the Unix epoch, which all processes of a row share.
pub type Moment = Duration;

pub fn now() -> Moment {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A time in which counts may be lost, for example a replication lag.
pub type Loss = std::ops::Range<Moment>;

/// The rate and the keys of a load. Every `group`, the load moves to new keys. A fifth of the
/// requests is for keys of earlier groups, whose quotas are used up.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The number of tasks for each store.
    pub tasks: usize,
    /// The pause of a task between two requests.
    pub pause: Duration,
    /// The time after which the keys of the next group are used.
    pub group: Duration,
    /// The number of keys in a group.
    pub keys: u32,
    /// The quota of a key per day: one window covers the run, in which no bucket is refilled.
    pub limit: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            tasks: 12,
            pause: Duration::from_millis(5),
            group: Duration::from_millis(500),
            keys: 8,
            limit: 20,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub group: u32,
    pub number: u32,
}

impl Key {
    /// Returns the text of the key, which is also its hash tag in a cluster.
    pub fn name(self) -> String {
        format!("{}-{}", self.group, self.number)
    }
}

#[derive(Clone, Debug)]
pub struct Record {
    pub key: Key,
    pub start: Moment,
    pub end: Moment,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Admitted,
    Denied,
    Failed(String),
}

impl Record {
    pub fn is_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }

    pub fn took(&self) -> Duration {
        self.end.saturating_sub(self.start)
    }

    /// Returns a line from which the record can be parsed.
    pub fn line(&self) -> String {
        let outcome = match &self.outcome {
            Outcome::Admitted => "admitted",
            Outcome::Denied => "denied",
            Outcome::Failed(text) => text,
        };
        let Key { group, number } = self.key;
        let [start, end] = [self.start, self.end].map(|moment| moment.as_micros());
        format!("{group} {number} {start} {end} {outcome}")
    }
}

impl FromStr for Record {
    type Err = Box<dyn Error>;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words: Vec<_> = line.splitn(5, ' ').collect();
        let [group, number, start, end, outcome] = words[..] else {
            return Err(format!("a record has five words, and not {line:?}").into());
        };
        let outcome = match outcome {
            "admitted" => Outcome::Admitted,
            "denied" => Outcome::Denied,
            text => Outcome::Failed(text.to_owned()),
        };
        Ok(Self {
            key: Key { group: group.parse()?, number: number.parse()? },
            start: Duration::from_micros(start.parse()?),
            end: Duration::from_micros(end.parse()?),
            outcome,
        })
    }
}

/// A running load. It is aborted when this is dropped.
pub struct Load {
    settings: Settings,
    pub started: Moment,
    shared: Arc<Shared>,
    stores: Vec<RedisStore>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    records: Mutex<Vec<Record>>,
}

impl Shared {
    fn records(&self) -> MutexGuard<'_, Vec<Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a store that remembers no denials: each request depends on the server, and on its clock.
pub fn forgetful(config: Result<RedisConfig, StoreError>) -> Result<RedisStore, StoreError> {
    RedisStore::new(config?.denial_ttl(Duration::ZERO))
}

impl Load {
    pub fn new(settings: Settings) -> Self {
        Self::since(settings, now())
    }

    /// Makes a load whose first group began at a moment, as a load of another process did.
    pub fn since(settings: Settings, started: Moment) -> Self {
        Self { settings, started, shared: Arc::default(), stores: vec![], tasks: vec![] }
    }

    /// Adds a store, with tasks of its own. It is to be a [`forgetful`] one.
    pub fn add(&mut self, store: &RedisStore) {
        let Settings { tasks, pause, group, keys, limit } = self.settings;
        let quota = Quota::per_day(limit.into()).burst(limit.into());
        let limiter =
            |algorithm: Algorithm| Limiter::new(algorithm.name(), store.clone(), algorithm, quota);
        let limiters = [limiter(Algorithm::FixedWindow), limiter(Algorithm::token_bucket())];
        for _ in 0..tasks {
            let (limiters, shared, started) = (limiters.clone(), self.shared.clone(), self.started);
            self.tasks.push(Handle::current().spawn(async move {
                while !shared.is_over.load(SeqCst) {
                    let start = now();
                    let latest =
                        start.saturating_sub(started).as_millis() / group.as_millis().max(1);
                    let latest = u32::try_from(latest).unwrap_or(u32::MAX);
                    let group = match fastrand::u8(..5) {
                        0 => fastrand::u32(..=latest),
                        _ => latest,
                    };
                    let key = Key { group, number: fastrand::u32(..keys) };
                    let limiter = &limiters[key.number as usize % limiters.len()];
                    let outcome = match limiter.check(key.name()).await {
                        Ok(decision) if decision.is_allowed() => Outcome::Admitted,
                        Ok(_) => Outcome::Denied,
                        Err(error) => Outcome::Failed(reason(&error)),
                    };
                    shared.records().push(Record { key, start, end: now(), outcome });
                    sleep(pause).await;
                }
            }));
        }
        self.stores.push(store.clone());
    }

    /// Returns the largest number of outages of a store.
    pub fn outages(&self) -> u64 {
        self.stores.iter().map(|store| store.health().outages).max().unwrap_or_default()
    }

    /// Waits while the load runs.
    pub fn run_for(&self, time: Duration) {
        thread::sleep(time);
    }

    /// Waits until a request that began after a moment is decided.
    pub fn until_decided(&self, since: Moment) -> Result<(), Box<dyn Error>> {
        until("requests are decided", || {
            self.shared
                .records()
                .iter()
                .rev()
                .any(|record| record.start >= since && !record.is_failed())
        })?;
        Ok(())
    }

    /// Ends the load after the requests that are under way.
    pub fn finish(mut self) -> Result<Report, Box<dyn Error>> {
        self.shared.is_over.store(true, SeqCst);
        until("all requests have ended", || self.tasks.iter().all(JoinHandle::is_finished))?;
        for task in self.tasks.drain(..) {
            Handle::current().block_on(task).map_err(|_| "a request panicked")?;
        }
        let mut records = std::mem::take(&mut *self.shared.records());
        records.sort_by_key(|record| record.end);
        Ok(Report { records, limit: self.settings.limit })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.is_over.store(true, SeqCst);
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Returns the text of the innermost cause, without advice and without the hash of a script.
pub fn reason(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let text = cause.to_string();
    let text = text.split([';', '\n']).next().unwrap_or_default();
    let text = text.split(" script: ").next().unwrap_or_default();
    text.chars().filter(|char| *char != '"').take(70).collect()
}

/// Waits until a condition holds, and returns the moment.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Result<Moment, Box<dyn Error>> {
    const MAX_TIME: Duration = Duration::from_secs(30);
    let start = now();
    while !is_so() {
        if now() - start > MAX_TIME {
            return Err(format!("not within {MAX_TIME:?}: {what}").into());
        }
        thread::sleep(Duration::from_millis(3));
    }
    Ok(now())
}

/// The records of a load that has ended.
pub struct Report {
    /// Sorted by their ends.
    pub records: Vec<Record>,
    limit: u32,
}

impl Report {
    pub fn errors(&self) -> usize {
        self.records.iter().filter(|record| record.is_failed()).count()
    }

    pub fn worst(&self) -> Duration {
        self.records.iter().map(Record::took).max().unwrap_or_default()
    }

    /// Returns the number of keys.
    pub fn keys(&self) -> usize {
        self.admitted(&[]).len()
    }

    /// Counts the admissions of each key, except those that were under way in a loss.
    fn admitted(&self, losses: &[Loss]) -> HashMap<Key, u32> {
        let mut admitted = HashMap::new();
        for record in self.records.iter().filter(|record| record.outcome == Outcome::Admitted) {
            let is_lost =
                losses.iter().any(|loss| record.start < loss.end && record.end >= loss.start);
            *admitted.entry(record.key).or_default() += u32::from(!is_lost);
        }
        admitted
    }

    /// Counts the keys over their limit, without the admissions that could be lost.
    pub fn over(&self, losses: &[Loss]) -> usize {
        self.admitted(losses).values().filter(|count| **count > self.limit).count()
    }

    /// Returns the largest number of admissions of a key.
    pub fn max_admitted(&self) -> u32 {
        self.admitted(&[]).values().copied().max().unwrap_or_default()
    }

    /// Returns the time from a moment to the first decision about one of these keys.
    pub fn first_of(&self, since: Moment, is_of: impl Fn(Key) -> bool) -> Option<Duration> {
        let mut records =
            self.records.iter().filter(|record| record.end >= since && !record.is_failed());
        Some(records.find(|record| is_of(record.key))?.end - since)
    }

    pub fn first(&self, since: Moment) -> Option<Duration> {
        self.first_of(since, |_| true)
    }

    /// Returns the requests that ended in a time.
    pub fn between(&self, time: Loss) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(move |record| time.contains(&record.end))
    }

    /// Describes the most frequent errors, and the time from the first to the last one.
    pub fn failures(&self) -> Option<String> {
        let failed: Vec<_> = self.records.iter().filter(|record| record.is_failed()).collect();
        let (first, last) = (failed.first()?, failed.last()?);
        let mut reasons = HashMap::<_, usize>::new();
        for record in &failed {
            if let Outcome::Failed(text) = &record.outcome {
                *reasons.entry(text).or_default() += 1;
            }
        }
        let mut reasons: Vec<_> = reasons.into_iter().collect();
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let texts = reasons.iter().take(2).map(|(text, count)| format!("{count} x {text}"));
        let seconds = (last.end - first.end).as_secs_f64();
        Some(format!("{} in {seconds:.1} s", texts.collect::<Vec<_>>().join(", ")))
    }
}

/// The number of events that the stores emitted since the last reset.
pub static EVENTS: AtomicUsize = AtomicUsize::new(0);

/// A writer that counts lines in [`EVENTS`].
struct Counter;

impl io::Write for Counter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        EVENTS.fetch_add(text.iter().filter(|byte| **byte == b'\n').count(), SeqCst);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub fn count_events() -> Result<(), Box<dyn Error>> {
    let builder = tracing_subscriber::fmt().with_max_level(Level::INFO).with_writer(|| Counter);
    builder.try_init().map_err(|error| error.to_string().into())
}
