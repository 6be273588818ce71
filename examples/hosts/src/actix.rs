//! actix-web: its middleware is not Tower's, so a function calls the `Limiter`.

use actix_web::{
    App, Error, HttpResponse,
    body::{BoxBody, MessageBody},
    dev::{ServiceFactory, ServiceRequest, ServiceResponse},
    http::StatusCode,
    middleware::{Next, from_fn},
    web,
};
use tower_ratelimit::{Limiter, key, layer::Rejection};

async fn limit(
    limiter: web::Data<Limiter>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let Some(peer) = request.peer_addr() else {
        return Ok(request.into_response(HttpResponse::InternalServerError().finish()));
    };
    let rejection = match limiter.check(key::PeerIp.key(peer.ip())).await {
        Ok(decision) if decision.is_allowed() => {
            return Ok(next.call(request).await?.map_into_boxed_body());
        }
        Ok(decision) => Rejection::Denied(decision),
        Err(error) => error.into(),
    };
    Ok(request.into_response(response(&rejection)))
}

/// Copies a response between the two versions of the crate `http`.
fn response(rejection: &Rejection) -> HttpResponse {
    let (head, body) = rejection.to_response().into_parts();
    let status = StatusCode::from_u16(head.status.as_u16()).expect("a status");
    let mut response = HttpResponse::build(status);
    for (name, value) in &head.headers {
        response.append_header((name.as_str(), value.as_bytes()));
    }
    response.body(body.into_bytes())
}

/// Returns an application with one limit for each client address.
pub fn app(
    limiter: Limiter,
) -> App<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<BoxBody>,
        Error = Error,
        InitError = (),
    >,
> {
    App::new()
        .app_data(web::Data::new(limiter))
        .route("/", web::get().to(async || "hello\n"))
        .wrap(from_fn(limit))
}
