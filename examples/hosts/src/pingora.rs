//! pingora: a proxy that checks the `Limiter` before it connects to the upstream, so a rejected
//! request takes no connection. Its requests are not Tower's.

use std::net::SocketAddr;

use async_trait::async_trait;
use pingora::{
    Result,
    http::ResponseHeader,
    proxy::{ProxyHttp, Session},
    upstreams::peer::HttpPeer,
};
use tower_ratelimit::{Limiter, key, layer::Rejection};

/// A proxy with one limit for each API key.
pub struct Gateway {
    /// The limit.
    pub limiter: Limiter,
    /// The address of the upstream, for plain HTTP.
    pub upstream: SocketAddr,
}

#[async_trait]
impl ProxyHttp for Gateway {
    type CTX = ();

    fn new_ctx(&self) {}

    /// Returns true if the response is sent, and the request ends here.
    async fn request_filter(&self, session: &mut Session, (): &mut ()) -> Result<bool> {
        let key = key::header("x-api-key").key(session.get_header_bytes("x-api-key"));
        let rejection = match self.limiter.check(key).await {
            Ok(decision) if decision.is_allowed() => return Ok(false),
            Ok(decision) => Rejection::Denied(decision),
            Err(error) => error.into(),
        };
        let (head, body) = rejection.to_response().map(|body| body.into_bytes()).into_parts();
        let mut response = ResponseHeader::build(head.status, None)?;
        for (name, value) in &head.headers {
            response.append_header(name.clone(), value)?;
        }
        response.insert_header("content-length", body.len())?;
        session.write_response_header(Box::new(response), false).await?;
        session.write_response_body(Some(body), true).await?;
        Ok(true)
    }

    async fn upstream_peer(&self, _: &mut Session, (): &mut ()) -> Result<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(self.upstream, false, String::new())))
    }
}
