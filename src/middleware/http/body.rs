//! The body of a response: that of the service, or the complete text of a rejection. `BodyGuard`
//! ends what a request holds with the body, by what the meter of the response reports.

use std::{
    convert::Infallible,
    fmt,
    ops::ControlFlow,
    pin::Pin,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{StatusCode, header::CONTENT_LENGTH, response};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::meter::Meter;
use crate::{
    middleware::passage::{Expects, RequestHolds},
    sync::get_mut,
};

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

/// The owner of what a request holds, in the body of its response. The drop settles what the meter
/// reports, and ends the rest as used.
pub(crate) struct BodyGuard {
    holds: Box<RequestHolds>,
    /// `None` also if the meter has panicked: it is not called again.
    metered: Option<Box<Metered>>,
}

/// The meter of a response, and what it has seen of the body.
struct Metered {
    /// The mutex, which is never locked, makes the body `Sync`: a meter need not be.
    meter: Mutex<Box<dyn Meter>>,
    /// The data that is not seen yet, if the head contains its length. A server drops a body of
    /// this length without asking for its end.
    left: Option<u64>,
    /// Whether nothing is left to see. Atomic, because the body is only borrowed when a server asks
    /// for its end, and then drops it without a poll.
    is_complete: AtomicBool,
}

impl BodyGuard {
    /// Returns the guard of what lasts as long as the body; `None` if nothing does. In a tunnel,
    /// another protocol follows.
    pub(super) fn new(
        holds: Box<RequestHolds>,
        meter: Option<Box<dyn Meter>>,
        head: &response::Parts,
    ) -> Option<Self> {
        let is_tunnel = head.status == StatusCode::SWITCHING_PROTOCOLS
            || holds.expects == Expects::Tunnel && head.status.is_success();
        let goes_on = holds.is_open() && !is_tunnel;
        let metered = meter.map(|meter| {
            let has_no_body = holds.expects == Expects::NoBody
                || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&head.status);
            let length = head.headers.get(CONTENT_LENGTH);
            let left = length.and_then(|length| length.to_str().ok()?.parse().ok());
            let is_complete = AtomicBool::new(is_tunnel || has_no_body || left == Some(0));
            Box::new(Metered { meter: Mutex::new(meter), left, is_complete })
        });
        let guard = Self { holds, metered };
        goes_on.then_some(guard)
    }

    /// Shows a polled frame to the meter. Breaks if it is the last one: a server need not poll
    /// again.
    pub(super) fn see<B: Body>(
        &mut self,
        polled: &Option<Result<Frame<B::Data>, B::Error>>,
        body: &B,
    ) -> ControlFlow<()>
    where
        B::Data: AsRef<[u8]>,
    {
        let is_last = match polled {
            Some(Ok(frame)) => frame.is_trailers() || body.is_end_stream(),
            Some(Err(_)) | None => true,
        };
        if let Some(mut metered) = self.metered.take() {
            let meter = get_mut(&mut metered.meter);
            if let Some(Ok(frame)) = polled {
                if let Some(trailers) = frame.trailers_ref() {
                    meter.trailers(trailers);
                } else if let Some(data) = frame.data_ref().map(AsRef::as_ref) {
                    metered.left = metered.left.map(|left| left.saturating_sub(data.len() as u64));
                    meter.data(data);
                }
            }
            *metered.is_complete.get_mut() = match is_last {
                true => !matches!(polled, Some(Err(_))),
                // Trailers can follow, but a server need not ask for them.
                false => metered.left == Some(0) || body.size_hint().exact() == Some(0),
            };
            self.metered = Some(metered);
        }
        if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Remembers that the body has reported its end.
    pub(super) fn see_end(&self) {
        if let Some(metered) = &self.metered {
            metered.is_complete.store(true, Relaxed);
        }
    }
}

impl Drop for BodyGuard {
    fn drop(&mut self) {
        if let Some(mut metered) = self.metered.take()
            && self.holds.is_open()
        {
            let is_complete = *metered.is_complete.get_mut();
            let usage = get_mut(&mut metered.meter).usage(is_complete);
            usage.iter().for_each(|usage| usage.settle(&mut self.holds));
        }
    }
}

impl fmt::Debug for BodyGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyGuard").field("holds", &self.holds).finish_non_exhaustive()
    }
}
