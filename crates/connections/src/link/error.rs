//! The error of the transport, and the meaning of errors of the crate `redis` for the connection
//! and for later commands. Other modules act on them.

use std::{error::Error, fmt, io, sync::Arc, time::Duration};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::server_state::ServerState;

/// The reason for a missing reply.
#[derive(Clone, Debug)]
pub struct TransportError {
    kind: Kind,
    /// True if Redis may have executed the command.
    was_sent: bool,
    /// The name of the server, if one was chosen.
    server: Option<Arc<str>>,
}

#[derive(Clone, Debug)]
enum Kind {
    Timeout(Duration),
    Late(Duration),
    CircuitOpen,
    Config(Arc<str>),
    Redis(Arc<RedisCause>),
    Interrupted(Arc<RedisCause>),
    Other(Arc<dyn Error + Send + Sync>),
}

/// An error of the crate `redis`, without what Redis puts around it. It has no source, because that
/// has the same text.
#[derive(Clone, Debug)]
struct RedisCause(RedisError);

impl fmt::Display for RedisCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = text_of(&self.0);
        let is_closed = text.eq_ignore_ascii_case("broken pipe");
        f.write_str(if is_closed { "the server closed the connection" } else { own_part(&text) })
    }
}

impl Error for RedisCause {}

/// Returns the text of an error; that of a reply as Redis has written it.
fn text_of(error: &RedisError) -> String {
    match (is_reply(error), error.code(), error.detail()) {
        (true, Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    }
}

/// Returns the part of an error's text that Redis did not put around it: the name of a script is of
/// no use to a reader.
fn own_part(text: &str) -> &str {
    // Redis 7: "OOM command not allowed .. script: HASH, on @user_script:1."
    let text = text.rfind(" script: ").map_or(text, |end| &text[..end]);
    // Redis 6.2: "ERR Error running script (call to f_HASH): @user_script:1: @user_script: 1: .."
    let wrapped = text.find("Error running script").map(|start| &text[start..]);
    let inner = wrapped.and_then(|wrapped| wrapped.rsplit_once("@user_script: "));
    let inner = inner.and_then(|(_, rest)| rest.split_once(": "));
    inner.map_or(text, |(_, own)| own.trim_start_matches('-'))
}

impl TransportError {
    fn new(kind: Kind) -> Self {
        Self { kind, was_sent: true, server: None }
    }

    /// Returns the error of a command without a reply within the deadline.
    pub fn timeout(deadline: Duration) -> Self {
        Self::new(Kind::Timeout(deadline))
    }

    /// Returns the error of a command that left the server too little of the deadline to answer: it
    /// says nothing about the server.
    pub(crate) fn late(deadline: Duration) -> Self {
        Self::new(Kind::Late(deadline))
    }

    /// Returns the error of a command that was not sent, because the breaker is open.
    pub(crate) fn circuit_open() -> Self {
        Self::new(Kind::CircuitOpen).unsent()
    }

    /// Returns the error of invalid settings. The text contains the remedy.
    pub fn config(text: impl Into<Arc<str>>) -> Self {
        Self::new(Kind::Config(text.into())).unsent()
    }

    /// Returns the error of a server that cannot be reached, or that replied with an error.
    pub fn of_redis(error: RedisError) -> Self {
        Self::new(Kind::Redis(RedisCause(error).into()))
    }

    /// Returns the error of a command whose connection ended before the reply.
    pub(crate) fn interrupted(error: RedisError) -> Self {
        Self::new(Kind::Interrupted(RedisCause(error).into()))
    }

    /// Returns the error of a command that failed for another reason.
    pub(crate) fn other(source: impl Error + Send + Sync + 'static) -> Self {
        Self::new(Kind::Other(Arc::new(source)))
    }

    /// Returns the error of a command that no server has executed.
    pub(crate) fn unsent(self) -> Self {
        Self { was_sent: false, ..self }
    }

    pub(crate) fn at(self, server: Option<Arc<str>>) -> Self {
        Self { server, ..self }
    }

    #[cfg(feature = "tracing")]
    pub fn server(&self) -> Option<&str> {
        self.server.as_deref()
    }

    /// Returns what the error says about the server; `Unavailable` if that is unclear.
    pub(crate) fn server_state(&self) -> ServerState {
        match self.redis() {
            _ if self.is_rejected_login() => ServerState::LoginRejected,
            Some(error) => state_of(error),
            None => ServerState::Unavailable,
        }
    }

    /// Returns the error of the crate `redis`, if there is one.
    pub fn redis(&self) -> Option<&RedisError> {
        match &self.kind {
            Kind::Redis(cause) | Kind::Interrupted(cause) => Some(&cause.0),
            _ => None,
        }
    }

    /// Returns the kind of the error that Redis replied with, if it did.
    pub fn server_kind(&self) -> Option<ServerErrorKind> {
        match self.redis()?.kind() {
            ErrorKind::Server(kind) => Some(kind),
            _ => None,
        }
    }

    /// Returns whether Redis may have executed the command: it must not be repeated then.
    pub fn may_have_run(&self) -> bool {
        let is_rejected = |error: &_| is_write_rejection(error) || is_routine(error);
        self.was_sent && !self.redis().is_some_and(is_rejected)
    }

    pub fn is_timeout(&self) -> bool {
        matches!(self.kind, Kind::Timeout(_) | Kind::Late(_))
    }

    pub(crate) fn is_late(&self) -> bool {
        matches!(self.kind, Kind::Late(_))
    }

    pub fn is_circuit_open(&self) -> bool {
        matches!(self.kind, Kind::CircuitOpen)
    }

    pub fn is_interrupted(&self) -> bool {
        matches!(self.kind, Kind::Interrupted(_))
    }

    /// Returns whether the server rejects the user or the password.
    fn is_rejected_login(&self) -> bool {
        self.redis().is_some_and(|error| {
            let is_code = matches!(error.code(), Some("WRONGPASS" | "NOAUTH"));
            is_code || error.kind() == ErrorKind::AuthenticationFailed
        })
    }

    pub fn is_error_reply(&self) -> bool {
        use ErrorKind::{Extension, Server};
        self.redis().is_some_and(|error| matches!(error.kind(), Server(_) | Extension))
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.server.as_ref().map(|server| format!("Redis at {server}"));
        let server = at.as_deref();
        match &self.kind {
            Kind::Timeout(deadline) => {
                let from = server.map(|server| format!(" from {server}")).unwrap_or_default();
                write!(
                    f,
                    "no answer{from} within {deadline:?}; raise `deadline`, or see why the server \
                     is slow"
                )
            }
            Kind::Late(deadline) => write!(
                f,
                "{} had too little of the deadline of {deadline:?} to answer: the process was \
                 stopped, a task blocked its runtime, or the slot was moving",
                server.unwrap_or("Redis")
            ),
            Kind::CircuitOpen => {
                let server = server.unwrap_or("Redis");
                write!(
                    f,
                    "{server} has failed the last calls: calls fail immediately until it answers \
                     them in time; its health names the cause"
                )
            }
            Kind::Config(text) => f.write_str(text),
            Kind::Interrupted(_) => {
                let server = server.unwrap_or("Redis");
                write!(
                    f,
                    "the connection to {server} ended during the call, which may have been executed"
                )
            }
            Kind::Redis(_) if self.is_error_reply() => {
                write!(f, "{} answered with an error", server.unwrap_or("Redis"))
            }
            Kind::Redis(_) | Kind::Other(_) => {
                write!(f, "{} is not available", server.unwrap_or("Redis"))
            }
        }
    }
}

impl Error for TransportError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.kind {
            Kind::Redis(cause) | Kind::Interrupted(cause) => Some(&**cause),
            Kind::Other(source) => Some(&**source),
            _ => None,
        }
    }
}

