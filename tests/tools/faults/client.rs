//! This program as a second process with a store, for the other side of a cut network.

use std::{
    env,
    error::Error,
    io::{self, Read, Write},
    process::{Child, ChildStdin, Stdio},
    time::Duration,
};

use tokio::runtime::Runtime;
use tower_ratelimit::store::RedisConfig;

use crate::{
    deployment::Deployment,
    load::{Load, Moment, Record, Settings, forgetful},
    namespace::Host,
};

/// The first argument of a client.
pub const NAME: &str = "client";

/// Puts load on the master that the Sentinels name, until the input ends, and prints the records.
/// The arguments are the microseconds of the load's start, and the URLs of the Sentinels.
pub fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let [started, sentinels @ ..] = arguments else {
        return Err("a client needs the start of the load, and URLs of Sentinels".into());
    };
    let started = Duration::from_micros(started.parse()?);
    let runtime = Runtime::new()?;
    let _guard = runtime.enter();
    let store =
        forgetful(RedisConfig::sentinels(sentinels.iter().copied(), &Deployment::master_url()))?;
    let mut load = Load::since(Settings::default(), started);
    load.add(&store);
    io::stdin().read_to_end(&mut vec![])?;
    let mut stdout = io::stdout().lock();
    for record in load.finish()?.records {
        writeln!(stdout, "{}", record.line())?;
    }
    Ok(())
}

/// A client process. It is killed when this is dropped.
pub struct Client {
    process: Child,
    input: Option<ChildStdin>,
}

impl Client {
    pub fn start(
        host: &Host,
        started: Moment,
        sentinels: &[String],
    ) -> Result<Self, Box<dyn Error>> {
        let mut process = host
            .command(env::current_exe()?)
            .args([NAME, &started.as_micros().to_string()])
            .args(sentinels)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take();
        Ok(Self { process, input })
    }

    /// Ends the process, and returns its records.
    pub fn finish(mut self) -> Result<Vec<Record>, Box<dyn Error>> {
        drop(self.input.take());
        let mut text = String::new();
        let output = self.process.stdout.as_mut().ok_or("the client has no output")?;
        output.read_to_string(&mut text)?;
        if !self.process.wait()?.success() {
            return Err("the client has failed".into());
        }
        text.lines().map(str::parse).collect()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
