//! `Outcome`: the answer of a store to a request, which is a decision and the receipts of the units
//! that the request has taken. Users see the decision alone.

use super::{Count, Decision, Policy};
use crate::algorithm::{Action, EngineReply, HoldReceipt, Kind, PerLimit};

/// A decision, and the evidence of the units that the request has taken.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub(crate) decision: Decision,
    pub(crate) receipts: Receipts,
}

/// The receipts of all limits of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipts {
    /// The receipt of each limit, if they do not differ.
    shared: Receipt,
    /// The algorithms of the first four limits, if the receipts differ in nothing else.
    algorithms: [Option<Kind>; 4],
    /// Behind a thin pointer, as every outcome carries it.
    each: Option<Box<PerLimit<Receipt>>>,
}

/// The evidence by which a store finds the units that a request has taken of one limit.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    #[inline(always)]
    pub(crate) fn new(limit: Policy<'_>, reply: EngineReply, action: Action, age: f64) -> Self {
        let receipt = Receipt::new(limit.algorithm, &reply, action);
        Self { decision: Decision::new(limit, reply, age), receipts: Receipts::shared(receipt) }
    }

    /// Returns the outcome of a request to several limits, from the reply of each of them.
    /// `binding` is the index of the limit that binds. With `counts`, the decision says what is
    /// left of each limit.
    #[inline(always)]
    pub(crate) fn of_several<'a>(
        limits: impl Iterator<Item = Policy<'a>> + Clone,
        replies: &[EngineReply],
        binding: usize,
        counts: bool,
        action: Action,
        age: f64,
    ) -> Self {
        let mut receipts = Receipts::NONE;
        for (index, (limit, reply)) in limits.clone().zip(replies).enumerate() {
            receipts.add(index, Receipt::new(limit.algorithm, reply, action));
        }
        let limit = limits.clone().nth(binding).expect("a limit binds");
        let decision = Decision::new(limit, replies[binding], age).of_limit(binding);
        let mut outcome = Self { decision, receipts };
        if counts {
            let count = |(limit, reply): (Policy<'_>, &_)| Count::new(limit.limit.name, reply);
            outcome.decision.set_counts(limits.zip(replies).map(count).collect());
        }
        outcome
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
    pub(crate) const NONE: Self = Self::shared(Receipt::None);

    /// Returns the receipts of a request that has the same one for each limit.
    #[inline]
    pub(crate) const fn shared(receipt: Receipt) -> Self {
        Self { shared: receipt, algorithms: [None; 4], each: None }
    }

    /// Adds the receipt of the next limit. Most limits have the same one, or differ in their
    /// algorithms: no allocation.
    #[inline(always)]
    fn add(&mut self, index: usize, receipt: Receipt) {
        match (&mut self.each, self.shared, receipt, self.algorithms.get_mut(index)) {
            (Some(each), ..) => each.push(receipt),
            _ if index == 0 => self.shared = receipt,
            (_, shared, ..) if shared == receipt => {}
            (_, Receipt::At(same, _), Receipt::At(instant, kind), Some(algorithm))
                if instant == same =>
            {
                *algorithm = Some(kind);
            }
            _ => {
                let before = (0..index).map(|limit| self.get(limit));
                self.each = Some(Box::new(before.chain([receipt]).collect()));
            }
        }
    }

    /// Returns whether a request may hold units.
    #[inline]
    pub(crate) fn may_hold(&self) -> bool {
        self.each.is_some() || matches!(self.shared, Receipt::Hold(..))
    }

    /// Forgets the holds, which are kept elsewhere.
    pub(crate) fn remove_holds(&mut self) {
        let each = self.each.iter_mut().flat_map(|each| each.iter_mut());
        let holds = each.chain([&mut self.shared]).filter(|it| matches!(it, Receipt::Hold(..)));
        holds.for_each(|receipt| *receipt = Receipt::None);
    }

    /// Returns the receipt of one limit, by its index in the request.
    pub(crate) fn get(&self, limit: usize) -> Receipt {
        let algorithm = self.algorithms.get(limit).copied().flatten();
        match (&self.each, self.shared, algorithm) {
            (Some(each), ..) => each[limit],
            (None, Receipt::At(instant, _), Some(algorithm)) => Receipt::At(instant, algorithm),
            (None, shared, _) => shared,
        }
    }
}

/// The receipts of limits, in the order of the request.
impl FromIterator<Receipt> for Receipts {
    fn from_iter<I: IntoIterator<Item = Receipt>>(each: I) -> Self {
        let mut receipts = Self::NONE;
        each.into_iter().enumerate().for_each(|(index, receipt)| receipts.add(index, receipt));
        receipts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_its_receipt_and_four_that_differ_in_the_algorithm_take_no_allocation() {
        let [bucket, window] =
            [Kind::TokenBucket, Kind::FixedWindow].map(|kind| Receipt::At(7, kind));
        let later = Receipt::At(8, Kind::TokenBucket);
        for (all, is_inline) in [
            (&[bucket, bucket][..], true),
            (&[bucket; 5], true),
            (&[bucket, window, window, bucket], true),
            (&[bucket, window, window, bucket, window], false),
            (&[bucket, later], false),
            (&[Receipt::None, bucket], false),
        ] {
            let receipts: Receipts = all.iter().copied().collect();
            assert_eq!(receipts.each.is_none(), is_inline, "{all:?}");
            let found: Vec<_> = (0..all.len()).map(|limit| receipts.get(limit)).collect();
            assert_eq!(found, all);
        }
    }
}
