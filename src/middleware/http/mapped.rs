//! The closure of `map_rejection`, and the collection of the bodies that it returns.

use std::{
    error::Error,
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
};

use bytes::Bytes;
use http::{Extensions, HeaderMap, Response, request::Parts, response};
use http_body::Body;

use super::{
    body::{RejectionBody, ResponseBody},
    headers::forbid_storing,
    problem,
};
use crate::{
    middleware::rejection::{Rejection, RequestError},
    observe::log::{self, Throttle},
};

/// The longest body of a rejection. It is in memory as a whole.
const MAX_BODY: usize = 64 * 1024;

/// An error of a body.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The body of a response, once it is complete.
type Collected = Pin<Box<dyn Future<Output = Result<RejectionBody, RequestError>> + Send>>;

/// The response of a closure, once its body is complete.
pub(super) type Mapped = Pin<Box<dyn Future<Output = Response<RejectionBody>> + Send>>;

async fn collect<B>(body: B) -> Result<RejectionBody, RequestError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let mut body = pin!(body);
    let mut collected = Bytes::new();
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        let frame = frame.map_err(|error| {
            let error: BoxError = error.into();
            RequestError::misconfigured(format!("the body of a mapped rejection failed: {error}"))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if collected.len() + data.len() > MAX_BODY {
            return Err(RequestError::misconfigured(
                "the body of a mapped rejection is longer than 64 KiB; return a shorter one",
            ));
        }
        collected = match collected.is_empty() {
            true => data,
            false => [collected, data].concat().into(),
        };
    }
    Ok(collected.into())
}

/// The closure of [`map_rejection`](crate::RateLimitLayer::map_rejection).
#[derive(Clone)]
pub(crate) struct MapRejection {
    map: Arc<DynMap>,
    mistakes: Arc<Throttle>,
}

type DynMap = dyn Fn(&Rejection, &Parts, Response<ResponseBody>) -> (response::Parts, Collected)
    + Send
    + Sync;

impl MapRejection {
    pub(crate) fn new<F, B>(map: F) -> Self
    where
        F: Fn(&Rejection, &Parts, Response<ResponseBody>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let map: Arc<DynMap> = Arc::new(move |rejection, head, response| {
            let (head, body) = map(rejection, head, response).into_parts();
            (head, Box::pin(collect(body)))
        });
        Self { map, mistakes: Arc::default() }
    }

    /// Calls the closure. `headers` are added to its response, if it lacks them. `details`: clients
    /// learn of a mistake in its body.
    pub(super) fn call(
        &self,
        rejection: &Rejection,
        head: &Parts,
        response: Response<RejectionBody>,
        headers: HeaderMap,
        extensions: Extensions,
        details: bool,
    ) -> Mapped {
        let (mut head, body) = (self.map)(rejection, head, response.map(ResponseBody::rejection));
        let mut names: Vec<_> = headers.keys().collect();
        names.retain(|name| !head.headers.contains_key(*name));
        for name in names {
            for value in headers.get_all(name) {
                head.headers.append(name, value.clone());
            }
        }
        forbid_storing(&mut head.headers);
        head.extensions.extend(extensions);
        let mistakes = self.mistakes.clone();
        Box::pin(async move {
            let error = match body.await {
                Ok(body) => return Response::from_parts(head, body),
                Err(error) => error,
            };
            log::misconfigured(&mistakes, &error.to_string());
            let mut headers = HeaderMap::new();
            forbid_storing(&mut headers);
            let rejection = Rejection::Request(error);
            let rejection = if details { rejection.detailed() } else { rejection };
            let mut response = problem::response(headers, &rejection);
            *response.extensions_mut() = head.extensions;
            response
        })
    }
}
