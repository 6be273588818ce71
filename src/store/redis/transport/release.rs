//! Releases in the background what requests that vanished have reserved or spent: a queue per node, and the workers that
//! empty it. Bounded are the memory, the calls under way, and the work that one call is for the server. No request waits
//! for a release: see [`Deadline::in_background`].

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, time::sleep};

use super::{
    super::script,
    Question,
    answers::is_refusal,
    link::{Deadline, Link},
    route::Route,
};
use crate::{
    algorithm::{Params, Release},
    error::StoreError,
    store::{Settings, lock},
};

/// The most releases that are held for a node. Beyond, reservations pass unused.
const MAX_HELD: usize = 20_000;
/// The most releases of one key in one call.
const MAX_PER_CALL: usize = 100;
/// The most workers of a node, each with one call under way: Redis may do these in one go.
const MAX_WORKERS: usize = 4;
/// A worker begins after this time: what is released with the first request goes into the same calls.
const GATHER: Duration = Duration::from_millis(5);
/// The pause of a worker after a call that the node did not get.
const PAUSE: Duration = Duration::from_millis(50);
/// Workers of which none has moved on for so long are in a runtime that does not run.
const MAX_STANDSTILL: Duration = Duration::from_secs(5);
/// What the node did not get for so long is given up: most reservations have passed unused.
const MAX_AGE: Duration = Duration::from_secs(3_600);

pub(crate) enum Job {
    Key(Releases),
    Task(Task),
}

/// Releases of one key by limiters with one quota, and since when each is held.
pub(crate) struct Releases {
    key: String,
    params: Params,
    all: VecDeque<(Release, Instant)>,
}

/// A call, or several, by which something of a key is released.
pub(crate) struct Task {
    key: String,
    run: Box<dyn Fn() -> Run + Send + Sync>,
    since: Instant,
}

pub(crate) type Run = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

impl Job {
    pub(crate) fn task(key: String, run: Box<dyn Fn() -> Run + Send + Sync>) -> Self {
        Self::Task(Task { key, run, since: Instant::now() })
    }

    pub(crate) fn key(&self) -> &str {
        match self {
            Self::Key(Releases { key, .. }) | Self::Task(Task { key, .. }) => key,
        }
    }

    /// Returns whether it was done, or may have been: it must not be done twice.
    async fn run(&self, route: &Route) -> bool {
        let result = match self {
            Self::Key(releases) => releases.send(route, Deadline::in_background()).await,
            Self::Task(task) => (task.run)().await,
        };
        result.err().is_none_or(|error| error.was_sent() && !error.redis().is_some_and(is_refusal))
    }
}

impl Releases {
    pub(crate) fn new(settings: &Settings, key: String, release: Release) -> Self {
        Self { key, params: settings.params, all: [(release, Instant::now())].into() }
    }

    pub(crate) async fn send(&self, route: &Route, deadline: Deadline) -> Result<(), StoreError> {
        let releases = self.all.iter().map(|(release, _)| release);
        let (command, script) = script::release(&self.key, &self.params, releases);
        let (_, _): (redis::Value, _) =
            route.ask(deadline, Question::script(&command, &script.text)).await?;
        Ok(())
    }

    /// What is equal for releases that can be made by one call.
    fn group(&self) -> Group {
        (self.key.clone(), self.params.args().into_iter().map(f64::to_bits).collect())
    }
}

/// What is to be released by a node.
#[derive(Default)]
pub(crate) struct Queue {
    held: Mutex<Held>,
    /// Whether something is held and has no worker, as the runtime of those has ended.
    is_orphaned: AtomicBool,
}

#[derive(Default)]
struct Held {
    /// What is next; a group that has releases stands there once.
    order: VecDeque<Next>,
    groups: HashMap<Group, Releases>,
    /// The number of releases and tasks.
    count: usize,
    /// The number of workers, of this generation: those before stand still.
    workers: usize,
    generation: u64,
    /// When one of them has moved on last.
    moved: Option<Instant>,
}

enum Next {
    Group(Group),
    Task(Task),
}

/// A key, and the parameters of the script.
type Group = (String, Vec<u64>);

impl Held {
    /// Adds as much as there is room for.
    fn push(&mut self, job: Job) {
        let room = MAX_HELD - self.count;
        match job {
            Job::Task(task) => {
                if room > 0 {
                    self.count += 1;
                    self.order.push_back(Next::Task(task));
                }
            }
            Job::Key(mut releases) => {
                releases.all.truncate(room);
                self.count += releases.all.len();
                match self.groups.entry(releases.group()) {
                    Entry::Occupied(mut known) => known.get_mut().all.append(&mut releases.all),
                    Entry::Vacant(new) if !releases.all.is_empty() => {
                        self.order.push_back(Next::Group(new.key().clone()));
                        new.insert(releases);
                    }
                    Entry::Vacant(_) => {}
                }
            }
        }
    }

