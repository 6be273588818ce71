//! Late answers to requests that may wait or hold units: their callers have gone, so this module
//! releases what the requests have spent, reserved or held. The calls themselves are in `batch.rs`
//! and `call.rs`.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use tokio::sync::oneshot;

use super::{
    backend::{Backend, report_released},
    call::ScriptCall,
    transport::{Deadline, TransportError},
};
use crate::{
    decision::{Outcome, Receipts},
    keys::Key,
    observe::Observers,
    store::{
        LimitRequest, Settings, StoreRequest,
        denials::{Denials, OpenChange},
    },
};

/// The number of calls of a store that are awaited after their deadlines. Each holds a task, its
/// command and its keys, some kilobytes, for up to 30 s. Without a bound, a Redis that hangs for 30
/// s under 1,000 calls per second would hold 30,000 of them. What is spent by calls beyond the
/// bound stays counted, as it does for checks that may not wait.
const MAX_LATE: usize = 1_000;

/// The calls of a store that are awaited after their deadlines. The count guards no other memory,
/// so it is `Relaxed`; `fetch_update` alone keeps it within the bound.
#[derive(Clone)]
pub(super) struct LateCalls(Arc<AtomicUsize>, Denials);

/// One of these calls.
pub(super) struct LateCall {
    count: Arc<AtomicUsize>,
    /// A flush waits for what its answer returns.
    _open: OpenChange,
}

impl LateCalls {
    pub(super) fn new(denials: Denials) -> Self {
        Self(Arc::default(), denials)
    }

    /// Adds a call, if there are not too many.
    pub(super) fn begin(&self) -> Option<LateCall> {
        let more = |count| (count < MAX_LATE).then_some(count + 1);
        self.0.fetch_update(Relaxed, Relaxed, more).ok()?;
        Some(LateCall { count: self.0.clone(), _open: self.1.begin_call() })
    }
}

impl Drop for LateCall {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Relaxed);
    }
}

/// A call for one request that may wait or hold units: the limits with their keys and costs.
pub(super) struct WaitingCall {
    call: ScriptCall,
    limits: Vec<(Arc<Settings>, Key<'static>, u64)>,
    /// Those of each limit.
    observers: Vec<Observers>,
    backend: Backend,
    late: LateCalls,
}

impl WaitingCall {
    pub(super) fn new(backend: &Backend, request: &StoreRequest<'_>, late: LateCalls) -> Self {
        let limits = request.limits.iter().map(LimitRequest::charge).collect();
        let observers = request.limits.iter().map(|limit| limit.observers.clone()).collect();
        let call = ScriptCall::new(backend, request);
        Self { call, limits, observers, backend: backend.clone(), late }
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
        let late = call.late.begin();
        let call_deadline = if late.is_some() { deadline.lingering() } else { deadline };
        let (sender, receiver) = oneshot::channel();
        let task = call.clone();
        tokio::spawn(async move {
            let _late = late;
            // The caller was dropped before the first poll of this task: nothing is sent, so
            // nothing can be spent.
            if sender.is_closed() {
                return;
            }
            let result = task.call.execute(&task.backend.client, call_deadline).await;
            if let Err(Ok(outcome)) = sender.send(result) {
                task.release_all(&outcome.receipts);
            }
        });
        let answer = LateAnswer { receiver, call };
        let error = match deadline.wait_for(answer).await {
            // The call itself records no timeout then.
            Some(Err(error)) if call_deadline.is_shared() && error.is_timeout() => error,
            Some(result) => return result,
            None => TransportError::timeout(deadline.within()),
        };
        Err(client.record_failure(slot, deadline, error))
    }

    /// Releases what the request has spent, reserved or held in all limits.
    pub(super) fn release_all(&self, receipts: &Receipts) {
        let limits = self.limits.iter().zip(&self.observers).enumerate();
        for (index, ((settings, key, units), observers)) in limits {
            if self.backend.release_late(settings, key, *units, receipts.get(index)) {
                report_released(observers, settings.name, key, *units);
            }
        }
    }
}

/// The answer to a call in a task. If it is dropped, the call releases what it spends.
struct LateAnswer {
    receiver: oneshot::Receiver<Result<Outcome, TransportError>>,
    call: Arc<WaitingCall>,
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
        self.receiver.close();
        if let Ok(Ok(outcome)) = self.receiver.try_recv() {
            self.call.release_all(&outcome.receipts);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bounded_number_of_calls_is_awaited_and_each_that_ends_makes_room() {
        let late = LateCalls::new(Denials::new(Duration::ZERO));
        let mut calls: Vec<_> = (0..MAX_LATE).map(|_| late.begin().unwrap()).collect();
        assert!(late.begin().is_none() && late.clone().begin().is_none());
        calls.pop();
        let last = late.begin();
        assert!(last.is_some() && late.begin().is_none());
    }
}
