//! Random numbers for jitter, and times in milliseconds. The clocks of the stores are in `store`.

use std::hash::{BuildHasher, RandomState};
#[cfg(feature = "serde")]
use std::time::{Duration, SystemTime};

/// Returns a random number from 0 to 1.
pub(crate) fn random_fraction() -> f64 {
    RandomState::new().hash_one(()) as f64 / u64::MAX as f64
}

/// Returns a duration in milliseconds, rounded up: a client that retries then is not early.
#[cfg(feature = "serde")]
pub(crate) fn millis(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(u64::MAX)
}

/// Serializes a time, or `None`, as the milliseconds since 1970-01-01 UTC, rounded down.
#[cfg(feature = "serde")]
pub(crate) fn unix_ms<S: serde::Serializer>(
    time: &(impl Copy + Into<Option<SystemTime>>),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let since = (*time).into().map(|time| time.duration_since(SystemTime::UNIX_EPOCH));
    let millis = since.map(|since| since.unwrap_or_default().as_millis() as u64);
    serde::Serialize::serialize(&millis, serializer)
}
