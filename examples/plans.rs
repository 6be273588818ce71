//! An axum server that holds an estimate of tokens first, and settles it when the usage is known:
//! unused tokens are returned, and each answer says how many. A constant answer replaces the
//! language model.
//!
//! * The plan of an API key limits its requests.
//! * Tokens are limited per key and for all keys together.
//!
//! ```text
//! cargo run -p examples --example plans
//! curl -H 'x-api-key: ada' -d 'why is the sky blue' http://127.0.0.1:3000/answer
//! ```
//!
//! The answer ends with `tokens: 100 held first, 50 used, 50 returned, 450 left`.

#[path = "support/shutdown.rs"]
mod shutdown;
mod support;

use std::{collections::HashMap, net::SocketAddr, process::ExitCode};

use axum::{Extension, Router, extract::State, routing::post};
use clap::Parser;
use http::{HeaderMap, request::Parts};
use shutdown::{serve, stopping};
use support::{Context, Failure, exit_code};
use tokio::net::TcpListener;
use tower_ratelimit::{
    Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer,
    layer::{RequestError, Rule, Settle},
    store::Store,
};

/// Answers POST /answer for the API keys ada and carl (plan free) and ben (plan pro).
/// Each word of a question uses 10 tokens.
#[derive(Parser)]
#[command(name = "plans", verbatim_doc_comment)]
#[command(after_help = "Try it:  curl -H 'x-api-key: ada' -d 'why is the sky blue' \
                        http://127.0.0.1:3000/answer")]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// Requests per key of the plan free
    #[arg(long, value_name = "QUOTA", default_value = "3/min")]
    free: Quota,

    /// Requests per key of the plan pro
    #[arg(long, value_name = "QUOTA", default_value = "10/min")]
    pro: Quota,

    /// Tokens per key
    #[arg(long, value_name = "QUOTA", default_value = "500/min")]
    tokens: Quota,

    /// Tokens of all keys together
    #[arg(long, value_name = "QUOTA", default_value = "1000/min")]
    all_tokens: Quota,

    /// Tokens held before the usage of a request is known
    #[arg(long, value_name = "N", default_value = "100")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    estimate: u64,
}

#[derive(Clone, Copy)]
enum Plan {
    Free,
    Pro,
}

/// A stand-in for a database.
struct Accounts(HashMap<&'static str, Plan>);

impl Accounts {
    async fn plan(&self, key: &str) -> Option<Plan> {
        self.0.get(key).copied()
    }
}

struct ByPlan {
    accounts: Accounts,
    free: Limiter,
    pro: Limiter,
    tokens: Limiter,
    all_tokens: Limiter,
    estimate: u64,
}

impl ByPlan {
    fn new(flags: &Flags, store: &MemoryStore) -> Result<Self, Failure> {
        let limiter = |name, algorithm, quota| {
            Limiter::try_new(name, store.clone(), algorithm, quota)
                .context(format_args!("--{name}"))
        };
        let (requests, tokens) = (Algorithm::token_bucket(), Algorithm::sliding_window());
        Ok(Self {
            accounts: Accounts(
                [("ada", Plan::Free), ("ben", Plan::Pro), ("carl", Plan::Free)].into(),
            ),
            free: limiter("free", requests, flags.free)?,
            pro: limiter("pro", requests, flags.pro)?,
            tokens: limiter("tokens", tokens, flags.tokens)?,
            all_tokens: limiter("all-tokens", tokens, flags.all_tokens)?,
            estimate: flags.estimate,
        })
    }
}

impl Rule<Parts> for ByPlan {
    async fn charge(&self, head: &Parts) -> Result<Charge, RequestError> {
        let key = head.headers.get("x-api-key").and_then(|key| key.to_str().ok());
        let key = key.ok_or_else(|| RequestError::missing_key("header x-api-key is missing"))?;
        let requests = match self.accounts.plan(key).await {
            None => return Err(RequestError::invalid("unknown API key")),
            Some(Plan::Free) => &self.free,
            Some(Plan::Pro) => &self.pro,
        };
        let all_keys = Charge::new(&self.all_tokens, "all").estimate(self.estimate);
        let of_key = Charge::new(requests, key).also(&self.tokens).estimate(self.estimate);
        Ok(of_key.and(all_keys))
    }
}

async fn answer(
    State((estimate, tokens)): State<(u64, Limiter)>,
    Extension(settle): Extension<Settle>,
    head: HeaderMap,
    question: String,
) -> String {
    let used = 10 * question.split_whitespace().count() as u64;
    for limiter in ["tokens", "all-tokens"] {
        // The work is done: an error concerns only the count, so the client gets its answer.
        if let Err(error) = settle.settle(limiter, used) {
            eprintln!("{error}");
        }
    }
    let settled = match estimate.checked_sub(used) {
        Some(unused) => format!("{unused} returned"),
        None => format!("{} more charged", used - estimate),
    };
    let key = head.get("x-api-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
    let left = match tokens.peek(key).await {
        Ok(state) => state.remaining().to_string(),
        Err(_) => String::from("an unknown number"),
    };
    format!("42\ntokens: {estimate} held first, {used} used, {settled}, {left} left\n")
}

fn app(rule: ByPlan) -> Router {
    let state = (rule.estimate, rule.tokens.clone());
    Router::new()
        .route("/answer", post(answer))
        .with_state(state)
        .layer(RateLimitLayer::by_rule(rule).settle_handle(true))
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let store = MemoryStore::new();
    let app = app(ByPlan::new(&flags, &store)?);
    let stopping = stopping()?;
    let listener = TcpListener::bind(flags.listen)
        .await
        .context(format_args!("cannot listen on {}", flags.listen))?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("requests per key: {} (plan free), {} (plan pro)", flags.free, flags.pro);
    println!(
        "tokens: {} per key, {} for all keys; a request holds {} first, and returns those that it \
         does not use",
        flags.tokens, flags.all_tokens, flags.estimate
    );
    let count = flags.free.burst_size().saturating_add(2).min(100);
    println!(
        "try it: for i in $(seq {count}); do curl -s -H 'x-api-key: ada' -d 'why is the sky blue' \
         -w '%{{http_code}}\\n' {url}/answer; done"
    );
    Ok(serve(listener, app, store.into_any(), stopping).await?)
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
