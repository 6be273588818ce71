//! The clock of the store, in whole microseconds: tokio's, or, with the feature `cpu-counter`, the
//! counter of the processor. Shards clamp its readings.

use std::{
    hash::{Hash, Hasher},
    time::Duration,
};

use tokio::time::Instant;

/// Counts microseconds since it was made.
pub(super) struct Clock {
    epoch: Instant,
    /// The nanoseconds in `epoch`, if they can be read: see [`nanos`].
    epoch_nanos: Option<i64>,
    #[cfg(feature = "cpu-counter")]
    counter: Option<counter::Counter>,
}

impl Clock {
    pub(super) fn new() -> Self {
        let epoch = Instant::now();
        Self {
            epoch,
            epoch_nanos: readable_nanos(epoch),
            #[cfg(feature = "cpu-counter")]
            counter: counter::Counter::new(),
        }
    }

    /// Returns a clock that reads a counter with two ticks in a microsecond.
    #[cfg(all(test, feature = "cpu-counter"))]
    pub(super) fn of_counter(counter: quanta::Clock) -> Self {
        let counter = Some(counter::Counter::of_mock(counter));
        Self { counter, ..Self::new() }
    }

    /// Readings of two threads can be out of order: a shard clamps them.
    #[inline]
    pub(super) fn now(&self) -> i64 {
        #[cfg(feature = "cpu-counter")]
        if let Some(counter) = &self.counter {
            return counter.now();
        }
        self.elapsed()
    }

    /// Returns the time by tokio's clock.
    #[inline]
    fn elapsed(&self) -> i64 {
        let now = Instant::now();
        if let Some(epoch) = self.epoch_nanos {
            // An instant of another runtime of a test can be earlier.
            return ((nanos(now) - epoch) / 1_000).max(0);
        }
        let elapsed = now.duration_since(self.epoch);
        (elapsed.as_secs() * 1_000_000 + u64::from(elapsed.subsec_micros())) as i64
    }

    /// Returns the instant of a reading. Equal readings have equal instants, except when the two
    /// clocks have drifted apart by another second.
    pub(super) fn instant(&self, reading: i64) -> Instant {
        let drift = ((self.elapsed() - self.now()) as f64 / 1e6).round() * 1e6;
        self.epoch + Duration::from_micros((reading + drift as i64) as u64)
    }
}

/// Returns the nanoseconds of an instant since some instant in the past.
///
/// The standard library offers only the difference of two instants, which takes a seventh of a
/// check. The hash of an instant consists of its seconds and nanoseconds, which is not documented:
/// see [`readable_nanos`].
#[inline]
fn nanos(instant: Instant) -> i64 {
    let mut parts = Parts::default();
    instant.hash(&mut parts);
    parts.seconds.wrapping_mul(1_000_000_000).wrapping_add(parts.nanos)
}

/// Returns the nanoseconds of an instant if those of later instants are later by as much.
fn readable_nanos(instant: Instant) -> Option<i64> {
    let first = nanos(instant);
    // Each bit of the seconds, with nanoseconds that carry over.
    let are_later = (0..32).all(|bit| {
        let time = Duration::new(1 << bit, 999_999_999) + Duration::from_nanos(1 << bit);
        let later = instant.checked_add(time).map(nanos);
        later.is_none_or(|later| i128::from(later) - i128::from(first) == time.as_nanos() as i128)
    });
    let half = Duration::from_nanos(500_000_000);
    (are_later && nanos(instant + half) == first + 500_000_000).then_some(first)
}

/// The parts of an instant, as its hash writes them.
#[derive(Default)]
struct Parts {
    seconds: i64,
    nanos: i64,
}

impl Hasher for Parts {
    #[inline]
    fn write_i64(&mut self, seconds: i64) {
        self.seconds = seconds;
    }

    #[inline]
    fn write_u64(&mut self, seconds: u64) {
        self.seconds = seconds as i64;
    }

    #[inline]
    fn write_u32(&mut self, nanos: u32) {
        self.nanos = nanos.into();
    }

    fn write(&mut self, _: &[u8]) {}

    fn finish(&self) -> u64 {
        0
    }
}

/// The counter of the processor, where all parts of it can be trusted.
#[cfg(feature = "cpu-counter")]
mod counter {
    use std::fs;

    pub(super) struct Counter {
        clock: quanta::Clock,
        start: u64,
        /// Microseconds in 2^64 ticks.
        rate: u64,
    }

