//! Requests of the engine to a store in memory, by a clock that a test controls.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::time::advance;

use crate::{
    algorithm::{Algorithm, EngineReply, EngineRequest, Params},
    decision::{Outcome, Receipt, Source},
    keys::Key,
    quota::Quota,
    store::{LimitRequest, MemoryStore, Reporting, Settings, StoreRequest},
};

/// A clock of the store that a test controls.
pub(super) enum TestClock {
    Tokio,
    /// The counter of the processor.
    Counter(Arc<AtomicU64>),
}

impl TestClock {
    pub(super) fn both() -> [Self; 2] {
        [Self::Tokio, Self::Counter(Arc::default())]
    }

    pub(super) fn store(&self) -> MemoryStore {
        match self {
            Self::Tokio => MemoryStore::new(),
            Self::Counter(counter) => MemoryStore::with_counter(counter),
        }
    }

    /// Advances the clock. The time of tokio, by which requests wait, goes on with the counter.
    pub(super) fn advance(&self, duration: Duration) {
        if let Self::Counter(counter) = self {
            counter.fetch_add(2 * duration.as_micros() as u64, Ordering::Relaxed);
        }
        now_or_never(advance(duration));
    }
}

pub(super) fn decide(
    store: &MemoryStore,
    settings: &Arc<Settings>,
    key: &str,
    request: EngineRequest,
) -> EngineReply {
    let (key, cost) = (&Key::from(key), request.cost as u64);
    let limits = &[LimitRequest {
        settings,
        observers: &Default::default(),
        key,
        cost,
        max_wait: request.max_wait as u64,
        hold: None,
    }];
    let request = StoreRequest::new(request.action, limits, Reporting::Nothing);
    reply_of(store.decide_now(&request).unwrap())
}

pub(super) fn settings(params: Params) -> Arc<Settings> {
    let (algorithm, quota) = (Algorithm::token_bucket(), Quota::per_second(1));
    Arc::new(Settings::new("default", algorithm, quota, params, Source::Store))
}

pub(super) fn reply_of(outcome: Outcome) -> EngineReply {
    let Outcome { decision, receipts } = outcome;
    let micros = |time: Duration| time.as_micros() as i64;
    EngineReply {
        admitted: decision.is_allowed(),
        wait: Some(micros(decision.retry_after().unwrap_or(decision.delay()))),
        remaining: decision.remaining() as i64,
        replenish: micros(decision.replenish_after()),
        reset: micros(decision.reset_after()),
        instant: match receipts.get(0) {
            Receipt::At(instant, _) => instant as i64,
            _ => 0,
        },
        blocked: micros(decision.block_rest()),
        held: 0,
        hold: None,
    }
}

/// Polls a future that is ready as soon as the clock has moved.
pub(super) fn now_or_never<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..10 {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
    panic!("the future waits");
}
