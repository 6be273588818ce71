//! The reserved instants of the requests of a process that wait for them. If a request gives up,
//! those behind it go one instant earlier each, and the last instant is given back to the store. So
//! no instant passes unused while a request waits for a later one.
//!
//! Requests of the same limits, keys and costs share their instants. Only the first request follows
//! the first instant; each other one has a timer for its own. So a request that is not polled
//! delays no other beyond its own instant.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, Hash, RandomState},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

use crate::{
    decision::Receipts,
    sync::{lock, wake_all},
};

/// An instant that has passed for longer is of no use to another request.
const LATENESS: Duration = Duration::from_millis(10);

/// The reserved instants of the requests over one store.
#[derive(Debug, Default)]
pub struct Bookings {
    hasher: RandomState,
    state: Mutex<BookingGroups>,
}

#[derive(Debug, Default)]
struct BookingGroups {
    /// By the hash of limits, keys and costs. Two with equal hashes are unlikely.
    groups: HashMap<u64, Group>,
    next_number: u64,
}

/// As many instants as requests.
#[derive(Debug, Default)]
struct Group {
    instants: BTreeMap<(Instant, u64), Receipts>,
    waiting: BTreeMap<u64, Option<Waker>>,
}

/// A request that waits for an instant.
#[derive(Debug)]
pub(crate) struct Booking {
    bookings: Arc<Bookings>,
    group: u64,
    number: u64,
    /// The instant that was reserved for the request itself.
    reserved: Instant,
    /// The last instant of the group then.
    due: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Group {
    /// Takes the latest instant that has come, so that a late request takes none of another one.
    fn take(&mut self, now: Instant) -> Option<(Instant, Receipts)> {
        let (key, _) = self.instants.range(..=(now, u64::MAX)).next_back()?;
        let key = *key;
        self.instants.remove(&key).map(|receipts| (key.0, receipts))
    }

    /// Returns the waker of the first request, whose instant has changed.
    fn first_waker(&mut self) -> Option<Waker> {
        self.waiting.first_entry().and_then(|mut first| first.get_mut().take())
    }

    /// Removes a request, with its waker. Returns the waker of the new first one.
    fn remove(&mut self, number: u64, own: &mut Option<Waker>) -> Option<Waker> {
        let is_first = self.waiting.first_key_value().is_some_and(|(first, _)| *first == number);
        *own = self.waiting.remove(&number).flatten();
        if is_first { self.first_waker() } else { None }
    }
}

impl Booking {
    pub(crate) fn new(
        bookings: Arc<Bookings>,
        group: u64,
        reserved: Instant,
        receipts: Receipts,
    ) -> Self {
        let timer = Box::pin(sleep_until(reserved)); // panics without a runtime
        let (number, due, waker) = {
            let state = &mut *lock(&bookings.state);
            state.next_number += 1;
            let of_group = state.groups.entry(group).or_default();
            of_group.instants.insert((reserved, state.next_number), receipts);
            of_group.waiting.insert(state.next_number, None);
            // After a reset, for example, it can be before the first one.
            let is_first = of_group.instants.first_key_value().is_some_and(|it| it.0.0 == reserved);
            let waker = if is_first { of_group.first_waker() } else { None };
            let last = of_group.instants.last_key_value().map_or(reserved, |it| it.0.0);
            (state.next_number, last, waker)
        };
        wake_all(waker);
        Self { bookings, group, number, reserved, due, timer }
    }

    /// Returns the instant that was reserved for the request itself.
    pub(crate) fn reserved(&self) -> Instant {
        self.reserved
    }

    /// Changes the group, without groups that are empty. Wakers are called without the lock, and
    /// cloned and dropped, too: each can run foreign code.
    fn change<R>(&self, change: impl FnOnce(&mut Group) -> (R, Option<Waker>)) -> Option<R> {
        let (result, waker) = {
            let groups = &mut lock(&self.bookings.state).groups;
            let group = groups.get_mut(&self.group)?;
            let changed = change(group);
            if group.waiting.is_empty() {
                groups.remove(&self.group);
            }
            changed
        };
        wake_all(waker);
        Some(result)
    }

    /// Waits for an instant. Returns it, and what was reserved there.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(Instant, Receipts)> {
        loop {
            let (number, due, now) = (self.number, self.due, Instant::now());
            let mut own = Some(cx.waker().clone());
            let polled = self.change(|group| {
                let first = group.instants.first_key_value().map_or(due, |((first, _), _)| *first);
                let is_first = group.waiting.first_key_value().is_some_and(|it| *it.0 == number);
                let at = if is_first { first } else { first.max(due) };
                match (at <= now).then(|| group.take(now)).flatten() {
                    Some(taken) => (Ok(taken), group.remove(number, &mut own)),
                    None => {
                        own = group.waiting.insert(number, own.take()).flatten();
                        (Err(at), None)
                    }
                }
            });
            match polled {
                Some(Ok(taken)) => return Poll::Ready(taken),
                Some(Err(at)) if at != self.timer.deadline() => self.timer.as_mut().reset(at),
                _ => {}
            }
            ready!(self.timer.as_mut().poll(cx));
        }
    }

    /// Gives up. Returns what is to be given back to the store.
    pub(crate) fn leave(self) -> Receipts {
        let (number, now, mut own) = (self.number, Instant::now(), None);
        let left = self.change(|group| {
            let waker = group.remove(number, &mut own);
            let passed = if self.due + LATENESS < now { group.take(now) } else { None };
            let last = || Some(group.instants.pop_last()?.1);
            (passed.map(|(_, receipts)| receipts).or_else(last), waker)
        });
        left.flatten().unwrap_or(Receipts::NONE)
    }
}

impl Bookings {
    /// Returns the group of requests with equal limits, keys and costs.
    pub(crate) fn group_of(&self, limits: impl Hash) -> u64 {
        self.hasher.hash_one(limits)
    }

    /// Gives an instant to the requests that wait for later ones. Returns what is to be given back
    /// to the store instead.
    pub(crate) fn give_back(&self, group: u64, due: Instant, receipts: Receipts) -> Receipts {
        let (last, waker) = {
            let state = &mut *lock(&self.state);
            let later = state.groups.get_mut(&group).filter(|_| due >= Instant::now());
            let Some(later) = later else { return receipts };
            state.next_number += 1;
            later.instants.insert((due, state.next_number), receipts);
            (later.instants.pop_last().map(|(_, last)| last), later.first_waker())
        };
        wake_all(waker);
        last.unwrap_or(Receipts::NONE)
    }
}
