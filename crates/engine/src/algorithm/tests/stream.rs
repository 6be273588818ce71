//! Writes a stream of calls to the scripts, which `make test-lua54` runs under two versions of Lua:
//! the package `tests/lua` reads it. Does not run the calls.

use std::{collections::HashSet, fs, path::Path};

use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};

use super::{
    super::{Action, EngineRequest, HoldAction, HoldChange, HoldReceipt, Lifetime, Params, State},
    backends::{Backend, Holds, START},
    generators::{Step, steps},
    holds::any_limits,
};
use crate::script::{self, Arguments, CheckEach, Limit, ScriptText};

const HISTORIES: usize = 700;

/// Records of fields: `script`, its hash and its text; `call`, a hash, the time, and the arguments
/// of `EVALSHA` behind the hash; `flush`. Each record and each field begins with its size.
#[derive(Default)]
struct Stream {
    bytes: Vec<u8>,
    known: HashSet<String>,
}

impl Stream {
    fn record(&mut self, fields: &[&[u8]]) {
        self.bytes.extend((fields.len() as u32).to_le_bytes());
        for field in fields {
            self.bytes.extend((field.len() as u32).to_le_bytes());
            self.bytes.extend(*field);
        }
    }

    /// Records a call whose command the engine writes, at this time.
    fn call(&mut self, now: i64, write: impl FnOnce(Arguments<'_>) -> &'static ScriptText) {
        let mut arguments = vec![];
        let script = write(&mut |argument| arguments.push(argument.to_vec()));
        if self.known.insert(script.hash.to_string()) {
            self.record(&[b"script", script.hash.as_bytes(), script.text.as_bytes()]);
        }
        let now = now.to_string();
        let mut fields = vec![&b"call"[..], script.hash.as_bytes(), now.as_bytes()];
        fields.extend(arguments.iter().skip(2).map(Vec::as_slice));
        self.record(&fields);
    }
}

fn limit(key: &str, params: &Params, request: &EngineRequest) -> Limit {
    let cost = request.cost.min(params.max_cost()) as u64;
    let max_wait = request.max_wait.min(params.max_reservable()) as u64;
    let holds = !params.spends() && request.action == Action::Check;
    let lifetime = holds.then(|| Lifetime::new(1_000_000));
    Limit { key: key.to_owned(), params: *params, cost, max_wait, lifetime }
}

/// A history of one limiter, whose requests also go to another limit, and to further keys.
fn history(stream: &mut Stream, limits: [Params; 2], other: &Params, steps: &[Step]) {
    stream.record(&[b"flush"]);
    let (mut now, mut current, mut twin) = (START, 0, State::default());
    let mut admitted = vec![];
    for (i, step) in steps.iter().enumerate() {
        current ^= usize::from(step.switch);
        let params = &limits[current];
        now += step.ahead(params, true);
        let releases = step.releases(&mut admitted);
        if !releases.is_empty() {
            twin.release(params, now, &releases);
            let item = |release| script::release_item(release, false);
            stream.call(now, |write| {
                let script = script::release("{k}0", params, write);
                write(&releases.iter().flat_map(item).collect::<Vec<_>>());
                script
            });
            continue;
        }
        let mut request = step.decide(params, now);
        if !(params.spends() && other.spends()) && request.action.spends() {
            request.action = Action::Check; // which holds
        }
        let action = match limit("{k}0", params, &request).lifetime {
            Some(lifetime) => Action::Hold { lifetime, epoch: None },
            None => request.action,
        };
        let reply = twin.decide(params, EngineRequest { action, ..request });
        if request.action == Action::Check && params.spends() && reply.admitted {
            admitted.push((reply.instant, request.cost));
        }
        if i % 4 == 0 && params.can_hold() {
            holds(stream, &mut twin, params, other, &request);
        }
        let own = limit("{k}0", params, &request);
        stream.call(now, |write| script::decide(request.action, std::slice::from_ref(&own), write));

        if i % 3 == 0 && !request.action.blocks() {
            let both = [own.clone(), limit("{k}other", other, &request)];
            stream.call(now, |write| script::decide(request.action, &both, write));
        }
        let lifetime = (!params.spends()).then(|| Lifetime::new(2_000_000));
        let mut call = CheckEach::new(*params, lifetime, 6);
        for key in ["{k}0", "{k}1", "{k}2"] {
            let check = (own.cost, own.max_wait);
            call.add(key.to_owned(), [check, check, (1, 0)].into_iter());
        }
        stream.call(now, |write| call.write(write));
    }
}

/// Holds units, alone and beside another limit, and ends and renews holds of two keys.
fn holds(
    stream: &mut Stream,
    twin: &mut State,
    params: &Params,
    other: &Params,
    request: &EngineRequest,
) {
    let now = request.now;
    let lifetime = Lifetime::new(1_000_000 + request.cost.min(1_000_000) as u64);
    let action = Action::Hold { lifetime, epoch: None };
    let reply = twin.decide(params, EngineRequest { action, ..*request });
    let held = Limit { lifetime: Some(lifetime), ..limit("{k}0", params, request) };
    stream.call(now, |write| script::decide(Action::Check, std::slice::from_ref(&held), write));
    let both = [held.clone(), limit("{k}other", other, request)];
    stream.call(now, |write| script::decide(Action::Check, &both, write));

    let found = reply.hold.unwrap_or(HoldReceipt { epoch: now, ends: now + 1 });
    let lost = HoldReceipt { epoch: now - 1, ends: now + 1_000_000 };
    let change = |receipt, action| HoldChange { receipt, units: request.cost, action };
    let first = [
        change(found, HoldAction::End { used: request.cost / 2 }),
        change(lost, HoldAction::Renew(lifetime)),
    ];
    let second = [change(lost, HoldAction::End { used: request.cost })];
    let _ = twin.change_holds(params, now, &first);
    let keys = [("{k}0", &first[..]), ("{k}1", &second[..])];
    stream.call(now, |write| script::change_holds(params, keys.into_iter(), write));
}

#[test]
fn a_stream_of_calls_is_written_for_other_versions_of_lua() {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let mut stream = Stream::default();
    for _ in 0..HISTORIES {
        let histories = (any_limits(), any_limits(), steps());
        let (limits, [other, _], steps) = histories.new_tree(&mut runner).unwrap().current();
        history(&mut stream, limits, &other, &steps);
    }
    // All algorithms by themselves, and pairs of them.
    assert!(stream.known.len() > 5 + 5, "{} scripts", stream.known.len());
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/lua"));
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("stream"), &stream.bytes).unwrap();
}
