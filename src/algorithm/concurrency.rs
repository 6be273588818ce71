//! Concurrency: at most `limit` units are held at a time. Nothing is spent, so a key has no state:
//! the units are counted by `hold.rs`. Its Lua twin is `scripts/concurrency/model.lua`.

use super::{
    model::{Earliest, Model, Report},
    request::Release,
};
use crate::quota::Quota;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConcurrencyParams {
    limit: i64,
}

/// The state of a key beside what is held: none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ConcurrencyState;

impl ConcurrencyParams {
    pub(super) fn new(quota: Quota) -> Self {
        Self { limit: quota.limit() as i64 }
    }
}

impl Model for ConcurrencyState {
    type Params = ConcurrencyParams;
    type Saved = ();

    const SPENDS: bool = false;

    fn args(params: &ConcurrencyParams) -> Vec<f64> {
        vec![params.limit as f64]
    }

    fn max_cost(params: &ConcurrencyParams) -> i64 {
        params.limit
    }

    fn beside(params: &ConcurrencyParams, held: i64) -> ConcurrencyParams {
        ConcurrencyParams { limit: params.limit - held }
    }

    fn full(params: &ConcurrencyParams) -> i64 {
        params.limit
    }

    fn drain(_: i64, _: &ConcurrencyParams) -> i64 {
        0
    }

    fn initial(_: i64, _: &ConcurrencyParams) -> Self {
        Self
    }

    fn decode(_: &[u8]) -> Option<Self> {
        None
    }

    fn save(&self) {}

    fn restore(&mut self, (): ()) {}

    fn step_back(&mut self, _: i64) -> bool {
        false
    }

    fn advance(&mut self, _: i64) {}

    fn adopt(&mut self, _: i64, _: &ConcurrencyParams, (): &mut ()) -> Option<i64> {
        None
    }

    fn earliest(&self, _: i64, _: Option<i64>, _: &ConcurrencyParams) -> Earliest {
        Earliest::from(0)
    }

    fn commit(&mut self, _: i64, _: i64, _: &ConcurrencyParams) {}

    fn refund(&mut self, _: i64, _: &Release, _: &ConcurrencyParams) {}

    fn reset_after(&self, _: i64) -> i64 {
        0
    }

    fn report(&self, _: i64, _: i64, params: &ConcurrencyParams) -> Report {
        Report { remaining: params.limit, replenish: 0 }
    }
}
