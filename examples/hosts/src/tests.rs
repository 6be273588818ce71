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

/// Serves one answer for all paths, and counts the requests.
async fn vendor(answer: Value) -> (SocketAddr, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let reply = async move |State(count): State<Arc<AtomicUsize>>| {
        count.fetch_add(1, Ordering::SeqCst);
        Json(answer)
    };
    let app = Router::new().fallback(reply).with_state(count.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, count)
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

#[tokio::test]
async fn kubernetes() {
    let (address, count) = vendor(json!({"major": "1", "minor": "30"})).await;
    let config = kube::Config::new(format!("http://{address}").parse().unwrap());
    let client = crate::kubernetes::client(config, limiter("kube", ONE)).unwrap();
    let request = || http::Request::get("/version").body(vec![]).unwrap();
    client.request_text(request()).await.unwrap();
    assert!(client.request_text(request()).await.is_err());
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn reqwest_middleware() {
    let (address, count) = vendor(json!({})).await;
    let client = crate::reqwest_middleware::client(limiter("hosts", ONE), Duration::from_secs(1));
    let url = format!("http://{address}/");
    assert_eq!(client.get(&url).send().await.unwrap().status(), StatusCode::OK);
    let error = client.get(&url).send().await.unwrap_err();
    assert!(error.to_string().contains("rate limit exceeded"), "{error}");
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
