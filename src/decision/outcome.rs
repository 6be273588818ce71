//! `Outcome`: the answer of a store to a request, which is a decision and the receipts of the units
//! that the request has taken. Users see the decision alone.

use super::{Count, Decision, Policy};
use crate::algorithm::{Action, EngineReply, HoldReceipt, Kind};

/// A decision, and the evidence of the units that the request has taken.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub(crate) decision: Decision,
    pub(crate) receipts: Receipts,
}

/// The receipts of all limits of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipts {
    /// That of each limit, if they do not differ.
    shared: Receipt,
    /// Behind a thin pointer, as every outcome carries it.
    each: Option<Box<Box<[Receipt]>>>,
}

/// The evidence by which a store finds the units that a request has taken of one limit.
#[derive(Clone, Debug, PartialEq)]
pub enum Receipt {
    /// Nothing was taken.
    None,
    /// The instant at which the request proceeds, in microseconds by the clock of the store, and
    /// the algorithm. Another algorithm has not counted the request, and must return nothing.
    At(u64, Kind),
    /// The id of an acquire in the log of a foreign limiter.
    Id(u64),
    /// The units are held, by this algorithm.
    Hold(HoldReceipt, Kind),
}

impl Outcome {
    /// Returns the outcome of a request to one limit.
    #[inline]
    pub(crate) fn new(limit: Policy, reply: EngineReply, action: Action, age: f64) -> Self {
        let receipt = Receipt::new(limit.algorithm, &reply, action);
        Self { decision: Decision::new(limit, reply, age), receipts: Receipts::shared(receipt) }
    }

    /// Returns the outcome of a request to several limits, from the reply of each of them.
    /// `binding` is the index of the limit that binds.
    pub(crate) fn of_several(
        limits: impl Iterator<Item = Policy> + Clone,
        replies: &[EngineReply],
        binding: usize,
        action: Action,
        age: f64,
    ) -> Self {
        let policy = limits.clone().nth(binding).expect("a limit binds");
        let decision = Decision::new(policy, replies[binding], age);
        let all = limits.zip(replies);
        let counts = all.clone().map(|(limit, reply)| Count::new(limit.limit.name, reply));
        let decision = decision.with_counts(counts.collect());
        let each = all.map(|(limit, reply)| Receipt::new(limit.algorithm, reply, action));
        Self { decision, receipts: Receipts::new(each) }
    }

    /// Returns the outcome of a request that has taken nothing.
    pub(crate) fn of_nothing(decision: Decision) -> Self {
        Self { decision, receipts: Receipts::NONE }
    }
}

impl Receipt {
    #[inline]
    fn new(algorithm: Option<Kind>, reply: &EngineReply, action: Action) -> Self {
        match (algorithm, reply.hold) {
            _ if !reply.admitted => Self::None,
            (Some(algorithm), Some(hold)) => Self::Hold(hold, algorithm),
            (Some(algorithm), None) if action.commits() => {
                Self::At(reply.instant as u64, algorithm)
            }
            _ => Self::None,
        }
    }
}

impl Receipts {
    pub(crate) const NONE: Self = Self { shared: Receipt::None, each: None };

    /// Returns the receipts of a request that has the same one for each limit.
    #[inline]
    pub(crate) fn shared(receipt: Receipt) -> Self {
        Self { shared: receipt, each: None }
    }

    /// Returns the receipts of limits, in the order of the request.
    pub(crate) fn new(each: impl Iterator<Item = Receipt> + Clone) -> Self {
        match each.clone().next() {
            // Most limits have the same one: no allocation.
            Some(first) if each.clone().all(|other| other == first) => Self::shared(first),
            Some(_) => Self { shared: Receipt::None, each: Some(Box::new(each.collect())) },
            None => Self::NONE,
        }
    }

    /// Forgets the holds, which are kept elsewhere.
    pub(crate) fn remove_holds(&mut self) {
        let each = self.each.iter_mut().flat_map(|each| each.iter_mut());
        let holds = each.chain([&mut self.shared]).filter(|it| matches!(it, Receipt::Hold(..)));
        holds.for_each(|receipt| *receipt = Receipt::None);
    }

    /// Returns the receipt of one limit, by its index in the request.
    pub(crate) fn get(&self, limit: usize) -> &Receipt {
        self.each.as_ref().and_then(|each| each.get(limit)).unwrap_or(&self.shared)
    }
}
