//! The settings of a limit as the fields of a file, and the check that they do not conflict. It
//! knows no file format.

use serde::{Serialize, Serializer};

use super::Limit;
use crate::{
    algorithm::{Algorithm, Refill},
    quota::{MAX_UNITS, Quota, QuotaError},
};

pub(super) const FIELDS: &[&str] = &["algorithm", "quota", "buckets", "refill", "overdraft"];

/// The [`FIELDS`] of a limit that were read so far, or that are written.
#[derive(Default, Serialize)]
pub(super) struct Settings {
    #[serde(serialize_with = "name", skip_serializing_if = "Option::is_none")]
    pub(super) algorithm: Option<Algorithm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) quota: Option<Quota>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) buckets: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) refill: Option<Refill>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) overdraft: Option<u64>,
}

fn name<S: Serializer>(algorithm: &Option<Algorithm>, serializer: S) -> Result<S::Ok, S::Error> {
    algorithm.as_ref().map(Algorithm::name).serialize(serializer)
}

impl From<Algorithm> for Settings {
    fn from(algorithm: Algorithm) -> Self {
        let settings = Self { algorithm: Some(algorithm), ..Self::default() };
        match algorithm {
            Algorithm::SlidingWindow { buckets } => Self { buckets: Some(buckets), ..settings },
            Algorithm::TokenBucket { refill, overdraft } => {
                Self { refill: Some(refill), overdraft: Some(overdraft), ..settings }
            }
            _ => settings,
        }
    }
}

impl From<Limit> for Settings {
    fn from(limit: Limit) -> Self {
        Self { quota: Some(limit.quota), ..limit.algorithm.into() }
    }
}

impl Settings {
    /// Reports the first error in the fields that were read so far.
    pub(super) fn check(&self) -> Result<(), String> {
        let algorithm = self.algorithm_so_far()?;
        if let Some(buckets) = self.buckets {
            let any = Quota::per_second(1);
            Limit::try_new(Algorithm::SlidingWindow { buckets }, any).map_err(text)?;
        }
        if self.overdraft > Some(MAX_UNITS) {
            return Err(format!("`overdraft` is too large; the maximum is {MAX_UNITS}"));
        }
        if let (Some(algorithm), Some(quota)) = (algorithm, self.quota) {
            Limit::try_new(algorithm, quota).map_err(text)?;
        }
        Ok(())
    }

    pub(super) fn algorithm(&self) -> Result<Algorithm, String> {
        let missing = "missing field `algorithm`, such as \"token-bucket\"";
        Ok(self.algorithm_so_far()?.ok_or(missing)?)
    }

    /// Returns the algorithm, if it is all that the fields contain.
    pub(super) fn only_algorithm(&self) -> Result<Algorithm, String> {
        match self.quota {
            Some(_) => Err("unknown field `quota`: it is no setting of an algorithm".to_owned()),
            None => self.algorithm(),
        }
    }

    pub(super) fn limit(&self) -> Result<Limit, String> {
        let algorithm = self.algorithm()?;
        let quota = self.quota.ok_or("missing field `quota`, such as \"10/s\"")?;
        Limit::try_new(algorithm, quota).map_err(text)
    }

    /// Returns the algorithm, if it is known, with its settings so far.
    fn algorithm_so_far(&self) -> Result<Option<Algorithm>, String> {
        let Some(mut algorithm) = self.algorithm else { return Ok(None) };
        let name = algorithm.name();
        let foreign = |field, other: Algorithm| {
            Err(format!("`{field}` is not a setting of {name}; remove it, or use {other}"))
        };
        match &mut algorithm {
            Algorithm::SlidingWindow { buckets } => *buckets = self.buckets.unwrap_or(*buckets),
            _ if self.buckets.is_some() => return foreign("buckets", Algorithm::sliding_window()),
            _ => {}
        }
        match &mut algorithm {
            Algorithm::TokenBucket { refill, overdraft } => {
                *refill = self.refill.unwrap_or(*refill);
                *overdraft = self.overdraft.unwrap_or(*overdraft);
            }
            _ if self.refill.is_some() => return foreign("refill", Algorithm::token_bucket()),
            _ if self.overdraft.is_some() => {
                return foreign("overdraft", Algorithm::token_bucket());
            }
            _ => {}
        }
        Ok(Some(algorithm))
    }
}

fn text(error: QuotaError) -> String {
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
