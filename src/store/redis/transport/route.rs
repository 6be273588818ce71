//! From a key to the server that has it.

use std::{sync::Arc, time::Duration};

use redis::FromRedisValue;
use tokio::runtime::Handle;

use super::{
    breaker::Health,
    cluster::Cluster,
    connection::{Connection, Question},
    link::{Deadline, Link},
    probe::Probe,
    release::{Job, Queue},
    server::Server,
};
use crate::error::StoreError;

/// The way to what answers about a key.
#[derive(Clone)]
pub(crate) enum Route {
    One(Arc<Link>),
    Cluster(Arc<Cluster>),
}

impl Route {
    /// Makes the way to one server, over a number of connections.
    pub(crate) fn to(server: Server, connections: usize) -> Self {
        Self::One(Arc::new(Link::new(server, connections)))
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    pub(crate) fn health(&self, deadline: Duration) -> Health {
        match self {
            Self::One(link) => link.health(deadline),
            Self::Cluster(cluster) => cluster.health(deadline),
        }
    }

    /// Where a connection was made.
    pub(crate) fn runtime(&self) -> Option<Handle> {
        match self {
            Self::One(link) => link.runtime(),
            Self::Cluster(cluster) => cluster.runtime(),
        }
    }

    /// Has the server that has the key do something in the background.
    pub(crate) fn release_later(&self, job: Job) {
        Queue::push(&self.link_of(job.key()), self, job);
    }

    /// The connections to the server that has the key.
    pub(crate) fn link_of(&self, key: &str) -> Arc<Link> {
        match self {
            Self::One(link) => link.clone(),
            Self::Cluster(cluster) => cluster.link_of(key.as_bytes()),
        }
    }

    /// Proves that each server can decide.
    pub(crate) async fn ping(&self, deadline: Deadline, prefix: &str) -> Result<(), StoreError> {
        match self {
            Self::One(link) => {
                let probe = Probe::beside(format!("{prefix}:{{ping}}").as_bytes());
                let ((), _) = link.ask(deadline, Question::new(&probe.by_text())).await?;
                link.ask(deadline, probe.question()).await.map(|((), _)| ())
            }
            Self::Cluster(cluster) => cluster.ping(deadline, prefix).await,
        }
    }

    /// Asks the server that has the keys.
    pub(crate) async fn ask<T: FromRedisValue>(
        &self,
        deadline: Deadline,
        question: Question<'_>,
    ) -> Result<(T, Connection), StoreError> {
        match self {
            Self::One(link) => {
                Queue::resume(link, || self.clone());
                link.ask(deadline, question).await
            }
            Self::Cluster(cluster) => cluster.ask(deadline, question).await,
        }
    }
}
