//! The leaky bucket: a queue with a constant outflow. A request leaves when those before it have
//! left; a request that would not fit into the bucket is denied. Its model is in `bucket.rs`: the
//! debt is the content.

use super::bucket::{Bucket, BucketParams};
use crate::quota::Quota;

pub(crate) type LeakyBucketState = Bucket<true>;

pub(super) fn params(quota: Quota) -> BucketParams<true> {
    BucketParams::continuous(quota, 0)
}
