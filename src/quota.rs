//! `Quota`: the units that a window allows, and the burst. It knows no algorithm. Its text form is
//! in `quota/text.rs`.

mod text;

use std::{fmt, time::Duration};

const MICROS_PER_DAY: u64 = 86_400_000_000;
const SHORTEST_WINDOW: u64 = 1_000;
const LONGEST_WINDOW: u64 = 366 * MICROS_PER_DAY;

/// The longest time in which a full burst may refill: 100 years. It keeps every sum of a time and a
/// refill below 2^53 microseconds, where the arithmetic of the scripts is exact.
pub(crate) const LONGEST_REFILL: u64 = 36_525 * MICROS_PER_DAY;

/// The allowed usage: `limit` units per `window`, and `burst` units back to back.
///
/// `Quota::per_second(10)` is ten per second. The burst is a *total*, including the first request.
/// By default it is the limit; [`burst`](Quota::burst) sets another one. Only the token bucket and
/// the leaky bucket have a burst; the windows admit up to `limit` at once.
///
/// # A burst or a shorter window
///
/// `per_minute(60)` and `per_second(1)` allow the same rate. With the first, an idle client can
/// spend the units of a minute at once; with the second, it must spread its requests. For a page
/// that loads with twenty calls, use `per_second(1).burst(20)`.
///
/// # Examples
///
/// In a `const`, literals are checked at compile time:
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::Quota;
///
/// const LOGIN: Quota = Quota::per_minute(5);
/// const API: Quota = Quota::per_second(10).burst(20);
/// const REPORTS: Quota = Quota::new(5, Duration::from_secs(10));
///
/// assert_eq!(API.to_string(), "10/s burst 20");
/// # let _ = (LOGIN, REPORTS);
/// ```
///
/// ```compile_fail
/// # use tower_ratelimit::Quota;
/// const NOTHING: Quota = Quota::per_second(0);
/// # let _ = NOTHING;
/// ```
///
/// # Example: from configuration
///
/// ```
/// use tower_ratelimit::Quota;
///
/// let quota: Quota = "100/min burst 20".parse()?;
/// assert_eq!(quota, Quota::per_minute(100).burst(20));
/// assert_eq!("1_000 per day".parse(), Ok(Quota::per_day(1_000)));
///
/// let error = "0/s".parse::<Quota>().unwrap_err();
/// assert_eq!(error.to_string(), "quota \"0/s\": the limit is 0, but must be at least 1");
/// # Ok::<(), tower_ratelimit::config::QuotaError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u32,
    burst: u32,
    window_us: u64,
}

impl Quota {
    /// Allows `limit` units per `window`, which is 1 ms to 366 days; a fraction of a microsecond is
    /// rounded up.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or `window` is out of range: at compile time in a `const`. For numbers that
    /// are not literals, use [`try_new`](Quota::try_new).
    #[must_use]
    #[track_caller]
    pub const fn new(limit: u32, window: Duration) -> Self {
        match Self::checked(limit, window) {
            Ok(quota) => quota,
            Err(Problem::ZeroLimit) => panic!("the limit of a quota must be at least 1"),
            Err(_) => panic!("the window of a quota must be 1 ms to 366 days"),
        }
    }

    /// Does the same as [`new`](Quota::new), for numbers that are not literals.
    ///
    /// # Errors
    ///
    /// If `limit` is 0 or `window` is out of range.
    pub fn try_new(limit: u32, window: Duration) -> Result<Self, QuotaError> {
        Self::checked(limit, window).map_err(QuotaError::from)
    }

