//! The clock of the store, in whole microseconds: tokio's, or, with the feature `cpu-counter`, the
//! counter of the processor. Shards clamp its readings.

use std::time::Duration;

use tokio::time::Instant;

/// Counts microseconds since it was made.
pub(super) struct Clock {
    epoch: Instant,
    #[cfg(feature = "cpu-counter")]
    counter: Option<counter::Counter>,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self {
            epoch: Instant::now(),
            #[cfg(feature = "cpu-counter")]
            counter: counter::Counter::new(),
        }
    }

    /// Returns a clock that reads a counter with two ticks in a microsecond.
    #[cfg(all(test, feature = "cpu-counter"))]
    pub(super) fn of_counter(counter: quanta::Clock) -> Self {
        Self { epoch: Instant::now(), counter: Some(counter::Counter::of_mock(counter)) }
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
        let elapsed = self.epoch.elapsed();
        (elapsed.as_secs() * 1_000_000 + u64::from(elapsed.subsec_micros())) as i64
    }

    /// Returns the instant of a reading. Equal readings have equal instants, except when the two
    /// clocks have drifted apart by another second.
    pub(super) fn instant(&self, reading: f64) -> Instant {
        let drift = ((self.elapsed() - self.now()) as f64 / 1e6).round() * 1e6;
        self.epoch + Duration::from_micros((reading + drift) as u64)
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
