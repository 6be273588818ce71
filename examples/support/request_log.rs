//! The request lines of the example `server`: at most 20 per second, then a count of the others.
//!
//! A request never waits for the output: either it takes one of the second's lines and sends its
//! text to the task that prints, or it increments a counter.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::{Semaphore, mpsc},
    time::{MissedTickBehavior, interval},
};

pub const LINES_PER_SECOND: usize = 20;

#[derive(Clone, Copy)]
pub enum Outcome {
    Allowed,
    /// The quota is used up.
    Denied,
    /// Any other reason, such as a missing key.
    Rejected,
}

const OUTCOMES: [&str; 3] = ["allowed", "denied", "rejected"];

/// The part that records requests.
#[derive(Clone)]
pub struct RequestLog {
    // `Counts::free` bounds it.
    lines: mpsc::UnboundedSender<String>,
    counts: Arc<Counts>,
}

/// The part that prints.
pub struct Printer {
    lines: mpsc::UnboundedReceiver<String>,
    counts: Arc<Counts>,
}

struct Counts {
    /// The lines that are left in this second.
    free: Semaphore,
    /// The requests without a line, by their [`Outcome`].
    left_out: [AtomicU64; 3],
}

pub fn request_log() -> (RequestLog, Printer) {
    let counts = Counts { free: Semaphore::new(LINES_PER_SECOND), left_out: Default::default() };
    let counts = Arc::new(counts);
    let (sender, receiver) = mpsc::unbounded_channel();
    (RequestLog { lines: sender, counts: counts.clone() }, Printer { lines: receiver, counts })
}

impl RequestLog {
    /// Hands the line to the printer, or counts the request if the second has no line left.
    pub fn record(&self, outcome: Outcome, line: impl FnOnce() -> String) {
        match self.counts.free.try_acquire() {
            Ok(permit) => {
                permit.forget();
                // Fails after the output has been closed: then there is no reader.
                let _ = self.lines.send(line());
            }
            Err(_) => {
                self.counts.left_out[outcome as usize].fetch_add(1, Relaxed);
            }
        }
    }
}

impl Printer {
    /// Prints until all [`RequestLog`]s are dropped, or the output is closed.
    pub async fn print(mut self, mut out: impl AsyncWrite + Unpin) -> io::Result<()> {
        let mut second = interval(Duration::from_secs(1));
        // After a stalled output the next second begins when the output continues.
        second.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // The lines of a second come before its count.
                biased;
                line = self.lines.recv() => match line {
                    Some(line) => write_line(&mut out, line).await?,
                    None => return self.end_second(&mut out).await,
                },
                _ = second.tick() => self.end_second(&mut out).await?,
            }
        }
    }

    async fn end_second(&self, out: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let left_out = self.counts.left_out.each_ref().map(|count| count.swap(0, Relaxed));
        let total: u64 = left_out.iter().sum();
        if total > 0 {
            let parts = OUTCOMES.iter().zip(left_out).filter(|(_, count)| *count > 0);
            let parts: Vec<_> = parts.map(|(name, count)| format!("{count} {name}")).collect();
            let parts = parts.join(", ");
            write_line(out, format!(".. and {total} more in this second: {parts}")).await?;
        }
        // After the count, so that an output that stalls holds no more than one second's lines.
        let free = &self.counts.free;
        free.add_permits(LINES_PER_SECOND - free.available_permits());
        Ok(())
    }
}

async fn write_line(out: &mut (impl AsyncWrite + Unpin), line: String) -> io::Result<()> {
    out.write_all((line + "\n").as_bytes()).await?;
    out.flush().await
}
