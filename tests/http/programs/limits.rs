//! `copy-one-of-these.md`: `GET /limits`.

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use tower_ratelimit::{
    Algorithm, Limiter, Quota, RateLimitLayer, key,
    layer::{Rejection, RequestError},
    store::{self, AnyStore},
};

async fn limits(
    State(api): State<Limiter>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Rejection> {
    let missing = || Rejection::Request(RequestError::missing_key("send x-user"));
    let user = key::header("x-user").key(headers.get("x-user").ok_or_else(missing)?);
    let state = api.peek(user).await?;
    let (limit, remaining) = (state.quota().limit(), state.remaining());
    let json = format!("{{\"limit\":{limit},\"remaining\":{remaining}}}\n");
    Ok(([(CONTENT_TYPE, "application/json")], json))
}

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_hour(100);
    let api = Limiter::new("api", store.clone(), Algorithm::sliding_window(), quota);
    Router::new()
        .route("/", get(async || "hello\n"))
        .layer(RateLimitLayer::new(&api, key::header("x-user")))
        .route("/limits", get(limits)) // after the layer: not counted
        .with_state(api)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app(&store::lazy(&url)?)).await?)
}
