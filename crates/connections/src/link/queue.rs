//! The queue of a channel: commands that are not written yet, in the order of their arrival. The
//! line of the channel's connection takes them out; commands that it has not written when it ends
//! come back to their places, and the next line takes them. It does not know connections.

use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Release},
    },
    task::Waker,
};

use redis::{Cmd, RedisResult, Value};
use tokio::sync::oneshot;

use super::{claim::Claim, command::Command};
use crate::sync::{lock, share_last_task};

/// The commands of a channel that no line has taken.
///
/// The requests stay here when a line ends, and not with their callers: a caller whose runtime is
/// blocked would otherwise let later commands of its key overtake, or delay them all.
#[derive(Default)]
pub(crate) struct CommandQueue(Mutex<QueueState>);

#[derive(Default)]
struct QueueState {
    /// In the order of their numbers.
    requests: VecDeque<Request>,
    /// The number of commands so far.
    commands: u64,
    /// The number of lines so far.
    lines: u64,
    /// The line that takes the commands: the last one that began, until it ends.
    line: Option<u64>,
    /// That of the writer of the line, while it has nothing to take.
    waker: Option<Waker>,
}

/// A command in the queue.
pub(super) struct Request {
    pub(super) cmd: Arc<Cmd>,
    pub(super) text: Option<&'static str>,
    pub(super) is_asking: bool,
    pub(super) claim: Arc<Claim>,
    number: u64,
    outcome: oneshot::Sender<Outcome>,
}

/// The end of a command, for one line.
pub(crate) enum Outcome {
    Reply(RedisResult<Value>),
    /// It was not written before it was given up.
    GivenUp,
    /// The connection ended after bytes of the command were written.
    Interrupted,
    /// The line ended before a byte was written. The command keeps its position for the next line
    /// of the channel. Its caller now ensures that there is one.
    Unsent(Position),
}

/// The way to the outcome of a command in the queue. The drop gives it up.
pub(crate) struct Position(oneshot::Receiver<Outcome>);

/// An outcome for a caller, sent under no lock: its waker can run foreign code.
type OutcomeNotice = (oneshot::Sender<Outcome>, Outcome);

impl CommandQueue {
    /// Begins a line, which takes the commands from now on. Returns its number.
    pub(super) fn begin_line(&self) -> u64 {
        let mut state = lock(&self.0);
        state.lines += 1;
        state.line = Some(state.lines);
        let (line, old) = (state.lines, state.waker.take());
        drop(state);
        drop(old); // not under the lock: it can drop a line with its commands
        line
    }

    /// Adds a command behind all others, for a caller who has the connection of `line`.
    pub(super) fn push(&self, line: u64, command: Command<'_>, claim: &Arc<Claim>) -> Position {
        let (outcome, receiver) = oneshot::channel();
        let cmd = Arc::new(command.cmd().clone());
        let (text, is_asking) = (command.text(), command.is_asking());
        let mut state = lock(&self.0);
        state.commands += 1;
        let number = state.commands;
        let claim = claim.clone();
        let mut request = Request { cmd, text, is_asking, claim, number, outcome };
        let notice = (state.line != Some(line)).then(|| request.set_aside());
        state.requests.push_back(request);
        let waker = state.waker.take();
        drop(state);
        notify(notice);
        if let Some(waker) = waker {
            waker.wake();
            share_last_task(); // the writer serves all callers
        }
        Position(receiver)
    }

    /// Takes the first commands, at most `max`, for this line. If there are none, `waker` is woken
    /// when one comes.
    pub(super) fn take(&self, line: u64, max: usize, waker: &Waker) -> Vec<Request> {
        let mut state = lock(&self.0);
        if state.line != Some(line) {
            return vec![];
        }
        let count = state.requests.len().min(max);
        let taken = state.requests.drain(..count).collect();
        let old = if count == 0 { state.waker.replace(waker.clone()) } else { None };
        drop(state);
        drop(old);
        taken
    }

    pub(super) fn has_commands_for(&self, line: u64) -> bool {
        let state = lock(&self.0);
        state.line == Some(line) && !state.requests.is_empty()
    }

    /// Ends a line: puts the commands back that it has not written, and sets `has_ended` before
    /// another line can begin. The callers of commands that have no line are told.
    pub(super) fn end_line(&self, line: u64, unsent: Vec<Request>, has_ended: &AtomicBool) {
        let mut notices: Vec<OutcomeNotice> = vec![];
        let mut state = lock(&self.0);
        let was_current = state.line == Some(line);
        for mut request in unsent {
            request.claim.reopen();
            if !request.is_closed() {
                if !was_current {
                    notices.push(request.set_aside());
                }
                let index = state.requests.partition_point(|it| it.number < request.number);
                state.requests.insert(index, request);
            }
        }
        if was_current {
            state.line = None;
            notices.extend(state.requests.iter_mut().map(Request::set_aside));
        }
        let waker = state.waker.take();
        has_ended.store(true, Release);
        drop(state);
        notify(notices);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

fn notify(notices: impl IntoIterator<Item = OutcomeNotice>) {
    for (caller, outcome) in notices {
        let _ = caller.send(outcome);
    }
}

impl Request {
    /// Returns whether the caller is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.outcome.is_closed()
    }

    pub(super) fn end(self, outcome: Outcome) {
        let _ = self.outcome.send(outcome);
    }

    /// Lets the caller find another line, and waits for its outcome on it.
    fn set_aside(&mut self) -> OutcomeNotice {
        let (outcome, receiver) = oneshot::channel();
        (mem::replace(&mut self.outcome, outcome), Outcome::Unsent(Position(receiver)))
    }
}

impl Position {
    /// Waits for the outcome.
    ///
    /// # Cancel safety
    ///
    /// It can be dropped and called again.
    pub(crate) async fn outcome(&mut self) -> Outcome {
        (&mut self.0).await.unwrap_or(Outcome::Interrupted)
    }
}
