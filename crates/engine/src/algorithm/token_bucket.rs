//! The token bucket: starts full, gains `lump` every `period`. With a period of 1 us this is GCRA,
//! whose theoretical arrival time is `at` plus the time in which `debt` flows in. A request is
//! admitted when the balance covers the part of its cost that may not be overdrawn. Its model is
//! in `bucket.rs`; here are its parameters.

use super::{
    Refill,
    bucket::{Bucket, BucketParams},
};
use crate::quota::{Quota, QuotaError};

pub(crate) type TokenBucketState = Bucket<false>;

pub(super) fn params(
    quota: Quota,
    refill: Refill,
    overdraft: u64,
) -> Result<BucketParams<false>, QuotaError> {
    if overdraft > quota.max_overdraft() {
        return Err(QuotaError::Overdraft { overdraft, quota });
    }
    Ok(match refill {
        Refill::Continuous => BucketParams::continuous(quota, overdraft),
        Refill::Interval => {
            let rate = [1, quota.window_us() as i64, quota.limit() as i64];
            BucketParams::new(quota, overdraft, rate)
        }
    })
}
