//! What an algorithm promises, and its two faces: `scripts/NAME.lua` and `algorithm/NAME.rs` are
//! the same text in two languages. Both count in doubles that hold integers below 2^53, so that
//! they agree to the bit.

mod compact;
mod fixed_window;
mod leaky_bucket;
mod reservations;
mod sliding_log;
mod sliding_window;
#[cfg(test)]
mod tests;
mod together;
mod token_bucket;

use std::{fmt, str::FromStr, time::Duration};

use self::reservations::{Reserved, Waiting};
pub(crate) use self::{
    compact::{Compact, NEVER_SEEN},
    reservations::Release,
    together::together,
    token_bucket::Checked,
};
use crate::{
    error::ConfigError,
    quota::{LONGEST_REFILL, Quota},
};

/// Doubles hold every integer up to here.
const EXACT: f64 = (1_u64 << 53) as f64;

const MOST_BUCKETS: u32 = 100;

/// How requests are counted. [`token_bucket`](Algorithm::token_bucket) is a good first choice.
///
/// | algorithm | promise | state of a key | at a boundary |
/// |---|---|---|---|
/// | fixed window | `limit` in a window that opens at its first admitted request | four numbers | up to 2 x `limit` in a short time |
/// | sliding log | `limit` in *any* interval of length `window` | an entry per admitted request | exact |
/// | sliding window | the sliding log's estimate, from counters | `buckets` + 1 counters | see [`SlidingWindow`](Algorithm::SlidingWindow) |
/// | token bucket | `burst` + `overdraft` + `limit` x t / `window` in any time t | seven numbers | smooth, or see [`Refill`] |
/// | leaky bucket | departures `window` / `limit` apart, `burst` requests in the bucket | five numbers | evenly spaced |
///
/// A denied request spends nothing. All arithmetic is exact, in microseconds, and the same in memory
/// and in Redis.
///
/// # Exact rates
///
/// A bucket counts in fractions of a microsecond, so that exactly `limit` units are back after one window: with
/// `Quota::per_second(3)`, three in each second. It counts in integers up to 2^53, which is enough for all rates of 1 to 1,000
/// per second, minute, hour and day. Beyond, where `size` (the burst and the overdraft) x `window` in microseconds /
/// the greatest common divisor of `window` and `limit` is above 2^52, the rate is the closest slower one that can be
/// counted:
///
/// | `size` | rate |
/// |---|---|
/// | `limit` of up to 1,000 per second, minute, hour or day | exact |
/// | up to 140 with any `limit` and `window`; 50,000 with a day, 1.2 million with an hour, 4.5 billion with a second | exact |
/// | up to 4.5 million | exact, or slower by less than 10^-9 |
/// | more | exact, or slower by less than `size` x 2.3 x 10^-16, so by 10^-6 at most |
///
/// # Changing a quota
///
/// The next check applies the new quota to the state as it is: what was used stays used, and it is
/// given back at the new rate. The first check that finds another quota converts the state and stores it, also if it
/// denies. Requests that are waiting keep their instants, but do not return their reservation if they are dropped
/// later, except in a sliding log. A change of algorithm starts afresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// A counter for a window that opens at its first admitted request: the cheapest.
    ///
    /// Across the boundary of two windows up to twice the limit can pass in a short time. With 1000
    /// per 3 s, requests that arrive like this are all admitted, 1980 of them within 3 s:
    ///
    /// ```text
    /// second       0    1    2  |  3    4    5
    /// requests    10   10  980  | 900  100    0
    ///             window 1      | window 2
    /// ```
    FixedWindow,

    /// The instant of each admitted request: exact in any interval of length `window`, open at its
    /// old end: what was admitted exactly one window ago has left.
    ///
    /// It costs 16 to 32 bytes in memory, and 13 in Redis, for each request that it remembers: up to `limit` of them per
    /// key, and those that wait.
    /// Requests that are admitted in the same microsecond share an entry.
    /// A check reads up to as many entries as its cost, and a peek those that have left the window since the last admitted
    /// request: for limits above some thousands take a sliding window or a token bucket.
    SlidingLog,

    /// The log's estimate from counters: the counts of the sub-windows inside the window, and that of
    /// the oldest one weighted by its overlap.
    ///
    /// The estimate takes the requests of the oldest sub-window as evenly spread, and can admit more
    /// than the log. The most that was measured in a window, as a multiple of `limit`, which was 1000:
    ///
    /// | `buckets` | 1 | 4 | 10 | 60 |
    /// |---|---|---|---|---|
    /// | at random instants, one request at a time | 1.04 | 1.03 | 1.02 | 1.01 |
    /// | at random instants, 100 at a time | 1.31 | 1.20 | 1.11 | 1.09 |
    /// | by somebody who sends everything right before a sub-window ends | 2.0 | 2.0 | 2.0 | 2.0 |
    ///
    /// It can also admit less: with a limit of 1 and one bucket, one request in two windows.
    SlidingWindow {
        /// The sub-windows that a window is divided into, 1 to 100. One is the well-known form with
        /// two counters.
        buckets: u32,
    },

    /// A bucket that starts full with `burst` tokens and refills at `limit` per `window`.
    ///
    /// With continuous refill this is GCRA (the generic cell rate algorithm of the ATM Forum's
    /// Traffic Management specification): what is stored is in effect one instant, the theoretical
    /// arrival time.
    TokenBucket {
        /// How tokens come back.
        refill: Refill,
        /// The tokens that may be spent before they are there: a request is admitted when the balance
        /// is at least `max(cost - overdraft, 0)`. Those who come later wait for the debt.
        overdraft: u32,
    },

    /// A bucket with a constant outflow: a shaper. An admitted request may go on after
    /// [`Decision::delay`](crate::Decision::delay); at most `burst` are in the bucket, the one that is
    /// leaving included: so many can wait, and the next one is denied.
    ///
    /// The n-th departure of a busy period is at its start + n x `window` / `limit`, rounded up to a microsecond; so
    /// neighbours are at least `window` / `limit`, rounded down, apart per unit of cost. The last request in a
    /// full bucket waits (`burst` - 1) x `window` / `limit`: with `Quota::per_hour(100)`, 59 minutes and 24 seconds.
    LeakyBucket,
}

