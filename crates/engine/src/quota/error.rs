//! Errors of quotas and algorithms. They name settings as a file does, and in a panic as code does.

use std::{error::Error, fmt};

use super::Quota;

/// An invalid quota or algorithm, or an algorithm that the quota does not fit.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::Quota;
///
/// match "0/s".parse::<Quota>() {
///     Ok(quota) => println!("{quota}"),
///     Err(error) => println!("{error}"), // quota "0/s": the limit is 0, but must be at least 1
/// }
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaError {
    /// The quota is invalid.
    #[non_exhaustive]
    Invalid {
        /// The text or the number that is invalid, and the valid values.
        message: String,
    },
    /// No algorithm has this name.
    #[non_exhaustive]
    UnknownAlgorithm {
        /// The name.
        name: String,
    },
    /// The quota has a burst, but the algorithm is not a bucket.
    #[non_exhaustive]
    BurstWithoutBucket {
        /// The name of the algorithm.
        algorithm: &'static str,
        /// The quota with the burst.
        quota: Quota,
    },
    /// The algorithm counts units at a time, and the quota units per window, or the reverse.
    #[non_exhaustive]
    Concurrent {
        /// The name of the algorithm.
        algorithm: &'static str,
        /// The quota.
        quota: Quota,
    },
    /// The number of buckets of a sliding window is not 1 to 100.
    #[non_exhaustive]
    Buckets {
        /// The number of buckets.
        buckets: u32,
    },
    /// The sum of burst and overdraft is above 2^46, or takes more than 100 years to refill.
    #[non_exhaustive]
    Overdraft {
        /// The overdraft.
        overdraft: u64,
        /// The quota.
        quota: Quota,
    },
}

/// The text: a `main` that returns the error prints it so.
impl fmt::Debug for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid { message } => f.write_str(message),
            Self::UnknownAlgorithm { name } => write!(
                f,
                "algorithm {name:?}: use fixed-window, sliding-window, sliding-log, token-bucket, \
                 leaky-bucket or concurrency"
            ),
            Self::BurstWithoutBucket { algorithm, quota } => write!(
                f,
                "quota \"{quota}\": a {algorithm} admits up to its limit at once and has no other \
                 burst; omit the burst, or use token-bucket or leaky-bucket"
            ),
            Self::Concurrent { algorithm, quota } if quota.is_concurrent() => write!(
                f,
                "quota \"{quota}\": a {algorithm} counts units per window; use the algorithm \
                 concurrency, or a quota such as 10/s"
            ),
            Self::Concurrent { quota, .. } => write!(
                f,
                "quota \"{quota}\": concurrency counts units at a time; use a quota such as \"10 \
                 concurrent\", or another algorithm"
            ),
            Self::Buckets { buckets } => {
                write!(f, "a sliding window has 1 to 100 buckets, not {buckets}")
            }
            Self::Overdraft { overdraft, quota } => write!(
                f,
                "an overdraft of {overdraft} is too large for the quota \"{quota}\": with the \
                 burst it must be at most 2^46 and refill within 100 years; use at most {}",
                quota.max_overdraft()
            ),
        }
    }
}

/// Returns the expression that makes an algorithm, by its name.
fn algorithm_in_code(algorithm: &str) -> String {
    format!("Algorithm::{}()", algorithm.replace('-', "_"))
}

/// Returns the text for a panic, which names quotas and algorithms as code does.
pub fn in_code(error: &QuotaError) -> String {
    match error {
        QuotaError::BurstWithoutBucket { algorithm, quota } => format!(
            "the quota `{}` does not fit `{}`: a window admits up to its limit at once and has \
             no other burst; omit `burst`, or use `Algorithm::token_bucket()` or \
             `Algorithm::leaky_bucket()`",
            quota.in_code(),
            algorithm_in_code(algorithm)
        ),
        QuotaError::Concurrent { algorithm, quota } if quota.is_concurrent() => format!(
            "the quota `{}` does not fit `{}`, which counts units per window; use \
             `Algorithm::concurrency()`, or a quota such as `Quota::per_second(10)`",
            quota.in_code(),
            algorithm_in_code(algorithm)
        ),
        QuotaError::Concurrent { quota, .. } => format!(
            "the quota `{}` does not fit `Algorithm::concurrency()`, which counts units at a \
             time; use a quota such as `Quota::concurrent(10)`, or another algorithm",
            quota.in_code()
        ),
        QuotaError::Overdraft { quota, .. } => {
            error.to_string().replace(&format!("\"{quota}\""), &format!("`{}`", quota.in_code()))
        }
        _ => error.to_string(),
    }
}

impl Error for QuotaError {}
