//! The settings of a limiter, which can be replaced while requests flow. It decides nothing.

use std::{
    mem,
    ops::Deref,
    sync::{Arc, OnceLock, PoisonError, RwLock},
};

use super::max_wait::MaxWait;
use crate::{
    algorithm::{Action, Algorithm, Release, units as count},
    decision::Receipt,
    error::{ConfigError, Error},
    keys::Key,
    observe::Observers,
    quota::Quota,
    store::{LimitRequest, Settings},
};

/// The settings of a limiter, and what follows from them.
#[derive(Clone, Debug)]
pub(super) struct Version {
    pub(super) settings: Arc<Settings>,
    /// The wait of a check that does not specify one, in microseconds.
    default_wait: f64,
    max_reservable: f64,
    pub(super) max_cost: u64,
    /// The settings of the fallback that was used first, and its fraction of the quota.
    pub(super) fallback: OnceLock<(f64, Option<Arc<Settings>>)>,
}

impl Version {
    pub(super) fn new(settings: impl Into<Arc<Settings>>) -> Self {
        let settings = settings.into();
        let params = &settings.params;
        Self {
            default_wait: params.default_wait(),
            max_reservable: params.max_reservable(),
            max_cost: params.max_cost() as u64,
            settings,
            fallback: OnceLock::new(),
        }
    }

    /// Resolves a wait in microseconds: at most the longest that the algorithm can reserve.
    pub(super) fn resolve(&self, max_wait: MaxWait) -> f64 {
        max_wait.resolve(self.default_wait, self.max_reservable)
    }

    /// Returns the release of `units` that a request has spent; `None` if there is nothing to
    /// return.
    pub(super) fn release_of(&self, receipt: &Receipt, units: u64) -> Option<Release> {
        match *receipt {
            Receipt::At(instant, algorithm) if algorithm == self.settings.params.kind() => {
                Some(Release { instant: Some(instant as f64), units: count(units) })
            }
            _ => None,
        }
    }

    /// Returns the part of a request to the store that concerns this limit.
    #[inline]
    pub(super) fn request<'a>(
        &'a self,
        observers: &'a Observers,
        action: Action,
        key: &'a Key<'_>,
        cost: u64,
        max_wait: MaxWait,
    ) -> Result<LimitRequest<'a>, Error> {
        let Self { settings, max_cost, .. } = self;
        if cost == 0 {
            return Err(Error::ZeroCost);
        }
        if action.can_be_denied() && cost > *max_cost {
            return Err(Error::CostAboveQuota { limiter: settings.name, cost, max: *max_cost });
        }
        let max_wait = self.resolve(max_wait);
        Ok(LimitRequest { settings, observers, key, cost, max_wait, hold: None })
    }
}

/// The current version of the settings. Clones share later versions.
#[derive(Clone, Debug)]
pub(super) struct Versions {
    /// Read without a lock, so that a limiter whose settings never change pays nothing for it.
    first: Version,
    /// Set by the first replacement.
    latest: Arc<OnceLock<RwLock<Arc<Version>>>>,
}

impl Versions {
    pub(super) fn new(first: Version) -> Self {
        Self { first, latest: Arc::default() }
    }

    #[inline]
    pub(super) fn current(&self) -> Current<'_> {
        match self.latest.get() {
            None => Current::First(&self.first),
            Some(latest) => {
                Current::Latest(latest.read().unwrap_or_else(PoisonError::into_inner).clone())
            }
        }
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
        if self.latest.get().is_none() && changed(&self.first.settings)?.is_none() {
            return Ok(None);
        }
        let latest = self.latest.get_or_init(|| RwLock::new(Arc::new(self.first.clone())));
        // Kept from the read of the old version on, so that no concurrent change is undone.
        let mut latest = latest.write().unwrap_or_else(PoisonError::into_inner);
        let Some(settings) = changed(&latest.settings)? else { return Ok(None) };
        let old = mem::replace(&mut *latest, Arc::new(Version::new(settings)));
        Ok(Some([old.settings.clone(), latest.settings.clone()]))
    }
}

/// A version that stays the same while it is borrowed.
pub(super) enum Current<'a> {
    First(&'a Version),
    Latest(Arc<Version>),
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
