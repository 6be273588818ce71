//! `Waiter`: waits for quota, and releases what a request has spent, reserved or held if it
//! is dropped. Waiting without a reservation is in `in_line.rs`, and the bounds on waiting requests
//! in `wait_queue.rs`.

use std::{
    fmt,
    future::poll_fn,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep};

use super::{
    charge::Charge,
    in_line::InLine,
    recovery::Recovery,
    report::Wait,
    version::{ENDLESS, MaxWait},
    wait_queue::WaitSlot,
};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome, Receipts},
    error::{Error, ErrorKind},
    observe::log,
    store::{Booking, Reporting, StoreFuture, Task, after},
    sync::POLLED,
};

/// The default lateness up to which a waiting request proceeds without a second check. A timer of
/// tokio is up to 1 ms late, and a busy runtime some milliseconds more: far above, the process was
/// stopped, and the requests that were late together would exceed the quota together (law 2).
pub(crate) const DEFAULT_MAX_LATENESS: Duration = Duration::from_millis(50);

/// How long a late request waits until its reservation is released: while Redis does not answer,
/// the release is repeated in the background for longer. If the request checks before, it can find
/// its own reservation before it; it is then denied or waits longer, but no extra request is
/// admitted.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

impl Charge {
    /// Returns the units that `answer` spends, reserves or holds, in the background, and then drops
    /// `slot`.
    fn release_answer_in_background(self, answer: StoreFuture<Outcome>, slot: Option<WaitSlot>) {
        let Some(limiter) = self.limiters().next().cloned() else { return };
        limiter.store().spawn_background(Box::pin(async move {
            if let Ok(Outcome { decision, receipts }) = answer.await {
                match decision.remaining_delay() {
                    Duration::ZERO => self.release_in_background(&receipts),
                    delay => self.give_back(Instant::now() + delay, receipts),
                }
            }
            drop(slot);
        }));
    }
}

/// A request that waits for a decision, and then until it may proceed. If it is dropped before
/// that, it returns the units that it has spent, reserved or held.
pub(crate) struct Waiter {
    phase: Phase,
    /// `HOLD`, or `Check` if the request has no permit.
    action: Action,
    charge: Charge,
    pub(super) max_wait: MaxWait,
    /// The longest wait of the last check.
    last_max_wait: MaxWait,
    max_lateness: Duration,
    slot: Option<WaitSlot>,
    /// The end of the wait, once it is known.
    pub(super) deadline: Option<Instant>,
    /// True if the caller waits for the reserved instant by itself, and for nothing else.
    leaves_delay: bool,
    /// A late request checks again only once.
    was_late: bool,
    /// The end of the last block that the request has found.
    blocked_until: Option<Instant>,
    /// True if a denied request stands in a line.
    retries: bool,
    /// Its number, and the instant at which it began: its place in a line.
    began: (u64, Instant),
    /// True if the request waits for a store that fails.
    waits_for_store: bool,
    /// Set by the first denial or failure. Boxed, as most requests have none.
    line: Option<Box<InLine>>,
    /// Set from the first sleep to the last one, if there is an observer.
    wait: Option<Wait>,
}

enum Phase {
    /// The request stands in a line, after this denial or failure of the store, if it was decided.
    Waiting(Option<Result<Decision, Error>>),
    Deciding(StoreFuture<Outcome>),
    /// The wait of a request has ended in a line, after this denial, if it was decided.
    Leaving(StoreFuture<Outcome>, Option<Decision>),
    /// Until its instant, the receipts are in the booking.
    Admitted(Outcome, Option<Box<Booking>>),
    /// The reservation of a late request is being released.
    Releasing(Vec<Task>, Option<Pin<Box<Sleep>>>),
    Done,
}

impl Waiter {
    pub(crate) fn new(
        action: Action,
        charge: Charge,
        answer: StoreFuture<Outcome>,
        max_wait: MaxWait,
    ) -> Self {
        let deadline = charge.retry_deadline(max_wait);
        let number = charge.lines().map_or(0, |lines| lines.next_number());
        Self {
            phase: Phase::Deciding(answer),
            action,
            began: (number, Instant::now()),
            waits_for_store: charge.waits_for_store(),
            charge,
            max_wait,
            last_max_wait: max_wait,
            max_lateness: DEFAULT_MAX_LATENESS,
            slot: None,
            deadline,
            leaves_delay: false,
            was_late: false,
            blocked_until: None,
            retries: deadline.is_some(),
            line: None,
            wait: None,
        }
    }

