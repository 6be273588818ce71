//! `InLine`: a request that may stand in a line, because no instant can be reserved for it: it
//! needs units that are held, or its limits are on several keys, or its leaky bucket is full. The
//! lines are in `store/lines.rs`; waiting for a reserved instant is in `waiter.rs`.
//!
//! In a process, requests are served in the order of their first polls, and each checks about
//! twice, however many wait. Between processes, no order is kept.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

use super::{charge::Charge, handle::Limiter, version::MaxWait};
use crate::{
    algorithm::Action,
    decision::{Decision, Outcome},
    store::{
        BookingGroup, Bookings, DueCheck, LineLimit, LinePlace, LineStep, Lines, NextCheck, Pace,
        Refusal, StoreFuture, after, yield_time,
    },
    time::random_fraction,
};

/// The pauses between two calls of a store that fails. The first pause is that between the probes
/// of a circuit breaker: asking more often finds out nothing.
const STORE_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// A request that may stand in a line.
#[derive(Debug)]
pub(crate) struct InLine {
    place: LinePlace,
    began: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    /// True if other processes share the units.
    is_shared: bool,
}

impl Charge {
    /// Returns the lines of the process in which its requests stand.
    pub(crate) fn lines(&self) -> Option<Arc<Lines>> {
        Some(self.limiters().next()?.store().names().lines().clone())
    }

    /// Returns the reserved instants of the process.
    pub(crate) fn bookings(&self) -> Option<Arc<Bookings>> {
        Some(self.own_parts().next()?.0.store().names().bookings().clone())
    }

    /// Returns whether the request would look for others that wait.
    pub(crate) fn would_queue(&self, max_wait: MaxWait) -> bool {
        self.retry_deadline(max_wait).is_some() && self.lines().is_some_and(|it| !it.is_empty())
    }

    /// Asks for the denial of a request that leaves undecided.
    pub(crate) fn denial(&self) -> StoreFuture<Outcome> {
        match self.foreign() {
            Some((limiter, key, cost)) => limiter.denial(key, cost),
            None => self.decide(Action::Peek, MaxWait::NONE),
        }
    }

    /// Returns the group of the requests that can share instants with this one.
    pub(crate) fn booking_group(&self, bookings: &Bookings) -> BookingGroup {
        let parts = self.own_parts().map(|(limiter, key, cost)| {
            (limiter.name(), limiter.quota(), limiter.params().kind(), key, cost)
        });
        bookings.group_of(&parts.collect::<Vec<_>>())
    }

    /// Returns the limits as lines need them; `None` if the charge is invalid.
    fn line_limits(&self, lines: &Lines) -> Option<Vec<LineLimit>> {
        if let Some((limiter, key, cost)) = self.foreign() {
            let (line, limiter) = (limiter.line(key), lines.hash(limiter.name()));
            let (group, is_spent, max_units, pace) = (line, true, MAX, None);
            let limit = LineLimit { line, limiter, cost, is_spent, group, max_units, pace };
            return Some(vec![limit]);
        }
        let group =
            lines.hash(self.own_parts().map(|(it, key, _)| (it.name(), key)).collect::<Vec<_>>());
        let limits = self.own_parts().map(|(limiter, key, cost)| {
            let line = lines.line_of(limiter.name(), key);
            let others = self.own_parts().filter(|(other, ..)| other.name() != limiter.name());
            let requests = others.map(|(other, _, cost)| other.max_cost() / cost.max(1)).min();
            let max_units = requests.map_or(MAX, |requests| requests.saturating_mul(cost));
            let (pace, is_spent) = (Some(pace(limiter)), !self.holds_units());
            let limiter = lines.hash(limiter.name());
            LineLimit { line, limiter, cost, is_spent, group, max_units, pace }
        });
        let limits: Vec<LineLimit> = limits.collect();
        let is_new = |(index, limit): (usize, &LineLimit)| {
            limits[..index].iter().all(|other| other.line != limit.line)
        };
        (!limits.is_empty() && limits.iter().enumerate().all(is_new)).then_some(limits)
    }
}

const MAX: u64 = u64::MAX;

fn pace(limiter: &Limiter) -> Pace {
    Pace { quota: limiter.quota(), is_smooth: limiter.params().restores_evenly() }
}

impl InLine {
    /// Returns a request with its number, and the instant at which it began.
    pub(crate) fn new(charge: &Charge, (number, began): (u64, Instant)) -> Option<Self> {
        let lines = charge.lines()?;
        let limits = charge.line_limits(&lines)?;
        let place = LinePlace::new(lines, number, limits);
        Some(Self { place, began, timer: None, is_shared: !charge.is_immediate() })
    }

    /// Stands in the line of a limit for which others wait. Returns `None` if there is none, and
    /// false if the request could not be served by its deadline.
    pub(crate) fn enter(&mut self, deadline: Option<Instant>) -> Option<bool> {
        self.place.enter(deadline)
    }

    /// Returns the index of the limit that the decision is about.
    fn limit_of(&self, decision: &Decision) -> usize {
        decision.limit_index().min(self.place.limits.len() - 1)
    }

