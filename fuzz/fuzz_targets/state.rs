//! Bytes that anybody has stored in Redis are a state or an error, and a state decides:
//! `cargo +nightly fuzz run -O state` (sums that no script stores may overflow).

#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_ratelimit_engine::{
    algorithm::{Action, Algorithm, EngineRequest, Params},
    quota::Quota,
};

const NOW: i64 = 1_700_000_000_000_000;

// The first byte names an algorithm.
fuzz_target!(|data: &[u8]| {
    let Some((first, bytes)) = data.split_first() else { return };
    let algorithm = Algorithm::ALL[usize::from(*first) % Algorithm::ALL.len()];
    let quota = match algorithm {
        Algorithm::Concurrency => Quota::concurrent(10),
        _ => Quota::per_minute(10),
    };
    let params = Params::new(algorithm, quota).expect("they fit");
    let Some(state) = params.decode(bytes) else { return };
    for action in [Action::Check, Action::Peek, Action::Spend, Action::Refund] {
        let request = EngineRequest { action, cost: 1, ..EngineRequest::observe(NOW) };
        let reply = params.step(&mut state.clone(), &request);
        assert!(reply.remaining <= 10, "{algorithm} {state:?}: {reply:?}");
    }
});
