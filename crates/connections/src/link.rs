//! A connection to one server: opening it, the queue and the writer of its commands, their
//! deadlines and replies. It knows neither breakers nor the choice of a server.

mod claim;
mod clock_offset;
mod command;
mod connection;
mod deadline;
mod endpoint;
mod error;
#[cfg(test)]
#[allow(dead_code)]
pub(super) mod fake;
mod header;
mod line;
mod login;
mod queue;
mod server_state;
mod session;
mod silence;
#[cfg_attr(not(feature = "tls-rustls-no-provider"), path = "link/no_tls.rs")]
mod tls;
mod traffic;

pub use self::{
    claim::Claim,
    command::Command,
    connection::{Connection, DynConnection},
    deadline::Deadline,
    endpoint::ANSWER_TIMEOUT,
    error::{TransportError, is_no_cluster},
    login::{Credentials, login_provider},
    server_state::ServerState,
    tls::TlsSettings,
};
pub(crate) use self::{
    connection::{Opened, Replied},
    endpoint::{Address, CONNECT_TIMEOUT, Endpoint, Mapping, Place},
    error::{is_of_the_connection, is_reply, is_routine, is_write_rejection},
    header::Header,
    line::MAX_SILENCE,
    login::{Logins, Provider},
    queue::CommandQueue,
    session::Session,
    tls::{Connector, connector},
};
