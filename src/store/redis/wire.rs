//! The commands of the scripts, and their replies, in the types of the crate `redis`. What they say
//! is in the engine.

use redis::{Cmd, ErrorKind, RedisError, ServerError, Value};
use tower_ratelimit_engine::script::{Arguments, Found, ScriptText};

/// Makes a command for so many keys, whose arguments the engine writes.
pub(super) fn command(
    keys: usize,
    write: impl FnOnce(Arguments<'_>) -> &'static ScriptText,
) -> (Cmd, &'static ScriptText) {
    let mut command = Cmd::with_capacity(6 + keys, 256 + 64 * keys);
    let script = write(&mut |argument| {
        command.arg(argument);
    });
    (command, script)
}

/// Divides a reply: the time, and what it has for each key. Fails if `read` does not find a reply.
#[expect(clippy::ptr_arg)] // the type of the reply follows from it
pub(super) fn parts<T>(
    reply: &Vec<Value>,
    read: impl FnOnce(i64, &mut dyn Iterator<Item = Found<'_, ServerError>>) -> Option<T>,
) -> Result<T, RedisError> {
    let parts = match reply.split_first() {
        // A value that is neither ends the reply, which is too short then.
        Some((Value::Int(now), rest)) => read(*now, &mut rest.iter().map_while(found)),
        _ => None,
    };
    parts.ok_or_else(malformed)
}

fn found(value: &Value) -> Option<Found<'_, ServerError>> {
    Some(match value {
        Value::BulkString(state) => Found::State(state),
        Value::Array(both) => match &both[..] {
            [Value::BulkString(state), Value::BulkString(verdict)] => Found::Denied(state, verdict),
            _ => return None,
        },
        Value::Int(index) => Found::Limit(*index),
        Value::ServerError(error) => Found::Error(error.clone()),
        _ => return None,
    })
}

/// Returns whether the reply to a release says that the reservations are kept.
pub(super) fn is_kept(reply: &Value) -> bool {
    matches!(reply, Value::Array(reply) if reply.len() > 1)
}

/// The error of bytes that are not a reply.
pub(super) fn malformed() -> RedisError {
    (ErrorKind::UnexpectedReturnType, "not a reply").into()
}
