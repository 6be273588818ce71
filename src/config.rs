//! Configuration: limits from a file in TOML, JSON and other formats (feature `serde`), and the
//! errors of settings.
//!
//! [`Limits`] is the part of a configuration file that contains limits, and [`Limiters`] are the
//! limiters made of it. The page on [configuration](crate::guide::configuration) describes how to
//! reload them.
// Files are opened by the application.

#[cfg(feature = "serde")]
mod format;
#[cfg(feature = "serde")]
mod limiters;
#[cfg(feature = "serde")]
mod limits;

#[cfg(feature = "serde")]
pub use self::{
    limiters::Limiters,
    limits::{Limit, Limits},
};
pub use crate::{algorithm::Refill, error::ConfigError, quota::QuotaError};
