//! `Quota`: the units that a window allows and the burst, or the units at a time. It knows no
//! algorithm. Its text form is in `quota/text.rs`, and its errors are in
//! `quota/error.rs`.

mod error;
mod text;

use std::{fmt, time::Duration};

pub use self::error::{QuotaError, in_code};

const MICROS_PER_DAY: u64 = 86_400_000_000;
/// Keys in Redis expire in whole milliseconds.
const SHORTEST_WINDOW: u64 = 1_000;
/// The longest year, so that a quota per year has a window.
pub const LONGEST_WINDOW: u64 = 366 * MICROS_PER_DAY;

/// The longest time in which a full burst may refill: 100 years. It keeps every sum of a time and a
/// refill below 2^53 microseconds, where the arithmetic of the scripts is exact.
pub const LONGEST_REFILL: u64 = 36_525 * MICROS_PER_DAY;

/// The largest limit and burst: 2^46 units. The sum of the counts of a window with 100 sub-windows
/// then stays below 2^53, and a bucket counts in at least 64 parts of a unit.
pub const MAX_UNITS: u64 = 1 << 46;

/// The largest limit per microsecond of the window: buckets store a rate in four bytes.
pub const MAX_PER_MICRO: u64 = u32::MAX as u64;

/// The allowed usage: `limit` units per `window`, and `burst` units at once; or `limit` units
/// [at a time](Quota::concurrent).
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
/// # Methods
///
/// | to | call |
/// |---|---|
/// | allow units per time | [`per_second`](Quota::per_second), [`per_minute`](Quota::per_minute), [`per_hour`](Quota::per_hour), [`per_day`](Quota::per_day), [`new`](Quota::new) |
/// | allow more or fewer at once | [`burst`](Quota::burst) |
/// | allow units at a time | [`concurrent`](Quota::concurrent) |
/// | read settings | [`try_new`](Quota::try_new), or `parse` a text such as `10/s burst 20` |
///
/// # Details
///
/// `Quota::per_second(10)` is ten per second. The burst is a *total*, including the first request.
/// By default it is the limit; [`burst`](Quota::burst) sets another one. Only the token bucket and
/// the leaky bucket have a burst; the windows admit up to `limit` at once.
///
/// # Large quotas
///
/// Units can be requests, tokens of a language model, bytes, or billionths of a dollar. A limit is
/// at most 70_368_744_177_664 (2^46, about 70 trillion), and at most 4_294_967_295 per microsecond
/// of its window. The burst is at most 2^46, too, and must refill within 100 years. All algorithms
/// count large quotas: see [quotas](guide/quotas/index.html#large-quotas).
///
/// # A burst or a shorter window
///
/// `per_minute(60)` and `per_second(1)` allow the same rate. With the first, an idle client can
/// spend the units of a minute at once; with the second, it must spread its requests. For a page
/// that loads with twenty calls, use `per_second(1).burst(20)`.
///
/// A long window bounds its sum, and not the speed: all of `per_day(10_000)` can be spent in a
/// minute. Add [a second limit](guide/quotas/index.html#long-windows) with a short window.
///
/// # Example: from configuration
///
/// ```
/// use tower_ratelimit::Quota;
///
/// let quota: Quota = "100/min burst 20".parse()?;
/// assert_eq!(quota, Quota::per_minute(100).burst(20));
/// assert_eq!("15_000_000_000/day".parse(), Ok(Quota::per_day(15_000_000_000)));
///
/// let error = "0/s".parse::<Quota>().unwrap_err();
/// assert_eq!(error.to_string(), "quota \"0/s\": the limit is 0, but must be at least 1");
/// # Ok::<(), tower_ratelimit::config::QuotaError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u64,
    burst: u64,
    /// 0 for a quota of concurrent units.
    window_us: u64,
}

