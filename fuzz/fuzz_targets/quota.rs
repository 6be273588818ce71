//! The text of a quota is read as it is written: `cargo +nightly fuzz run quota`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::Quota;

fuzz_target!(|text: &str| {
    if let Ok(quota) = text.parse::<Quota>() {
        assert_eq!(quota.to_string().parse(), Ok(quota), "{text:?}");
    }
});
