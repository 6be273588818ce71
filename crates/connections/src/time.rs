//! Jitter for pauses.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// Enough to keep tasks apart, and too little to make a long pause much longer.
const MAX_JITTER: Duration = Duration::from_millis(100);

/// Returns the delay, lengthened at random by up to a tenth and at most 100 ms, so that waiting
/// tasks do not all wake at the same instant.
pub(crate) fn with_jitter(delay: Duration) -> Duration {
    delay + (delay / 10).min(MAX_JITTER).mul_f64(random_fraction())
}

/// Returns a random number from 0 to 1.
pub(crate) fn random_fraction() -> f64 {
    RandomState::new().hash_one(()) as f64 / u64::MAX as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_is_random_and_at_most_a_tenth_or_100_ms() {
        let (short, long) = (Duration::from_millis(50), Duration::from_secs(3_600));
        let delays: Vec<_> = (0..100).map(|_| with_jitter(short)).collect();
        assert!(delays.iter().all(|delay| (short..=short * 11 / 10).contains(delay)), "{delays:?}");
        assert!(delays.iter().any(|delay| *delay != delays[0]), "all wake together");
        assert!((long..=long + MAX_JITTER).contains(&with_jitter(long)));
        assert!(with_jitter(Duration::MAX / 2) < Duration::MAX);
    }
}
