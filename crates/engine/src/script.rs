//! The script interface: texts, arguments and replies, as bytes and integers. `scripts/prelude.lua`
//! describes its other side. No other module knows either side.

use std::{iter, sync::OnceLock};

use crate::algorithm::{
    Action, Combined, EngineReply, EngineRequest, HoldAction, HoldChange, HoldReceipt, HoldReply,
    Lifetime, Params, PerLimit, Release, SOURCES, ScriptSource, State, combine, units,
};
pub use crate::script_text::ScriptText;
#[cfg(any(test, feature = "testing"))]
pub use crate::script_text::{assert_written, write};

const PRELUDE: &str = include_str!("../scripts/prelude.lua");
const FAST: &str = include_str!("../scripts/fast.lua");
const LEAKY: &str = include_str!("../scripts/leaky_bucket/fast.lua");
const DISPATCH: &str = include_str!("../scripts/dispatch.lua");
const SLOTS: &str = include_str!("../scripts/slots.lua");
const HELD: &str = include_str!("../scripts/held.lua");
const ERRORS: &str = include_str!("../scripts/errors.lua");
const EACH: &str = include_str!("../scripts/each.lua");
const ALGORITHM: &str = include_str!("../scripts/algorithm.lua");
const COMBINE: &str = include_str!("../scripts/combine.lua");

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
    [PRELUDE, &compose(EACH, source, source.queue)].concat()
}

/// Returns the script for several limits. `set` has a bit for the index of each algorithm.
fn combined(set: usize) -> String {
    let used = SOURCES.iter().enumerate().filter(|(index, _)| set & 1 << index != 0);
    let (mut functions, mut table) = (String::new(), String::new());
    for (_, source) in used {
        functions.push_str(&compose(ALGORITHM, source, "").replace("NAME", source.name));
        table.push_str(&format!("[{}] = {}, ", source.form, source.name));
    }
    [PRELUDE, FAST, ERRORS, &functions, &format!("local algorithms = {{{table}}}\n"), COMBINE]
        .concat()
}

/// Replaces the marks in a text by what stands there. Some of these texts have marks, too.
fn compose(text: &str, source: &ScriptSource, queue: &str) -> String {
    let (state, of_engine) = source.state.split_once("-- ENGINE\n").unwrap_or((source.state, ""));
    let model = [of_engine, source.model].concat();
    let parts = [
        ("-- FAST\n", FAST),
        ("-- STATE\n", state),
        ("-- PLAIN\n", source.fast),
        ("-- DISPATCH\n", DISPATCH),
        ("-- QUEUE\n", queue),
        ("-- LEAKY\n", LEAKY),
        ("-- HELD\n", HELD),
        ("-- ERRORS\n", ERRORS),
        ("-- MODEL\n", &model),
        ("-- SLOTS\n", SLOTS),
    ];
    parts.iter().fold(text.to_owned(), |text, (mark, part)| text.replace(mark, part))
}

/// Takes each argument of a command in its order.
pub type Arguments<'a> = &'a mut dyn FnMut(&[u8]);

/// What a reply has for a key, or behind all keys.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a, E> {
    /// The state of a key.
    State(&'a [u8]),
    /// The state of a key, and how many of each run were admitted: one of them was denied.
    Denied(&'a [u8], &'a [u8]),
    /// The index of a limit that denies.
    Limit(i64),
    /// The key has an error.
    Error(E),
}

/// A limit of a call: its key in Redis, its parameters, and its part of the request.
#[derive(Clone, Debug)]
pub struct Limit {
    pub key: String,
    pub params: Params,
    pub cost: u64,
    /// In microseconds.
    pub max_wait: u64,
    /// The lifetime of the hold of its units; `None` if they are spent at once.
    pub lifetime: Option<Lifetime>,
}

impl Limit {
    fn request(&self, action: Action, now: i64) -> EngineRequest {
        let hold = |lifetime| Action::Hold { lifetime, epoch: None };
        request(self.lifetime.map_or(action, hold), self.cost, self.max_wait, now)
    }
}

fn request(action: Action, cost: u64, max_wait: u64, now: i64) -> EngineRequest {
    let max_wait = max_wait as i64;
    EngineRequest { action, cost: units(cost), max_wait, now, admission: None, blocked: 0 }
}

