//! The names of keys in Redis. It knows no values.

use crate::{keys::Key, store::Settings};

/// Returns the name of a key in Redis, which begins with the prefix of the store.
pub(super) fn key_name(prefix: &str, settings: &Settings, key: &Key<'_>) -> String {
    let Settings { name, algorithm, .. } = settings;
    // Empty braces would not determine the slot. No other key has this form.
    let key = Some(key.as_str()).filter(|key| !key.is_empty()).unwrap_or("%");
    [prefix, ":", name, ":", algorithm.name(), ":{", key, "}"].concat()
}
