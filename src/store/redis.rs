//! The store in Redis. `store.rs` is its door; the crate `tower-ratelimit-connections` makes the
//! calls.

mod backend;
mod batch;
mod call;
mod config;
mod cross_slot;
mod ends;
mod error;
mod events;
mod front;
mod holds;
mod keeper;
mod late;
mod monitor;
mod probe;
mod recent;
mod release;
mod scan;
mod store;
mod wire;

use tower_ratelimit_connections as connections;

#[doc(inline)]
pub use self::connections::Credentials;
#[cfg(feature = "redisson")]
pub(crate) use self::connections::Deadline;
pub(super) use self::connections::{FORMS, scheme_error};
pub use self::{config::RedisConfig, scan::KeyScan, store::RedisStore};
