//! Tests of the laws of the algorithms, on the Rust twins and on the scripts.

mod agreement;
mod calls;
mod changes;
mod combine;
mod concurrency;
mod contract;
mod cores;
mod decode;
mod hold_histories;
mod hold_laws;
mod holds;
mod large;
mod oracle;
mod overshoot;
mod peeks;
mod rates;
mod releases;
mod stream;
mod texts;

use super::testing::{backends, generators};
