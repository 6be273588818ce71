//! The probe: a script that changes nothing, but needs all that a decision needs. A Redis that
//! rejects writes or scripts still answers `TIME`. The client decides when it is sent.

use std::sync::LazyLock;

use tower_ratelimit_engine::script::ScriptText;

use super::connections::Probe;

static SCRIPT: LazyLock<ScriptText> =
    LazyLock::new(|| ScriptText::new(include_str!("../../../scripts/probe.lua")));

/// Makes the probe of a ping, which uses every command of the scripts that decide. The key has this
/// prefix and hash tag.
pub(super) fn ping(prefix: &str, tag: &str) -> Probe {
    let mut probe = of_key(format!("{prefix}:{{{tag}}}:probe").as_bytes());
    probe.cmd.arg("ping");
    probe
}

/// Makes a probe with a separate key in the slot of `key`, with the same prefix; if `key` is empty,
/// with a key with this prefix.
pub(super) fn beside(prefix: &str, key: &[u8]) -> Probe {
    let tag = key.iter().position(|it| *it == b'{');
    let is_tagged = tag.is_some_and(|open| key[open + 1..].contains(&b'}'));
    match key {
        [] => of_key(format!("{prefix}:{{ping}}:probe").as_bytes()),
        _ if is_tagged => of_key(&[key, b":probe"].concat()),
        _ => of_key(&[b"{", key, b"}:probe"].concat()),
    }
}

/// Makes the probe that uses every command, too, with a separate key in the slot of `key`, which
/// may be that of a request: no error contains it.
pub(super) fn proof(prefix: &str, key: &[u8]) -> Probe {
    let mut probe = beside(prefix, key);
    probe.cmd.arg("all");
    probe
}

fn of_key(key: &[u8]) -> Probe {
    let mut cmd = redis::cmd("EVALSHA");
    cmd.arg(&*SCRIPT.hash).arg(1).arg(key);
    Probe { cmd, text: &SCRIPT.text }
}

#[cfg(test)]
mod tests {
    use tower_ratelimit_engine::script::{assert_written, write};

    use super::*;

    #[test]
    fn the_script_of_the_probe_has_the_hash_in_the_repo() {
        let purpose =
            "Finds out whether a server decides: changes nothing, and needs all commands.";
        assert_written([write("probe", purpose, "probe.lua", &SCRIPT)]);
    }

    #[test]
    fn its_key_is_in_the_slot_of_the_other_key() {
        for (key, probe) in [
            (
                "ratelimit:default:token-bucket:{alice}",
                "ratelimit:default:token-bucket:{alice}:probe",
            ),
            ("{LIMITER_NAME}:value", "{LIMITER_NAME}:value:probe"),
            ("LIMITER_NAME", "{LIMITER_NAME}:probe"),
            ("", "shop:{ping}:probe"),
        ] {
            assert_eq!(beside("shop", key.as_bytes()).command().key(), probe.as_bytes());
        }
        assert_eq!(ping("shop", "7").command().key(), b"shop:{7}:probe");
    }
}
