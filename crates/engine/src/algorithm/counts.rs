//! The counts of the sub-windows of a sliding window, and their sum. Does not know where the
//! sub-windows are.

use crate::quota::MAX_UNITS;

/// The largest count. Units spent may exceed the quota; the sum of all counts stays exact.
const MAX_COUNT: i64 = MAX_UNITS as i64;

/// The counts of the sub-windows of a window and of the one before it, newest first.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    /// The sum of all counts but the last one.
    sum: i64,
    each: Box<[i64]>,
}

impl Counts {
    pub(super) fn zeros(parts: i64) -> Self {
        Self { sum: 0, each: vec![0; parts as usize + 1].into() }
    }

    /// The sub-windows of a window.
    #[inline(always)]
    pub(super) fn parts(&self) -> i64 {
        self.each.len() as i64 - 1
    }

    /// Returns a count; 0 if there is none.
    #[inline(always)]
    pub(super) fn get(&self, i: i64) -> i64 {
        self.each.get(i as usize).copied().unwrap_or(0)
    }

    /// Returns the index of the newest count that is not 0.
    #[inline(always)]
    pub(super) fn newest(&self) -> Option<i64> {
        if self.each[0] > 0 { Some(0) } else { self.newest_from(1) }
    }

    #[cold]
    fn newest_from(&self, first: i64) -> Option<i64> {
        (first..=self.parts()).find(|&i| self.get(i) > 0)
    }

    /// Returns the sum of the `parts` counts before this index.
    #[inline(always)]
    pub(super) fn sum(&self, end: i64) -> i64 {
        if end == self.parts() { self.sum } else { self.add_up(end) }
    }

    #[inline(never)]
    fn add_up(&self, end: i64) -> i64 {
        ((end - self.parts()).max(0)..end).map(|i| self.get(i)).sum()
    }

    /// Adds units to a count.
    #[inline(always)]
    pub(super) fn add(&mut self, i: i64, units: i64) {
        let count = self.get(i);
        self.change(i, units.min(MAX_COUNT - count));
    }

    /// Removes up to this number of units from a count, if it exists. Returns how many.
    pub(super) fn remove(&mut self, i: i64, units: i64) -> i64 {
        let removed = self.get(i).min(units);
        if removed > 0 {
            self.change(i, -removed);
        }
        removed
    }

    #[inline(always)]
    fn change(&mut self, i: i64, by: i64) {
        if i < self.parts() {
            self.sum += by;
        }
        self.each[i as usize] += by;
    }

    /// Moves all counts to older sub-windows, if `by` is positive. The newest ones are then 0.
    #[inline(always)]
    pub(super) fn shift(&mut self, by: i64) {
        if by <= 0 {
            return;
        }
        self.sum = self.sum(self.parts() - by);
        let len = self.each.len();
        let by = len.min(by as usize);
        self.each.copy_within(..len - by, by);
        self.each[..by].fill(0);
    }
}