impl Quota {
    /// Allows `limit` units per `window`, which is 1 ms to 366 days; a fraction of a microsecond is
    /// rounded up.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or [too large](Quota#large-quotas), or `window` is out of range: at compile
    /// time in a `const`. For numbers that are not literals, use [`try_new`](Quota::try_new).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    ///
    /// const QUOTA: Quota = Quota::new(5, Duration::from_secs(10));
    /// assert_eq!(QUOTA.to_string(), "5/10s");
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn new(limit: u64, window: Duration) -> Self {
        match Self::checked(limit, window) {
            Ok(quota) => quota,
            Err(Problem::ZeroLimit) => panic!("the limit of a quota must be at least 1"),
            Err(Problem::Limit { .. }) => panic!(
                "the limit of a quota must be at most 70_368_744_177_664, and at most \
                 4_294_967_295 per microsecond of the window"
            ),
            Err(_) => panic!("the window of a quota must be 1 ms to 366 days"),
        }
    }

    /// Does the same as [`new`](Quota::new), for numbers that are not literals.
    ///
    /// # Errors
    ///
    /// If `limit` is 0 or [too large](Quota#large-quotas), or `window` is out of range. The error
    /// names the largest limit for this window.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    ///
    /// let limit = "100".parse().unwrap_or(10); // of the environment, say
    /// let quota = Quota::try_new(limit, Duration::from_secs(60))?;
    /// assert_eq!(quota, Quota::per_minute(100));
    /// assert!(Quota::try_new(0, Duration::from_secs(60)).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_new(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        Self::checked(limit, window).map_err(QuotaError::from)
    }

    /// Allows `limit` units per second.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or [too large](Quota#large-quotas): at compile time in a `const`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// const QUOTA: Quota = Quota::per_second(10).burst(20);
    /// assert_eq!((QUOTA.limit(), QUOTA.burst_size()), (10, 20));
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn per_second(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// Allows `limit` units per minute.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or [too large](Quota#large-quotas): at compile time in a `const`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    ///
    /// const LOGIN: Quota = Quota::per_minute(5);
    /// assert_eq!(LOGIN.window(), Duration::from_secs(60));
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn per_minute(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// Allows `limit` units per hour.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or [too large](Quota#large-quotas): at compile time in a `const`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// const TOKENS: Quota = Quota::per_hour(100_000);
    /// assert_eq!(TOKENS.to_string(), "100000/h");
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn per_hour(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// Allows `limit` units per day of 24 hours.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or [too large](Quota#large-quotas): at compile time in a `const`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    ///
    /// const FREE: Quota = Quota::per_day(1_000);
    /// assert_eq!(FREE.window(), Duration::from_secs(86_400));
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn per_day(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }

    /// Allows `limit` units at a time: the quota of [`Algorithm::concurrency`], which has neither a
    /// window nor a burst.
    ///
    /// # Panics
    ///
    /// If `limit` is 0 or above 2^46: at compile time in a `const`. For numbers that are not
    /// literals, use [`try_concurrent`](Quota::try_concurrent).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// const STREAMS: Quota = Quota::concurrent(10);
    /// assert_eq!(STREAMS.to_string(), "10 concurrent");
    /// ```
    ///
    /// [`Algorithm::concurrency`]: crate::algorithm::Algorithm::concurrency
    #[must_use]
    #[track_caller]
    pub const fn concurrent(limit: u64) -> Self {
        match Self::checked_concurrent(limit) {
            Ok(quota) => quota,
            Err(Problem::ZeroLimit) => panic!("the limit of a quota must be at least 1"),
            Err(_) => panic!("the limit of a quota must be at most 70_368_744_177_664"),
        }
    }

    /// Does the same as [`concurrent`](Quota::concurrent), for numbers that are not literals.
    ///
    /// # Errors
    ///
    /// If `limit` is 0 or above 2^46.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// let quota = Quota::try_concurrent(10)?;
    /// assert_eq!(quota, Quota::concurrent(10));
    /// assert!(Quota::try_concurrent(0).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_concurrent(limit: u64) -> Result<Self, QuotaError> {
        Self::checked_concurrent(limit).map_err(QuotaError::from)
    }

    /// Sets the maximum number of units that may pass back to back after idling, including the
    /// first request.
    ///
    /// # Panics
    ///
    /// If `burst` is 0, takes more than 100 years to refill, or is above 2^46, or if the quota
    /// counts concurrent units: at compile time in a `const`. For numbers that are not literals,
    /// use [`try_burst`](Quota::try_burst).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// let quota = Quota::per_second(1).burst(20); // a page that loads with 20 calls
    /// assert_eq!(quota.to_string(), "1/s burst 20");
    /// ```
    #[must_use]
    #[track_caller]
    pub const fn burst(self, burst: u64) -> Self {
        match self.with_burst(burst) {
            Ok(quota) => quota,
            Err(Problem::ZeroBurst) => panic!("the burst of a quota must be at least 1"),
            Err(Problem::ConcurrentBurst) => panic!("a quota of concurrent units has no burst"),
            Err(_) => panic!(
                "the burst of a quota must be at most 70_368_744_177_664, and refill within 100 \
                 years"
            ),
        }
    }

    /// Does the same as [`burst`](Quota::burst), for numbers that are not literals.
    ///
    /// # Errors
    ///
    /// If `burst` is 0, takes more than 100 years to refill, or is above 2^46, or if the quota
    /// counts concurrent units. The error names the largest burst for this limit and window.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// let quota = Quota::per_second(1).try_burst(20)?;
    /// assert_eq!(quota.burst_size(), 20);
    /// assert!(Quota::per_second(1).try_burst(0).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_burst(self, burst: u64) -> Result<Self, QuotaError> {
        self.with_burst(burst).map_err(QuotaError::from)
    }

    /// Returns the units per window, or at a time.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// assert_eq!(Quota::per_second(10).burst(20).limit(), 10);
    /// ```
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the window: zero if the quota counts [concurrent](Quota::concurrent) units.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    ///
    /// assert_eq!(Quota::per_second(10).window(), Duration::from_secs(1));
    /// ```
    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// Returns whether the quota counts units at a time, and not per window.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// assert!(Quota::concurrent(10).is_concurrent());
    /// assert!(!Quota::per_second(10).is_concurrent());
    /// ```
    #[must_use]
    pub const fn is_concurrent(&self) -> bool {
        self.window_us == 0
    }

    /// Returns the maximum number of units that may pass back to back.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// assert_eq!(Quota::per_second(10).burst_size(), 10); // by default, the limit
    /// assert_eq!(Quota::per_second(10).burst(20).burst_size(), 20);
    /// ```
    #[must_use]
    pub const fn burst_size(&self) -> u64 {
        self.burst
    }

    pub(crate) const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// Returns the largest burst for this limit and window: it refills within the longest refill.
    const fn max_burst(&self) -> u64 {
        if self.is_concurrent() {
            return self.burst;
        }
        let max = LONGEST_REFILL as u128 * self.limit as u128 / self.window_us as u128;
        if max < MAX_UNITS as u128 { max as u64 } else { MAX_UNITS }
    }

    /// Returns the largest overdraft, which with the burst is at most the largest burst.
    pub(crate) const fn max_overdraft(&self) -> u64 {
        self.max_burst() - self.burst
    }

    const fn checked(limit: u64, window: Duration) -> Result<Self, Problem> {
        if limit == 0 {
            return Err(Problem::ZeroLimit);
        }
        let window_us = window.as_nanos().div_ceil(1_000);
        if window_us < SHORTEST_WINDOW as u128 || window_us > LONGEST_WINDOW as u128 {
            return Err(Problem::Window(window));
        }
        let window_us = window_us as u64;
        let max = Self::max_limit(window_us);
        match limit > max {
            true => Err(Problem::Limit { limit, max }),
            false => Ok(Self { limit, burst: limit, window_us }),
        }
    }

    const fn checked_concurrent(limit: u64) -> Result<Self, Problem> {
        match limit {
            0 => Err(Problem::ZeroLimit),
            _ if limit > MAX_UNITS => Err(Problem::ConcurrentLimit(limit)),
            _ => Ok(Self { limit, burst: limit, window_us: 0 }),
        }
    }

    /// Returns the largest limit for a window.
    const fn max_limit(window_us: u64) -> u64 {
        let max = window_us.saturating_mul(MAX_PER_MICRO);
        if max < MAX_UNITS { max } else { MAX_UNITS }
    }

    const fn with_burst(self, burst: u64) -> Result<Self, Problem> {
        let max = self.max_burst();
        match burst {
            _ if self.is_concurrent() => Err(Problem::ConcurrentBurst),
            0 => Err(Problem::ZeroBurst),
            _ if burst > max => Err(Problem::Burst { burst, max }),
            _ => Ok(Self { burst, ..self }),
        }
    }
}