    /// Takes what is next, and not too old.
    fn pop(&mut self) -> Option<Job> {
        let now = Instant::now();
        let is_young = |since: Instant| now.saturating_duration_since(since) < MAX_AGE;
        loop {
            match self.order.pop_front()? {
                Next::Task(task) => {
                    self.count -= 1;
                    if is_young(task.since) {
                        return Some(Job::Task(task));
                    }
                }
                Next::Group(group) => {
                    let mut held = self.groups.remove(&group)?;
                    let some = held.all.len().min(MAX_PER_CALL);
                    self.count -= some;
                    let mut all: VecDeque<_> = held.all.drain(..some).collect();
                    all.retain(|(_, since)| is_young(*since));
                    let releases = Releases { key: group.0.clone(), params: held.params, all };
                    if !held.all.is_empty() {
                        self.order.push_back(Next::Group(group.clone()));
                        self.groups.insert(group, held);
                    }
                    if !releases.all.is_empty() {
                        return Some(Job::Key(releases));
                    }
                }
            }
        }
    }
}

impl Queue {
    /// Adds a job for the node behind `link`, which is asked by `route`.
    pub(crate) fn push(link: &Arc<Link>, route: &Route, job: Job) {
        lock(&link.releases().held).push(job);
        Self::start(link, route);
    }

    /// Goes on with what is held, if the runtime of those who did has ended.
    pub(crate) fn resume(link: &Arc<Link>, route: impl FnOnce() -> Route) {
        if link.releases().is_orphaned.load(Relaxed) {
            Self::start(link, &route());
        }
    }

