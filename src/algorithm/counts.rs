//! The counts of the sub-windows of a sliding window: in four bytes each, or in eight once one of
//! them does not fit. Does not know where the sub-windows are.

use crate::quota::MAX_UNITS;

/// The largest count. Units spent may exceed the quota; the sum of all counts stays exact.
const MAX_COUNT: i64 = MAX_UNITS as i64;

/// Counts, newest first. Not smaller again until the key is counted anew: in Redis, too, a key
/// stays in one form.
#[derive(Clone, Debug)]
pub(crate) enum Counts {
    Narrow(Box<[u32]>),
    /// Boxed twice, so that the type is not larger than a narrow one.
    Wide(Box<Box<[i64]>>),
}

const _: () = assert!(size_of::<Counts>() == size_of::<Box<[u32]>>());

impl Counts {
    pub(super) fn zeros(len: usize) -> Self {
        Self::Narrow(vec![0; len].into())
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Narrow(counts) => counts.len(),
            Self::Wide(counts) => counts.len(),
        }
    }

    /// Returns a count; 0 if there is none.
    #[inline]
    pub(super) fn get(&self, i: usize) -> i64 {
        match self {
            Self::Narrow(counts) => counts.get(i).copied().unwrap_or(0).into(),
            Self::Wide(counts) => counts.get(i).copied().unwrap_or(0),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = i64> {
        (0..self.len()).map(|i| self.get(i))
    }

    /// Adds units to a count.
    #[inline]
    pub(super) fn add(&mut self, i: usize, units: i64) {
        self.set(i, (self.get(i) + units).min(MAX_COUNT));
    }

    /// Removes up to this number of units from a count, if it exists. Returns how many.
    pub(super) fn remove(&mut self, i: usize, units: i64) -> i64 {
        let count = self.get(i);
        if i < self.len() {
            self.set(i, (count - units).max(0));
        }
        count.min(units)
    }

    #[inline]
    fn set(&mut self, i: usize, count: i64) {
        match self {
            Self::Narrow(counts) if count <= u32::MAX.into() => counts[i] = count as u32,
            Self::Narrow(_) => {
                *self = Self::Wide(Box::new(self.iter().collect()));
                self.set(i, count);
            }
            Self::Wide(counts) => counts[i] = count,
        }
    }

    /// Moves all counts to older sub-windows. The newest ones are then 0.
    #[inline]
    pub(super) fn shift(&mut self, by: usize) {
        match self {
            Self::Narrow(counts) => {
                counts.rotate_right(by);
                counts[..by].fill(0);
            }
            Self::Wide(counts) => {
                counts.rotate_right(by);
                counts[..by].fill(0);
            }
        }
    }
}

impl FromIterator<i64> for Counts {
    fn from_iter<T: IntoIterator<Item = i64>>(counts: T) -> Self {
        let counts: Box<[i64]> = counts.into_iter().collect();
        match counts.iter().all(|count| *count <= u32::MAX.into()) {
            true => Self::Narrow(counts.iter().map(|count| *count as u32).collect()),
            false => Self::Wide(Box::new(counts)),
        }
    }
}

impl PartialEq for Counts {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}