/// How a token bucket refills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refill {
    /// A token every `window / limit`.
    #[default]
    Continuous,
    /// `limit` tokens at once, every `window` from the first request on: in any time t at most `burst` +
    /// `overdraft` + `limit` for each window that has begun. Right before such an instant a full burst can
    /// be spent, and right after it another one.
    Interval,
}

impl Algorithm {
    /// A token bucket with continuous refill and no overdraft.
    #[must_use]
    pub const fn token_bucket() -> Self {
        Self::TokenBucket { refill: Refill::Continuous, overdraft: 0 }
    }

    /// A sliding window in its well-known form, with two counters.
    #[must_use]
    pub const fn sliding_window() -> Self {
        Self::SlidingWindow { buckets: 1 }
    }

    /// The name, as it is printed, read and used in the keys of a store.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::FixedWindow => "fixed-window",
            Self::SlidingLog => "sliding-log",
            Self::SlidingWindow { .. } => "sliding-window",
            Self::TokenBucket { .. } => "token-bucket",
            Self::LeakyBucket => "leaky-bucket",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reads a [name](Algorithm::name); the settings are the defaults.
impl FromStr for Algorithm {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        let all = [
            Self::FixedWindow,
            Self::SlidingLog,
            Self::sliding_window(),
            Self::token_bucket(),
            Self::LeakyBucket,
        ];
        all.into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| ConfigError::UnknownAlgorithm { name: name.to_owned() })
    }
}

/// What is done with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Check,
    Peek,
    Refund,
    /// Spends what is not there, too.
    Spend,
}

impl Action {
    /// Whether it needs that something is left.
    pub(crate) fn asks(self) -> bool {
        matches!(self, Self::Check | Self::Peek)
    }

    pub(crate) fn commits(self) -> bool {
        matches!(self, Self::Check | Self::Spend)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Peek => "peek",
            Self::Refund => "refund",
            Self::Spend => "spend",
        }
    }
}

/// A question to an algorithm; times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) action: Action,
    pub(crate) cost: f64,
    pub(crate) max_wait: f64,
    pub(crate) now: f64,
    /// What all limits of a request came to together.
    pub(crate) outcome: Option<Outcome>,
}

/// Whether a request is admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) admitted: bool,
    /// The delay of an admitted request, the retry-after of a denied one.
    pub(crate) wait: f64,
}

impl Ask {
    /// What of the cost must be there.
    fn needed(&self) -> f64 {
        if self.action.asks() { self.cost } else { f64::NEG_INFINITY }
    }

