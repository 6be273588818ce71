//! The playground without its page: what the server refuses. The page is tested by
//! `make test-browser`.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdout, Command, Stdio},
};

use reqwest::{Client, StatusCode};

use crate::support;

struct Playground {
    process: Child,
    url: String,
    /// Kept, so that the playground can print more.
    _output: BufReader<ChildStdout>,
}

impl Playground {
    fn start() -> Self {
        let mut process = Command::new(support::example("playground"))
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut lines = output.by_ref().lines().map(|line| line.unwrap());
        let url = lines.find_map(|line| Some(line.strip_prefix("listening on ")?.to_owned()));
        Self { process, url: url.unwrap(), _output: output }
    }

    /// Asks for a WebSocket, as a page of this origin.
    async fn connect(&self, host: Option<&str>, origin: &str) -> StatusCode {
        let mut request = Client::new()
            .get(format!("{}/session", self.url))
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==")
            .header("origin", origin);
        if let Some(host) = host {
            request = request.header("host", host);
        }
        request.send().await.unwrap().status()
    }
}

impl Drop for Playground {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn another_website_cannot_use_it() {
    let playground = Playground::start();
    let url = &playground.url;
    assert_eq!(playground.connect(None, url).await, StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(playground.connect(None, "http://example.com").await, StatusCode::FORBIDDEN);
    // A name that leads to this machine.
    let rebound = playground.connect(Some("example.com"), "http://example.com").await;
    assert_eq!(rebound, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn the_page_may_load_nothing_from_elsewhere() {
    let playground = Playground::start();
    let page = reqwest::get(&playground.url).await.unwrap();
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none';"), "{policy}");
    let page = page.text().await.unwrap();
    for loaded in ["src=\"", "@import", "<link rel=\"stylesheet", "https://"] {
        assert!(!page.contains(loaded), "{loaded}");
    }
}

#[test]
fn it_says_why_it_cannot_use_a_server() {
    let output = Command::new(support::example("playground"))
        .args(["--listen", "127.0.0.1:0", "--redis", "redis://127.0.0.1:1"])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(error.contains("cannot use the Redis server at redis://127.0.0.1:1"), "{error}");
}
