//! The programs that are scraped: three examples, and the Redis of two of them.

use std::{
    env, fs,
    io::{self, BufRead, BufReader},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
};

use tempfile::TempDir;

use crate::server::RedisServer;

/// Each client may send 10 requests per second, evenly. They wait for their turn.
const SERVER: [&str; 4] = ["--algorithm", "leaky-bucket", "--quota", "10/s burst 8"];
/// The number of events of a stream, ten per second.
const EVENTS: &str = "300";
const LIMITS: &str = "\
listen = '127.0.0.1:0'
limits.all = { algorithm = 'sliding-window', quota = '1000/h' }
limits.api = { algorithm = 'token-bucket', quota = '10/s burst 20' }
";

pub struct Programs {
    pub redis: RedisServer,
    redis_url: String,
    folder: TempDir,
    pub server: Program,
    pub streams: Program,
    pub configured: Program,
}

/// A process, which ends when this is dropped.
pub struct Program {
    process: Child,
    /// Kept open, so that the program can print.
    _output: BufReader<ChildStdout>,
    pub address: SocketAddr,
    pub metrics: SocketAddr,
}

impl Programs {
    pub fn start() -> io::Result<Self> {
        let port = free_port()?.to_string();
        let redis = RedisServer::start_with(&["--bind", "127.0.0.1", "--port", &port]);
        // A busy machine keeps this deadline.
        let redis_url = format!("redis://127.0.0.1:{port}/?deadline=1s");
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("limits.toml");
        fs::write(&file, limits("30/min"))?;
        let url = ["--redis", &redis_url];
        let any = ["--listen", "127.0.0.1:0"];
        let by_header = ["--key", "header:x-client", "--quiet", "--log", "error"];
        let server = [&url[..], &any, &SERVER, &by_header].concat();
        let server = Program::start("server", &server)?;
        let streams = Program::start("streams", &[&url[..], &any, &["--events", EVENTS]].concat())?;
        let configured = Program::start("configured", &[&file.to_string_lossy()])?;
        Ok(Self { redis, redis_url, folder, server, streams, configured })
    }

    /// Returns where the metrics are.
    pub fn metrics(&self) -> [SocketAddr; 3] {
        [&self.server, &self.streams, &self.configured].map(|program| program.metrics)
    }

    /// Writes another quota of logins, or removes the limit, which is a mistake.
    pub fn change_logins(&self, quota: Option<&str>) {
        let text = quota.map_or(LIMITS.to_owned(), limits);
        fs::write(self.folder.path().join("limits.toml"), text).expect("the file is written");
    }

    /// Blocks a client of the server, as an operator does.
    pub fn block(&self, client: &str, time: &str) {
        let key = format!("header:x-client={client}");
        let mut command = Command::new(programs().join("limitctl"));
        command.args(["--store", &self.redis_url, "--limit", "server"]).args(SERVER);
        command.args(["block", &key, "--for", time]);
        assert!(command.status().expect("limitctl runs").success());
    }
}

fn limits(logins: &str) -> String {
    format!("{LIMITS}limits.login = {{ algorithm = 'sliding-log', quota = '{logins}' }}\n")
}

impl Program {
    fn start(name: &str, flags: &[&str]) -> io::Result<Self> {
        let mut process = Command::new(programs().join("examples").join(name))
            .args(flags)
            .args(["--metrics", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
        let mut address = || {
            let mut line = String::new();
            output.read_line(&mut line)?;
            let (_, rest) = line.split_once("http://").ok_or(io::ErrorKind::InvalidData)?;
            let end = rest.find(['/', '\n']).unwrap_or(rest.len());
            rest[..end].parse().map_err(io::Error::other)
        };
        let (metrics, address) = (address()?, address()?);
        Ok(Self { process, _output: output, address, metrics })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the folder of the programs of this build.
fn programs() -> PathBuf {
    let own = env::current_exe().expect("the path of this program");
    own.parent().expect("a folder").to_owned()
}

pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
