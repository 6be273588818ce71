//! The Redis server for the counts: one that runs already, or a private one, which ends with the
//! program.

use std::{
    env,
    ffi::OsString,
    fmt,
    os::unix::net::UnixStream,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tempfile::TempDir;
use tower_ratelimit::{RedisStore, store::RedisConfig};

use crate::support::{Context, Failure};

/// Longer than the default: a program without optimization takes some time for a burst.
const DEADLINE: Duration = Duration::from_millis(500);

pub struct Redis {
    url: String,
    config: RedisConfig,
    private: Option<Private>,
}

/// A server on a socket in a temporary folder.
struct Private {
    folder: TempDir,
    process: Mutex<Option<Child>>,
}

impl Redis {
    /// Starts a private server.
    pub fn start() -> Result<Self, Failure> {
        let folder = tempfile::tempdir().context("cannot make a folder for Redis")?;
        let url = format!("unix://{}", folder.path().join("redis.sock").display());
        let config = RedisConfig::from_url(&url)?.deadline(DEADLINE);
        let private = Private { folder, process: Mutex::default() };
        private.revive()?;
        Ok(Self { url, config, private: Some(private) })
    }

    /// Returns the server at a URL, if it can decide.
    pub async fn at(url: &str) -> Result<Self, Failure> {
        let config = RedisConfig::from_url(url)?;
        let redis = Self { url: url.to_owned(), config, private: None };
        let store = redis.store("playground")?;
        store.ping().await.context(format_args!("cannot use the Redis server at {url}"))?;
        Ok(redis)
    }

    /// Returns a store with connections of its own, as another replica has.
    pub fn store(&self, prefix: &str) -> Result<RedisStore, Failure> {
        Ok(RedisStore::new(self.config.clone().prefix(prefix))?)
    }

    #[allow(dead_code, reason = "the demo passes it to its replicas")]
    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn is_private(&self) -> bool {
        self.private.is_some()
    }

    /// Returns whether the private server runs.
    pub fn is_running(&self) -> bool {
        let Some(private) = &self.private else { return true };
        private.process().as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// Kills the private server: its data are lost, as by a crash.
    pub fn kill(&self) {
        if let Some(private) = &self.private {
            private.kill();
        }
    }

    /// Starts the private server again, if it does not run.
    pub fn revive(&self) -> Result<(), Failure> {
        match &self.private {
            Some(private) if !self.is_running() => private.revive(),
            _ => Ok(()),
        }
    }
}

impl Private {
    fn process(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn revive(&self) -> Result<(), Failure> {
        let named = env::var_os("REDIS_SERVER").filter(|name| !name.is_empty());
        let program = named.unwrap_or_else(|| OsString::from("redis-server"));
        let socket = self.folder.path().join("redis.sock");
        let mut process = Command::new(&program)
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(self.folder.path())
            .stdout(Stdio::null())
            .spawn()
            .context(format_args!(
                "cannot start {}; install it with `make redis-server`, or use --redis URL",
                program.display()
            ))?;
        for _ in 0..1_000 {
            if UnixStream::connect(&socket).is_ok() {
                *self.process() = Some(process);
                return Ok(());
            }
            if let Some(status) = process.try_wait()? {
                return Err(Failure::new(format!("{} ended: {status}", program.display())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        process.kill()?;
        Err(Failure::new(format!("{} does not answer", program.display())))
    }

    fn kill(&self) {
        if let Some(mut process) = self.process().take() {
            // It fails only if the server has ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        self.kill();
    }
}

impl fmt::Display for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.private {
            Some(_) => "a private Redis server",
            None => "the Redis server of --redis",
        })
    }
}
