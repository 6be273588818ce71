//! A gateway in front of a language model, with budgets for requests, tokens and money. A request
//! holds an estimate first. What it does not use is returned exactly, also if its stream is cut
//! off.
//!
//! * Requests, input tokens, output tokens and nano-dollars are limited, per key and per team. All
//!   eight limits are charged, or none, in one round trip.
//! * A fake API that is compatible with OpenAI's replaces the model, streamed or not.
//!
//! ```text
//! cargo run -p more-examples --example llm_gateway                               # a table
//! cargo run -p more-examples --example llm_gateway -- --redis redis://127.0.0.1/ # counts in Redis
//! cargo run -p more-examples --example llm_gateway -- --listen 127.0.0.1:3000    # for curl
//! ```
//!
//! The code that a real gateway needs is in `Limits`, `Gateway` and `SettledStream`.

mod llm_upstream;
#[path = "../support/shutdown.rs"]
mod shutdown;
#[path = "../support/mod.rs"]
mod support;

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::post,
};
use clap::Parser;
use futures_util::StreamExt;
use llm_upstream::Completion;
use serde::Deserialize;
use serde_json::{Value, json};
use shutdown::{serve, stopping};
use support::{Context, Failure, exit_code};
use tokio::{net::TcpListener, sync::mpsc, time::sleep};
use tower_ratelimit::{
    Admission, Algorithm, Charge, Error, Limiter, MemoryStore, Permit, Quota, RedisStore,
    layer::Rejection,
    store::{AnyStore, RedisConfig, Store},
};

/// The longest time for which a request waits for units that others hold. If the wait is known to
/// be longer, the request is denied immediately.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The prices of a token in nano-dollars: 0.25 and 2 dollars per million.
const INPUT_PRICE: u64 = 250;
const OUTPUT_PRICE: u64 = 2_000;

/// The quotas of each key and of each team: requests, input and output tokens, nano-dollars.
const KEY: [Quota; 4] =
    [Quota::per_hour(7), Quota::per_hour(500), Quota::per_hour(1_000), Quota::per_day(2_400_000)];
const TEAM: [Quota; 4] = [
    Quota::per_hour(20),
    Quota::per_hour(2_000),
    Quota::per_hour(5_000),
    Quota::per_day(2_500_000),
];

/// The keys and their teams, as in a database.
const ACCOUNTS: [(&str, &str); 3] = [("ada", "shop"), ("ben", "shop"), ("carl", "lab")];

/// Budgets for requests, tokens and money, in front of a fake language model
#[derive(Parser)]
#[command(name = "llm_gateway")]
struct Flags {
    /// Count in the Redis server at this URL, such as redis://127.0.0.1/,
    /// instead of in memory
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    redis: Option<String>,

    /// Serve at this address, instead of the requests of the example
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
}

/// The tokens of a request.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Usage {
    #[serde(rename = "prompt_tokens")]
    input: u64,
    #[serde(rename = "completion_tokens")]
    output: u64,
}

impl Usage {
    /// Returns an upper bound of what a request uses.
    fn estimate(request: &Completion) -> Self {
        Self { input: request.input_bytes().div_ceil(3).max(1), output: request.max_tokens.max(1) }
    }

    fn nano_dollars(self) -> u64 {
        self.input * INPUT_PRICE + self.output * OUTPUT_PRICE
    }
}

/// The limits of each key, or of each team.
struct Limits {
    requests: Limiter,
    input: Limiter,
    output: Limiter,
    money: Limiter,
}

impl Limits {
    fn new(whose: &str, store: &AnyStore, [requests, input, output, money]: [Quota; 4]) -> Self {
        let limiter = |what, algorithm, quota| {
            Limiter::new(&format!("{whose}-{what}"), store.clone(), algorithm, quota)
        };
        Self {
            requests: limiter("requests", Algorithm::SlidingLog, requests),
            input: limiter("input", Algorithm::SlidingLog, input),
            output: limiter("output", Algorithm::SlidingLog, output),
            money: limiter("money", Algorithm::FixedWindow, money),
        }
    }

    /// Returns the charge of a request: it is spent, and what it may use is held.
    fn charge(&self, key: &str, estimate: Usage) -> Charge {
        Charge::new(&self.requests, key)
            .also(&self.input)
            .estimate(estimate.input)
            .also(&self.output)
            .estimate(estimate.output)
            .also(&self.money)
            .estimate(estimate.nano_dollars())
    }
}

/// Settles all that the permit of a request holds.
fn settle(mut permit: Permit, used: Usage) {
    for whose in ["key", "team"] {
        for (what, used) in
            [("input", used.input), ("output", used.output), ("money", used.nano_dollars())]
        {
            if let Err(error) = permit.settle_for(&format!("{whose}-{what}"), used) {
                eprintln!("{error}");
            }
        }
    }
}

