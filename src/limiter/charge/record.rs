//! What a decided charge has spent by now, so that it can be adjusted later, in any order and as often as one likes.

use std::sync::Mutex;

use crate::{
    decision::{Decision, Receipt},
    sync::lock,
};

/// For each limit of a charge what was spent, and by which decisions. Shared by the clones of the charge.
#[derive(Debug)]
pub(super) struct Record {
    /// That of the decision about the charge.
    receipt: Receipt,
    limits: Mutex<Limits>,
}

#[derive(Debug)]
struct Limits {
    spent: Vec<Vec<Spent>>,
    /// All of it was returned for good: the request is not charged, whatever is settled afterwards.
    is_cancelled: bool,
}

/// Units that one decision spent, and that were not returned.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spent {
    pub(super) receipt: Receipt,
    pub(super) units: u32,
}

/// Units to return of what a decision spent.
#[derive(Debug, PartialEq)]
pub(super) struct Return {
    pub(super) spent: Spent,
    pub(super) units: u32,
}

impl Record {
    /// Of a decision about limits with these costs.
    pub(super) fn new(decision: &Decision, costs: impl Iterator<Item = u32>) -> Self {
        let spent = costs.enumerate().map(|(limit, units)| {
            let receipt = decision.receipt().of(limit);
            if receipt == Receipt::None { vec![] } else { vec![Spent { receipt, units }] }
        });
        let limits = Limits { spent: spent.collect(), is_cancelled: false };
        Self { receipt: decision.receipt().clone(), limits: Mutex::new(limits) }
    }

    /// Whether it is that of this decision.
    pub(super) fn is_of(&self, decision: &Decision) -> bool {
        self.receipt == *decision.receipt()
    }

    /// Whether the decision has spent anything.
    pub(super) fn has_spent(&self) -> bool {
        self.receipt != Receipt::None
    }

    /// Takes away what a limit has spent above `used`, the latest first. Returns that, and what is missing to `used`.
    ///
    /// It is taken away before the store is asked to return it: without an answer it must not be returned twice.
    pub(super) fn adjust(&self, limit: usize, used: u32) -> (Vec<Return>, u32) {
        let limits = &mut *lock(&self.limits);
        match limits.is_cancelled {
            true => (vec![], 0),
            false => adjust(&mut limits.spent[limit], used),
        }
    }

    /// Takes away all that each limit has spent, for good.
    pub(super) fn cancel(&self) -> Vec<Vec<Return>> {
        let limits = &mut *lock(&self.limits);
        limits.is_cancelled = true;
        limits.spent.iter_mut().map(|all| adjust(all, 0).0).collect()
    }

    /// Adds what another decision spent; returns it if the charge was cancelled meanwhile.
    pub(super) fn add(&self, limit: usize, spent: Spent) -> Option<Return> {
        let limits = &mut *lock(&self.limits);
        if limits.is_cancelled {
            return Some(Return { units: spent.units, spent });
        }
        limits.spent[limit].push(spent);
        None
    }
}

fn adjust(all: &mut Vec<Spent>, used: u32) -> (Vec<Return>, u32) {
    let total = |all: &[Spent]| all.iter().map(|it| u64::from(it.units)).sum::<u64>();
    let mut returns = vec![];
    while let Some(above) = total(all).checked_sub(used.into()).filter(|above| *above > 0)
        && let Some(newest) = all.last_mut()
    {
        let units = above.min(newest.units.into()) as u32;
        returns.push(Return { spent: newest.clone(), units });
        newest.units -= units;
        all.pop_if(|it| it.units == 0);
    }
    let missing = u64::from(used).saturating_sub(total(all));
    (returns, missing as u32)
}
