//! The requests to an algorithm, and its replies. Times are in microseconds.

use super::{
    arithmetic::max,
    hold::{HoldReceipt, Lifetime},
};

/// The action of a request on the state of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    Check,
    Peek,
    Refund,
    /// Spends units, also more than are left.
    Spend,
    /// Holds units, if they are left: their use is known later.
    Hold {
        lifetime: Lifetime,
        /// That of the first hold of a key; the instant, if there is none.
        epoch: Option<u64>,
    },
    /// Denies the key for a time in microseconds, without a change of its count.
    Block {
        duration: u64,
    },
    /// Ends a block.
    Unblock,
    /// Reads what is left after a change that is already made. Unlike a peek, it asks for no units,
    /// so it is not denied, and a block hides nothing from it.
    Observe,
}

impl Action {
    /// Returns the name of the operation, as in [`Event::StoreFailed`](crate::observe::Event).
    pub(crate) const fn operation(self) -> &'static str {
        match self {
            Self::Check | Self::Hold { .. } => "check",
            Self::Peek | Self::Observe => "peek",
            Self::Spend => "spend",
            Self::Refund => "refund",
            Self::Block { .. } => "block",
            Self::Unblock => "unblock",
        }
    }

    /// Returns true if the action can be denied.
    pub(crate) fn can_be_denied(self) -> bool {
        matches!(self, Self::Check | Self::Peek | Self::Hold { .. })
    }

    /// Returns true if the action counts units when it is admitted.
    pub(crate) fn commits(self) -> bool {
        matches!(self, Self::Check | Self::Spend)
    }

    /// Returns true if the action spends units, or returns spent ones.
    pub(crate) fn spends(self) -> bool {
        matches!(self, Self::Check | Self::Spend | Self::Refund)
    }

    /// Returns true if the action may write a key that it has found without a state.
    pub(crate) fn inserts(self) -> bool {
        self.commits() || matches!(self, Self::Hold { .. })
    }

    /// Returns true if the action begins or ends a block.
    pub(crate) fn blocks(self) -> bool {
        matches!(self, Self::Block { .. } | Self::Unblock)
    }
}

/// Converts units of the API into those of the engine, which counts up to 2^53: a quota is smaller.
#[inline]
pub(crate) fn units(units: u64) -> f64 {
    units.min(1 << 53) as f64
}

/// A request to one limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineRequest {
    pub(crate) action: Action,
    pub(crate) cost: f64,
    pub(crate) max_wait: f64,
    pub(crate) now: f64,
    /// The admission by all limits of the request, once it is resolved.
    pub(crate) admission: Option<Admission>,
    /// The time until the block of the key ends.
    pub(crate) blocked: f64,
}

/// The result of a decision: admitted or denied, and the time to wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Admission {
    pub(crate) admitted: bool,
    /// The delay of an admitted request, the retry-after of a denied one.
    pub(crate) wait: f64,
}

impl EngineRequest {
    pub(crate) const fn observe(now: f64) -> Self {
        let action = Action::Observe;
        Self { action, cost: 0.0, max_wait: 0.0, now, admission: None, blocked: 0.0 }
    }

    /// The units that must be left.
    pub(super) fn needed(&self) -> f64 {
        if self.action.can_be_denied() { self.cost } else { f64::NEG_INFINITY }
    }

    /// Resolves the admission of a request whose wait exceeds the longest one by `excess`.
    pub(super) fn admission(&self, wait: f64, excess: f64) -> Admission {
        self.admission.unwrap_or_else(|| {
            let admitted = excess == 0.0 || !self.action.can_be_denied();
            Admission { admitted, wait: if admitted { wait } else { excess } }
        })
    }
}

/// The reply of one limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EngineReply {
    pub(crate) admitted: bool,
    /// The delay of an admitted request, the retry-after of a denied one: infinite if it is
    /// unknown, because holds have to end first.
    pub(crate) wait: f64,
    pub(crate) remaining: f64,
    /// The time until `remaining` grows; 0 when it cannot.
    pub(crate) replenish: f64,
    pub(crate) reset: f64,
    /// The instant at which the request proceeds, or could, by the clock of the store.
    pub(crate) instant: f64,
    /// The time until the block of the key ends; 0 without one.
    pub(crate) blocked: f64,
    /// The units of the key that are held.
    pub(crate) held: f64,
    /// The hold that an admitted request has now.
    pub(crate) hold: Option<HoldReceipt>,
}

impl EngineReply {
    /// The reply to a request that proceeds at `instant`, without a statement about its limit.
    pub(crate) const fn uncounted(instant: f64) -> Self {
        Self {
            admitted: true,
            wait: 0.0,
            remaining: 0.0,
            replenish: 0.0,
            reset: 0.0,
            instant,
            blocked: 0.0,
            held: 0.0,
            hold: None,
        }
    }

    /// The reply to a request that may not wait until the block of its key ends. It depends on the
    /// block alone.
    pub(super) fn denied_by_block(request: &EngineRequest, rest: f64) -> Self {
        let EngineRequest { max_wait, now, admission, .. } = *request;
        let wait = admission.map_or(rest - max_wait, |all| all.wait);
        Self { admitted: false, wait, ..Self::uncounted(now + wait).blocked(rest) }
    }

    /// Returns the reply about a key whose block ends after `rest`.
    pub(super) fn blocked(self, rest: f64) -> Self {
        let Self { remaining, replenish, reset, .. } = self;
        let replenish = if remaining > 0.0 { rest } else { max(replenish, rest) };
        Self { remaining: 0.0, replenish, reset: max(reset, rest), blocked: rest, ..self }
    }
}

/// Units to return, which a request has spent or reserved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Release {
    /// The instant at which the request proceeded, or would have; none for units of any request.
    pub(crate) instant: Option<f64>,
    pub(crate) units: f64,
}

impl Release {
    /// Units of any request.
    pub(crate) fn grant(units: f64) -> Self {
        Self { instant: None, units }
    }
}
