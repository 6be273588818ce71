//! The laws of `Algorithm`, for the twins and the scripts alike.

mod agreement;
mod backends;
mod combine;
mod contract;
mod memory;
mod oracle;
mod overshoot;
mod rates;
mod settling;
