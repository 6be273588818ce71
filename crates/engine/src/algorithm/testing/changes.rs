//! Random histories with waits, blocks and changed quotas, against the guarantees of the algorithms
//! alone: what is admitted is within that of the larger quota. No other laws.

use std::time::Duration;

use proptest::prelude::*;

use super::{
    super::{Action, Algorithm, EngineRequest, Params, Refill, Release},
    backends::{Backend, START, check},
};
use crate::quota::Quota;

/// An algorithm that a quota is for, without its settings.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    FixedWindow,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
    Interval,
    LeakyBucket,
}

pub const FORMS: [Form; 6] = [
    Form::FixedWindow,
    Form::SlidingLog,
    Form::SlidingWindow,
    Form::TokenBucket,
    Form::Interval,
    Form::LeakyBucket,
];

/// A quota, and the settings that can change with it.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    limit: u64,
    pub window_us: u64,
    burst: u64,
    overdraft: u64,
    buckets: u32,
    /// The units of a cost of 1 in the events.
    scale: u64,
}

impl Limits {
    pub fn params(&self, form: Form) -> Params {
        let Self { limit, window_us, burst, overdraft, buckets, .. } = *self;
        let quota = Quota::new(limit, Duration::from_micros(window_us));
        let (algorithm, quota) = match form {
            Form::FixedWindow => (Algorithm::FixedWindow, quota),
            Form::SlidingLog => (Algorithm::SlidingLog, quota),
            Form::SlidingWindow => (Algorithm::SlidingWindow { buckets }, quota),
            Form::LeakyBucket => (Algorithm::LeakyBucket, quota.burst(burst)),
            Form::TokenBucket => {
                let refill = Refill::Continuous;
                (Algorithm::TokenBucket { refill, overdraft }, quota.burst(burst))
            }
            Form::Interval => {
                let refill = Refill::Interval;
                (Algorithm::TokenBucket { refill, overdraft }, quota.burst(burst))
            }
        };
        Params::new(algorithm, quota).unwrap()
    }
}

#[derive(Clone, Debug)]
pub enum Event {
    /// The cost, and the longest wait, in 1/1000 of the current window.
    Check(u32, u32),
    /// A check of the largest cost that can be granted.
    CheckAll(u32),
    /// The duration, in 1/1000 of the current window.
    Block(u32),
    Unblock,
    /// The quota that applies from now on.
    Change(prop::sample::Index),
    /// The request that waits and is dropped.
    Drop(prop::sample::Index),
}

/// Events, each with the time since the last one, in 1/1000 of the current window.
pub fn events() -> impl Strategy<Value = Vec<(u32, Event)>> {
    let max_wait = || prop_oneof![1 => Just(0), 3 => 0_u32..4_000];
    let event = prop_oneof![
        12 => (1_u32..5, max_wait()).prop_map(|(cost, wait)| Event::Check(cost, wait)),
        3 => max_wait().prop_map(Event::CheckAll),
        1 => (0_u32..2_000).prop_map(Event::Block),
        1 => Just(Event::Unblock),
        3 => any::<prop::sample::Index>().prop_map(Event::Change),
        2 => any::<prop::sample::Index>().prop_map(Event::Drop),
    ];
    let ahead = prop_oneof![3 => Just(0), 4 => 0_u32..100, 1 => 100_u32..1_500];
    prop::collection::vec((ahead, event), 1..100)
}

/// Quotas that one history alternates between. Often they differ in one number.
pub fn quotas() -> impl Strategy<Value = Vec<Limits>> {
    let window = || {
        prop_oneof![
            Just(1_000_000),
            Just(60_000_000),
            1_000_u64..10_000_000,
            Just(3_600_000_000_u64)
        ]
    };
    let limits = (1_u64..20, window(), 1_u64..20, prop_oneof![Just(0), 1_u64..4], 1_u32..5);
    let limits = limits.prop_map(|(limit, window_us, burst, overdraft, buckets)| Limits {
        limit,
        window_us,
        burst,
        overdraft,
        buckets,
        scale: 1,
    });
    let changed = limits.clone();
    (limits, prop::collection::vec((changed, 0_u32..6), 1..4)).prop_map(|(first, others)| {
        let other = |(other, which): &(Limits, u32)| match which {
            0 => Limits { limit: other.limit, ..first },
            1 => Limits { window_us: other.window_us, ..first },
            2 => Limits { burst: other.burst, ..first },
            3 => Limits { window_us: other.window_us, burst: other.burst, ..first },
            4 => Limits { overdraft: other.overdraft, buckets: other.buckets, ..first },
            _ => *other,
        };
        std::iter::once(first).chain(others.iter().map(other)).collect()
    })
}

/// The same with units of which there are many more: limits, bursts and costs above 2^32, also some
/// that are no multiples of each other.
pub fn large_quotas() -> impl Strategy<Value = Vec<Limits>> {
    let scale = prop_oneof![Just(1 << 33), 1_u64 << 29..1 << 37];
    let rest = prop::collection::vec(prop_oneof![Just(0), 0_u64..1 << 29], 4);
    (quotas(), scale, rest).prop_map(|(quotas, scale, rest)| {
        let scaled = quotas.into_iter().zip(rest).map(|(limits, rest)| Limits {
            limit: limits.limit * scale + rest,
            burst: limits.burst * scale + rest,
            overdraft: limits.overdraft * scale,
            scale,
            ..limits
        });
        scaled.collect()
    })
}

