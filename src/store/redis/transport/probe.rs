//! The probe: a script that changes nothing, but needs all that a decision needs. A Redis that
//! rejects writes or scripts still answers `TIME`.

use std::sync::LazyLock;

use redis::{Cmd, Script};

use super::command::Command;

const TEXT: &str = include_str!("../../../../scripts/probe.lua");
static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(TEXT));

#[derive(Debug)]
pub(crate) struct Probe(Cmd);

impl Probe {
    /// Makes the probe of a ping, which uses every command of the scripts that decide.
    pub(crate) fn ping(key: &[u8]) -> Self {
        let Self(mut command) = Self::beside(key);
        command.arg("ping");
        Self(command)
    }

    /// Makes a probe with a separate key in the slot of `key`, with the same prefix.
    pub(crate) fn beside(key: &[u8]) -> Self {
        let tag = key.iter().position(|it| *it == b'{');
        let is_tagged = tag.is_some_and(|open| key[open + 1..].contains(&b'}'));
        let key = match is_tagged {
            true => [key, b":probe"].concat(),
            false => [b"{", key, b"}:probe"].concat(),
        };
        let mut command = redis::cmd("EVALSHA");
        command.arg(SCRIPT.get_hash()).arg(1).arg(key);
        Self(command)
    }

    /// Returns the same script by its text. A ping sends both forms: a decision needs the
    /// permission for each of them.
    pub(crate) fn by_text(&self) -> Cmd {
        self.command().by_text().expect("a probe is a script")
    }

    pub(crate) fn command(&self) -> Command<'_> {
        Command::script(&self.0, TEXT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_key_is_in_the_slot_of_the_other_key() {
        for (key, probe) in [
            (
                "ratelimit:default:token-bucket:{alice}",
                "ratelimit:default:token-bucket:{alice}:probe",
            ),
            ("{LIMITER_NAME}:value", "{LIMITER_NAME}:value:probe"),
            ("LIMITER_NAME", "{LIMITER_NAME}:probe"),
        ] {
            assert_eq!(Probe::beside(key.as_bytes()).command().key(), probe.as_bytes());
        }
    }
}