    /// What comes of a request that has to wait so long, which is so much too late.
    fn outcome(&self, wait: f64, late: f64) -> Outcome {
        self.outcome.unwrap_or_else(|| {
            let admitted = late == 0.0 || !self.action.asks();
            Outcome { admitted, wait: if admitted { wait } else { late } }
        })
    }
}

/// The answer, as the scripts return it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) admitted: bool,
    /// The delay of an admitted request, the retry-after of a denied one.
    pub(crate) wait: f64,
    pub(crate) remaining: f64,
    /// The time until `remaining` grows; 0 when it cannot.
    pub(crate) replenish: f64,
    pub(crate) reset: f64,
    /// The instant at which the request proceeds, or could, by the clock of the store.
    pub(crate) instant: f64,
}

/// The rate of a bucket as a fraction: `unit` parts to a unit of the quota, `tick` parts per microsecond.
///
/// It is exact if a full bucket then counts at most 2^52 parts, which leaves as many for requests that wait. Beyond, it
/// is the closest slower rate that does.
#[derive(Debug, PartialEq)]
struct Rate {
    unit: f64,
    tick: f64,
}

impl Rate {
    /// Of a bucket that can lack up to `size` units.
    fn new(quota: Quota, size: u64) -> Self {
        let (window, limit) = (quota.window_us().into(), quota.limit().into());
        let max_unit = (1 << 52) / u128::from(size);
        let (unit, tick) = closest_above(window, limit, max_unit);
        Self { unit: unit as f64, tick: tick as f64 }
    }
}

/// The closest fraction that is at least `numerator / denominator`, with a numerator of at most `max`: the fraction
/// itself in lowest terms, if that fits. A walk down the Stern-Brocot tree (Graham, Knuth, Patashnik: Concrete
/// Mathematics, 4.5).
fn closest_above(numerator: u128, denominator: u128, max: u128) -> (u128, u128) {
    let (mut below, mut above) = ((0, 1), (1, 0));
    loop {
        let gap_below = numerator * below.1 - denominator * below.0;
        let gap_above = above.0 * denominator - above.1 * numerator;
        if gap_above == 0 {
            return above;
        }
        // As many steps as keep the lower one below; then as many as keep the upper one at or above.
        let down = ((gap_below - 1) / gap_above).min((max - below.0) / above.0);
        below = (below.0 + down * above.0, below.1 + down * above.1);
        let gap_below = gap_below - down * gap_above;
        let up =
            (gap_above / gap_below).min((max - above.0).checked_div(below.0).unwrap_or(u128::MAX));
        above = (above.0 + up * below.0, above.1 + up * below.1);
        if down == 0 && up == 0 {
            return above;
        }
    }
}

