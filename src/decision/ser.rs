//! Serializes decisions and states of keys. Times are in milliseconds, rounded up.

use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::{Decision, KeyState};
use crate::time::millis;

impl Serialize for Decision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Decision", 12)?;
        fields.serialize_field("is_allowed", &self.is_allowed())?;
        fields.serialize_field("delay_ms", &millis(self.delay()))?;
        fields.serialize_field("retry_after_ms", &self.retry_after().map(millis))?;
        fields.serialize_field("is_blocked", &self.is_blocked())?;
        fields.serialize_field("blocked_for_ms", &self.blocked_for().map(millis))?;
        fields.serialize_field("remaining", &self.remaining())?;
        fields.serialize_field("replenish_after_ms", &millis(self.replenish_after()))?;
        fields.serialize_field("reset_after_ms", &millis(self.reset_after()))?;
        fields.serialize_field("limiter", self.limiter())?;
        fields.serialize_field("quota", &self.quota())?;
        fields.serialize_field("cost", &self.cost())?;
        fields.serialize_field("source", &self.source())?;
        fields.end()
    }
}

impl Serialize for KeyState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("KeyState", 11)?;
        fields.serialize_field("limiter", self.limiter())?;
        fields.serialize_field("quota", &self.quota())?;
        fields.serialize_field("remaining", &self.remaining())?;
        fields.serialize_field("held", &self.held())?;
        fields.serialize_field("replenish_after_ms", &millis(self.replenish_after()))?;
        fields.serialize_field("reset_after_ms", &millis(self.reset_after()))?;
        fields.serialize_field("blocked_for_ms", &self.blocked_for().map(millis))?;
        fields.serialize_field("allows", &self.allows())?;
        fields.serialize_field("retry_after_ms", &self.retry_after().map(millis))?;
        fields.serialize_field("delay_ms", &millis(self.delay()))?;
        fields.serialize_field("source", &self.source())?;
        fields.end()
    }
}
