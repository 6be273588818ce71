//! The script of the Go module redis_rate, which this program reads from the module, by the redis
//! crate. So it compares scripts, not clients. It needs Go, for the download of the module.

use std::{fs, path::PathBuf, process::Command, process::ExitCode, sync::Arc};

use peers::{Error, Limiter, Quota, Subject, TIMEOUT, run};
use redis::{
    Client, Script,
    aio::{ConnectionManager, ConnectionManagerConfig},
};

const MODULE: &str = "github.com/go-redis/redis_rate/v10@v10.0.1";

fn main() -> ExitCode {
    run::<RedisRate>()
}

#[derive(Clone)]
struct RedisRate {
    connection: ConnectionManager,
    script: Arc<Script>,
    quota: Option<Quota>,
}

impl Subject for RedisRate {
    type Limiter = Self;

    async fn connect(_: &str, url: &str) -> Result<Self, Error> {
        let config = ConnectionManagerConfig::new().set_response_timeout(Some(TIMEOUT));
        let connection = Client::open(url)?.get_connection_manager_with_config(config).await?;
        Ok(Self { connection, script: Arc::new(Script::new(&script()?)), quota: None })
    }

    fn limiter(&self, quota: Quota) -> Result<Self, Error> {
        Ok(Self { quota: Some(quota), ..self.clone() })
    }
}

impl Limiter for RedisRate {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let quota = self.quota.ok_or("no quota")?;
        let mut connection = self.connection.clone();
        let (allowed, _remaining, _retry_after, _reset_after): (u64, u64, String, String) = self
            .script
            .key(format!("rate:{}:{key}", quota.name))
            .arg(quota.limit)
            .arg(quota.limit)
            .arg(Quota::PERIOD.as_secs())
            .arg(1)
            .invoke_async(&mut connection)
            .await?;
        Ok(allowed > 0)
    }
}

/// The text of the script `allowN`.
fn script() -> Result<String, Error> {
    let download = Command::new("go")
        .args(["mod", "download", "-json", MODULE])
        .current_dir(std::env::temp_dir())
        .output()
        .map_err(|error| format!("go: {error}"))?;
    let json = String::from_utf8(download.stdout)?;
    let folder = json
        .lines()
        .find_map(|line| line.trim().strip_prefix("\"Dir\": \"")?.strip_suffix("\","))
        .ok_or_else(|| format!("go mod download {MODULE} failed: {json}"))?;
    let source = fs::read_to_string(PathBuf::from(folder).join("lua.go"))?;
    let (_, from) = source.split_once("allowN = redis.NewScript(`").ok_or("no script allowN")?;
    let (text, _) = from.split_once('`').ok_or("no end of the script allowN")?;
    Ok(text.to_owned())
}
