//! The body of a response: that of the service, or the complete text of a rejection.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::guard::BodyGuard;

/// The complete body of a rejection. It is not exported: users have it as [`ResponseBody`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RejectionBody(Option<Bytes>);

impl<T> From<T> for RejectionBody
where
    Bytes: From<T>,
{
    fn from(body: T) -> Self {
        Self(Some(Bytes::from(body)).filter(|bytes| !bytes.is_empty()))
    }
}

impl Body for RejectionBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

pin_project! {
    /// The body of a response: of the service, whose body is a `B`, or of a rejection.
    ///
    /// Without a `B`, it is the body of a rejection, for
    /// [`map_rejection`](crate::RateLimitLayer::map_rejection). Text and bytes can be converted
    /// into it.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{Response, request::Parts};
    /// use tower_ratelimit::layer::{Rejection, ResponseBody};
    ///
    /// fn short(
    ///     rejection: &Rejection,
    ///     _head: &Parts,
    ///     response: Response<ResponseBody>,
    /// ) -> Response<ResponseBody> {
    ///     match rejection.retry_after_secs() {
    ///         Some(seconds) => response.map(|_| format!("wait {seconds} s").into()),
    ///         None => response,
    ///     }
    /// }
    ///
    /// assert_eq!(ResponseBody::from("wait 7 s").into_bytes(), "wait 7 s");
    /// # let _ = short;
    /// ```
    #[derive(Debug)]
    pub struct ResponseBody<B = RejectionBody> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    #[derive(Debug)]
    enum Kind<B> {
        // Dropped in this order: a request counts until its body is gone.
        Service { #[pin] body: B, guard: Option<BodyGuard> },
        Rejection { #[pin] body: RejectionBody },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn service(body: B, guard: Option<BodyGuard>) -> Self {
        Self { kind: Kind::Service { body, guard } }
    }

    pub(crate) fn rejection(body: RejectionBody) -> Self {
        Self { kind: Kind::Rejection { body } }
    }
}

impl ResponseBody {
    /// Returns the bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, layer::Rejection};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let rejection = Rejection::Denied(limiter.check("alice").await?);
    /// let body = rejection.to_response().into_body().into_bytes();
    /// assert!(body.starts_with(b"{\"type\":"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        let (Kind::Service { body, .. } | Kind::Rejection { body }) = self.kind;
        body.0.unwrap_or_default()
    }
}

impl<T> From<T> for ResponseBody
where
    Bytes: From<T>,
{
    fn from(body: T) -> Self {
        Self::rejection(body.into())
    }
}

impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::service(B::default(), None)
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut kind = self.project().kind;
        match kind.as_mut().project() {
            KindProj::Service { mut body, guard } => {
                let Some(guard) = guard else { return body.poll_frame(cx) };
                let frame = ready!(body.as_mut().poll_frame(cx));
                if guard.see(&frame, &*body).is_break() {
                    kind.set(Kind::Rejection { body: RejectionBody::default() }); // nothing is left
                }
                Poll::Ready(frame)
            }
            KindProj::Rejection { body } => body.poll_frame(cx).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Service { body, guard } => {
                let is_end = body.is_end_stream();
                if is_end && let Some(guard) = guard {
                    guard.see_end();
                }
                is_end
            }
            Kind::Rejection { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Service { body, .. } => body.size_hint(),
            Kind::Rejection { body } => body.size_hint(),
        }
    }
}
