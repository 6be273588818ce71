//! Error reporting that the examples share: `Failure` prints an error with its causes.
//!
//! This module does not use the crate. Applications use `anyhow` or their own error type instead.

// Each example uses a part of this module.
#![allow(dead_code)]

use std::{error::Error, fmt, process::ExitCode};

/// The message of an error, followed by the messages of its causes.
#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // Some errors print their cause themselves.
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        Self(message)
    }
}

/// Adds the failed operation in front of an error.
pub trait Context<T> {
    fn context(self, what: impl fmt::Display) -> Result<T, Failure>;
}

impl<T, E: Into<Failure>> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T, Failure> {
        self.map_err(|error| Failure(format!("{what}: {}", error.into())))
    }
}

/// Prints the failure, if there is one, and returns the exit code of the process.
pub fn exit_code(end: Result<(), Failure>) -> ExitCode {
    match end {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", failure.0.trim_end());
            ExitCode::FAILURE
        }
    }
}
