//! The counter of the processor, as long as it agrees with tokio's clock.

use std::{
    fs,
    sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;

/// The microseconds after which the counter is compared with tokio's clock: the most that a
/// counter grants by a leap.
const INTERVAL: i64 = 100_000;
/// The microseconds after which the rate of the counter is measured first, and then those after
/// which it is compared first. The counter is not read before that: the machine may have been
/// suspended while the rate was measured.
const FIRST: i64 = 10_000;
/// The counter may differ by this part of the time since the last correction, twice as much as
/// ntpd changes the rate of the system's clock: 1 in .. A clock that is slewed faster, as by
/// chrony after a start, ends the use of the counter.
const TOLERANCE: i64 = 1_000;

/// [`Counter::corrected`] is `UNREAD - n` until tokio's clock reads n: no reading of the counter
/// follows that within the interval.
const UNREAD: i64 = -INTERVAL;
const UNKNOWN: i64 = UNREAD - FIRST;
const GIVEN_UP: i64 = i64::MIN;

/// Counts by the average rate of the ticks since the start: so one number corrects both the
/// rate and the reading.
pub(super) struct Counter {
    ticks: Ticks,
    start: u64,
    /// Microseconds in 2^64 ticks.
    rate: AtomicU64,
    /// The reading at the last correction.
    corrected: AtomicI64,
}

impl Counter {
    pub(super) fn new(ticks: Ticks, start: u64) -> Self {
        Self { ticks, start, rate: AtomicU64::new(0), corrected: AtomicI64::new(UNKNOWN) }
    }

    /// Returns `None` if the counter must be corrected first: also if it is behind the last
    /// correction, as after a step back.
    #[inline]
    pub(super) fn now(&self) -> Option<i64> {
        let now = self.reading(self.ticks.read());
        let age = now.wrapping_sub(self.corrected.load(Relaxed));
        (0..INTERVAL).contains(&age).then_some(now)
    }

    #[inline]
    fn reading(&self, ticks: u64) -> i64 {
        let ticks = u128::from(ticks.wrapping_sub(self.start));
        ((ticks * u128::from(self.rate.load(Relaxed))) >> 64) as i64
    }

    /// Returns the time by tokio's clock, and corrects the counter by it. Gives the counter up
    /// for good if it has left that clock, as when the machine was suspended.
    ///
    /// Another thread may see a new rate beside an old reading, or the reverse. It then comes
    /// here again, or its reading is as accurate as before.
    #[cold]
    #[inline(never)]
    pub(super) fn correct(&self, epoch: Instant) -> i64 {
        let last = self.corrected.load(Relaxed);
        let now = micros(epoch.elapsed());
        let since = if last < 0 { UNREAD - last } else { last };
        if now < since {
            return now;
        }
        let (ticks, instant) = self.ticks.beside_instant();
        let elapsed = instant.duration_since(epoch);
        let now = micros(elapsed);
        let tolerance = (now - since).max(INTERVAL) / TOLERANCE;
        let is_first = last == UNKNOWN;
        if !is_first && (self.reading(ticks) - now).abs() > tolerance {
            self.corrected.store(GIVEN_UP, Relaxed);
            return now;
        }
        let ticks = u128::from(ticks.wrapping_sub(self.start)).max(1);
        let rate = (elapsed.as_nanos() << 64) / (ticks * 1_000);
        self.rate.store(rate.try_into().unwrap_or(0), Relaxed);
        self.corrected.store(if is_first { UNREAD - now - FIRST } else { now }, Relaxed);
        now
    }
}

#[inline]
pub(super) fn micros(time: Duration) -> i64 {
    (time.as_secs() * 1_000_000 + u64::from(time.subsec_micros())) as i64
}

/// Reads the counter of the processor; in tests, a number.
#[derive(Default)]
pub(super) struct Ticks(#[cfg(test)] pub(super) std::sync::Arc<AtomicU64>);

impl Ticks {
    /// Returns `None` if a test can pause the time, which no counter notices, or if the kernel
    /// does not take its time from the counter.
    pub(super) fn of_processor() -> Option<Self> {
        let is_readable = cfg!(all(feature = "cpu-counter", target_arch = "x86_64"));
        (is_readable && !CAN_PAUSE && is_used_by_kernel()).then(Self::default)
    }

    #[cfg(test)]
    fn read(&self) -> u64 {
        self.0.load(Relaxed)
    }

    #[cfg(all(not(test), feature = "cpu-counter", target_arch = "x86_64"))]
    #[inline]
    fn read(&self) -> u64 {
        safe_arch::read_timestamp_counter()
    }

    /// Never called: see [`of_processor`](Self::of_processor).
    #[cfg(not(any(test, all(feature = "cpu-counter", target_arch = "x86_64"))))]
    fn read(&self) -> u64 {
        0
    }

    /// Reads the counter and tokio's clock at the same instant: the closest of some pairs, as
    /// the thread can lose its processor between the two.
    pub(super) fn beside_instant(&self) -> (u64, Instant) {
        let pair = || {
            let (before, instant) = (self.read(), Instant::now());
            (self.read().wrapping_sub(before), before, instant)
        };
        let closest = (0..3).map(|_| pair()).fold(pair(), |a, b| if b.0 < a.0 { b } else { a });
        let (width, before, instant) = closest;
        (before.wrapping_add(width / 2), instant)
    }
}

/// Returns whether the kernel takes its time from the counter that this program reads. It has
/// then found that all processors agree about it, which those of some machines do not: a
/// limiter would grant units whenever its thread moves.
fn is_used_by_kernel() -> bool {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    fs::read_to_string(SOURCE).is_ok_and(|source| source.trim() == "tsc")
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
    use std::sync::Arc;

    use tokio::time::advance;

    use super::{super::Clock, *};

    const SECOND: Duration = Duration::from_secs(1);
    const HZ: f64 = 2_593_907_123.0;

    /// A counter, and the clock of a store that reads it.
    struct Both {
        number: Arc<AtomicU64>,
        clock: Clock,
        /// The time by the counter, in seconds.
        time: f64,
    }

    impl Both {
        fn new() -> Self {
            let number = Arc::new(AtomicU64::new(1 << 63));
            let clock = Clock::of_number(&number);
            Self { number, clock, time: 0.0 }
        }

        /// Passes the time in steps, with a counter that is `ppm` faster.
        async fn pass(&mut self, time: Duration, step: Duration, ppm: f64) {
            let mut left = time;
            while !left.is_zero() {
                let step = step.min(left);
                self.leap(step.as_secs_f64() * (1.0 + ppm / 1e6));
                advance(step).await;
                self.clock.now();
                left -= step;
            }
        }

        fn leap(&mut self, seconds: f64) {
            self.time += seconds;
            let ticks = (self.time * HZ) as i64 as u64;
            self.number.store((1_u64 << 63).wrapping_add(ticks), Relaxed);
        }

        /// Returns by how many microseconds the clock is ahead of tokio's.
        fn ahead(&self) -> i64 {
            self.clock.now() - micros(self.clock.epoch.elapsed())
        }

        fn is_given_up(&self) -> bool {
            self.clock.counter.as_ref().unwrap().corrected.load(Relaxed) == GIVEN_UP
        }
    }

    #[test]
    fn a_build_with_test_util_keeps_the_clock_that_tests_pause() {
        const { assert!(CAN_PAUSE) };
        assert!(Ticks::of_processor().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_minute_measures_the_rate_of_the_counter_to_1_ppm() {
        let mut both = Both::new();
        let mut random = fastrand::Rng::with_seed(1);
        while both.clock.epoch.elapsed() < 60 * SECOND {
            both.pass(SECOND / 100, SECOND, 0.0).await;
            // Each pair of readings is up to a microsecond apart.
            let late = random.f64() / 1e6;
            both.leap(late);
            both.clock.now();
            both.leap(-late);
        }
        let rate = both.clock.counter.as_ref().unwrap().rate.load(Relaxed) as f64;
        let ppm = (rate / (2_f64.powi(64) * 1e6 / HZ) - 1.0) * 1e6;
        assert!(ppm.abs() < 1.0, "{ppm}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_clock_agrees_with_tokios_timers_after_an_hour() {
        for step in [SECOND / 20, SECOND / 3, 3_600 * SECOND] {
            let mut both = Both::new();
            both.pass(SECOND, SECOND / 50, 0.0).await;
            // NTP corrects the system's clock meanwhile.
            both.pass(3_600 * SECOND, step, 200.0).await;
            assert!(!both.is_given_up());
            both.pass(SECOND / 11, SECOND / 11, 200.0).await;
            assert!(both.ahead().abs() <= 20, "{} us", both.ahead());
            let [now, instant] = [Instant::now(), both.clock.instant(both.clock.now())];
            assert!(now.max(instant) - now.min(instant) <= 20 * SECOND / 1_000_000);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_counter_that_leaps_is_followed_for_an_interval_at_most() {
        // A suspended machine, another machine, and processors whose counters differ.
        for leap in [3_600.0, 1.0, 0.2, 0.05, 0.001, -0.001, -0.05, -0.2, -1.0, -1e4, -1e12] {
            let mut both = Both::new();
            both.pass(SECOND, SECOND / 500, 50.0).await;
            both.leap(leap);
            let mut latest = 0;
            for _ in 0..300 {
                let ahead = both.ahead();
                assert!(ahead.abs() < INTERVAL, "{leap}: {ahead}");
                latest = latest.max(both.clock.now());
                both.pass(SECOND / 1_000, SECOND, 50.0).await;
            }
            assert!(both.is_given_up(), "{leap}");
            assert_eq!(both.ahead(), 0);
            assert!(both.clock.now() > latest, "{leap}: the time stands still");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_that_was_measured_over_a_leap_is_followed_for_an_interval_at_most() {
        for leap in [1e5, 3_600.0, 1.0, 0.2, -0.2, -1.0, -59.0, -61.0, -1e4] {
            let mut both = Both::new();
            // The machine is suspended before the first request.
            advance(60 * SECOND).await;
            both.leap(60.0 + leap);
            for _ in 0..300 {
                let ahead = both.ahead();
                assert!(ahead.abs() < INTERVAL, "{leap}: {ahead}");
                both.pass(SECOND / 1_000, SECOND, 50.0).await;
            }
            assert_eq!(both.ahead(), 0, "{leap}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_counter_is_not_read_before_its_rate_is_known() {
        let mut both = Both::new();
        both.pass(SECOND / 100, SECOND / 1_000, 900_000.0).await;
        assert_eq!(both.ahead(), 0);
    }
}
