//! An axum server in front of a language model (there is none): requests are limited by the plan of their
//! API key, tokens by key and for all keys together, and paid for when it is known how many were used.
//!
//! ```text
//! cargo run --example plans
//! curl -i -H 'x-api-key: ada' -d 'why is the sky blue' http://127.0.0.1:3000/answer   # ada is free, ben is pro
//! ```

use std::{collections::HashMap, net::SocketAddr, process::ExitCode};

use axum::{Extension, Router, routing::post};
use clap::Parser;
use http::request::Parts;
use tokio::net::TcpListener;
use tower_ratelimit::{
    Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer, RequestError, Rule,
};

/// Answers POST /answer for the API keys ada and carl (plan free) and ben (plan pro), as often as the
/// quotas allow. Each word of a question uses up 10 tokens.
#[derive(Parser)]
#[command(name = "plans")]
#[command(after_help = "Try it:  curl -i -H 'x-api-key: ada' -d 'why is the sky blue' \
                        http://127.0.0.1:3000/answer")]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// Requests of a key on the plan free
    #[arg(long, value_name = "QUOTA", default_value = "3/min")]
    free: Quota,

    /// Requests of a key on the plan pro
    #[arg(long, value_name = "QUOTA", default_value = "10/min")]
    pro: Quota,

    /// Tokens of each key
    #[arg(long, value_name = "QUOTA", default_value = "500/min")]
    tokens: Quota,

    /// Tokens of all keys together
    #[arg(long, value_name = "QUOTA", default_value = "1000/min")]
    all_tokens: Quota,

    /// Tokens that a request is charged before it is known how many it uses
    #[arg(long, value_name = "N", default_value = "50")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    estimate: u32,
}

#[derive(Clone, Copy)]
enum Plan {
    Free,
    Pro,
}

/// Stands for a database.
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
    estimate: u32,
}

impl ByPlan {
    fn new(flags: &Flags) -> Result<Self, String> {
        let store = MemoryStore::new();
        let limiter = |name, quota| {
            Limiter::try_named(name, store.clone(), Algorithm::token_bucket(), quota)
                .map_err(|error| format!("--{name}: {error}"))
        };
        Ok(Self {
            accounts: Accounts(
                [("ada", Plan::Free), ("ben", Plan::Pro), ("carl", Plan::Free)].into(),
            ),
            free: limiter("free", flags.free)?,
            pro: limiter("pro", flags.pro)?,
            tokens: limiter("tokens", flags.tokens)?,
            all_tokens: limiter("all-tokens", flags.all_tokens)?,
            estimate: flags.estimate,
        })
    }
}

impl Rule<Parts> for ByPlan {
    async fn charge(&self, head: &Parts) -> Result<Charge, RequestError> {
        let key = head.headers.get("x-api-key").and_then(|key| key.to_str().ok());
        let key = key.ok_or_else(|| RequestError::missing_key("the field x-api-key is missing"))?;
        let requests = match self.accounts.plan(key).await {
            None => return Err(RequestError::invalid("nobody has this x-api-key")),
            Some(Plan::Free) => &self.free,
            Some(Plan::Pro) => &self.pro,
        };
        let everybody = Charge::new(&self.all_tokens, "everybody").cost(self.estimate);
        Ok(Charge::new(requests, key).also(&self.tokens).cost(self.estimate).and(everybody))
    }
}

async fn answer(Extension(charge): Extension<Charge>, question: String) -> Result<String, String> {
    let used = 10 * question.split_whitespace().count() as u32;
    for limiter in ["tokens", "all-tokens"] {
        charge.settle(limiter, used).await.map_err(|error| error.to_string())?;
    }
    Ok(format!("42 ({used} tokens)\n"))
}

fn app(rule: ByPlan) -> Router {
    Router::new()
        .route("/answer", post(answer))
        .layer(RateLimitLayer::by_rule(rule).charge_handle(true))
}

async fn run(flags: Flags) -> Result<(), String> {
    let app = app(ByPlan::new(&flags)?);
    let listener = TcpListener::bind(flags.listen)
        .await
        .map_err(|error| format!("cannot listen on {}: {error}", flags.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    axum::serve(listener, app).await.map_err(|error| error.to_string())
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Flags::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
