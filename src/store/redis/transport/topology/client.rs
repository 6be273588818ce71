//! The door of the transport: executes a command at the server that has its key, on one node or in
//! a cluster.

use std::{sync::Arc, time::Duration};

use redis::FromRedisValue;
use tokio::runtime::Handle;

use super::{
    super::{
        health::{NodeHealth, Tell},
        link::{Claim, Command, Connection, Deadline, TransportError},
    },
    background::{Job, JobQueue},
    cluster::{Cluster, slot_of},
    node::{Common, Node},
    server::Server,
};

#[derive(Clone)]
pub(crate) enum Client {
    Node(Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl Client {
    /// Makes a client of one server, with a number of connections.
    pub(crate) fn of(server: Server, common: Common) -> Self {
        Self::Node(Arc::new(Node::new(server, common)))
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    pub(crate) fn health(&self, deadline: Duration) -> NodeHealth {
        match self {
            Self::Node(node) => node.health(deadline),
            Self::Cluster(cluster) => cluster.health(deadline),
        }
    }

    /// Tells the states of all breakers, each in order with its changes.
    pub(crate) fn tell_breakers(&self, tell: &Arc<Tell>) {
        match self {
            Self::Node(node) => node.tell_breaker(tell),
            Self::Cluster(cluster) => cluster.tell_breakers(tell),
        }
    }

    /// Returns the runtime of a connection.
    pub(crate) fn runtime(&self) -> Option<Handle> {
        match self {
            Self::Node(node) => node.runtime(),
            Self::Cluster(cluster) => cluster.runtime(),
        }
    }

    /// Returns the slot of a key in a cluster; on one server 0.
    pub(crate) fn slot_of(&self, key: &str) -> u16 {
        match self {
            Self::Node(_) => 0,
            Self::Cluster(_) => slot_of(key.as_bytes()) as u16,
        }
    }

    /// Returns the node of the keys in a slot.
    fn node_of(&self, slot: u16) -> Arc<Node> {
        match self {
            Self::Node(node) => node.clone(),
            Self::Cluster(cluster) => cluster.node_of(slot.into()),
        }
    }

    /// Returns a number that tells the node of a slot from others.
    pub(crate) fn node_id(&self, slot: u16) -> usize {
        Arc::as_ptr(&self.node_of(slot)).addr()
    }

    /// Returns whether the breaker of the node is closed for calls with this deadline.
    pub(crate) fn is_available_for(&self, slot: u16, deadline: Deadline) -> bool {
        self.node_of(slot).is_available_for(deadline.within())
    }

    pub(crate) fn has_several_connections(&self) -> bool {
        self.node_of(0).connections() > 1
    }

    /// Returns the index of the connection for a key in the slot.
    pub(crate) fn channel_of(&self, slot: u16, key: &str) -> usize {
        self.node_of(slot).channel_of(key.as_bytes())
    }

    /// Returns whether a command for the slot that is sent now can be written without a pause.
    pub(crate) fn is_ready(&self, slot: u16, channel: usize) -> bool {
        self.node_of(slot).is_ready(channel)
    }

    /// Waits until the next command for the slot can be sent immediately, or fails.
    pub(crate) async fn ready(&self, slot: u16, channel: usize) {
        if let Self::Cluster(cluster) = self
            && !cluster.knows_slots()
        {
            return; // the call waits for them
        }
        self.node_of(slot).ready(channel).await;
    }

    /// Names the server in an error.
    pub(crate) fn at_server(&self, slot: u16, error: TransportError) -> TransportError {
        self.node_of(slot).named(error)
    }

    /// Records that a caller has no reply at its deadline. `claim` is that of its call, if there is
    /// one. Returns the error of the caller.
    pub(crate) fn record_timeout(
        &self,
        slot: u16,
        deadline: Deadline,
        claim: Option<&Claim>,
    ) -> TransportError {
        self.node_of(slot).record_timeout(deadline, claim)
    }

    /// Records that another caller of a call has failed. Returns its error.
    pub(crate) fn record_failure(
        &self,
        slot: u16,
        deadline: Deadline,
        error: TransportError,
    ) -> TransportError {
        self.node_of(slot).record_failure_of_caller(deadline, error)
    }

    /// Executes a job in the background, at the server that has its key.
    pub(crate) fn execute_later(&self, job: Job) {
        match self {
            Self::Node(node) => JobQueue::push(job, node),
            Self::Cluster(cluster) => JobQueue::push(job, cluster),
        }
    }

    /// Proves that each server can execute the scripts of the owner.
    pub(crate) async fn ping(&self, deadline: Deadline) -> Result<(), TransportError> {
        match self {
            Self::Node(node) => node.ping(deadline).await,
            Self::Cluster(cluster) => cluster.ping(deadline).await,
        }
    }

    /// Executes a command at the server that has its keys.
    pub(crate) async fn execute<T: FromRedisValue>(
        &self,
        deadline: Deadline,
        command: Command<'_>,
    ) -> Result<(T, Connection), TransportError> {
        match self {
            Self::Node(node) => {
                node.background().resume(node);
                node.execute(deadline, command).await
            }
            Self::Cluster(cluster) => cluster.execute(deadline, command).await,
        }
    }

    /// Returns a slot of each server that has keys.
    pub(crate) async fn places(&self, deadline: Deadline) -> Result<Vec<u16>, TransportError> {
        match self {
            Self::Node(_) => Ok(vec![0]),
            Self::Cluster(cluster) => cluster.places(deadline).await,
        }
    }

    /// Executes a command without keys at the server of a slot.
    pub(crate) async fn execute_at<T: FromRedisValue>(
        &self,
        place: u16,
        deadline: Deadline,
        command: Command<'_>,
    ) -> Result<T, TransportError> {
        let (reply, _) = self.node_of(place).execute(deadline, command).await?;
        Ok(reply)
    }
}