    impl Counter {
        /// Returns `None` if a test can pause the time, which no counter notices, or if the kernel
        /// does not use the counter itself.
        pub(super) fn new() -> Option<Self> {
            if CAN_PAUSE || !is_used_by_kernel() {
                return None;
            }
            let clock = quanta::Clock::new();
            let ticks = 1 << 44;
            let rate = rate(ticks, clock.delta_as_nanos(0, ticks));
            Some(Self { start: clock.raw(), clock, rate })
        }

        #[cfg(test)]
        pub(super) fn of_mock(clock: quanta::Clock) -> Self {
            Self { start: clock.raw(), clock, rate: 1 << 63 }
        }

        #[inline]
        pub(super) fn now(&self) -> i64 {
            micros(self.clock.raw().saturating_sub(self.start), self.rate)
        }
    }

    fn rate(ticks: u64, nanos: u64) -> u64 {
        (((u128::from(nanos) << 64) / 1_000) / u128::from(ticks)) as u64
    }

    /// Rounds down, so that the result is as monotonic as the counter.
    #[inline]
    fn micros(ticks: u64, rate: u64) -> i64 {
        ((u128::from(ticks) * u128::from(rate)) >> 64) as i64
    }

    /// Returns whether the kernel takes its time from the counter that this program reads. It has
    /// then found that all processors agree about it, which those of some machines do not: a
    /// limiter would grant units whenever its thread moves. An emulated processor of another
    /// architecture sees the file of its host, which has another counter.
    fn is_used_by_kernel() -> bool {
        const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let expected = match () {
            () if cfg!(target_arch = "x86_64") => "tsc",
            () if cfg!(target_arch = "aarch64") => "arch_sys_counter",
            () => return false,
        };
        fs::read_to_string(SOURCE).is_ok_and(|source| source.trim() == expected)
    }

    /// True if tokio has its feature `test-util` in this build, with which a test can pause the
    /// time. An import of all names gives way to a function in the same block or around it only if
    /// tokio lacks the name: inside, tokio's `pause` hides the one below.
    const CAN_PAUSE: bool = {
        #[allow(unused_imports)]
        use tokio::time::*;
        returns_tokios(pause)
    };

    #[allow(dead_code)]
    fn pause() -> Absent {
        Absent
    }

    struct Absent;

    trait Pause {
        const IS_TOKIOS: bool;
    }

    impl Pause for Absent {
        const IS_TOKIOS: bool = false;
    }

    impl Pause for () {
        const IS_TOKIOS: bool = true;
    }

    const fn returns_tokios<P: Pause>(_: fn() -> P) -> bool {
        P::IS_TOKIOS
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_build_with_test_util_keeps_the_clock_that_tests_pause() {
            const { assert!(CAN_PAUSE) };
            assert!(Counter::new().is_none());
        }

        #[test]
        fn ticks_become_whole_microseconds_rounded_down() {
            // 2.5 ticks per nanosecond.
            let rate = rate(5 << 40, 2 << 40);
            for (ticks, expected) in [(0, 0), (2_499, 0), (2_501, 1), (5_001, 2)] {
                assert_eq!(micros(ticks, rate), expected);
            }
            // After a hundred years, still to the microsecond.
            let year = 365 * 86_400 * 1_000_000_u64;
            let hundred = micros(100 * year * 2_500, rate);
            assert!(hundred.abs_diff(100 * year as i64) <= 1_000, "{hundred}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nanoseconds_of_an_instant_can_be_read() {
        let now = Instant::now();
        // Elsewhere, the clock computes the difference of two instants.
        if cfg!(unix) {
            assert!(readable_nanos(now).is_some());
            for time in [0, 1, 999, 1_000, 999_999_999, 1_000_000_000, 86_400_000_000_001] {
                assert_eq!(nanos(now + Duration::from_nanos(time)) - nanos(now), time as i64);
            }
        }
    }

    #[test]
    fn both_ways_to_read_the_clock_agree() {
        let clock = Clock::new();
        let by_difference = Clock { epoch_nanos: None, ..Clock::new() };
        let drift = (clock.epoch.max(by_difference.epoch) - clock.epoch).as_micros() as i64;
        let [first, other, last] = [clock.elapsed(), by_difference.elapsed(), clock.elapsed()];
        assert!(first - 1 <= other + drift && other + drift <= last + 1);
    }
}
