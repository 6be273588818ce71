//! A line before the text of every script, for servers that read flags there. It does not know the
//! scripts.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use redis::{Arg, Cmd, Script};

use super::command::Command;
use crate::sync::lock;

pub(super) struct Header {
    line: Box<str>,
    /// By the hash of the script without the line.
    scripts: Mutex<HashMap<Box<[u8]>, Arc<Headed>>>,
}

/// A script with the line, and the hash of that text.
struct Headed {
    text: String,
    hash: Box<str>,
}

/// A command whose script has the line.
pub(super) struct HeadedCommand {
    cmd: Cmd,
    script: Option<Arc<Headed>>,
}

impl Header {
    /// `line` is without its end.
    pub(super) fn new(line: &str) -> Self {
        Self { line: format!("{line}\n").into(), scripts: Mutex::default() }
    }

    /// Returns a command that runs the same script with the line; `None` if it runs none.
    pub(super) fn apply(&self, command: Command<'_>) -> Option<HeadedCommand> {
        let mut args = command.cmd().args_iter().filter_map(|arg| match arg {
            Arg::Simple(arg) => Some(arg),
            _ => None,
        });
        let (name, script) = (args.next()?, args.next()?);
        let mut cmd = redis::cmd(str::from_utf8(name).ok()?);
        let script = match (name, command.text()) {
            (b"EVALSHA", Some(text)) => {
                let headed = self.headed(script, text);
                cmd.arg(&*headed.hash);
                Some(headed)
            }
            (b"EVAL", _) => {
                cmd.arg([self.line.as_bytes(), script].concat());
                None
            }
            _ => return None,
        };
        args.for_each(|arg| {
            cmd.arg(arg);
        });
        Some(HeadedCommand { cmd, script })
    }

    fn headed(&self, hash: &[u8], text: &str) -> Arc<Headed> {
        let scripts = &mut *lock(&self.scripts);
        let headed = scripts.entry(hash.into()).or_insert_with(|| {
            let text = [&self.line, text].concat();
            let hash = Script::new(&text).get_hash().into();
            Arc::new(Headed { text, hash })
        });
        headed.clone()
    }
}

impl HeadedCommand {
    /// Returns the command, to be sent like `original`.
    pub(super) fn command<'a>(&'a self, original: Command<'a>) -> Command<'a> {
        original.replaced(&self.cmd, self.script.as_ref().map(|script| &*script.text))
    }
}
