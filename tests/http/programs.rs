//! The programs of `copy-one-of-these.md`, and the smoke test of `testing.md`, whose commands print
//! what the pages say. `docs.rs` compares their code with the page.

use std::{net::SocketAddr, process::Stdio};

use axum::Router;
use tokio::{net::TcpListener, process::Command, time::Instant};
use tower_ratelimit::{
    MemoryStore,
    store::{AnyStore, Store},
};

macro_rules! programs {
    ($($name:ident)*) => { $(
        #[allow(dead_code, reason = "its `main` listens on a fixed port")]
        mod $name;
    )* };
}

programs! { graphql limits llm login plans proxies search tonic upload vendor_job webhook }

const PAGES: &str =
    concat!(include_str!("../../docs/copy-one-of-these.md"), include_str!("../../docs/testing.md"));

fn store() -> AnyStore {
    MemoryStore::new().into_any()
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn serve(app: Router) -> SocketAddr {
    let (listener, address) = listener().await;
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Returns the block of a language in a section of the pages.
fn block(heading: &str, language: &str) -> &'static str {
    let section = PAGES.split_once(&format!("\n## {heading}\n")).expect(heading).1;
    let section = section.split("\n## ").next().unwrap();
    let block = section.split_once(&format!("```{language}\n")).expect(heading).1;
    block.split("```").next().unwrap()
}

/// Runs the commands of a section against a server, and compares what they print with the section.
async fn compare(heading: &str, address: SocketAddr) {
    assert_eq!(printed(heading, address).await, block(heading, "text"), "{heading}");
}

async fn printed(heading: &str, address: SocketAddr) -> String {
    let commands = block(heading, "sh").replace("127.0.0.1:3000", &address.to_string());
    let shell = Command::new("sh").args(["-c", &commands]).stderr(Stdio::inherit()).output();
    String::from_utf8(shell.await.unwrap().stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_page_print_what_it_says() {
    for (heading, app) in [
        ("Plans by API key", plans::app(&store())),
        ("Logins", login::app(&store())),
        ("Uploads", upload::app(&store())),
        ("Webhooks", webhook::app(&store())),
        ("A search", search::app(&store())),
        ("GraphQL by cost", graphql::app(&store())),
        ("Tokens of a language model", llm::app(&store())),
        ("`GET /limits`", limits::app(&store())),
        ("After deploying", plans::app(&store())),
    ] {
        compare(heading, serve(app).await).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_proxy_says_which_client_it_is() {
    let app =
        |proxy| proxies::app(&store(), proxies::client(proxy, "10.0.0.0/8,127.0.0.1").unwrap());
    compare("Behind nginx, Cloudflare or a load balancer", serve(app("nginx")).await).await;
    for (proxy, header) in [("cloudflare", "cf-connecting-ip"), ("balancer", "x-forwarded-for")] {
        let address = serve(app(proxy)).await;
        for (client, status) in
            [("192.0.2.1", 200), ("192.0.2.1", 200), ("192.0.2.1", 429), ("192.0.2.2", 200)]
        {
            let request = reqwest::Client::new().get(format!("http://{address}/"));
            let response = request.header(header, client).send().await.unwrap();
            assert_eq!(response.status(), status, "{proxy}: {client}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_method_of_tonic_has_its_limit() {
    // curl sometimes prints no header of an answer that comes before the body is sent.
    for _ in 0..20 {
        let (listener, address) = listener().await;
        let (_reporter, health) = tonic_health::server::health_reporter();
        let layer = tonic::per_method(&store());
        let server = ::tonic::transport::Server::builder().layer(layer).add_service(health);
        let incoming = ::tonic::transport::server::TcpIncoming::from(listener);
        tokio::spawn(server.serve_with_incoming(incoming));
        let printed = printed("tonic, per method", address).await;
        if printed.lines().count() == 3 {
            return assert_eq!(printed, block("tonic, per method", "text"));
        }
    }
    panic!("curl has not printed three answers");
}

#[tokio::test(start_paused = true)]
async fn the_job_makes_eight_calls_per_second() {
    let vendor = vendor_job::vendor(&store());
    let start = Instant::now();
    vendor_job::job(&vendor, 41).await.unwrap();
    assert_eq!(start.elapsed().as_secs(), 5);
}
