//! `BodyGuard`: ends what a request holds with the body of its response, by what the meter of the
//! response reports. The body itself is in `body.rs`, the meter in `meter.rs`.

use std::{
    fmt,
    ops::ControlFlow,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use http::{StatusCode, header::CONTENT_LENGTH, response};
use http_body::{Body, Frame};

use super::meter::Meter;
use crate::{
    middleware::passage::{Expects, RequestHolds},
    sync::get_mut,
};

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
