//! The requests to an algorithm, and its replies. Times are in microseconds.

use super::hold::{HoldReceipt, Lifetime};

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
        /// The epoch for the first hold of a key. `None` is the instant of the request.
        epoch: Option<i64>,
    },
    /// Denies the key for a time in microseconds, without a change of its count.
    Block {
        duration: i64,
    },
    /// Ends a block.
    Unblock,
    /// Reads what is left after a change that is already made. Unlike a peek, it asks for no units,
    /// so it is not denied, and a block hides nothing from it.
    Observe,
}

impl Action {
    /// Holds units until the hold ends.
    pub const HOLD: Self = Self::Hold { lifetime: Lifetime::ENDLESS, epoch: None };

    /// Returns the name of the operation, as in `Event::StoreFailed`.
    pub const fn operation(self) -> &'static str {
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
    pub fn can_be_denied(self) -> bool {
        matches!(self, Self::Check | Self::Peek | Self::Hold { .. })
    }

    /// Returns true if the action counts units when it is admitted.
    pub fn commits(self) -> bool {
        matches!(self, Self::Check | Self::Spend)
    }

    /// Returns true if the action spends units, or returns spent ones.
    pub fn spends(self) -> bool {
        matches!(self, Self::Check | Self::Spend | Self::Refund)
    }

    /// Returns true if the action holds units.
    pub fn holds(self) -> bool {
        matches!(self, Self::Hold { .. })
    }

    /// Returns true if the action may write a key that it has found without a state.
    pub fn inserts(self) -> bool {
        self.commits() || self.holds()
    }

    /// Returns true if the action changes the state of a key, if it is not denied.
    pub fn writes(self) -> bool {
        !matches!(self, Self::Peek | Self::Observe)
    }

    /// Returns true if the action is decided about like a check: it holds no units, returns none,
    /// and neither begins nor ends a block.
    #[inline]
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Check | Self::Peek | Self::Spend | Self::Observe)
    }

    /// Returns true if the action begins or ends a block.
    pub fn blocks(self) -> bool {
        matches!(self, Self::Block { .. } | Self::Unblock)
    }
}

/// Converts units of the API into those of the engine, which counts up to 2^53: a quota is smaller.
#[inline]
pub fn units(units: u64) -> i64 {
    units.min(1 << 53) as i64
}

/// A request to one limit.
#[derive(Clone, Copy, Debug)]
pub struct EngineRequest {
    pub action: Action,
    pub cost: i64,
    pub max_wait: i64,
    pub now: i64,
    /// The admission by all limits of the request, once it is resolved.
    pub admission: Option<Admission>,
    /// The time until the block of the key ends.
    pub blocked: i64,
}

/// The result of a decision: admitted or denied, and the time to wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admission {
    pub admitted: bool,
    /// The delay of an admitted request, the retry-after of a denied one: none if it is unknown,
    /// because holds have to end first.
    pub wait: Option<i64>,
}

impl EngineRequest {
    pub const fn observe(now: i64) -> Self {
        let action = Action::Observe;
        Self { action, cost: 0, max_wait: 0, now, admission: None, blocked: 0 }
    }

    /// Returns the units that are held before the request and, if it is admitted, after it.
    #[inline]
    pub(super) fn held_around(&self, held: i64) -> [i64; 2] {
        [held, if self.action.holds() { held + self.cost } else { held }]
    }

    pub(super) const fn spend(units: i64, now: i64) -> Self {
        Self { action: Action::Spend, cost: units, ..Self::observe(now) }
    }
}

/// The reply of one limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EngineReply {
    pub admitted: bool,
    /// The delay of an admitted request, the retry-after of a denied one: none if it is unknown,
    /// because holds have to end first.
    pub wait: Option<i64>,
    pub remaining: i64,
    /// The time until `remaining` grows; 0 when it cannot.
    pub replenish: i64,
    pub reset: i64,
    /// The instant at which the request proceeds, or could, by the clock of the store.
    pub instant: i64,
    /// The time until the block of the key ends; 0 without one.
    pub blocked: i64,
    /// The units of the key that are held.
    pub held: i64,
    /// The hold that an admitted request has now.
    pub hold: Option<HoldReceipt>,
}

impl EngineReply {
    /// The reply to a request that proceeds at `instant`, without a statement about its limit.
    pub const fn uncounted(instant: i64) -> Self {
        Self {
            admitted: true,
            wait: Some(0),
            remaining: 0,
            replenish: 0,
            reset: 0,
            instant,
            blocked: 0,
            held: 0,
            hold: None,
        }
    }

    /// The reply to a request that may not wait until the block of its key ends. It depends on the
    /// block alone.
    pub(super) fn denied_by_block(request: &EngineRequest, rest: i64) -> Self {
        let EngineRequest { max_wait, now, admission, .. } = *request;
        let wait = admission.map_or(Some(rest - max_wait), |all| all.wait);
        let instant = now + wait.unwrap_or(0);
        Self { admitted: false, wait, ..Self::uncounted(instant).blocked(rest) }
    }

    /// Returns the reply about a key whose block ends after `rest`.
    pub(super) fn blocked(self, rest: i64) -> Self {
        let Self { remaining, replenish, reset, .. } = self;
        let replenish = if remaining > 0 { rest } else { replenish.max(rest) };
        Self { remaining: 0, replenish, reset: reset.max(rest), blocked: rest, ..self }
    }
}

/// Units to return, which a request has spent or reserved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Release {
    /// The instant at which the request proceeded, or would have; none for units of any request.
    pub instant: Option<i64>,
    pub units: i64,
}

impl Release {
    /// Units of any request.
    pub fn grant(units: i64) -> Self {
        Self { instant: None, units }
    }
}
