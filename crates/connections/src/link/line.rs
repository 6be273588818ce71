//! The line of a connection: it writes the commands of a channel's queue, in the order of their
//! arrival, and passes the replies on. It writes none that was given up, and keeps the order if the
//! server does not know a script. What replies prove about the server is in `connection.rs`.

use std::{
    collections::VecDeque,
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Acquire},
    },
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use redis::{Cmd, RedisError, RedisResult, ServerErrorKind, Value, aio::MultiplexedConnection};
use tokio::{
    task::{AbortHandle, unconstrained, yield_now},
    time::{self, Sleep, sleep},
};

use super::{
    claim::Claim,
    command::{Command, by_text},
    error::is_routine,
    queue::{CommandQueue, Outcome, Position, Request},
    session::{DriverFuture, Session},
    silence::Silence,
    traffic::Traffic,
};

/// The number of commands that are handed to the crate `redis` before they are written. Its queue
/// has room for 50; if it were full, the handover would not be finished by one poll, and the next
/// command could overtake. 32 batches fill a socket buffer.
const MAX_AT_ONCE: usize = 32;
/// A connection without any reply for this time is given up, although it is open: its peer may be
/// gone without a word, and TCP needs minutes to notice. It is ten default deadlines, so that a
/// slow server does not lose its connections.
pub(crate) const MAX_SILENCE: Duration = Duration::from_secs(1);
/// After this idle time, the server may have closed the connection before the runtime has noticed.
/// One turn of the runtime then reads the end (`idle` in docs/connections.md: 50 of 50 commands
/// fail without it). A connection in use reads all the time, and needs no turn.
pub(crate) const IDLE: Duration = Duration::from_millis(10);
/// The commands of a connection. The connection ends when all clones are dropped.
#[derive(Clone)]
pub(crate) struct Line(Arc<LineInner>);

struct LineInner {
    number: u64,
    queue: Arc<CommandQueue>,
    /// Set after the commands that were not written are back in the queue. Whatever the next line
    /// takes then includes them.
    has_ended: Arc<AtomicBool>,
    // The drop of the task ends the line; that of the session then closes the connection.
    _task: WriterTask,
    _session: Session,
}

struct WriterTask(AbortHandle);

impl Drop for WriterTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Line {
    /// Begins a line over a session, which takes the commands of the queue from now on. A task owns
    /// the session.
    pub(super) fn new(session: Session, queue: &Arc<CommandQueue>, silence: Silence) -> Self {
        let driver = session.take_driver();
        session.traffic.bound();
        let (number, has_ended) = (queue.begin_line(), Arc::<AtomicBool>::default());
        let mut writer = Writer {
            commands: session.commands.clone(),
            driver,
            traffic: session.traffic.clone(),
            silence,
            number,
            queue: queue.clone(),
            has_ended: has_ended.clone(),
            under_way: VecDeque::new(),
            rejected: VecDeque::new(),
            repeated: VecDeque::new(),
            broken: vec![],
            watch: None,
            was_answered: false,
            used: Instant::now(),
        };
        // Unconstrained: the budget of a task must not delay a command behind a later one.
        let task = tokio::spawn(unconstrained(poll_fn(move |cx| writer.poll(cx))));
        let (queue, task) = (queue.clone(), WriterTask(task.abort_handle()));
        Self(Arc::new(LineInner { number, queue, has_ended, _task: task, _session: session }))
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.0.has_ended.load(Acquire)
    }

    /// Adds a command, whose position is fixed when this returns.
    pub(crate) fn push(&self, command: Command<'_>, claim: &Arc<Claim>) -> Position {
        let LineInner { number, queue, .. } = &*self.0;
        queue.push(*number, command, claim)
    }
}

