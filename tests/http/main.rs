//! The middleware over HTTP and gRPC: keys, rules, responses, the contract of `tower::Service`,
//! limits from text. Servers that fail are in `redis`; the example programs, in `examples/more`.

#[path = "../support/mod.rs"]
mod support;

mod ban;
mod client_ip;
mod concurrency;
mod config;
mod grpc;
mod keys;
mod layer;
mod learn;
mod observe;
mod programs;
mod recipes;
mod reload;
mod responses;
mod rule;
mod serialize;
mod service;
mod settle;
mod testing;
mod tokens;
mod vendors;
