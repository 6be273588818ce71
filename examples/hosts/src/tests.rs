//! Each host against a local server. Of two requests under one per hour, the second is rejected;
//! clients that wait send their requests no closer together than the quota allows.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Json, Router, extract::State, http::StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower::{Service, ServiceExt};
use tower_ratelimit::Quota;

use crate::limiter;

const ONE: Quota = Quota::per_hour(1);

/// The number of requests that a vendor has got.
type Count = Arc<AtomicUsize>;

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Serves one answer for all paths, and counts the requests.
async fn vendor(answer: Value) -> (SocketAddr, Count) {
    let count = Count::default();
    let reply = async move |State(count): State<Count>| {
        count.fetch_add(1, Ordering::SeqCst);
        Json(answer)
    };
    let app = Router::new().fallback(reply).with_state(count.clone());
    (serve(app).await, count)
}

#[tokio::test]
async fn openai() {
    let (address, count) = vendor(json!({"object": "list", "data": []})).await;
    let config = async_openai::config::OpenAIConfig::new()
        .with_api_base(format!("http://{address}"))
        .with_api_key("secret");
    let client = crate::openai::client(config, limiter("openai", Quota::per_second(20).burst(1)));
    for _ in 0..3 {
        client.models().list().await.unwrap();
    }
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn github() {
    let (address, count) = vendor(json!({"ok": true})).await;
    let api = format!("http://{address}").parse().unwrap();
    let client = crate::github::client(api, limiter("github", ONE));
    let _: Value = client.get("/meta", None::<&()>).await.unwrap();
    let rejected = client.get::<Value, _, _>("/meta", None::<&()>).await;
    assert!(rejected.is_err());
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

/// The vendor rejects a request, and gets no other one.
async fn busy(status: StatusCode, name: &'static str, value: &'static str) -> (SocketAddr, Count) {
    let count = Count::default();
    let reply = async move |State(count): State<Count>| {
        count.fetch_add(1, Ordering::SeqCst);
        (status, [(name, value)], Json(json!({"message": "slow down"})))
    };
    let app = Router::new().fallback(reply).with_state(count.clone());
    (serve(app).await, count)
}

#[tokio::test]
async fn github_rejects_by_a_secondary_limit() {
    let (address, count) = busy(StatusCode::FORBIDDEN, "retry-after", "600").await;
    let api = format!("http://{address}").parse().unwrap();
    let client = crate::github::client(api, limiter("github", crate::github::QUOTA));
    for path in ["/meta", "/meta", "/search/issues?q=a"] {
        assert!(client.get::<Value, _, _>(path, None::<&()>).await.is_err());
    }
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

/// An empty budget of searches keeps no other request waiting.
#[tokio::test]
async fn github_counts_searches_apart() {
    let (address, count) = {
        let count = Count::default();
        let reply = async move |State(count): State<Count>| {
            count.fetch_add(1, Ordering::SeqCst);
            let headers = [
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-reset", "600"),
                ("x-ratelimit-resource", "search"),
            ];
            (headers, Json(json!({"ok": true})))
        };
        let app = Router::new().fallback(reply).with_state(count.clone());
        (serve(app).await, count)
    };
    let api = format!("http://{address}").parse().unwrap();
    let client = crate::github::client(api, limiter("github", crate::github::QUOTA));
    let get = async |path: &str| client.get::<Value, _, _>(path, None::<&()>).await;
    assert!(get("/search/issues?q=a").await.is_ok());
    assert!(get("/search/issues?q=b").await.is_err());
    // An answer about searches to a request that is none changes nothing.
    for _ in 0..3 {
        assert!(get("/meta").await.is_ok());
    }
    assert_eq!(count.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn reqwest_middleware_learns() {
    let (address, count) = busy(StatusCode::TOO_MANY_REQUESTS, "retry-after", "600").await;
    let quota = Quota::per_second(100);
    let client = crate::reqwest_middleware::client(limiter("hosts", quota), Duration::ZERO);
    let url = format!("http://{address}/");
    assert_eq!(client.get(&url).send().await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(client.get(&url).send().await.is_err());
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

/// Of the headers of OpenAI, the ones about requests count. They are there with a success, too.
#[tokio::test]
async fn openai_learns() {
    let (address, count) = {
        let count = Count::default();
        let reply = async move |State(count): State<Count>| {
            count.fetch_add(1, Ordering::SeqCst);
            let headers =
                [("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-reset-requests", "6m0s")];
            (headers, Json(json!({"object": "list", "data": []})))
        };
        let app = Router::new().fallback(reply).with_state(count.clone());
        (serve(app).await, count)
    };
    let config = async_openai::config::OpenAIConfig::new()
        .with_api_base(format!("http://{address}"))
        .with_api_key("secret");
    let limiter = limiter("openai", Quota::per_second(20).burst(20));
    let client = crate::openai::client(config, limiter.clone());
    client.models().list().await.unwrap();
    let key = tower_ratelimit::key::Global.key();
    let rest = limiter.peek(key).await.unwrap().blocked_for().unwrap();
    assert!(rest > Duration::from_secs(300), "{rest:?}");
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn kubernetes() {
    let (address, count) = vendor(json!({"major": "1", "minor": "30"})).await;
    let config = kube::Config::new(format!("http://{address}").parse().unwrap());
    let client = crate::kubernetes::client(config, limiter("kube", ONE)).unwrap();
    let request = || http::Request::get("/version").body(vec![]).unwrap();
    client.request_text(request()).await.unwrap();
    assert!(client.request_text(request()).await.is_err());
    assert_eq!(count.load(Ordering::SeqCst), 1);
    let lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/leader";
    let renewal = http::Request::put(lease).body(vec![]).unwrap();
    client.request_text(renewal).await.unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 2, "it does not wait behind the others");
}

#[tokio::test]
async fn reqwest_middleware() {
    let (address, count) = vendor(json!({})).await;
    let client = crate::reqwest_middleware::client(limiter("hosts", ONE), Duration::from_secs(1));
    let url = format!("http://{address}/");
    assert_eq!(client.get(&url).send().await.unwrap().status(), StatusCode::OK);
    let error = client.get(&url).send().await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rate limit exceeded") && text.contains("limiter \"hosts\""), "{text}");
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn lambda() {
    let event = json!({
        "version": "2.0", "routeKey": "$default", "rawPath": "/", "rawQueryString": "",
        "headers": {}, "isBase64Encoded": false,
        "requestContext": {
            "http": {
                "method": "GET", "path": "/", "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1",
                "userAgent": "test",
            },
            "timeEpoch": 0, "stage": "$default",
        },
    });
    let mut service = crate::lambda::service(limiter("lambda", ONE));
    for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let request = crate::lambda::request(&event.to_string()).unwrap();
        let response = service.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!(response.status(), status);
    }
}

#[actix_web::test]
async fn actix() {
    use actix_web::test::{TestRequest, call_service, init_service};
    let app = init_service(crate::actix::app(limiter("actix", ONE))).await;
    for status in [200, 429] {
        let peer = SocketAddr::from(([192, 0, 2, 1], 1234));
        let request = TestRequest::get().uri("/").peer_addr(peer).to_request();
        let response = call_service(&app, request).await;
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.headers().contains_key("retry-after"), status == 429);
    }
}

#[tokio::test]
async fn salvo() {
    use salvo::test::TestClient;
    let service = salvo::Service::new(crate::salvo::router(limiter("salvo", ONE)));
    for status in [200, 429] {
        let request = TestClient::get("http://127.0.0.1/").add_header("x-api-key", "k1", true);
        let response = request.send(&service).await;
        assert_eq!(response.status_code.unwrap().as_u16(), status);
    }
}

/// Two routes of one group share their counts.
#[tokio::test]
async fn loco() {
    use axum::extract::ConnectInfo;
    use loco_rs::{app::Hooks, tests_cfg::app::get_app_context};
    let context = get_app_context().await;
    let app = crate::loco::App::routes(&context);
    let router = app.to_router::<crate::loco::App>(context, Router::new()).unwrap();
    let peer = SocketAddr::from(([192, 0, 2, 1], 1234));
    for (path, status) in [("/reports/daily", 200), ("/reports/weekly", 429), ("/_ping", 200)] {
        let request = http::Request::get(path).extension(ConnectInfo(peer));
        let request = request.body(axum::body::Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status().as_u16(), status, "{path}");
    }
}

/// Only the first request arrives at the upstream.
#[tokio::test]
async fn pingora() {
    use pingora::{
        apps::HttpServerApp, protocols::http::ServerSession, proxy::http_proxy,
        server::configuration::ServerConf,
    };
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (upstream, count) = vendor(json!({"ok": true})).await;
    let gateway = crate::pingora::Gateway { limiter: limiter("pingora", ONE), upstream };
    let proxy = Arc::new(http_proxy(&Arc::new(ServerConf::default()), gateway));
    let (_running, shutdown) = tokio::sync::watch::channel(false);
    for status in ["HTTP/1.1 200", "HTTP/1.1 429"] {
        let (mut client, server) = tokio::io::duplex(4_096);
        let head = b"GET / HTTP/1.1\r\nhost: a\r\nx-api-key: k1\r\nconnection: close\r\n\r\n";
        client.write_all(head).await.unwrap();
        let session = ServerSession::new_http1(Box::new(server));
        drop(proxy.process_new_http(session, &shutdown).await);
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        assert!(response.starts_with(status), "{response}");
        let is_rejected = status.ends_with("429");
        assert_eq!(response.to_lowercase().contains("retry-after: "), is_rejected, "{response}");
    }
    assert_eq!(count.load(Ordering::SeqCst), 1);
}
