//! An observer that writes down all events, as lines of text.

use std::sync::{Arc, Mutex};

use tower_ratelimit::observe::{
    BatchSent, BreakerChanged, Decided, KeyChanged, KeysHeld, Observer, Rejected, Released,
    Reloaded, SettingsChanged, StoreFailed, WaitBegan, WaitEnded,
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

impl Observer for Recorder {
    fn decided(&self, event: &Decided<'_>) {
        let (outcome, source) = (event.outcome(), event.decision.source());
        let limiter = event.decision.limiter();
        let key = event.key.map_or_else(|| "-".into(), |key| key.to_string());
        let timed = if event.duration.is_some() { " timed" } else { "" };
        self.add(format!("decided {limiter} {key} {outcome:?} {source:?}{timed}"));
    }

    fn wait_began(&self, event: &WaitBegan<'_>) {
        self.add(format!("wait began {}", event.limiter));
    }

    fn wait_ended(&self, event: &WaitEnded<'_>) {
        self.add(format!("wait ended {}", event.limiter));
    }

    fn released(&self, event: &Released<'_>) {
        self.add(format!("released {} {} {}", event.limiter, event.key, event.units));
    }

    fn store_failed(&self, event: &StoreFailed<'_>) {
        let (operation, kind) = (event.operation.as_str(), event.kind.as_str());
        self.add(format!("failed {} {operation} {kind}", event.limiter));
    }

    fn key_changed(&self, event: &KeyChanged<'_>) {
        let KeyChanged { limiter, key, change, .. } = event;
        self.add(format!("{} {limiter} {key}", change.as_str()));
    }

    fn settings_changed(&self, event: &SettingsChanged<'_>) {
        self.add(format!("changed {event}"));
    }

    fn reloaded(&self, event: &Reloaded<'_>) {
        let error = event.error.map(ToString::to_string);
        self.add(format!("reloaded {}", error.unwrap_or_default()));
    }

    fn rejected(&self, event: &Rejected<'_>) {
        let limiter = event.limiter.unwrap_or("-");
        self.add(format!("rejected {} {limiter}", event.reason.as_str()));
    }

    fn keys_held(&self, event: &KeysHeld) {
        self.add(format!("keys {} of {}", event.keys, event.max_keys));
    }

    fn batch_sent(&self, event: &BatchSent<'_>) {
        self.add(format!("batch {} {}", event.limiter, event.checks));
    }

    fn breaker_changed(&self, event: &BreakerChanged<'_>) {
        let state = if event.is_open { "open" } else { "closed" };
        self.add(format!("breaker {state}"));
    }
}
