//! `copy-one-of-these.md`: GraphQL by cost.

use axum::{Router, extract::State, http::HeaderMap, routing::post};
use tower_ratelimit::{
    Algorithm, Limiter, Quota, key,
    layer::{Rejection, RequestError},
    store::{self, AnyStore},
};

/// A point for each object of the query, and 50 for each list.
fn cost(query: &str) -> u64 {
    let count = |part| query.matches(part).count() as u64;
    1 + count("{") + 50 * count("(first:")
}

async fn graphql(
    State(points): State<Limiter>,
    headers: HeaderMap,
    query: String,
) -> Result<String, Rejection> {
    let missing = || Rejection::Request(RequestError::missing_key("send x-user"));
    let user = key::header("x-user").key(headers.get("x-user").ok_or_else(missing)?);
    let decision = points.check(user).cost(cost(&query)).await?;
    if !decision.is_allowed() {
        return Err(Rejection::Denied(decision));
    }
    Ok(format!("cost {}, {} left\n", decision.cost(), decision.remaining()))
}

pub fn app(store: &AnyStore) -> Router {
    let quota = Quota::per_hour(200);
    let points = Limiter::new("points", store.clone(), Algorithm::sliding_window(), quota);
    Router::new().route("/graphql", post(graphql)).with_state(points)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RATE_LIMIT_STORE").unwrap_or_else(|_| "memory:".to_owned());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app(&store::lazy(&url)?)).await?)
}