struct Gateway {
    key: Limits,
    team: Limits,
    upstream: String,
    client: reqwest::Client,
    records: mpsc::UnboundedSender<Record>,
}

/// What became of a request.
struct Record {
    key: &'static str,
    is_stream: bool,
    held: Usage,
    end: End,
}

enum End {
    Used(Usage),
    /// By the limit of this name.
    Denied(&'static str),
}

impl Gateway {
    async fn answer(&self, headers: &HeaderMap, body: &[u8]) -> Result<Response, Response> {
        let (key, team) =
            account(headers).ok_or_else(|| StatusCode::UNAUTHORIZED.into_response())?;
        let invalid =
            |error: serde_json::Error| (StatusCode::BAD_REQUEST, error.to_string()).into_response();
        let request: Completion = serde_json::from_slice(body).map_err(invalid)?;
        let mut forwarded: Value = serde_json::from_slice(body).map_err(invalid)?;
        if request.stream {
            // Without this option, a stream does not end with its usage.
            forwarded["stream_options"] = json!({"include_usage": true});
        }

        let held = Usage::estimate(&request);
        let record = |end| {
            let record = Record { key, is_stream: request.stream, held, end };
            let _ = self.records.send(record); // nothing reads them at the end of the program
        };
        let charge = self.key.charge(key, held).and(self.team.charge(team, held));
        let permit = match charge.hold().max_wait(MAX_WAIT).await {
            Ok(Admission::Admitted(permit)) => permit,
            Ok(Admission::Denied(denied)) => {
                record(End::Denied(denied.limiter()));
                return Err(Rejection::Denied(denied).into_response());
            }
            Err(error) => return Err(Rejection::from(error).into_response()),
        };
        let limits = permit.decision().headers();

        // From here to the response, a client that leaves drops the permit: the upstream does the
        // work nevertheless, so the estimate counts as used.
        let call = self.client.post(&self.upstream).body(forwarded.to_string());
        let response = match call.send().await {
            Ok(response) if response.status().is_success() => response,
            // The model may have worked: the permit is dropped, and counts as used.
            Err(error) if !error.is_connect() => {
                drop(permit);
                record(End::Used(held));
                return Err((limits, StatusCode::BAD_GATEWAY).into_response());
            }
            failed => {
                settle(permit, Usage::default());
                record(End::Used(Usage::default()));
                let status = failed.map_or(StatusCode::BAD_GATEWAY, |response| response.status());
                return Err((limits, status).into_response());
            }
        };
        let kind = response.headers().get(CONTENT_TYPE).cloned();
        let kind = kind.unwrap_or_else(|| HeaderValue::from_static("application/octet-stream"));
        let body = if request.stream {
            let records = self.records.clone();
            SettledStream::new(permit, Record { key, is_stream: true, held, end: End::Used(held) })
                .body(response, records)
        } else {
            let text = response.bytes().await;
            let text = text.map_err(|_| StatusCode::BAD_GATEWAY.into_response())?;
            let answer: Option<Answer> = serde_json::from_slice(&text).ok();
            // An answer without usage has used its estimate.
            let used = answer.and_then(|answer| answer.usage).unwrap_or(held);
            settle(permit, used);
            record(End::Used(used));
            Body::from(text)
        };
        Ok((limits, [(CONTENT_TYPE, kind)], body).into_response())
    }
}

/// Returns the key of a request and its team.
fn account(headers: &HeaderMap) -> Option<(&'static str, &'static str)> {
    let key = headers.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")?;
    ACCOUNTS.into_iter().find(|(known, _)| *known == key)
}

/// What the gateway reads of an answer, and of each event of a stream.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    choices: Vec<Value>,
    usage: Option<Usage>,
}

/// The permit of a stream. It is settled when the usage is there, or else when the stream is
/// dropped: at its end, or because the client or the upstream has gone.
struct SettledStream {
    permit: Option<Permit>,
    record: Option<Record>,
    records: Option<mpsc::UnboundedSender<Record>>,
    /// The beginning of a line of which the rest has not arrived.
    line: Vec<u8>,
    /// The tokens that were sent.
    sent: u64,
    is_complete: bool,
}

impl SettledStream {
    fn new(permit: Permit, record: Record) -> Self {
        let (permit, record) = (Some(permit), Some(record));
        Self { permit, record, records: None, line: vec![], sent: 0, is_complete: false }
    }

