//! The names of the keys of a limiter. Commands are in the other files.

use crate::error::RateLimiterError;

/// The keys of a limiter: five with Redisson's names, and two that this crate adds.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) name: String,
    pub(super) client_id: String,
    pub(super) all: [String; 7],
}

impl Keys {
    pub(super) fn new(name: &str, client_id: &str) -> Result<Self, RateLimiterError> {
        if !is_in_one_slot(name) {
            return Err(RateLimiterError::Slots { name: name.into() });
        }
        let tagged = if name.contains('{') { name.to_owned() } else { format!("{{{name}}}") };
        let overall = |suffix: &str| format!("{tagged}:{suffix}");
        let per_client = |suffix: &str| format!("{tagged}:{suffix}:{client_id}");
        let all = [
            name.to_owned(),
            overall("value"),
            per_client("value"),
            overall("permits"),
            per_client("permits"),
            overall("tally"),
            per_client("tally"),
        ];
        Ok(Self { name: name.to_owned(), client_id: client_id.to_owned(), all })
    }

    /// Returns the keys of a rate that is not per client.
    pub(super) fn overall(&self) -> [&str; 4] {
        [0, 1, 3, 5].map(|index| &*self.all[index])
    }
}

/// Returns whether the name has the same hash tag as the keys that begin with it (in braces, if it
/// has none).
fn is_in_one_slot(name: &str) -> bool {
    match name.split_once('{') {
        Some((_, rest)) => rest.find('}').is_some_and(|end| end > 0),
        None => !name.is_empty() && !name.contains('}'),
    }
}