    /// Returns when the request, or one that began to wait soon after it, checks after a decision:
    /// for `units` that are restored at the `known` instant, and for units that are held, if some
    /// can return before: more often, the longer it has `waited`.
    fn due(
        &self,
        charge: &Charge,
        decision: &Decision,
        (known, units): (Option<Instant>, u64),
        deadline: Option<Instant>,
        waited: Option<Duration>,
    ) -> DueCheck {
        let line = self.place.limits[self.limit_of(decision)].line;
        // Redisson leaves no units to others, so a foreign limiter leaves none to it.
        let yields =
            self.is_shared && !decision.is_blocked() && charge.own_parts().next().is_some();
        // Older requests of other processes go first.
        let later = |at| {
            let gap = Pace { quota: decision.quota(), is_smooth: true }.time_of(decision.cost());
            after(at, yield_time(at - self.began, gap))
        };
        let restored = known.map(|at| {
            let later = if yields { later(at) } else { at };
            // A check at the deadline itself would be too late on a busy machine.
            let latest = deadline.map(|end| at + end.saturating_duration_since(at) / 2);
            latest.map_or(later, |latest| later.min(latest))
        });
        let ask = waited
            .filter(|_| self.is_shared)
            .map(|waited| after(Instant::now(), self.place.lines.hold_retry(waited, line)));
        // Not while it leaves restored units to others.
        let is_first = |_: &Instant| ask.is_none_or(|ask| known.is_some_and(|at| at < ask));
        let known = known.filter(|_| waited.is_none()).map(|at| (at, units));
        DueCheck { at: restored.filter(is_first).or(ask), known }
    }

    /// Records a denial. Returns whether the request waits: if it can be served by `deadline`.
    pub(crate) fn denied(
        &mut self,
        charge: &Charge,
        denied: &Decision,
        deadline: Option<Instant>,
    ) -> bool {
        let now = Instant::now();
        let limit = self.limit_of(denied);
        // A block ends at its instant, whatever is returned.
        let waits_for_holds = denied.waits_for_holds() || denied.held() > 0 && !denied.is_blocked();
        // Also beyond the deadline: the next request may wait for longer.
        let known = denied.retry_after().map(|time| after(now, time));
        let is_over = |at| deadline.is_some_and(|deadline| deadline < at);
        if known.is_none_or(is_over) && (!waits_for_holds || is_over(now)) {
            self.place.leave(NextCheck::Now); // now, and not at its deadline
            return false;
        }
        let own = charge.own_parts().nth(limit);
        let pace = match own {
            Some((limiter, ..)) => pace(limiter),
            None => Pace { quota: denied.quota(), is_smooth: false },
        };
        // At the end of a block, any number of units can be available.
        let units = if denied.is_blocked() { MAX } else { self.place.limits[limit].cost };
        let waited = waits_for_holds.then(|| now - self.began);
        let due = self.due(charge, denied, (known, units), deadline, waited);
        self.place.denied(Refusal { limit, due, pace: Some(pace) }, deadline)
    }

    /// Records that the store has failed. Returns whether the request asks again by `deadline`: of
    /// the requests in a line, only the first one does, after a pause that grows with the wait.
    pub(crate) fn store_failed(&mut self, deadline: Option<Instant>) -> bool {
        let now = Instant::now();
        let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
        if left.is_zero() {
            return false;
        }
        let [shortest, longest] = STORE_PAUSES;
        // At random, so that the requests of all keys and processes do not ask at one instant.
        let spread = 0.5 + random_fraction() / 2.0;
        let pause = (now - self.began).clamp(shortest, longest).mul_f64(spread).min(left);
        self.place.pause(after(now, pause))
    }

    /// Records that the request was allowed: requests behind it check when units are available.
    pub(crate) fn allowed(mut self, charge: &Charge, decision: &Decision) {
        let Some(at) = self.place.at else { return };
        let own = charge.own_parts().nth(at);
        let shapes = own.is_some_and(|(limiter, ..)| limiter.params().shapes());
        let next = match decision.remaining() {
            // A shaper can deny even with units available, as no instant is reserved.
            _ if shapes || charge.reserves() => NextCheck::Now,
            0 if self.limit_of(decision) != at => NextCheck::Now,
            0 => {
                let (replenish, age) = (decision.replenish_after(), decision.age());
                let rest = || after(Instant::now(), replenish.saturating_sub(age));
                let known = (!replenish.is_zero()).then(rest);
                // Another process can return units that are held.
                let is_held = charge.holds_units() || decision.held() > 0;
                let waited = is_held.then_some(Duration::ZERO);
                NextCheck::Due(self.due(charge, decision, (known, 1), None, waited))
            }
            _ if !self.is_shared => NextCheck::Now,
            units => NextCheck::Units(units),
        };
        self.place.leave(next);
    }

    /// Waits until the request is to check. Returns false if the deadline comes first.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, deadline: Option<Instant>) -> Poll<bool> {
        loop {
            let instant = match self.place.poll(cx, deadline) {
                LineStep::Check => return Poll::Ready(true),
                LineStep::Leave => return Poll::Ready(false),
                LineStep::Sleep(None) => return Poll::Pending,
                LineStep::Sleep(Some(instant)) => instant,
            };
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(instant)));
            // Moved, not made anew: a request that checks again allocates nothing.
            if timer.deadline() != instant {
                timer.as_mut().reset(instant);
            }
            ready!(timer.as_mut().poll(cx));
        }
    }
}

#[cfg(test)]
mod sharing;
