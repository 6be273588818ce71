//! What observers add to a check.

use std::sync::Arc;

use memory::{ONE, QUICK, SLOW, check_all, ready, shuffled_keys};
use metrics_exporter_prometheus::PrometheusBuilder;
use tower_ratelimit::{
    Algorithm, Limiter, MemoryStore,
    observe::{self, Event, Observer, TopDenied},
};

use crate::{interleaved::interleaved, nanos};

const ROUNDS: usize = 11;

pub(super) fn print_observers() {
    println!();
    println!("Limiter::check with observers, in ns more than without: 10,000 String keys");
    let recorder = PrometheusBuilder::new().build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let keys = shuffled_keys(10_000);
    for (label, quota) in [("full", QUICK), ("draining", SLOW), ("empty", ONE)] {
        let [none, idle, counted, denied] = interleaved(ROUNDS, |which| {
            let observer: Option<Arc<dyn Observer>> = match which {
                0 => None,
                1 => Some(Arc::new(|_: &Event<'_>| ())),
                2 => Some(Arc::new(observe::metrics())),
                _ => Some(Arc::new(TopDenied::new(1_000))),
            };
            let store = MemoryStore::new();
            observer.into_iter().for_each(|observer| store.add_observer(observer));
            let limiter = Limiter::new("default", store, Algorithm::token_bucket(), quota);
            // The metrics are registered in this thread, which has the recorder.
            let _ = ready(limiter.check("first"));
            check_all(&limiter, &keys);
            nanos(4 * keys.len(), || (0..4).for_each(|_| _ = check_all(&limiter, &keys)))
        });
        println!(
            "  buckets {label:<8}  none {:5.1}  idle observer {:+5.1}  Metrics {:+5.1} (goal 60)  \
             TopDenied {:+5.1}",
            none.median(),
            idle.minus(&none).median(),
            counted.minus(&none).median(),
            denied.minus(&none).median(),
        );
    }
}
