//! The script interface: texts, arguments and replies. `scripts/prelude.lua` describes its other
//! side. No other module knows either side.

use std::sync::OnceLock;

use redis::{Cmd, ErrorKind, RedisError};

use super::script_text::ScriptText;
use crate::algorithm::{
    Action, Combined, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReceipt, HoldReply,
    Lifetime, Params, PerLimit, Release, SOURCES, ScriptSource, State, combine, units,
};

const PRELUDE: &str = include_str!("../../../scripts/prelude.lua");
const FAST: &str = include_str!("../../../scripts/fast.lua");
const SLOTS: &str = include_str!("../../../scripts/slots.lua");
const HELD: &str = include_str!("../../../scripts/held.lua");
const ERRORS: &str = include_str!("../../../scripts/errors.lua");
const EACH: &str = include_str!("../../../scripts/each.lua");
const ALGORITHM: &str = include_str!("../../../scripts/algorithm.lua");
const COMBINE: &str = include_str!("../../../scripts/combine.lua");

/// Returns the script for limits with these parameters: all of them admit a request, or none.
fn script(limits: impl ExactSizeIterator<Item = usize>) -> &'static ScriptText {
    const SETS: usize = 1 << SOURCES.len();
    static SCRIPTS: [OnceLock<ScriptText>; SETS] = [const { OnceLock::new() }; SETS];
    static SINGLE: [OnceLock<ScriptText>; SOURCES.len()] =
        [const { OnceLock::new() }; SOURCES.len()];
    let is_single = limits.len() == 1;
    let set: usize = limits.fold(0, |set, index| set | 1 << index);
    let index = set.trailing_zeros() as usize;
    match is_single {
        true => SINGLE[index].get_or_init(|| ScriptText::new(&each(index))),
        false => SCRIPTS[set].get_or_init(|| ScriptText::new(&combined(set))),
    }
}

/// Returns the script for keys of one limiter, by the index of its algorithm.
fn each(index: usize) -> String {
    let source = &SOURCES[index];
    let each = compose(EACH, source).replace("-- FAST\n", FAST).replace("-- ERRORS\n", ERRORS);
    [PRELUDE, &each].concat()
}

/// Returns the script for several limits. `set` has a bit for the index of each algorithm.
fn combined(set: usize) -> String {
    let used = SOURCES.iter().enumerate().filter(|(index, _)| set & 1 << index != 0);
    let (mut functions, mut table) = (String::new(), String::new());
    for (_, source) in used {
        functions.push_str(&compose(ALGORITHM, source).replace("NAME", source.name));
        table.push_str(&format!("[{}] = {}, ", source.form, source.name));
    }
    [PRELUDE, FAST, ERRORS, &functions, &format!("local algorithms = {{{table}}}\n"), COMBINE]
        .concat()
}

fn compose(text: &str, source: &ScriptSource) -> String {
    let (state, of_engine) = source.state.split_once("-- ENGINE\n").unwrap_or((source.state, ""));
    let model = [of_engine, source.model].concat();
    let text = text.replace("-- STATE\n", state).replace("-- MODEL\n", &model);
    let text = text.replace("-- PLAIN\n", source.fast).replace("-- HELD\n", HELD);
    text.replace("-- SLOTS\n", SLOTS)
}

/// A limit of a call: its key in Redis, its parameters, and its part of the request.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) key: String,
    pub(crate) params: Params,
    pub(crate) cost: u64,
    /// In microseconds.
    pub(crate) max_wait: u64,
    /// That of the hold of its units; `None` if they are spent at once.
    pub(crate) lifetime: Option<Lifetime>,
}

impl Limit {
    fn request(&self, action: Action, now: f64) -> EngineRequest {
        let hold = |lifetime| Action::Hold { lifetime, epoch: None };
        request(self.lifetime.map_or(action, hold), self.cost, self.max_wait, now)
    }
}

fn request(action: Action, cost: u64, max_wait: u64, now: f64) -> EngineRequest {
    let (max_wait, now) = (max_wait as i64, now as i64);
    EngineRequest { action, cost: units(cost), max_wait, now, admission: None, blocked: 0 }
}

