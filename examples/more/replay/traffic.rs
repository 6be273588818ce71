//! The traffic itself, without limits: keys, peaks, the busiest keys.

use super::counts::{Distinct, Distribution, HasSize, Series, Table};

/// The windows of the peaks: a second, a minute, an hour, in seconds.
pub const WINDOWS: [(&str, u64); 3] = [("second", 1), ("minute", 60), ("hour", 3_600)];

/// The requests of a key: all, and those in the current and in the busiest window of each length.
#[derive(Clone, Copy, Default)]
pub struct Requests {
    pub all: u64,
    windows: [Window; 3],
}

#[derive(Clone, Copy, Default)]
struct Window {
    number: u64,
    count: u32,
    peak: u32,
}

impl Requests {
    /// Counts a request at a second since 1970.
    fn add(&mut self, second: u64) {
        self.all += 1;
        for (window, (_, length)) in self.windows.iter_mut().zip(WINDOWS) {
            let number = second / length;
            if window.number != number {
                (window.number, window.count) = (number, 0);
            }
            window.count = window.count.saturating_add(1);
            window.peak = window.peak.max(window.count);
        }
    }
}

impl Requests {
    /// Returns the requests in the busiest window of each length.
    pub fn peaks(&self) -> [u64; 3] {
        self.windows.map(|window| window.peak.into())
    }
}

impl HasSize for Requests {
    fn size(&self) -> u64 {
        self.all
    }
}

pub struct Traffic {
    pub requests: u64,
    pub first: i64,
    pub last: i64,
    pub keys: Table<Requests>,
    pub distinct: Distinct,
    pub series: Series,
    /// The peaks of the keys that the table has forgotten.
    forgotten: [Distribution; 3],
    pub forgets: bool,
    current: (i64, u64),
    /// The busiest second, and its requests.
    pub peak: (i64, u64),
}

impl Traffic {
    pub fn new(max_keys: usize) -> Self {
        Self {
            requests: 0,
            first: 0,
            last: 0,
            keys: Table::new(max_keys),
            distinct: Distinct::new(max_keys),
            series: Series::new(),
            forgotten: [(); 3].map(|()| Distribution::new()),
            forgets: false,
            current: (0, 0),
            peak: (0, 0),
        }
    }

    pub fn add(&mut self, micros: i64, hash: u64, key: &str) {
        let second = micros.div_euclid(1_000_000);
        if self.requests == 0 {
            self.first = micros;
        }
        self.requests += 1;
        self.last = micros;
        let (forgotten, forgets) = (&mut self.forgotten, &mut self.forgets);
        let requests = self.keys.get(hash, key, |requests| {
            *forgets = true;
            for (distribution, peak) in forgotten.iter_mut().zip(requests.peaks()) {
                distribution.add(peak);
            }
        });
        requests.add(second.max(0) as u64);
        self.distinct.add(hash);
        self.series.add((second - self.first.div_euclid(1_000_000)).max(0) as u64);
        if self.current.0 != second {
            self.current = (second, 0);
        }
        self.current.1 += 1;
        if self.current.1 > self.peak.1 {
            self.peak = self.current;
        }
    }

    /// Returns how many requests each key has sent within its busiest window of each length.
    pub fn peaks(&self) -> [Distribution; 3] {
        let mut peaks = self.forgotten.clone();
        for requests in self.keys.values() {
            for (distribution, peak) in peaks.iter_mut().zip(requests.peaks()) {
                distribution.add(peak);
            }
        }
        peaks
    }
}
