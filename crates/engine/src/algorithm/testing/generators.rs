//! Random limits and requests.

use std::env;

use proptest::prelude::*;

use super::super::{
    Action, Algorithm, EngineRequest, LONGEST_BLOCK, Params, Refill, Release, arithmetic::ceil_div,
};
use crate::quota::{MAX_UNITS, Quota, nearest};

/// Every algorithm, with every setting that changes its decisions.
pub fn all_with(quota: Quota) -> Vec<(Algorithm, Quota)> {
    let interval = Algorithm::TokenBucket { refill: Refill::Interval, overdraft: 0 };
    [
        Algorithm::FixedWindow,
        Algorithm::SlidingLog,
        Algorithm::sliding_window(),
        Algorithm::SlidingWindow { buckets: 10 },
        Algorithm::token_bucket(),
        interval,
        Algorithm::LeakyBucket,
    ]
    .map(|algorithm| (algorithm, quota))
    .to_vec()
}

/// As many histories as the environment variable `HISTORIES` says, if it is set.
pub fn config(cases: u32) -> ProptestConfig {
    let cases = env::var("HISTORIES").map_or(cases, |number| number.parse().unwrap());
    ProptestConfig {
        cases,
        max_global_rejects: cases.max(1_024),
        max_shrink_iters: 300,
        failure_persistence: None,
        ..Default::default()
    }
}

#[derive(Clone, Debug)]
pub struct Step {
    pub action: Action,
    /// Replaces the action: the admitted requests to release, and the part of each, in 1/4.
    releases: Vec<(prop::sample::Index, u32)>,
    /// In units, or in 1/1000 of the largest cost that can be granted.
    pub cost: Result<u32, u32>,
    /// In 1/1000 of a window.
    pub max_wait: Option<u64>,
    /// In 1/1000 of a window, and microseconds.
    pub ahead: (i32, i32),
    /// True if the other quota applies from here on.
    pub switch: bool,
}

impl Step {
    /// The time that passes before the step, in microseconds; `goes_back`: if it may be negative.
    pub fn ahead(&self, params: &Params, goes_back: bool) -> i64 {
        let (window, _) = window_and_max_cost(params);
        let ahead = (window * i64::from(self.ahead.0)).div_euclid(1_000) + i64::from(self.ahead.1);
        if goes_back { ahead } else { ahead.max(0) }
    }

    /// Takes the units to release out of the `admitted` instants and costs.
    pub fn releases(&self, admitted: &mut Vec<(i64, i64)>) -> Vec<Release> {
        let mut releases = vec![];
        for (which, quarters) in &self.releases {
            if admitted.is_empty() {
                break;
            }
            let (instant, cost) = admitted.swap_remove(which.index(admitted.len()));
            let units = ceil_div(cost * i64::from(*quarters), 4);
            releases.push(Release { instant: Some(instant), units });
            if units < cost {
                admitted.push((instant, cost - units));
            }
        }
        releases
    }

    pub fn decide(&self, params: &Params, now: i64) -> EngineRequest {
        let (window, max_cost) = window_and_max_cost(params);
        let cost = match self.cost {
            Ok(cost) => i64::from(cost).min(max_cost),
            Err(part) => ceil_div(max_cost * i64::from(part), 1_000),
        };
        let max_wait = self
            .max_wait
            .map_or(params.default_wait(), |wait| window.saturating_mul(wait as i64) / 1_000)
            .min(if self.action.blocks() { LONGEST_BLOCK } else { params.max_reservable() });
        let action = lasting(self.action, max_wait);
        EngineRequest { action, cost, max_wait, now, admission: None, blocked: 0 }
    }
}

/// The action; a block of this duration.
pub fn lasting(action: Action, duration: i64) -> Action {
    match action {
        Action::Block { .. } => Action::Block { duration },
        action => action,
    }
}

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..60)
}

