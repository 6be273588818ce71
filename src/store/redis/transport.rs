//! How commands reach a server: connections, circuit breakers, Sentinels and clusters.

mod answers;
mod breaker;
mod cluster;
mod config;
mod connection;
mod endpoint;
mod link;
mod probe;
mod release;
mod reports;
mod route;
mod sentinel;
mod server;
#[cfg(feature = "tls-rustls")]
mod tls;

pub(crate) use self::link::Deadline;
#[cfg(feature = "tls-rustls")]
pub use self::tls::Tls;
pub use self::{breaker::Health, config::RedisConfig};
pub(super) use self::{
    config::{DEFAULT_DEADLINE, DEFAULT_PREFIX, assert_prefix},
    connection::Question,
    endpoint::ANSWER_TIMEOUT,
    release::{Job, Releases, Run},
    route::Route,
    server::Server,
};
