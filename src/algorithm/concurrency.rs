//! Concurrency: at most `limit` units are held at a time. Nothing is spent, so a key has no state:
//! the units are counted by `hold.rs`. Its Lua twin is `scripts/concurrency/model.lua`.

use super::{
    arithmetic::max,
    hold::HoldReceipt,
    model::{Earliest, Model, Report},
    packed::Packed,
    request::{EngineReply, Release, units as count},
};
use crate::quota::Quota;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConcurrencyParams {
    limit: f64,
}

/// The state of a key beside what is held: none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ConcurrencyState;

impl ConcurrencyParams {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit() as f64 }
    }

    /// Holds units of a key in memory as the engine does: the fast path of `holding.rs`. Of a key
    /// that holds none, `epoch` returns the epoch. `None` if the number of units is invalid.
    #[inline]
    pub(super) fn hold(
        &self,
        packed: &mut Packed,
        units: u64,
        now: i64,
        epoch: impl FnOnce() -> i64,
    ) -> Option<EngineReply> {
        let (units, held) = (count(units), packed[1] as f64);
        if units == 0.0 || units > self.limit {
            return None;
        }
        let reply = EngineReply::uncounted(now as f64);
        let sum = held + units;
        if sum > self.limit {
            let remaining = max(self.limit - held, 0.0);
            let wait = f64::INFINITY; // until holds end
            return Some(EngineReply {
                admitted: false,
                wait,
                remaining,
                instant: wait,
                held,
                ..reply
            });
        }
        if packed[1] == 0 {
            packed[0] = epoch();
        }
        packed[1] = sum as i64;
        let hold = Some(HoldReceipt { epoch: packed[0] as f64, ends: f64::INFINITY });
        Some(EngineReply { remaining: self.limit - sum, held: sum, hold, ..reply })
    }

    /// Ends a hold as the engine does. Returns false if its units are not held.
    #[inline]
    pub(super) fn end(&self, packed: &mut Packed, receipt: HoldReceipt, units: u64) -> bool {
        let is_known = packed[1] > 0 && packed[0] as f64 == receipt.epoch;
        if is_known {
            packed[1] = (packed[1] - units as i64).max(0);
        }
        is_known
    }
}

impl Model for ConcurrencyState {
    type Params = ConcurrencyParams;
    type Saved = ();

    const SPENDS: bool = false;

    fn args(params: &ConcurrencyParams) -> Vec<f64> {
        vec![params.limit]
    }

    fn max_cost(params: &ConcurrencyParams) -> f64 {
        params.limit
    }

    fn beside(params: &ConcurrencyParams, held: f64) -> ConcurrencyParams {
        ConcurrencyParams { limit: params.limit - held }
    }

    fn initial(_: f64, _: &ConcurrencyParams) -> Self {
        Self
    }

    fn decode(_: &[u8]) -> Option<Self> {
        None
    }

    fn save(&self) {}

    fn restore(&mut self, (): ()) {}

    fn step_back(&mut self, _: f64) -> bool {
        false
    }

    fn advance(&mut self, _: f64) {}

    fn adopt(&mut self, _: f64, _: &ConcurrencyParams, (): &mut ()) -> Option<f64> {
        None
    }

    fn earliest(&self, _: f64, _: f64, _: &ConcurrencyParams) -> Earliest {
        Earliest::from(0.0)
    }

    fn commit(&mut self, _: f64, _: f64, _: &ConcurrencyParams) {}

    fn refund(&mut self, _: f64, _: &Release, _: &ConcurrencyParams) {}

    fn reset_after(&self, _: f64) -> f64 {
        0.0
    }

    fn report(&self, _: f64, _: f64, params: &ConcurrencyParams) -> Report {
        Report { remaining: params.limit, replenish: 0.0 }
    }
}