    /// Begins a request. One that may wait without a reservation stands behind those that wait
    /// already. If it `is_endless`, it does so whether or not it could make a reservation.
    pub(crate) fn begin(
        action: Action,
        charge: Charge,
        max_wait: MaxWait,
        is_endless: bool,
    ) -> Self {
        let mut waiter = Self::new(action, charge, StoreFuture::Ready(None), max_wait);
        waiter.retries |= is_endless;
        let entered = if waiter.retries { waiter.enter() } else { None };
        waiter.start(entered)
    }

    /// Begins a request that may not wait: if others wait before it, it is denied.
    pub(crate) fn begin_without_room(charge: Charge) -> Self {
        let mut waiter = Self::new(Action::HOLD, charge, StoreFuture::Ready(None), MaxWait::NONE);
        waiter.deadline = Some(Instant::now());
        let entered = waiter.enter();
        waiter.start(entered)
    }

    fn start(mut self, entered: Option<bool>) -> Self {
        self.phase = match entered {
            None => Phase::Deciding(self.charge.decide(self.action, self.max_wait)),
            Some(true) => Phase::Waiting(None),
            Some(false) => Phase::Leaving(self.charge.denial(), None),
        };
        self
    }

    /// Stands in a line if others wait there.
    fn enter(&mut self) -> Option<bool> {
        if self.charge.lines()?.is_empty() || !self.charge.can_be_granted(self.action) {
            return None;
        }
        let entered = self.with_line(|line, _, deadline| line.enter(deadline))??;
        if entered {
            self.begin_wait(None);
        }
        Some(entered)
    }

    /// Calls `f` with the place of the request, unless its charge is invalid.
    fn with_line<R>(
        &mut self,
        f: impl FnOnce(&mut InLine, &Charge, Option<Instant>) -> R,
    ) -> Option<R> {
        let charge = &self.charge;
        if self.line.is_none() {
            self.line = Some(Box::new(InLine::new(charge, self.began)?));
        }
        Some(f(self.line.as_mut()?, charge, self.deadline))
    }

    pub(crate) fn max_lateness(mut self, max_lateness: Duration) -> Self {
        self.max_lateness = max_lateness;
        self
    }

    /// Lets the caller wait for the reserved instant.
    pub(super) fn leave_delay(mut self) -> Self {
        self.leaves_delay = true;
        self
    }

    /// Sets whether the request waits for a store that fails, whatever the policy of its limiters.
    pub(crate) fn wait_for_store(mut self, waits: bool) -> Self {
        self.waits_for_store = waits;
        self
    }

    pub(crate) fn wait_slot(mut self, slot: Option<WaitSlot>) -> Self {
        self.slot = slot;
        self
    }

