//! Serializes named limits and quotas to TOML, JSON and similar formats.

use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::limits::{Limit, Limits, refill_name};
use crate::{algorithm::Algorithm, quota::Quota};

/// Writes the quota as text: `10/s burst 20`.
impl Serialize for Quota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Limits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(&self.0)
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let settings = match self.algorithm {
            Algorithm::TokenBucket { .. } => 2,
            Algorithm::SlidingWindow { .. } => 1,
            _ => 0,
        };
        let mut limit = serializer.serialize_struct("Limit", 2 + settings)?;
        limit.serialize_field("algorithm", self.algorithm.name())?;
        limit.serialize_field("quota", &self.quota)?;
        match self.algorithm {
            Algorithm::TokenBucket { refill, overdraft } => {
                limit.serialize_field("refill", refill_name(refill))?;
                limit.serialize_field("overdraft", &overdraft)?;
            }
            Algorithm::SlidingWindow { buckets } => limit.serialize_field("buckets", &buckets)?,
            _ => {}
        }
        limit.end()
    }
}
