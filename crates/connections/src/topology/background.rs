//! Jobs that no request waits for: a queue per node. It bounds the memory, the calls under way, and
//! the work of one call for the server. It does not know the purpose of a job.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    mem,
    pin::Pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use redis::{Cmd, Value};

use super::super::link::Command;
use crate::sync::lock;

/// The maximum number of items and tasks in the queue of a node. Further ones are dropped. An item
/// has some 100 bytes, so a queue that is full for an hour holds a few megabytes.
const MAX_QUEUED: usize = 20_000;
/// The maximum number of items in one call. A script executes them without a break, and the server
/// executes nothing else meanwhile. Chosen, not measured: a call of 64 keys takes some 0.15 ms.
const MAX_PER_CALL: usize = 100;
/// The maximum number of workers of a node, each with one call in flight: Redis may execute these
/// calls without a break.
const MAX_WORKERS: usize = 4;
/// The lifetime of a job that the node cannot execute. A job that is repeated is harmless at any
/// time, so this only bounds the time for which memory is held.
pub const MAX_JOB_AGE: Duration = Duration::from_secs(3_600);

pub enum Job {
    Batch(Batch),
    Task(JobTask),
}

/// A command about one key, whose last argument is a list of items. Batches with the same other
/// arguments are merged.
pub struct Batch {
    /// The command without its last argument.
    head: Cmd,
    /// The text of the script that the command names by its hash.
    pub(super) text: &'static str,
    items: VecDeque<(Box<dyn Item>, Instant)>,
}

/// An item of a batch. It is dropped when it was executed, or was given up.
pub trait Item: Send + Sync {
    /// Returns the bytes to send; none if the item is not needed any more.
    fn write(&self) -> Vec<u8>;

    /// Reads the reply to the command. Returns whether the item is to be sent again later.
    fn executed(&self, reply: &Value) -> bool;
}

/// Calls about one key that are not one command.
pub struct JobTask {
    key: String,
    pub(super) run: Box<dyn Fn() -> Run + Send + Sync>,
    since: Instant,
}

/// Returns whether the job is done, or may be: it must not be repeated.
pub type Run = Pin<Box<dyn Future<Output = bool> + Send>>;

impl Job {
    pub fn task(key: String, run: Box<dyn Fn() -> Run + Send + Sync>) -> Self {
        Self::Task(JobTask { key, run, since: Instant::now() })
    }

    pub(super) fn key(&self) -> &[u8] {
        match self {
            Self::Batch(batch) => Command::new(&batch.head).key(),
            Self::Task(task) => task.key.as_bytes(),
        }
    }
}

impl Batch {
    /// `head` is an `EVALSHA` without its last argument, of the script `text`.
    pub fn new(head: Cmd, text: &'static str, item: impl Item + 'static) -> Self {
        let item: Box<dyn Item> = Box::new(item);
        Self { head, text, items: [(item, Instant::now())].into() }
    }

    /// Lets the items read the reply. Returns those that are to be sent again later, and the age
    /// of the newest of them.
    pub(super) fn executed(&mut self, reply: &Value) -> Option<(Self, Duration)> {
        self.items.retain(|(item, _)| item.executed(reply));
        let age = self.items.iter().map(|(_, since)| since.elapsed()).min()?;
        let (head, text, items) = (self.head.clone(), self.text, mem::take(&mut self.items));
        Some((Self { head, text, items }, age))
    }

    /// Returns the command, if there is anything to send.
    pub(crate) fn command(&mut self) -> Option<Cmd> {
        let mut command = self.head.clone();
        let mut bytes = vec![];
        self.items.retain(|(item, _)| {
            let before = bytes.len();
            bytes.extend(item.write());
            bytes.len() > before
        });
        command.arg(&bytes);
        (!bytes.is_empty()).then_some(command)
    }

    fn group(&self) -> GroupHead {
        self.head.get_packed_command().into()
    }
}

/// The jobs of a node.
#[derive(Default)]
pub(crate) struct JobQueue {
    queued: Mutex<QueuedJobs>,
}

#[derive(Default)]
struct QueuedJobs {
    /// The next jobs. A group with items stands here once.
    order: VecDeque<Next>,
    groups: HashMap<GroupHead, Batch>,
    /// The number of items and tasks.
    count: usize,
    /// The number of items that are sent again later, and have their room meanwhile.
    asleep: usize,
    workers: usize,
}

