//! What the calls of a store share: its connections, the names of its keys, and the denials that it
//! remembers. It decides nothing.

use std::{fmt, sync::Arc};

use super::{
    monitor::Monitor,
    release::{self, ReleaseFuture},
    script,
    transport::{ANSWER_TIMEOUT, Client, Command, Deadline},
};
use crate::{
    algorithm::{HoldAction, HoldChange, Release, units as count},
    decision::Receipt,
    keys::Key,
    observe::{Event, Observers},
    store::{Hold, HoldGuard, RetryQueues, Settings, denials::Denials},
};

#[derive(Clone)]
pub(super) struct Backend {
    pub(super) client: Client,
    pub(super) monitor: Arc<Monitor>,
    /// The prefix of all keys in Redis.
    pub(super) prefix: Arc<str>,
    pub(super) denials: Denials,
}

impl Backend {
    /// Returns the name of a key in Redis.
    pub(super) fn key(&self, settings: &Settings, key: &Key<'_>) -> String {
        let Settings { name, algorithm, .. } = settings;
        // Empty braces would not determine the slot. No other key has this form.
        let key = Some(key.as_str()).filter(|key| !key.is_empty()).unwrap_or("%");
        [&self.prefix, ":", name, ":", algorithm.name(), ":{", key, "}"].concat()
    }

    /// Keeps a hold until it ends. `queues` have the requests that wait for its units.
    pub(super) fn keep_hold(&self, hold: Hold, queues: Arc<RetryQueues>) -> Box<dyn HoldGuard> {
        Box::new(RedisHold { backend: self.clone(), hold, queues })
    }

    /// Ends a hold in the background, and then calls `on_end`.
    fn end_hold(
        &self,
        settings: &Settings,
        key: &Key<'_>,
        change: HoldChange,
        on_end: impl Fn() + Send + Sync + 'static,
    ) {
        let (client, params) = (self.client.clone(), settings.params);
        let (key, on_end) = (self.key(settings, key), Arc::new(on_end));
        let name = key.clone();
        let run = move || -> ReleaseFuture {
            let (client, key, on_end) = (client.clone(), key.clone(), on_end.clone());
            Box::pin(async move {
                let changes = [change];
                let of_key = [(&*key, &changes[..])].into_iter();
                let (command, script) = script::change_holds(&params, of_key);
                let command = Command::script(&command, &script.text);
                let deadline = Deadline::new(ANSWER_TIMEOUT);
                let (reply, _): (script::Reply, _) = client.execute(deadline, command).await?;
                drop(reply);
                on_end();
                Ok(())
            })
        };
        self.client.execute_later(release::task(&name, run));
    }

    /// Releases in the background the units that a decision has spent for one limit: its caller has
    /// gone. Returns whether it has spent any.
    pub(super) fn release_late(
        &self,
        settings: &Settings,
        key: &Key<'_>,
        units: u64,
        of: &Receipt,
    ) -> bool {
        let instant = match of {
            Receipt::At(instant, _) => *instant,
            Receipt::Hold(receipt) => {
                let (receipt, action) = (**receipt, HoldAction::End { used: 0.0 });
                let change = HoldChange { receipt, units: count(units), action };
                self.end_hold(settings, key, change, || ());
                return true;
            }
            Receipt::None | Receipt::Id(_) => return false,
        };
        let change = self.denials.begin_return(settings, key);
        let key = self.key(settings, key);
        let release = Release { instant: Some(instant as f64), units: count(units) };
        self.client.execute_later(release::job(&settings.params, &key, release, change));
        true
    }
}

/// A hold that the store keeps.
struct RedisHold {
    backend: Backend,
    hold: Hold,
    queues: Arc<RetryQueues>,
}

impl fmt::Debug for RedisHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisHold").field("hold", &self.hold).finish_non_exhaustive()
    }
}

impl HoldGuard for RedisHold {
    fn end(self: Box<Self>, used: u64) {
        let Self { backend, hold, queues } = *self;
        let (limiter, key) = (hold.settings.name, hold.key.clone());
        let on_end = move || queues.units_returned(limiter, &key);
        backend.end_hold(&hold.settings, &hold.key, hold.end(used), on_end);
    }

    fn is_expired(&self) -> bool {
        false
    }
}

/// Reports the units that are returned for a caller that has gone.
pub(super) fn report_released(observers: &Observers, limiter: &str, key: &Key<'_>, units: u64) {
    observers.report(&Event::Released { limiter, key, units });
}

/// Reports that a call is sent.
pub(super) fn report_sent(observers: &Observers, limiter: &str, checks: usize) {
    observers.report(&Event::BatchSent { limiter, checks });
}
