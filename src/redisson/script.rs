//! The scripts for Redisson's format: their texts, arguments, replies and status codes. The Lua
//! files describe the other side.

use std::sync::OnceLock;

use redis::{Cmd, FromRedisValue, ParsingError, ToRedisArgs, Value};

use crate::store::ScriptText;

/// A script, made out of its files when it is first used.
#[derive(Debug)]
pub(super) struct Script {
    #[cfg(test)]
    pub(super) files: &'static [&'static str],
    commented: &'static str,
    sent: OnceLock<ScriptText>,
}

/// Takes the number of arguments of the script without the common ones, and the files.
macro_rules! script {
    ($args:literal; $($file:literal),+) => {
        Script {
            #[cfg(test)]
            files: &["limits", $($file),+],
            commented: concat!(
                concat!("local ARGS = ", $args, "\n"),
                include_str!("../../scripts/redisson/limits.lua"),
                $(include_str!(concat!("../../scripts/redisson/", $file, ".lua"))),+
            ),
            sent: OnceLock::new(),
        }
    };
}

pub(super) static ACQUIRE: Script = script!(1; "quick", "rate", "log", "acquire");
pub(super) static RELEASE: Script = script!(3; "rate", "log", "release");
pub(super) static AVAILABLE_PERMITS: Script = script!(0; "rate", "log", "available_permits");
pub(super) static SET_RATE: Script = script!(5; "rate", "log", "set_rate");
pub(super) static EXPIRE: Script = script!(1; "rate", "expire");
pub(super) static CONFIG: Script = script!(0; "rate", "config");

/// The status codes, which are the first element of a reply.
pub(super) const DONE: i64 = 1;
pub(super) const ABOVE_RATE: i64 = 2;
pub(super) const NO_RATE: i64 = 3;
pub(super) const AGAIN: i64 = 4;
/// The rate is per client, so the script needs all keys.
pub(super) const PER_CLIENT: i64 = 5;

impl Script {
    /// Returns the script as it is sent.
    pub(super) fn sent(&self) -> &ScriptText {
        self.sent.get_or_init(|| ScriptText::new(self.commented))
    }

    pub(super) fn by_hash<K: ToRedisArgs>(
        &self,
        keys: &[K],
        args: &[&[u8]],
        template_rate: &str,
        tally: &[u8],
    ) -> Cmd {
        let mut command = redis::cmd("EVALSHA");
        command
            .arg(&*self.sent().hash)
            .arg(keys.len())
            .arg(keys)
            .arg(args)
            .arg(&common(template_rate, tally)[..]);
        command
    }
}

/// Returns the common arguments of all scripts, which are omitted if they are empty.
pub(super) fn common<'a>(template_rate: &'a str, tally: &'a [u8]) -> Vec<&'a [u8]> {
    match (template_rate, tally) {
        ("", []) => vec![],
        _ => vec![template_rate.as_bytes(), tally],
    }
}

pub(super) const ENTRY: usize = 21;

/// Returns the entry of an acquire in the log. It has four bytes for the permits: more are above
/// every rate, so the script denies them, too.
pub(super) fn entry(id: &[u8; 16], permits: u64) -> [u8; ENTRY] {
    let permits = u32::try_from(permits).unwrap_or(u32::MAX);
    let mut entry = [0; ENTRY];
    entry[0] = id.len() as u8;
    entry[1..17].copy_from_slice(id);
    entry[17..].copy_from_slice(&permits.to_le_bytes());
    entry
}

/// The reply of [`ACQUIRE`]. Times are in microseconds, the interval in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct AcquireReply {
    pub(super) status: i64,
    pub(super) wait: f64,
    pub(super) remaining: f64,
    pub(super) replenish: f64,
    pub(super) reset: f64,
    pub(super) rate: f64,
    pub(super) interval: f64,
    pub(super) tally: Vec<u8>,
}

impl FromRedisValue for AcquireReply {
    fn from_redis_value(value: Value) -> Result<Self, ParsingError> {
        const NUMBERS: usize = 7;
        let Value::BulkString(bytes) = value else { return Err("not a reply".into()) };
        let Some((numbers, tally)) = bytes.split_at_checked(8 * NUMBERS) else {
            return Err("the reply is too short".into());
        };
        let mut numbers = numbers
            .chunks_exact(8)
            .map(|bytes| f64::from_le_bytes(bytes.try_into().expect("the chunk has 8 bytes")));
        let mut next = || numbers.next().expect("the reply has 7 numbers");
        Ok(Self {
            status: next() as i64,
            wait: next(),
            remaining: next(),
            replenish: next(),
            reset: next(),
            rate: next(),
            interval: next(),
            tally: tally.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{assert_written, write};

    #[test]
    fn the_script_of_each_action_has_the_hash_in_the_repo() {
        let scripts = [
            ("acquire", &ACQUIRE),
            ("release", &RELEASE),
            ("available_permits", &AVAILABLE_PERMITS),
            ("set_rate", &SET_RATE),
            ("expire", &EXPIRE),
            ("config", &CONFIG),
        ];
        assert_written(scripts.map(|(name, script)| {
            let purpose = format!("{name} of a limiter in Redisson's format.");
            let files = script.files.iter().map(|file| format!("redisson/{file}.lua"));
            let files = format!("ARGS, {}", files.collect::<Vec<_>>().join(", "));
            write(&format!("redisson_{name}"), &purpose, &files, script.sent())
        }));
    }
}
