//! Stored bytes: what no script writes is not a state.

use super::super::{Algorithm, Params};
use crate::quota::Quota;

fn is_state(algorithm: Algorithm, bytes: &[u8]) -> bool {
    let params = Params::new(algorithm, Quota::per_minute(10)).unwrap();
    params.decode(bytes).is_some()
}

#[test]
fn a_fixed_window_has_a_length() {
    let window = |length: u8| {
        let mut bytes = [&b"F"[..], &[0; 27]].concat();
        bytes[22] = length;
        is_state(Algorithm::FixedWindow, &bytes)
    };
    assert!(window(1));
    assert!(!window(0));
}

#[test]
fn a_log_has_entries_in_order_whose_costs_are_exact() {
    let log = |numbers: &[f64]| {
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        let bytes: Vec<_> = [b'S'].into_iter().chain(numbers).collect();
        is_state(Algorithm::SlidingLog, &bytes)
    };
    let head = [100.0, 0.0, 10.0];
    assert!(log(&[&head[..], &[90.0, 1.0, 95.0, 2.0]].concat()));
    for wrong in [[95.0, 1.0, 90.0, 2.0], [90.0, -1.0, 95.0, 2.0], [90.0, 1e15, 95.0, 4e15]] {
        assert!(!log(&[&head[..], &wrong].concat()), "{wrong:?}");
    }
    assert!(!log(&[1e300, 0.0, 10.0]) && !log(&[100.0, 0.0]));
}
