//! The recipes of the pages that have a test: each file begins with the code of its page, which
//! `docs.rs` compares.

mod end_stalled;
mod end_waits;
mod login;
mod per_method;
