//! The `tracing` events of one test, as lines of text.

use std::{
    env, io,
    process::Command,
    sync::{Arc, LazyLock, Mutex},
};

use tracing::{Dispatch, Level, subscriber, subscriber::DefaultGuard, subscriber::NoSubscriber};

#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Records the events of this thread, of this level and above, until the guard is dropped.
    pub fn start(level: Level) -> (Self, DefaultGuard) {
        // While there is only one dispatcher, `tracing` disables an event for all threads if the
        // first thread that reaches the event has no subscriber: that of another test.
        static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
        LazyLock::force(&SECOND);
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (log, subscriber::set_default(subscriber))
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs a case of a test of `observe.rs` in another process, without a subscriber. Returns what
/// this crate has printed there; in that process, the case.
pub fn lines_of_another_process(test: &str, case: &str) -> Result<Vec<String>, String> {
    const CASE: &str = "CASE_WITHOUT_A_SUBSCRIBER";
    if let Ok(case) = env::var(CASE) {
        return Err(case);
    }
    let test = format!("observe::{test}");
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(["--exact", &test, "--nocapture"]).env(CASE, case).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    Ok(text.lines().filter(|line| line.contains("tower-ratelimit:")).map(String::from).collect())
}
