//! A page that shows how the algorithms decide about the same traffic, side by side. The decisions
//! are those of the crate, made by this program while the page is open.
//!
//! ```text
//! cargo run -p more-examples --example playground
//! cargo run -p more-examples --example playground -- --redis
//! ```
//!
//! Then open the address that it prints. `--redis` starts a private Redis server, which the page
//! can stop and start; `--redis URL` uses a server that runs already. This file serves the page;
//! the traffic and the limiters of one page are in `session.rs`.

mod algorithms;
mod flight;
mod observed;
mod own_page;
mod redis_server;
mod session;
mod settings;
#[path = "../../support/mod.rs"]
mod support;
mod tally;
mod traffic;

use std::{
    net::SocketAddr,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    extract::{State, WebSocketUpgrade},
    http::{HeaderMap, StatusCode, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use clap::Parser;
use observed::Sessions;
use own_page::is_own_page;
use redis_server::Redis;
use support::{Context, Failure, exit_code};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot},
};

const PAGE: &str = include_str!("page.html");

/// The page needs nothing from elsewhere, and the browser loads nothing from elsewhere.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'";

/// Each page makes up to some thousand decisions per second.
const MAX_PAGES: usize = 16;

/// Serves a page that shows how the algorithms decide about the same traffic
#[derive(Parser)]
#[command(name = "playground")]
struct Flags {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// The Redis server for the counts; without URL, starts a private one,
    /// which the page can stop and start
    #[arg(long, value_name = "URL", num_args = 0..=1, default_missing_value = "")]
    #[arg(verbatim_doc_comment)]
    redis: Option<String>,
}

/// What all pages share.
struct App {
    redis: Option<Redis>,
    sessions: Sessions,
    /// The pages that wait for the session that runs ahead.
    claims: mpsc::Sender<oneshot::Sender<session::Begun>>,
    pages: AtomicUsize,
    /// True if only this machine can connect.
    is_local: bool,
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_SECURITY_POLICY, POLICY), (header::CACHE_CONTROL, "no-store")], Html(PAGE))
}

/// The counts of the open pages by the events of the crate, to compare them with what the page
/// shows.
async fn counts(State(app): State<Arc<App>>) -> impl IntoResponse {
    let counts = serde_json::to_string(&app.sessions.counts()).unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")], counts)
}

async fn connect(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    upgrade: WebSocketUpgrade,
) -> Response {
    if !is_own_page(&headers, app.is_local) {
        return (StatusCode::FORBIDDEN, "this is not the page of the playground").into_response();
    }
    if app.pages.fetch_add(1, Ordering::Relaxed) >= MAX_PAGES {
        app.pages.fetch_sub(1, Ordering::Relaxed);
        return (StatusCode::SERVICE_UNAVAILABLE, "too many open pages").into_response();
    }
    let open = OpenPage(app.clone());
    upgrade.max_message_size(1 << 16).on_upgrade(async move |socket| {
        let _open = open;
        session::run(app, socket).await;
    })
}

/// Counts an open page until it is dropped.
struct OpenPage(Arc<App>);

impl Drop for OpenPage {
    fn drop(&mut self) {
        self.0.pages.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn run(flags: Flags) -> Result<(), Failure> {
    let redis = match flags.redis.as_deref() {
        None => None,
        Some("") => Some(Redis::start()?),
        Some(url) => Some(Redis::at(url).await?),
    };
    let counts_in = match &redis {
        None => String::from("memory; --redis adds a private Redis server"),
        Some(redis) => format!("memory, or {redis}"),
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let listener = TcpListener::bind(flags.listen)
        .await
        .context(format_args!("cannot listen on {}", flags.listen))?;
    println!("listening on http://{}", listener.local_addr()?);
    println!("counts: {counts_in}");
    let (claims, claimed) = mpsc::channel(MAX_PAGES);
    let app = Arc::new(App {
        redis,
        sessions: Sessions::default(),
        claims,
        pages: AtomicUsize::new(0),
        is_local: flags.listen.ip().is_loopback(),
    });
    tokio::spawn(session::run_ahead(app.clone(), claimed));
    let routes = Router::new()
        .route("/", get(page))
        .route("/counts", get(counts))
        .route("/session", get(connect))
        .with_state(app);
    // The end of the program drops the private server, and so ends it.
    tokio::select! {
        end = axum::serve(listener, routes) => Ok(end?),
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
