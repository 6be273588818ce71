//! A Redis server or a Sentinel, in any network namespace and with any environment.

use std::{
    error::Error,
    fs,
    process::{Child, Stdio},
    time::Duration,
};

use redis::{FromRedisValue, RedisResult};
use tempfile::TempDir;

use crate::{
    cluster::free_port,
    load::until,
    namespace::{Host, run},
    server::program,
};

/// A running server or Sentinel. It is killed when this is dropped.
pub struct Instance {
    process: Option<Child>,
    pub host: Host,
    pub port: u16,
    folder: TempDir,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Instance {
    /// Starts a server with settings as on its command line.
    pub fn server(
        host: &Host,
        settings: &[&str],
        environment: &[(String, String)],
    ) -> Result<Self, Box<dyn Error>> {
        let (port, folder) = (free_port(), tempfile::tempdir()?);
        let text = port.to_string();
        let path = folder.path().display().to_string();
        let own = ["--port", &text, "--bind", host.address, "--dir", &path, "--save", ""];
        let other =
            ["--appendonly", "no", "--repl-diskless-sync-delay", "0", "--protected-mode", "no"];
        let all = own.iter().chain(&other).chain(settings);
        let arguments = all.map(|&argument| argument.to_owned()).collect();
        Self::start(host, port, folder, arguments, environment)
    }

    /// Starts a Sentinel with lines of its configuration.
    pub fn sentinel(host: &Host, lines: &str) -> Result<Self, Box<dyn Error>> {
        let (port, folder) = (free_port(), tempfile::tempdir()?);
        let file = folder.path().join("sentinel.conf");
        let text = format!(
            "port {port}\nbind {}\ndir {}\nprotected-mode no\n{lines}",
            host.address,
            folder.path().display()
        );
        fs::write(&file, text)?;
        let arguments = vec![file.display().to_string(), "--sentinel".to_owned()];
        Self::start(host, port, folder, arguments, &[])
    }

    fn start(
        host: &Host,
        port: u16,
        folder: TempDir,
        arguments: Vec<String>,
        environment: &[(String, String)],
    ) -> Result<Self, Box<dyn Error>> {
        let (host, environment) = (host.clone(), environment.to_vec());
        let mut instance = Self { process: None, host, port, folder, arguments, environment };
        instance.restart()?;
        Ok(instance)
    }

    /// Starts the process, also after `kill`, and waits for an answer, which may be LOADING.
    pub fn restart(&mut self) -> Result<(), Box<dyn Error>> {
        let process = self
            .host
            .command(program())
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("redis-server cannot be run: {error}; install it"))?;
        self.process = Some(process);
        until("the server answers", || match self.query::<String>(&["PING"]) {
            Ok(_) => true,
            Err(error) => error.code() == Some("LOADING"),
        })?;
        Ok(())
    }

    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Suspends the process; its connections stay open.
    pub fn stop(&self) -> Result<(), Box<dyn Error>> {
        self.signal("-STOP")
    }

    pub fn resume(&self) -> Result<(), Box<dyn Error>> {
        self.signal("-CONT")
    }

    fn signal(&self, signal: &str) -> Result<(), Box<dyn Error>> {
        let process = self.process.as_ref().ok_or("the server does not run")?;
        run("kill", &[signal, &process.id().to_string()])
    }

    pub fn url(&self) -> String {
        self.url_as("")
    }

    /// Returns the URL with a user and a password, for example `user:password@`.
    pub fn url_as(&self, user: &str) -> String {
        format!("redis://{user}{}:{}", self.host.address, self.port)
    }

    pub fn connection(&self) -> RedisResult<redis::Connection> {
        const MAX_TIME: Duration = Duration::from_secs(1);
        let client = redis::Client::open(self.url())?;
        let connection = client.get_connection_with_timeout(MAX_TIME)?;
        connection.set_read_timeout(Some(MAX_TIME))?;
        Ok(connection)
    }

    pub fn query<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        redis::cmd(words[0]).arg(&words[1..]).query(&mut self.connection()?)
    }

    /// Returns true if a section of `INFO` contains a text.
    pub fn info(&self, section: &str, text: &str) -> bool {
        self.query::<String>(&["INFO", section]).is_ok_and(|info| info.contains(text))
    }

    /// Returns the number of script calls, if the server answers.
    pub fn decisions(&self) -> Option<u64> {
        let stats: String = self.query(&["INFO", "commandstats"]).ok()?;
        let calls = |command: &str| -> Option<u64> {
            let line = stats.lines().find_map(|line| line.strip_prefix(command))?;
            line.strip_prefix(":calls=")?.split(',').next()?.parse().ok()
        };
        Some(["cmdstat_evalsha", "cmdstat_eval"].iter().filter_map(|command| calls(command)).sum())
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.kill();
    }
}
