//! For tests, also of `tower-ratelimit`: random limits and requests, and one interface to the
//! engine and the scripts.

pub mod backends;
pub mod changes;
pub mod contract;
pub mod generators;
mod hold_changes;
#[allow(dead_code, missing_debug_implementations)]
mod server;