/// The task of a line, which also drives the connection.
struct Writer {
    commands: MultiplexedConnection,
    driver: DriverFuture,
    traffic: Arc<Traffic>,
    silence: Silence,
    /// The number of the line.
    number: u64,
    queue: Arc<CommandQueue>,
    has_ended: Arc<AtomicBool>,
    /// In the order in which they were written, which is that of their replies.
    under_way: VecDeque<Exchange>,
    /// The commands whose scripts the server does not know. No further command is written until all
    /// that are under way are answered: these are then written again, in the same order. A later
    /// command that were written before would find the script, once the text of the first one is
    /// sent, and overtake (`order` in docs/connections.md).
    rejected: VecDeque<Request>,
    /// Those that are to be written again now.
    repeated: VecDeque<Repeated>,
    /// Those that had an error of the connection, whose driver ends then; true if bytes of the
    /// command were written. The line ends in the same turn.
    broken: Vec<(Request, bool)>,
    /// Set while commands are under way.
    watch: Option<Pin<Box<Sleep>>>,
    /// True if a reply has come since the watch was set.
    was_answered: bool,
    /// The time of the last command.
    used: Instant,
}

struct Exchange {
    request: Request,
    has_text: bool,
    written_before: u64,
    reply: Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>,
}

/// For what only the driver completes: it is polled after each poll of the driver.
fn unwoken() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

struct Repeated {
    request: Request,
    /// True for the first call of a script: the others can name it by its hash.
    has_text: bool,
}

