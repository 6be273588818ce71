//! The bytes of a connection: how many were written and read, whether a reply is too long, and the
//! end. It does not know commands.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The largest size of a reply. Replies to batches of calls have some kilobytes, and a reply
/// without an end would fill the memory of the process: `make connections` shows it.
const MAX_REPLY: u64 = 16 << 20;

pub(super) trait Stream: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

pub(super) fn boxed(stream: impl Stream + 'static) -> Pin<Box<dyn Stream>> {
    Box::pin(stream)
}

/// The traffic of a connection, and its end.
///
/// The numbers are read and written by the task that drives the connection, so their order is
/// `Relaxed`. Other tasks read the end. A task that sees it must also see what was written before,
/// to know that a command was not written.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// The number of bytes.
    written: AtomicU64,
    /// The number of bytes that were read since the last reply.
    unreplied: AtomicU64,
    /// True if a reply has a longest size.
    is_bounded: AtomicBool,
    /// True if the server does not take what is written.
    is_blocked: AtomicBool,
    has_ended: AtomicBool,
}

impl Traffic {
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Relaxed)
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Relaxed)
    }

    /// Sets a longest size of replies, from now on.
    pub(crate) fn bound(&self) {
        self.end_reply();
        self.is_bounded.store(true, Relaxed);
    }

    /// Records that a whole reply was read.
    pub(crate) fn end_reply(&self) {
        self.unreplied.store(0, Relaxed);
    }

    /// Records bytes that were read. Returns whether they are too many for one reply.
    fn read(&self, bytes: usize) -> bool {
        let unreplied = self.unreplied.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        unreplied > MAX_REPLY && self.is_bounded.load(Relaxed)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Acquire)
    }

    pub(super) fn end(&self) {
        self.has_ended.store(true, Release);
    }
}

/// A stream that writes nothing after its end was read. So a command that failed was not sent, if
/// no byte was written since.
pub(super) struct Watched {
    pub(super) stream: Pin<Box<dyn Stream>>,
    pub(super) traffic: Arc<Traffic>,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = ready!(self.stream.as_mut().poll_read(cx, buffer));
        let count = buffer.filled().len() - before;
        if result.is_err() || count == 0 {
            self.traffic.end();
        }
        if self.traffic.read(count) {
            self.traffic.end();
            let text = format!("a reply has more than {MAX_REPLY} bytes");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.traffic.has_ended() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let result = self.stream.as_mut().poll_write(cx, bytes);
        self.traffic.is_blocked.store(result.is_pending(), Relaxed);
        let result = ready!(result);
        match &result {
            Ok(count) => _ = self.traffic.written.fetch_add(*count as u64, Relaxed),
            Err(_) => self.traffic.end(),
        }
        Poll::Ready(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.traffic.end();
    }
}