/// `math.max`. There is no NaN here, which `f64::max` looks out for.
#[inline]
fn max(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// `math.min`.
#[inline]
fn min(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// `math.floor(whole / part)` of integers. Most rates count in parts of 1, and a division takes its time.
#[inline]
fn floor_div(whole: f64, part: f64) -> f64 {
    if part == 1.0 { whole } else { floor(whole / part) }
}

/// `math.ceil(whole / part)` of integers.
#[inline]
fn ceil_div(whole: f64, part: f64) -> f64 {
    if part == 1.0 { whole } else { ceil(whole / part) }
}

/// `f64::floor`, which is a call on processors that are not known to have an instruction for it.
#[inline]
fn floor(number: f64) -> f64 {
    let whole = number as i64 as f64;
    if whole > number { whole - 1.0 } else { whole }
}

#[inline]
fn ceil(number: f64) -> f64 {
    let whole = number as i64 as f64;
    if whole < number { whole + 1.0 } else { whole }
}

/// Converts a debt with its excess to another rate, as a whole number of parts and what it was rounded up by. So quotas
/// that alternate on one key do not raise the debt with each conversion.
fn convert([debt, excess]: [f64; 2], unit: f64, new_unit: f64, most_debt: f64) -> (f64, f64) {
    let exact = min((debt - excess / EXCESS_UNIT) / unit * new_unit, most_debt);
    let debt = ceil(exact);
    (debt, floor((debt - exact) * EXCESS_UNIT))
}

/// An excess is counted in so many to a part.
const EXCESS_UNIT: f64 = (1 << 24) as f64;

/// The most that a bucket may lack: exact, and back within the longest refill.
fn most_debt(period: f64, lump: f64) -> f64 {
    (floor_div(LONGEST_REFILL as f64, period) * lump).min(EXACT)
}

/// The state of one key, as an algorithm left it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum State {
    #[default]
    NeverSeen,
    FixedWindow(Option<Reserved<fixed_window::State>>),
    SlidingLog(Option<sliding_log::State>),
    SlidingWindow(Option<Reserved<sliding_window::State>>),
    TokenBucket(Option<Reserved<token_bucket::State>>),
    LeakyBucket(Option<Reserved<leaky_bucket::State>>),
}

impl State {
    pub(crate) fn is_never_seen(&self) -> bool {
        match self {
            Self::NeverSeen => true,
            Self::FixedWindow(stored) => stored.is_none(),
            Self::SlidingLog(stored) => stored.is_none(),
            Self::SlidingWindow(stored) => stored.is_none(),
            Self::TokenBucket(stored) => stored.is_none(),
            Self::LeakyBucket(stored) => stored.is_none(),
        }
    }

    /// Forgets reservations that are over, where two numbers do not tell the state anyway; for a clock that never steps back.
    pub(crate) fn forget_reservations(&mut self, now: f64) {
        if let Self::SlidingWindow(Some(it)) = self
            && it.waiting.is_over(now)
        {
            it.waiting = Waiting(None);
        }
    }

    /// The instant of the last request that waits, of those whose reservations are known.
    pub(crate) fn waited_until(&self, now: f64) -> Option<f64> {
        fn newest<S>(waiting: &Waiting<S>) -> Option<f64> {
            Some(waiting.0.as_ref()?.entries.back()?.instant)
        }
        let instant = match self {
            Self::NeverSeen => None,
            Self::FixedWindow(stored) => newest(&stored.as_ref()?.waiting),
            Self::SlidingWindow(stored) => newest(&stored.as_ref()?.waiting),
            Self::TokenBucket(stored) => newest(&stored.as_ref()?.waiting),
            Self::LeakyBucket(stored) => newest(&stored.as_ref()?.waiting),
            Self::SlidingLog(stored) => {
                let log = stored.as_ref().filter(|log| log.is_waited_for(now))?;
                log.entries.back().map(|(instant, _)| instant - log.skew)
            }
        };
        instant.filter(|instant| *instant > now)
    }
}

/// An algorithm with a quota, ready to decide.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Params {
    FixedWindow(fixed_window::Params),
    SlidingLog(sliding_log::Params),
    SlidingWindow(sliding_window::Params),
    TokenBucket(token_bucket::Params),
    LeakyBucket(leaky_bucket::Params),
}

impl Params {
    pub(crate) fn new(algorithm: Algorithm, quota: Quota) -> Result<Self, ConfigError> {
        let bucket = matches!(algorithm, Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket);
        if !bucket && quota.burst_size() != quota.limit() {
            return Err(ConfigError::BurstWithoutBucket { algorithm, quota });
        }
        Ok(match algorithm {
            Algorithm::FixedWindow => Self::FixedWindow(fixed_window::Params::new(quota)),
            Algorithm::SlidingLog => Self::SlidingLog(sliding_log::Params::new(quota)),
            Algorithm::SlidingWindow { buckets } => {
                if !(1..=MOST_BUCKETS).contains(&buckets) {
                    return Err(ConfigError::Buckets { buckets });
                }
                Self::SlidingWindow(sliding_window::Params::new(quota, buckets))
            }
            Algorithm::TokenBucket { refill, overdraft } => {
                let most = u64::from(quota.burst_size()) + u64::from(overdraft);
                if most > u32::MAX.into() || quota.refill_us(most.into()) > LONGEST_REFILL.into() {
                    return Err(ConfigError::Overdraft { overdraft, quota });
                }
                Self::TokenBucket(token_bucket::Params::new(quota, refill, overdraft))
            }
            Algorithm::LeakyBucket => Self::LeakyBucket(leaky_bucket::Params::new(quota)),
        })
    }

    /// The wait of a check that names none, in microseconds.
    pub(crate) fn own_wait(&self) -> f64 {
        match self {
            Self::LeakyBucket(params) => params.drain_time(),
            _ => 0.0,
        }
    }

    /// The longest wait, in microseconds, that may be reserved.
    pub(crate) fn longest_wait(&self) -> f64 {
        let longest = LONGEST_REFILL as f64;
        match self {
            Self::SlidingLog(params) => longest.min(params.longest_wait()),
            Self::TokenBucket(params) => longest.min(params.longest_wait()),
            Self::LeakyBucket(params) => longest.min(params.longest_wait()),
            Self::FixedWindow(_) | Self::SlidingWindow(_) => longest,
        }
    }

