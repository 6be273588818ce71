//! A private Redis server, on a socket in a temporary folder.

use std::{
    env,
    ffi::OsString,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// The program of every server: `redis-server`, or that of `REDIS_SERVER`.
pub fn program() -> OsString {
    let named = env::var_os("REDIS_SERVER").filter(|name| !name.is_empty());
    named.unwrap_or_else(|| "redis-server".into())
}

/// A server, which ends when this is dropped.
pub struct RedisServer {
    program: OsString,
    process: Option<Child>,
    folder: TempDir,
    settings: Vec<String>,
}

impl RedisServer {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with settings as on its command line, such as `["--port", "7000"]`.
    pub fn start_with(settings: &[&str]) -> Self {
        Self::start_program(program(), settings)
    }

    pub fn start_program(program: OsString, settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the server");
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        let mut server = Self { program, process: None, folder, settings };
        server.restart();
        server
    }

    pub fn url(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    #[allow(dead_code)]
    pub fn major_version(&self) -> u32 {
        let info: redis::InfoDict =
            redis::cmd("INFO").arg("server").query(&mut self.connection()).unwrap();
        let version: String = info.get("redis_version").unwrap();
        version.split('.').next().unwrap().parse().unwrap()
    }

    /// Restarts the server after `kill`, without its data unless its settings keep them.
    pub fn restart(&mut self) {
        let process = Command::new(&self.program)
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(self.socket())
            .arg("--dir")
            .arg(self.folder.path())
            .args(&self.settings)
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!(
                    "{} must be installed (`make test` does it): {error}",
                    self.program.display()
                )
            });
        self.process = Some(process);
        let start = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            assert!(start.elapsed() < Duration::from_secs(30), "the server does not answer");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("the server runs");
            process.wait().expect("the server ends");
        }
    }

    /// Suspends the server without closing its connections.
    pub fn freeze(&self) {
        self.signal("-STOP");
    }

    pub fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let id = self.process.as_ref().expect("the server runs").id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().expect("kill runs").success());
    }

    pub fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url())
            .and_then(|client| client.get_connection())
            .expect("the server runs")
    }

    /// The number of calls of a command, including those that the server redirected.
    pub fn calls(&self, command: &str) -> u64 {
        let stats: String =
            redis::cmd("INFO").arg("commandstats").query(&mut self.connection()).expect("it runs");
        let start = format!("cmdstat_{command}:calls=");
        let Some(line) = stats.lines().find_map(|line| line.strip_prefix(&start)) else { return 0 };
        let rejected = line.split(',').find_map(|part| part.strip_prefix("rejected_calls="));
        [line.split(',').next(), rejected]
            .map(|number| number.map_or(0, |number| number.parse::<u64>().expect("a number")))
            .iter()
            .sum()
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("redis.sock")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}
