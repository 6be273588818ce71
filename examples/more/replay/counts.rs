//! Counters of bounded memory: distinct keys, distributions, counts over time, the largest keys.

use std::collections::{HashMap, HashSet};

use foldhash::fast::FixedState;

/// Counts distinct hashes: exactly up to a maximum, then within about 1 % (HyperLogLog).
pub struct Distinct {
    exact: HashSet<u64, FixedState>,
    max: usize,
    registers: Vec<u8>,
}

const REGISTER_BITS: u32 = 14;

impl Distinct {
    pub fn new(max: usize) -> Self {
        Self { exact: HashSet::default(), max, registers: vec![] }
    }

    pub fn add(&mut self, hash: u64) {
        if self.registers.is_empty() {
            self.exact.insert(hash);
            if self.exact.len() <= self.max {
                return;
            }
            self.registers = vec![0; 1 << REGISTER_BITS];
            for hash in std::mem::take(&mut self.exact) {
                self.register(hash);
            }
        } else {
            self.register(hash);
        }
    }

    fn register(&mut self, hash: u64) {
        // The bits of the table's hash are not independent enough.
        let hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let hash = hash ^ hash >> 32;
        let index = (hash >> (64 - REGISTER_BITS)) as usize;
        let rank = (hash << REGISTER_BITS | 1 << (REGISTER_BITS - 1)).leading_zeros() as u8 + 1;
        self.registers[index] = self.registers[index].max(rank);
    }

    /// Returns the count, and whether it is exact.
    pub fn count(&self) -> (u64, bool) {
        if self.registers.is_empty() {
            return (self.exact.len() as u64, true);
        }
        let registers = f64::from(1 << REGISTER_BITS);
        let sum: f64 = self.registers.iter().map(|rank| 0.5f64.powi((*rank).into())).sum();
        let estimate = 0.7213 / (1.0 + 1.079 / registers) * registers * registers / sum;
        let empty = self.registers.iter().filter(|rank| **rank == 0).count() as f64;
        let count = match empty > 0.0 && estimate <= 2.5 * registers {
            true => registers * (registers / empty).ln(),
            false => estimate,
        };
        (count as u64, false)
    }
}

/// A distribution, exact below 128 and within 1/64 above.
#[derive(Clone)]
pub struct Distribution {
    /// The number of values of each size, and the largest of them.
    buckets: Vec<(u64, u64)>,
    count: u64,
    pub max: u64,
}

const SUB: u32 = 6;

impl Distribution {
    pub fn new() -> Self {
        Self { buckets: vec![(0, 0); (64 - SUB as usize) << SUB], count: 0, max: 0 }
    }

    pub fn add(&mut self, value: u64) {
        let size = (64 - value.leading_zeros()).saturating_sub(SUB + 1);
        let index = ((size as usize) << SUB) + (value >> size) as usize;
        let (count, largest) = &mut self.buckets[index];
        (*count, *largest) = (*count + 1, (*largest).max(value));
        self.count += 1;
        self.max = self.max.max(value);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the value that a part of all values does not exceed, by the nearest rank.
    pub fn quantile(&self, part: f64) -> u64 {
        let rank = ((self.count as f64 * part).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (count, largest) in &self.buckets {
            seen += count;
            if seen >= rank {
                return *largest;
            }
        }
        self.max
    }
}

/// Counts over time in at most 240 bins, whose width doubles.
#[derive(Clone)]
pub struct Series {
    pub bins: Vec<u64>,
    /// The width of a bin in seconds.
    pub width: u64,
}

const BINS: usize = 240;

impl Series {
    pub fn new() -> Self {
        Self { bins: vec![], width: 1 }
    }

    /// Counts at a second since the first one.
    pub fn add(&mut self, second: u64) {
        while second / self.width >= BINS as u64 {
            self.double();
        }
        let index = (second / self.width) as usize;
        if self.bins.len() <= index {
            self.bins.resize(index + 1, 0);
        }
        self.bins[index] += 1;
    }

    fn double(&mut self) {
        self.bins = self.bins.chunks(2).map(|pair| pair.iter().sum()).collect();
        self.width *= 2;
    }

    /// Returns the counts with another series' width and length.
    pub fn like(&self, other: &Self) -> Vec<u64> {
        let mut series = self.clone();
        while series.width < other.width {
            series.double();
        }
        series.bins.resize(other.bins.len(), 0);
        series.bins
    }
}

/// Values by key in bounded memory: if there are too many, the smaller half is forgotten.
pub struct Table<T> {
    keys: HashMap<u64, (Box<str>, T), FixedState>,
    max: usize,
}

/// A value of a [`Table`].
pub trait HasSize {
    fn size(&self) -> u64;
}

impl<T: Default + HasSize> Table<T> {
    pub fn new(max: usize) -> Self {
        Self { keys: HashMap::default(), max }
    }

    /// Returns the value of a key. If others are forgotten for that, calls a function with each.
    pub fn get(&mut self, hash: u64, key: &str, mut forgotten: impl FnMut(T)) -> &mut T {
        if self.keys.len() >= self.max && !self.keys.contains_key(&hash) {
            let mut sizes: Vec<_> = self.keys.values().map(|(_, value)| value.size()).collect();
            let middle = sizes.len() / 2;
            let (_, median, _) = sizes.select_nth_unstable(middle);
            let median = *median;
            // Of keys of the same size, as many as are needed.
            let mut left = middle + 1;
            let removed = self.keys.extract_if(|_, (_, value)| {
                let is_small = value.size() <= median && left > 0;
                left -= usize::from(is_small);
                is_small
            });
            removed.for_each(|(_, (_, value))| forgotten(value));
        }
        &mut self.keys.entry(hash).or_insert_with(|| (key.into(), T::default())).1
    }

    pub fn find(&self, hash: u64) -> Option<&T> {
        self.keys.get(&hash).map(|(_, value)| value)
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.keys.values().map(|(_, value)| value)
    }

    /// Returns the largest, with their hashes and keys.
    pub fn top(&self, count: usize) -> Vec<(u64, &str, &T)> {
        let mut all: Vec<_> =
            self.keys.iter().map(|(hash, (key, value))| (*hash, &**key, value)).collect();
        all.sort_by(|(_, a, x), (_, b, y)| y.size().cmp(&x.size()).then_with(|| a.cmp(b)));
        all.truncate(count);
        all
    }
}
