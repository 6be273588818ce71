//! The door of the transport: executes a command at the server that has its key, on one node or in
//! a cluster.

use std::{sync::Arc, time::Duration};

use redis::{FromRedisValue, Value};
use tokio::time::sleep;

use super::{
    super::{
        health::{NodeHealth, Tell},
        home,
        link::{Command, Connection, Deadline, TransportError},
    },
    background::{Job, JobQueue},
    cluster::{Cluster, slot_of},
    node::{Common, Node},
    server::Server,
};

/// The age of a job at which a worker takes it. Before, it collects items into the same call: when
/// a service is restarted, thousands of requests are dropped within a moment. No request waits for
/// these calls.
const GATHER: Duration = Duration::from_millis(20);
/// The pause of a worker after a call that the node has not executed. Until the breaker opens, the
/// workers of a dead node make 80 calls per second, and then none.
const PAUSE: Duration = Duration::from_millis(50);
/// The shortest pause before items are sent again that were executed and are not done. It is as
/// long as the age of the newest of them.
const AGAIN: Duration = Duration::from_millis(80);

/// The servers of a store, and the connections to them.
#[derive(Clone)]
pub struct Client(Servers);

#[derive(Clone)]
enum Servers {
    Node(Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl Client {
    /// Makes a client of one server, with a number of connections.
    pub(crate) fn of(server: Server, common: Common) -> Self {
        Self(Servers::Node(Arc::new(Node::new(server, common))))
    }

    /// Makes a client of a cluster.
    pub(crate) fn of_cluster(cluster: Cluster) -> Self {
        Self(Servers::Cluster(Arc::new(cluster)))
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.0, Servers::Cluster(_))
    }

    pub fn health(&self, deadline: Duration) -> NodeHealth {
        match &self.0 {
            Servers::Node(node) => node.health(deadline),
            Servers::Cluster(cluster) => cluster.health(deadline),
        }
    }

    /// Tells the states of all breakers, each in order with its changes.
    pub fn tell_breakers(&self, tell: &Arc<Tell>) {
        match &self.0 {
            Servers::Node(node) => node.tell_breaker(tell),
            Servers::Cluster(cluster) => cluster.tell_breakers(tell),
        }
    }

    /// Returns the slot of a key in a cluster; on one server 0.
    pub fn slot_of(&self, key: &str) -> u16 {
        match &self.0 {
            Servers::Node(_) => 0,
            Servers::Cluster(_) => slot_of(key.as_bytes()) as u16,
        }
    }

    /// Returns the node of the keys in a slot.
    pub fn node_of(&self, slot: u16) -> Arc<Node> {
        match &self.0 {
            Servers::Node(node) => node.clone(),
            Servers::Cluster(cluster) => cluster.node_of(slot.into()),
        }
    }

    /// Waits until the next command for the slot can be sent immediately, or fails.
    pub async fn ready(&self, slot: u16, channel: usize) {
        if let Servers::Cluster(cluster) = &self.0
            && !cluster.knows_slots()
        {
            return; // the call waits for them
        }
        self.node_of(slot).ready(channel).await;
    }

    /// Executes a job in the background, at the server that has its key.
    pub fn execute_later(&self, job: Job) {
        let jobs = match &self.0 {
            Servers::Node(node) => node.jobs().clone(),
            Servers::Cluster(cluster) => cluster.node_of(slot_of(job.key())).jobs().clone(),
        };
        if jobs.push(job) {
            let client = self.clone();
            home::supervise(move || client.clone().work(jobs.clone()));
        }
    }

    /// Executes jobs until there are none.
    async fn work(self, jobs: Arc<JobQueue>) {
        loop {
            let young_for = jobs.age().map_or(Duration::ZERO, |age| GATHER.saturating_sub(age));
            if !young_for.is_zero() {
                sleep(young_for).await;
            }
            let Some(mut job) = jobs.next() else { return };
            if !self.run(&jobs, &mut job).await {
                self.execute_later(job); // at the node that has the key now
                sleep(PAUSE).await;
            }
        }
    }

    /// Executes a job. Returns whether it is done, or may be: it must not be repeated.
    async fn run(&self, jobs: &Arc<JobQueue>, job: &mut Job) -> bool {
        match job {
            Job::Batch(batch) => {
                let Some(command) = batch.command() else { return true };
                let deadline = Deadline::in_background();
                let executed = self.execute(deadline, Command::script(&command, batch.text)).await;
                let executed: Result<(Value, _), _> = executed;
                let reply = match executed {
                    Ok((reply, _)) => reply,
                    Err(error) => return error.may_have_run(),
                };
                if let Some((again, age)) = batch.executed(&reply) {
                    let (client, (again, room)) = (self.clone(), jobs.put_aside(again));
                    home::spawn(async move {
                        sleep(age.max(AGAIN)).await;
                        drop(room);
                        client.execute_later(Job::Batch(again));
                    });
                }
                true
            }
            Job::Task(task) => (task.run)().await,
        }
    }

    /// Proves that each server can execute the scripts of the owner.
    pub async fn ping(&self, deadline: Deadline) -> Result<(), TransportError> {
        match &self.0 {
            Servers::Node(node) => node.ping(deadline).await,
            Servers::Cluster(cluster) => cluster.ping(deadline).await,
        }
    }

    /// Executes a command at the server that has its keys.
    pub async fn execute<T: FromRedisValue>(
        &self,
        deadline: Deadline,
        command: Command<'_>,
    ) -> Result<(T, Connection), TransportError> {
        match &self.0 {
            Servers::Node(node) => node.execute(deadline, command).await,
            // In a box, so that a call to one server is not as large as one in a cluster.
            Servers::Cluster(cluster) => Box::pin(cluster.execute(deadline, command)).await,
        }
    }

    /// Returns a slot of each server that has keys.
    pub async fn places(&self, deadline: Deadline) -> Result<Vec<u16>, TransportError> {
        match &self.0 {
            Servers::Node(_) => Ok(vec![0]),
            Servers::Cluster(cluster) => cluster.places(deadline).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        iter,
        sync::mpsc::{self, RecvTimeoutError},
    };

    use redis::RedisConnectionInfo;
    use tokio::sync::Semaphore;

    use super::{
        super::{
            super::{
                health::Nobody,
                link::{Endpoint, Place},
            },
            background::Run,
        },
        *,
    };

    #[test]
    fn a_node_has_few_workers_and_one_that_panics_goes_on_with_the_next_job() {
        let place = Place::Tcp(("127.0.0.1".to_owned(), 1)); // no job calls it
        let server = Server::One(Endpoint::new(place, RedisConnectionInfo::default(), None));
        let common = Common { connections: 1, header: None, owner: Arc::new(Nobody) };
        let client = Client::of(server, common);
        let ((sender, began), go) = (mpsc::channel(), Arc::new(Semaphore::new(0)));
        for number in 0..10 {
            let (sender, go) = (sender.clone(), go.clone());
            let run = move || -> Run {
                let (sender, go) = (sender.clone(), go.clone());
                Box::pin(async move {
                    sender.send(number).unwrap();
                    go.acquire().await.unwrap().forget();
                    assert!(number > 3, "scripted");
                    true
                })
            };
            client.execute_later(Job::task(String::new(), Box::new(run)));
        }
        let first: Vec<_> = began.iter().take(4).collect();
        assert_eq!(first, [0, 1, 2, 3]);
        assert_eq!(began.recv_timeout(10 * GATHER), Err(RecvTimeoutError::Timeout));
        go.add_permits(10);
        let mut rest: Vec<_> = iter::from_fn(|| began.recv().ok()).take(6).collect();
        rest.sort_unstable();
        assert_eq!(rest, [4, 5, 6, 7, 8, 9]);
    }
}
