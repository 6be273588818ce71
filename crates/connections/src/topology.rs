//! Which server gets a command: one server, the master behind Sentinels, or the node of a cluster
//! that has the key. It makes the connections, and sends probes and jobs in the background.

mod background;
mod channel;
mod channels;
mod client;
mod cluster;
mod node;
mod sentinel;
mod server;

pub use self::{
    background::{Batch, Item, Job, MAX_JOB_AGE},
    client::Client,
};
pub(crate) use self::{cluster::Cluster, node::Common, sentinel::Sentinels, server::Server};