/// Makes the command that decides about these limits of one request, and the script that it runs.
pub(crate) fn decide(action: Action, limits: &[Limit]) -> (Cmd, &'static ScriptText) {
    let script = script(limits.iter().map(|limit| limit.params.index()));
    let holds = limits.iter().any(|limit| limit.lifetime.is_some());
    let name = if holds { "hold" } else { name(action) };
    let mut command = command(script, limits.iter().map(|limit| &*limit.key), name);
    for limit in limits {
        command.arg(params_bytes(&limit.params));
    }
    match (action, limits) {
        (Action::Block { duration }, _) => {
            command.arg(&(duration as f64).to_le_bytes());
        }
        (Action::Unblock, _) => {
            command.arg("");
        }
        (_, [limit]) => {
            command_lifetime(&mut command, limit.lifetime);
            let mut items = Items::default();
            items.begin_key();
            items.push(limit.cost, limit.max_wait);
            command.arg(items.argument());
        }
        _ => {
            command.arg(limits.iter().flat_map(|limit| item(limit, holds)).collect::<Vec<_>>());
        }
    }
    (command, script)
}

/// Checks of one limiter for one call, or holds, each decided by itself.
pub(crate) struct CheckEach {
    params: Params,
    /// That of all holds; `None` for checks.
    lifetime: Option<Lifetime>,
    keys: Vec<String>,
    items: Items,
    checks: Vec<CheckOfKey>,
}

struct CheckOfKey {
    /// The index of its state in the reply.
    state: usize,
    cost: u64,
    max_wait: u64,
}

impl CheckEach {
    /// Begins with none; `count` is the expected number of checks.
    pub(crate) fn new(params: Params, lifetime: Option<Lifetime>, count: usize) -> Self {
        let (keys, items) = (vec![], Items::default());
        Self { params, lifetime, keys, items, checks: Vec::with_capacity(count) }
    }

    fn action(&self) -> Action {
        self.lifetime.map_or(Action::Check, |lifetime| Action::Hold { lifetime, epoch: None })
    }

    /// Adds a key, and all checks of it in their order, each with its cost and its longest wait. A
    /// key must be added only once.
    pub(crate) fn add(&mut self, key: String, checks: impl Iterator<Item = (u64, u64)>) {
        let state = self.keys.len();
        self.keys.push(key);
        self.items.begin_key();
        for (cost, max_wait) in checks {
            self.items.push(cost, max_wait);
            self.checks.push(CheckOfKey { state, cost, max_wait });
        }
    }

    /// Makes the command, and returns the script that it runs.
    pub(crate) fn command(&self) -> (Cmd, &'static ScriptText) {
        let script = script([self.params.index()].into_iter());
        let keys = self.keys.iter().map(|key| &**key);
        let mut command = command(script, keys, name(self.action()));
        command.arg(params_bytes(&self.params));
        command_lifetime(&mut command, self.lifetime);
        command.arg(self.items.argument());
        (command, script)
    }

    /// Computes what the script has decided about each check, or returns the error of its key.
    pub(crate) fn read(&self, reply: &Reply) -> Result<EachDecided, RedisError> {
        let (now, found) = split(reply)?;
        let (mut replies, mut differences) = (Vec::with_capacity(self.checks.len()), vec![]);
        for of_key in self.checks.chunk_by(|one, next| one.state == next.state) {
            let found = found.get(of_key[0].state).ok_or_else(malformed)?;
            if let redis::Value::ServerError(error) = found {
                replies.extend(of_key.iter().map(|_| Err(error.clone().into())));
                continue;
            }
            let (mut state, verdict) = decode(&self.params, found).ok_or_else(malformed)?;
            for (index, run) in of_key.chunk_by(CheckOfKey::is_same).enumerate() {
                let admitted = admitted_of(verdict, index).ok_or_else(malformed)?;
                for (number, &CheckOfKey { cost, max_wait, .. }) in run.iter().enumerate() {
                    let request = request(self.action(), cost, max_wait, now);
                    let mut reply = self.params.step(&mut state, &request);
                    let difference = Difference::find(number < admitted, &mut reply, &request);
                    differences.extend(difference.map(|difference| (replies.len(), difference)));
                    replies.push(Ok(reply));
                }
            }
        }
        Ok(EachDecided { replies, differences, now })
    }

    /// The name of the key of a check in Redis.
    pub(crate) fn key(&self, check: usize) -> &str {
        &self.keys[self.checks[check].state]
    }
}

impl CheckOfKey {
    /// Returns whether two checks of a key are in one run.
    fn is_same(&self, next: &Self) -> bool {
        (self.cost, self.max_wait) == (next.cost, next.max_wait)
    }
}

