//! Concurrency: at most `limit` units are held at a time. Nothing is spent, so a key has no state:
//! the units are counted by `hold.rs`. Its Lua twin is `scripts/concurrency/model.lua`.

use super::{
    model::{Earliest, Model, Report},
    request::Release,
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

    fn adopt(&mut self, _: f64, _: &ConcurrencyParams, (): &mut ()) -> bool {
        false
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
