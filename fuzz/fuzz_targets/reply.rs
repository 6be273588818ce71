//! A reply of any bytes is a decision or an error: `cargo +nightly fuzz run reply`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_ratelimit_engine::{
    algorithm::{Action, Algorithm, Params},
    quota::Quota,
    script::{CheckEach, Found, Limit, read, read_changes},
};

// The lines are what the reply has found, the first byte of each its kind.
fuzz_target!(|data: &[u8]| {
    let found = data.split(|byte| *byte == b'\n').map(|line| match line {
        [b'd', verdict @ ..] if verdict.len() >= 2 => {
            let (verdict, state) = verdict.split_at(2);
            Found::Denied(state, verdict)
        }
        [b'i', index, ..] => Found::Limit(i64::from(*index as i8)),
        [b'e', ..] => Found::Error(()),
        line => Found::State(line),
    });
    let params = Params::new(Algorithm::token_bucket(), Quota::per_minute(10)).expect("they fit");
    let now = 1_700_000_000_000_000;
    let limit =
        |key: &str| Limit { key: key.to_owned(), params, cost: 1, max_wait: 0, lifetime: None };
    for limits in [vec![limit("a")], vec![limit("a"), limit("b")]] {
        let _ = read(Action::Check, &limits, now, found.clone());
    }
    let mut each = CheckEach::new(params, None, 3);
    each.add("a".to_owned(), [(1, 0), (1, 0), (2, 0)].into_iter());
    each.add("b".to_owned(), [(1, 0)].into_iter());
    if let Some(decided) = each.read(now, found.clone()) {
        assert_eq!(decided.replies.len(), 4);
    }
    let _ = read_changes(found);
});
