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
    /// The lower halves of the counts.
    lower: Box<[u32]>,
    /// The upper halves, once one of them is not 0. Boxed twice, so that most keys stay small.
    upper: Option<Box<Box<[u32]>>>,
}

impl Counts {
    pub(super) fn zeros(parts: i64) -> Self {
        Self { sum: 0, lower: vec![0; parts as usize + 1].into(), upper: None }
    }

    /// The sub-windows of a window.
    pub(super) fn parts(&self) -> i64 {
        self.lower.len() as i64 - 1
    }

    /// Returns a count; 0 if there is none.
    #[inline(always)]
    pub(super) fn get(&self, i: i64) -> i64 {
        let i = i as usize;
        match (self.lower.get(i), &self.upper) {
            (None, _) => 0,
            (Some(lower), None) => i64::from(*lower),
            (Some(lower), Some(upper)) => i64::from(upper[i]) << 32 | i64::from(*lower),
        }
    }

    /// Returns the index of the newest count that is not 0.
    #[inline(always)]
    pub(super) fn newest(&self) -> Option<i64> {
        if self.get(0) > 0 { Some(0) } else { self.newest_from(1) }
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
        self.change(i, count, (count + units).min(MAX_COUNT));
    }

    /// Removes up to this number of units from a count, if it exists. Returns how many.
    pub(super) fn remove(&mut self, i: i64, units: i64) -> i64 {
        let count = self.get(i);
        let removed = count.min(units);
        if removed > 0 {
            self.change(i, count, count - removed);
        }
        removed
    }

    #[inline(always)]
    fn change(&mut self, i: i64, before: i64, count: i64) {
        if i < self.parts() {
            self.sum += count - before;
        }
        self.lower[i as usize] = count as u32;
        let half = (count >> 32) as u32;
        if self.upper.is_some() || half > 0 {
            let zeros = || Box::new(vec![0; self.lower.len()].into());
            self.upper.get_or_insert_with(zeros)[i as usize] = half;
        }
    }

    /// Moves all counts to older sub-windows, if `by` is positive. The newest ones are then 0.
    #[inline(always)]
    pub(super) fn shift(&mut self, by: i64) {
        if by <= 0 {
            return;
        }
        self.sum = self.sum(self.parts() - by);
        let len = self.lower.len();
        let by = len.min(by as usize);
        let upper = self.upper.as_deref_mut();
        for halves in [Some(&mut self.lower), upper].into_iter().flatten() {
            halves.copy_within(..len - by, by);
            halves[..by].fill(0);
        }
    }
}
