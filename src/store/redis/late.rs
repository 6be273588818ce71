//! Late answers to requests that may wait or hold units: their callers have gone, so this module
//! releases what the requests have spent, reserved or held. The calls themselves are in `batch.rs`
//! and `call.rs`.

use std::{mem, sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::{
    backend::Backend,
    call::ScriptCall,
    connections::{Claim, Deadline, TransportError},
    keeper::Keeper,
    release,
};
use crate::{
    algorithm::{Release, units},
    decision::{Decision, Outcome, Receipt},
    observe::Event,
    store::{LimitRequest, RenewableHold},
};

/// What a call has charged, which is released unless the caller takes it.
pub(super) struct Charged {
    call: Arc<ScriptCall>,
    outcome: Outcome,
}

impl Charged {
    pub(super) fn decision(&self) -> &Decision {
        &self.outcome.decision
    }

    pub(super) fn take(mut self) -> Outcome {
        let taken = Outcome::of_nothing(self.outcome.decision.clone());
        mem::replace(&mut self.outcome, taken)
    }
}

impl Drop for Charged {
    fn drop(&mut self) {
        let limits = self.call.requests().enumerate();
        limits.for_each(|(index, limit)| {
            release_late(&self.call.backend, &limit, &self.outcome.receipts.get(index));
        });
    }
}

/// Executes a call in a task, which awaits the reply even if the caller has gone.
pub(super) async fn execute(
    call: &Arc<ScriptCall>,
    deadline: Deadline,
) -> Result<Charged, TransportError> {
    let late = call.backend.begin_late_call();
    let call_deadline = deadline.shared(late.is_some());
    let (sender, receiver) = oneshot::channel();
    let claim = Arc::<Claim>::default();
    let given_up = GivenUp(claim.clone());
    let (task, task_claim) = (call.clone(), claim.clone());
    tokio::spawn(async move {
        let _late = late;
        let result = task.execute(call_deadline, &task_claim).await;
        drop(sender.send(result.map(|outcome| Charged { call: task, outcome })));
    });
    let answer = async move {
        let _given_up = given_up;
        receiver.await
    };
    match deadline.wait_for(answer).await {
        Some(Ok(result)) if !result.as_ref().is_err_and(TransportError::is_timeout) => result,
        // The task is dropped only if its runtime ends: that says nothing about the server.
        Some(Err(_)) => Err(TransportError::timeout(deadline.within())),
        _ => {
            let node = call.backend.client.node_of(call.slot());
            Err(node.record_timeout(deadline, Some(&claim)))
        }
    }
}

/// The claim of a call, which is not written any more once this is dropped.
struct GivenUp(Arc<Claim>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// Releases in the background the units that a decision has spent for one limit: its caller has
/// gone.
pub(super) fn release_late(backend: &Arc<Backend>, limit: &LimitRequest<'_>, of: &Receipt) {
    let LimitRequest { settings, observers, key, cost, hold, .. } = *limit;
    let settings = settings.latest(settings.params.kind());
    match (of, hold) {
        (Receipt::At(instant, _), _) => {
            let release = Release { instant: Some(*instant as i64), units: units(cost) };
            let (change, name) =
                (backend.denials.begin_return(&settings, key), backend.key(&settings, key));
            let job = release::job(&settings.params, &name, release, None, change, || ());
            backend.client.execute_later(job);
        }
        (Receipt::Hold(receipt, _), Some(lifetime)) => {
            let guard = Keeper::of(backend).keep(RenewableHold {
                settings: settings.clone(),
                observers: observers.clone(),
                key: key.clone().into_owned(),
                units: cost,
                lifetime,
                receipt: *receipt,
                age: Duration::ZERO,
            });
            guard.end(0);
        }
        _ => return,
    }
    let limiter = settings.name;
    observers.report(&Event::Released { limiter, key, units: cost });
}
