//! reqwest-middleware: a quota for each host, by a `Limiter`, because its clients are no services.
//! The error of a request that was not sent is a `Rejection`.

use std::time::Duration;

use http::Extensions;
use reqwest::{Request, Response};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, Result};
use tower_ratelimit::{FailurePolicy, Limiter, VendorState, layer::Rejection};

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
        let decision = self.limiter.try_acquire(&host, 1, self.max_wait).await;
        let decision = decision.map_err(|error| Error::middleware(Rejection::from(error)))?;
        if !decision.is_allowed() {
            return Err(Error::middleware(Rejection::Denied(decision)));
        }
        let response = next.run(request, extensions).await?;
        let state = VendorState::from_response(response.status(), response.headers());
        if let Err(error) = self.limiter.learn(&host, state).await {
            eprintln!("cannot learn from the response of {host}: {error}");
        }
        Ok(response)
    }
}

/// Returns a client whose requests wait for the quota of their host, and for the store if it fails.
pub fn client(limiter: Limiter, max_wait: Duration) -> ClientWithMiddleware {
    let limiter = limiter.on_failure(FailurePolicy::Wait);
    ClientBuilder::new(reqwest::Client::new()).with(Limited { limiter, max_wait }).build()
}