    /// Starts a worker, if there is work for one more: where the caller runs, or else where a connection was made.
    fn start(link: &Arc<Link>, route: &Route) {
        let Some(worker) = Worker::hire(link) else { return };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(worker.work(route.clone()))),
            Err(_) => drop(worker),
        }
        // A runtime that shuts down has dropped it.
        if link.releases().is_orphaned.load(Relaxed)
            && let Some(runtime) = route.runtime()
            && let Some(worker) = Worker::hire(link)
        {
            runtime.spawn(worker.work(route.clone()));
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

/// Works until the queue is empty, or its runtime ends.
struct Worker {
    link: Arc<Link>,
    generation: u64,
    has_left: bool,
}

impl Worker {
    fn hire(link: &Arc<Link>) -> Option<Self> {
        let queue = link.releases();
        let held = &mut *lock(&queue.held);
        if held.moved.is_some_and(|moved| moved.elapsed() > MAX_STANDSTILL) {
            held.generation += 1;
            (held.workers, held.moved) = (0, None);
        }
        if held.workers >= held.order.len().min(MAX_WORKERS) {
            return None;
        }
        held.workers += 1;
        held.moved.get_or_insert_with(Instant::now);
        queue.is_orphaned.store(false, Relaxed);
        Some(Self { link: link.clone(), generation: held.generation, has_left: false })
    }

    async fn work(mut self, route: Route) {
        sleep(GATHER).await;
        while let Some(job) = self.next() {
            if !job.run(&route).await {
                route.release_later(job); // by the node that has the key now
                sleep(PAUSE).await;
            }
        }
    }

    fn next(&mut self) -> Option<Job> {
        let held = &mut *lock(&self.link.releases().held);
        if held.generation != self.generation {
            return None;
        }
        let job = held.pop();
        held.moved = Some(Instant::now());
        if job.is_none() {
            // With the lock still held: else what is pushed now would have no worker.
            self.has_left = true;
            held.leave();
        }
        job
    }
}

impl Held {
    fn leave(&mut self) {
        self.workers -= 1;
        if self.workers == 0 {
            self.moved = None;
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let queue = self.link.releases();
        let held = &mut *lock(&queue.held);
        if !self.has_left && held.generation == self.generation {
            held.leave();
            queue.is_orphaned.store(held.workers == 0 && held.count > 0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::{
        Algorithm, Quota,
        store::redis::transport::{config::endpoint, server::Server},
    };

    #[derive(Clone, Debug)]
    enum Step {
        Push { key: u8, limit: u32, releases: usize, is_old: bool },
        PushTask { is_old: bool },
        Pop,
    }

    fn step() -> impl Strategy<Value = Step> {
        let is_old = || prop::bool::weighted(0.1);
        prop_oneof![
            (0..20_u8, 10..12_u32, 0..3_000_usize, is_old()).prop_map(
                |(key, limit, releases, is_old)| Step::Push { key, limit, releases, is_old }
            ),
            is_old().prop_map(|is_old| Step::PushTask { is_old }),
            Just(Step::Pop),
        ]
    }

    fn since(is_old: bool) -> Instant {
        Instant::now() - if is_old { MAX_AGE } else { Duration::ZERO }
    }

    fn task(is_old: bool) -> Job {
        let run = || -> Run { Box::pin(async { Ok(()) }) };
        Job::Task(Task { key: String::new(), run: Box::new(run), since: since(is_old) })
    }

    /// By key and parameters, the numbers of releases; those of tasks are 0.
    type Numbers = HashMap<Group, Vec<f64>>;

    impl Held {
        fn pop_into(&mut self, popped: &mut Numbers) -> bool {
            match self.pop() {
                Some(Job::Task(_)) => popped.entry(Group::default()).or_default().push(0.0),
                Some(Job::Key(releases)) => {
                    assert!((1..=MAX_PER_CALL).contains(&releases.all.len()));
                    let numbers = releases.all.iter().map(|(it, _)| it.units);
                    popped.entry(releases.group()).or_default().extend(numbers);
                }
                None => return false,
            }
            true
        }

        fn check(&self) {
            let is_group = |next: &&Next| matches!(next, Next::Group(_));
            let groups = self.order.iter().filter(is_group).count();
            let releases: usize = self.groups.values().map(|it| it.all.len()).sum();
            assert_eq!(groups, self.groups.len(), "a group stands in the order once");
            assert!(self.groups.values().all(|it| !it.all.is_empty()));
            assert_eq!(self.count, releases + self.order.len() - groups);
            assert!(self.count <= MAX_HELD);
        }
    }

    #[test]
    fn a_node_has_few_workers_which_are_replaced_if_they_stand_still() {
        let server = Server::One(endpoint("redis://127.0.0.1:1/"));
        let link = Arc::new(Link::new(server, 1));
        let queue = link.releases();
        (0..10).for_each(|_| lock(&queue.held).push(task(false)));
        let hire = || (0..10).map_while(|_| Worker::hire(&link)).collect::<Vec<_>>();
        let is_orphaned = || queue.is_orphaned.load(Relaxed);

        let mut idle = hire();
        assert_eq!(idle.len(), MAX_WORKERS);
        lock(&queue.held).moved = Some(Instant::now() - 2 * MAX_STANDSTILL);
        let busy = hire();
        assert_eq!(busy.len(), MAX_WORKERS);
        assert!(idle[0].next().is_none(), "it has been replaced");
        drop(idle);
        assert!(hire().is_empty() && !is_orphaned());

        drop(busy); // as when their runtime ends
        assert!(is_orphaned());
        let mut worker = Worker::hire(&link).unwrap();
        assert!(!is_orphaned());
        while worker.next().is_some() {}
        let left = { lock(&queue.held).workers };
        assert_eq!((left, { lock(&queue.held).count }), (0, 0));
        drop(worker);
        assert!(hire().is_empty() && !is_orphaned());
    }

    proptest! {
        #[test]
        fn a_queue_is_bounded_and_returns_once_and_in_order_what_it_took_and_is_not_too_old(
            steps in vec(step(), 0..100)
        ) {
            let (mut held, mut number) = (Held::default(), 0.0);
            let (mut taken, mut popped) = (Numbers::new(), Numbers::new());
            for step in steps {
                let before = held.count;
                match step {
                    Step::Push { key, limit, releases, is_old } => {
                        let quota = Quota::per_second(limit);
                        let params = Params::new(Algorithm::FixedWindow, quota).unwrap();
                        let numbers: Vec<_> = (1..=releases).map(|it| number + it as f64).collect();
                        number += releases as f64;
                        let all = numbers.iter().map(|it| (Release::grant(*it), since(is_old)));
                        let (key, all) = (key.to_string(), all.collect());
                        let releases_of_key = Releases { key, params, all };
                        let group = releases_of_key.group();
                        held.push(Job::Key(releases_of_key));
                        let took = held.count - before;
                        prop_assert_eq!(took, releases.min(MAX_HELD - before));
                        if !is_old && took > 0 {
                            taken.entry(group).or_default().extend(&numbers[..took]);
                        }
                    }
                    Step::PushTask { is_old } => {
                        held.push(task(is_old));
                        if !is_old && held.count > before {
                            taken.entry(Group::default()).or_default().push(0.0);
                        }
                    }
                    Step::Pop => {
                        held.pop_into(&mut popped);
                    }
                }
                held.check();
            }
            while held.pop_into(&mut popped) {
                held.check();
            }
            prop_assert_eq!(held.count, 0);
            prop_assert_eq!(popped, taken);
        }
    }
}