    /// Allows `limit` units per second.
    ///
    /// # Panics
    ///
    /// If `limit` is 0: at compile time in a `const`.
    #[must_use]
    #[track_caller]
    pub const fn per_second(limit: u32) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// Allows `limit` units per minute.
    ///
    /// # Panics
    ///
    /// If `limit` is 0: at compile time in a `const`.
    #[must_use]
    #[track_caller]
    pub const fn per_minute(limit: u32) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// Allows `limit` units per hour.
    ///
    /// # Panics
    ///
    /// If `limit` is 0: at compile time in a `const`.
    #[must_use]
    #[track_caller]
    pub const fn per_hour(limit: u32) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// Allows `limit` units per day of 24 hours.
    ///
    /// # Panics
    ///
    /// If `limit` is 0: at compile time in a `const`.
    #[must_use]
    #[track_caller]
    pub const fn per_day(limit: u32) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }

    /// Sets the maximum number of units that may pass back to back after idling, including the
    /// first request.
    ///
    /// # Panics
    ///
    /// If `burst` is 0, or takes more than 100 years to refill: at compile time in a `const`. For
    /// numbers that are not literals, use [`try_burst`](Quota::try_burst).
    #[must_use]
    #[track_caller]
    pub const fn burst(self, burst: u32) -> Self {
        match self.with_burst(burst) {
            Ok(quota) => quota,
            Err(Problem::ZeroBurst) => panic!("the burst of a quota must be at least 1"),
            Err(_) => panic!("the burst of a quota must refill within 100 years"),
        }
    }

    /// Does the same as [`burst`](Quota::burst), for numbers that are not literals.
    ///
    /// # Errors
    ///
    /// If `burst` is 0, or takes more than 100 years to refill.
    pub fn try_burst(self, burst: u32) -> Result<Self, QuotaError> {
        self.with_burst(burst).map_err(QuotaError::from)
    }

    /// Returns the units per window.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns the window.
    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// Returns the maximum number of units that may pass back to back.
    #[must_use]
    pub const fn burst_size(&self) -> u32 {
        self.burst
    }

    pub(crate) const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// Returns the largest overdraft that, together with the burst, refills within the longest
    /// refill.
    pub(crate) fn max_overdraft(&self) -> u32 {
        let max = u128::from(LONGEST_REFILL) * u128::from(self.limit) / u128::from(self.window_us);
        let max = max.min(u32::MAX.into()) as u32;
        max.saturating_sub(self.burst)
    }

    /// Returns a fraction of the quota, rounded down. A fraction of less than one unit in a window
    /// is one unit in a longer window.
    pub(crate) fn scaled(self, fraction: f64) -> Self {
        // The binary fraction of a third must not round a product below an integer.
        let part = |units: u32| f64::from(units) * fraction * (1.0 + 1e-12);
        let limit = part(self.limit);
        let window_us = match limit >= 1.0 {
            true => self.window_us,
            false => ((self.window_us as f64 / limit).ceil() as u64).min(LONGEST_WINDOW),
        };
        let limit = (limit as u32).max(1);
        let quota = Self { limit, burst: limit, window_us };
        match self.burst == self.limit {
            true => quota,
            false => quota.with_burst((part(self.burst) as u32).max(1)).unwrap_or(quota),
        }
    }

    const fn checked(limit: u32, window: Duration) -> Result<Self, Problem> {
        if limit == 0 {
            return Err(Problem::ZeroLimit);
        }
        let window_us = window.as_nanos().div_ceil(1_000);
        if window_us < SHORTEST_WINDOW as u128 || window_us > LONGEST_WINDOW as u128 {
            return Err(Problem::Window(window));
        }
        Ok(Self { limit, burst: limit, window_us: window_us as u64 })
    }

    const fn with_burst(self, burst: u32) -> Result<Self, Problem> {
        if burst == 0 {
            return Err(Problem::ZeroBurst);
        }
        if self.refill_us(burst as u128) > LONGEST_REFILL as u128 {
            return Err(Problem::Refill(burst));
        }
        Ok(Self { burst, ..self })
    }

    /// Returns the time in which `units` are refilled, rounded up.
    pub(crate) const fn refill_us(&self, units: u128) -> u128 {
        (units * self.window_us as u128).div_ceil(self.limit as u128)
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({self})")
    }
}

/// The error of an invalid quota: it names the input, the problem and the valid values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaError {
    input: Option<String>,
    problem: String,
}

/// The problem of a value: `const`, unlike a [`QuotaError`].
#[derive(Clone, Copy)]
enum Problem {
    ZeroLimit,
    ZeroBurst,
    Window(Duration),
    Refill(u32),
}

impl From<Problem> for QuotaError {
    fn from(problem: Problem) -> Self {
        Self { input: None, problem: problem.to_string() }
    }
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.input {
            Some(input) => write!(f, "quota {input:?}: {}", self.problem),
            None => write!(f, "quota: {}", self.problem),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroLimit => f.write_str("the limit is 0, but must be at least 1"),
            Self::ZeroBurst => f.write_str("the burst is 0, but must be at least 1"),
            Self::Window(window) => {
                write!(f, "the window is {window:?}, but must be 1 ms to 366 days")
            }
            Self::Refill(burst) => {
                write!(f, "a burst of {burst} would take more than 100 years to refill")
            }
        }
    }
}

impl std::error::Error for QuotaError {}
