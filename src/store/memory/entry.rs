//! A key, and what is counted for it, in one cache line.

use std::{hash::BuildHasher, mem, ptr, sync::Arc};

use foldhash::fast::RandomState;

use super::WhenFull;
use crate::{
    algorithm::{Action, EngineReply, EngineRequest, FastCheck, INITIAL, Packed, Release, State},
    keys::Text,
    store::Settings,
};

pub(super) fn hash(hasher: &RandomState, settings: &Settings, key: &[u8]) -> u64 {
    hasher.hash_one((settings.name.as_ptr(), key))
}

#[repr(align(64))]
pub(super) struct Entry {
    /// By which the state was counted.
    settings: Arc<Settings>,
    key: Text,
    counts: Counts,
}

const _: () = assert!(size_of::<Entry>() == 64);

/// What is counted, and the second until which a request like one that was seen would be denied.
enum Counts {
    Packed { denied_until: u32, packed: Packed },
    Whole { denied_until: u32, whole: Box<Whole> },
}

/// A state that two packed do not tell, and what a sweep requests of it, which would take long to find out.
struct Whole {
    state: State,
    /// The part of the quota that was left.
    left: f64,
    /// The instant at which the key is as if never seen.
    reset: f64,
    /// The instant of the last request whose reservation the state has forgotten, as the quota was
    /// changed. It is presumed to wait: if it is dropped, no release will tell.
    forgotten_until: f64,
}

/// How much a key has used.
pub(super) struct Usage {
    /// The part of the quota that is left, or was when the key was counted.
    left: f64,
    /// The instant at which the key is as if never seen.
    pub(super) reset: f64,
    /// Whether a request would be denied, somebody waits, or a request like one that was denied would be denied again.
    in_use: bool,
    /// Whether a request waits.
    waited_for: bool,
}

impl Entry {
    pub(super) fn new(settings: &Arc<Settings>, key: &[u8]) -> Self {
        let counts = Counts::Packed { denied_until: 0, packed: INITIAL };
        Self { settings: settings.clone(), key: key.into(), counts }
    }

    /// Whether it is that limiter's entry for the key. There is one copy of each name, whose address will do.
    #[inline]
    pub(super) fn is(&self, settings: &Arc<Settings>, key: &[u8]) -> bool {
        self.key.as_bytes() == key
            && (Arc::ptr_eq(&self.settings, settings) || ptr::eq(self.settings.name, settings.name))
    }

    pub(super) fn hash(&self, hasher: &RandomState) -> u64 {
        hash(hasher, &self.settings, self.key.as_bytes())
    }

    pub(super) fn is_initial(&self) -> bool {
        matches!(self.counts, Counts::Packed { packed: INITIAL, .. })
    }

