//! The fields of a limit, with quotas and algorithms as texts, for any file format.

mod de;
mod ser;
mod settings;

use crate::{
    algorithm::{Algorithm, Params},
    quota::{Quota, QuotaError},
};

/// An algorithm and a quota that fits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    pub algorithm: Algorithm,
    pub quota: Quota,
}

impl Limit {
    pub fn try_new(algorithm: Algorithm, quota: Quota) -> Result<Self, QuotaError> {
        Params::new(algorithm, quota)?;
        Ok(Self { algorithm, quota })
    }
}
