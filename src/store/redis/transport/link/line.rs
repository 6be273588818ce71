//! The line of a connection: commands wait in it until they are written, in the order of their
//! arrival. It writes none after its deadline, and keeps the order if the server does not know a
//! script. What replies prove about the server is in `connection.rs`.

use std::{
    collections::VecDeque,
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use redis::{Cmd, RedisError, RedisResult, ServerErrorKind, Value, aio::MultiplexedConnection};
use tokio::{
    sync::oneshot,
    task::{AbortHandle, unconstrained, yield_now},
    time::{Instant, Sleep, sleep},
};

use super::{
    command::{Command, by_text},
    deadline::Deadline,
    session::{DriverFuture, Session},
    traffic::Traffic,
    unsent::Unsent,
};
use crate::sync::lock;

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
/// The time in which commands whose connection ended before they were written enter the next line.
/// Their callers run within microseconds; a caller that does not run, because its runtime is
/// blocked, must not stop the others. It is a fifth of the default deadline.
const MAX_REENTRY: Duration = Duration::from_millis(20);

/// The commands of a connection. The connection ends when all clones are dropped.
#[derive(Clone)]
pub(crate) struct Line(Arc<LineInner>);

struct LineInner {
    session: Session,
    queue: Arc<Mutex<LineQueue>>,
    unsent: Arc<Unsent>,
    _task: WriterTask,
}

#[derive(Default)]
struct LineQueue {
    requests: VecDeque<Request>,
    waker: Option<Waker>,
    has_ended: bool,
}

struct WriterTask(AbortHandle);

impl Drop for WriterTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The end of a command.
pub(crate) enum Outcome {
    Reply(RedisResult<Value>),
    /// It was not written before its deadline.
    Late,
    /// The connection ended.
    Ended {
        was_written: bool,
    },
}

/// A command in the line.
struct Request {
    cmd: Arc<Cmd>,
    text: Option<&'static str>,
    is_asking: bool,
    deadline: Deadline,
    /// That of its ticket; 0 for a command that waits for no other one.
    number: u64,
    outcome: oneshot::Sender<Outcome>,
}

impl Line {
    /// Begins a line over a session. A task owns the session from now on.
    pub(crate) fn new(session: Session, unsent: &Arc<Unsent>) -> Self {
        let queue = Arc::<Mutex<LineQueue>>::default();
        let driver = session.take_driver();
        session.traffic.bound();
        let mut writer = Writer {
            commands: session.commands.clone(),
            driver,
            traffic: session.traffic.clone(),
            queue: queue.clone(),
            unsent: unsent.clone(),
            reentry: Reentry::Ahead,
            under_way: VecDeque::new(),
            rejected: VecDeque::new(),
            repeated: VecDeque::new(),
            watch: None,
            was_answered: false,
            is_broken: false,
            used: Instant::now(),
        };
        // Unconstrained: the budget of a task must not delay a command behind a later one.
        let task = tokio::spawn(unconstrained(poll_fn(move |cx| writer.poll(cx))));
        let (unsent, task) = (unsent.clone(), WriterTask(task.abort_handle()));
        Self(Arc::new(LineInner { session, queue, unsent, _task: task }))
    }

    pub(crate) fn traffic(&self) -> &Arc<Traffic> {
        &self.0.session.traffic
    }

    /// Adds a command, whose position is fixed when this returns.
    pub(crate) fn push(
        &self,
        command: Command<'_>,
        deadline: Deadline,
        number: u64,
    ) -> impl Future<Output = Outcome> + use<> {
        let LineInner { queue, unsent, .. } = &*self.0;
        let (outcome, receiver) = oneshot::channel();
        let (cmd, text) = (Arc::new(command.cmd().clone()), command.text());
        let is_asking = command.is_asking();
        let request = Request { cmd, text, is_asking, deadline, number, outcome };
        let mut queue = lock(queue);
        if queue.has_ended {
            unsent.add(number);
            request.end(false);
        } else {
            let requests = &mut queue.requests;
            let position = requests.iter().rev().take_while(|it| it.number > number).count();
            requests.insert(requests.len() - position, request);
            let waker = queue.waker.take();
            drop(queue);
            unsent.remove(number);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        async { receiver.await.unwrap_or(Outcome::Ended { was_written: true }) }
    }
}

impl Request {
    fn end(self, was_written: bool) {
        let _ = self.outcome.send(Outcome::Ended { was_written });
    }
}

impl Reentry {
    /// Returns the number of the first command that must be sent before later ones, and is not in
    /// the line yet. `has_ticket` is true if a command with a ticket is in the line.
    fn first_unsent(&mut self, unsent: &Unsent, has_ticket: bool, cx: &mut Context<'_>) -> u64 {
        if matches!(self, Self::Ahead) && has_ticket {
            *self = Self::Until(Box::pin(sleep(MAX_REENTRY)));
        }
        let Self::Until(end) = self else { return u64::MAX };
        if end.as_mut().poll(cx).is_ready() {
            // The others are in tasks that do not run.
            *self = Self::Over;
            unsent.clear();
            return u64::MAX;
        }
        unsent.first(cx.waker()).unwrap_or(u64::MAX)
    }
}

/// The task of a line, which also drives the connection: between the look at a deadline and the
/// write of the command, nothing else can run.
struct Writer {
    commands: MultiplexedConnection,
    driver: DriverFuture,
    traffic: Arc<Traffic>,
    queue: Arc<Mutex<LineQueue>>,
    unsent: Arc<Unsent>,
    reentry: Reentry,
    /// In the order in which they were written, which is that of their replies.
    under_way: VecDeque<Exchange>,
    /// The commands whose scripts the server does not know. No further command is written until all
    /// that are under way are answered: these are then written again, in the same order. A later
    /// command that were written before would find the script, once the text of the first one is
    /// sent, and overtake (`order` in docs/connections.md).
    rejected: VecDeque<Request>,
    /// Those that are to be written again now.
    repeated: VecDeque<Repeated>,
    /// Set while commands are under way.
    watch: Option<Pin<Box<Sleep>>>,
    /// True if a reply has come since the watch was set.
    was_answered: bool,
    /// True if a command had an error of the connection, whose driver ends then.
    is_broken: bool,
    /// The time of the last command.
    used: Instant,
}

/// The time in which the commands of the connection before enter the line.
enum Reentry {
    /// No command with a ticket has come: the callers have no connection yet.
    Ahead,
    Until(Pin<Box<Sleep>>),
    Over,
}

struct Exchange {
    request: Request,
    has_text: bool,
    written_before: u64,
    reply: Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>,
}

struct Repeated {
    request: Request,
    /// True for the first call of a script: the others can name it by its hash.
    has_text: bool,
}

impl Writer {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            // First the driver: it reads the end of the connection before anything is written, and
            // writes what the last turn has handed over.
            let has_ended = self.driver.as_mut().poll(cx).is_ready();
            self.read(cx);
            if has_ended || self.is_broken || self.is_abandoned(cx) {
                self.end();
                return Poll::Ready(());
            }
            if !self.write(cx) {
                return Poll::Pending;
            }
        }
    }

    /// Passes the replies on that have come.
    fn read(&mut self, cx: &mut Context<'_>) {
        while let Some(first) = self.under_way.front_mut()
            && let Poll::Ready(reply) = first.reply.as_mut().poll(cx)
            && let Some(exchange) = self.under_way.pop_front()
        {
            self.traffic.end_reply();
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
        let is_unknown = |error: &RedisError| error.kind() == ServerErrorKind::NoScript.into();
        if request.text.is_some() && !has_text && reply.as_ref().is_err_and(is_unknown) {
            self.rejected.push_back(request);
        } else if reply.as_ref().is_err_and(RedisError::is_io_error) {
            self.is_broken = true;
            if self.traffic.written() == written_before {
                // It ends with the others that were not written, which are to stay behind it.
                self.repeated.push_back(Repeated { request, has_text });
            } else {
                request.end(true);
            }
        } else {
            let _ = request.outcome.send(Outcome::Reply(reply));
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
    fn write(&mut self, cx: &mut Context<'_>) -> bool {
        if self.traffic.is_blocked() || self.notices_end(cx) {
            return false;
        }
        let next = self.next(cx);
        let has_next = !next.is_empty();
        if has_next {
            self.used = Instant::now();
        }
        for Repeated { request, has_text } in next {
            self.hand_over(cx, request, has_text);
        }
        has_next
    }

    /// After an idle time, lets the runtime read that the server has closed the connection, before
    /// a command is written. It could not while a task blocked it, or the process was stopped.
    fn notices_end(&mut self, cx: &mut Context<'_>) -> bool {
        let is_idle = self.used.elapsed() >= IDLE && !lock(&self.queue).requests.is_empty();
        if is_idle {
            self.used = Instant::now();
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
        let queue = &mut *lock(&self.queue);
        let has_ticket = queue.requests.back().is_some_and(|it| it.number > 0);
        let first = self.reentry.first_unsent(&self.unsent, has_ticket, cx);
        let count = queue.requests.partition_point(|it| it.number < first).min(MAX_AT_ONCE);
        let next = queue.requests.drain(..count);
        let next = next.map(|request| Repeated { request, has_text: false }).collect();
        if count == 0 {
            queue.waker = Some(cx.waker().clone());
        }
        next
    }

    fn hand_over(&mut self, cx: &mut Context<'_>, request: Request, has_text: bool) {
        if request.outcome.is_closed() {
            return; // its caller is gone
        }
        if request.deadline.is_too_late() {
            let _ = request.outcome.send(Outcome::Late);
            return;
        }
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
        match exchange.reply.as_mut().poll(cx) {
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
            let is_gone = |exchange: &Exchange| exchange.request.outcome.is_closed();
            if !mem::take(&mut self.was_answered) && self.under_way.iter().all(is_gone) {
                return true;
            }
            watch.as_mut().reset(Instant::now() + MAX_SILENCE);
        }
        false
    }

    /// Ends all commands.
    fn end(&mut self) {
        let waiting = {
            let queue = &mut *lock(&self.queue);
            queue.has_ended = true;
            mem::take(&mut queue.requests)
        };
        let written = self.traffic.written();
        let under_way = self.under_way.drain(..);
        let mut ended: Vec<_> =
            under_way.map(|it| (it.request, written != it.written_before)).collect();
        let repeated = self.repeated.drain(..).map(|it| it.request);
        let unsent = self.rejected.drain(..).chain(repeated).chain(waiting);
        ended.extend(unsent.map(|request| (request, false)));
        // All of them, before the first one is sent again.
        for (request, was_written) in &ended {
            if !was_written && !request.outcome.is_closed() {
                self.unsent.add(request.number);
            }
        }
        for (request, was_written) in ended {
            request.end(was_written);
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
