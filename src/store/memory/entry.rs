//! A key and its counts, in one cache line. Shards find them by the hash.

use std::{
    hash::{BuildHasher, Hasher},
    ptr,
    sync::Arc,
};

use foldhash::fast::RandomState;

use super::WhenFull;
use crate::{
    algorithm::{Core, EngineReply, EngineRequest, Kind, Params, Release, State, units},
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
    /// The settings that the state was counted with: [`change`](Entry::change) replaces both
    /// together.
    settings: Arc<Settings>,
    key: Text,
    counts: Counts,
}

const _: () = assert!(size_of::<Entry>() == 64);

/// The counts, and the second until which a denied request would be denied again.
enum Counts {
    Core { denied_until: u32, core: Core },
    Boxed { denied_until: u32, boxed: Box<Boxed> },
}

/// A state that no core represents, or that units were held beside.
struct Boxed {
    state: State,
    /// The instant of the last request with a reservation that a change of the quota has removed
    /// from the state. The request is presumed to wait: if it is dropped, no release reports it.
    forgotten_until: i64,
}

/// The usage of a key. A full store evicts the least of several keys: one that is not in use, then
/// the one with the least used, then the one that is restored soonest.
#[derive(PartialEq, PartialOrd)]
pub(super) struct Usage {
    /// True if a request would be denied, or waits, or if a denied request would be denied again.
    pub(super) in_use: bool,
    /// The part of the quota that is used; 1 of a key in use.
    used: f64,
    /// The instant at which the state is the initial one.
    pub(super) reset: i64,
    /// True if a request waits, or holds units.
    waited_for: bool,
    /// True if at most one unit is used: less is lost with no other key.
    pub(super) is_least: bool,
}

impl Entry {
    pub(super) fn new(settings: &Arc<Settings>, key: &[u8]) -> Self {
        let counts = Counts::Core { denied_until: 0, core: Core::default() };
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
        matches!(self.counts, Counts::Core { core: Core { amount: 0, .. }, .. })
    }

