//! The script interface: texts, arguments and replies. `scripts/prelude.lua` describes its other
//! side. No other module knows either side.

use std::sync::OnceLock;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use redis::{Cmd, ErrorKind, RedisError};

use crate::algorithm::{
    Action, EngineReply, EngineRequest, Params, Release, SOURCES, Source, State, combine,
};

const PRELUDE: &str = include_str!("../../../scripts/prelude.lua");
const EACH: &str = include_str!("../../../scripts/each.lua");
const ALGORITHM: &str = include_str!("../../../scripts/algorithm.lua");
const COMBINE: &str = include_str!("../../../scripts/combine.lua");

/// The text of a script, and the hash by which a server knows it.
pub(crate) struct Script {
    pub(crate) text: String,
    pub(crate) hash: Box<str>,
}

impl Script {
    fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().into();
        Self { text, hash }
    }

    /// Returns the script for limits with these parameters: all of them admit a request, or none.
    fn of(limits: impl ExactSizeIterator<Item = usize>) -> &'static Self {
        const SETS: usize = 1 << SOURCES.len();
        static SCRIPTS: [OnceLock<Script>; SETS] = [const { OnceLock::new() }; SETS];
        static SINGLE: [OnceLock<Script>; SOURCES.len()] =
            [const { OnceLock::new() }; SOURCES.len()];
        let is_single = limits.len() == 1;
        let set: usize = limits.fold(0, |set, index| set | 1 << index);
        let index = set.trailing_zeros() as usize;
        match is_single {
            true => SINGLE[index].get_or_init(|| Self::new(each(index))),
            false => SCRIPTS[set].get_or_init(|| Self::new(combined(set))),
        }
    }
}

/// Returns the script for keys of one limiter, by the index of its algorithm.
fn each(index: usize) -> String {
    let source = &SOURCES[index];
    [PRELUDE, &compose(EACH, source).replace("-- FAST\n", source.fast)].concat()
}

/// Returns the script for several limits. `set` has a bit for the index of each algorithm.
fn combined(set: usize) -> String {
    let used = SOURCES.iter().enumerate().filter(|(index, _)| set & 1 << index != 0);
    let (mut functions, mut table) = (String::new(), String::new());
    for (_, source) in used {
        functions.push_str(&compose(ALGORITHM, source).replace("NAME", source.name));
        table.push_str(&format!("[{}] = {}, ", source.form, source.name));
    }
    [PRELUDE, &functions, &format!("local algorithms = {{{table}}}\n"), COMBINE].concat()
}

fn compose(text: &str, source: &Source) -> String {
    text.replace("-- STATE\n", source.state).replace("-- MODEL\n", source.model)
}

/// A limit of a call: its key in Redis, its parameters, and its part of the request.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) key: String,
    pub(crate) params: Params,
    pub(crate) cost: u32,
    /// In microseconds.
    pub(crate) max_wait: f64,
}

impl Limit {
    fn request(&self, action: Action, now: f64) -> EngineRequest {
        let Self { cost, max_wait, .. } = *self;
        EngineRequest { action, cost: cost.into(), max_wait, now, admission: None }
    }
}

/// Makes the command that decides about these limits of one request, and the script that it runs.
pub(crate) fn decide(action: Action, limits: &[Limit]) -> (Cmd, &'static Script) {
    let script = Script::of(limits.iter().map(|limit| limit.params.index()));
    let mut command = command(script, limits.iter().map(|limit| &*limit.key), name(action));
    for limit in limits {
        command.arg(packed(&limit.params));
    }
    match limits {
        [limit] => command.arg(&*Runs::of(limit).bytes),
        _ => command.arg(limits.iter().flat_map(item).collect::<Vec<_>>()),
    };
    (command, script)
}

/// Checks of one limiter for one call.
pub(crate) struct CheckEach {
    pub(crate) command: Cmd,
    pub(crate) script: &'static Script,
    /// For each check the index of its state.
    states: Vec<usize>,
}

impl CheckEach {
    pub(crate) fn new<'a>(checks: impl ExactSizeIterator<Item = &'a Limit> + Clone) -> Self {
        let params = &checks.clone().next().expect("a call has a check").params;
        let mut index_of = HashMap::with_capacity_and_hasher(checks.len(), RandomState::default());
        let mut keys: Vec<(&str, Runs)> = vec![];
        let states = checks.map(|check| {
            let new = keys.len();
            let index = *index_of.entry(&*check.key).or_insert(new);
            match keys.get_mut(index) {
                Some((_, runs)) => runs.push(check),
                None => keys.push((&check.key, Runs::of(check))),
            }
            index
        });
        let states = states.collect();
        let script = Script::of([params.index()].into_iter());
        let mut command = command(script, keys.iter().map(|(key, _)| *key), name(Action::Check));
        let items: Vec<u8> = keys.iter().flat_map(|(_, runs)| &runs.bytes).copied().collect();
        command.arg(packed(params)).arg(items);
        Self { command, script, states }
    }

    /// Computes what the script has decided about each check; `None` for one that it could not
    /// decide about, and has not counted.
    pub(crate) fn read<'a>(
        &self,
        reply: &Reply,
        checks: impl ExactSizeIterator<Item = &'a Limit>,
    ) -> Result<Vec<Option<Decided>>, RedisError> {
        let (now, found) = split(reply)?;
        let mut states: Vec<Option<Option<State>>> = vec![None; found.len()];
        let read = |(limit, &index): (&Limit, &usize)| {
            let state = states.get_mut(index).ok_or_else(malformed)?;
            if state.is_none() {
                *state = Some(match &found[index] {
                    redis::Value::Nil => None,
                    found => Some(decode((limit, found)).ok_or_else(malformed)?),
                });
            }
            let Some(Some(state)) = state else { return Ok(None) };
            let reply = limit.params.step(state, &limit.request(Action::Check, now));
            Ok(Some(Decided { reply, limit: 0, now }))
        };
        checks.zip(&self.states).map(read).collect()
    }
}