/// Writes the command that decides about these limits of one request. Returns the script that it
/// runs.
pub fn decide(action: Action, limits: &[Limit], write: Arguments<'_>) -> &'static ScriptText {
    let script = script(limits.iter().map(|limit| limit.params.index()));
    let holds = limits.iter().any(|limit| limit.lifetime.is_some());
    let name = if holds { "hold" } else { name(action) };
    begin(script, limits.iter().map(|limit| &*limit.key), name, write);
    for limit in limits {
        write(&params_bytes(&limit.params));
    }
    match (action, limits) {
        (Action::Block { duration }, _) => write(&(duration as f64).to_le_bytes()),
        (Action::Unblock, _) => write(b""),
        (_, [limit]) => {
            write_lifetime(limit.lifetime, write);
            let Limit { cost, max_wait, .. } = *limit;
            write(&run_bytes(&[Run { key: 0, count: 1, cost, max_wait }]));
        }
        _ => write(&limits.iter().flat_map(|limit| item(limit, holds)).collect::<Vec<_>>()),
    }
    script
}

/// Checks of one limiter for one call, or holds, each decided by itself.
pub struct CheckEach {
    params: Params,
    /// The lifetime of all holds; `None` for checks.
    lifetime: Option<Lifetime>,
    keys: Vec<String>,
    runs: Vec<Run>,
}

/// Equal requests to a key in a row.
struct Run {
    /// The index of its key, and of its state in the reply.
    key: usize,
    count: u32,
    cost: u64,
    max_wait: u64,
}

impl CheckEach {
    /// Begins with none; `count` is the expected number of checks.
    pub fn new(params: Params, lifetime: Option<Lifetime>, count: usize) -> Self {
        Self { params, lifetime, keys: vec![], runs: Vec::with_capacity(count) }
    }

    fn action(&self) -> Action {
        self.lifetime.map_or(Action::Check, |lifetime| Action::Hold { lifetime, epoch: None })
    }

    /// Adds a key, and all checks of it in their order, each with its cost and its longest wait. A
    /// key must be added only once.
    pub fn add(&mut self, name: String, checks: impl Iterator<Item = (u64, u64)>) {
        let key = self.keys.len();
        self.keys.push(name);
        for (cost, max_wait) in checks {
            match self.runs.last_mut() {
                Some(run) if (run.key, run.cost, run.max_wait) == (key, cost, max_wait) => {
                    run.count += 1;
                }
                _ => self.runs.push(Run { key, count: 1, cost, max_wait }),
            }
        }
    }

    /// Writes the command, and returns the script that it runs.
    pub fn write(&self, write: Arguments<'_>) -> &'static ScriptText {
        let script = script([self.params.index()].into_iter());
        begin(script, self.keys.iter().map(|key| &**key), name(self.action()), write);
        write(&params_bytes(&self.params));
        write_lifetime(self.lifetime, write);
        write(&run_bytes(&self.runs));
        script
    }

    /// Computes what the script has decided about each check, or returns the error of its key.
    /// `None` if it is not a reply.
    pub fn read<'a, E: Clone>(
        &self,
        now: i64,
        mut found: impl Iterator<Item = Found<'a, E>>,
    ) -> Option<EachDecided<E>> {
        let count_of = |runs: &[Run]| runs.iter().map(|run| run.count as usize).sum::<usize>();
        let (mut replies, mut differences) = (Vec::with_capacity(count_of(&self.runs)), vec![]);
        for of_key in of_keys(&self.runs) {
            let (mut state, verdict) = match found.next()? {
                Found::Error(error) => {
                    replies.extend((0..count_of(of_key)).map(|_| Err(error.clone())));
                    continue;
                }
                found => decode(&self.params, &found)?,
            };
            for (index, run) in of_key.iter().enumerate() {
                let admitted = admitted_of(verdict, index)?;
                let request = request(self.action(), run.cost, run.max_wait, now);
                for number in 0..run.count as usize {
                    let mut reply = self.params.step(&mut state, &request);
                    let difference = Difference::find(number < admitted, &mut reply, &request);
                    differences.extend(difference.map(|difference| (replies.len(), difference)));
                    replies.push(Ok(reply));
                }
            }
        }
        Some(EachDecided { replies, differences, now })
    }

    /// The number of keys.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// The name of the key of a check in Redis.
    pub fn key(&self, check: usize) -> &str {
        let of_run = |run: &Run| iter::repeat_n(run.key, run.count as usize);
        let key = self.runs.iter().flat_map(of_run).nth(check).expect("a check is in a run");
        &self.keys[key]
    }
}

/// The replies to several checks, and the time of their decisions.
#[derive(Debug)]
pub struct EachDecided<E> {
    pub replies: Vec<Result<EngineReply, E>>,
    /// The decisions that differ, by the indexes of their checks.
    pub differences: Vec<(usize, Difference)>,
    pub now: i64,
}

/// What the script has decided about a request otherwise than this process has computed. The
/// script has changed the state, so its decision stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    pub admitted: bool,
    /// The request holds units, or has reserved an instant, by a receipt that is not known.
    pub has_lost_units: bool,
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
}