    /// Decides where the state lies, as for most keys, in a core. `None` if it does not, or would
    /// not after the decision: nothing is changed then.
    #[inline(always)]
    pub(super) fn decide_in_core(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> Option<EngineReply> {
        let Counts::Core { core, .. } = &mut self.counts else { return None };
        if !Arc::ptr_eq(&self.settings, settings) {
            return None;
        }
        let reply = settings.params.step_core(core, request)?;
        self.note(request, &reply);
        Some(reply)
    }

    /// Decides in the core, and returns the core before, to [`undo`](Self::undo) it.
    #[inline(always)]
    pub(super) fn try_in_core(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> Option<(EngineReply, Core)> {
        let Counts::Core { core, .. } = self.counts else { return None };
        Some((self.decide_in_core(settings, request)?, core))
    }

    pub(super) fn undo(&mut self, before: Core) {
        if let Counts::Core { core, .. } = &mut self.counts {
            *core = before;
        }
    }

    /// Returns the state in the box, if these settings have counted it.
    #[inline(always)]
    fn boxed_by(&mut self, settings: &Arc<Settings>) -> Option<&mut State> {
        match &mut self.counts {
            Counts::Boxed { boxed, .. } if Arc::ptr_eq(&self.settings, settings) => {
                Some(&mut boxed.state)
            }
            _ => None,
        }
    }

    /// Decides about a state that does not lie in a core, or will not after the decision.
    #[inline(always)]
    pub(super) fn decide_in_state(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> EngineReply {
        if let Some(state) = self.boxed_by(settings) {
            let reply = settings.params.step(state, request);
            if !request.action.is_plain() && !state.is_held() {
                self.close(request.now);
            }
            self.note(request, &reply);
            return reply;
        }
        let reply = self.change(settings, request.now, |state| {
            let reply = settings.params.step(state, request);
            (reply, reply.admitted && request.action.inserts())
        });
        self.note(request, &reply);
        reply
    }

    /// Decides, wherever the state lies.
    #[inline(never)]
    pub(super) fn decide(
        &mut self,
        settings: &Arc<Settings>,
        request: &EngineRequest,
    ) -> EngineReply {
        let in_core = self.decide_in_core(settings, request);
        in_core.unwrap_or_else(|| self.decide_in_state(settings, request))
    }

    /// Remembers until when a reply denies units, unless another limit denies them.
    #[inline(always)]
    pub(super) fn note(&mut self, request: &EngineRequest, reply: &EngineReply) {
        if !reply.admitted && request.action.inserts() && request.admission.is_none() {
            // A smaller request may be admitted. A key with holds, for which the time may be
            // unknown, is in use anyway.
            if let Some(wait) = reply.wait {
                let denied_until = self.counts.denied_until();
                *denied_until = second(request.now + wait).max(*denied_until);
            }
        }
    }

    /// Returns units to the state, as it was counted.
    pub(super) fn return_units(
        &mut self,
        settings: &Arc<Settings>,
        now: i64,
        releases: &[Release],
    ) {
        self.change(settings, now, |state| {
            settings.params.return_units(state, now, releases);
            ((), false)
        });
    }

    /// Ends a hold. What was used counts by the quota that the limiter has now, unless it has
    /// another algorithm. Returns whether the units were held.
    #[inline]
    pub(super) fn end_hold(&mut self, hold: &EndedHold<'_>, now: i64) -> bool {
        let EndedHold { settings, algorithm, receipt, .. } = *hold;
        let (held, used) = (units(hold.units), units(hold.used));
        let is_known = match &mut self.counts {
            Counts::Core { core, .. } => !algorithm.spends() && core.end_hold(receipt, held),
            // The box stays: most limits that hold units do so again and again.
            Counts::Boxed { boxed, .. } => boxed.state.end_hold(receipt, held),
        };
        if used > 0 && algorithm.spends() {
            let is_latest = settings.params.kind() == algorithm;
            let settings = if is_latest { settings } else { &self.settings.clone() };
            let spend = |state: &mut State| settings.params.spend(state, used, now);
            match self.boxed_by(settings) {
                Some(state) => spend(state),
                None => self.change(settings, now, |state| (spend(state), true)),
            }
        }
        is_known
    }

    /// Changes the state by the quota of `settings`. `change` returns whether the state is counted
    /// with them from now on: only units that are spent or held convert it.
    #[inline(never)]
    fn change<R>(
        &mut self,
        settings: &Arc<Settings>,
        now: i64,
        change: impl FnOnce(&mut State) -> (R, bool),
    ) -> R {
        let Self { settings: counted, counts, .. } = self;
        let Boxed { state, forgotten_until } = counts.boxed(&counted.params);
        let waited_until = state.waited_until(now);
        let (result, converts) = change(state);
        if converts && !Arc::ptr_eq(counted, settings) {
            *counted = settings.clone();
            if state.waited_until(now) < waited_until {
                *forgotten_until = waited_until.unwrap_or(0).max(*forgotten_until);
            }
        }
        self.close(now);
        result
    }

    /// Lets the state lie in a core, if one represents it.
    fn close(&mut self, now: i64) {
        if let Counts::Boxed { denied_until, boxed } = &self.counts
            && boxed.forgotten_until <= now
            && let Some(core) = self.settings.params.close(&boxed.state, now)
        {
            self.counts = Counts::Core { denied_until: *denied_until, core };
        }
    }

    /// Returns the instant at which the block of the key ends.
    pub(super) fn blocked_until(&self) -> Option<i64> {
        match &self.counts {
            Counts::Core { .. } => None,
            Counts::Boxed { boxed, .. } => boxed.state.blocked_until(),
        }
    }

    /// Returns the usage of the key at an instant, by the settings that have counted it last.
    pub(super) fn usage(&mut self, mut now: i64) -> Usage {
        let params = &self.settings.params;
        if let Counts::Core { core, .. } = &self.counts {
            now = now.max(core.at); // another shard may be ahead
        }
        let request = &EngineRequest::observe(now);
        let (observed, waited_for) = match &mut self.counts {
            Counts::Core { core, .. } => match params.step_core(core, request) {
                Some(reply) => (reply, false),
                None if core.amount > 0 => return Usage::HELD,
                None => return Usage::free_since(core.at),
            },
            Counts::Boxed { boxed, .. } if boxed.state.is_held() => return Usage::HELD,
            Counts::Boxed { boxed, .. } => {
                let waits = boxed.state.waited_until(now).is_some() || boxed.forgotten_until > now;
                (params.step(&mut boxed.state, request), waits)
            }
        };
        let EngineReply { remaining, reset, .. } = observed;
        let is_denied = remaining == 0 || *self.counts.denied_until() >= second(now.max(0));
        let in_use = is_denied || waited_for;
        let left = remaining as f64 / self.settings.quota.burst_size() as f64;
        let used = if in_use { 1.0 } else { 1.0 - left };
        let is_least = remaining + 1 >= params.max_cost();
        Usage { in_use, used, reset: now + reset, waited_for, is_least }
    }
}

impl Counts {
    /// Returns the box of the state, which it makes if the state lies in a core.
    fn boxed(&mut self, params: &Params) -> &mut Boxed {
        if let Self::Core { denied_until, core } = *self {
            let boxed = Box::new(Boxed { state: params.open(core), forgotten_until: 0 });
            *self = Self::Boxed { denied_until, boxed };
        }
        let Self::Boxed { boxed, .. } = self else { unreachable!("it lies in a box") };
        boxed
    }

    #[inline]
    fn denied_until(&mut self) -> &mut u32 {
        match self {
            Self::Core { denied_until, .. } | Self::Boxed { denied_until, .. } => denied_until,
        }
    }
}

/// Returns the second in which an instant lies, from 1 on.
fn second(instant: i64) -> u32 {
    u32::try_from(instant / 1_000_000).unwrap_or(u32::MAX).saturating_add(1)
}

impl Usage {
    /// The usage of a key with holds, which is never evicted: its permits end later, and would
    /// return units that other requests hold.
    const HELD: Self =
        Self { in_use: true, used: 1.0, reset: i64::MAX, waited_for: true, is_least: false };

    /// The usage of a key under a limit on concurrency without holds.
    fn free_since(reset: i64) -> Self {
        Self { in_use: false, used: 0.0, reset, waited_for: false, is_least: true }
    }

    /// Returns whether a full store may drop the key before it has expired.
    pub(super) fn may_be_evicted(&self, when_full: WhenFull) -> bool {
        !self.in_use || when_full == WhenFull::EvictSoonest && !self.waited_for
    }
}
