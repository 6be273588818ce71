//! The reserved instants of the requests of a process that wait for them. If a request gives up,
//! those behind it go one instant earlier each, and the last instant is given back to the store. So
//! no instant passes unused while a request waits for a later one. Until the store releases it, the
//! next request of the process can take it, and gives back its own, later one: an instant that the
//! store keeps is for the next request alone.
//!
//! Requests of the same limits, keys and costs share their instants. Only the first request follows
//! the first instant; each other one has a timer for its own. So a request that is not polled
//! delays no other beyond its own instant.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, Hash, RandomState},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
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
/// The most offers of a group whose reservations the store may keep. With more offers, it releases
/// the reservation of each that ends, because each but the last one would be kept.
const MAX_KEPT: usize = 4;

/// The reserved instants of the requests over one store.
#[derive(Debug, Default)]
pub struct Bookings {
    hasher: RandomState,
    numbers: AtomicU64,
    /// By the hash of limits, quotas, keys and costs. Clients choose keys, so the hash is one that
    /// resists collisions.
    groups: Mutex<HashMap<u64, Group>>,
}

#[derive(Debug, Default)]
struct Group {
    /// As many instants as requests.
    instants: BTreeMap<(Instant, u64), Receipts>,
    waiting: BTreeMap<u64, Option<Waker>>,
    /// The instants of the offers that have not ended.
    offered: BTreeMap<(Instant, u64), Receipts>,
}

/// An instant with a number, and what has been reserved there.
type Reserved = ((Instant, u64), Receipts);

/// The requests with equal limits, quotas, keys and costs, which can share their instants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BookingGroup {
    hash: u64,
    /// False if several limits release a reservation, each by itself.
    is_of_one_limit: bool,
}

/// An instant that is given back. Until the offer ends, the next request of the group can take it,
/// and gives back its own, later one.
#[derive(Debug)]
pub struct Offer {
    bookings: Arc<Bookings>,
    group: BookingGroup,
    key: (Instant, u64),
    receipts: Receipts,
    /// Whether a request gives it back that has taken another one.
    is_exchanged: bool,
    /// Whether it has ended, and no request has taken the instant.
    has_ended: AtomicBool,
    /// Whether it has ended among many others.
    is_of_many: AtomicBool,
}

impl Offer {
    /// Returns what has been reserved.
    pub(crate) fn receipts(&self) -> &Receipts {
        &self.receipts
    }

    /// Returns whether a request gives the instant back that has taken another one. The request
    /// that has given up has been reported then.
    pub(crate) fn is_exchanged(&self) -> bool {
        self.is_exchanged
    }

    /// Ends the offer. Returns false if another request has taken the instant.
    pub(crate) fn end(&self) -> bool {
        let left = self.bookings.change(self.group, |group| {
            let is_of_many = group.offered.len() > MAX_KEPT;
            (group.offered.remove(&self.key).map(|_| is_of_many), None)
        });
        if let Some(is_of_many) = left.flatten() {
            self.is_of_many.store(is_of_many, Relaxed);
            self.has_ended.store(true, Relaxed);
        }
        self.has_ended.load(Relaxed)
    }

    /// Returns whether the store keeps the reservation as long as its release frees no units for
    /// other requests, because reservations stand behind it.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn is_for_others(&self) -> bool {
        let is_of_use = self.key.0 > Instant::now();
        is_of_use && self.group.is_of_one_limit && !self.is_of_many.load(Relaxed)
    }

    /// Offers an instant that the store has kept once more. Returns false if it has passed.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn begin_again(&self) -> bool {
        let is_of_use = self.key.0 > Instant::now() && self.has_ended.swap(false, Relaxed);
        if is_of_use {
            self.bookings.insert_offered(self.group, self.key, &self.receipts);
        }
        is_of_use
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.end();
    }
}