enum Next {
    Group(GroupHead),
    Task(JobTask),
}

/// The common arguments of batches that are merged, in the form in which they are sent.
type GroupHead = Arc<[u8]>;

/// What is given up, to drop without the lock: a value that is dropped can call wakers.
#[derive(Default)]
struct GivenUp(Vec<JobTask>, VecDeque<(Box<dyn Item>, Instant)>);

/// The room of items that are pushed again later. It is free when this is dropped.
pub(crate) struct Room(Arc<JobQueue>, usize);

impl Drop for Room {
    fn drop(&mut self) {
        lock(&self.0.queued).asleep -= self.1;
    }
}

impl QueuedJobs {
    /// Returns for how many more items and tasks there is room.
    fn room(&self) -> usize {
        MAX_QUEUED - self.count - self.asleep
    }

    /// Adds as much as there is room for.
    fn push(&mut self, job: Job, given_up: &mut GivenUp) {
        let room = self.room();
        match job {
            Job::Task(task) if room == 0 => given_up.0.push(task),
            Job::Task(task) => {
                self.count += 1;
                self.order.push_back(Next::Task(task));
            }
            Job::Batch(mut batch) => {
                given_up.1.extend(batch.items.drain(room.min(batch.items.len())..));
                self.count += batch.items.len();
                match self.groups.entry(batch.group()) {
                    Entry::Occupied(mut known) => known.get_mut().items.append(&mut batch.items),
                    Entry::Vacant(new) if !batch.items.is_empty() => {
                        self.order.push_back(Next::Group(new.key().clone()));
                        new.insert(batch);
                    }
                    Entry::Vacant(_) => {}
                }
            }
        }
    }

    /// Takes the next job that is not too old.
    fn pop(&mut self, given_up: &mut GivenUp) -> Option<Job> {
        let now = Instant::now();
        let is_young = |since: Instant| now.saturating_duration_since(since) < MAX_JOB_AGE;
        loop {
            match self.order.pop_front()? {
                Next::Task(task) => {
                    self.count -= 1;
                    if is_young(task.since) {
                        return Some(Job::Task(task));
                    }
                    given_up.0.push(task);
                }
                Next::Group(group) => {
                    let mut rest = self.groups.remove(&group)?;
                    let some = rest.items.len().min(MAX_PER_CALL);
                    self.count -= some;
                    let (items, old): (VecDeque<_>, VecDeque<_>) =
                        rest.items.drain(..some).partition(|(_, since)| is_young(*since));
                    given_up.1.extend(old);
                    let batch = Batch { head: rest.head.clone(), text: rest.text, items };
                    if !rest.items.is_empty() {
                        self.order.push_back(Next::Group(group.clone()));
                        self.groups.insert(group, rest);
                    }
                    if !batch.items.is_empty() {
                        return Some(Job::Batch(batch));
                    }
                }
            }
        }
    }
}

impl JobQueue {
    /// Adds a job. Returns whether the caller is to start a worker, which takes jobs until there
    /// are none.
    pub(crate) fn push(&self, job: Job) -> bool {
        let mut given_up = GivenUp::default();
        let queued = &mut *lock(&self.queued);
        queued.push(job, &mut given_up);
        let needs_worker = queued.workers < queued.order.len().min(MAX_WORKERS);
        queued.workers += usize::from(needs_worker);
        needs_worker
    }

    /// Keeps room for the items of a batch that is pushed again later. Gives up those for which
    /// there is none.
    pub(crate) fn put_aside(self: &Arc<Self>, mut batch: Batch) -> (Batch, Room) {
        let mut queued = lock(&self.queued);
        let count = queued.room().min(batch.items.len());
        queued.asleep += count;
        drop(queued);
        drop(batch.items.split_off(count)); // not under the lock
        (batch, Room(self.clone(), count))
    }

    /// Returns the age of the next job.
    pub(crate) fn age(&self) -> Option<Duration> {
        let queued = lock(&self.queued);
        let since = match queued.order.front()? {
            Next::Task(task) => task.since,
            Next::Group(group) => queued.groups.get(group)?.items.front()?.1,
        };
        Some(since.elapsed())
    }

