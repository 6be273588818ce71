//! The laws of limiters, charges and waiting, for each algorithm over both stores. Servers that
//! fail are in `redis`, HTTP is in `http`.

#[path = "../support/mod.rs"]
mod support;

mod block;
mod budgets;
mod calls;
mod changes;
mod charge;
mod concurrency;
mod learn;
mod limiter;
mod lines;
mod memory;
mod nginx;
mod permit;
mod reservation;
mod settling;
mod traits;
mod waiting;
