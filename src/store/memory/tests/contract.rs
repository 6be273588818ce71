//! The memory store keeps the contract of the algorithms.

use std::time::Duration;

use tower_ratelimit_engine::algorithm::testing::contract::for_each_row;

use super::requests::{TestClock, now_or_never, reply_of};
use crate::{
    decision::Outcome,
    limiter::{Admission, Limiter},
};

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_the_contract() {
    TestClock::both().iter().for_each(memory_keeps_the_contract);
}

fn memory_keeps_the_contract(clock: &TestClock) {
    let mut limiter: Option<(&str, Limiter, tokio::time::Instant)> = None;
    for_each_row(|table, at, cost, max_wait| {
        if limiter.as_ref().is_none_or(|(name, ..)| *name != table.name) {
            let new = Limiter::new("default", clock.store(), table.algorithm, table.quota);
            limiter = Some((table.name, new, tokio::time::Instant::now()));
        }
        let (_, limiter, start) = limiter.as_ref().unwrap();
        let instant = *start + Duration::from_micros(at as u64);
        clock.advance(instant - tokio::time::Instant::now());
        let decision = now_or_never(async {
            match max_wait {
                None => limiter.check("key").cost(cost.into()).await,
                Some(wait) => {
                    let max_wait = Duration::from_micros(wait as u64);
                    limiter.reserve("key", cost.into(), max_wait).await.map(Admission::keep)
                }
            }
        })
        .unwrap();
        reply_of(Outcome::of_nothing(decision))
    });
}