    /// Returns the body of a response, which owns the permit.
    fn body(mut self, upstream: reqwest::Response, to: mpsc::UnboundedSender<Record>) -> Body {
        self.records = Some(to);
        let upstream = axum::http::Response::<reqwest::Body>::from(upstream).into_body();
        let chunks = Body::new(upstream).into_data_stream();
        Body::from_stream(chunks.inspect(move |chunk| {
            chunk.iter().for_each(|chunk| self.read(chunk));
        }))
    }

    fn read(&mut self, chunk: &[u8]) {
        for byte in chunk {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            self.read_line(&line);
        }
    }

    fn read_line(&mut self, line: &[u8]) {
        let Some(event) = line.strip_prefix(b"data: ") else { return };
        if event == b"[DONE]" {
            self.is_complete = true;
        } else if let Ok(answer) = serde_json::from_slice::<Answer>(event) {
            self.sent += u64::from(!answer.choices.is_empty());
            if let Some(used) = answer.usage {
                self.end(used);
            }
        }
    }

    fn end(&mut self, used: Usage) {
        if let (Some(permit), Some(record)) = (self.permit.take(), self.record.take()) {
            settle(permit, used);
            if let Some(records) = &self.records {
                let _ = records.send(Record { end: End::Used(used), ..record });
            }
        }
    }
}

impl Drop for SettledStream {
    fn drop(&mut self) {
        let Some(held) = self.record.as_ref().map(|record| record.held) else { return };
        // A stream that was cut off has used what was sent, and its input. One that is complete
        // without a usage has used its estimate.
        let output = if self.is_complete { held.output } else { self.sent };
        self.end(Usage { output, ..held });
    }
}

