//! What requests have reserved or spent that are gone is returned here: by one worker per node, which no request waits
//! for, and which is bounded in memory, in calls under way, and in the work that one call is for the server.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    pin::Pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::Cmd;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    Question, Script,
    link::{Deadline, Link},
    route::Route,
};
use crate::{
    algorithm::{Params, Release},
    error::StoreError,
    store::{Settings, lock},
};

/// The most units of work that are held for a node. Beyond, reservations pass unused.
const MAX_HELD: usize = 20_000;
/// The most releases of one key in one call.
const MAX_PER_CALL: usize = 100;
/// The most calls under way.
const MAX_CALLS: usize = 8;
/// The pause while the node does not answer.
const PAUSE: Duration = Duration::from_millis(50);
/// A worker that has not moved on for so long is in a runtime that does not run.
const MAX_STANDSTILL: Duration = Duration::from_secs(5);
/// A task that waits for the node is given up after this time.
const MAX_AGE: Duration = Duration::from_secs(60);

/// Releases of one key.
pub(super) struct Releases {
    key: String,
    params: Params,
    all: Vec<Release>,
}

pub(super) enum Job {
    Key(Releases),
    /// What releases something of a key.
    Task(String, Task),
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Job {
    pub(super) fn key(&self) -> &str {
        match self {
            Self::Key(Releases { key, .. }) | Self::Task(key, _) => key,
        }
    }
}

impl Releases {
    pub(super) fn new(settings: &Settings, key: String, release: Release) -> Self {
        Self { key, params: settings.params, all: vec![release] }
    }

    /// The same units, spent at `instant`.
    pub(super) fn at(&self, instant: f64) -> Self {
        let at = |release: &Release| Release { instant: Some(instant), ..*release };
        Self { key: self.key.clone(), params: self.params, all: self.all.iter().map(at).collect() }
    }

    pub(super) async fn send(&self, route: &Route, deadline: Deadline) -> Result<(), StoreError> {
        let script = Script::alone(&self.params);
        let question = self.command(script);
        let (_, _): (Vec<u64>, _) =
            route.ask(deadline, Question::script(&question, &script.text)).await?;
        Ok(())
    }

    fn command(&self, script: &Script) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&*script.hash).arg(1).arg(&self.key).arg("release").arg(0).arg(0);
        for arg in self.params.args() {
            command.arg(arg as u64);
        }
        let pair = |release: &Release| {
            let instant = release.instant.expect("a release names the request");
            [instant.to_le_bytes(), release.units.to_le_bytes()].concat()
        };
        command.arg(self.all.iter().flat_map(pair).collect::<Vec<_>>());
        command
    }
}

/// The queue of a node's worker.
#[derive(Default)]
pub(super) struct Queue(Mutex<Held>);

#[derive(Default)]
struct Held {
    keys: HashMap<String, (Params, Vec<(Release, Instant)>)>,
    order: VecDeque<String>,
    tasks: VecDeque<(Task, Instant)>,
    /// The number of releases and tasks.
    count: usize,
    /// When the worker, if there is one, has moved on.
    moved: Option<Instant>,
}

impl Held {
    fn push(&mut self, job: Job) {
        if self.count >= MAX_HELD {
            return;
        }
        let now = Instant::now();
        match job {
            Job::Task(_, task) => {
                self.tasks.push_back((task, now));
                self.count += 1;
            }
            Job::Key(Releases { key, params, all }) => {
                self.count += all.len();
                let order = &mut self.order;
                let (_, held) = self.keys.entry(key).or_insert_with_key(|key| {
                    order.push_back(key.clone());
                    (params, vec![])
                });
                held.extend(all.into_iter().map(|release| (release, now)));
            }
        }
    }

    fn pop(&mut self) -> Option<Job> {
        if let Some((task, _)) = self.tasks.pop_front() {
            self.count -= 1;
            return Some(Job::Task(String::new(), task));
        }
        let key = self.order.pop_front()?;
        let (params, mut held) = self.keys.remove(&key)?;
        let rest = held.split_off(held.len().min(MAX_PER_CALL));
        self.count -= held.len();
        if !rest.is_empty() {
            self.order.push_back(key.clone());
            self.keys.insert(key.clone(), (params, rest));
        }
        let all = held.into_iter().map(|(release, _)| release).collect();
        Some(Job::Key(Releases { key, params, all }))
    }

    /// Drops what is too old: it has passed unused.
    fn give_up_old(&mut self) {
        self.tasks.retain(|(_, since)| since.elapsed() < MAX_AGE);
        self.keys.retain(|_, (_, held)| {
            held.retain(|(_, since)| since.elapsed() < MAX_AGE);
            !held.is_empty()
        });
        let keys = &self.keys;
        self.order.retain(|key| keys.contains_key(key));
        self.count =
            self.tasks.len() + self.keys.values().map(|(_, held)| held.len()).sum::<usize>();
    }
}

impl Queue {
    /// Adds a job for the node behind `link`, which is asked by `route`.
    pub(super) fn push(link: &Arc<Link>, route: &Route, job: Job) {
        let held = &mut *lock(&link.releases().0);
        held.push(job);
        if held.moved.is_some_and(|moved| moved.elapsed() < MAX_STANDSTILL) {
            return;
        }
        let work = work(link.clone(), route.clone());
        if link.spawn(work) {
            held.moved = Some(Instant::now());
        }
    }

    fn pop(&self) -> Option<Job> {
        let held = &mut *lock(&self.0);
        let job = held.pop();
        held.moved = job.as_ref().map(|_| Instant::now());
        job
    }

    fn wait(&self) {
        let held = &mut *lock(&self.0);
        held.give_up_old();
        held.moved = Some(Instant::now());
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

/// Works until the queue is empty.
async fn work(link: Arc<Link>, route: Route) {
    /// Also when its runtime ends meanwhile.
    struct Worker(Arc<Link>);

    impl Drop for Worker {
        fn drop(&mut self) {
            lock(&self.0.releases().0).moved = None;
        }
    }

    let worker = Worker(link);
    let link = &worker.0;
    let mut calls = JoinSet::new();
    loop {
        while calls.len() >= MAX_CALLS {
            calls.join_next().await;
        }
        if !link.is_available() {
            link.releases().wait();
            sleep(PAUSE).await;
            continue;
        }
        let Some(job) = link.releases().pop() else {
            if calls.join_next().await.is_none() {
                break;
            }
            continue;
        };
        let (link, route) = (link.clone(), route.clone());
        calls.spawn(async move {
            match job {
                Job::Task(_, task) => drop(timeout(MAX_AGE, task).await),
                Job::Key(releases) => {
                    let sent = releases.send(&route, Deadline::in_background()).await;
                    // What was sent may have been done, and must not be done twice.
                    if sent.is_err_and(|error| !error.was_sent()) {
                        sleep(PAUSE).await;
                        lock(&link.releases().0).push(Job::Key(releases));
                    }
                }
            }
        });
    }
}