/// A request that proceeds, or will: its arrival, its instant and its cost, and the number of
/// changes of the quota before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admitted {
    pub arrival: u128,
    pub instant: u128,
    pub cost: u128,
    pub changes: usize,
}

pub fn admitted(
    backend: &mut impl Backend,
    form: Form,
    quotas: &[Limits],
    events: &[(u32, Event)],
) -> Vec<Admitted> {
    let (mut limits, mut now, mut changes) = (quotas[0], START, 0);
    let mut admitted: Vec<Admitted> = vec![];
    for (ahead, event) in events {
        let window = limits.window_us as i64;
        let part = |thousandths: u32| window * i64::from(thousandths) / 1_000;
        now += part(*ahead);
        let params = limits.params(form);
        let (cost, max_wait) = match event {
            Event::Check(cost, wait) => {
                ((i64::from(*cost) * limits.scale as i64).min(params.max_cost()), *wait)
            }
            Event::CheckAll(wait) => (params.max_cost(), *wait),
            Event::Change(which) => {
                limits = *which.get(quotas);
                changes += 1;
                continue;
            }
            Event::Block(duration) => {
                let action = Action::Block { duration: part(*duration) };
                backend.decide(&params, EngineRequest { action, ..check(1, now) });
                continue;
            }
            Event::Unblock => {
                let action = Action::Unblock;
                backend.decide(&params, EngineRequest { action, ..check(1, now) });
                continue;
            }
            Event::Drop(which) => {
                let passed = admitted.partition_point(|request| request.instant <= now as u128);
                if passed < admitted.len() {
                    let index = passed + which.index(admitted.len() - passed);
                    let Admitted { instant, cost, .. } = admitted.remove(index);
                    let (instant, units) = (Some(instant as i64), cost as i64);
                    backend.release(&params, now, &[Release { instant, units }]);
                }
                continue;
            }
        };
        let max_wait = part(max_wait).min(params.max_reservable());
        let reply = backend.decide(&params, EngineRequest { max_wait, ..check(cost, now) });
        if reply.admitted {
            let (arrival, instant) = (now as u128, (now + reply.known_wait()) as u128);
            admitted.push(Admitted { arrival, instant, cost: cost as u128, changes });
        }
    }
    admitted
}

/// The promise that includes those of all quotas.
pub struct Promise {
    limit: u128,
    window: u128,
    /// The highest rate, as a limit and its window.
    rate: (u128, u128),
    size: u128,
    burst: u128,
}

impl Promise {
    pub fn of(quotas: &[Limits], form: Form) -> Self {
        let max = |number: fn(&Limits) -> u64| quotas.iter().map(number).max().unwrap().into();
        let window = quotas.iter().map(|limits| limits.window_us).min().unwrap().into();
        let fastest = quotas.iter().max_by(|one, other| {
            let product =
                |one: &Limits, other: &Limits| u128::from(one.limit) * u128::from(other.window_us);
            product(one, other).cmp(&product(other, one))
        });
        let fastest = fastest.unwrap();
        let overdraft = |limits: &Limits| match form {
            Form::LeakyBucket => 0,
            _ => limits.overdraft,
        };
        let size = |limits: &Limits| u128::from(limits.burst + overdraft(limits));
        Self {
            limit: max(|limits| limits.limit),
            window,
            rate: (fastest.limit.into(), fastest.window_us.into()),
            size: quotas.iter().map(size).max().unwrap(),
            burst: max(|limits| limits.burst),
        }
    }

    /// Returns whether these units may be admitted in this time, both ends included.
    fn allows(&self, form: Form, units: u128, time: u128) -> bool {
        let Self { limit, window, rate, size, .. } = *self;
        match form {
            // Twice the limit across a boundary.
            Form::FixedWindow | Form::SlidingWindow => units <= limit * (time / window + 2),
            Form::SlidingLog => units <= limit * (time / window + 1),
            Form::TokenBucket => units * rate.1 <= size * rate.1 + rate.0 * time,
            Form::Interval => units <= size + limit * time.div_ceil(window),
            Form::LeakyBucket => true,
        }
    }

    pub fn holds(&self, form: Form, admitted: &[Admitted]) -> bool {
        let mut admitted = admitted.to_vec();
        admitted.sort_by_key(|request| request.instant);
        (0..admitted.len()).all(|first| {
            let mut units = 0;
            admitted[first..].iter().all(|request| {
                units += request.cost;
                self.allows(form, units, request.instant - admitted[first].instant)
            })
        })
    }

    /// Returns whether departures keep their distance.
    pub fn keeps_distance(&self, admitted: &[Admitted]) -> bool {
        admitted.windows(2).all(|pair| {
            pair[1].instant - pair[0].instant >= pair[0].cost * self.rate.1 / self.rate.0
        })
    }

    /// Returns whether no more units than the burst wait in the bucket at a time, beside those that
    /// waited when the quota was changed.
    pub fn fits(&self, admitted: &[Admitted]) -> bool {
        admitted.iter().enumerate().all(|(i, request)| {
            let waits = |other: &&Admitted| {
                other.instant > request.arrival && other.changes == request.changes
            };
            let inside = admitted[..=i].iter().filter(waits).map(|other| other.cost);
            inside.sum::<u128>() <= self.burst
        })
    }
}
