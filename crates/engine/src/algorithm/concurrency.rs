//! Concurrency: at most `limit` units are held at a time. Nothing is spent, so a key has no state:
//! the units are counted by `hold.rs`. Its Lua twin is `scripts/concurrency/model.lua`.

use super::{
    model::{Earliest, Model, Parameters, Report},
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

impl Parameters for ConcurrencyParams {
    fn args(&self) -> Vec<f64> {
        vec![self.limit as f64]
    }

    fn full(&self) -> i64 {
        self.limit
    }

    fn drain(&self, _: i64) -> i64 {
        0
    }

    fn beside(&self, held: i64) -> Self {
        Self { limit: self.limit - held }
    }
}

impl Model for ConcurrencyState {
    type Params = ConcurrencyParams;
    type Saved = ();

    const SPENDS: bool = false;

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
        Earliest { wait: 0, full: 0 }
    }

    fn commit(&mut self, _: i64, _: i64, _: &ConcurrencyParams) {}

    fn refund(&mut self, _: i64, _: &Release, _: &ConcurrencyParams) {}

    fn reset_after(&self, _: i64) -> i64 {
        0
    }

    fn report(&self, _: i64, _: (i64, i64), params: &ConcurrencyParams) -> Report {
        Report { remaining: params.limit, replenish: 0 }
    }
}
