//! A measured program that runs, and its replies. Each has to come in time.

use std::{
    ffi::OsString,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use crate::programs::log_file;

/// For the start of a program, and for each command beyond the time that it asks for.
const LIMIT: Duration = Duration::from_secs(20);

/// Ends the program when dropped.
pub struct Running {
    process: Child,
    commands: ChildStdin,
    replies: Receiver<String>,
}

impl Running {
    pub fn start(command: &[OsString], variant: &str, url: &str) -> Result<Self, String> {
        let [program, args @ ..] = command else { return Err("no program".to_owned()) };
        let mut process = Command::new(program)
            .args(args)
            .args([variant, url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log_file())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let (Some(commands), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("no pipes".to_owned());
        };
        let (sender, replies) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let running = Self { process, commands, replies };
        match running.receive(Duration::ZERO)?.as_str() {
            "ready" => Ok(running),
            other => Err(failure(other)),
        }
    }

    /// Sends a command that takes `duration`, and returns what follows the `ok`.
    pub fn execute(&self, command: &str, duration: Duration) -> Result<String, String> {
        self.send(command)?;
        self.reply(duration)
    }

    pub fn send(&self, command: &str) -> Result<(), String> {
        writeln!(&self.commands, "{command}").map_err(|error| error.to_string())
    }

    pub fn reply(&self, duration: Duration) -> Result<String, String> {
        let line = self.receive(duration)?;
        line.strip_prefix("ok").map(|rest| rest.trim().to_owned()).ok_or_else(|| failure(&line))
    }

    fn receive(&self, duration: Duration) -> Result<String, String> {
        self.replies.recv_timeout(duration + LIMIT).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => format!("no reply within {:?}", duration + LIMIT),
            mpsc::RecvTimeoutError::Disconnected => "the program ended".to_owned(),
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn failure(line: &str) -> String {
    line.strip_prefix("failed ").unwrap_or(line).to_owned()
}