    /// Like [`check`](Entry::check), in the most common case of all; None in others.
    #[inline]
    pub(super) fn check_fast<'a>(
        &mut self,
        settings: &'a Arc<Settings>,
        request: &EngineRequest,
    ) -> Option<FastCheck<'a>> {
        match &mut self.counts {
            Counts::Packed { packed, .. } if Arc::ptr_eq(&self.settings, settings) => {
                let checked = settings.params.check_fast(packed, request)?;
                if !checked.admission.admitted {
                    self.note_denial(request.now + checked.admission.wait);
                }
                Some(checked)
            }
            _ => None,
        }
    }

    /// Decides about a limit that is asked alone.
    pub(super) fn check(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> EngineReply {
        let reply = self.step(settings, request);
        if !reply.admitted && request.action == Action::Check {
            self.note_denial(request.now + reply.wait);
        }
        reply
    }

    pub(super) fn step(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> EngineReply {
        let reply = self.counts.step(&self.settings, settings, request);
        if request.action.commits() && !Arc::ptr_eq(&self.settings, settings) {
            self.settings = settings.clone();
        }
        reply
    }

    /// Returns units, as the settings count them by which the state was counted.
    pub(super) fn release(&mut self, settings: &Settings, now: f64, releases: &[Release]) {
        let mut state = self.counts.take(&self.settings);
        settings.params.release(&mut state, now, releases);
        self.counts.put(state, &self.settings, now, None);
    }

    /// Remembers that a request would be denied until that instant, though another might not.
    pub(super) fn note_denial(&mut self, until: f64) {
        let denied_until = self.denied_until();
        *denied_until = second(until).max(*denied_until);
    }

    pub(super) fn denied_until(&mut self) -> &mut u32 {
        self.counts.denied_until()
    }

    pub(super) fn usage(&self, now: f64) -> Usage {
        self.counts.usage(&self.settings, now)
    }
}

impl Counts {
    fn denied_until(&mut self) -> &mut u32 {
        match self {
            Self::Packed { denied_until, .. } | Self::Whole { denied_until, .. } => denied_until,
        }
    }

    /// Asks by settings that need not be those by which the state was `counted`.
    fn step(
        &mut self,
        counted: &Settings,
        settings: &Settings,
        request: &EngineRequest,
    ) -> EngineReply {
        if request.action == Action::Peek {
            return match self {
                Self::Packed { packed, .. } => {
                    settings.params.step(&mut counted.params.unpack(*packed), request)
                }
                Self::Whole { whole, .. } => settings.params.step(&mut whole.state, request),
            };
        }
        let mut state = self.take(counted);
        let waited_until = state.waited_until(request.now);
        let reply = settings.params.step(&mut state, request);
        if let (Self::Whole { whole, .. }, Some(instant)) = (&mut *self, waited_until)
            && state.waited_until(request.now).is_none_or(|known| known < instant)
        {
            whole.forgotten_until = whole.forgotten_until.max(instant);
        }
        match request.action.commits() {
            true => self.put(state, settings, request.now, Some(reply)),
            false => self.put(state, counted, request.now, None),
        }
        reply
    }

    fn take(&mut self, counted: &Settings) -> State {
        match self {
            Self::Packed { packed, .. } => counted.params.unpack(*packed),
            Self::Whole { whole, .. } => mem::take(&mut whole.state),
        }
    }

    /// Holds a state, as two packed if these tell it; `reply` is what was decided just now, if that is known.
    fn put(&mut self, mut state: State, counted: &Settings, now: f64, reply: Option<EngineReply>) {
        let denied_until = *self.denied_until();
        if !self.has_forgotten(now)
            && let Some(packed) = counted.params.pack(&state, now)
        {
            *self = Self::Packed { denied_until, packed };
            return;
        }
        state.forget_reservations(now);
        let reply = reply.unwrap_or_else(|| counted.params.step(&mut state, &peek(now)));
        match self {
            Self::Whole { whole, .. } => whole.state = state,
            Self::Packed { .. } => {
                let whole = Box::new(Whole { state, left: 0.0, reset: 0.0, forgotten_until: 0.0 });
                *self = Self::Whole { denied_until, whole };
            }
        }
        self.note_usage(counted, now, reply);
    }

    /// Whether a request may wait whose reservation the state has forgotten.
    fn has_forgotten(&self, now: f64) -> bool {
        matches!(self, Self::Whole { whole, .. } if whole.forgotten_until > now)
    }

    fn note_usage(&mut self, settings: &Settings, now: f64, reply: EngineReply) {
        if let Self::Whole { denied_until, whole } = self {
            whole.left = left(reply.remaining, settings);
            whole.reset = now + reply.reset;
            if reply.remaining == 0.0 {
                *denied_until = second(now + reply.replenish).max(*denied_until);
            }
        }
    }

    fn usage(&self, settings: &Settings, now: f64) -> Usage {
        match self {
            Self::Packed { denied_until, packed } => {
                let mut state = settings.params.unpack(*packed);
                let EngineReply { remaining, reset, .. } =
                    settings.params.step(&mut state, &peek(now));
                let in_use = remaining == 0.0 || *denied_until >= second(now);
                let (left, reset) = (left(remaining, settings), now + reset);
                // States in which a request waits are not compact.
                Usage { left, reset, in_use, waited_for: false }
            }
            Self::Whole { denied_until, whole } => {
                let waited_for = self.has_forgotten(now) || whole.state.waited_until(now).is_some();
                let in_use = *denied_until >= second(now) || waited_for;
                Usage { left: whole.left, reset: whole.reset, in_use, waited_for }
            }
        }
    }
}

fn peek(now: f64) -> EngineRequest {
    EngineRequest { action: Action::Peek, cost: 1.0, max_wait: 0.0, now, admission: None }
}

/// The part of the quota that is left.
fn left(remaining: f64, settings: &Settings) -> f64 {
    remaining / f64::from(settings.quota.burst_size())
}

/// The second in which an instant lies, from 1 on.
fn second(instant: f64) -> u32 {
    ((instant / 1e6) as u32).saturating_add(1)
}

impl Usage {
    /// Whether a full store may drop the key before it has expired.
    pub(super) fn may_be_evicted(&self, when_full: WhenFull) -> bool {
        !self.in_use || when_full == WhenFull::EvictSoonest && !self.waited_for
    }

    /// Whether less is lost with this key: one that is not in use before one that is, then the one
    /// with more left, then the one that is restored sooner.
    pub(super) fn is_less_than(&self, other: &Self) -> bool {
        if self.in_use || other.in_use {
            return !self.in_use || other.in_use && self.reset < other.reset;
        }
        self.left > other.left || self.left == other.left && self.reset < other.reset
    }
}
