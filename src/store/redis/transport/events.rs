//! The events of the transport for the crate `tracing`: their names, fields and levels. Without the
//! feature they are empty functions.
#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use std::{error::Error, fmt::Display, time::Duration};

pub(super) fn unavailable(node: Option<&str>, changes: u32, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        node,
        changes,
        error,
        "Redis does not answer: decisions fail immediately until it answers again"
    );
}

/// Reports the end of an outage, with its duration.
pub(super) fn available(node: Option<&str>, changes: u32, outage: Duration) {
    #[cfg(feature = "tracing")]
    tracing::info!(node, changes, ?outage, "Redis answers again");
}

pub(super) fn retired(node: Option<&str>, changes: u32) {
    #[cfg(feature = "tracing")]
    tracing::info!(node, changes, "the node of the cluster no longer has slots");
}

pub(super) fn master_changed(master: &str, old: impl Display, new: impl Display) {
    #[cfg(feature = "tracing")]
    tracing::info!(master, %old, %new, "the Redis Sentinels name another master");
}

pub(super) fn master_unusable(master: &str, address: impl Display, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        master,
        %address,
        error,
        "cannot use the master that the Redis Sentinels name: decisions stay with the old master \
         until it is demoted, and are lost then"
    );
}

pub(super) fn not_subscribed(master: &str, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        master,
        error,
        "cannot subscribe to a Redis Sentinel: the store polls it every second; allow `+subscribe` \
         and `&+switch-master`, and RESP3"
    );
}
