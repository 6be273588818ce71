//! Calls to Redis: connections, circuit breakers, Sentinels and clusters. It knows no limits, and
//! of this crate only jitter and locks: it could be a crate of its own.
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
pub(super) mod home;
mod link;
mod topology;
mod url;

pub use self::link::Credentials;
pub(crate) use self::link::Deadline;
#[cfg(feature = "tls-rustls-no-provider")]
pub(super) use self::link::TlsSettings;
pub(in super::super) use self::url::{FORMS, scheme_error};
pub(super) use self::{
    config::TransportConfig,
    health::{Event, NodeHealth, Owner, Probe},
    link::{ANSWER_TIMEOUT, Claim, Command, ServerState, TransportError, login_provider},
    topology::{Batch, Client, Item, Job},
    url::Parameters,
};
