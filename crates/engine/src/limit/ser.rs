//! Serializes quotas, algorithms and limits, as they are read.

use serde::{Serialize, Serializer};

use super::{Limit, settings::Settings};
use crate::{algorithm::Algorithm, quota::Quota};

/// Writes the quota as text: `10/s burst 20`.
impl Serialize for Quota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Writes the name as text if the settings are the defaults, or else a table.
impl Serialize for Algorithm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match Self::ALL.contains(self) {
            true => serializer.serialize_str(self.name()),
            false => Settings::from(*self).serialize(serializer),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Settings::from(*self).serialize(serializer)
    }
}
