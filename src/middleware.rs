//! The Tower middleware: all that knows requests, responses and HTTP.

mod admission;
mod custom;
pub mod extractor;
mod failure_policy;
mod future;
mod http;
mod layer;
mod protocol;
mod rule;
mod service;

pub use self::{
    custom::Custom,
    extractor::KeyExtractor,
    failure_policy::FailurePolicy,
    future::ResponseFuture,
    http::{Headers, Http, Reset, ResponseBody},
    layer::RateLimitLayer,
    protocol::{Exchange, IntoCost, MissingKey, Protocol, Rejection},
    rule::{IntoCharge, Rule},
    service::RateLimit,
};