/// A request that waits for an instant.
#[derive(Debug)]
pub(crate) struct Booking {
    bookings: Arc<Bookings>,
    group: BookingGroup,
    number: u64,
    /// The instant that was reserved for the request itself.
    reserved: Instant,
    /// The last instant of the group then.
    due: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Group {
    /// Takes the first instant on offer, if it is earlier than this one.
    fn take_offered(&mut self, reserved: Instant) -> Option<Reserved> {
        if self.offered.is_empty() {
            return None;
        }
        let now = Instant::now();
        let (key, _) = self.offered.range((now, 0)..(reserved.max(now), 0)).next()?;
        let key = *key;
        self.offered.remove_entry(&key)
    }

    /// Takes the latest instant that has come, so that a late request takes none of another one.
    fn take(&mut self, now: Instant) -> Option<Reserved> {
        let (key, _) = self.instants.range(..=(now, u64::MAX)).next_back()?;
        let key = *key;
        self.instants.remove_entry(&key)
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
    /// Returns the request, and an offer if it has taken an earlier instant than its own.
    pub(crate) fn new(
        bookings: Arc<Bookings>,
        group: BookingGroup,
        reserved: Instant,
        receipts: Receipts,
    ) -> (Self, Option<Offer>) {
        let timer = Box::pin(sleep_until(reserved)); // panics without a runtime
        let ((key, receipts), own) = bookings.exchange(group, reserved, receipts);
        let number = bookings.next_number();
        let (due, waker) = {
            let mut groups = lock(&bookings.groups);
            let of_group = groups.entry(group.hash).or_default();
            of_group.instants.insert(key, receipts);
            of_group.waiting.insert(number, None);
            // After a reset, for example, it can be before the first one.
            let is_first = of_group.instants.first_key_value().is_some_and(|it| *it.0 == key);
            let waker = if is_first { of_group.first_waker() } else { None };
            let last = of_group.instants.last_key_value().map_or(key.0, |it| it.0.0);
            (last, waker)
        };
        wake_all(waker);
        (Self { bookings, group, number, reserved, due, timer }, own)
    }

    /// Returns the instant that was reserved for the request itself.
    pub(crate) fn reserved(&self) -> Instant {
        self.reserved
    }

    /// Waits for an instant. Returns it, and what was reserved there.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(Instant, Receipts)> {
        loop {
            let (number, due, now) = (self.number, self.due, Instant::now());
            let mut own = Some(cx.waker().clone());
            let polled = self.bookings.change(self.group, |group| {
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
                Some(Ok(((instant, _), receipts))) => return Poll::Ready((instant, receipts)),
                Some(Err(at)) if at != self.timer.deadline() => self.timer.as_mut().reset(at),
                _ => {}
            }
            ready!(self.timer.as_mut().poll(cx));
        }
    }

    /// Gives up. Offers what is to be given back to the store.
    pub(crate) fn leave(self) -> Option<Offer> {
        let (number, now, mut own) = (self.number, Instant::now(), None);
        let left = self.bookings.change(self.group, |group| {
            let waker = group.remove(number, &mut own);
            let passed = if self.due + LATENESS < now { group.take(now) } else { None };
            (passed.or_else(|| group.instants.pop_last()), waker)
        });
        Some(self.bookings.offer(self.group, left??, false))
    }
}

impl Bookings {
    /// Returns the group of requests with these limits, quotas, keys and costs.
    pub(crate) fn group_of(&self, limits: &[impl Hash]) -> BookingGroup {
        BookingGroup { hash: self.hasher.hash_one(limits), is_of_one_limit: limits.len() == 1 }
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Relaxed)
    }

    fn insert_offered(&self, group: BookingGroup, key: (Instant, u64), receipts: &Receipts) {
        let mut groups = lock(&self.groups);
        groups.entry(group.hash).or_default().offered.insert(key, receipts.clone());
    }

    /// Changes a group, without groups that are empty. Wakers are called without the lock, and
    /// cloned and dropped, too: each can run foreign code.
    fn change<R>(
        &self,
        BookingGroup { hash, .. }: BookingGroup,
        change: impl FnOnce(&mut Group) -> (R, Option<Waker>),
    ) -> Option<R> {
        let (result, waker) = {
            let mut groups = lock(&self.groups);
            let of_group = groups.get_mut(&hash)?;
            let changed = change(of_group);
            if of_group.waiting.is_empty() && of_group.offered.is_empty() {
                groups.remove(&hash);
            }
            changed
        };
        wake_all(waker);
        Some(result)
    }

    /// Returns the first instant on offer, if it is earlier than the reserved one, which is then on
    /// offer; else the reserved one.
    pub(crate) fn exchange(
        self: &Arc<Self>,
        group: BookingGroup,
        reserved: Instant,
        receipts: Receipts,
    ) -> (Reserved, Option<Offer>) {
        let own = ((reserved, self.next_number()), receipts);
        let taken = {
            let mut groups = lock(&self.groups);
            groups.get_mut(&group.hash).and_then(|it| it.take_offered(reserved))
        };
        match taken {
            Some(taken) => (taken, Some(self.offer(group, own, true))),
            None => (own, None),
        }
    }

    /// Gives an instant to the requests that wait for later ones. Offers what is to be given back
    /// to the store instead.
    pub(crate) fn give_back(
        self: &Arc<Self>,
        group: BookingGroup,
        due: Instant,
        receipts: Receipts,
    ) -> Offer {
        let own = ((due, self.next_number()), receipts);
        let (last, waker) = {
            let mut groups = lock(&self.groups);
            let waiting = groups.get_mut(&group.hash).filter(|it| !it.instants.is_empty());
            match waiting.filter(|_| due >= Instant::now()) {
                Some(waiting) => {
                    waiting.instants.insert(own.0, own.1.clone());
                    (waiting.instants.pop_last().unwrap_or(own), waiting.first_waker())
                }
                None => (own, None),
            }
        };
        wake_all(waker);
        self.offer(group, last, false)
    }

    /// Offers an instant, unless it has passed. Its number is new: an earlier offer of it can still
    /// be under way.
    fn offer(
        self: &Arc<Self>,
        group: BookingGroup,
        ((due, _), receipts): Reserved,
        is_exchanged: bool,
    ) -> Offer {
        let (key, has_passed) = ((due, self.next_number()), due < Instant::now());
        if !has_passed {
            self.insert_offered(group, key, &receipts);
        }
        let (bookings, has_ended) = (self.clone(), AtomicBool::new(has_passed));
        let is_of_many = AtomicBool::default();
        Offer { bookings, group, key, receipts, is_exchanged, has_ended, is_of_many }
    }
}

#[cfg(test)]
mod tests;
