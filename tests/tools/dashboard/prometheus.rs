//! A private Prometheus, and what it answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::{Child, Command},
    time::{Duration, SystemTime},
};

use serde_json::Value;
use tempfile::TempDir;
use tokio::time::sleep;

use crate::{http::Request, programs::free_port};

pub const SCRAPE_SECONDS: u64 = 2;

pub type Labels = BTreeMap<String, String>;

/// A Prometheus, which ends when this is dropped.
pub struct Prometheus {
    process: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Prometheus {
    pub async fn start(targets: &[SocketAddr], rules: &Path) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("prometheus.yml");
        let targets: Vec<_> = targets.iter().map(|target| format!("'{target}'")).collect();
        let text = format!(
            "global:\n  scrape_interval: {SCRAPE_SECONDS}s\n\
             \x20 evaluation_interval: {SCRAPE_SECONDS}s\n\
             rule_files: ['{}']\n\
             scrape_configs:\n- {{ job_name: examples, static_configs: [{{ targets: [{}] }}] }}\n",
            rules.display(),
            targets.join(", "),
        );
        fs::write(&config, text)?;
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let flag = |name: &str, value: String| format!("--{name}={value}");
        let process = Command::new("prometheus")
            .arg(flag("config.file", config.display().to_string()))
            .arg(flag("storage.tsdb.path", folder.path().join("data").display().to_string()))
            .arg(flag("web.listen-address", address.to_string()))
            .arg("--log.level=warn")
            .spawn()?;
        let prometheus = Self { process, address, _folder: folder };
        while !prometheus.get("/-/ready").await.is_ok_and(|(status, _)| status == 200) {
            sleep(Duration::from_millis(100)).await;
        }
        Ok(prometheus)
    }

    async fn get(&self, path: &str) -> io::Result<(u16, String)> {
        let start = format!("GET {path}");
        Request { to: self.address, from: Ipv4Addr::LOCALHOST, start: &start, header: "" }
            .send()
            .await
    }

    async fn api(&self, path: &str) -> io::Result<Value> {
        let (status, body) = self.get(path).await?;
        if status != 200 {
            return Err(io::Error::other(format!("{path}: {status}, {body}")));
        }
        Ok(serde_json::from_str(&body)?)
    }

    /// Returns the labels of each series, and its values, a step apart.
    pub async fn range(
        &self,
        query: &str,
        start: SystemTime,
        seconds: u32,
        step: u32,
    ) -> io::Result<Vec<(Labels, Vec<Option<f64>>)>> {
        let start = start.duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
        let start = start.as_secs();
        let end = start + u64::from(seconds);
        let query = encoded(query);
        let path = format!("/api/v1/query_range?query={query}&start={start}&end={end}&step={step}");
        let answer = self.api(&path).await?;
        let all = answer["data"]["result"].as_array().into_iter().flatten();
        all.map(|series| {
            let labels = serde_json::from_value(series["metric"].clone())?;
            let mut values = vec![None; (seconds / step + 1) as usize];
            for pair in series["values"].as_array().into_iter().flatten() {
                let at = pair[0].as_f64().map(|at| (at as u64 - start) / u64::from(step));
                let value = pair[1].as_str().and_then(|value| value.parse::<f64>().ok());
                values[at.unwrap_or(0) as usize] = value.filter(|value| value.is_finite());
            }
            Ok((labels, values))
        })
        .collect()
    }

    /// Checks that Prometheus can evaluate all rules. Returns a line for each alert: when it was
    /// pending, and when it fired.
    pub async fn alerts(
        &self,
        start: SystemTime,
        seconds: u32,
        step: u32,
    ) -> io::Result<Vec<String>> {
        let rules = self.api("/api/v1/rules").await?;
        let groups = rules["data"]["groups"].as_array().into_iter().flatten();
        let mut names = BTreeSet::new();
        for rule in groups.flat_map(|group| group["rules"].as_array().into_iter().flatten()) {
            let name = rule["name"].as_str().unwrap_or_default().to_owned();
            if rule["health"] != "ok" {
                return Err(io::Error::other(format!("alert {name}: {}", rule["lastError"])));
            }
            names.insert(name);
        }
        let mut lines = vec![];
        for name in names {
            let mut line = name.clone();
            for state in ["pending", "firing"] {
                let query = format!("ALERTS{{alertname=\"{name}\",alertstate=\"{state}\"}}");
                for (_, values) in self.range(&query, start, seconds, step).await? {
                    let first = values.iter().position(Option::is_some).unwrap_or(0) as u32;
                    let last = values.iter().rposition(Option::is_some).unwrap_or(0) as u32;
                    line += &format!("; {state} from {} to {} s", first * step, last * step);
                }
            }
            lines.push(line);
        }
        Ok(lines)
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}
