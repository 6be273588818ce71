//! The probe: a script that does nothing, where decisions could be made. A Redis that may not write, or runs no scripts,
//! answers `TIME` all the same.

use std::sync::LazyLock;

use redis::Cmd;

use super::{super::Script, connection::Question};

static SCRIPT: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("../../../../scripts/probe.lua").to_owned()));

/// Where no key of a decision is known.
const DEFAULT_KEY: &[u8] = b"ratelimit:{probe}";

#[derive(Debug)]
pub(crate) struct Probe(Cmd);

impl Probe {
    /// With a key of its own, in the slot of `key`, and under the same prefix.
    pub(crate) fn beside(key: &[u8]) -> Self {
        let tag = key.iter().position(|it| *it == b'{');
        let is_tagged = tag.is_some_and(|open| key[open + 1..].contains(&b'}'));
        let key = match key {
            b"" => DEFAULT_KEY.to_vec(),
            _ if is_tagged => [key, b":probe"].concat(),
            _ => [b"{", key, b"}:probe"].concat(),
        };
        let mut command = redis::cmd("EVALSHA");
        command.arg(&*SCRIPT.hash).arg(1).arg(key);
        Self(command)
    }

    /// The same script by its text: both are needed, whatever the server knows already.
    pub(crate) fn by_text(&self) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command.arg(&SCRIPT.text).arg(1).arg(self.question().key());
        command
    }

    pub(crate) fn question(&self) -> Question<'_> {
        Question::script(&self.0, &SCRIPT.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_key_is_in_the_slot_of_the_other_one() {
        for (key, probe) in [
            (
                "ratelimit:default:token-bucket:{alice}",
                "ratelimit:default:token-bucket:{alice}:probe",
            ),
            ("{LIMITER_NAME}:value", "{LIMITER_NAME}:value:probe"),
            ("LIMITER_NAME", "{LIMITER_NAME}:probe"),
            ("", "ratelimit:{probe}"),
        ] {
            assert_eq!(Probe::beside(key.as_bytes()).question().key(), probe.as_bytes());
        }
    }
}
