//! The settings of a limiter, which can be replaced while requests flow. It decides nothing.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, OnceLock},
};

use arc_swap::{ArcSwap, Guard};

use super::max_wait::MaxWait;
use crate::{
    algorithm::{Action, Algorithm, Kind, Release, units as count},
    decision::Receipt,
    error::{ConfigError, Error},
    quota::Quota,
    store::Settings,
    sync::lock,
};

/// The settings of a limiter, and what follows from them.
#[derive(Clone, Debug)]
pub(super) struct Version {
    pub(super) settings: Arc<Settings>,
    /// The wait of a check that does not specify one, in microseconds.
    default_wait: u64,
    max_reservable: u64,
    pub(super) max_cost: u64,
    /// False if units are only held.
    pub(super) spends: bool,
    /// The settings of the fallback that was used first, and its fraction of the quota.
    pub(super) fallback: OnceLock<(f64, Option<Arc<Settings>>)>,
}

impl Version {
    pub(super) fn new(settings: impl Into<Arc<Settings>>) -> Self {
        let settings = settings.into();
        let params = &settings.params;
        Self {
            default_wait: params.default_wait() as u64,
            max_reservable: params.max_reservable() as u64,
            max_cost: params.max_cost() as u64,
            spends: params.spends(),
            settings,
            fallback: OnceLock::new(),
        }
    }

    /// Resolves a wait in microseconds: at most the longest that the algorithm can reserve.
    #[inline]
    pub(super) fn resolve(&self, max_wait: MaxWait) -> u64 {
        max_wait.resolve(self.default_wait, self.max_reservable)
    }

    /// Returns the release of `units` that a request has spent; `None` if there is nothing to
    /// return.
    pub(super) fn release_of(&self, receipt: &Receipt, units: u64) -> Option<Release> {
        match *receipt {
            Receipt::At(instant, algorithm) if algorithm == self.settings.params.kind() => {
                Some(Release { instant: Some(instant as i64), units: count(units) })
            }
            _ => None,
        }
    }

    /// Returns why a request is invalid, if it is.
    #[inline(always)]
    pub(super) fn refusal(&self, action: Action, cost: u64) -> Option<Error> {
        let is_held = !self.spends && action.spends();
        let is_above = cost > self.max_cost && action.can_be_denied();
        let cannot_hold = action.holds() && !self.settings.params.can_hold();
        (cost == 0 || is_held || is_above || cannot_hold)
            .then(|| self.invalid(cost, is_held, cannot_hold))
    }

    #[cold]
    #[inline(never)]
    fn invalid(&self, cost: u64, is_held: bool, cannot_hold: bool) -> Error {
        let limiter = self.settings.name.into();
        match cost {
            _ if cannot_hold => Error::CannotHold { limiter },
            0 => Error::ZeroCost,
            _ if is_held => Error::OnlyHolds { limiter },
            _ => Error::CostAboveQuota { limiter, cost, max: self.max_cost },
        }
    }
}

/// The current version of the settings. Clones share later versions.
#[derive(Clone, Debug)]
pub(super) struct Versions {
    /// Read without a lock, so that a limiter whose settings never change pays nothing for it.
    first: Version,
    later: Arc<Later>,
}

/// The versions after the first one.
#[derive(Debug, Default)]
struct Later {
    /// Set by the first replacement. Read without a lock, too.
    latest: OnceLock<ArcSwap<Version>>,
    /// The last settings of each other algorithm, for what was decided by it. Locked by a
    /// replacement, so that no concurrent one is undone.
    replaced: Mutex<Vec<Arc<Settings>>>,
}

impl Versions {
    pub(super) fn new(first: Version) -> Self {
        Self { first, later: Arc::default() }
    }

    #[inline]
    pub(super) fn current(&self) -> Current<'_> {
        match self.later.latest.get() {
            None => Current::First(&self.first),
            Some(latest) => Current::Latest(latest.load()),
        }
    }

    /// Returns the latest settings with an algorithm that a decision has named.
    pub(super) fn settings_of(&self, algorithm: Kind) -> Arc<Settings> {
        let is_it = |settings: &&Arc<Settings>| settings.params.kind() == algorithm;
        let current = self.current().settings.clone();
        if is_it(&&current) {
            return current;
        }
        let replaced = lock(&self.later.replaced);
        replaced.iter().find(is_it).cloned().unwrap_or(current)
    }

    /// Changes the quota, and the algorithm if there is one. Returns the settings before and after,
    /// if they differ.
    pub(super) fn update(
        &self,
        algorithm: Option<Algorithm>,
        quota: Quota,
    ) -> Result<Option<[Arc<Settings>; 2]>, ConfigError> {
        let changed = |known: &Settings| {
            let algorithm = algorithm.unwrap_or(known.algorithm);
            // A new version of the same settings would make the next check of each key slower.
            let is_change = (algorithm, quota) != (known.algorithm, known.quota);
            is_change.then(|| known.changed(algorithm, quota)).transpose()
        };
        let Later { latest, replaced } = &*self.later;
        let replaced = &mut *lock(replaced);
        let known = self.current();
        let Some(settings) = changed(&known.settings)? else { return Ok(None) };
        let (from, to) = (known.settings.clone(), Arc::new(settings));
        replaced.retain(|other| other.params.kind() != from.params.kind());
        replaced.push(from.clone());
        let version = Arc::new(Version::new(to.clone()));
        match latest.get() {
            Some(latest) => latest.store(version),
            None => drop(latest.set(ArcSwap::new(version))),
        }
        Ok(Some([from, to]))
    }
}

/// A version that stays the same while it is borrowed.
pub(super) enum Current<'a> {
    First(&'a Version),
    Latest(Guard<Arc<Version>>),
}

impl Deref for Current<'_> {
    type Target = Version;

    #[inline]
    fn deref(&self) -> &Version {
        match self {
            Self::First(version) => version,
            Self::Latest(version) => version,
        }
    }
}
