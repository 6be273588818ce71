//! The border: the only place in which errors and states of the connections become those of a
//! store. It adds hints for users, and knows the errors of the scripts.

use std::{error::Error, fmt};

use redis::RedisError;

use super::transport::{ServerState, TransportError};
use crate::{
    error::{ErrorKind, StoreError},
    store::Status,
};

/// An error of the connections, whose cause has a hint.
#[derive(Debug)]
pub(super) struct ExplainedError {
    error: TransportError,
    /// Takes the place of the error's own cause.
    cause: Option<HintedCause>,
}

#[derive(Debug)]
struct HintedCause(String);

impl ExplainedError {
    /// `prefix` is that of the keys, if the error can be about a permission for keys.
    pub(super) fn new(error: TransportError, prefix: Option<&str>) -> Self {
        let hint = error.redis().and_then(|error| hint(error, prefix));
        let cause = error.source().zip(hint);
        let cause = cause.map(|(cause, hint)| HintedCause(format!("{cause}; {hint}")));
        Self { error, cause }
    }

    /// Returns the text of the innermost cause.
    pub(super) fn reason(&self) -> String {
        self.source().map_or_else(|| self.to_string(), ToString::to_string)
    }

    /// Returns the error of the crate `redis`, if there is one.
    #[cfg(feature = "tracing")]
    pub(super) fn redis(&self) -> Option<&RedisError> {
        self.error.redis()
    }

    #[cfg(feature = "tracing")]
    pub(super) fn server(&self) -> Option<&str> {
        self.error.server()
    }

    pub(super) fn into_store_error(self) -> StoreError {
        let error = &self.error;
        let kind = match () {
            () if error.is_timeout() => ErrorKind::Timeout,
            () if error.is_interrupted() => ErrorKind::Interrupted,
            () if error.is_circuit_open() => ErrorKind::CircuitOpen,
            () if error.is_error_reply() => ErrorKind::ErrorReply,
            () => ErrorKind::Other,
        };
        StoreError::new(kind, error.may_have_run(), self)
    }
}

impl fmt::Display for ExplainedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for ExplainedError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.cause {
            Some(cause) => Some(cause),
            None => self.error.source(),
        }
    }
}

impl fmt::Display for HintedCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for HintedCause {}

impl From<TransportError> for StoreError {
    fn from(error: TransportError) -> Self {
        ExplainedError::new(error, None).into_store_error()
    }
}

fn hint(error: &RedisError, prefix: Option<&str>) -> Option<String> {
    let text = error.detail().unwrap_or_default();
    Some(match error.code() {
        Some("WRONGPASS" | "NOAUTH") => {
            "check the user and the password in the URL or in `RedisConfig`".to_owned()
        }
        _ if !lacks_permission(error) => return None,
        _ if text.contains(" access ") && text.contains("key") => format!(
            "allow the user these keys, by `ACL SETUSER USER ~{}:*`, or set the prefix that it may \
             use, by `?prefix=` in the URL",
            prefix.unwrap_or("PREFIX")
        ),
        Some("NOPERM") => {
            "allow the commands that docs/operation.md lists in Permissions".to_owned()
        }
        _ => "`ping` names the missing permission, as does a later event".to_owned(),
    })
}

/// Returns whether the user lacks a permission, for a command or for keys.
pub(super) fn lacks_permission(error: &RedisError) -> bool {
    let of_script = || {
        let detail = error.detail().unwrap_or_default();
        detail.contains("The user executing the script can't") || detail.contains("NOPERM")
    };
    error.code() == Some("NOPERM") || of_script()
}

/// Texts in the errors of a script that found a foreign value in a key, as `scripts/prelude.lua`
/// has them. Redis 6.2 wraps the errors of its commands into an `ERR`.
const KEY_ERRORS: [&str; 3] =
    ["WRONGTYPE", " holds no state of this limiter", " cannot be decided about; "];

/// Returns whether the error concerns one key: it says nothing about others, and its text can
/// contain the key.
pub(super) fn is_of_one_key(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    error.code() == Some("WRONGTYPE") || KEY_ERRORS.iter().any(|text| detail.contains(text))
}

pub(super) fn status_of(state: ServerState) -> Status {
    match state {
        ServerState::Ready => Status::Ready,
        ServerState::Unknown => Status::Unknown,
        ServerState::Rejecting => Status::Rejecting,
        ServerState::Unavailable => Status::Unavailable,
        ServerState::Slow => Status::Slow,
        ServerState::LoginRejected => Status::LoginRejected,
        ServerState::Silent => Status::Silent,
        ServerState::Refused => Status::Refused,
        ServerState::Unreachable => Status::Unreachable,
    }
}
