//! What a store counts and reports about its connections: the counters of its health, the events
//! for its observers, and those of the log. The only command that it sends is the ping that
//! explains an error.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use redis::RedisError;

use super::{
    connections::{
        ANSWER_TIMEOUT, Client, Deadline, Event, NodeHealth, Owner, Probe, TransportError, home,
    },
    error::{Account, ExplainedError, is_of_one_key, lacks_permission, status_of},
    events, probe,
    recent::RecentFailures,
};
use crate::{
    error::StoreError,
    observe::{
        self, Observer, Observers,
        log::{self, Throttle},
    },
    store::Health,
    sync::lock,
};

/// The time between two events about single decisions that failed. While Redis is down, another
/// event reports it; so this bounds the log of a Redis that answers some calls late.
const FAILED_AFTER: Duration = Duration::from_secs(10);
/// The time between two pings that find out which permission is missing.
const PING_AFTER: Duration = Duration::from_secs(60);

/// The owner of the connections of a store. Clones of the store share it.
pub(super) struct Monitor {
    /// The prefix of all keys.
    prefix: Arc<str>,
    account: Account,
    /// The counters, the time of the last error, and that error.
    counted: Mutex<(Health, Option<TransportError>)>,
    recent_failures: RecentFailures,
    failed_decisions: Throttle,
    different_decisions: Throttle,
    pings: Throttle,
    observers: Mutex<Observers>,
}

impl Monitor {
    /// `user` is that of the connections, if it is known.
    pub(super) fn new(prefix: Arc<str>, user: Option<Arc<str>>) -> Self {
        Self {
            account: Account { user, prefix: Some(prefix.clone()) },
            prefix,
            counted: Mutex::new((Health::ready(), None)),
            recent_failures: RecentFailures::default(),
            failed_decisions: Throttle::default(),
            different_decisions: Throttle::default(),
            pings: Throttle::default(),
            observers: Mutex::default(),
        }
    }

    pub(super) fn health(&self, nodes: NodeHealth) -> Health {
        let NodeHealth { state, is_available, consecutive_failures } = nodes;
        let (counted, last_error) = lock(&self.counted).clone();
        Health {
            status: status_of(state),
            is_available,
            consecutive_failures,
            recent_failures: self.recent_failures.count(Instant::now()),
            last_error: last_error.map(|error| self.explain(error).line().into()),
            ..counted
        }
    }

    pub(super) fn observers(&self) -> Observers {
        lock(&self.observers).clone()
    }

    /// Adds an observer, unless it is known, and reports the breakers to it.
    pub(super) fn add_observer(&self, client: &Client, observer: Arc<dyn Observer>) {
        if !lock(&self.observers).add(observer.clone()) {
            return;
        }
        client.tell_breakers(
            &(Arc::new(move |server: &str, is_open| {
                observer.on_event(&observe::Event::BreakerChanged { server, is_open });
            }) as _),
        );
    }

    /// Reports in the log that a decision of a limiter has failed, once in [`FAILED_AFTER`]. While
    /// the breaker is open, another event reports it. Returns the error of the store. The keys of
    /// the limiter may not have the prefix of the store.
    pub(super) fn failed(
        self: &Arc<Self>,
        client: &Client,
        limiter: &str,
        error: TransportError,
        has_prefix: bool,
    ) -> StoreError {
        self.recent_failures.add(Instant::now());
        let lacks_permission = error.redis().is_some_and(lacks_permission);
        let is_circuit_open = error.is_circuit_open();
        let Account { user, prefix } = self.account.clone();
        let account = Account { user, prefix: prefix.filter(|_| has_prefix) };
        let error = ExplainedError::new(error, &account);
        if cfg!(feature = "tracing") {
            if !is_circuit_open && let Some(requests) = self.failed_decisions.next(FAILED_AFTER) {
                events::decisions_failed(limiter, requests, &error);
            }
            if lacks_permission && self.pings.next(PING_AFTER).is_some() {
                self.ping_in_background(client);
            }
        }
        error.into_store_error()
    }

    /// Reports that the script has decided about a key in Redis otherwise than this process has
    /// computed: to the observers of the limiter, and in the log.
    #[cold]
    pub(super) fn differs(&self, observers: &Observers, limiter: &str, key: &str, admitted: bool) {
        if let Some(requests) = self.different_decisions.next(FAILED_AFTER) {
            events::decision_differed(limiter, requests, key, admitted);
        }
        observers.report(&observe::Event::DecisionDiffered { limiter, key, admitted });
    }

    /// Finds out by a ping which permission is missing, and reports it.
    fn ping_in_background(self: &Arc<Self>, client: &Client) {
        let (monitor, client) = (self.clone(), client.clone());
        home::spawn(async move {
            let Err(error) = client.ping(Deadline::new(ANSWER_TIMEOUT)).await else { return };
            if error.redis().is_some_and(lacks_permission) {
                events::permission_missing(&monitor.explain(error));
            }
        });
    }

    /// Explains an error, with the user and the prefix of the keys.
    pub(super) fn explain(&self, error: TransportError) -> ExplainedError {
        ExplainedError::new(error, &self.account)
    }

    fn count(&self, error: &TransportError) {
        let (counted, last_error) = &mut *lock(&self.counted);
        let counter = match error {
            error if error.is_timeout() => &mut counted.timeouts,
            error if error.redis().is_some_and(RedisError::is_timeout) => &mut counted.timeouts,
            error if error.is_interrupted() => &mut counted.interrupted,
            _ => &mut counted.errors,
        };
        *counter += 1;
        counted.last_error_at = Some(SystemTime::now());
        *last_error = Some(error.clone());
    }
}

impl Owner for Monitor {
    fn notify(&self, event: &Event<'_>) {
        match *event {
            Event::Replied => lock(&self.counted).0.answers += 1,
            Event::Failed(error) => self.count(error),
            Event::Skipped => lock(&self.counted).0.skipped += 1,
            Event::BreakerChanged { server, is_open } => {
                lock(&self.counted).0.outages += u64::from(is_open);
                self.observers().report(&observe::Event::BreakerChanged { server, is_open });
            }
            _ => {
                events::log(event, &self.account);
                if let Event::Available { server, outage, .. }
                | Event::Executes { server, outage, .. } = *event
                {
                    log::decides_again(server, outage);
                }
            }
        }
    }

    fn is_of_one_key(&self, error: &RedisError) -> bool {
        is_of_one_key(error)
    }

    fn ping(&self, tag: &str) -> Probe {
        probe::ping(&self.prefix, tag)
    }

    fn probe(&self, key: &[u8]) -> Probe {
        probe::beside(&self.prefix, key)
    }

    fn proof(&self, key: &[u8]) -> Probe {
        probe::proof(&self.prefix, key)
    }
}