    pub(crate) fn step(&self, state: &mut State, ask: &Ask) -> Verdict {
        if ask.action == Action::Refund {
            self.release(state, ask.now, &[Release::grant(ask.cost)]);
        }
        macro_rules! step {
            ($params:expr, $variant:path) => {{
                // Of another algorithm, or never seen.
                if !matches!(state, $variant(_)) {
                    if !ask.action.commits() {
                        return $params.step(&mut None, ask);
                    }
                    *state = $variant(None);
                }
                let $variant(stored) = state else { unreachable!() };
                $params.step(stored, ask)
            }};
        }
        match self {
            Self::FixedWindow(params) => step!(params, State::FixedWindow),
            Self::SlidingLog(params) => step!(params, State::SlidingLog),
            Self::SlidingWindow(params) => step!(params, State::SlidingWindow),
            Self::TokenBucket(params) => step!(params, State::TokenBucket),
            Self::LeakyBucket(params) => step!(params, State::LeakyBucket),
        }
    }

    /// Returns units to the state, as the algorithm counted them.
    pub(crate) fn release(&self, state: &mut State, now: f64, releases: &[Release]) {
        match (self, state) {
            (Self::FixedWindow(_), State::FixedWindow(stored)) => {
                Reserved::release(stored, now, releases, &());
            }
            (Self::SlidingLog(_), State::SlidingLog(stored)) => {
                sliding_log::Params::release(stored, now, releases);
            }
            (Self::SlidingWindow(params), State::SlidingWindow(stored)) => {
                Reserved::release(stored, now, releases, params);
            }
            (Self::TokenBucket(params), State::TokenBucket(stored)) => {
                Reserved::release(stored, now, releases, params);
            }
            (Self::LeakyBucket(params), State::LeakyBucket(stored)) => {
                Reserved::release(stored, now, releases, params);
            }
            _ => {} // of another algorithm, or the initial state
        }
    }

    /// The place of the script among [`SCRIPTS`].
    pub(crate) fn place(&self) -> usize {
        match self {
            Self::FixedWindow(_) => 0,
            Self::SlidingLog(_) => 1,
            Self::SlidingWindow(_) => 2,
            Self::TokenBucket(_) => 3,
            Self::LeakyBucket(_) => 4,
        }
    }

    /// The parameters of the script.
    pub(crate) fn args(&self) -> Vec<f64> {
        match self {
            Self::FixedWindow(params) => params.args(),
            Self::SlidingLog(params) => params.args(),
            Self::SlidingWindow(params) => params.args(),
            Self::TokenBucket(params) => params.args(),
            Self::LeakyBucket(params) => params.args(),
        }
    }
}

/// The function of each algorithm, and the text that defines it.
pub(crate) const SCRIPTS: [(&str, &str); 5] = [
    ("fixed_window", include_str!("../scripts/fixed_window.lua")),
    ("sliding_log", include_str!("../scripts/sliding_log.lua")),
    ("sliding_window", include_str!("../scripts/sliding_window.lua")),
    ("token_bucket", include_str!("../scripts/token_bucket.lua")),
    ("leaky_bucket", include_str!("../scripts/leaky_bucket.lua")),
];

/// The script for one limit of the algorithm at this place.
pub(crate) fn script_alone(place: usize) -> String {
    let (function, source) = SCRIPTS[place];
    let alone = include_str!("../scripts/alone.lua");
    [ASK, alone, RESERVATIONS, source, "return ", function, "(KEYS[1], 1)\n"].concat()
}

/// The script for several limits of these algorithms: for each its place, as a bit.
pub(crate) fn script_together(algorithms: usize) -> String {
    let used = SCRIPTS.iter().enumerate().filter(|(place, _)| algorithms & 1 << place != 0);
    let (mut sources, mut table) = (String::new(), String::new());
    for (_, (function, source)) in used {
        sources.push_str(source);
        table.push_str(&format!("{function} = {function}, "));
    }
    let together = include_str!("../scripts/together.lua");
    let end = format!("algorithms = {{{table}}}\n{TOGETHER_END}");
    [ASK, together, RESERVATIONS, &sources, &end].concat()
}

const ASK: &str = include_str!("../scripts/ask.lua");
const RESERVATIONS: &str = include_str!("../scripts/reservations.lua");
const TOGETHER_END: &str = "decide()\nverdict[7] = binding\nreturn verdict\n";

/// A duration in microseconds, rounded up.
pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_nanos().div_ceil(1_000) as f64
}
