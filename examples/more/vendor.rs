//! A vendor's API on a local port, which bans callers that exceed its quota, can be closed for a
//! while, and prints when a ban begins and ends. It knows no client.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use axum::{
    Router,
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use tokio::{net::TcpListener, time::sleep};

/// The time that an answer takes, so that requests are in flight together.
const ANSWER_TIME: Duration = Duration::from_millis(20);

/// A ban grows if a request arrives later than this: it was not on the way when the ban began.
const GRACE: Duration = Duration::from_millis(500);

/// Allows `limit` requests, then bans the callers for the time `ban`, and so on.
pub struct Vendor {
    limit: u32,
    ban: Duration,
    /// The printed times are from then on.
    start: Instant,
    closed: Option<Closed>,
    accepted_since: u32,
    pub counts: Counts,
}

/// A time in which all requests are rejected.
struct Closed {
    is_ban: bool,
    began: Instant,
    ends: Instant,
    status: StatusCode,
    retry_after: RetryAfter,
}

/// How a rejection says when it ends.
#[derive(Clone, Copy, Debug)]
pub enum RetryAfter {
    Seconds,
    #[allow(dead_code, reason = "tests use it")]
    Date,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub accepted: u32,
    pub bans: u32,
    /// Requests that arrived during a ban, or while the vendor was closed.
    pub banned: u32,
    /// Bans that became longer, because requests went on.
    pub grown: u32,
}

impl Vendor {
    /// Starts a vendor. Returns its URL.
    pub async fn start(limit: u32, ban: Duration) -> io::Result<(Arc<Mutex<Self>>, String)> {
        let vendor = Self {
            limit,
            ban,
            start: Instant::now(),
            closed: None,
            accepted_since: 0,
            counts: Counts::default(),
        };
        let vendor = Arc::new(Mutex::new(vendor));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/", listener.local_addr()?);
        tokio::spawn(serve(vendor.clone(), listener, std::future::pending()));
        Ok((vendor, url))
    }

    /// Serves a vendor at an address, until `stop`: then the port refuses connections.
    #[allow(dead_code, reason = "tests use it")]
    pub async fn serve_at(
        vendor: Arc<Mutex<Self>>,
        address: SocketAddr,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        serve(vendor, TcpListener::bind(address).await?, stop).await
    }

    /// Rejects all requests with this status for a time.
    #[allow(dead_code, reason = "tests use it")]
    pub fn close(&mut self, status: StatusCode, time: Duration, retry_after: RetryAfter) {
        let began = Instant::now();
        let ends = began + time;
        self.closed = Some(Closed { is_ban: false, began, ends, status, retry_after });
    }

    fn answer(&mut self, now: Instant) -> Response {
        if let Some(closed) = self.closed.as_mut().filter(|closed| now < closed.ends) {
            self.counts.banned += 1;
            if closed.is_ban && now > closed.began + GRACE {
                self.counts.grown += 1;
                closed.status = StatusCode::IM_A_TEAPOT;
                closed.ends = now + 2 * (closed.ends - closed.began);
            }
            return closed.answer(now);
        }
        if self.closed.take().is_some() {
            self.accepted_since = 0;
            self.print(now, "the ban is over");
        }
        if self.accepted_since == self.limit {
            self.counts.bans += 1;
            let seconds = self.ban.as_secs();
            self.print(now, &format!("answers 429 and bans the callers for {seconds} s"));
            let closed = self.closed.insert(Closed {
                is_ban: true,
                began: now,
                ends: now + self.ban,
                status: StatusCode::TOO_MANY_REQUESTS,
                retry_after: RetryAfter::Seconds,
            });
            return closed.answer(now);
        }
        self.accepted_since += 1;
        self.counts.accepted += 1;
        "hello\n".into_response()
    }

    fn print(&self, now: Instant, event: &str) {
        println!("{:4.1} s, vendor: {event}", (now - self.start).as_secs_f64());
    }
}

impl Closed {
    fn answer(&self, now: Instant) -> Response {
        // Rounded up: the ban is over then.
        let seconds = (self.ends - now).as_millis().div_ceil(1_000) as u64;
        let value: HeaderValue = match self.retry_after {
            RetryAfter::Seconds => seconds.into(),
            RetryAfter::Date => {
                let date = SystemTime::now() + Duration::from_secs(seconds + 1);
                let date = httpdate::fmt_http_date(date);
                HeaderValue::try_from(date).expect("a date is ASCII")
            }
        };
        (self.status, [(RETRY_AFTER, value)]).into_response()
    }
}

async fn serve(
    vendor: Arc<Mutex<Vendor>>,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let answer = async move || {
        let answer = vendor.lock().unwrap().answer(Instant::now());
        sleep(ANSWER_TIME).await;
        answer
    };
    axum::serve(listener, Router::new().fallback(answer)).with_graceful_shutdown(stop).await
}