/// The requests to a key, packed: equal ones in a row are a run.
struct Runs {
    bytes: Vec<u8>,
    /// The last run.
    count: u32,
    cost: u32,
    max_wait: f64,
}

impl Runs {
    fn of(limit: &Limit) -> Self {
        let bytes = vec![0; 2];
        let mut runs = Self { bytes, count: 0, cost: limit.cost, max_wait: limit.max_wait };
        runs.push(limit);
        runs
    }

    fn push(&mut self, limit: &Limit) {
        let is_same = self.cost == limit.cost && self.max_wait == limit.max_wait;
        if self.count > 0 && is_same {
            self.count += 1;
            let start = self.bytes.len() - Self::SIZE;
            self.bytes[start..start + 4].copy_from_slice(&self.count.to_le_bytes());
            return;
        }
        (self.count, self.cost, self.max_wait) = (1, limit.cost, limit.max_wait);
        let runs = u16::from_le_bytes([self.bytes[0], self.bytes[1]]) + 1;
        self.bytes[..2].copy_from_slice(&runs.to_le_bytes());
        self.bytes.extend(self.count.to_le_bytes());
        self.bytes.extend(self.cost.to_le_bytes());
        self.bytes.extend(self.max_wait.to_le_bytes());
    }

    const SIZE: usize = 16;
}

/// Returns true if the fast path of the script decides about requests that wait, too.
pub(crate) fn reserves_fast(params: &Params) -> bool {
    matches!(params, Params::LeakyBucket(_))
}

fn item(limit: &Limit) -> [u8; 16] {
    let mut item = [0; 16];
    item[..8].copy_from_slice(&f64::from(limit.cost).to_le_bytes());
    item[8..].copy_from_slice(&limit.max_wait.to_le_bytes());
    item
}

/// Makes the command that returns units to a key, without its last argument, a list of
/// [items](release_item).
pub(crate) fn release(key: &str, params: &Params) -> (Cmd, &'static Script) {
    let script = Script::of([params.index()].into_iter());
    let mut command = command(script, [key].into_iter(), "release");
    command.arg(packed(params));
    (command, script)
}

pub(crate) fn release_item(release: &Release) -> Vec<u8> {
    let Release { instant, units, kept } = *release;
    let instant = instant.expect("a release names the request");
    [instant, units, kept].map(f64::to_le_bytes).concat()
}

fn command<'a>(script: &Script, keys: impl ExactSizeIterator<Item = &'a str>, action: &str) -> Cmd {
    let mut command = redis::cmd("EVALSHA");
    command.arg(&*script.hash).arg(keys.len());
    for key in keys {
        command.arg(key);
    }
    command.arg(action);
    command
}

fn name(action: Action) -> &'static str {
    match action {
        Action::Check => "check",
        Action::Peek => "peek",
        Action::Refund => "refund",
        Action::Spend => "spend",
    }
}

fn packed(params: &Params) -> Vec<u8> {
    let mut bytes = vec![SOURCES[params.index()].form];
    bytes.extend(params.args().into_iter().flat_map(f64::to_le_bytes));
    bytes
}

/// The reply of a script: the time, and the states that it has found.
pub(crate) type Reply = Vec<redis::Value>;

/// The reply of the limit that binds, its index, and the time of the decision.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) reply: EngineReply,
    pub(crate) limit: usize,
    pub(crate) now: f64,
}

/// Computes the decision of the script from the states that it has found, or has left after a
/// refund.
pub(crate) fn read(reply: &Reply, action: Action, limits: &[Limit]) -> Result<Decided, RedisError> {
    let (now, found) = split(reply)?;
    let states = limits.iter().zip(found).map(decode).collect::<Option<Vec<_>>>();
    let mut states = states.filter(|all| all.len() == limits.len()).ok_or_else(malformed)?;
    let request = |limit: &Limit| {
        let request = limit.request(action, now);
        // The script has returned the units already.
        let cost = if action == Action::Refund { 0.0 } else { request.cost };
        EngineRequest { cost, ..request }
    };
    let mut step = |limit: usize, request: &EngineRequest| {
        limits[limit].params.step(&mut states[limit], request)
    };
    let (reply, limit) = match limits {
        [limit] => (step(0, &request(limit)), 0),
        _ => combine(&limits.iter().map(request).collect::<Vec<_>>(), step),
    };
    Ok(Decided { reply, limit, now })
}

fn decode((limit, found): (&Limit, &redis::Value)) -> Option<State> {
    match found {
        redis::Value::BulkString(bytes) => limit.params.decode(bytes),
        _ => None,
    }
}

/// Returns the time of a reply, and the states.
fn split(reply: &Reply) -> Result<(f64, &[redis::Value]), RedisError> {
    match reply.split_first() {
        Some((redis::Value::Int(now), found)) => Ok((*now as f64, found)),
        _ => Err(malformed()),
    }
}

fn malformed() -> RedisError {
    (ErrorKind::UnexpectedReturnType, "not a reply").into()
}
