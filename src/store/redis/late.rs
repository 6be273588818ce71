//! Late answers to requests that may wait or hold units: their callers have gone, so this module
//! releases what the requests have spent, reserved or held. The calls themselves are in `batch.rs`
//! and `call.rs`.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::sync::oneshot;

use super::{
    backend::{Backend, report_released},
    call::ScriptCall,
    connections::{Claim, Deadline, TransportError},
};
use crate::{
    decision::{Outcome, Receipts},
    keys::Key,
    observe::Observers,
    store::{LimitRequest, Settings, StoreRequest},
};

/// A call for one request that may wait or hold units: the limits with their keys and costs.
pub(super) struct WaitingCall {
    call: ScriptCall,
    limits: Vec<(Arc<Settings>, Key<'static>, u64)>,
    /// Those of each limit.
    observers: Vec<Observers>,
    backend: Arc<Backend>,
}

impl WaitingCall {
    pub(super) fn new(backend: &Arc<Backend>, request: &StoreRequest<'_>) -> Self {
        let limits = request.limits.iter().map(LimitRequest::charge).collect();
        let observers = request.limits.iter().map(|limit| limit.observers.clone()).collect();
        let call = ScriptCall::new(backend, request);
        Self { call, limits, observers, backend: backend.clone() }
    }

    /// Executes the call for a request that returns nothing.
    pub(super) async fn execute_once(&self, deadline: Deadline) -> Result<Outcome, TransportError> {
        self.call.execute(&self.backend.client, deadline).await
    }

    /// Executes the call in a task, which awaits the reply even if the caller has gone.
    pub(super) async fn execute(
        self: &Arc<Self>,
        deadline: Deadline,
    ) -> Result<Outcome, TransportError> {
        let client = self.backend.client.clone();
        let slot = client.slot_of(&self.call.limits()[0].key);
        let call = self.clone();
        let late = call.backend.begin_late_call();
        let call_deadline = deadline.shared(late.is_some());
        let (sender, receiver) = oneshot::channel();
        let claim = Arc::<Claim>::default();
        let (task, task_claim) = (call.clone(), claim.clone());
        tokio::spawn(async move {
            let _late = late;
            let WaitingCall { call, backend, .. } = &*task;
            let result = call.execute_claimed(&backend.client, call_deadline, &task_claim).await;
            if let Err(Ok(outcome)) = sender.send(result) {
                task.release_all(&outcome.receipts);
            }
        });
        let answer = LateAnswer { receiver, call, claim: claim.clone() };
        match deadline.wait_for(answer).await {
            Some(result) if !result.as_ref().is_err_and(TransportError::is_timeout) => result,
            _ => Err(client.record_timeout(slot, deadline, Some(&claim))),
        }
    }

    /// Releases what the request has spent, reserved or held in all limits.
    pub(super) fn release_all(&self, receipts: &Receipts) {
        let limits = self.limits.iter().zip(&self.observers).enumerate();
        for (index, ((settings, key, units), observers)) in limits {
            if self.backend.release_late(settings, key, *units, &receipts.get(index)) {
                report_released(observers, settings.name, key, *units);
            }
        }
    }
}

/// The answer to a call in a task. If it is dropped, the call is not written any more, and releases
/// what it spends.
struct LateAnswer {
    receiver: oneshot::Receiver<Result<Outcome, TransportError>>,
    call: Arc<WaitingCall>,
    claim: Arc<Claim>,
}

impl Future for LateAnswer {
    type Output = Result<Outcome, TransportError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.receiver).poll(cx));
        // The task is dropped only if its runtime ends.
        Poll::Ready(answer.unwrap_or_else(|_| Err(TransportError::timeout(Default::default()))))
    }
}

impl Drop for LateAnswer {
    fn drop(&mut self) {
        self.claim.give_up();
        self.receiver.close();
        if let Ok(Ok(outcome)) = self.receiver.try_recv() {
            self.call.release_all(&outcome.receipts);
        }
    }
}
