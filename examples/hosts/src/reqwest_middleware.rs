//! reqwest-middleware: a quota for each host, by a `Limiter`, because its clients are no services.

use std::time::Duration;

use http::Extensions;
use reqwest::{Request, Response};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, Result};
use tower_ratelimit::{
    Limiter,
    http::{Rejection, VendorState},
};

struct Limited {
    limiter: Limiter,
    max_wait: Duration,
}

#[async_trait::async_trait]
impl Middleware for Limited {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        let host = request.url().origin().ascii_serialization();
        let decision = self.limiter.try_acquire(&host, self.max_wait).await;
        let decision = decision.map_err(Error::middleware)?;
        if !decision.is_allowed() {
            return Err(Error::middleware(Rejection::Denied(decision)));
        }
        let response = next.run(request, extensions).await?;
        let state = VendorState::from_response(response.status(), response.headers());
        self.limiter.learn(&host, state).await.map_err(Error::middleware)?;
        Ok(response)
    }
}

/// Returns a client whose requests wait for the quota of their host.
pub fn client(limiter: Limiter, max_wait: Duration) -> ClientWithMiddleware {
    ClientBuilder::new(reqwest::Client::new()).with(Limited { limiter, max_wait }).build()
}
