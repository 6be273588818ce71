//! Random histories with waits, blocks and changed quotas: what is admitted is within what the
//! larger quota promises.

use proptest::{prelude::*, test_runner::TestRunner};

use super::super::{
    State,
    testing::{
        backends::{RedisServer, Scripted},
        changes::{Event, FORMS, Form, Limits, Promise, admitted, events, large_quotas, quotas},
    },
};

#[test]
fn changed_quotas_blocks_and_waits_admit_at_most_what_the_larger_quota_promises() {
    admit_at_most_what_is_promised(quotas());
}

#[test]
fn changed_large_quotas_admit_at_most_what_the_larger_quota_promises() {
    admit_at_most_what_is_promised(large_quotas());
}

fn admit_at_most_what_is_promised(quotas: impl Strategy<Value = Vec<Limits>>) {
    let server = RedisServer::start();
    for form in FORMS {
        let config =
            ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() };
        TestRunner::new(config)
            .run(&(&quotas, events(), 0..20), |(quotas, events, scripted)| {
                let twin = admitted(&mut State::default(), form, &quotas, &events);
                let promise = Promise::of(&quotas, form);
                // After a block was lifted, requests may overtake in a fixed window.
                let is_in_order = matches!(form, Form::FixedWindow)
                    || twin.is_sorted_by_key(|request| request.instant);
                prop_assert!(is_in_order, "{form:?}: not in order: {twin:?}");
                prop_assert!(promise.holds(form, &twin), "{form:?}: over: {twin:?}");
                if matches!(form, Form::LeakyBucket) {
                    prop_assert!(promise.keeps_distance(&twin), "{form:?}: {twin:?}");
                    // Requests that wait for the end of a block take no room until then.
                    let is_block = |(_, event): &(u32, Event)| matches!(event, Event::Block(_));
                    let fits = events.iter().any(is_block) || promise.fits(&twin);
                    prop_assert!(fits, "{form:?}: too many wait: {twin:?}");
                }
                if scripted == 0 {
                    let mut backend = Scripted::new(&server, "{key}");
                    backend.forget();
                    prop_assert_eq!(&admitted(&mut backend, form, &quotas, &events), &twin);
                }
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{form:?}: {failure}"));
    }
}
