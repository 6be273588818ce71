//! How commands reach a server: connections, circuit breakers, Sentinels and clusters. It knows no
//! limits.
//!
//! From the door down: `client`, `cluster`, `node` (with `background` jobs), `channel`,
//! `connection`, `line` with `unsent`, `server`, `sentinel`, `connector`. The states beside them:
//! `breaker` with `rejections`, `reports` and `events`, `clock_offset`, `deadline`,
//! `header`.

mod background;
mod breaker;
mod channel;
mod client;
mod clock_offset;
mod cluster;
mod command;
mod config;
mod connection;
mod connector;
mod deadline;
mod error;
mod events;
mod header;
mod line;
mod node;
mod probe;
mod rejections;
mod reports;
mod sentinel;
mod server;
#[cfg(feature = "tls-rustls")]
mod tls;
mod unsent;
mod url;

pub use self::config::RedisConfig;
pub(crate) use self::deadline::Deadline;
#[cfg(feature = "tls-rustls")]
pub use self::tls::Tls;
pub(in super::super) use self::url::{FORMS, scheme_error};
pub(super) use self::{
    background::{Batch, Item, Job},
    client::Client,
    command::Command,
    connector::ANSWER_TIMEOUT,
    error::TransportError,
};
