//! A key and its counts, in one cache line. Shards find them by the hash.

use std::{
    hash::{BuildHasher, Hasher},
    mem, ptr,
    sync::Arc,
};

use foldhash::fast::RandomState;

use super::{WhenFull, epochs::Epochs};
use crate::{
    algorithm::{
        Action, EngineReply, EngineRequest, Fast, FastStep, HoldReceipt, HoldReply, INITIAL, Kind,
        Packed, Release, State,
    },
    keys::{Text, are_same},
    store::{EndedHold, Settings},
};

#[inline]
pub(super) fn hash(hasher: &RandomState, settings: &Settings, key: &[u8]) -> u64 {
    // No length behind the key: the name has an address of constant length.
    let mut hasher = hasher.build_hasher();
    hasher.write_usize(settings.name.as_ptr().addr());
    match (key.first_chunk::<16>(), key.last_chunk::<16>()) {
        // The hasher hashes up to 16 bytes without a call, so the ends of the text, which overlap.
        // Few texts of other lengths have the same ends: at most one of each length.
        (Some(first), Some(last)) if (17..=32).contains(&key.len()) => {
            hasher.write_u128(u128::from_ne_bytes(*first));
            hasher.write_u128(u128::from_ne_bytes(*last));
        }
        _ => hasher.write(key),
    }
    hasher.finish()
}

#[repr(align(64))]
pub(super) struct Entry {
    /// The settings that the state was counted with. [`change`](Entry::change) keeps both together.
    settings: Arc<Settings>,
    key: Text,
    counts: Counts,
}

const _: () = assert!(size_of::<Entry>() == 64);

/// The counts, and the second until which a denied request would be denied again.
enum Counts {
    Packed { denied_until: u32, packed: Packed },
    Boxed { denied_until: u32, boxed: Box<Boxed> },
}

/// A state that two numbers cannot represent.
struct Boxed {
    state: State,
    /// The instant of the last request with a reservation that a change of the quota has removed
    /// from the state. The request is presumed to wait: if it is dropped, no release reports it.
    forgotten_until: f64,
}

/// The usage of a key.
pub(super) struct Usage {
    /// The part of the quota that is left.
    left: f64,
    /// The instant at which the state is the initial one.
    pub(super) reset: f64,
    /// True if a request would be denied, or waits, or if a denied request would be denied again.
    pub(super) in_use: bool,
    /// True if a request waits, or holds units.
    waited_for: bool,
}

impl Entry {
    pub(super) fn new(settings: &Arc<Settings>, key: &[u8]) -> Self {
        Self::counted(settings, key, INITIAL)
    }

    pub(super) fn counted(settings: &Arc<Settings>, key: &[u8], packed: Packed) -> Self {
        let counts = Counts::Packed { denied_until: 0, packed };
        Self { settings: settings.clone(), key: key.into(), counts }
    }

    /// Returns whether this is the entry of the limiter for the key.
    #[inline]
    pub(super) fn is(&self, settings: &Arc<Settings>, key: &[u8]) -> bool {
        are_same(self.key.as_bytes(), key)
            && (Arc::ptr_eq(&self.settings, settings)
                || self.is_counted_by(settings.name, settings.params.kind()))
    }

    /// Returns whether this is the entry of the hold. The limiter may have another algorithm now.
    #[inline]
    pub(super) fn holds(&self, hold: &EndedHold<'_>) -> bool {
        are_same(self.key.as_bytes(), hold.key.as_bytes())
            && self.is_counted_by(hold.settings.name, hold.algorithm)
    }

    /// Each algorithm of a limiter has an entry of its own, as it has a key of its own in Redis.
    /// Addresses suffice, because there is one copy of each name.
    #[inline]
    fn is_counted_by(&self, name: &'static str, algorithm: Kind) -> bool {
        ptr::eq(self.settings.name, name) && self.settings.params.kind() == algorithm
    }

    pub(super) fn hash(&self, hasher: &RandomState) -> u64 {
        hash(hasher, &self.settings, self.key.as_bytes())
    }

    pub(super) fn is_initial(&self) -> bool {
        matches!(self.counts, Counts::Packed { packed: INITIAL, .. })
    }

    /// Decides about a check as [`decide`](Entry::decide) does; `None` in uncommon cases: if the
    /// request has to wait, or if two numbers do not represent the state.
    #[inline]
    pub(super) fn check_fast(
        &mut self,
        settings: &Arc<Settings>,
        fast: &Fast,
        cost: u64,
        waits: bool,
        now: i64,
    ) -> Option<FastStep> {
        match &mut self.counts {
            Counts::Packed { denied_until, packed } if Arc::ptr_eq(&self.settings, settings) => {
                let step = fast.step(packed, cost, now)?;
                if !step.admitted {
                    if waits {
                        return None;
                    }
                    let until = now as u64 + step.wait;
                    *denied_until = second(until).max(*denied_until);
                }
                Some(step)
            }
            _ => None,
        }
    }