/// The replies to several checks, and the time of their decisions.
pub(crate) struct EachDecided {
    pub(crate) replies: Vec<Result<EngineReply, RedisError>>,
    /// The decisions that differ, by the indexes of their checks.
    pub(crate) differences: Vec<(usize, Difference)>,
    pub(crate) now: f64,
}

/// The code of the error of a request whose units are lost.
pub(crate) const DIFFERENT: &str = "DIFFERENT";

/// What the script has decided about a request otherwise than this process has computed. The
/// script has changed the state, so its decision stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Difference {
    pub(crate) admitted: bool,
    /// The request holds units, or has reserved an instant, by a receipt that is not known.
    pub(crate) has_lost_units: bool,
}

impl Difference {
    /// Compares what the script has decided with the reply to a request, and replaces that if it
    /// differs: nothing else is known about the limit then.
    fn find(admitted: bool, reply: &mut EngineReply, request: &EngineRequest) -> Option<Self> {
        let can_differ = request.action.can_be_denied() && reply.admitted != admitted;
        can_differ.then(|| {
            let wait = admitted.then_some(0);
            *reply = EngineReply { admitted, wait, ..EngineReply::uncounted(request.now) };
            let takes_units = request.action.holds() || request.max_wait > 0;
            let has_lost_units = admitted && takes_units && request.action != Action::Peek;
            Self { admitted, has_lost_units }
        })
    }

    /// The error of a request whose units are lost.
    pub(crate) fn error(self) -> RedisError {
        redis::make_extension_error(
            DIFFERENT.to_owned(),
            Some(
                "the units of the request cannot be used: Redis has admitted it, and this process \
                 has computed that it is denied; they expire or are restored by themselves; run \
                 one version of this crate, and report what the event says"
                    .to_owned(),
            ),
        )
    }
}

/// Returns how many requests of a run are admitted: without a verdict, all.
fn admitted_of(verdict: Option<&[u8]>, run: usize) -> Option<usize> {
    let Some(verdict) = verdict else { return Some(usize::MAX) };
    let bytes = verdict.get(2 * run..)?.first_chunk()?;
    Some(u16::from_le_bytes(*bytes).into())
}

/// The requests to each key, packed: equal ones in a row are a run.
#[derive(Default)]
struct Items {
    bytes: Vec<u8>,
    /// The start of each key.
    keys: Vec<usize>,
    /// The number of runs of the last key.
    runs: u16,
    /// The last run.
    count: u32,
    cost: u64,
    max_wait: u64,
}

impl Items {
    fn begin_key(&mut self) {
        (self.runs, self.count) = (0, 0);
        self.keys.push(self.bytes.len());
        self.bytes.extend([0; 2]);
    }

    /// Adds a request to the last key.
    fn push(&mut self, cost: u64, max_wait: u64) {
        let is_same = self.cost == cost && self.max_wait == max_wait;
        if self.count > 0 && is_same {
            self.count += 1;
            let start = self.bytes.len() - Self::SIZE;
            self.bytes[start..start + 4].copy_from_slice(&self.count.to_le_bytes());
            return;
        }
        (self.count, self.cost, self.max_wait) = (1, cost, max_wait);
        self.runs += 1;
        let key = self.keys[self.keys.len() - 1];
        self.bytes[key..key + 2].copy_from_slice(&self.runs.to_le_bytes());
        self.bytes.extend(self.count.to_le_bytes());
        self.bytes.extend((units(cost) as f64).to_le_bytes());
        self.bytes.extend((max_wait as f64).to_le_bytes());
    }

    /// Returns the bytes, without the keys at the end that have the same requests as the one before
    /// them.
    fn argument(&self) -> &[u8] {
        let last = self.keys.last().map_or(&[][..], |key| &self.bytes[*key..]);
        let same = |keys: &&[usize]| self.bytes[keys[0]..keys[1]] == *last;
        let same = self.keys.windows(2).rev().take_while(same).last();
        same.map_or(&self.bytes, |keys| &self.bytes[..keys[1]])
    }

    /// The size of a run.
    const SIZE: usize = 20;
}

/// Adds the lifetime of the holds, before the items.
fn command_lifetime(command: &mut Cmd, lifetime: Option<Lifetime>) {
    if let Some(Lifetime { time, grid }) = lifetime {
        command.arg(double_bytes([time as f64, grid as f64]));
    }
}

