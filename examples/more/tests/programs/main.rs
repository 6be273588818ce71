//! The example programs of all packages: each runs as its comments describe. The middleware itself
//! is tested in the package `tower-ratelimit`.

mod support;

mod api_client;
mod configured;
mod demo;
mod failover;
mod grpc;
mod help;
mod llm_gateway;
mod outbound;
mod plans;
mod playground;
mod quickstart;
mod redisson;
mod replay;
mod server;
mod shutdown;
mod streams;