    /// Returns the next job for a worker. Without one, the worker has ended.
    pub(crate) fn next(&self) -> Option<Job> {
        let mut given_up = GivenUp::default();
        let queued = &mut *lock(&self.queued);
        let job = queued.pop(&mut given_up);
        // Under the same lock: a job that is pushed now starts a worker.
        queued.workers -= usize::from(job.is_none());
        job
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push { key: u8, param: u32, items: usize, is_old: bool },
        PushTask { is_old: bool },
        Pop,
    }

    fn step() -> impl Strategy<Value = Step> {
        let is_old = || prop::bool::weighted(0.1);
        prop_oneof![
            (0..20_u8, 10..12_u32, 0..3_000_usize, is_old())
                .prop_map(|(key, param, items, is_old)| Step::Push { key, param, items, is_old }),
            is_old().prop_map(|is_old| Step::PushTask { is_old }),
            Just(Step::Pop),
        ]
    }

    fn since(is_old: bool) -> Instant {
        Instant::now() - if is_old { MAX_JOB_AGE } else { Duration::ZERO }
    }

    fn task(is_old: bool) -> Job {
        let run = || -> Run { Box::pin(async { true }) };
        Job::Task(JobTask { key: String::new(), run: Box::new(run), since: since(is_old) })
    }

    /// For each key and parameter the numbers of the items; those of tasks are 0.
    type Numbers = HashMap<GroupHead, Vec<u64>>;

    fn of_tasks() -> GroupHead {
        Arc::default()
    }

    impl QueuedJobs {
        fn pop_into(&mut self, popped: &mut Numbers) -> bool {
            match self.pop(&mut GivenUp::default()) {
                Some(Job::Task(_)) => popped.entry(of_tasks()).or_default().push(0),
                Some(Job::Batch(batch)) => {
                    assert!((1..=MAX_PER_CALL).contains(&batch.items.len()));
                    let number = |it: &(Box<dyn Item>, Instant)| {
                        u64::from_le_bytes(it.0.write().try_into().unwrap())
                    };
                    let numbers = batch.items.iter().map(number);
                    popped.entry(batch.group()).or_default().extend(numbers);
                }
                None => return false,
            }
            true
        }

        fn check(&self) {
            let is_group = |next: &&Next| matches!(next, Next::Group(_));
            let groups = self.order.iter().filter(is_group).count();
            let items: usize = self.groups.values().map(|it| it.items.len()).sum();
            assert_eq!(groups, self.groups.len(), "a group stands in the order once");
            assert!(self.groups.values().all(|it| !it.items.is_empty()));
            assert_eq!(self.count, items + self.order.len() - groups);
            assert!(self.count <= MAX_QUEUED);
        }
    }

    struct Number(u64);

    impl Item for Number {
        fn write(&self) -> Vec<u8> {
            self.0.to_le_bytes().to_vec()
        }

        fn executed(&self, _: &Value) -> bool {
            self.0.is_multiple_of(2)
        }
    }

    #[test]
    fn items_that_are_not_done_are_sent_again() {
        let batch = |number| Batch::new(redis::cmd("EVALSHA"), "", Number(number));
        let queue = JobQueue::default();
        (1..=4).for_each(|number| _ = queue.push(Job::Batch(batch(number))));
        let Some(Job::Batch(mut first)) = queue.next() else { panic!("there is a job") };
        let (again, _) = first.executed(&Value::Nil).expect("two are left");
        assert_eq!(again.items.iter().map(|(item, _)| item.write()[0]).collect::<Vec<_>>(), [2, 4]);
        assert!(batch(1).executed(&Value::Nil).is_none());
    }

    #[test]
    fn items_that_are_sent_again_later_have_their_room_meanwhile() {
        let batch = |items: u64| {
            let item =
                |number| -> (Box<dyn Item>, _) { (Box::new(Number(number)), Instant::now()) };
            let items = (0..items).map(|number| item(2 * number)).collect();
            Batch { head: redis::cmd("EVALSHA"), text: "", items }
        };
        let queue = Arc::new(JobQueue::default());
        let count = || lock(&queue.queued).count;
        let all = MAX_QUEUED as u64;
        let (asleep, room) = queue.put_aside(batch(all - 1));
        let (without_room, _room) = queue.put_aside(batch(2));
        assert_eq!((asleep.items.len(), without_room.items.len()), (MAX_QUEUED - 1, 1));
        queue.push(Job::Batch(batch(1)));
        assert_eq!(count(), 0);
        drop(room);
        queue.push(Job::Batch(asleep));
        queue.push(Job::Batch(batch(all)));
        assert_eq!(count(), MAX_QUEUED - 1);
    }

