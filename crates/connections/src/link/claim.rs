//! The claim of a caller to its command. It lets the command be written until the caller gives it
//! up, so that none is written whose caller has been told that it failed.

use std::{sync::Mutex, time::Instant};

use crate::sync::lock;

#[derive(Debug, Default)]
pub struct Claim(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_given_up: bool,
    /// The time at which the command was written that the server may execute.
    written: Option<Instant>,
}

impl Claim {
    /// Records that the command is written now. Returns false if it must not be.
    pub(super) fn write(&self, now: Instant) -> bool {
        let state = &mut *lock(&self.0);
        if !state.is_given_up {
            state.written = Some(now);
        }
        !state.is_given_up
    }

    /// Records that the server has not executed the command: it can be written again.
    pub(crate) fn reopen(&self) {
        lock(&self.0).written = None;
    }

    /// Ensures that the command is not written any more. Returns false if it was, and the server
    /// may execute it.
    pub fn give_up(&self) -> bool {
        let state = &mut *lock(&self.0);
        state.is_given_up = true;
        state.written.is_none()
    }

    pub(crate) fn written(&self) -> Option<Instant> {
        lock(&self.0).written
    }
}
