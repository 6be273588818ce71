//! The Redis store with real servers: connections, clusters, Sentinels, faults, failure policies
//! and limiters that are shared with Redisson. Decisions are in `contract`.

#[path = "../support/mod.rs"]
mod support;

mod capacity;
mod cluster;
mod concurrency;
mod connecting;
mod dashboard;
mod denials;
mod differences;
mod failure;
mod faults;
mod front;
mod holds;
mod observe;
mod outage;
mod pauses;
mod redisson;
mod redisson_layer;
mod releases;
mod runtimes;
mod sentinel;
mod store;
mod tls;
mod url;
mod versions;
mod waiting;
