//! The page of the playground in a real browser, without a window. `driver.rs` starts the browser.
//! The decisions themselves are tested in the package `tower-ratelimit`.

mod driver;
mod playground;

#[path = "../programs/support.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod support;
