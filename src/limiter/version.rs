//! The settings of a limiter, which can be replaced while requests flow, and how long a request may
//! wait by them. It decides nothing.

use std::{
    ops::Deref,
    sync::{Arc, OnceLock},
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};

use crate::{
    algorithm::{Action, Algorithm},
    error::{ConfigError, Error},
    quota::Quota,
    store::{LatestSettings, Settings},
};

/// The settings of a limiter, and what follows from them.
#[derive(Clone, Debug)]
pub(super) struct Version {
    pub(super) settings: Arc<Settings>,
    /// The wait of a check that does not specify one, in microseconds.
    default_wait: u64,
    pub(super) max_reservable: u64,
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
    settings: Arc<LatestSettings>,
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

    /// Changes the quota, and the algorithm if there is one. Returns the settings before and after,
    /// if they differ.
    pub(super) fn update(
        &self,
        algorithm: Option<Algorithm>,
        quota: Quota,
    ) -> Result<Option<[Arc<Settings>; 2]>, ConfigError> {
        let Later { latest, settings } = &*self.later;
        settings.update(|| {
            let from = self.current().settings.clone();
            let algorithm = algorithm.unwrap_or(from.algorithm);
            // A new version of the same settings would make the next check of each key slower.
            if (algorithm, quota) == (from.algorithm, from.quota) {
                return Ok(None);
            }
            let to = Arc::new(from.changed(algorithm, quota)?);
            [&from, &to].into_iter().for_each(|found| settings.link(found));
            let version = Arc::new(Version::new(to.clone()));
            match latest.get() {
                Some(latest) => latest.store(version),
                None => drop(latest.set(ArcSwap::new(version))),
            }
            Ok(Some([from, to]))
        })
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

/// As long as necessary, in microseconds. A store gets no longer wait than its algorithm can
/// reserve.
pub(super) const ENDLESS: u64 = u64::MAX;

/// The longest wait of a request, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MaxWait {
    /// The wait of the algorithm, up to a bound: for a leaky bucket, the time in which it drains;
    /// otherwise 0.
    Default {
        at_most: u64,
    },
    UpTo(u64),
}

impl MaxWait {
    pub(crate) const DEFAULT: Self = Self::Default { at_most: ENDLESS };
    pub(crate) const NONE: Self = Self::UpTo(0);

    #[inline]
    pub(crate) fn up_to(time: Duration) -> Self {
        Self::UpTo(micros(time))
    }

    /// Returns whether a request waits although its algorithm does not by default.
    #[inline]
    pub(super) fn is_asked_for(self) -> bool {
        matches!(self, Self::UpTo(max_wait) if max_wait > 0)
    }

    /// Resolves the wait for a limit with these waits.
    #[inline]
    pub(super) fn resolve(self, default_wait: u64, max_reservable: u64) -> u64 {
        match self {
            Self::Default { at_most } => default_wait.min(at_most),
            Self::UpTo(max_wait) => max_wait.min(max_reservable),
        }
    }

    pub(crate) fn at_most(self, bound: Duration) -> Self {
        let bound = micros(bound);
        match self {
            Self::Default { at_most } => Self::Default { at_most: at_most.min(bound) },
            Self::UpTo(max_wait) => Self::UpTo(max_wait.min(bound)),
        }
    }
}

/// Returns the microseconds of a time, rounded up; [`ENDLESS`] if there are more.
fn micros(time: Duration) -> u64 {
    let micros = time.as_secs().saturating_mul(1_000_000);
    micros.saturating_add(u64::from(time.subsec_nanos().div_ceil(1_000)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_rounded_up_to_microseconds_and_the_longest_one_is_endless() {
        let times = [Duration::ZERO, Duration::from_nanos(1), Duration::from_nanos(1_000_001_000)];
        assert_eq!(times.map(micros), [0, 1, 1_000_001]);
        assert_eq!([Duration::MAX, Duration::from_secs(u64::MAX / 2)].map(micros), [ENDLESS; 2]);
    }
}
