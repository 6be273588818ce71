//! A decision as one script call.

use redis::Cmd;

use super::{
    RedisStore,
    script::{self, Decided, Limit, Script},
    transport::{Client, Command, Deadline, TransportError},
};
use crate::{
    algorithm::Action,
    decision::{Decision, Policy},
    error::StoreError,
    store::{LimitRequest, StoreRequest},
};

/// A script with its keys and arguments, and what is needed to read the reply.
pub(super) struct ScriptCall {
    script: &'static Script,
    command: Cmd,
    action: Action,
    limits: Vec<Limit>,
    policies: Vec<Policy>,
}

impl ScriptCall {
    pub(super) fn new(store: &RedisStore, request: &StoreRequest<'_>) -> Self {
        let limit = |limit: &LimitRequest<'_>| {
            let LimitRequest { settings, key, cost, max_wait } = *limit;
            let key = store.key(settings, key);
            Limit { key, params: settings.params, cost, max_wait }
        };
        let action = request.action;
        let limits: Vec<_> = request.limits.iter().map(limit).collect();
        let (command, script) = script::decide(action, &limits);
        let policies = request.limits.iter().map(LimitRequest::policy).collect();
        Self { script, command, action, limits, policies }
    }

    pub(super) fn limits(&self) -> &[Limit] {
        &self.limits
    }

    pub(super) async fn execute(
        &self,
        client: &Client,
        deadline: Deadline,
    ) -> Result<Decision, StoreError> {
        let command = Command::script(&self.command, &self.script.text);
        let (reply, connection) = client.execute(deadline, command).await?;
        let decided = script::read(&reply, self.action, &self.limits);
        let Decided { reply, limit, now } = decided.map_err(TransportError::of_redis)?;
        // Requests with replies of different latency then proceed in the order of their
        // reservations.
        let age = if reply.admitted { connection.age(now) } else { 0.0 };
        Ok(Decision::new(self.policies[limit], reply, self.action, age))
    }
}