fn item(limit: &Limit, holds: bool) -> Vec<u8> {
    let Limit { cost, max_wait, lifetime, .. } = *limit;
    let Lifetime { time, grid } = lifetime.unwrap_or(Lifetime { time: 0, grid: 0 });
    let mut item = double_bytes([units(cost) as f64, max_wait as f64]);
    if holds {
        item.extend(double_bytes([time as f64, grid as f64]));
    }
    item
}

fn double_bytes<const N: usize>(numbers: [f64; N]) -> Vec<u8> {
    numbers.map(f64::to_le_bytes).concat()
}

/// Makes the command that returns units to a key, without its last argument, a list of
/// [items](release_item).
pub(crate) fn release_command(key: &str, params: &Params) -> (Cmd, &'static ScriptText) {
    let script = script([params.index()].into_iter());
    let mut command = command(script, [key].into_iter(), "release");
    command.arg(params_bytes(params));
    (command, script)
}

pub(crate) fn release_item(release: &Release) -> Vec<u8> {
    let Release { instant, units } = *release;
    let instant = instant.expect("a release names the request");
    double_bytes([instant as f64, units as f64])
}

/// Makes the command that ends and renews holds, and the script that it runs: the changes of each
/// key.
pub(crate) fn change_holds<'a>(
    params: &Params,
    keys: impl ExactSizeIterator<Item = (&'a str, &'a [HoldChange])> + Clone,
) -> (Cmd, &'static ScriptText) {
    let script = script([params.index()].into_iter());
    let mut command = command(script, keys.clone().map(|(key, _)| key), "holds");
    let mut items = vec![];
    for (_, changes) in keys {
        items.extend((changes.len() as u16).to_le_bytes());
        items.extend(changes.iter().flat_map(change_item));
    }
    command.arg(params_bytes(params)).arg(items);
    (command, script)
}

fn change_item(change: &HoldChange) -> Vec<u8> {
    let HoldChange { receipt: HoldReceipt { epoch, ends }, units, action } = *change;
    let (used, Lifetime { time, grid }) = match action {
        HoldAction::End { used } => (used, Lifetime { time: 0, grid: 0 }),
        HoldAction::Renew(lifetime) => (0, lifetime),
    };
    double_bytes([epoch, ends, units, used, time, grid].map(|number| number as f64))
}

/// Reads the result of each change, key by key; an error for a key that could not be changed.
pub(crate) fn read_changes(
    reply: &Reply,
) -> Result<Vec<Result<Vec<HoldReply>, RedisError>>, RedisError> {
    let (_, results) = split(reply)?;
    let of_key = |results: &redis::Value| match results {
        redis::Value::BulkString(bytes) => {
            Ok(bytes.chunks(24).map(hold_reply).collect::<Option<_>>().ok_or_else(malformed))
        }
        redis::Value::ServerError(error) => Ok(Err(error.clone().into())),
        _ => Err(malformed()),
    };
    results.iter().map(of_key).collect()
}

fn hold_reply(bytes: &[u8]) -> Option<HoldReply> {
    let number =
        |i: usize| Some(f64::from_le_bytes(bytes.get(8 * i..)?.get(..8)?.try_into().ok()?));
    Some(match number(0)? {
        1.0 => HoldReply::Ended,
        2.0 => HoldReply::Lost,
        3.0 => HoldReply::Expired,
        4.0 => {
            HoldReply::Renewed(HoldReceipt { epoch: number(1)? as i64, ends: number(2)? as i64 })
        }
        _ => return None,
    })
}

fn command<'a>(
    script: &ScriptText,
    keys: impl ExactSizeIterator<Item = &'a str>,
    action: &str,
) -> Cmd {
    let mut command = Cmd::with_capacity(6 + keys.len(), 256 + 64 * keys.len());
    command.arg("EVALSHA").arg(&*script.hash).arg(keys.len());
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
        Action::Hold { .. } => "hold",
        Action::Block { .. } => "block",
        Action::Unblock => "unblock",
        Action::Observe => "peek", // of a change that a script has made
    }
}

fn params_bytes(params: &Params) -> Vec<u8> {
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
    /// The replies of all limits, if there are several.
    pub(crate) all: PerLimit<EngineReply>,
    pub(crate) difference: Option<Difference>,
    pub(crate) now: f64,
}

