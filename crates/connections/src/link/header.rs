//! A line before the text of every script, for servers that read flags there. It does not know the
//! scripts.

use std::{collections::HashMap, sync::Mutex};

use redis::{Arg, Cmd, Script};

use super::command::Command;
use crate::sync::lock;

pub(crate) struct Header(String);

/// A script with the line, and the hash of that text.
#[derive(Clone, Copy)]
struct Headed {
    text: &'static str,
    hash: &'static str,
}

/// A command whose script has the line.
pub(crate) struct HeadedCommand {
    cmd: Cmd,
    script: Option<Headed>,
}

impl Header {
    /// `line` is without its end.
    pub(crate) fn new(line: &str) -> Self {
        Self(format!("{line}\n"))
    }

    /// Returns a command that runs the same script with the line; `None` if it runs none.
    pub(crate) fn apply(&self, command: Command<'_>) -> Option<HeadedCommand> {
        let mut args = command.cmd().args_iter().filter_map(|arg| match arg {
            Arg::Simple(arg) => Some(arg),
            _ => None,
        });
        let (name, script) = (args.next()?, args.next()?);
        let mut cmd = redis::cmd(str::from_utf8(name).ok()?);
        let script = match (name, command.text()) {
            (b"EVALSHA", Some(text)) => {
                let headed = self.headed(script, text);
                cmd.arg(headed.hash);
                Some(headed)
            }
            (b"EVAL", _) => {
                cmd.arg([self.0.as_bytes(), script].concat());
                None
            }
            _ => return None,
        };
        args.for_each(|arg| {
            cmd.arg(arg);
        });
        Some(HeadedCommand { cmd, script })
    }

    /// Makes the script with the line. The process keeps it, as it keeps all scripts: there are
    /// few, and their number depends on no request.
    fn headed(&self, hash: &[u8], text: &str) -> Headed {
        type ByLineAndHash = HashMap<(String, Box<[u8]>), Headed>;
        static ALL: Mutex<Option<ByLineAndHash>> = Mutex::new(None);
        let mut all = lock(&ALL);
        let scripts = all.get_or_insert_default();
        *scripts.entry((self.0.clone(), hash.into())).or_insert_with(|| {
            let text = [&self.0, text].concat().leak();
            Headed { text, hash: Script::new(text).get_hash().to_owned().leak() }
        })
    }
}

impl HeadedCommand {
    /// Returns the command, to be sent like `original`.
    pub(crate) fn command<'a>(&'a self, original: Command<'a>) -> Command<'a> {
        original.replaced(&self.cmd, self.script.map(|script| script.text))
    }
}