    /// Holds units as [`decide`](Entry::decide) does, of a key that counts units at a time, which
    /// count alike by any limit; `None` in uncommon cases, such as a key that is blocked.
    #[inline]
    pub(super) fn step_hold(
        &mut self,
        settings: &Arc<Settings>,
        units: u64,
        now: i64,
        epochs: &mut Epochs,
    ) -> Option<EngineReply> {
        match &mut self.counts {
            Counts::Packed { packed, .. } => {
                settings.params.hold_packed(packed, units, now, || epochs.next(now))
            }
            Counts::Boxed { .. } => None,
        }
    }

    /// Ends a hold of units that count at a time. Returns false if
    /// [`step_end`](Entry::step_end) has to.
    #[inline]
    pub(super) fn end_fast(&mut self, receipt: HoldReceipt, units: u64) -> bool {
        match &mut self.counts {
            Counts::Packed { packed, .. } => {
                self.settings.params.end_packed(packed, receipt, units)
            }
            Counts::Boxed { .. } => false,
        }
    }

    /// Decides about a single limit.
    pub(super) fn decide(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> EngineReply {
        let reply = self.step(settings, request);
        if !reply.admitted && request.action.inserts() {
            self.note_denial(request.now + reply.wait);
        }
        reply
    }

    pub(super) fn step(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> EngineReply {
        if request.action == Action::Peek {
            return self.peek(settings, request);
        }
        self.change(settings, request.now, |state| {
            let reply = settings.params.step(state, request);
            (reply, reply.admitted && request.action.inserts())
        })
    }

    fn peek(&mut self, settings: &Settings, request: &EngineRequest) -> EngineReply {
        match &mut self.counts {
            Counts::Packed { packed, .. } => {
                settings.params.step(&mut self.settings.params.unpack(*packed), request)
            }
            Counts::Boxed { boxed, .. } => settings.params.step(&mut boxed.state, request),
        }
    }

    /// Returns units to the state, as it was counted.
    pub(super) fn return_units(
        &mut self,
        settings: &Arc<Settings>,
        now: f64,
        releases: &[Release],
    ) {
        self.change(settings, now, |state| {
            settings.params.return_units(state, now, releases);
            ((), false)
        });
    }

    /// Ends a hold. What was used counts by the quota that the limiter has now, unless it has
    /// another algorithm.
    pub(super) fn step_end(&mut self, hold: &EndedHold<'_>, now: f64) -> HoldReply {
        let is_latest = hold.settings.params.kind() == hold.algorithm;
        let settings = if is_latest { hold.settings } else { &self.settings }.clone();
        self.change(&settings, now, |state| {
            let replies = settings.params.change_holds(state, now, 0.0, &[hold.change()]);
            (replies[0], hold.used > 0)
        })
    }

    /// Changes the state by the quota of `settings`. `change` returns whether the state is counted
    /// with them from now on: only units that are spent or held convert it.
    fn change<R>(
        &mut self,
        settings: &Arc<Settings>,
        now: f64,
        change: impl FnOnce(&mut State) -> (R, bool),
    ) -> R {
        let mut state = self.counts.take(&self.settings);
        let waited_until = state.waited_until(now);
        let (result, counts) = change(&mut state);
        if counts && !Arc::ptr_eq(&self.settings, settings) {
            self.settings = settings.clone();
        }
        if counts
            && let (Counts::Boxed { boxed, .. }, Some(instant)) = (&mut self.counts, waited_until)
            && state.waited_until(now).is_none_or(|known| known < instant)
        {
            boxed.forgotten_until = boxed.forgotten_until.max(instant);
        }
        self.counts.put(state, &self.settings, now);
        result
    }

    /// Remembers that a request would be denied until that instant. A smaller one may be admitted.
    /// A key with holds, for which the instant may be unknown, is in use anyway.
    pub(super) fn note_denial(&mut self, until: f64) {
        if until.is_infinite() {
            return;
        }
        let denied_until = self.denied_until();
        *denied_until = second(until as u64).max(*denied_until);
    }

    pub(super) fn denied_until(&mut self) -> &mut u32 {
        self.counts.denied_until()
    }

    /// Returns the instant at which the block of the key ends.
    pub(super) fn blocked_until(&self) -> Option<f64> {
        match &self.counts {
            Counts::Packed { .. } => None,
            Counts::Boxed { boxed, .. } => boxed.state.blocked_until(),
        }
    }

    /// Returns the usage of the key at an instant, as the settings count it that have counted it
    /// last.
    pub(super) fn usage(&mut self, now: i64) -> Usage {
        self.counts.usage(&self.settings, now)
    }
}

impl Counts {
    fn denied_until(&mut self) -> &mut u32 {
        match self {
            Self::Packed { denied_until, .. } | Self::Boxed { denied_until, .. } => denied_until,
        }
    }

    fn take(&mut self, counted: &Settings) -> State {
        match self {
            Self::Packed { packed, .. } => counted.params.unpack(*packed),
            Self::Boxed { boxed, .. } => mem::take(&mut boxed.state),
        }
    }

    /// Holds a state, as two numbers if these represent it.
    fn put(&mut self, mut state: State, counted: &Settings, now: f64) {
        let denied_until = *self.denied_until();
        if !self.has_forgotten(now)
            && let Some(packed) = counted.params.pack(&state, now)
        {
            *self = Self::Packed { denied_until, packed };
            return;
        }
        state.forget_reservations(now);
        match self {
            Self::Boxed { boxed, .. } => boxed.state = state,
            Self::Packed { .. } => {
                let boxed = Box::new(Boxed { state, forgotten_until: 0.0 });
                *self = Self::Boxed { denied_until, boxed };
            }
        }
    }

    /// Returns whether a request may wait without a reservation in the state.
    fn has_forgotten(&self, now: f64) -> bool {
        matches!(self, Self::Boxed { boxed, .. } if boxed.forgotten_until > now)
    }

    fn usage(&mut self, settings: &Settings, now: i64) -> Usage {
        let second = second(now.max(0) as u64);
        let now = now as f64;
        match self {
            Self::Packed { packed: [began, held], .. } if !settings.params.spends() => {
                if *held > 0 {
                    return Usage::HELD;
                }
                let reset = *began as f64;
                Usage { left: 1.0, reset, in_use: false, waited_for: false }
            }
            Self::Packed { denied_until, packed } => {
                let fast =
                    settings.fast.as_ref().and_then(|fast| fast.observe(*packed, now as i64));
                let fast = fast.map(|observed| observed.map(|number| number as i64 as f64));
                let [remaining, reset] =
                    fast.unwrap_or_else(|| settings.params.observe_packed(*packed, now));
                let in_use = remaining == 0.0 || *denied_until >= second;
                let (left, reset) = (left(remaining, settings), now + reset);
                // States in which a request waits are not packed.
                Usage { left, reset, in_use, waited_for: false }
            }
            Self::Boxed { boxed, .. } if boxed.state.is_held() => Usage::HELD,
            Self::Boxed { denied_until, boxed } => {
                let waited_until = boxed.state.waited_until(now);
                let waited_for = waited_until.is_some() || boxed.forgotten_until > now;
                let request = EngineRequest::observe(now);
                let EngineReply { remaining, reset, .. } =
                    settings.params.step(&mut boxed.state, &request);
                let in_use = remaining == 0.0 || *denied_until >= second || waited_for;
                Usage { left: left(remaining, settings), reset: now + reset, in_use, waited_for }
            }
        }
    }
}

/// Returns the part of the quota that is left.
fn left(remaining: f64, settings: &Settings) -> f64 {
    remaining / settings.quota.burst_size() as f64
}

/// Returns the second in which an instant lies, from 1 on.
fn second(instant: u64) -> u32 {
    u32::try_from(instant / 1_000_000).unwrap_or(u32::MAX).saturating_add(1)
}

impl Usage {
    /// That of a key with holds, which is never evicted: its permits end later, and would return
    /// units that other requests hold.
    const HELD: Self = Self { left: 0.0, reset: f64::INFINITY, in_use: true, waited_for: true };

    /// Returns whether a full store may drop the key before it has expired.
    pub(super) fn may_be_evicted(&self, when_full: WhenFull) -> bool {
        !self.in_use || when_full == WhenFull::EvictSoonest && !self.waited_for
    }

    /// Returns whether less is lost with this key: an unused key goes before a key in use, then the
    /// key with more left, then the key that is restored sooner.
    pub(super) fn is_less_than(&self, other: &Self) -> bool {
        if self.in_use || other.in_use {
            return !self.in_use || other.in_use && self.reset < other.reset;
        }
        self.left > other.left || self.left == other.left && self.reset < other.reset
    }
}
