//! Internal to [`tower-ratelimit`](https://docs.rs/tower-ratelimit), which is the crate to use:
//! this one promises nothing, and each version may change all of it.
//!
//! Quotas, and the algorithms that count, in Rust and as scripts in Lua. It reads no clock and
//! opens no connection: time, states, arguments and replies are integers and bytes.

pub mod algorithm;
#[cfg(feature = "serde")]
pub mod limit;
pub mod quota;
#[cfg(feature = "scripts")]
pub mod script;
#[cfg(feature = "scripts")]
mod script_text;
