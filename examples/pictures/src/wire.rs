//! A connection to a private Redis server whose network and clock follow a script: a call is
//! executed at once, and its answer takes as long as the picture says, by the paused clock.

use std::{
    collections::HashMap,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use redis::{Arg, Cmd, Pipeline, RedisFuture, Value, aio::ConnectionLike};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

/// Stands in front of an unmodified script: `TIME` is the scripted time.
const CLOCK: &str = "local redis = setmetatable({call = function(name, ...) \
    if name == 'TIME' then return {'SECONDS', 'MICROS'} end return redis.call(name, ...) end}, \
    {__index = redis})\n";

/// A private server on a socket in a temporary folder, which ends when this is dropped.
pub struct Server {
    process: Child,
    folder: TempDir,
}

impl Server {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder for the server");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--unixsocket", "s", "--dir"])
            .arg(folder.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed: `make test` does it");
        while !folder.path().join("s").exists() {
            thread::sleep(Duration::from_millis(5));
        }
        Self { process, folder }
    }

    pub fn url(&self) -> String {
        format!("unix://{}", self.folder.path().join("s").display())
    }

    /// Sends a signal, such as `STOP`, to the server.
    pub fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        let status = Command::new("kill").args([&format!("-{name}"), &pid]).status();
        assert!(status.is_ok_and(|status| status.success()));
    }

    fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).and_then(|client| client.get_connection()).expect("it runs")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A call of a script: when it began and ended, in seconds, and its number of keys.
#[derive(Clone, Copy)]
pub struct Call {
    pub begin: f64,
    pub end: f64,
    pub keys: usize,
}

#[derive(Clone)]
pub struct Wire(Arc<Inner>);

struct Inner {
    start: Instant,
    delay: Duration,
    connection: Mutex<redis::Connection>,
    scripts: Mutex<HashMap<String, Vec<u8>>>,
    calls: Mutex<Vec<Call>>,
}

impl Wire {
    pub fn new(server: &Server, delay: Duration) -> Self {
        Self(Arc::new(Inner {
            start: Instant::now(),
            delay,
            connection: Mutex::new(server.connection()),
            scripts: Mutex::default(),
            calls: Mutex::default(),
        }))
    }

    pub fn now(&self) -> f64 {
        self.0.start.elapsed().as_secs_f64()
    }

    pub fn calls(&self) -> Vec<Call> {
        self.0.calls.lock().expect("no panic").clone()
    }

    /// Executes a script with the scripted time. Redis does not know it by its hash at first.
    fn execute(&self, cmd: &Cmd) -> redis::RedisResult<Value> {
        let args: Vec<Vec<u8>> = cmd
            .args_iter()
            .filter_map(|arg| match arg {
                Arg::Simple(bytes) => Some(bytes.to_vec()),
                _ => None,
            })
            .collect();
        let mut scripts = self.0.scripts.lock().expect("no panic");
        let text = match &*args[0] {
            b"EVAL" => {
                let hash = sha1_smol::Sha1::from(&args[1]).digest().to_string();
                scripts.insert(hash, args[1].clone());
                args[1].clone()
            }
            b"EVALSHA" => {
                let hash = String::from_utf8_lossy(&args[1]).into_owned();
                let Some(text) = scripts.get(&hash) else {
                    let unknown = (redis::ErrorKind::Server(redis::ServerErrorKind::NoScript), "");
                    return Err(unknown.into());
                };
                text.clone()
            }
            _ => return cmd.query(&mut *self.0.connection.lock().expect("no panic")),
        };
        let micros = (self.now() * 1e6).round() as u64 + 4_000_000_000_000_000;
        let clock = CLOCK
            .replace("SECONDS", &(micros / 1_000_000).to_string())
            .replace("MICROS", &(micros % 1_000_000).to_string());
        let mut call = redis::cmd("EVAL");
        call.arg([clock.as_bytes(), &*text].concat());
        for arg in &args[2..] {
            call.arg(arg);
        }
        call.query(&mut *self.0.connection.lock().expect("no panic"))
    }
}

impl ConnectionLike for Wire {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let begin = self.now();
            let reply = self.execute(cmd);
            sleep(self.0.delay).await;
            let keys = cmd.args_iter().nth(2).and_then(|arg| match arg {
                Arg::Simple(keys) => std::str::from_utf8(keys).ok()?.parse().ok(),
                _ => None,
            });
            let call = Call { begin, end: self.now(), keys: keys.unwrap_or(0) };
            self.0.calls.lock().expect("no panic").push(call);
            reply
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        _: &'a Pipeline,
        _: usize,
        _: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async { unreachable!("a decision is one command") })
    }

    fn get_db(&self) -> i64 {
        0
    }
}