/// Returns how many requests of a run are admitted: without a verdict, all.
fn admitted_of(verdict: Option<&[u8]>, run: usize) -> Option<usize> {
    let Some(verdict) = verdict else { return Some(usize::MAX) };
    let bytes = verdict.get(2 * run..)?.first_chunk()?;
    Some(u16::from_le_bytes(*bytes).into())
}

fn of_keys(runs: &[Run]) -> impl Iterator<Item = &[Run]> {
    runs.chunk_by(|one, next| one.key == next.key)
}

/// Packs the runs of each key, without the keys at the end that have the same runs as the one
/// before them.
fn run_bytes(runs: &[Run]) -> Vec<u8> {
    let mut keys: Vec<_> = of_keys(runs).collect();
    let request = |run: &Run| (run.count, run.cost, run.max_wait);
    while let [.., one, last] = keys[..]
        && one.iter().map(request).eq(last.iter().map(request))
    {
        keys.pop();
    }
    let mut bytes = Vec::with_capacity(2 * keys.len() + 20 * runs.len());
    for of_key in keys {
        bytes.extend((of_key.len() as u16).to_le_bytes());
        for Run { count, cost, max_wait, .. } in of_key {
            bytes.extend(count.to_le_bytes());
            bytes.extend((units(*cost) as f64).to_le_bytes());
            bytes.extend((*max_wait as f64).to_le_bytes());
        }
    }
    bytes
}

/// Writes the lifetime of the holds, before the items.
fn write_lifetime(lifetime: Option<Lifetime>, write: Arguments<'_>) {
    if let Some(Lifetime { time, grid }) = lifetime {
        write(&double_bytes([time as f64, grid as f64]));
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

/// Writes the command that returns units to a key, without its last argument, a list of
/// [items](release_item). Returns the script that it runs.
pub fn release(key: &str, params: &Params, write: Arguments<'_>) -> &'static ScriptText {
    let script = script([params.index()].into_iter());
    begin(script, [key].into_iter(), "release", write);
    write(&params_bytes(params));
    script
}

/// Makes the item of a request. If it `is_for_others`, its reservation is kept while others cannot
/// use it.
pub fn release_item(release: &Release, is_for_others: bool) -> Vec<u8> {
    let Release { instant, units } = *release;
    let instant = instant.expect("a release names the request");
    let units = if is_for_others { -units } else { units };
    double_bytes([instant as f64, units as f64])
}

/// Writes the command that ends and renews holds: the changes of each key. Returns the script that
/// it runs.
pub fn change_holds<'a>(
    params: &Params,
    keys: impl ExactSizeIterator<Item = (&'a str, &'a [HoldChange])> + Clone,
    write: Arguments<'_>,
) -> &'static ScriptText {
    let script = script([params.index()].into_iter());
    begin(script, keys.clone().map(|(key, _)| key), "holds", write);
    let mut items = vec![];
    for (_, changes) in keys {
        items.extend((changes.len() as u16).to_le_bytes());
        items.extend(changes.iter().flat_map(change_item));
    }
    write(&params_bytes(params));
    write(&items);
    script
}

fn change_item(change: &HoldChange) -> Vec<u8> {
    let HoldChange { receipt: HoldReceipt { epoch, ends }, units, action } = *change;
    let (used, Lifetime { time, grid }) = match action {
        HoldAction::End { used } => (used, Lifetime { time: 0, grid: 0 }),
        HoldAction::Renew(lifetime) => (0, lifetime),
    };
    double_bytes([epoch, ends, units, used, time, grid].map(|number| number as f64))
}

/// Reads the result of each change, key by key; an error for a key that could not be changed, and
/// `None` for what is not a reply. Keys without a reply have no result.
pub fn read_changes<'a, E>(
    found: impl Iterator<Item = Found<'a, E>>,
) -> Option<Vec<Result<Option<Vec<HoldReply>>, E>>> {
    let of_key = |found| match found {
        Found::State(bytes) => Some(Ok(bytes.chunks(24).map(hold_reply).collect())),
        Found::Error(error) => Some(Err(error)),
        Found::Denied(..) | Found::Limit(_) => None,
    };
    found.map(of_key).collect()
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

/// Writes what all commands begin with.
fn begin<'a>(
    script: &ScriptText,
    keys: impl ExactSizeIterator<Item = &'a str>,
    action: &str,
    write: Arguments<'_>,
) {
    write(b"EVALSHA");
    write(script.hash.as_bytes());
    write(keys.len().to_string().as_bytes());
    keys.for_each(|key| write(key.as_bytes()));
    write(action.as_bytes());
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
    let args = params.args();
    let mut bytes = Vec::with_capacity(1 + 8 * args.len());
    bytes.push(SOURCES[params.index()].form);
    args.iter().for_each(|arg| bytes.extend(arg.to_le_bytes()));
    bytes
}