impl Writer {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let now = Instant::now();
        // A handover wakes the driver, which is polled after it in any case.
        let mut is_polled_again =
            now - self.used < IDLE && self.queue.has_commands_for(self.number);
        loop {
            // First the driver: it reads the end of the connection before anything is written, and
            // writes what the last turn has handed over.
            let polled = match is_polled_again {
                true => self.driver.as_mut().poll(&mut unwoken()),
                false => self.driver.as_mut().poll(cx),
            };
            self.read();
            if polled.is_ready() || !self.broken.is_empty() || self.is_abandoned(cx) {
                self.end();
                return Poll::Ready(());
            }
            if !self.write(cx, now) && !is_polled_again {
                return Poll::Pending;
            }
            is_polled_again = false;
        }
    }

    /// Passes the replies on that have come.
    fn read(&mut self) {
        while let Some(first) = self.under_way.front_mut()
            && let Poll::Ready(reply) = first.reply.as_mut().poll(&mut unwoken())
            && let Some(exchange) = self.under_way.pop_front()
        {
            self.traffic.end_reply();
            self.silence.end();
            self.was_answered = true;
            self.answer(exchange, reply);
        }
        if self.under_way.is_empty() && !self.rejected.is_empty() {
            self.repeat();
        }
    }

    fn answer(&mut self, exchange: Exchange, reply: RedisResult<Value>) {
        let Exchange { request, has_text, written_before, .. } = exchange;
        let reply = match reply {
            Ok(Value::ServerError(error)) => Err(RedisError::from(error)),
            reply => reply,
        };
        if reply.as_ref().is_err_and(is_routine) {
            request.claim.reopen(); // the server has not executed it
        }
        let is_unknown = |error: &RedisError| error.kind() == ServerErrorKind::NoScript.into();
        if request.text.is_some() && !has_text && reply.as_ref().is_err_and(is_unknown) {
            self.rejected.push_back(request);
        } else if reply.as_ref().is_err_and(RedisError::is_io_error) {
            self.broken.push((request, self.traffic.written() != written_before));
        } else {
            request.end(Outcome::Reply(reply));
        }
    }

    /// Lets the rejected commands be written again.
    fn repeat(&mut self) {
        let mut texts = vec![];
        for request in mem::take(&mut self.rejected) {
            let has_text = !texts.contains(&request.text);
            texts.push(request.text);
            self.repeated.push_back(Repeated { request, has_text });
        }
    }

    /// Hands the next commands to the driver. Returns false if there are none.
    fn write(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        if self.traffic.is_blocked() || self.notices_end(cx, now) {
            return false;
        }
        let next = self.next(cx);
        let has_next = !next.is_empty();
        if has_next {
            self.used = now;
        }
        for Repeated { request, has_text } in next {
            self.hand_over(request, has_text);
        }
        has_next
    }

    /// After an idle time, lets the runtime read that the server has closed the connection, before
    /// a command is written. It could not while a task blocked it, or the process was stopped.
    fn notices_end(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        let is_idle = now - self.used >= IDLE && self.queue.has_commands_for(self.number);
        if is_idle {
            self.used = now;
            // Wakes this task when the runtime has read.
            let _ = pin!(yield_now()).poll(cx);
        }
        is_idle
    }

    fn next(&mut self, cx: &mut Context<'_>) -> Vec<Repeated> {
        if !self.repeated.is_empty() {
            let count = self.repeated.len().min(MAX_AT_ONCE);
            return self.repeated.drain(..count).collect();
        }
        if !self.rejected.is_empty() {
            return vec![];
        }
        let next = self.queue.take(self.number, MAX_AT_ONCE, cx.waker()).into_iter();
        next.map(|request| Repeated { request, has_text: false }).collect()
    }

    fn hand_over(&mut self, request: Request, has_text: bool) {
        if request.is_closed() {
            return; // its caller is gone
        }
        if !request.claim.write(self.used) {
            request.end(Outcome::GivenUp);
            return;
        }
        self.silence.begin(self.used);
        let mut commands = self.commands.clone();
        let cmd = match request.text {
            Some(text) if has_text => Arc::new(by_text(&request.cmd, text)),
            _ => request.cmd.clone(),
        };
        let is_asking = request.is_asking;
        let reply = Box::pin(async move {
            if !is_asking {
                return commands.send_packed_command(&cmd).await;
            }
            // In one pipeline: ASKING holds for the next command on the connection.
            let mut both = redis::pipe();
            both.cmd("ASKING").add_command(Cmd::clone(&cmd));
            let mut replies = commands.send_packed_commands(&both, 1, 1).await?;
            Ok(replies.pop().unwrap_or(Value::Nil))
        });
        // If the connection ends with the same number, no byte of this command was written. Others
        // that are handed over with it count as written together with it: the driver writes them at
        // once.
        let written_before = self.traffic.written();
        let mut exchange = Exchange { request, has_text, written_before, reply };
        // The first poll puts it into the queue of the driver.
        match exchange.reply.as_mut().poll(&mut unwoken()) {
            Poll::Ready(reply) => self.answer(exchange, reply),
            Poll::Pending => self.under_way.push_back(exchange),
        }
    }

    /// Returns true if the server has sent no reply for a while, and no call waits for one.
    fn is_abandoned(&mut self, cx: &mut Context<'_>) -> bool {
        if self.watch.is_none() && !self.under_way.is_empty() {
            self.was_answered = false;
            self.watch = Some(Box::pin(sleep(MAX_SILENCE)));
        }
        while let Some(watch) = &mut self.watch
            && watch.as_mut().poll(cx).is_ready()
        {
            if self.under_way.is_empty() {
                self.watch = None;
                return false;
            }
            let is_gone = |exchange: &Exchange| exchange.request.is_closed();
            if !mem::take(&mut self.was_answered) && self.under_way.iter().all(is_gone) {
                return true;
            }
            watch.as_mut().reset(time::Instant::now() + MAX_SILENCE);
        }
        false
    }

    /// Ends the line. Commands of which no byte was written go back to the queue.
    fn end(&mut self) {
        let written = self.traffic.written();
        let under_way = self.under_way.drain(..);
        let mut ended = mem::take(&mut self.broken);
        ended.extend(under_way.map(|it| (it.request, written != it.written_before)));
        let repeated = self.repeated.drain(..).map(|it| it.request);
        ended.extend(self.rejected.drain(..).chain(repeated).map(|request| (request, false)));
        let (interrupted, unsent): (Vec<_>, Vec<_>) =
            ended.into_iter().partition(|(_, was_written)| *was_written);
        let unsent = unsent.into_iter().map(|(request, _)| request).collect();
        self.queue.end_line(self.number, unsent, &self.has_ended);
        for (request, _) in interrupted {
            request.end(Outcome::Interrupted);
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
