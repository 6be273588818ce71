//! What a command has found or done, as text and as JSON, and how it failed.

use std::{process::ExitCode, time::Duration};

use serde_json::{Value, json};
use tower_ratelimit::{
    Error,
    config::Limit,
    store::{ErrorKind, KeyState},
};

use crate::{
    limits::sources,
    text::{Cell, Tone, number, time},
};

/// The exit code if a key has no state.
pub const NO_STATE: u8 = 3;

/// Why a command did nothing, or not all.
#[derive(Debug)]
pub struct Failure {
    pub message: String,
    code: u8,
}

impl Failure {
    /// A failure of Redis.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }

    /// A mistake on the command line or in the file.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 2 }
    }

    pub fn code(&self) -> ExitCode {
        self.code.into()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(sources(&error))
    }
}

/// The error about the value of one key.
pub struct Unreadable {
    /// [`DAMAGED`], or [`OF_ANOTHER_VERSION`].
    pub is: &'static str,
    pub error: String,
}

pub const DAMAGED: &str = "damaged";
pub const OF_ANOTHER_VERSION: &str = "of another version";

/// Texts in the errors about a damaged key.
const TEXTS: [&str; 2] = ["delete it", "WRONGTYPE"];

/// Separates the error about one key, which cannot be read, from the errors of Redis, such as a
/// permission that is missing.
pub fn readable(peeked: Result<KeyState, Error>) -> Result<Result<KeyState, Unreadable>, Failure> {
    match peeked {
        Ok(state) => Ok(Ok(state)),
        Err(Error::Store(error)) if error.kind() == ErrorKind::OtherVersion => {
            let error = format!("{}; use the limitctl of the service's version", sources(&error));
            Ok(Err(Unreadable { is: OF_ANOTHER_VERSION, error }))
        }
        Err(Error::Store(error)) if error.kind() == ErrorKind::ErrorReply => {
            let error = sources(&error);
            match TEXTS.iter().any(|it| error.contains(it)) {
                true => Ok(Err(Unreadable { is: DAMAGED, error })),
                false => Err(Failure::new(error)),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns whether a key has state: it was seen, and not all of its quota is restored yet.
pub fn is_seen(state: &KeyState) -> bool {
    !state.reset_after().is_zero() || state.held() > 0 || state.blocked_for().is_some()
}

/// Returns whether a request would be allowed now, as a cell.
pub fn verdict(state: &KeyState) -> Cell {
    match (state.blocked_for(), state.retry_after()) {
        _ if !is_seen(state) => ("no state".to_owned(), Tone::Warning),
        (Some(rest), _) => (format!("blocked for {}", time(rest)), Tone::Bad),
        _ if state.allows() => ("allowed".to_owned(), Tone::Good),
        (None, Some(wait)) => (format!("denied for {}", time(wait)), Tone::Bad),
        (None, None) if state.quota().is_concurrent() => {
            ("denied until requests end".to_owned(), Tone::Bad)
        }
        (None, None) => ("denied until permits end".to_owned(), Tone::Bad),
    }
}

/// Returns the units that are left, and the times until there are more, as cells.
pub fn rest(state: &KeyState) -> [Cell; 3] {
    let after = |time: Duration| match time.is_zero() {
        true => "-".to_owned(),
        false => crate::text::time(time),
    };
    let mut remaining = number(state.remaining());
    if state.held() > 0 {
        let held = if state.quota().is_concurrent() { "in flight" } else { "held" };
        remaining += &format!(" + {} {held}", number(state.held()));
    }
    [remaining, after(state.replenish_after()), after(state.reset_after())]
        .map(|text| (text, Tone::Plain))
}

pub fn limit_json(name: &str, limit: &Limit) -> Value {
    json!({
        "limit": name,
        "algorithm": limit.algorithm().name(),
        "quota": limit.quota().to_string(),
    })
}

/// Returns the state of a key, with times in seconds.
pub fn state_json(state: &KeyState) -> Value {
    json!({
        "seen": is_seen(state),
        "allowed": state.allows(),
        "remaining": state.remaining(),
        "held": state.held(),
        "replenish_after": state.replenish_after().as_secs_f64(),
        "reset_after": state.reset_after().as_secs_f64(),
        "retry_after": state.retry_after().map(|it| it.as_secs_f64()),
        "blocked_for": state.blocked_for().map(|it| it.as_secs_f64()),
    })
}

/// Returns the fields of both.
pub fn merged(mut first: Value, second: Value) -> Value {
    if let (Some(first), Value::Object(second)) = (first.as_object_mut(), second) {
        first.extend(second);
    }
    first
}
