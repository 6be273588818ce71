//! A decision about keys that may be on several nodes of a cluster, which have clocks of their own:
//! a call for each key.

use std::{mem, sync::Arc};

use tokio::task::JoinSet;

use super::{
    backend::Backend,
    connections::{Deadline, TransportError},
    late::WaitingCall,
};
use crate::{
    decision::{Decision, Outcome, Receipts},
    keys::Key,
    store::StoreRequest,
};

pub(super) struct CrossSlot {
    /// For each key a call.
    calls: Vec<Arc<WaitingCall>>,
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
            Arc::new(WaitingCall::new(backend, &request))
        };
        Self { calls: keys.into_iter().map(of_key).collect(), call_of, counts: request.counts }
    }

    /// Executes one call after the other. If one denies or fails, the calls before it are released,
    /// and its result is returned. An answer that comes too late is released, too.
    pub(super) async fn execute_in_order(
        &self,
        deadline: Deadline,
    ) -> Result<Outcome, TransportError> {
        let mut charged = Charged(vec![]);
        let (mut binding, mut counts) = (None, vec![]);
        for (index, call) in self.calls.iter().enumerate() {
            let mut outcome = call.execute(deadline).await?;
            let binds = (index, outcome.decision.limit_index());
            let limit = self.call_of.iter().position(|of| *of == binds).unwrap_or_default();
            outcome.decision = outcome.decision.of_limit(limit);
            if !outcome.decision.is_allowed() {
                return Ok(outcome);
            }
            counts.extend(outcome.decision.counts());
            binding = tighter(binding, outcome.decision.clone());
            charged.0.push((call, outcome.receipts));
        }
        let charged = mem::take(&mut charged.0);
        let receipt = |&(call, limit): &(usize, usize)| charged[call].1.get(limit);
        let receipts = self.call_of.iter().map(receipt).collect();
        let mut decision = binding.expect("a request has a limit");
        if self.counts {
            decision.set_counts(counts);
        }
        Ok(Outcome { decision, receipts })
    }

    /// Executes all calls, even if one fails. Their requests cannot be denied, so no receipts are
    /// needed.
    pub(super) async fn execute_all(self, deadline: Deadline) -> Result<Outcome, TransportError> {
        let mut tasks = JoinSet::new();
        let count = self.calls.len();
        let this = Arc::new(self);
        for index in 0..count {
            let this = this.clone();
            tasks.spawn(async move { this.calls[index].execute_once(deadline).await });
        }
        let (mut binding, mut failure) = (None, None);
        for result in tasks.join_all().await {
            match result {
                Ok(outcome) => binding = tighter(binding, outcome.decision),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(Outcome::of_nothing(binding.expect("a request has a limit"))),
        }
    }
}

/// The first calls, with what they have charged, which is released unless all calls have decided.
struct Charged<'a>(Vec<(&'a WaitingCall, Receipts)>);

impl Drop for Charged<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|(call, receipts)| call.release_all(receipts));
    }
}

fn tighter(binding: Option<Decision>, other: Decision) -> Option<Decision> {
    Some(binding.filter(|known| known.remaining() <= other.remaining()).unwrap_or(other))
}
