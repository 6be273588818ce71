//! The units that a bound charge has spent, so that they can be adjusted later, in any order and
//! any number of times. The calls to the store are in `charge.rs`.

use std::sync::Mutex;

use crate::{
    decision::{Decision, Receipt},
    sync::lock,
};

/// The units that each limit of a charge has spent, by decision. Clones of the charge share it.
#[derive(Debug)]
pub(super) struct Record {
    /// The decision about the charge.
    decision: Decision,
    limits: Mutex<Limits>,
}

#[derive(Debug)]
struct Limits {
    spent: Vec<Vec<Spent>>,
    /// Everything was returned: later calls of `settle` charge nothing.
    is_cancelled: bool,
}

/// Units that one decision spent and that were not returned.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spent {
    pub(super) receipt: Receipt,
    pub(super) units: u64,
}

/// Units to return of those that a decision spent.
#[derive(Debug, PartialEq)]
pub(super) struct Return {
    pub(super) spent: Spent,
    pub(super) units: u64,
}

impl Record {
    /// Creates the record of a decision about limits with these costs.
    pub(super) fn new(decision: &Decision, costs: impl Iterator<Item = u64>) -> Self {
        let spent = costs.enumerate().map(|(limit, units)| {
            let receipt = decision.receipt(limit);
            if receipt == Receipt::None { vec![] } else { vec![Spent { receipt, units }] }
        });
        let limits = Limits { spent: spent.collect(), is_cancelled: false };
        Self { decision: decision.clone(), limits: Mutex::new(limits) }
    }

    /// Returns whether this is the record of the decision.
    pub(super) fn is_about(&self, decision: &Decision) -> bool {
        self.decision.is_same_spending(decision)
    }

    /// Returns whether the decision has spent anything.
    pub(super) fn has_spent(&self) -> bool {
        self.decision.has_spent()
    }

    /// Removes the units that a limit has spent above `used`, the latest first. Returns them, and
    /// the number of units that are missing to `used`.
    ///
    /// They are removed before the store returns them: if the store fails, they must not be
    /// returned twice.
    pub(super) fn adjust(&self, limit: usize, used: u64) -> (Vec<Return>, u64) {
        let limits = &mut *lock(&self.limits);
        match limits.is_cancelled {
            true => (vec![], 0),
            false => adjust(&mut limits.spent[limit], used),
        }
    }

    /// Removes and returns all units that each limit has spent.
    pub(super) fn cancel(&self) -> Vec<Vec<Return>> {
        let limits = &mut *lock(&self.limits);
        limits.is_cancelled = true;
        limits.spent.iter_mut().map(|all| adjust(all, 0).0).collect()
    }

    /// Adds units that another decision spent. Returns them if the charge was cancelled in the
    /// meantime.
    pub(super) fn add(&self, limit: usize, spent: Spent) -> Option<Return> {
        let limits = &mut *lock(&self.limits);
        if limits.is_cancelled {
            return Some(Return { units: spent.units, spent });
        }
        limits.spent[limit].push(spent);
        None
    }
}

fn adjust(all: &mut Vec<Spent>, used: u64) -> (Vec<Return>, u64) {
    let total =
        |all: &[Spent]| all.iter().fold(0, |sum: u64, spent| sum.saturating_add(spent.units));
    let mut returns = vec![];
    while let Some(above) = total(all).checked_sub(used).filter(|above| *above > 0)
        && let Some(newest) = all.last_mut()
    {
        let units = above.min(newest.units);
        // The newest first: of what an old decision spent, more has been refilled since, and a
        // bucket would return less (law 13).
        returns.push(Return { spent: newest.clone(), units });
        newest.units -= units;
        all.pop_if(|spent| spent.units == 0);
    }
    let missing = used.saturating_sub(total(all));
    (returns, missing)
}