pub fn step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        8 => Just(Action::Check),
        1 => Just(Action::Peek),
        2 => Just(Action::Refund),
        1 => Just(Action::Spend),
        1 => prop_oneof![2 => Just(Action::Block { duration: 0 }), 1 => Just(Action::Unblock)],
    ];
    let release = (any::<prop::sample::Index>(), 1_u32..5);
    let releases = prop_oneof![
        4 => Just(vec![]),
        1 => prop::collection::vec(release, 1..4),
    ];
    let ahead = prop_oneof![
        6 => 0..300,
        2 => Just(0),
        1 => 300..3_000,
        1 => -1_500..0,
    ];
    let max_wait = prop_oneof![3 => Just(None), 1 => (0_u64..2_500).prop_map(Some)];
    let cost = prop_oneof![(1_u32..8).prop_map(Ok), (1_u32..1_001).prop_map(Err)];
    (action, releases, cost, max_wait, (ahead, -2..3), prop::bool::weighted(0.1)).prop_map(
        |(action, releases, cost, max_wait, ahead, switch)| Step {
            action,
            releases,
            cost,
            max_wait,
            ahead,
            switch,
        },
    )
}

/// Limits that do not fit in four bytes, up to the largest one.
pub fn large() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(15_000_000_000),
        Just(50_000_000_000),
        Just(1_000_000_000_000),
        (32_u32..46).prop_flat_map(|bits| 1_u64 << bits..2 << bits),
        Just(MAX_UNITS),
    ]
}

/// In microseconds.
pub fn window() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => Just(1_000_000),
        2 => 1_000_u64..100_000,
        2 => 1_000_u64..100_000_000_000,
        1 => Just(366 * 86_400_000_000_u64),
    ]
}

fn quota(bucket: bool) -> impl Strategy<Value = Quota> {
    let limit = prop_oneof![
        5 => 1_u64..20,
        1 => 1_u64..1_000_000,
        1 => Just(u32::MAX.into()),
        2 => large(),
    ];
    (limit, window(), prop_oneof![1 => Just(None), 1 => (1_u64..30).prop_map(Some)]).prop_map(
        move |(limit, window, burst)| {
            let quota = nearest(limit, std::time::Duration::from_micros(window));
            burst.filter(|_| bucket).map_or(quota, |burst| quota.try_burst(burst).unwrap_or(quota))
        },
    )
}

/// An algorithm and two quotas.
pub fn params() -> impl Strategy<Value = [Params; 2]> {
    params_with(quota)
}

pub fn params_with<Q: Strategy<Value = Quota>>(
    quota: impl Fn(bool) -> Q,
) -> impl Strategy<Value = [Params; 2]> {
    let every = all_with(Quota::per_second(1)).into_iter().map(|(algorithm, _)| algorithm);
    let overdraft = prop_oneof![4 => 0_u64..4, 1 => Just(1 << 30), 1 => Just(1 << 40)];
    let algorithm = prop_oneof![
        3 => prop::sample::select(every.collect::<Vec<_>>()),
        1 => (1_u32..8).prop_map(|buckets| Algorithm::SlidingWindow { buckets }),
        1 => Just(Algorithm::SlidingWindow { buckets: 100 }),
        1 => (any::<bool>(), overdraft).prop_map(
            |(lumps, overdraft)| Algorithm::TokenBucket {
                refill: if lumps { Refill::Interval } else { Refill::Continuous },
                overdraft,
            }
        ),
    ];
    algorithm.prop_flat_map(move |algorithm| {
        let bucket = matches!(algorithm, Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket);
        (quota(bucket), quota(bucket)).prop_map(move |quotas| {
            <[Quota; 2]>::from(quotas).map(|quota| {
                // An overdraft can be too large for a quota.
                Params::new(algorithm, quota)
                    .or_else(|_| Params::new(Algorithm::token_bucket(), quota))
                    .unwrap()
            })
        })
    })
}

/// The time in which a used-up quota is full again, and the largest cost that can be granted.
pub fn window_and_max_cost(params: &Params) -> (i64, i64) {
    let args = params.args();
    let window = match params {
        Params::TokenBucket(_) | Params::LeakyBucket(_) => {
            let [burst, _, unit, period, lump, ..] = args[..] else { unreachable!() };
            burst * unit / lump * period
        }
        Params::Concurrency(_) => 1e6,
        _ => args[1],
    };
    (window.min(3e13) as i64, params.max_cost())
}

/// Returns whether the clock may step back. Then the script would find a block again that was over,
/// and is for the twin.
pub fn goes_back<'a>(steps: impl IntoIterator<Item = &'a Step>) -> bool {
    steps.into_iter().all(|step| !step.action.blocks())
}
