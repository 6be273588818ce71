//! A command as the transport sends it, and the key that determines its node.

use std::sync::Arc;

use redis::{Arg, Cmd};

use super::claim::Claim;

#[derive(Clone, Copy)]
pub struct Command<'a> {
    cmd: &'a Cmd,
    /// The text of the script that `cmd` names by its hash.
    text: Option<&'static str>,
    /// True if its keys are moving to this node of a cluster.
    is_asking: bool,
    /// True if the caller has awaited [`ready`](crate::Client::ready).
    is_ready: bool,
    on_handover: Option<&'a (dyn Fn() + Sync)>,
    claim: Option<&'a Arc<Claim>>,
}

impl<'a> Command<'a> {
    pub fn new(cmd: &'a Cmd) -> Self {
        let (text, is_asking, is_ready, on_handover, claim) = (None, false, false, None, None);
        Self { cmd, text, is_asking, is_ready, on_handover, claim }
    }

    /// Makes a command from an `EVALSHA`; `text` is for servers that do not know the hash.
    pub fn script(cmd: &'a Cmd, text: &'static str) -> Self {
        Self { text: Some(text), ..Self::new(cmd) }
    }

    pub(crate) fn asking(self, is_asking: bool) -> Self {
        Self { is_asking, ..self }
    }

    /// Marks a command that is sent after [`ready`](crate::Client::ready): nothing delays it, so
    /// that no later command overtakes it.
    pub fn ready(self) -> Self {
        Self { is_ready: true, ..self }
    }

    /// Returns the same call as another command, with another text of its script.
    pub(crate) fn replaced(self, cmd: &'a Cmd, text: Option<&'static str>) -> Self {
        Self { cmd, text, ..self }
    }

    /// Calls a function when no later command can overtake this one.
    pub fn on_handover(self, function: &'a (dyn Fn() + Sync)) -> Self {
        Self { on_handover: Some(function), ..self }
    }

    /// Lets another task give the command up, too.
    pub fn claimed(self, claim: &'a Arc<Claim>) -> Self {
        Self { claim: Some(claim), ..self }
    }

    /// Returns the claim to this command.
    pub(crate) fn claim(self) -> Arc<Claim> {
        self.claim.cloned().unwrap_or_default()
    }

    pub(crate) fn hand_over(self) {
        if let Some(function) = self.on_handover {
            function();
        }
    }

    pub(crate) fn is_ready(self) -> bool {
        self.is_ready
    }

    pub(crate) fn cmd(self) -> &'a Cmd {
        self.cmd
    }

    pub(crate) fn is_asking(self) -> bool {
        self.is_asking
    }

    pub(crate) fn is_script(self) -> bool {
        self.text.is_some()
    }

    /// Returns the same call with the text of the script in place of its hash.
    pub(crate) fn by_text(self) -> Option<Cmd> {
        Some(by_text(self.cmd, self.text?))
    }

    pub(crate) fn text(self) -> Option<&'static str> {
        self.text
    }

    /// Returns the first key.
    pub fn key(self) -> &'a [u8] {
        let index = match self.cmd.args_iter().next() {
            Some(Arg::Simple(b"EVALSHA" | b"EVAL")) => 3,
            _ => 1,
        };
        match self.cmd.args_iter().nth(index) {
            Some(Arg::Simple(key)) => key,
            _ => b"",
        }
    }
}

/// Returns the call of an `EVALSHA` with the text of the script in place of its hash.
pub(crate) fn by_text(cmd: &Cmd, text: &str) -> Cmd {
    let mut by_text = redis::cmd("EVAL");
    by_text.arg(text);
    for arg in cmd.args_iter().skip(2) {
        if let Arg::Simple(arg) = arg {
            by_text.arg(arg);
        }
    }
    by_text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_a_command_is_found() {
        let cmd = |words: &[&str]| {
            let mut cmd = Cmd::new();
            cmd.arg(words);
            cmd
        };
        let key_of = |cmd: Cmd| Command::new(&cmd).key().to_vec();
        assert_eq!(key_of(cmd(&["EVALSHA", "hash", "2", "a", "b", "c"])), b"a");
        assert_eq!(key_of(cmd(&["EVAL", "text", "1", "a"])), b"a");
        assert_eq!(key_of(cmd(&["DEL", "a", "b"])), b"a");
        assert_eq!(key_of(cmd(&["PING"])), b"");
    }
}
