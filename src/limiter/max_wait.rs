//! `MaxWait`: the longest wait of a request.

/// The longest wait of a request, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MaxWait {
    /// The wait of the algorithm, up to a bound: for a leaky bucket, the time in which it drains;
    /// otherwise 0.
    Default {
        at_most: f64,
    },
    UpTo(f64),
}

impl MaxWait {
    pub(crate) const DEFAULT: Self = Self::Default { at_most: f64::INFINITY };
    pub(crate) const NONE: Self = Self::UpTo(0.0);
    pub(crate) const LONGEST: Self = Self::UpTo(f64::INFINITY);

    /// Returns whether a request waits although its algorithm does not by default.
    pub(super) fn is_asked_for(self) -> bool {
        matches!(self, Self::UpTo(max_wait) if max_wait > 0.0)
    }

    /// Resolves the wait for a limit with these waits.
    pub(super) fn resolve(self, default_wait: f64, max_reservable: f64) -> f64 {
        // Faster than `f64::min`, which also handles NaN.
        let min = |a: f64, b: f64| if a < b { a } else { b };
        match self {
            Self::Default { at_most } => min(default_wait, at_most),
            Self::UpTo(max_wait) => min(max_wait, max_reservable),
        }
    }

    pub(crate) fn at_most(self, bound: f64) -> Self {
        match self {
            Self::Default { at_most } => Self::Default { at_most: at_most.min(bound) },
            Self::UpTo(max_wait) => Self::UpTo(max_wait.min(bound)),
        }
    }
}