async fn complete(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Response> {
    gateway.answer(&headers, &body).await
}

/// The heads of the columns that `print` fills.
fn print_header() {
    println!(
        "{:<40} {:>10}  {:>10}  {:>10}  {:>17}",
        "", "held", "used", "returned", "nano-dollars"
    );
    let tokens = format!("{:>4} {:>5}", "in", "out");
    println!(
        "{:<5} {:<34} {tokens}  {tokens}  {tokens}  {:>8} {:>8}",
        "key", "request", "held", "used"
    );
}

fn print(what: &str, record: &Record) {
    let Record { key, held, end, .. } = record;
    print!("{key:<5} {what:<34} {:>4} {:>5}", held.input, held.output);
    match end {
        End::Denied(by) => println!("  denied by {by}: nothing is spent or held"),
        End::Used(used) => println!(
            "  {:>4} {:>5}  {:>4} {:>5}  {:>8} {:>8}",
            used.input,
            used.output,
            held.input.saturating_sub(used.input),
            held.output.saturating_sub(used.output),
            held.nano_dollars(),
            used.nano_dollars()
        ),
    }
}

/// The clients of the example, and what became of their requests.
struct Script {
    gateway: Arc<Gateway>,
    url: String,
    records: mpsc::UnboundedReceiver<Record>,
    used: Vec<(&'static str, Usage)>,
}

impl Script {
    async fn send(&self, key: &str, request: Value) -> Result<reqwest::Response, Failure> {
        let request = self.gateway.client.post(&self.url).body(request.to_string());
        Ok(request.header("authorization", format!("Bearer {key}")).send().await?)
    }

    /// Sends a request, and reads its answer.
    async fn ask(&mut self, what: &str, key: &str, request: Value) -> Result<(), Failure> {
        self.send(key, request).await?.bytes().await?;
        self.report(what).await
    }

    /// Prints the next record.
    async fn report(&mut self, what: &str) -> Result<(), Failure> {
        let record = self.records.recv().await.expect("the gateway runs");
        print(what, &record);
        if let End::Used(used) = record.end {
            self.used.push((record.key, used));
        }
        Ok(())
    }

    /// Waits until nothing is held: over Redis, holds end in the background.
    async fn settled(&self) -> Result<(), Error> {
        for (limits, key) in [(&self.gateway.key, "ada"), (&self.gateway.team, "shop")] {
            for limiter in [&limits.input, &limits.output, &limits.money] {
                while limiter.peek(key).await?.held() > 0 {
                    sleep(Duration::from_millis(5)).await;
                }
            }
        }
        Ok(())
    }

    async fn run(mut self) -> Result<(), Failure> {
        print_header();
        let request = |words: u64, max_tokens: u64, is_stream: bool| {
            let question = json!({"role": "user", "content": format!("write {words} words")});
            json!({"model": "fake", "messages": [question], "max_tokens": max_tokens,
                "stream": is_stream})
        };
        let with_model = |model: &str, mut request: Value| {
            request["model"] = json!(model);
            request
        };
        self.ask("an answer", "ada", request(60, 200, false)).await?;
        self.ask("a stream", "ada", request(60, 200, true)).await?;
        let mut stream = self.send("ada", request(300, 300, true)).await?;
        for _ in 0..10 {
            stream.chunk().await?;
        }
        drop(stream);
        self.report("a stream that the client cuts off").await?;
        self.ask("the model fails", "ada", with_model("failing", request(60, 200, false))).await?;
        self.ask("no usage in the answer", "ada", with_model("silent", request(60, 100, false)))
            .await?;
        self.settled().await?;
        self.ask("more than is left", "ada", request(60, 900, false)).await?;

        // Together they would be over: the second one waits for what the first returns.
        let mut first = self.send("ada", request(60, 500, true)).await?;
        first.chunk().await?;
        let (second, rest) = tokio::join!(self.send("ada", request(60, 500, true)), first.bytes());
        rest?;
        second?.bytes().await?;
        self.report("two streams: the first").await?;
        self.report("two streams: the second waits").await?;
        self.settled().await?;
        self.ask("the eighth request", "ada", request(1, 1, false)).await?;
        self.ask("more than the team has left", "ben", request(60, 1_000, false)).await?;
        let long = json!({"role": "user", "content": "write 5 words ".repeat(70)});
        let long = json!({"model": "fake", "messages": [long], "max_tokens": 20});
        self.ask("a long question", "carl", long.clone()).await?;
        self.ask("another one", "carl", long).await?;
        self.print_counts().await
    }

    /// Prints what the limiters count, beside the sum of what was used.
    async fn print_counts(&self) -> Result<(), Failure> {
        self.settled().await?;
        let Gateway { key, team, .. } = &*self.gateway;
        println!("\nThe limiters count what was used, exactly:");
        let used = || self.used.iter().filter(|(key, _)| *key == "ada").map(|(_, used)| used);
        for (limiter, key, sum) in [
            (&key.input, "ada", used().map(|used| used.input).sum::<u64>()),
            (&key.output, "ada", used().map(|used| used.output).sum()),
            (&key.money, "ada", used().map(|used| used.nano_dollars()).sum()),
            (&team.money, "shop", used().map(|used| used.nano_dollars()).sum()),
        ] {
            println!(
                "{key:<5} {:<10} {:>8} - {sum:>6} used = {:>7} left",
                limiter.name(),
                limiter.quota().limit(),
                limiter.peek(key).await?.remaining()
            );
        }
        Ok(())
    }
}

async fn store(flags: &Flags) -> Result<AnyStore, Failure> {
    let Some(url) = &flags.redis else { return Ok(MemoryStore::new().into_any()) };
    // A prefix for this run alone, so that runs share no counts.
    let prefix = format!("llm-gateway-{}", std::process::id());
    let config = RedisConfig::from_url(url)?.prefix(&prefix).deadline(Duration::from_secs(1));
    let store = RedisStore::new(config)?;
    store.ping().await.context("cannot use the Redis server at --redis")?;
    Ok(store.into_any())
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let store = store(&flags).await?;
    let (sender, mut records) = mpsc::unbounded_channel();
    let gateway = Arc::new(Gateway {
        key: Limits::new("key", &store, KEY),
        team: Limits::new("team", &store, TEAM),
        upstream: llm_upstream::start().await?,
        client: reqwest::Client::new(),
        records: sender,
    });
    let app = Router::new().route("/v1/chat/completions", post(complete));
    let app = app.with_state(gateway.clone());
    let address = flags.listen.unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)));
    let listener = TcpListener::bind(address).await;
    let listener = listener.context(format_args!("cannot listen on {address}"))?;
    let url = format!("http://{}/v1/chat/completions", listener.local_addr()?);
    let server = tokio::spawn(serve(listener, app, store, stopping()?));
    for (whose, [requests, input, output, money]) in [("key:", KEY), ("team:", TEAM)] {
        println!(
            "limits of each {whose:<5} requests {requests}, input tokens {input}, output tokens \
             {output}, nano-dollars {money}"
        );
    }
    println!();
    if flags.listen.is_none() {
        return Script { gateway, url, records, used: vec![] }.run().await;
    }
    println!("listening on {url}");
    println!(
        "try it: curl -iN -H 'authorization: Bearer ada' -d '{{\"model\":\"fake\",\
         \"max_tokens\":200,\"stream\":true,\"messages\":[{{\"content\":\"write 60 words\"}}]}}' \
         {url}\n"
    );
    print_header();
    tokio::spawn(async move {
        while let Some(record) = records.recv().await {
            print(if record.is_stream { "a stream" } else { "an answer" }, &record);
        }
    });
    Ok(server.await.context("the server")??)
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
