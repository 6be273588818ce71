//! An observer that writes down all events, as lines of text.

use std::sync::{Arc, Mutex};

use tower_ratelimit::{
    Decision,
    observe::{Event, Observer},
    store::Store,
};

#[derive(Default)]
pub struct Recorder(Mutex<Vec<String>>);

impl Recorder {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns the events since the last call.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    /// Returns the events since the last call that begin with this word.
    pub fn take_of(&self, word: &str) -> Vec<String> {
        self.take().into_iter().filter(|it| it.starts_with(word)).collect()
    }

    fn add(&self, event: String) {
        self.0.lock().unwrap().push(event);
    }
}

/// Returns a store with an observer.
pub fn observed<S: Store + Clone>(store: S, observer: Arc<dyn Observer>) -> S {
    store.clone().into_any().add_observer(observer);
    store
}

fn outcome(decision: &Decision) -> &'static str {
    match decision.is_allowed() {
        true if decision.delay().is_zero() => "Allowed",
        true => "Waited",
        false if decision.is_blocked() => "Blocked",
        false => "Denied",
    }
}

impl Observer for Recorder {
    fn on_event(&self, event: &Event<'_>) {
        let limiter = event.limiter().unwrap_or("-");
        self.add(match *event {
            Event::Decided { decision, key, duration, .. } => {
                let (outcome, source) = (outcome(decision), decision.source());
                let key = key.map_or_else(|| "-".into(), |key| key.to_string());
                let timed = if duration.is_some() { " timed" } else { "" };
                format!("decided {limiter} {key} {outcome} {source:?}{timed}")
            }
            Event::WaitBegan { .. } => format!("wait began {limiter}"),
            Event::WaitEnded { .. } => format!("wait ended {limiter}"),
            Event::Released { key, units, .. } => format!("released {limiter} {key} {units}"),
            Event::HoldBegan { key, held, .. } => format!("hold began {limiter} {key} {held}"),
            Event::HoldEnded { key, held, used, .. } => {
                format!("hold ended {limiter} {key} {held} {used}")
            }
            Event::HoldExpired { key, held, .. } => format!("hold expired {limiter} {key} {held}"),
            Event::HoldLost { key, held, .. } => format!("hold lost {limiter} {key} {held}"),
            Event::DecisionDiffered { key, admitted, .. } => {
                format!("decision differed {limiter} {key} {admitted}")
            }
            Event::HoldUnsettled { key, held, used, .. } => {
                format!("hold unsettled {limiter} {key} {held} {used}")
            }
            Event::StoreFailed { operation, error, .. } => {
                format!("failed {limiter} {operation} {}", error.kind().as_str())
            }
            Event::Blocked { key, .. } => format!("blocked {limiter} {key}"),
            Event::Unblocked { key, .. } => format!("unblocked {limiter} {key}"),
            Event::Reset { key, .. } => format!("reset {limiter} {key}"),
            Event::SettingsChanged { from: (before, old), to: (after, new), .. } => {
                format!("changed {limiter}: {old}, {before} -> {new}, {after}")
            }
            Event::Reloaded { error, .. } => {
                format!("reloaded {}", error.map(ToString::to_string).unwrap_or_default())
            }
            Event::Rejected { reason, .. } => format!("rejected {reason} {limiter}"),
            Event::KeysHeld { keys, max_keys, .. } => format!("keys {keys} of {max_keys}"),
            Event::BatchSent { checks, .. } => format!("batch {limiter} {checks}"),
            Event::BreakerChanged { is_open, .. } => {
                format!("breaker {}", if is_open { "open" } else { "closed" })
            }
            _ => panic!("an unknown event: {event:?}"),
        });
    }
}