/// Returns a fraction of the quota, rounded down. A fraction of less than one unit in a window
/// is one unit in a longer window; of less than one unit at a time, one.
pub fn scaled(quota: Quota, fraction: f64) -> Quota {
    // The binary fraction of a third must not round a product below an integer.
    let part = |units: u64| {
        let part = units as f64 * fraction;
        part + (part * 1e-12).min(1e-3)
    };
    let limit = part(quota.limit);
    let window_us = match limit >= 1.0 || quota.is_concurrent() {
        true => quota.window_us,
        false => ((quota.window_us as f64 / limit).ceil() as u64).min(LONGEST_WINDOW),
    };
    let limit = (limit as u64).max(1);
    let scaled = Quota { limit, burst: limit, window_us };
    match quota.burst == quota.limit {
        true => scaled,
        false => scaled.with_burst((part(quota.burst) as u64).max(1)).unwrap_or(scaled),
    }
}

/// Returns the quota that is nearest to these numbers.
pub fn nearest(limit: u64, window: Duration) -> Quota {
    let longest = Duration::from_micros(LONGEST_WINDOW);
    let window = window.clamp(Duration::from_micros(SHORTEST_WINDOW), longest);
    Quota::new(limit.clamp(1, Quota::max_limit(window.as_micros() as u64)), window)
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({self})")
    }
}

