//! The Tower middleware: the only module that knows requests, responses and HTTP. Other modules of
//! the crate import only from here.
//!
//! `passage` is the path of a request, from the service that a `layer` makes to the response. It
//! uses an `extractor` or a `rule`, and a `protocol` (`http` or `custom`).
//!
//! | to add | edit |
//! |---|---|
//! | a key type | a file in `extractor/`, listed in `extractor.rs` |
//! | a header dialect | `http/headers.rs`: a variant of `Headers` and an arm of `Headers::write` |

mod custom;
pub mod extractor;
mod http;
mod layer;
mod passage;
mod protocol;
mod rejection;
mod rule;
mod vendor;

pub use self::{
    custom::Custom,
    http::{Headers, Meter, ResponseBody, TokenMeter, Tokens, Usage},
    layer::RateLimitLayer,
    passage::{RateLimit, Settle},
    rejection::{MissingKey, Rejection, RequestError},
    rule::Rule,
};
