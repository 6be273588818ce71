//! Decisions as script calls: one call for the limits of a request, or for several requests.

use std::slice;

use super::{
    RedisStore,
    script::{self, CheckEach, Decided, Limit},
    transport::{Client, Command, Connection, Deadline, TransportError},
};
use crate::{
    algorithm::Action,
    decision::{Decision, Policy},
    store::{LimitRequest, StoreRequest},
};

/// The limits of a request, and what is needed to report the decision.
pub(super) struct ScriptCall {
    action: Action,
    limits: Vec<Limit>,
    policies: Vec<Policy>,
}

impl ScriptCall {
    pub(super) fn new(store: &RedisStore, request: &StoreRequest<'_>) -> Self {
        Self {
            action: request.action,
            limits: request.limits.iter().map(|limit| limit_of(store, limit)).collect(),
            policies: request.limits.iter().map(LimitRequest::policy).collect(),
        }
    }

    pub(super) fn limits(&self) -> &[Limit] {
        &self.limits
    }

    pub(super) async fn execute(
        &self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<Decision, TransportError> {
        execute(client, deadline, self.action, &self.limits, &self.policies).await
    }
}

/// A check of one limit, which can go to Redis together with others.
pub(super) struct Check {
    limit: Limit,
    policy: Policy,
}

impl Check {
    pub(super) fn new(store: &RedisStore, request: &LimitRequest<'_>) -> Self {
        Self { limit: limit_of(store, request), policy: request.policy() }
    }

    /// Returns the key in Redis.
    pub(super) fn key(&self) -> &str {
        &self.limit.key
    }

    /// Returns true if checks of the same key take little more time than one of them.
    pub(super) fn shares_its_key(&self) -> bool {
        self.limit.max_wait == 0.0 || script::reserves_fast(&self.limit.params)
    }

    /// Executes a call for this check alone.
    pub(super) async fn execute(
        &self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<Decision, TransportError> {
        let (limit, policy) = (slice::from_ref(&self.limit), slice::from_ref(&self.policy));
        execute(client, deadline, Action::Check, limit, policy).await
    }
}

/// Executes one call for several checks of one limiter, each by itself. It has not counted those
/// whose result is `None`.
pub(super) async fn execute_each(
    checks: impl ExactSizeIterator<Item = &Check> + Clone,
    client: &Client,
    deadline: Deadline,
) -> Result<Vec<Option<Decision>>, TransportError> {
    let limits = checks.clone().map(|check| &check.limit);
    let each = CheckEach::new(limits.clone());
    let command = Command::script(&each.command, &each.script.text).ready();
    let (reply, connection) = client.execute(deadline, command).await?;
    let decided = each.read(&reply, limits).map_err(TransportError::of_redis)?;
    let decision = |(check, decided): (&Check, Option<Decided>)| {
        Some(decision(check.policy, decided?, Action::Check, &connection))
    };
    Ok(checks.zip(decided).map(decision).collect())
}

async fn execute(
    client: &Client,
    deadline: Deadline,
    action: Action,
    limits: &[Limit],
    policies: &[Policy],
) -> Result<Decision, TransportError> {
    let (command, script) = script::decide(action, limits);
    let command = Command::script(&command, &script.text);
    let (reply, connection) = client.execute(deadline, command).await?;
    let decided = script::read(&reply, action, limits).map_err(TransportError::of_redis)?;
    Ok(decision(policies[decided.limit], decided, action, &connection))
}

fn decision(policy: Policy, decided: Decided, action: Action, connection: &Connection) -> Decision {
    let Decided { reply, now, .. } = decided;
    // So that requests with replies of different latency go on in the order of their reservations.
    let age = if reply.admitted { connection.age(now) } else { 0.0 };
    Decision::new(policy, reply, action, age)
}

fn limit_of(store: &RedisStore, request: &LimitRequest<'_>) -> Limit {
    let LimitRequest { settings, key, cost, max_wait } = *request;
    Limit { key: store.key(settings, key), params: settings.params, cost, max_wait }
}
