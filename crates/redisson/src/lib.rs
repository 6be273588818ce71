//! Internal to [`tower-ratelimit`](https://docs.rs/tower-ratelimit), which is the crate to use: this
//! one promises nothing, and each version may change all of it.
//!
//! The format of the limiters that Java services share: the names of their keys, the ids of their
//! entries, and the scripts with their arguments and replies. It opens no connection, reads no
//! clock, and depends on no other crate. docs/redisson.md describes how both sides work together.

mod id;
mod keys;
mod script;
mod template;

pub use self::{
    id::{Id, id_of, process_id, random},
    keys::Keys,
    script::{AcquireReply, ENTRY, Script, arguments, entry, status},
    template::{PLACEHOLDER, is_template, name_of_key, rate_argument},
};
