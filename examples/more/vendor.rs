//! A vendor's API on a local port, which bans callers that exceed its quota, and prints when a ban
//! begins and ends. It knows no client.

use std::{
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use tokio::net::TcpListener;

/// Allows `limit` requests, then bans the callers for the time `ban`, and so on.
pub struct Vendor {
    limit: u32,
    ban: Duration,
    /// The printed times are from then on.
    start: Instant,
    banned_until: Option<Instant>,
    accepted_since: u32,
    pub counts: Counts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub accepted: u32,
    pub bans: u32,
    /// Requests that arrived during a ban.
    pub banned: u32,
}

impl Vendor {
    /// Starts a vendor. Returns its URL.
    pub async fn start(limit: u32, ban: Duration) -> io::Result<(Arc<Mutex<Self>>, String)> {
        let vendor = Self {
            limit,
            ban,
            start: Instant::now(),
            banned_until: None,
            accepted_since: 0,
            counts: Counts::default(),
        };
        let vendor = Arc::new(Mutex::new(vendor));
        let answer = {
            let vendor = vendor.clone();
            async move || vendor.lock().unwrap().answer(Instant::now())
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/", listener.local_addr()?);
        tokio::spawn(axum::serve(listener, Router::new().fallback(answer)).into_future());
        Ok((vendor, url))
    }

    fn answer(&mut self, now: Instant) -> Response {
        let banned = (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, self.ban.as_secs())]);
        if self.banned_until.is_some_and(|end| now < end) {
            self.counts.banned += 1;
            return banned.into_response();
        }
        if self.banned_until.take().is_some() {
            self.accepted_since = 0;
            self.print(now, "the ban is over");
        }
        if self.accepted_since == self.limit {
            self.counts.bans += 1;
            self.banned_until = Some(now + self.ban);
            let seconds = self.ban.as_secs();
            self.print(now, &format!("answers 429 and bans the callers for {seconds} s"));
            return banned.into_response();
        }
        self.accepted_since += 1;
        self.counts.accepted += 1;
        "hello\n".into_response()
    }

    fn print(&self, now: Instant, event: &str) {
        println!("{:4.1} s, vendor: {event}", (now - self.start).as_secs_f64());
    }
}