/// Makes the error of a stage of connecting.
pub(super) fn cannot(do_what: &str, cause: &io::Error, within: Duration, hint: &str) -> RedisError {
    let text = match cause.kind() {
        io::ErrorKind::TimedOut => format!("cannot {do_what}: no answer within {within:?}{hint}"),
        _ => format!("cannot {do_what}: {cause}{hint}"),
    };
    io::Error::new(cause.kind(), text).into()
}

/// Returns what the failure of an attempt to connect says about the server.
fn state_of(error: &RedisError) -> ServerState {
    let text = error.to_string();
    match () {
        () if error.is_connection_refusal() => ServerState::Refused,
        () if !error.is_timeout() => ServerState::Unavailable,
        () if text.starts_with("cannot connect") => ServerState::Unreachable,
        () if ["cannot resolve", "cannot get"].iter().any(|it| text.starts_with(it)) => {
            ServerState::Unavailable // no server was asked
        }
        () => ServerState::Silent, // during TLS or the login
    }
}

/// Returns whether the server has replied, although with an error.
pub(crate) fn is_reply(error: &RedisError) -> bool {
    // The crate `redis` has no name for the kind of an extension.
    let kind = error.kind();
    matches!(kind, ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::UnexpectedReturnType)
}

/// Returns whether the error is part of the protocol: it describes where, when or how to send the
/// command again.
pub(crate) fn is_routine(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, Moved, NoScript, TryAgain};
    matches!(error.kind(), ErrorKind::Server(Ask | Moved | NoScript | TryAgain))
}

