//! Requests in the order of their time stamps, in bounded memory. Lines of a log are in the order
//! in which requests ended, and their stamps often have whole seconds.

use std::{collections::VecDeque, hash::BuildHasher, mem};

use foldhash::fast::FixedState;

use super::stamp::Stamp;

/// Lines that are this many seconds out of order are sorted.
pub const WINDOW: i64 = 60;
/// More requests than these are not held back.
const MAX_HELD: usize = 1_000_000;
/// The requests that are handed on at a time.
const BATCH: usize = 8_192;
/// A larger jump ahead needs a second line that confirms it, or one wrong stamp would make all
/// others late.
pub const JUMP: i64 = 86_400;

#[derive(Clone, Copy)]
pub struct Event {
    /// Microseconds since 1970.
    pub micros: i64,
    pub hash: u64,
    start: u32,
    length: u32,
}

/// Requests in order, with their keys.
#[derive(Default)]
pub struct Batch {
    pub events: Vec<Event>,
    keys: String,
}

impl Batch {
    pub fn key(&self, event: &Event) -> &str {
        &self.keys[event.start as usize..][..event.length as usize]
    }

    fn push(&mut self, micros: i64, hash: u64, key: &str) {
        let (start, length) = (self.keys.len() as u32, key.len() as u32);
        self.keys.push_str(key);
        self.events.push(Event { micros, hash, start, length });
    }
}

/// The requests of one second.
#[derive(Default)]
struct Second {
    batch: Batch,
    has_fractions: bool,
}

pub struct Sorter {
    seconds: VecDeque<Second>,
    /// The first of them, in seconds since 1970.
    first: i64,
    newest: i64,
    held: usize,
    spreads: bool,
    /// A request that is far ahead of the others.
    ahead: Option<(Stamp, String)>,
    pub ready: Batch,
    /// The requests that came later than they could be sorted.
    pub late: u64,
    /// The requests with a time stamp that no other line confirms.
    pub stray: u64,
}

impl Sorter {
    pub fn new(spreads: bool) -> Self {
        Self {
            seconds: VecDeque::new(),
            first: 0,
            newest: i64::MIN,
            held: 0,
            spreads,
            ahead: None,
            ready: Batch::default(),
            late: 0,
            stray: 0,
        }
    }

    /// Adds a request. One without a key only takes its place in its second. Returns whether
    /// `ready` has enough requests to be handed on.
    pub fn add(&mut self, stamp: Stamp, key: &str) -> bool {
        let second = stamp.micros.div_euclid(1_000_000);
        if self.newest == i64::MIN {
            (self.first, self.newest) = (second - WINDOW, second);
        }
        if let Some((jump, of)) = self.ahead.take() {
            let target = jump.micros.div_euclid(1_000_000);
            if (second - target).abs() <= JUMP {
                self.insert(jump, &of);
            } else {
                self.stray += 1;
            }
        }
        if second > self.newest + JUMP {
            self.ahead = Some((stamp, key.to_owned()));
        } else {
            self.insert(stamp, key);
        }
        self.ready.events.len() >= BATCH
    }

    fn insert(&mut self, stamp: Stamp, key: &str) {
        let second = stamp.micros.div_euclid(1_000_000);
        if second > self.newest {
            self.newest = second;
            self.release(second - WINDOW);
        }
        let is_late = second < self.first;
        self.late += u64::from(is_late);
        let index = (second - self.first).max(0) as usize;
        if self.seconds.len() <= index {
            self.seconds.resize_with(index + 1, Second::default);
        }
        let micros = if is_late { self.first * 1_000_000 } else { stamp.micros };
        let second = &mut self.seconds[index];
        second.has_fractions |= !stamp.is_whole;
        second.batch.push(micros, FixedState::default().hash_one(key), key);
        self.held += 1;
        while self.held > MAX_HELD && self.seconds.len() > 1 {
            self.release_first();
        }
    }

    /// Releases what is older than a second.
    fn release(&mut self, before: i64) {
        while self.first < before && !self.seconds.is_empty() {
            self.release_first();
        }
        if self.seconds.is_empty() {
            self.first = self.first.max(before);
        }
    }

    fn release_first(&mut self) {
        let Some(mut second) = self.seconds.pop_front() else { return };
        let count = second.batch.events.len();
        if second.has_fractions {
            second.batch.events.sort_by_key(|event| event.micros);
        } else if self.spreads {
            for (index, event) in (0..).zip(&mut second.batch.events) {
                event.micros += index * 1_000_000 / count as i64;
            }
        }
        for event in second.batch.events.iter().filter(|event| event.length > 0) {
            self.ready.push(event.micros, event.hash, second.batch.key(event));
        }
        self.held -= count;
        self.first += 1;
    }

    /// Releases all.
    pub fn finish(&mut self) {
        if self.ahead.take().is_some() {
            self.stray += 1;
        }
        while !self.seconds.is_empty() {
            self.release_first();
        }
    }

    pub fn take(&mut self) -> Batch {
        mem::take(&mut self.ready)
    }
}