/// Computes the decision of the script from the states that it has found, or has left after a
/// refund.
pub(crate) fn read(reply: &Reply, action: Action, limits: &[Limit]) -> Result<Decided, RedisError> {
    let (now, found) = split(reply)?;
    let states = limits.iter().zip(found).map(|(limit, found)| decode(&limit.params, found));
    let states = states.collect::<Option<Vec<_>>>();
    let mut states = states.filter(|all| all.len() == limits.len()).ok_or_else(malformed)?;
    // The index of a limit that denies.
    let denies = match found.get(limits.len()) {
        Some(redis::Value::Int(index)) => Some(usize::try_from(*index).map_err(|_| malformed())?),
        Some(_) => return Err(malformed()),
        None => None,
    };
    let request = |limit: &Limit| {
        let request = limit.request(action, now);
        // The script has made the change already.
        match action {
            Action::Refund | Action::Block { .. } | Action::Unblock => {
                EngineRequest::observe(now as i64)
            }
            Action::Check
            | Action::Peek
            | Action::Spend
            | Action::Hold { .. }
            | Action::Observe => request,
        }
    };
    if let [limit] = limits {
        let ((state, verdict), request) = (&mut states[0], request(limit));
        let mut reply = limit.params.step(state, &request);
        let admitted = admitted_of(*verdict, 0).ok_or_else(malformed)? > 0;
        let difference = Difference::find(admitted, &mut reply, &request);
        return Ok(Decided { reply, all: PerLimit::new(), limit: 0, difference, now });
    }
    let requests: PerLimit<_> = limits.iter().map(request).collect();
    let step = |limit: usize, request: &EngineRequest| {
        limits[limit].params.step(&mut states[limit].0, request)
    };
    let Combined { replies: mut all, binding: mut limit } = combine(&requests, step);
    let mut difference = None;
    for (reply, request) in all.iter_mut().zip(&requests) {
        let of_limit = Difference::find(denies.is_none(), reply, request);
        difference = of_limit.filter(|it| it.has_lost_units).or(difference).or(of_limit);
    }
    if difference.is_some() {
        limit = denies.filter(|index| *index < limits.len()).unwrap_or(limit);
    }
    Ok(Decided { reply: all[limit], all, limit, difference, now })
}

/// Reads the state of a key and, if a request was denied, how many of each run were admitted.
fn decode<'a>(params: &Params, found: &'a redis::Value) -> Option<(State, Option<&'a [u8]>)> {
    use redis::Value::{Array, BulkString};
    match found {
        BulkString(state) => Some((params.decode(state)?, None)),
        Array(both) => match &both[..] {
            [BulkString(state), BulkString(verdict)] => {
                Some((params.decode(state)?, Some(verdict)))
            }
            _ => None,
        },
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

#[cfg(test)]
mod tests {
    use std::iter;

    use super::{
        super::script_text::{assert_written, write},
        *,
    };

    /// The files of an algorithm in the order of their texts.
    fn files(source: &ScriptSource) -> Vec<String> {
        let is_log = source.model.contains(include_str!("../../../scripts/sliding_log/log.lua"));
        let is_bucket = source.model.contains(include_str!("../../../scripts/bucket/model.lua"));
        let folder = if is_bucket { "bucket" } else { source.name };
        let own = |file: &str| format!("{folder}/{file}.lua");
        let storage = if is_log { own("log") } else { "reservations.lua".into() };
        let own_fast = format!("{}/fast.lua", source.name);
        let fast = ["fast.lua".into(), own_fast, "held.lua".into(), "slots.lua".into()];
        let shared = ["holding.lua", "finish.lua"].map(String::from);
        let model = ["errors.lua".into(), "engine.lua".into(), "block.lua".into(), own("model")];
        iter::once(own("state")).chain(fast).chain(model).chain([storage]).chain(shared).collect()
    }

    #[test]
    fn the_script_of_each_algorithm_has_the_hash_in_the_repo() {
        assert_written(SOURCES.iter().enumerate().map(|(index, source)| {
            let purpose = format!("Decides about keys of a {} limiter, one by one.", source.name);
            let files = files(source).join(", ");
            let files = format!("prelude.lua, each.lua with {files}");
            write(source.name, &purpose, &files, script([index].into_iter()))
        }));
    }

    #[test]
    fn the_script_of_several_limits_has_the_hash_in_the_repo() {
        let index = SOURCES.iter().position(|source| source.name == "token_bucket").unwrap();
        let purpose = "Decides about several limits of one request, here of token buckets: the \
                       text has a\n-- function for each algorithm among the limits.";
        let files = files(&SOURCES[index]).join(", ");
        let files = format!("prelude.lua, algorithm.lua with {files}, combine.lua");
        let script = script([index, index].into_iter());
        assert_written([write("several_token_buckets", purpose, &files, script)]);
    }
}
