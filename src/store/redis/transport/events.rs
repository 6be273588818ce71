//! The events of the transport for the crate `tracing`: their names, fields and levels. Without the
//! feature they are empty functions.
#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use std::{error::Error, fmt::Display, time::Duration};

use super::error::TransportError;
use crate::store::Status;

/// The text of an error of one key, without the key.
#[cfg(feature = "tracing")]
#[derive(Debug)]
struct OfOneKey;

#[cfg(feature = "tracing")]
impl Display for OfOneKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a key holds no state of the limiter; at the level `trace`, the error names it")
    }
}

#[cfg(feature = "tracing")]
impl Error for OfOneKey {}

#[cfg(feature = "tracing")]
const TARGET: &str = "tower_ratelimit";

/// Reports that decisions fail. An error of one key can contain the key, and only logs of the level
/// `trace` contain keys.
pub(super) fn decisions_failed(limiter: &str, requests: u64, error: &TransportError) {
    #[cfg(feature = "tracing")]
    {
        let hides_key =
            error.is_of_one_key() && !tracing::enabled!(target: TARGET, tracing::Level::TRACE);
        let reason = if hides_key { OfOneKey.to_string() } else { error.reason() };
        let error: &(dyn Error + 'static) = if hides_key { &OfOneKey } else { error };
        tracing::warn!(
            target: TARGET,
            limiter,
            requests,
            error,
            "decisions failed: {reason}"
        );
    }
}

/// Reports that calls fail from now on, with what is known about the server.
pub(super) fn unavailable(
    server: Option<&str>,
    cause: Status,
    changes: u32,
    error: &TransportError,
) {
    #[cfg(feature = "tracing")]
    {
        let error: &(dyn Error + 'static) = error;
        let until = match cause {
            Status::LoginRejected => "accepts it",
            _ => "answers again",
        };
        tracing::warn!(
            target: TARGET,
            server,
            changes,
            error,
            "{cause}: decisions fail immediately until it {until}"
        );
    }
}

/// Reports what the store has found out about a server that does not answer.
pub(super) fn explained(server: Option<&str>, cause: Status) {
    #[cfg(feature = "tracing")]
    {
        let remedy = match cause {
            Status::Slow => "; it is slow, or paused for writes: look for CLIENT PAUSE",
            Status::LoginRejected => "; check the user and the password",
            Status::Silent => "; it hangs, or is paused: look at the process on its host",
            Status::Refused => "; no server listens there: start it, or check the address",
            Status::Unreachable => "; check the host, the network and the firewall",
            _ => "",
        };
        tracing::warn!(target: TARGET, server, "{cause}{remedy}");
    }
}

/// Reports that an outage lasts, with the error of the last probe.
pub(super) fn still_unavailable(
    server: Option<&str>,
    cause: Status,
    outage: Duration,
    error: &TransportError,
) {
    #[cfg(feature = "tracing")]
    {
        let error: &(dyn Error + 'static) = error;
        let cause = cause.to_string().replacen("Redis", "Redis still", 1);
        tracing::warn!(target: TARGET, server, ?outage, error, "{cause}");
    }
}

/// Reports the permission that the store's own ping has found missing. The error contains no key of
/// a request.
pub(super) fn permission_missing(error: &TransportError) {
    #[cfg(feature = "tracing")]
    tracing::error!(
        target: TARGET,
        server = error.server(),
        "the user at Redis lacks a permission: {}",
        error.reason()
    );
}

/// Reports that Redis answers, but rejects decisions. The error contains no key.
pub(super) fn rejects(server: Option<&str>, changes: u32, error: &TransportError) {
    #[cfg(feature = "tracing")]
    {
        let reason = error.reason();
        let error: &(dyn Error + 'static) = error;
        tracing::error!(target: TARGET, server, changes, error, "Redis rejects decisions: {reason}");
    }
}

/// Reports that Redis still rejects decisions, with the last error.
pub(super) fn still_rejects(server: Option<&str>, outage: Duration, error: &TransportError) {
    #[cfg(feature = "tracing")]
    {
        let reason = error.reason();
        let error: &(dyn Error + 'static) = error;
        tracing::error!(
            target: TARGET,
            server,
            ?outage,
            error,
            "Redis still rejects decisions: {reason}"
        );
    }
}

/// Reports that Redis no longer rejects decisions, with the time for which it did.
pub(super) fn decides(server: Option<&str>, changes: u32, outage: Duration) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, server, changes, ?outage, "Redis decides again");
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
pub(super) fn available(server: Option<&str>, changes: u32, outage: Duration) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, server, changes, ?outage, "Redis answers again");
}

pub(super) fn retired(server: Option<&str>, changes: u32) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, server, changes, "the node of the cluster no longer has slots");
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
