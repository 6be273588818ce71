//! The middleware over HTTP and gRPC: keys, rules, responses, the contract of `tower::Service`,
//! limits from text, and the example programs. Servers that fail are in `redis`.

#[path = "../support/mod.rs"]
mod support;

mod client_ip;
mod config;
mod failover;
mod grpc;
mod keys;
mod layer;
mod observe;
mod outbound;
mod responses;
mod rule;
mod server;
mod service;
