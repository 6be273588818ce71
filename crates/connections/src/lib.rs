//! Internal to [`tower-ratelimit`](https://docs.rs/tower-ratelimit), which is the crate to use: this
//! one promises nothing, and each version may change all of it.
//!
//! Calls to Redis: connections, circuit breakers, Sentinels and clusters. It knows no limits.
//!
//! Four modules, from the top down, each of which imports only from those below it:
//!
//! * `topology`: one server, the master behind Sentinels, or a cluster; which node gets a command
//! * `health`: whether a node answers and executes scripts, and what the owner hears of that
//! * `link`: a connection to one server, its queue, and the deadlines of commands
//! * `home`: the thread for all that no request waits for
//!
//! `config` and `url` are the settings above them. docs/connections.md has the reasons.

mod config;
mod health;
pub mod home;
mod link;
mod sync;
mod time;
mod topology;
mod url;

pub use self::{
    config::TransportConfig,
    health::{Event, NodeHealth, Owner, Probe, Tell},
    link::{
        ANSWER_TIMEOUT, Claim, Command, Connection, Credentials, Deadline, DynConnection,
        ServerState, TlsSettings, TransportError, is_no_cluster, login_provider,
    },
    sync::share_last_task,
    topology::{Batch, Client, Item, Job, MAX_JOB_AGE},
    url::{FORMS, Parameters, scheme_error},
};
