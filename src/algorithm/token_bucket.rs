//! The token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA,
//! whose theoretical arrival time is `at` plus the time in which `debt` flows in. A request is
//! admitted when the balance covers the part of its cost that may not be overdrawn. Its model is
//! in `bucket.rs`; here are its parameters and its fast path.

use std::num::NonZeroU64;

use super::{
    Refill,
    bucket::{Bucket, BucketParams},
    packed::{FastReport, FastStep, Packed},
};
use crate::quota::{ConfigError, Quota};

pub(crate) type TokenBucketState = Bucket;

pub(super) fn params(
    quota: Quota,
    refill: Refill,
    overdraft: u64,
) -> Result<BucketParams, ConfigError> {
    if overdraft > quota.max_overdraft() {
        return Err(ConfigError::Overdraft { overdraft, quota });
    }
    Ok(match refill {
        Refill::Continuous => BucketParams::continuous(quota, overdraft),
        Refill::Interval => {
            let rate = [1.0, quota.window_us() as f64, quota.limit() as f64];
            BucketParams::new(quota, overdraft, rate)
        }
    })
}

/// A bucket with continuous refill and without an overdraft, in integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainTokenBucket {
    burst: u64,
    unit: NonZeroU64,
    lump: u64,
    /// The burst in parts.
    full: u64,
}

impl PlainTokenBucket {
    /// Returns the parameters for the fast path, if it knows the settings.
    pub(super) fn new(params: &BucketParams) -> Option<Self> {
        let BucketParams { burst, overdraft, unit, period, lump, .. } = *params;
        if period != 1.0 || overdraft > 0.0 {
            return None;
        }
        Some(Self {
            burst: burst as u64,
            unit: NonZeroU64::new(unit as u64)?,
            lump: lump as u64,
            full: params.full() as u64,
        })
    }

    /// Returns the time until the parts have flowed in. Most buckets gain one in a microsecond.
    #[inline]
    fn time_until(&self, parts: u64) -> u64 {
        if self.lump == 1 { parts } else { parts.div_ceil(self.lump) }
    }

    #[inline]
    fn debt_at(&self, [at, debt]: Packed, now: i64) -> Option<u64> {
        let elapsed = u64::try_from(now - at).ok()?;
        Some((debt as u64).saturating_sub(elapsed.saturating_mul(self.lump)))
    }

    #[inline]
    pub(super) fn step(&self, packed: &mut Packed, cost: u64, now: i64) -> Option<FastStep> {
        let debt = self.debt_at(*packed, now)?;
        if cost == 0 || cost > self.burst {
            return None;
        }
        let spent = debt + cost * self.unit.get();
        Some(if spent <= self.full {
            *packed = [now, spent as i64];
            FastStep { admitted: true, wait: 0, after: *packed, now }
        } else {
            let wait = self.time_until(spent - self.full);
            FastStep { admitted: false, wait, after: [now, debt as i64], now }
        })
    }

    #[inline]
    pub(super) fn report(&self, step: &FastStep) -> FastReport {
        let debt = step.after[1] as u64;
        let remaining = self.full.saturating_sub(debt) / self.unit;
        let missing = (remaining + 1) * self.unit.get() + debt - self.full;
        let (replenish, reset) = (self.time_until(missing), self.time_until(debt));
        FastReport { remaining, replenish, reset }
    }

    #[inline]
    pub(super) fn observe(&self, packed: Packed, now: i64) -> Option<[u64; 2]> {
        let debt = self.debt_at(packed, now)?;
        Some([self.full.saturating_sub(debt) / self.unit, self.time_until(debt)])
    }
}
