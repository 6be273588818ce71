//! The events of the transport for the crate `tracing`: their names, fields and levels. Without the
//! feature they are empty functions.
#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use std::{error::Error, fmt::Display, time::Duration};

#[cfg(feature = "tracing")]
const TARGET: &str = "tower_ratelimit";

pub(super) fn unavailable(node: Option<&str>, changes: u32, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        node,
        changes,
        error,
        "Redis does not answer: decisions fail immediately until it answers again"
    );
}

/// Reports that an outage lasts, with the error of the last probe.
pub(super) fn still_unavailable(
    node: Option<&str>,
    outage: Duration,
    error: &(dyn Error + 'static),
) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, node, ?outage, error, "Redis still does not answer");
}

/// Reports that Redis answers, but with errors only. The error contains no key.
pub(super) fn rejects(node: Option<&str>, changes: u32, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::error!(
        target: TARGET,
        node,
        changes,
        error,
        "Redis rejects every decision: the failure policy applies until it decides again"
    );
}

pub(super) fn decides(node: Option<&str>, changes: u32) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, node, changes, "Redis decides again");
}

/// Reports that a server rejected new credentials on an open connection.
pub(super) fn login_rejected(server: &str) {
    #[cfg(feature = "tracing")]
    tracing::error!(
        target: TARGET,
        server,
        "Redis rejected new credentials: the open connection keeps its login, and new connections \
         will fail; set the new password at the server"
    );
}

/// Reports the end of an outage, with its duration.
pub(super) fn available(node: Option<&str>, changes: u32, outage: Duration) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, node, changes, ?outage, "Redis answers again");
}

pub(super) fn retired(node: Option<&str>, changes: u32) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, node, changes, "the node of the cluster no longer has slots");
}

pub(super) fn master_changed(master: &str, old: impl Display, new: impl Display) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, master, %old, %new, "the Redis Sentinels name another master");
}

pub(super) fn master_unusable(master: &str, address: impl Display, error: &(dyn Error + 'static)) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
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
        target: TARGET,
        master,
        error,
        "cannot subscribe to a Redis Sentinel: the store polls it every second; allow `+subscribe` \
         and `&+switch-master`, and RESP3"
    );
}
