//! Decisions as script calls: one call for the limits of a request, or for several requests.

use std::sync::Arc;

use redis::RedisError;
use tower_ratelimit_engine::script::{self, CheckEach, Difference, EachDecided, Limit};

use super::{
    backend::Backend,
    connections::{Claim, Client, Command, Deadline, TransportError},
    error::different,
    holds::first_lifetime,
    wire,
};
use crate::{
    algorithm::{Action, EngineReply},
    decision::Outcome,
    store::{KeptLimit, LimitRequest, StoreRequest},
};

/// The limits of a request, and what is needed to report the decision.
pub(super) struct ScriptCall {
    action: Action,
    kept: Vec<KeptLimit>,
    /// Whether the decision says what is left of each of several limits.
    counts: bool,
    pub(super) backend: Arc<Backend>,
}

impl ScriptCall {
    pub(super) fn new(backend: &Arc<Backend>, request: &StoreRequest<'_>) -> Self {
        Self {
            action: request.action,
            kept: request.limits.iter().map(LimitRequest::kept).collect(),
            counts: request.counts,
            backend: backend.clone(),
        }
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = LimitRequest<'_>> + Clone {
        self.kept.iter().map(KeptLimit::request)
    }

    /// The slot of its keys.
    pub(super) fn slot(&self) -> u16 {
        let LimitRequest { settings, key, .. } = self.kept[0].request();
        self.backend.client.slot_of(&self.backend.key(settings, key))
    }

    /// Executes the call, until another task gives it up.
    pub(super) async fn execute(
        &self,
        deadline: Deadline,
        claim: &Arc<Claim>,
    ) -> Result<Outcome, TransportError> {
        let Self { action, kept, counts, backend } = self;
        let limit = |limit: LimitRequest<'_>| {
            let LimitRequest { settings, key, cost, max_wait, hold, .. } = limit;
            let key = backend.key(settings, key);
            let lifetime = hold.map(first_lifetime);
            Limit { key, params: settings.params, cost, max_wait, lifetime }
        };
        let limits: Vec<_> = self.requests().map(limit).collect();
        let (command, script) =
            wire::command(limits.len(), |arguments| script::decide(*action, &limits, arguments));
        let command = Command::script(&command, &script.text).claimed(claim);
        let (reply, connection) = backend.client.execute(deadline, command).await?;
        let decided = wire::parts(&reply, |now, found| script::read(*action, &limits, now, found));
        let decided = decided.map_err(TransportError::of_redis)?;
        if let Some(difference) = decided.difference {
            let LimitRequest { settings, observers, .. } = kept[decided.limit].request();
            let key = &limits[decided.limit].key;
            backend.monitor.differs(observers, settings.name, key, difference.admitted);
            if difference.has_lost_units {
                return Err(TransportError::of_redis(different()));
            }
        }
        let age = age_of(&decided.reply, connection.age(decided.now as f64));
        let policies = self.requests().map(|limit| limit.policy());
        Ok(match &kept[..] {
            [limit] => Outcome::new(limit.request().policy(), decided.reply, *action, age),
            _ => Outcome::of_several(policies, &decided.all, decided.limit, *counts, *action, age),
        })
    }
}

/// Executes one call for several checks of one limiter, each by itself, until another task gives it
/// up. `on_handover` is called when no later call can overtake it.
pub(super) async fn execute_each(
    checks: &CheckEach,
    client: &Client,
    deadline: Deadline,
    claim: &Arc<Claim>,
    on_handover: &(dyn Fn() + Sync),
) -> Result<EachReply, TransportError> {
    let (command, script) = wire::command(checks.keys(), |arguments| checks.write(arguments));
    let command = Command::script(&command, &script.text).claimed(claim);
    let command = command.ready().on_handover(on_handover);
    let (reply, connection) = client.execute(deadline, command).await?;
    let decided = wire::parts(&reply, |now, found| checks.read(now, found));
    let EachDecided { replies, differences, now } = decided.map_err(TransportError::of_redis)?;
    let replies = replies.into_iter().map(|reply| reply.map_err(RedisError::from));
    let mut replies: Vec<_> = replies.collect();
    for (check, _) in differences.iter().filter(|(_, it)| it.has_lost_units) {
        replies[*check] = Err(different());
    }
    Ok(EachReply { replies, differences, age: connection.age(now as f64) })
}

/// The replies to several checks.
pub(super) struct EachReply {
    pub(super) replies: Vec<Result<EngineReply, RedisError>>,
    /// The decisions that this process has computed otherwise, by the indexes of their checks.
    pub(super) differences: Vec<(usize, Difference)>,
    /// The time since the server decided, in microseconds.
    pub(super) age: f64,
}

/// Returns the age of a decision: so that requests with replies of different latency go on in the
/// order of their reservations.
pub(super) fn age_of(reply: &EngineReply, age: f64) -> f64 {
    if reply.admitted { age } else { 0.0 }
}
