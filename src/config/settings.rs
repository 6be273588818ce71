//! The fields of one limit in a file, and the check that they do not conflict. It knows no file
//! format.

use super::limits::Limit;
use crate::{
    algorithm::{Algorithm, Refill},
    quota::{ConfigError, Quota},
};

pub(super) const FIELDS: &[&str] = &["algorithm", "quota", "buckets", "refill", "overdraft"];

/// A field of a limit, in the order of [`FIELDS`].
#[derive(Clone, Copy)]
pub(super) enum Field {
    Algorithm,
    Quota,
    Buckets,
    Refill,
    Overdraft,
}

impl Field {
    pub(super) const ALL: [Self; 5] =
        [Self::Algorithm, Self::Quota, Self::Buckets, Self::Refill, Self::Overdraft];

    pub(super) fn name(self) -> &'static str {
        FIELDS[self as usize]
    }

    /// Returns the algorithm with this setting; `None` if all algorithms have it.
    fn only_of(self) -> Option<Algorithm> {
        match self {
            Self::Algorithm | Self::Quota => None,
            Self::Buckets => Some(Algorithm::sliding_window()),
            Self::Refill | Self::Overdraft => Some(Algorithm::token_bucket()),
        }
    }
}

/// The fields of a limit that were read so far.
#[derive(Default)]
pub(super) struct Settings {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) quota: Option<Quota>,
    pub(super) buckets: Option<u32>,
    pub(super) refill: Option<Refill>,
    pub(super) overdraft: Option<u64>,
}

impl Settings {
    pub(super) fn has(&self, field: Field) -> bool {
        match field {
            Field::Algorithm => self.algorithm.is_some(),
            Field::Quota => self.quota.is_some(),
            Field::Buckets => self.buckets.is_some(),
            Field::Refill => self.refill.is_some(),
            Field::Overdraft => self.overdraft.is_some(),
        }
    }

    /// Reports the first error in the fields that were read so far.
    pub(super) fn check(&self) -> Result<(), String> {
        let algorithm = self.algorithm()?;
        if let Some(buckets) = self.buckets {
            let any = Quota::per_second(1);
            Limit::try_new(Algorithm::SlidingWindow { buckets }, any).map_err(text)?;
        }
        if let (Some(algorithm), Some(quota)) = (algorithm, self.quota) {
            Limit::try_new(algorithm, quota).map_err(text)?;
        }
        Ok(())
    }

    /// Returns the algorithm, if it is known, with its settings so far.
    fn algorithm(&self) -> Result<Option<Algorithm>, String> {
        let Some(algorithm) = self.algorithm else { return Ok(None) };
        for field in Field::ALL.into_iter().filter(|field| self.has(*field)) {
            if let Some(other) = field.only_of().filter(|other| other.name() != algorithm.name()) {
                let field = field.name();
                return Err(format!(
                    "`{field}` is not a setting of {algorithm}; remove it, or use {other}"
                ));
            }
        }
        Ok(Some(match algorithm {
            Algorithm::SlidingWindow { buckets } => {
                Algorithm::SlidingWindow { buckets: self.buckets.unwrap_or(buckets) }
            }
            Algorithm::TokenBucket { refill, overdraft } => Algorithm::TokenBucket {
                refill: self.refill.unwrap_or(refill),
                overdraft: self.overdraft.unwrap_or(overdraft),
            },
            algorithm => algorithm,
        }))
    }

    pub(super) fn limit(&self) -> Result<Limit, String> {
        let algorithm =
            self.algorithm()?.ok_or("missing field `algorithm`, such as \"token-bucket\"")?;
        let quota = self.quota.ok_or("missing field `quota`, such as \"10/s\"")?;
        Limit::try_new(algorithm, quota).map_err(text)
    }
}

fn text(error: ConfigError) -> String {
    error.to_string()
}

/// Returns where a setting belongs that is no field of a limit, but that a reader may expect there.
pub(super) fn place_of(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase().replace('-', "_");
    match &*name {
        "burst" | "burst_size" | "capacity" | "limit" | "max" | "rate" | "requests" | "window"
        | "period" | "interval" | "per" | "per_second" | "per_minute" | "per_hour" | "per_day" => {
            Some("it is part of `quota`; write for example quota = \"10/s burst 20\"")
        }
        "concurrent" | "concurrency" => {
            Some("it is part of `quota`; write for example quota = \"10 concurrent\"")
        }
        "name" => Some("the name of a limit is the name of its table, such as [limits.api]"),
        "key" | "cost" | "max_wait" | "dry_run" | "headers" | "on_failure" | "failure_policy" => {
            Some("it is a setting of the layer; call the method of `RateLimitLayer`")
        }
        "store" | "redis" | "url" | "prefix" | "deadline" => {
            Some("it is a setting of the store; write it into the URL of the store")
        }
        _ => None,
    }
}
