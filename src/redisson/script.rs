//! The scripts of the format as commands to Redis, and their replies.

use std::sync::OnceLock;

use redis::{Cmd, FromRedisValue, ParsingError, ToRedisArgs, Value};
use tower_ratelimit_engine::script::ScriptText;
use tower_ratelimit_redisson::{AcquireReply, Script, arguments};

/// Returns a script as it is sent. It is made when it is first used.
pub(super) fn sent(script: Script) -> &'static ScriptText {
    static SENT: [OnceLock<ScriptText>; Script::ALL.len()] =
        [const { OnceLock::new() }; Script::ALL.len()];
    SENT[script as usize].get_or_init(|| ScriptText::new(script.text()))
}

pub(super) fn by_hash<K: ToRedisArgs>(
    script: Script,
    keys: &[K],
    args: &[&[u8]],
    template_rate: &str,
    tally: &[u8],
) -> Cmd {
    let mut command = redis::cmd("EVALSHA");
    command
        .arg(&*sent(script).hash)
        .arg(keys.len())
        .arg(keys)
        .arg(args)
        .arg(&arguments(template_rate, tally)[..]);
    command
}

/// A reply to [`Script::Acquire`].
pub(super) struct Acquired(pub(super) AcquireReply);

impl FromRedisValue for Acquired {
    fn from_redis_value(value: Value) -> Result<Self, ParsingError> {
        let Value::BulkString(bytes) = value else { return Err("not a reply".into()) };
        AcquireReply::read(&bytes).map(Self).ok_or_else(|| "the reply is too short".into())
    }
}

#[cfg(test)]
mod tests {
    use tower_ratelimit_engine::script::{assert_written, write};

    use super::*;

    #[test]
    fn the_script_of_each_action_has_the_hash_in_the_repo() {
        assert_written(Script::ALL.map(|script| {
            let name = script.files().last().unwrap();
            let purpose = format!("{name} of a limiter in Redisson's format.");
            let files = ["limits"].iter().chain(script.files());
            let files = files.map(|file| format!("redisson/{file}.lua"));
            let files = format!("ARGS, {}", files.collect::<Vec<_>>().join(", "));
            write(&format!("redisson_{name}"), &purpose, &files, sent(script))
        }));
    }
}
