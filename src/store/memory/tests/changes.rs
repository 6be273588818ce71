//! A store in memory admits under changed quotas what the engine does.

use std::{sync::Arc, time::Duration};

use proptest::{prelude::*, test_runner::TestRunner};
use tokio::{runtime, time::advance};
use tower_ratelimit_engine::algorithm::testing::{
    backends::{Backend, START},
    changes::{FORMS, Form, Limits, admitted, events, quotas},
};

use super::requests::{decide, now_or_never, settings};
use crate::{
    algorithm::{EngineReply, EngineRequest, Params, Release, State},
    keys::Key,
    store::{MemoryStore, Settings},
};

/// A key of a store in memory.
struct Stored {
    store: MemoryStore,
    settings: Vec<(Params, Arc<Settings>)>,
    now: i64,
}

impl Stored {
    fn new(form: Form, quotas: &[Limits]) -> Self {
        let params = quotas.iter().map(|limits| limits.params(form));
        let settings = params.map(|params| (params, settings(params))).collect();
        Self { store: MemoryStore::new(), settings, now: START }
    }

    fn advance(&mut self, params: &Params, now: i64) -> Arc<Settings> {
        now_or_never(advance(Duration::from_micros((now - self.now) as u64)));
        self.now = now;
        let is_same = |other: &Params| format!("{other:?}") == format!("{params:?}");
        let (_, settings) = self.settings.iter().find(|(other, _)| is_same(other)).unwrap();
        settings.clone()
    }
}

impl Backend for Stored {
    fn decide(&mut self, params: &Params, request: EngineRequest) -> EngineReply {
        let settings = self.advance(params, request.now);
        decide(&self.store, &settings, "key", request)
    }

    fn release(&mut self, params: &Params, now: i64, releases: &[Release]) {
        let settings = self.advance(params, now);
        let by_store = |release: &Release| {
            let instant = release.instant.map(|instant| instant - START);
            Release { instant, ..*release }
        };
        let releases: Vec<_> = releases.iter().map(by_store).collect();
        self.store.return_units(&settings, &Key::from("key"), &releases);
    }
}

#[test]
fn changed_quotas_blocks_and_waits_admit_what_the_twin_admits() {
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.unwrap();
    let _context = runtime.enter();
    for form in FORMS {
        let config =
            ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() };
        TestRunner::new(config)
            .run(&(quotas(), events()), |(quotas, events)| {
                let twin = admitted(&mut State::default(), form, &quotas, &events);
                let mut stored = Stored::new(form, &quotas);
                prop_assert_eq!(admitted(&mut stored, form, &quotas, &events), twin);
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{form:?}: {failure}"));
    }
}
