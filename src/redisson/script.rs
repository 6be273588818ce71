//! The scripts for Redisson's format: their text, hash and status codes. Their arguments and
//! replies are described in the Lua files.

use std::sync::OnceLock;

use redis::{Cmd, Script as Hashed};

/// A script, and the hash by which a server knows it.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: &'static str,
    hash: OnceLock<String>,
}

macro_rules! script {
    ($($file:literal),+) => {
        Script {
            text: concat!($(include_str!(concat!("../../scripts/redisson/", $file, ".lua"))),+),
            hash: OnceLock::new(),
        }
    };
}

pub(super) static ACQUIRE: Script = script!("rate", "log", "acquire");
pub(super) static RELEASE: Script = script!("rate", "log", "release");
pub(super) static AVAILABLE_PERMITS: Script = script!("rate", "log", "available_permits");
pub(super) static SET_RATE: Script = script!("rate", "log", "set_rate");
pub(super) static EXPIRE: Script = script!("rate", "expire");
pub(super) static CONFIG: Script = script!("rate", "config");

/// The status codes, which are the first element of a reply.
pub(super) const DONE: i64 = 1;
pub(super) const ABOVE_RATE: i64 = 2;
pub(super) const NO_RATE: i64 = 3;
pub(super) const AGAIN: i64 = 4;

impl Script {
    pub(super) fn by_hash(&self, keys: &[String], args: &[&[u8]]) -> Cmd {
        let hash = self.hash.get_or_init(|| Hashed::new(self.text).get_hash().to_owned());
        let mut command = redis::cmd("EVALSHA");
        command.arg(hash).arg(keys.len()).arg(keys).arg(args);
        command
    }
}
