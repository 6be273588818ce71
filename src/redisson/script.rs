//! The scripts for Redisson's format, and what they return first.

use std::sync::OnceLock;

use redis::{Cmd, Script as Hashed};

/// A script, and by what a server knows it.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: &'static str,
    hash: OnceLock<String>,
}

macro_rules! script {
    ($name:literal) => {
        Script {
            text: concat!(
                include_str!("../../scripts/redisson/log.lua"),
                include_str!(concat!("../../scripts/redisson/", $name, ".lua"))
            ),
            hash: OnceLock::new(),
        }
    };
}

pub(super) static ACQUIRE: Script = script!("acquire");
pub(super) static RELEASE: Script = script!("release");
pub(super) static AVAILABLE_PERMITS: Script = script!("available_permits");
pub(super) static SET_RATE: Script = script!("set_rate");
pub(super) static EXPIRE: Script = script!("expire");
pub(super) static CONFIG: Script = script!("config");

/// What the scripts return first.
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
