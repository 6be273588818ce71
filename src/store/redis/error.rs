//! The border: the only place in which errors and states of the connections become those of a
//! store. It adds hints for users, and knows the errors of the scripts.

use std::{error::Error, fmt, sync::Arc};

use redis::RedisError;

use super::connections::{ServerState, TransportError, is_no_cluster};
use crate::{
    error::{ErrorKind, StoreError},
    store::Status,
};

/// An error of the connections, whose cause has a hint.
#[derive(Debug)]
pub(super) struct ExplainedError {
    error: TransportError,
    /// Takes the place of the error's own cause.
    cause: Option<Box<dyn Error + Send + Sync>>,
}

/// The user of the connections and the prefix of the keys, if they are known, for the commands in
/// hints.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    pub(super) user: Option<Arc<str>>,
    pub(super) prefix: Option<Arc<str>>,
}

impl ExplainedError {
    pub(super) fn new(error: TransportError, account: &Account) -> Self {
        let hint = error.redis().and_then(|error| hint(error, account));
        let cause = error.source().zip(hint);
        let cause = cause.map(|(cause, hint)| {
            format!("{}; {hint}", cause.to_string().trim_end_matches('.')).into()
        });
        Self { error, cause }
    }

    /// Returns the text of the innermost cause.
    #[cfg(any(feature = "tracing", test))]
    pub(super) fn reason(&self) -> String {
        self.source().map_or_else(|| self.to_string(), ToString::to_string)
    }

    /// Returns the error and its cause in one line.
    pub(super) fn line(&self) -> String {
        match self.source() {
            Some(cause) => format!("{self}: {}", Escaped(&cause.to_string())),
            None => self.to_string(),
        }
    }

    /// Returns what an event says: the reply of the server, or the error and its cause.
    #[cfg(feature = "tracing")]
    pub(super) fn summary(&self) -> String {
        match self.error.is_error_reply() {
            true => Escaped(&self.reason()).to_string(),
            false => self.line(),
        }
    }

    #[cfg(feature = "tracing")]
    pub(super) fn server(&self) -> Option<&str> {
        self.error.server()
    }

    pub(super) fn into_store_error(self) -> StoreError {
        let error = &self.error;
        let code = error.redis().and_then(RedisError::code);
        let kind = match () {
            () if error.is_timeout() => ErrorKind::Timeout,
            () if error.is_interrupted() => ErrorKind::Interrupted,
            () if error.is_circuit_open() => ErrorKind::CircuitOpen,
            () if code == Some(OTHER_VERSION) => ErrorKind::OtherVersion,
            () if code == Some(DIFFERENT) => ErrorKind::Different,
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
            Some(cause) => Some(&**cause),
            None => self.error.source(),
        }
    }
}

/// Returns the error of a call that names no permissions of an account.
pub(super) fn store_error(error: TransportError) -> StoreError {
    ExplainedError::new(error, &Account::default()).into_store_error()
}

/// The text of an error for one line of a log: no control characters, and of bounded length. A key
/// in it has at most 128 bytes, but its prefix and the name of its limiter have no bound.
struct Escaped<'a>(&'a str);

/// The number of characters of a text in a log.
const MAX_CHARS: usize = 600;

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for char in chars.by_ref().take(MAX_CHARS) {
            match char.is_control() {
                true => write!(f, "{}", char.escape_default())?,
                false => write!(f, "{char}")?,
            }
        }
        f.write_str(if chars.next().is_some() { ".." } else { "" })
    }
}

