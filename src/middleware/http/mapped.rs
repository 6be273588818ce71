//! The closure of `map_rejection`, and the collection of the bodies that it returns.

use std::{
    error::Error,
    fmt,
    future::poll_fn,
    marker::PhantomData,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
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
    sync::POLLED,
};

/// The longest body of a rejection. It is in memory as a whole.
const MAX_BODY: usize = 64 * 1024;

/// An error of a body.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The body of a response, once it is complete.
type Collected = Pin<Box<dyn Future<Output = Result<RejectionBody, RequestError>> + Send>>;

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
    pub(super) fn call<B>(
        &self,
        rejection: &Rejection,
        head: &Parts,
        response: Response<RejectionBody>,
        headers: HeaderMap,
        details: bool,
    ) -> Mapped<B> {
        let (mut head, body) = (self.map)(rejection, head, response.map(ResponseBody::rejection));
        let mut names: Vec<_> = headers.keys().collect();
        names.retain(|name| !head.headers.contains_key(*name));
        for name in names {
            for value in headers.get_all(name) {
                head.headers.append(name, value.clone());
            }
        }
        forbid_storing(&mut head.headers);
        let mistakes = self.mistakes.clone();
        Mapped { head: Some(head), body, mistakes, details, service: PhantomData }
    }
}

/// The response of a closure, once its body is complete.
pub struct Mapped<B> {
    head: Option<response::Parts>,
    body: Collected,
    mistakes: Arc<Throttle>,
    details: bool,
    service: PhantomData<fn() -> B>,
}

impl<B> Mapped<B> {
    pub(super) fn extensions_mut(&mut self) -> &mut Extensions {
        &mut self.head.as_mut().expect("it was not polled").extensions
    }
}

impl<B> Future for Mapped<B> {
    type Output = Response<ResponseBody<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let body = ready!(self.body.as_mut().poll(cx));
        let head = self.head.take().expect(POLLED);
        let response = match body {
            Ok(body) => Response::from_parts(head, body),
            Err(error) => {
                log::misconfigured(&self.mistakes, &error.to_string());
                let mut headers = HeaderMap::new();
                forbid_storing(&mut headers);
                let rejection = Rejection::Request(error);
                let rejection = if self.details { rejection.detailed() } else { rejection };
                let mut response = problem::response(headers, &rejection);
                *response.extensions_mut() = head.extensions;
                response
            }
        };
        Poll::Ready(response.map(ResponseBody::rejection))
    }
}

impl<B> fmt::Debug for Mapped<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped").field("head", &self.head).finish_non_exhaustive()
    }
}