    /// Waits for the decision, and until an admitted request may proceed.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        loop {
            match &mut self.phase {
                Phase::Waiting(_) => {
                    if let Some(error) = ready!(self.poll_line(cx)) {
                        return Poll::Ready(Err(error));
                    }
                }
                Phase::Leaving(answer, last) => {
                    let (answer, last) = (ready!(Pin::new(answer).poll(cx)), last.take());
                    return Poll::Ready(self.left(answer, last));
                }
                Phase::Deciding(answer) => {
                    let answer = ready!(Pin::new(answer).poll(cx));
                    self.phase = Phase::Done;
                    let last = match answer {
                        Ok(outcome) => self.advance(outcome),
                        Err(error) => self.failed(error),
                    };
                    if let Some(last) = last {
                        return Poll::Ready(last);
                    }
                }
                Phase::Admitted(outcome, booking) => {
                    let Some(booked) = booking else {
                        // Others may wait now. The phase stays: until `disarm`, a drop releases.
                        (self.slot, self.wait) = (None, None);
                        return Poll::Ready(Ok(outcome.decision.clone()));
                    };
                    let (due, receipts) = ready!(booked.poll(cx));
                    outcome.decision.move_delay(booked.reserved(), due);
                    (outcome.receipts, *booking) = (receipts, None);
                    let lateness = Instant::now().saturating_duration_since(due);
                    if self.checks_again(lateness) {
                        self.begin_release();
                    }
                }
                Phase::Releasing(released, limit) => {
                    released.retain_mut(|released| released.as_mut().poll(cx).is_pending());
                    if let Some(limit) = limit
                        && !released.is_empty()
                    {
                        ready!(limit.as_mut().poll(cx));
                    }
                    // The deadline of the first decision holds: a request that is late does not get
                    // its wait twice.
                    self.check_again();
                }
                Phase::Done => panic!("{POLLED}"),
            }
        }
    }

    /// Waits in a line to check, or to leave at the deadline. Returns the error of a store that has
    /// failed until then.
    fn poll_line(&mut self, cx: &mut Context<'_>) -> Poll<Option<Error>> {
        let polled = self.with_line(|line, _, deadline| line.poll(cx, deadline));
        if ready!(polled.unwrap_or(Poll::Ready(true))) {
            self.check_again();
            return Poll::Ready(None);
        }
        // The last answer of a request that waits behind others can be older than a block.
        let is_blocked = self.is_blocked();
        (self.line, self.wait) = (None, None);
        let last = match mem::replace(&mut self.phase, Phase::Done) {
            Phase::Waiting(Some(Err(error))) if !is_blocked => return Poll::Ready(Some(error)),
            Phase::Waiting(Some(Ok(denied))) => Some(denied),
            _ => None,
        };
        self.phase = Phase::Leaving(self.charge.denial(), last);
        Poll::Ready(None)
    }

    /// Returns the denial of a request that leaves: the last one can be as old as its wait.
    fn left(
        &mut self,
        answer: Result<Outcome, Error>,
        last: Option<Decision>,
    ) -> Result<Decision, Error> {
        self.phase = Phase::Done;
        let is_reported = last.as_ref().is_some_and(|last| self.is_reported(last));
        let denied = match (answer, last) {
            (Ok(outcome), _) => outcome.decision.out_of_line(),
            (Err(_), Some(last)) => last,
            (Err(error), None) => return Err(self.charge.name_failure(error)),
        };
        if !is_reported {
            self.charge.report(&denied);
        }
        Ok(denied)
    }

    /// Checks with the rest of the wait.
    fn check_again(&mut self) {
        self.last_max_wait = self.max_wait.at_most(self.remaining_wait());
        self.phase = Phase::Deciding(self.charge.decide(self.action, self.last_max_wait));
    }

    /// Moves on to the phase after a decision, or returns a final denial.
    fn advance(&mut self, outcome: Outcome) -> Option<Result<Decision, Error>> {
        let decision = outcome.decision.clone();
        if !decision.is_allowed() {
            return self.denied(decision);
        }
        if let Some(line) = self.line.take() {
            line.allowed(&self.charge, &decision);
        }
        // Creating a timer panics without a runtime: the drop then releases the reservation.
        self.phase = Phase::Admitted(outcome, None);
        if decision.delay().is_zero() {
            return None; // there is no reservation
        }
        // From the decision, not from its arrival: the store compared with the same wait.
        let wait = Duration::from_micros(self.charge.resolve(self.max_wait));
        self.deadline.get_or_insert_with(|| after_decision(&decision, wait));
        if self.leaves_delay {
            return None;
        }
        if self.is_too_late(decision.age().saturating_sub(decision.delay())) {
            self.begin_release();
        } else if !decision.remaining_delay().is_zero() {
            self.book(&decision, Instant::now() + decision.remaining_delay());
        }
        None
    }

    /// Waits for the reserved instant of an admitted request.
    fn book(&mut self, decision: &Decision, due: Instant) {
        self.begin_wait(Some(decision));
        if let Phase::Admitted(outcome, booking) = &mut self.phase
            && let Some(bookings) = self.charge.bookings()
        {
            let group = self.charge.booking_group(&bookings);
            let (new, own) = Booking::new(bookings, group, due, outcome.receipts.clone());
            (*booking, outcome.receipts) = (Some(Box::new(new)), Receipts::NONE);
            own.into_iter().for_each(|own| self.charge.release_offer(own));
        }
    }

    fn denied(&mut self, decision: Decision) -> Option<Result<Decision, Error>> {
        let wait = self.charge.resolve(self.max_wait);
        if decision.waits_for_holds() && !self.retries && !self.leaves_delay && wait > 0 {
            // There is no instant to reserve before a hold ends.
            let wait = Duration::from_micros(wait);
            self.deadline.get_or_insert_with(|| after_decision(&decision, wait));
            self.retries = true;
        }
        let stands =
            |line: &mut InLine, charge: &_, deadline| line.denied(charge, &decision, deadline);
        let waits = self.retries && self.with_line(stands).unwrap_or(false);
        self.wait_after(Ok(decision), waits)
    }

    /// Moves on after a failure, or returns it if the request does not wait for its store.
    fn failed(&mut self, error: Error) -> Option<Result<Decision, Error>> {
        let error = self.charge.name_failure(error);
        let (true, Error::Store(failure)) = (self.waits_for_store, &error) else {
            return Some(Err(error));
        };
        let wait = match self.max_wait {
            MaxWait::UpTo(wait) => wait,
            MaxWait::Default { .. } => self.charge.resolve(self.max_wait),
        };
        if wait < ENDLESS {
            let deadline = || after(self.began.1, Duration::from_micros(wait));
            self.deadline.get_or_insert_with(deadline);
        }
        // A store in memory that is full has not failed, and Redis that decides otherwise than this
        // process would take units for each further check.
        let waits = !matches!(failure.kind(), ErrorKind::Full | ErrorKind::Different)
            && self.with_line(|line, _, deadline| line.store_failed(deadline)).unwrap_or(false);
        if waits {
            log::hidden(failure);
        }
        self.wait_after(Err(error), waits)
    }

    /// Waits in a line after an answer, or returns it as the last one.
    fn wait_after(
        &mut self,
        answer: Result<Decision, Error>,
        waits: bool,
    ) -> Option<Result<Decision, Error>> {
        if !waits {
            (self.line, self.wait) = (None, None);
            // Unless its check has reported it: the request could wait then.
            if let Some(denied) = answer.as_ref().ok().filter(|it| !self.is_reported(it)) {
                self.charge.report(denied);
            }
            return Some(answer);
        }
        self.begin_wait(answer.as_ref().ok());
        self.phase = Phase::Waiting(Some(answer));
        None
    }

    /// Returns whether the last check has reported its denial.
    fn is_reported(&self, denied: &Decision) -> bool {
        let could_wait = self.charge.can_wait_for_holds(self.last_max_wait);
        Reporting::of_waiting(could_wait).includes(denied)
    }

    /// Reports that the request waits, if it has not begun to: for the limiter of the decision;
    /// without one, for the first that holds units, or else the first.
    fn begin_wait(&mut self, decision: Option<&Decision>) {
        let (wait, charge) = (&mut self.wait, &self.charge);
        if wait.is_some() {
            return;
        }
        let mut own = charge.held_parts().chain(charge.own_parts());
        let first = || own.next().map(|(limiter, ..)| limiter.current().settings.name);
        let Some(name) = decision.map(Decision::limiter).or_else(first) else { return };
        let waiting = charge.limiters().find(|limiter| limiter.name() == name);
        *wait = waiting.and_then(|limiter| Wait::begin(limiter.observers(), name));
    }

    /// Returns whether the request, whose time has come, has to check again.
    fn checks_again(&mut self, lateness: Duration) -> bool {
        self.is_too_late(lateness) || self.is_blocked()
    }

    /// Returns true once, if the request is late.
    fn is_too_late(&mut self, lateness: Duration) -> bool {
        let is_late = lateness > self.max_lateness && !self.was_late;
        self.was_late |= is_late;
        is_late
    }

    /// Returns true once for each known block of a key that has begun while the request waited.
    fn is_blocked(&mut self) -> bool {
        let own = self.charge.own_parts().filter_map(|(limiter, key, _)| {
            limiter.store().as_dyn().blocked_until(&limiter.current().settings, key)
        });
        let ends = own.max();
        let is_new = ends.is_some_and(|ends| ends > Instant::now()) && ends != self.blocked_until;
        self.blocked_until = ends;
        is_new
    }

    /// Releases the reservation, and pauses until that is done: otherwise the next check would find
    /// the reservation of the same request before it. After a stop many requests are late, some of
    /// which may have been dropped, and the store releases all of their reservations together.
    fn begin_release(&mut self) {
        let Phase::Admitted(outcome, _) = mem::replace(&mut self.phase, Phase::Done) else {
            panic!("only an admitted request has a reservation");
        };
        let released = self.charge.begin_release(&outcome.receipts, None);
        let limit = (!released.is_empty()).then(|| Box::pin(sleep(RELEASE_TIMEOUT)));
        self.phase = Phase::Releasing(released, limit);
    }

    /// Returns the rest of the wait.
    pub(crate) fn remaining_wait(&self) -> Duration {
        let rest = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
        rest.unwrap_or(Duration::MAX)
    }

    /// Returns a request that has a reservation, and waits until it is `due`.
    pub(super) fn until(
        charge: Charge,
        outcome: Outcome,
        due: Instant,
        max_wait: MaxWait,
        deadline: Option<Instant>,
    ) -> Self {
        let decision = outcome.decision.clone();
        let mut waiter = Self::new(Action::Check, charge, StoreFuture::Ready(None), max_wait);
        (waiter.phase, waiter.deadline) = (Phase::Admitted(outcome, None), deadline);
        if !decision.delay().is_zero() {
            waiter.book(&decision, due);
        }
        waiter
    }

    /// Waits until the request may proceed or is denied, and applies the failure policy of the
    /// limiters if their store fails. Returns what the request has taken, and of which charge.
    pub(super) async fn finish(self) -> Result<(Charge, Outcome), Error> {
        let (decision, mut waiter) = self.decided().await?;
        Ok(waiter.outcome(decision))
    }

    /// Waits like [`finish`](Self::finish). Returns the request that was decided about: with the
    /// failure policy, it can be another one, which has the rest of the wait.
    pub(super) async fn decided(mut self) -> Result<(Decision, Self), Error> {
        let error = match poll_fn(|cx| self.poll(cx)).await {
            Ok(decision) => return Ok((decision, self)),
            Err(error) => error,
        };
        let rest = self.max_wait.at_most(self.remaining_wait());
        let is_endless = self.retries && matches!(self.max_wait, MaxWait::UpTo(ENDLESS));
        let mut waiter = match self.disarm().0.recover_by_limiter(error)? {
            Recovery::Uncounted(decision) => return Ok((decision.ok_or(Error::NoLimits)?, self)),
            Recovery::Fallback(charge) => Self::begin(self.action, charge, rest, is_endless),
        };
        waiter.leaves_delay = self.leaves_delay;
        let decision = poll_fn(|cx| waiter.poll(cx)).await?;
        Ok((decision, waiter))
    }

    /// Returns the charge of a request with this decision, and what it has taken.
    pub(super) fn outcome(&mut self, decision: Decision) -> (Charge, Outcome) {
        let (charge, receipts) = self.disarm();
        (charge, Outcome { decision, receipts })
    }

    /// Ends the wait, so that the drop releases nothing. Returns the charge of the request, and the
    /// receipts of what it has taken.
    pub(crate) fn disarm(&mut self) -> (Charge, Receipts) {
        let receipts = match mem::replace(&mut self.phase, Phase::Done) {
            Phase::Admitted(outcome, _) => outcome.receipts,
            _ => Receipts::NONE,
        };
        (self.slot, self.wait, self.line) = (None, None, None);
        (mem::replace(&mut self.charge, Charge::exempt()), receipts)
    }
}

/// Returns the instant that is `time` after the store decided.
pub(super) fn after_decision(decision: &Decision, time: Duration) -> Instant {
    let now = Instant::now();
    // Waits are below 100 years, which an instant holds.
    (now + time).checked_sub(decision.age()).unwrap_or(now)
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let charge = mem::replace(&mut self.charge, Charge::exempt());
        // Law 12: a drop releases once. `Releasing` has begun it already, and a denial spent
        // nothing.
        match mem::replace(&mut self.phase, Phase::Done) {
            Phase::Deciding(answer) => {
                charge.release_answer_in_background(answer, self.slot.take());
            }
            Phase::Admitted(outcome, None) => charge.release_in_background(&outcome.receipts),
            Phase::Admitted(_, Some(booking)) => {
                booking.leave().into_iter().for_each(|offer| charge.release_offer(offer));
            }
            Phase::Waiting(_) | Phase::Leaving(..) | Phase::Releasing(..) | Phase::Done => {}
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").finish_non_exhaustive()
    }
}
