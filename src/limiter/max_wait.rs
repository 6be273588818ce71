//! `MaxWait`: the longest wait of a request.

use std::time::Duration;

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
    pub(crate) const LONGEST: Self = Self::UpTo(ENDLESS);

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
