//! A key, and what is counted for it: one cache line.

use std::{hash::BuildHasher, ptr, sync::Arc};

use foldhash::fast::RandomState;

use crate::{
    algorithm::{Action, Ask, Compact, Outcome, Spent, State, Verdict},
    store::Settings,
};

/// The longest key that lies in its entry.
const SHORT: usize = 30;

pub(super) fn hash(hasher: &RandomState, settings: &Settings, key: &[u8]) -> u64 {
    hasher.hash_one((settings.name.as_ptr(), key))
}

#[repr(align(64))]
pub(super) struct Entry {
    /// Of the limiter, as it was when the key was counted last.
    settings: Arc<Settings>,
    key: Text,
    counts: Counts,
}

const _: () = assert!(size_of::<Entry>() == 64);

/// A key, next to its counts if it is short enough, as most are.
enum Text {
    Short(u8, [u8; SHORT]),
    Long(Box<[u8]>),
}

/// What is counted, and the second until which a request like one that was denied would be denied again.
enum Counts {
    Compact { denied_until: u32, numbers: Compact },
    Whole { denied_until: u32, state: Box<State> },
}

/// How much a key has used.
pub(super) struct Usage {
    /// The part of the quota that is left.
    pub(super) left: f64,
    /// The time until the key is as if never seen, in microseconds.
    pub(super) reset: f64,
}

impl Entry {
    pub(super) fn new(settings: &Arc<Settings>, key: &str) -> Self {
        let counts = Counts::Compact { denied_until: 0, numbers: Compact::default() };
        Self { settings: settings.clone(), key: Text::new(key), counts }
    }

    /// There is one copy of each name, whose address will do.
    #[inline]
    pub(super) fn is(&self, settings: &Arc<Settings>, key: &[u8]) -> bool {
        self.key.as_bytes() == key
            && (Arc::ptr_eq(&self.settings, settings) || ptr::eq(self.settings.name, settings.name))
    }

    pub(super) fn hash(&self, hasher: &RandomState) -> u64 {
        hash(hasher, &self.settings, self.key.as_bytes())
    }

    pub(super) fn is_never_seen(&self) -> bool {
        matches!(self.counts, Counts::Compact { numbers: [_, 0.0], .. })
    }

    pub(super) fn step(&mut self, settings: &Arc<Settings>, ask: &Ask) -> Verdict {
        if !Arc::ptr_eq(&self.settings, settings) {
            self.adopt(settings);
        }
        self.own_step(ask)
    }

    /// Like [`ask`](Entry::ask), in the most common case of all; None in others.
    #[inline]
    pub(super) fn ask_quickly<'a>(
        &mut self,
        settings: &'a Arc<Settings>,
        ask: &Ask,
    ) -> Option<Spent<'a>> {
        match &mut self.counts {
            Counts::Compact { numbers, .. } if Arc::ptr_eq(&self.settings, settings) => {
                let spent = settings.params.spend_quickly(numbers, ask)?;
                self.note(ask, spent.outcome);
                Some(spent)
            }
            _ => None,
        }
    }

    /// Steps, and remembers a denial.
    pub(super) fn ask(&mut self, settings: &Arc<Settings>, ask: &Ask) -> Verdict {
        let verdict = self.step(settings, ask);
        let Verdict { admitted, wait, .. } = verdict;
        self.note(ask, Outcome { admitted, wait });
        verdict
    }

    #[inline]
    fn note(&mut self, ask: &Ask, Outcome { admitted, wait }: Outcome) {
        if !admitted && ask.action.commits() {
            let until = second(ask.now + wait);
            let denied_until = self.denied_until();
            *denied_until = until.max(*denied_until);
        }
    }

    fn own_step(&mut self, ask: &Ask) -> Verdict {
        let params = &self.settings.params;
        match &mut self.counts {
            Counts::Compact { denied_until, numbers } => {
                let (verdict, whole) = params.step_compact(numbers, ask);
                if let Some(state) = whole {
                    self.counts = Counts::Whole { denied_until: *denied_until, state };
                }
                verdict
            }
            Counts::Whole { denied_until, state } => {
                let verdict = params.step(state, ask);
                if let Some(numbers) = params.compact(state, ask.now) {
                    self.counts = Counts::Compact { denied_until: *denied_until, numbers };
                }
                verdict
            }
        }
    }

    /// Goes on with other settings of the same limiter.
    #[cold]
    fn adopt(&mut self, settings: &Arc<Settings>) {
        if let Counts::Compact { denied_until, numbers } = self.counts
            && self.settings.params != settings.params
        {
            let state = Box::new(self.settings.params.expand(numbers));
            self.counts = Counts::Whole { denied_until, state };
        }
        self.settings = settings.clone();
    }

    pub(super) fn denied_until(&mut self) -> &mut u32 {
        match &mut self.counts {
            Counts::Compact { denied_until, .. } | Counts::Whole { denied_until, .. } => {
                denied_until
            }
        }
    }

    /// Whether a request like one that was seen would be denied, though another might not.
    pub(super) fn is_denied(&mut self, now: f64) -> bool {
        *self.denied_until() >= second(now)
    }

    pub(super) fn usage(&mut self, now: f64) -> Usage {
        let action = Action::Peek;
        let peek = Ask { action, cost: 1.0, max_wait: 0.0, turn: 0.0, now, outcome: None };
        let Verdict { remaining, reset, .. } = self.own_step(&peek);
        Usage { left: remaining / f64::from(self.settings.quota.limit()), reset }
    }
}

/// The second in which an instant lies, from 1 on.
fn second(instant: f64) -> u32 {
    (instant / 1e6) as u32 + 1
}

impl Usage {
    pub(super) fn is_less_than(&self, other: &Self) -> bool {
        self.left > other.left || self.left == other.left && self.reset < other.reset
    }
}

impl Text {
    fn new(text: &str) -> Self {
        if text.len() > SHORT {
            return Self::Long(text.as_bytes().into());
        }
        let mut bytes = [0; SHORT];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Self::Short(text.len() as u8, bytes)
    }

    #[inline]
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short(length, bytes) => &bytes[..usize::from(*length)],
            Self::Long(bytes) => bytes,
        }
    }
}
