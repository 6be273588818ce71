//! A request that holds units of one key. Keeping the hold is in `keeper.rs`.

use std::{sync::Arc, time::Duration};

use super::{
    batch::Queued,
    connections::{Deadline, TransportError},
    ends::OpenEnds,
    front::Front,
};
use crate::{
    decision::Outcome,
    keys::Key,
    observe::Observers,
    store::{LimitRequest, Settings},
};

/// A request that holds units of one key.
pub(super) struct SingleHold {
    front: Arc<Front>,
    settings: Arc<Settings>,
    observers: Observers,
    key: Key<'static>,
    cost: u64,
    lifetime: Option<Duration>,
    /// The ends of holds of the key that Redis may not know yet.
    open: OpenEnds,
}

impl SingleHold {
    pub(super) fn new(front: &Arc<Front>, open: OpenEnds, limit: &LimitRequest<'_>) -> Self {
        let LimitRequest { settings, observers, key, cost, hold, .. } = *limit;
        Self {
            front: front.clone(),
            settings: settings.clone(),
            observers: observers.clone(),
            key: key.clone().into_owned(),
            cost,
            lifetime: hold,
            open,
        }
    }

    pub(super) fn enter(&self, deadline: Deadline) -> Queued {
        let Self { settings, observers, key, cost, lifetime: hold, .. } = self;
        let (cost, max_wait, hold) = (*cost, 0, *hold);
        let limit = LimitRequest { settings, observers, key, cost, max_wait, hold };
        self.front.enter(&limit, deadline)
    }

    /// Waits for the decision, or for a second one.
    pub(super) async fn execute(
        &self,
        queued: Queued,
        deadline: Deadline,
    ) -> Result<Outcome, TransportError> {
        let again = async || {
            // The calls before it may have later deadlines.
            let second = deadline.wait_for(self.enter(deadline)).await;
            second.unwrap_or_else(|| Err(TransportError::timeout(deadline.within())))
        };
        self.open.execute(queued, again, deadline).await
    }
}