    #[test]
    fn items_that_are_not_needed_any_more_are_not_sent() {
        struct Unneeded;

        impl Item for Unneeded {
            fn write(&self) -> Vec<u8> {
                vec![]
            }

            fn executed(&self, _: &Value) -> bool {
                panic!("it was not sent");
            }
        }

        let unneeded = || Batch::new(redis::cmd("EVALSHA"), "", Unneeded);
        assert!(unneeded().command().is_none());
        let queue = JobQueue::default();
        queue.push(Job::Batch(unneeded()));
        queue.push(Job::Batch(Batch::new(redis::cmd("EVALSHA"), "", Number(1))));
        let Some(Job::Batch(mut both)) = queue.next() else { panic!("there is a job") };
        assert!(both.command().is_some());
        assert!(both.executed(&Value::Nil).is_none());
    }

    /// A value that is dropped with a job, and counts whether it could use the queue then.
    struct Held(Arc<JobQueue>, Arc<[AtomicUsize; 2]>);

    impl Item for Held {
        fn write(&self) -> Vec<u8> {
            vec![0; 8]
        }

        fn executed(&self, _: &Value) -> bool {
            false
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let is_free = self.0.queued.try_lock().is_ok();
            self.1[usize::from(is_free)].fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn what_is_dropped_with_a_job_can_use_the_queue() {
        let (queue, dropped) = (Arc::new(JobQueue::default()), Arc::<[AtomicUsize; 2]>::default());
        let held = || Held(queue.clone(), dropped.clone());
        let batch = |since, items: usize| {
            let item = |_| -> (Box<dyn Item>, _) { (Box::new(held()), since) };
            let items = (0..items).map(item).collect();
            Job::Batch(Batch { head: redis::cmd("EVALSHA"), text: "", items })
        };
        let task = |since| {
            let held = held();
            let run = move || -> Run {
                let _held = &held;
                Box::pin(async { true })
            };
            Job::Task(JobTask { key: String::new(), run: Box::new(run), since })
        };
        queue.push(task(since(true)));
        queue.push(batch(since(true), MAX_QUEUED)); // one more than there is room for
        queue.push(task(since(true)));
        assert!(queue.next().is_none());
        let dropped = [0, 1].map(|index: usize| dropped[index].load(Relaxed));
        assert_eq!(dropped, [0, MAX_QUEUED + 2]);
    }

    proptest! {
        #[test]
        fn a_queue_is_bounded_and_returns_each_job_once_and_in_order_unless_it_is_too_old(
            steps in vec(step(), 0..100)
        ) {
            let (mut queued, mut number) = (QueuedJobs::default(), 0);
            let (mut taken, mut popped) = (Numbers::new(), Numbers::new());
            for step in steps {
                let before = queued.count;
                match step {
                    Step::Push { key, param, items, is_old } => {
                        let mut head = redis::cmd("EVALSHA");
                        head.arg("hash").arg(1).arg(key).arg(param);
                        let numbers: Vec<u64> = (1..=items as u64).map(|it| number + it).collect();
                        number += items as u64;
                        let item = |it: &u64| {
                            let item: Box<dyn Item> = Box::new(Number(*it));
                            (item, since(is_old))
                        };
                        let items_of_key = numbers.iter().map(item).collect();
                        let batch = Batch { head, text: "", items: items_of_key };
                        let group = batch.group();
                        queued.push(Job::Batch(batch), &mut GivenUp::default());
                        let took = queued.count - before;
                        prop_assert_eq!(took, items.min(MAX_QUEUED - before));
                        if !is_old && took > 0 {
                            taken.entry(group).or_default().extend(&numbers[..took]);
                        }
                    }
                    Step::PushTask { is_old } => {
                        queued.push(task(is_old), &mut GivenUp::default());
                        if !is_old && queued.count > before {
                            taken.entry(of_tasks()).or_default().push(0);
                        }
                    }
                    Step::Pop => {
                        queued.pop_into(&mut popped);
                    }
                }
                queued.check();
            }
            while queued.pop_into(&mut popped) {
                queued.check();
            }
            prop_assert_eq!(queued.count, 0);
            prop_assert_eq!(popped, taken);
        }
    }
}
