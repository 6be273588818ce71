//! The events of a store in Redis for the crate `tracing`: their texts, fields and levels. Without
//! the feature they are empty functions.
#![cfg_attr(not(feature = "tracing"), allow(unused_variables))]

use super::{
    connections::Event,
    error::{Account, ExplainedError},
};
#[cfg(feature = "tracing")]
use super::{connections::TransportError, error::status_of};
#[cfg(feature = "tracing")]
use crate::store::Status;

#[cfg(feature = "tracing")]
const TARGET: &str = "tower_ratelimit";

/// Reports that decisions fail. The error of a damaged key names it: without the key, it could not
/// be deleted.
pub(super) fn decisions_failed(limiter: &str, requests: u64, error: &ExplainedError) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        limiter,
        requests,
        server = error.server(),
        "decisions failed: {}",
        error.summary()
    );
}

/// Reports that Redis has decided otherwise than this process has computed. Only logs of the level
/// `trace` contain the key.
pub(super) fn decision_differed(limiter: &str, requests: u64, key: &str, admitted: bool) {
    #[cfg(feature = "tracing")]
    {
        let is_trace = tracing::enabled!(target: TARGET, tracing::Level::TRACE);
        tracing::error!(
            target: TARGET,
            limiter,
            requests,
            key = is_trace.then_some(key),
            admitted,
            "Redis decides otherwise than this process: what Redis has decided applies"
        );
    }
}

/// Reports the permission that the store's own ping has found missing. The error contains no key of
/// a request.
pub(super) fn permission_missing(error: &ExplainedError) {
    #[cfg(feature = "tracing")]
    tracing::error!(
        target: TARGET,
        server = error.server(),
        "the user at Redis lacks a permission: {}",
        error.summary()
    );
}

/// Reports an event of the connections.
pub(super) fn log(event: &Event<'_>, account: &Account) {
    #[cfg(feature = "tracing")]
    let explained = |error: &TransportError| ExplainedError::new(error.clone(), account);
    #[cfg(feature = "tracing")]
    match *event {
        // These are counted.
        Event::Replied | Event::Failed(_) | Event::Skipped | Event::BreakerChanged { .. } => {}
        Event::Unavailable { server, cause, changes, error } => {
            let cause = status_of(cause);
            let until = match cause {
                Status::LoginRejected => "accepts it",
                _ => "answers again",
            };
            tracing::warn!(
                target: TARGET,
                server = named(server),
                changes,
                error = explained(error).reason(),
                "{cause}: decisions fail immediately until it {until}"
            );
        }
        Event::Explained { server, cause } => {
            let cause = status_of(cause);
            tracing::warn!(target: TARGET, server = named(server), "{cause}{}", remedy(cause));
        }
        Event::StillUnavailable { server, cause, outage, error } => {
            let cause = status_of(cause).to_string().replacen("Redis", "Redis still", 1);
            let error = explained(error).reason();
            tracing::warn!(target: TARGET, server = named(server), ?outage, error, "{cause}");
        }
        Event::Available { server, changes, outage } => tracing::info!(
            target: TARGET,
            server = named(server),
            changes,
            ?outage,
            "Redis answers again"
        ),
        Event::Rejects { server, changes, error } => tracing::error!(
            target: TARGET,
            server = named(server),
            changes,
            "Redis rejects decisions: {}",
            explained(error).summary()
        ),
        Event::StillRejects { server, outage, error } => tracing::error!(
            target: TARGET,
            server = named(server),
            ?outage,
            "Redis still rejects decisions: {}",
            explained(error).summary()
        ),
        Event::Executes { server, changes, outage } => tracing::info!(
            target: TARGET,
            server = named(server),
            changes,
            ?outage,
            "Redis decides again"
        ),
        Event::Retired { server, changes } => tracing::info!(
            target: TARGET,
            server = named(server),
            changes,
            "the node of the cluster no longer has slots"
        ),
        Event::LoginRejected { server } => tracing::error!(
            target: TARGET,
            server = named(server),
            "Redis rejected new credentials: the open connection keeps its login, and new \
             connections will fail; set the new password at the server"
        ),
        Event::NoCredentials { server, error } => tracing::warn!(
            target: TARGET,
            server = named(server),
            error,
            "the provider of the credentials failed: the open connection keeps its login, \
             and the provider is called again"
        ),
        Event::MasterChanged { master, old, new } => tracing::info!(
            target: TARGET,
            master,
            %old,
            %new,
            "the Redis Sentinels name another master"
        ),
        Event::MasterUnusable { master, address, error } => tracing::warn!(
            target: TARGET,
            master,
            %address,
            error,
            "cannot use the master that the Redis Sentinels name: decisions stay with the old \
             master until it is demoted, and are lost then"
        ),
        Event::NotSubscribed { master, error } => tracing::warn!(
            target: TARGET,
            master,
            error,
            "cannot subscribe to a Redis Sentinel: the store polls it every second; allow \
             `+subscribe` and `&+switch-master`, and RESP3"
        ),
    }
}

#[cfg(feature = "tracing")]
fn remedy(cause: Status) -> &'static str {
    match cause {
        Status::Slow => "; it is slow, or paused for writes: look for CLIENT PAUSE",
        Status::LoginRejected => "; check the user and the password",
        Status::Silent => "; it hangs, or is paused: look at the process on its host",
        Status::Refused => "; no server listens there: start it, or check the address",
        Status::Unreachable => "; check the host, the network and the firewall",
        _ => "",
    }
}

/// Returns the name of a server, if it has one.
#[cfg(feature = "tracing")]
fn named(server: &str) -> Option<&str> {
    (!server.is_empty()).then_some(server)
}
