//! A playground and a browser that shows it, for one test. No tests.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use axum::http::Method;
use fantoccini::{Client, ClientBuilder, Locator, elements::Element, key::Key, wd};
use hyper_util::client::legacy::connect::HttpConnector;
use reqwest::Url;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    sync::{Mutex, MutexGuard},
    time::{Instant, sleep},
};

use crate::support;

/// One browser at a time: each draws without a graphics card.
static TURN: Mutex<()> = Mutex::const_new(());

/// The longest time for something on the page to happen.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Page {
    pub client: Client,
    pub url: String,
    _driver: Driver,
    playground: Option<Process>,
    _profile: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Page {
    /// Starts a playground with these arguments, and opens its page.
    pub async fn open(arguments: &[&str]) -> Self {
        let turn = TURN.lock().await;
        let (playground, url) = playground("127.0.0.1:0", arguments);
        let mut driver = Command::new(installed(&["chromedriver", "chromium.chromedriver"]));
        driver.arg("--port=0");
        let (driver, port) = started(driver, |line| {
            let port = line.rsplit_once(" successfully on port ")?.1.trim_end_matches('.');
            port.parse().ok()
        });
        let driver = Driver { port, _process: driver };
        let profile = tempfile::tempdir().unwrap();
        let client = connect(port, &profile).await;
        client.goto(&url).await.unwrap();
        let page = Self {
            client,
            url,
            _driver: driver,
            playground: Some(playground),
            _profile: profile,
            _turn: turn,
        };
        page.until("window.playground?.state()").await;
        page
    }

    /// Ends the playground, and leaves its page open.
    pub fn end_playground(&mut self) {
        self.playground = None;
    }

    /// Starts the playground again, at the same address.
    pub fn start_playground(&mut self) {
        let address = self.url.strip_prefix("http://").unwrap();
        self.playground = Some(playground(address, &[]).0);
    }

    /// Runs a script in the page. Returns the value of the expression.
    pub async fn value(&self, expression: &str) -> Value {
        self.client.execute(&format!("return {expression}"), vec![]).await.unwrap()
    }

    /// Waits until an expression is true.
    pub async fn until(&self, expression: &str) {
        let start = Instant::now();
        while self.value(&format!("!!({expression})")).await != true {
            if start.elapsed() > PATIENCE {
                let text = self.value("document.body.innerText").await;
                panic!("not true in time: {expression}; {text}");
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn find(&self, selector: &str) -> Element {
        self.client.find(Locator::Css(selector)).await.unwrap()
    }

    /// Clicks an element, from below the header that stays.
    pub async fn click(&self, selector: &str) {
        let to = "scrollIntoView({ block: 'center' })";
        self.value(&format!("document.querySelector({selector:?}).{to}")).await;
        self.find(selector).await.click().await.unwrap();
    }

    /// Presses a key in the focused element.
    pub async fn press(&self, key: impl Into<char>) {
        let key = char::from(key.into()).to_string();
        let focused = self.client.active_element().await.unwrap();
        focused.send_keys(&key).await.unwrap();
    }

    /// Moves a slider to its end, and waits until the server has set the value.
    pub async fn slide(&self, id: &str, key: Key, setting: &str, value: u64) {
        let end = char::from(key).to_string();
        self.find(&format!("#{id}")).await.send_keys(&end).await.unwrap();
        self.until(&format!("playground.state().settings.{setting} === {value}")).await;
    }

    /// Calls a method of the developer tools of the browser.
    pub async fn developer_tools(&self, method: &str, parameters: Value) -> Value {
        self.call("goog/cdp/execute", json!({ "cmd": method, "params": parameters })).await
    }

    async fn call(&self, path: &'static str, body: Value) -> Value {
        self.client.issue_cmd(Call { path, body }).await.unwrap()
    }

    /// Ends the test: the browser has reported no errors.
    pub async fn close(self) {
        self.close_after(&[]).await;
    }

    /// Ends the test: the browser has reported no errors but those that contain one of these texts.
    pub async fn close_after(self, expected: &[&str]) {
        let log = self.call("se/log", json!({ "type": "browser" })).await;
        let is_expected = |entry: &Value| {
            let message = entry["message"].as_str().unwrap_or_default();
            expected.iter().any(|text| message.contains(text))
        };
        let errors: Vec<_> =
            log.as_array().unwrap().iter().filter(|entry| !is_expected(entry)).collect();
        assert!(errors.is_empty(), "the console of the browser: {errors:?}");
        self.client.clone().close().await.unwrap();
    }
}

/// The driver of the browser. After a failed test, the browser still runs, and a signal would end
/// the driver alone.
struct Driver {
    port: u16,
    _process: Process,
}

impl Drop for Driver {
    fn drop(&mut self) {
        let Ok(mut connection) = TcpStream::connect(("127.0.0.1", self.port)) else { return };
        let _ = connection.write_all(b"GET /shutdown HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let _ = connection.read_to_end(&mut Vec::new());
    }
}

/// A program that ends when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Not SIGKILL, so that a playground ends its Redis server.
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

/// Starts a playground that listens on this address. Returns its URL.
fn playground(address: &str, arguments: &[&str]) -> (Process, String) {
    let mut playground = Command::new(support::example("playground"));
    playground.args(["--listen", address]).args(arguments);
    started(playground, |line| Some(line.strip_prefix("listening on ")?.to_owned()))
}

/// Starts a program, and waits for the line that says where it listens.
fn started<T>(mut program: Command, find: impl Fn(&str) -> Option<T>) -> (Process, T) {
    let process = program.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let process = process.unwrap_or_else(|error| panic!("cannot start {program:?}: {error}"));
    let mut process = Process(process);
    let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
    let found = lines.find_map(|line| find(&line.unwrap())).expect("it listens");
    // The rest is read, so that the program can go on writing.
    std::thread::spawn(move || lines.count());
    (process, found)
}

/// Returns the first of these programs that is installed.
fn installed(names: &[&str]) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let files = env::split_paths(&path)
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .filter(|file| file.is_file())
        .collect::<Vec<_>>();
    let first = names.iter().find_map(|name| files.iter().find(|file| file.ends_with(name)));
    first.unwrap_or_else(|| panic!("install one of {names:?}: `make chromium` does it")).clone()
}

async fn connect(port: u16, profile: &TempDir) -> Client {
    let browser = installed(&["chromium", "chromium-browser", "google-chrome"]);
    let profile = format!("--user-data-dir={}", profile.path().display());
    let capabilities = json!({
        "goog:loggingPrefs": { "browser": "ALL" },
        "goog:chromeOptions": {
            "binary": browser,
            "args": [
                "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1280,900", profile,
            ],
        },
    });
    let Value::Object(capabilities) = capabilities else { unreachable!() };
    ClientBuilder::new(HttpConnector::new())
        .capabilities(capabilities)
        .connect(&format!("http://127.0.0.1:{port}"))
        .await
        .expect("the browser starts")
}

/// A command that only this browser has.
#[derive(Debug)]
struct Call {
    path: &'static str,
    body: Value,
}

impl wd::WebDriverCompatibleCommand for Call {
    fn endpoint(
        &self,
        base: &Url,
        session: Option<&str>,
    ) -> Result<Url, <Url as std::str::FromStr>::Err> {
        base.join(&format!("session/{}/{}", session.unwrap_or_default(), self.path))
    }

    fn method_and_body(&self, _url: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.body.to_string()))
    }
}