/// Returns the remedy for an error, as a command if possible.
fn hint(error: &RedisError, account: &Account) -> Option<String> {
    let text = error.detail().unwrap_or_default();
    let user = account.user.as_deref().unwrap_or("USER");
    Some(match error.code() {
        Some("WRONGPASS" | "NOAUTH") => match &account.user {
            Some(user) => {
                format!("check the user `{user}` and its password, in the URL or in `RedisConfig`")
            }
            None => "check the user and the password of the connection".to_owned(),
        },
        // The number of the database, when a connection is opened.
        _ if text.starts_with("DB index is out of range") => {
            "use a lower number of the database, in the URL or in `RedisConfig`, or raise \
             `databases` of the server"
                .to_owned()
        }
        _ if text.starts_with("SELECT is not allowed in cluster mode") => {
            "a cluster has only database 0: leave out the number, and write `redis+cluster://` in \
             the URL"
                .to_owned()
        }
        _ if is_no_cluster(error) => {
            "the server is no cluster: leave out `+cluster` in the URL, or use \
             `RedisConfig::server`"
                .to_owned()
        }
        // As Valkey says it, from 9.1 on.
        _ if text.starts_with("Could not find scripting engine") => {
            "the server has no Lua engine, in which decisions run: load the module of the engine, \
             or use a server that was built with it"
                .to_owned()
        }
        _ if !lacks_permission(error) => return None,
        _ if text.contains(" access ") && text.contains("key") => match &account.prefix {
            Some(prefix) => format!(
                "allow these keys, by `ACL SETUSER {user} ~{prefix}:*`, or set the prefix that the \
                 user may use, by `?prefix=` in the URL"
            ),
            None => "allow the keys of the limiter, as docs/redis-permissions.md says".into(),
        },
        _ => match missing_command(error) {
            Some(command) => format!("allow the command, by `ACL SETUSER {user} +{command}`"),
            None => "`redis-cli ACL LOG` names the missing permission".to_owned(),
        },
    })
}

/// Returns the command that the user may not run, if the error names it: that of the probe, or of
/// Redis.
fn missing_command(error: &RedisError) -> Option<String> {
    let text = error.detail().filter(|_| error.code() == Some("NOPERM"))?;
    let of_probe = text.split([' ', ':']).next()?;
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|it| it.is_ascii_uppercase());
    let name = if is_name(of_probe) { of_probe } else { text.split('\'').nth(1)? };
    Some(name.to_ascii_lowercase())
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
    matches!(error.code(), Some("WRONGTYPE" | OTHER_VERSION))
        || KEY_ERRORS.iter().any(|text| detail.contains(text))
}

/// The code of the error of a state in a form that a script does not know.
const OTHER_VERSION: &str = "VERSION";
/// The code of the error of a request whose units are lost.
const DIFFERENT: &str = "DIFFERENT";

/// The error of a request whose units are lost, because this process has computed otherwise.
pub(super) fn different() -> RedisError {
    redis::make_extension_error(
        DIFFERENT.to_owned(),
        Some(
            "the units of the request cannot be used: Redis has admitted it, and this process has \
             computed that it is denied; they expire or are restored by themselves; run one \
             version of this crate, and report what the event says"
                .to_owned(),
        ),
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the explained error of this reply.
    fn explained(code: &'static str, text: &str) -> ExplainedError {
        let error = redis::make_extension_error(code.to_owned(), Some(text.to_owned()));
        let account = Account { user: Some("limiter".into()), prefix: Some("shop".into()) };
        ExplainedError::new(TransportError::of_redis(error), &account)
    }

    #[test]
    fn a_hint_is_the_command_that_grants_the_missing_permission() {
        let set_user = "`ACL SETUSER limiter";
        let in_script = "The user executing the script can't run this command or subcommand";
        for (code, text, hint) in [
            (
                "NOPERM",
                &*format!("PEXPIREAT on shop:{{ping}}:probe: {in_script}"),
                &*format!("by {set_user} +pexpireat`"),
            ),
            (
                "NOPERM",
                "User limiter has no permissions to run the 'evalsha' command",
                &format!("by {set_user} +evalsha`"),
            ),
            ("NOPERM", "No permissions to access a key", &format!("by {set_user} ~shop:*`")),
            ("ERR", in_script, "ACL LOG"),
            ("WRONGPASS", "invalid username-password pair", "check the user `limiter`"),
            ("ERR", "Could not find scripting engine 'lua'", "has no Lua engine, in which"),
            ("ERR", "DB index is out of range", "use a lower number of the database"),
            ("ERR", "SELECT is not allowed in cluster mode", "leave out the number"),
        ] {
            let reason = explained(code, text).reason();
            assert!(reason.contains(hint) && reason.starts_with(code), "{reason}: {hint}");
        }
    }

    #[test]
    fn the_line_of_an_error_is_escaped_and_bounded() {
        let line = explained("ERR", &format!("the key a\nb{}", "x".repeat(10_000))).line();
        assert!(line.contains("the key a\\nbxx") && line.ends_with("xx.."), "{line}");
        assert!(line.len() < MAX_CHARS + 100 && !line.contains('\n'), "{line}");
    }
}
