//! lambda_http: the layer around a handler. Each instance of a function is a process that handles
//! one request at a time, so only a store in Redis limits anything.

use http::Request;
use lambda_http::{Body, Error, RequestExt, request::RequestContext};
use tower::{Layer, Service, service_fn};
use tower_ratelimit::{Limiter, RateLimitLayer, layer::ResponseBody};

async fn hello(_: Request<Body>) -> Result<http::Response<String>, Error> {
    Ok(http::Response::new("hello\n".to_owned()))
}

/// Returns the service for `lambda_http::run`. The key is the address that API Gateway has seen.
pub fn service(
    limiter: Limiter,
) -> impl Service<Request<Body>, Response = http::Response<ResponseBody<String>>, Error = Error> {
    let source_ip = |head: &http::request::Parts| {
        let context = head.extensions.get::<RequestContext>()?;
        let RequestContext::ApiGatewayV2(context) = context else { return None };
        context.http.source_ip.clone()
    };
    RateLimitLayer::new(limiter, source_ip).layer(service_fn(hello))
}

/// Returns a request as API Gateway sends it.
pub fn request(json: &str) -> Result<Request<Body>, Error> {
    Ok(lambda_http::request::from_str(json)?.with_lambda_context(Default::default()))
}
