//! The Tower middleware: the only module that knows requests, responses and HTTP. Other modules of
//! the crate import only from here.
//!
//! A request takes this path: `service` makes a `future`; `pricing` finds its charge, by an
//! `extractor` or a `rule`; `admission` calls the limiter; and a `protocol` (`http` or `custom`)
//! writes the response.
//!
//! | to add | edit |
//! |---|---|
//! | a key type | a file in `extractor/`, listed in `extractor.rs` |
//! | a header dialect | `http/headers.rs`: a variant of `Headers` and an arm of `Headers::write` |

mod admission;
mod custom;
pub mod extractor;
mod future;
mod http;
mod layer;
mod pricing;
mod protocol;
mod rejection;
mod rule;
mod service;
mod settle;
mod vendor;
mod watch;

pub use self::{
    custom::Custom,
    http::{Headers, Meter, ResponseBody, TokenMeter, Tokens, Usage},
    layer::RateLimitLayer,
    rejection::{MissingKey, Rejection, RequestError},
    rule::Rule,
    service::RateLimit,
    settle::Settle,
};
