//! salvo: a handler calls the `Limiter` before those of the routes.

use salvo::{Depot, FlowCtrl, Handler, Request, Response, Router, async_trait, handler};
use tower_ratelimit::{Limiter, key, layer::Rejection};

struct Limit(Limiter);

#[async_trait]
impl Handler for Limit {
    async fn handle(
        &self,
        request: &mut Request,
        _: &mut Depot,
        response: &mut Response,
        flow: &mut FlowCtrl,
    ) {
        let name = request.headers().get("x-api-key").and_then(|it| it.to_str().ok());
        let key = key::header("x-api-key").key(name.unwrap_or_default());
        let rejection = match self.0.check(key).await {
            Ok(decision) if decision.is_allowed() => return,
            Ok(decision) => Rejection::Denied(decision),
            Err(error) => error.into(),
        };
        let (head, body) = rejection.to_response().into_parts();
        response.status_code(head.status);
        response.headers_mut().extend(head.headers);
        response.body(body.into_bytes());
        flow.skip_rest();
    }
}

#[handler]
async fn hello() -> &'static str {
    "hello\n"
}

/// Returns a router with one limit for each API key.
pub fn router(limiter: Limiter) -> Router {
    Router::new().hoop(Limit(limiter)).get(hello)
}
