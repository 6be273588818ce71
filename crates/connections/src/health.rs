//! Whether a node answers and executes scripts: its circuit breaker, and what the owner of the
//! connections hears of it. It opens no connection and sends no command.

mod breaker;
mod outbox;
mod owner;
mod rejections;
mod reports;

pub(crate) use self::breaker::Breaker;
#[cfg(test)]
pub(crate) use self::owner::Nobody;
pub use self::{
    breaker::{NodeHealth, Tell},
    owner::{Event, Owner, Probe},
};