/// The problem of a value: `const`, unlike a [`QuotaError`].
#[derive(Clone, Copy)]
enum Problem {
    ZeroLimit,
    ZeroBurst,
    ConcurrentLimit(u64),
    ConcurrentBurst,
    Window(Duration),
    /// A limit above the largest one for its window.
    Limit {
        limit: u64,
        max: u64,
    },
    /// A burst above the largest one for its limit and window.
    Burst {
        burst: u64,
        max: u64,
    },
}

impl From<Problem> for QuotaError {
    fn from(problem: Problem) -> Self {
        Self::Invalid { message: format!("quota: {problem}") }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroLimit => f.write_str("the limit is 0, but must be at least 1"),
            Self::ZeroBurst => f.write_str("the burst is 0, but must be at least 1"),
            Self::ConcurrentLimit(limit) => {
                write!(f, "the limit is {limit}, but must be at most {MAX_UNITS}")
            }
            Self::ConcurrentBurst => {
                f.write_str("a quota of concurrent units has no burst; raise the limit instead")
            }
            Self::Window(window) => {
                write!(f, "the window is {window:?}, but must be 1 ms to 366 days")
            }
            Self::Limit { limit, max } => {
                write!(f, "the limit is {limit}, but must be at most {max} in this window")
            }
            Self::Burst { burst, max: MAX_UNITS } => {
                write!(f, "the burst is {burst}, but must be at most {MAX_UNITS}")
            }
            Self::Burst { burst, max } => write!(
                f,
                "a burst of {burst} would take more than 100 years to refill; use at most {max}"
            ),
        }
    }
}