/// The reply of the limit that binds, its index, and the time of the decision.
#[derive(Debug)]
pub struct Decided {
    pub reply: EngineReply,
    pub limit: usize,
    /// The replies of all limits, if there are several.
    pub all: PerLimit<EngineReply>,
    pub difference: Option<Difference>,
    pub now: i64,
}

/// Computes the decision of the script from the states that it has found, or has left after a
/// refund. `None` if it is not a reply.
pub fn read<'a, E>(
    action: Action,
    limits: &[Limit],
    now: i64,
    mut found: impl Iterator<Item = Found<'a, E>>,
) -> Option<Decided> {
    let states = limits.iter().map(|limit| decode(&limit.params, &found.next()?));
    let mut states = states.collect::<Option<Vec<_>>>()?;
    // The index of a limit that denies.
    let denies = match found.next() {
        Some(Found::Limit(index)) => Some(usize::try_from(index).ok()?),
        Some(_) => return None,
        None => None,
    };
    let request = |limit: &Limit| {
        let request = limit.request(action, now);
        // The script has made the change already.
        match action {
            Action::Refund | Action::Block { .. } | Action::Unblock => EngineRequest::observe(now),
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
        let admitted = admitted_of(*verdict, 0)? > 0;
        let difference = Difference::find(admitted, &mut reply, &request);
        return Some(Decided { reply, all: PerLimit::new(), limit: 0, difference, now });
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
    Some(Decided { reply: all[limit], all, limit, difference, now })
}

/// Reads the state of a key and, if a request was denied, how many of each run were admitted.
fn decode<'a, E>(params: &Params, found: &Found<'a, E>) -> Option<(State, Option<&'a [u8]>)> {
    match *found {
        Found::State(state) => Some((params.decode(state)?, None)),
        Found::Denied(state, verdict) => Some((params.decode(state)?, Some(verdict))),
        Found::Limit(_) | Found::Error(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files of an algorithm in the order of their texts.
    fn files(source: &ScriptSource) -> Vec<String> {
        let is_log = source.model.contains(include_str!("../scripts/sliding_log/log.lua"));
        let is_bucket = source.model.contains(include_str!("../scripts/bucket/model.lua"));
        let folder = if is_bucket { "bucket" } else { source.name };
        let own = |file: &str| format!("{folder}/{file}.lua");
        let storage = if is_log { own("log") } else { "reservations.lua".into() };
        let of_name = |file: &str| format!("{}/{file}.lua", source.name);
        let queue = [of_name("queue"), "leaky_bucket/fast.lua".into()].into_iter();
        let queue = queue.filter(|_| !source.queue.is_empty());
        let fast = ["fast.lua".into(), of_name("fast"), "dispatch.lua".into()].into_iter();
        let fast = fast.chain(queue);
        let fast = fast.chain(["held.lua", "slots.lua"].map(String::from));
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
