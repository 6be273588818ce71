//! A decision about keys that may be on several nodes of a cluster, which have clocks of their own:
//! a call for each key.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::{
    backend::Backend,
    call::ScriptCall,
    connections::{Deadline, TransportError},
    late::{self, Charged},
};
use crate::{
    decision::{Decision, Outcome},
    keys::Key,
    store::StoreRequest,
};

pub(super) struct CrossSlot {
    /// For each key a call.
    calls: Vec<Arc<ScriptCall>>,
    /// For each limit the index of its call, and its index in the call.
    call_of: Vec<(usize, usize)>,
    /// Whether the decision says what is left of each limit.
    counts: bool,
}

impl CrossSlot {
    pub(super) fn new(backend: &Arc<Backend>, request: &StoreRequest<'_>) -> Self {
        let mut keys: Vec<&Key<'_>> = vec![];
        let mut call_of: Vec<(usize, usize)> = vec![];
        for limit in request.limits {
            let known = keys.iter().position(|key| *key == limit.key);
            let call = known.unwrap_or_else(|| {
                keys.push(limit.key);
                keys.len() - 1
            });
            call_of.push((call, call_of.iter().filter(|of| of.0 == call).count()));
        }
        let of_key = |key| {
            let limits = request.limits.iter().filter(|limit| limit.key == key);
            let limits: Vec<_> = limits.copied().collect();
            let request = StoreRequest { limits: &limits, ..*request };
            Arc::new(ScriptCall::new(backend, &request))
        };
        Self { calls: keys.into_iter().map(of_key).collect(), call_of, counts: request.counts }
    }

    /// Executes one call after the other. If one denies or fails, the calls before it are released,
    /// and its result is returned. An answer that comes too late is released, too.
    pub(super) async fn execute_in_order(
        &self,
        deadline: Deadline,
    ) -> Result<Outcome, TransportError> {
        let mut charged: Vec<Charged> = vec![];
        let mut decisions: Vec<Decision> = vec![];
        for (index, call) in self.calls.iter().enumerate() {
            let of_call = late::execute(call, deadline).await?;
            let binds = (index, of_call.decision().limit_index());
            let limit = self.call_of.iter().position(|of| *of == binds).unwrap_or_default();
            let decision = of_call.decision().clone().of_limit(limit);
            if !decision.is_allowed() {
                return Ok(Outcome::of_nothing(decision));
            }
            decisions.push(decision);
            charged.push(of_call);
        }
        let taken: Vec<_> = charged.into_iter().map(Charged::take).collect();
        let receipts = self.call_of.iter().map(|(call, limit)| taken[*call].receipts.get(*limit));
        let receipts = receipts.collect();
        let counts: Vec<_> = decisions.iter().flat_map(Decision::counts).collect();
        let mut decision = tightest(decisions.into_iter());
        if self.counts {
            decision.set_counts(counts);
        }
        Ok(Outcome { decision, receipts })
    }

    /// Executes all calls, even if one fails. Their requests cannot be denied, so no receipts are
    /// needed.
    pub(super) async fn execute_all(self, deadline: Deadline) -> Result<Outcome, TransportError> {
        let mut tasks = JoinSet::new();
        for call in self.calls {
            tasks.spawn(async move { call.execute(deadline, &Arc::default()).await });
        }
        let outcomes: Result<Vec<_>, _> = tasks.join_all().await.into_iter().collect();
        Ok(Outcome::of_nothing(tightest(outcomes?.into_iter().map(|it| it.decision))))
    }
}

fn tightest(decisions: impl Iterator<Item = Decision>) -> Decision {
    decisions.min_by_key(Decision::remaining).expect("a request has a limit")
}