/// The codes of the errors with which a server rejects all writes at the moment, for every key.
const WRITE_REJECTIONS: [&str; 9] = [
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
];

/// Returns whether the server rejects writes at the moment. A script ends at its first write then.
pub(crate) fn is_write_rejection(error: &RedisError) -> bool {
    WRITE_REJECTIONS.iter().any(|code| {
        // Redis 6.2 wraps the error that stops a script into an `ERR`.
        let in_detail = || error.detail().is_some_and(|it| it.contains(&format!(" -{code} ")));
        error.code() == Some(code) || in_detail()
    })
}

/// Returns whether a server replied to a question about a cluster that it is in none.
pub fn is_no_cluster(error: &RedisError) -> bool {
    let text = error.detail().unwrap_or_default();
    text.starts_with("This instance has cluster support disabled")
}

/// Returns whether the error means that the connection is unusable. Other errors concern one
/// command.
pub(crate) fn is_of_the_connection(error: &RedisError) -> bool {
    // A server that loads its data may have been replaced as the master.
    let is_loading = error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading);
    error.is_io_error() || error.is_unrecoverable_error() || is_loading || is_of_a_replica(error)
}

/// Returns whether the server is a replica, for example after a failover.
fn is_of_a_replica(error: &RedisError) -> bool {
    use ServerErrorKind::{MasterDown, ReadOnly};
    matches!(error.kind(), ErrorKind::Server(ReadOnly | MasterDown))
        // Redis 6.2 wraps the error that stops a script into an `ERR`.
        || error.detail().is_some_and(|detail| detail.contains(" -READONLY "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_script_begins_with_its_cause() {
        let hash = "897afd4d23ee70efe0ede1685c1c94834429da77";
        for (text, own) in [
            (
                format!("OOM command not allowed. script: {hash}, on @user_script:1."),
                "OOM command not allowed.",
            ),
            (
                format!(
                    "ERR Error running script (call to f_{hash}): @user_script:1: @user_script: \
                     1: -OOM command not allowed."
                ),
                "OOM command not allowed.",
            ),
            ("WRONGPASS invalid".to_owned(), "WRONGPASS invalid"),
            ("connection refused".to_owned(), "connection refused"),
        ] {
            assert_eq!(own_part(&text), own);
        }
    }
}
