//! The laws of `Algorithm`, for the twins and the scripts alike.

mod agreement;
mod contract;
mod faces;
mod memory;
mod overshoot;
mod promise;
mod rates;
mod settling;
mod together;
