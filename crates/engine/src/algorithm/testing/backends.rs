//! One interface to the twin and to the script of an algorithm. The time is part of a request. The
//! laws are in the other files.

use std::fmt;

use super::super::{
    Action, EngineReply, EngineRequest, HoldChange, HoldReply, Params, Release, State,
    hold::{self, Held},
    model::Model,
    reservations::{Reservation, Reservations, Reserved},
    sliding_log,
    table::Spent,
};
use crate::script::{self, Arguments, CheckEach, Found, Limit, ScriptText};

pub use super::server::RedisServer;

pub trait Backend {
    fn decide(&mut self, params: &Params, request: EngineRequest) -> EngineReply;

    fn release(&mut self, params: &Params, now: i64, releases: &[Release]);
}

/// A backend of an algorithm that can hold units.
pub trait Holds: Backend {
    /// Ends and renews holds of the key.
    fn change_holds(&mut self, params: &Params, now: i64, changes: &[HoldChange])
    -> Vec<HoldReply>;
}

/// The twin.
impl Backend for State {
    fn decide(&mut self, params: &Params, request: EngineRequest) -> EngineReply {
        params.step(self, &request)
    }

    fn release(&mut self, params: &Params, now: i64, releases: &[Release]) {
        params.return_units(self, now, releases);
    }
}

impl Holds for State {
    fn change_holds(
        &mut self,
        params: &Params,
        now: i64,
        changes: &[HoldChange],
    ) -> Vec<HoldReply> {
        let mut replies = vec![];
        params.change_holds(self, now, now, changes, |reply| replies.push(reply));
        replies
    }
}

/// The script, with a few lines in front of it that replace the clock of the server: `TIME` and the
/// expiry of keys. The expiry is stored as a value, in milliseconds. They also count the bytes that
/// are read.
pub struct Scripted {
    pub connection: redis::Connection,
    key: String,
    has_fast_path: bool,
    /// Gets the same requests, and stores the same bytes for as long.
    engine: Option<Box<Scripted>>,
}

const CLOCK: &str = r"
local redis = (function()
  local real, now = redis, tonumber(table.remove(ARGV))
  for _, key in ipairs(KEYS) do
    local ends = real.call('GET', key .. ':expiry')
    if ends and ends * 1000 <= now then
      real.call('DEL', key, key .. ':expiry')
    end
  end
  local function scripted(name, key, ...)
    local rest, expiry = {...}, key and key .. ':expiry'
    if name == 'TIME' then
      return {string.format('%.0f', math.floor(now / 1e6)), string.format('%.0f', now % 1e6)}
    elseif name == 'SET' then
      if rest[2] == 'KEEPTTL' then
        return real.call('SET', key, rest[1])
      end
      assert(rest[2] == 'PXAT')
      real.call('SET', expiry, rest[3])
      return real.call('SET', key, rest[1], unpack(rest, 4))
    elseif name == 'PEXPIREAT' then
      return real.call('SET', expiry, rest[1])
    elseif name == 'DEL' then
      for _, key in ipairs({key, ...}) do
        real.call('DEL', key, key .. ':expiry')
      end
      return 1
    end
    local reply = real.pcall(name, key, ...)
    if name == 'GETRANGE' or name == 'MGET' then
      local value = type(reply) == 'table' and reply[1] or reply
      real.call('INCRBY', 'bytes-read', #(value or ''))
    end
    return reply
  end
  local function call(...)
    local reply = scripted(...)
    if type(reply) == 'table' and reply.err then
      error(reply, 0)
    end
    return reply
  end
  return {call = call, pcall = scripted}
end)()
";

impl Scripted {
    pub fn new(server: &RedisServer, key: &str) -> Self {
        let (connection, key) = (server.connection(), key.to_owned());
        Self { connection, key, has_fast_path: true, engine: None }
    }

    /// Compares each request with what the engine alone replies and stores.
    pub fn beside_engine(server: &RedisServer, key: &str) -> Self {
        let engine = Self::without_fast_path(server, &format!("{key}:engine"));
        Self { engine: Some(Box::new(engine)), ..Self::new(server, key) }
    }

    /// Decides by the engine and the model, also about the checks that the fast path is for.
    pub fn without_fast_path(server: &RedisServer, key: &str) -> Self {
        Self { has_fast_path: false, ..Self::new(server, key) }
    }

    pub fn forget(&mut self) {
        let keys = [self.key.clone(), format!("{}:expiry", self.key)];
        redis::cmd("DEL").arg(&keys).exec(&mut self.connection).unwrap();
        self.engine.iter_mut().for_each(|engine| engine.forget());
    }

    /// Runs the text of a call, with or without its fast paths.
    fn eval(&mut self, command: redis::Cmd, script: &ScriptText, now: i64) -> Reply {
        let edit = if self.has_fast_path { str::to_owned } else { cut_off_fast_path };
        eval_text(&mut self.connection, command, &edit(&script.text), now)
    }

    /// Does the same by the engine alone.
    fn compare<T: PartialEq + fmt::Debug>(&mut self, reply: &T, by: impl FnOnce(&mut Self) -> T) {
        let Some(mut engine) = self.engine.take() else { return };
        assert_eq!(reply, &by(&mut engine));
        let [fast, slow] = [&mut *self, &mut *engine].map(|key| (key.bytes(), key.expiry()));
        assert_eq!(fast, slow, "{reply:?}");
        self.engine = Some(engine);
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    /// The instant at which the key expires, in milliseconds.
    pub fn expiry(&mut self) -> Option<i64> {
        let expiry = format!("{}:expiry", self.key);
        redis::cmd("GET").arg(expiry).query(&mut self.connection).unwrap()
    }

    /// The number of bytes that scripts have read on this server, of the first key of each `MGET`.
    pub fn bytes_read(&mut self) -> usize {
        redis::cmd("GET").arg("bytes-read").query(&mut self.connection).unwrap()
    }

    /// The bytes of the state.
    pub fn bytes(&mut self) -> Option<Vec<u8>> {
        redis::cmd("GET").arg(&self.key).query(&mut self.connection).unwrap()
    }

    /// The state in the form of the twin.
    pub fn state(&mut self, params: &Params) -> State {
        self.bytes().map_or(State::default(), |text| state(&text, params))
    }
}

fn state(text: &[u8], params: &Params) -> State {
    if let [b'B', block @ .., b'B'] = text {
        let (ends, text) = block.split_at(7);
        let state = if text.is_empty() { State::default() } else { state(text, params) };
        return State { blocked_until: integer(ends), ..state };
    }
    if let [before @ .., count, b'H'] = text
        && let Some(length) = text.len().checked_sub(25 + 14 * usize::from(*count))
        && before.get(length) == Some(&b'H')
    {
        let (before, held) = text.split_at(length);
        let beside = if before.is_empty() { State::default() } else { state(before, params) };
        let (held, rest) = hold::decode(held).expect("what is held");
        assert!(rest.is_empty(), "{rest:?} behind what is held");
        return State { held, ..beside };
    }
    let spent = match params {
        Params::FixedWindow(_) => Spent::FixedWindow(reserved(text, 28)),
        Params::TokenBucket(_) => Spent::TokenBucket(reserved(text, bucket_size(text))),
        Params::LeakyBucket(_) => Spent::LeakyBucket(reserved(text, bucket_size(text))),
        Params::SlidingWindow(_) => {
            let counts = usize::from(text[1]) + 1;
            let size = if text[0] == b'W' { 35 + 4 * counts } else { 37 + 7 * counts };
            Spent::SlidingWindow(reserved(text, size))
        }
        Params::SlidingLog(_) => Spent::SlidingLog(Reserved::new(log(text))),
        Params::Concurrency(_) => panic!("a state: {text:?}"),
    };
    State { spent, ..State::default() }
}

fn bucket_size(text: &[u8]) -> usize {
    if text[0] == b'T' { 26 } else { 44 }
}

fn log(bytes: &[u8]) -> sliding_log::SlidingLogState {
    let is_wide = bytes.ends_with(b"Z");
    let (entry_size, foot_sizes) = match is_wide {
        true => (14, [7, 7, 7, 7, 7, 6, 6, 7, 7]),
        false => (11, [7, 7, 7, 7, 4, 4, 4, 7, 4]),
    };
    let (entries, foot) = bytes.split_at(bytes.len() - foot_sizes.iter().sum::<usize>() - 1);
    let mut position = 0;
    let foot = foot_sizes.map(|size| {
        position += size;
        integer(&foot[position - size..position])
    });
    let [at, skew, window, sum, dead, gone, length, oldest_at, oldest_cost] = foot;
    let entry = |bytes: &[u8]| (integer(&bytes[..7]), integer(&bytes[7..]));
    let entries: Vec<_> = entries.chunks(entry_size).map(entry).collect();
    assert_eq!(entries.len() as i64, length);
    let stored = &entries[gone as usize..];
    assert_eq!(stored.iter().filter(|(_, cost)| *cost == 0).count() as i64, dead);
    assert_eq!(stored[0], (oldest_at, oldest_cost), "the oldest entry");
    // The twin drops dead entries immediately.
    let living: Vec<_> = stored.iter().copied().filter(|(_, cost)| *cost > 0).collect();
    assert_eq!(stored.last().unwrap().0, living.last().unwrap().0, "a dead entry at the end");
    let state = sliding_log::SlidingLogState::new([at, skew, window], living);
    assert_eq!(state.costs().map(|(_, cost)| cost).sum::<i64>(), sum, "the sum");
    state
}

/// The state with past reservations made part of the base, with no reservations if no request
/// waits, and without a block that is over: script and twin do all of that, at different times.
pub fn settled(mut state: State, now: i64, params: &Params) -> State {
    fn settle<S: Model>(reserved: &mut Reserved<S>, now: i64, params: &S::Params) {
        // After the clock stepped back, both drop them with their next change.
        if reserved.waits_until(now).is_none() || reserved.state.clone().step_back(now) {
            reserved.waiting = None;
        }
        if let Some(reservations) = &mut reserved.waiting {
            reservations.fold(now, params);
            reservations.base.advance(now);
        }
    }
    match (&mut state.spent, params) {
        (Spent::FixedWindow(state), Params::FixedWindow(params)) => {
            settle(state, now, params);
        }
        (Spent::SlidingWindow(state), Params::SlidingWindow(params)) => {
            settle(state, now, params);
        }
        (Spent::TokenBucket(state), Params::TokenBucket(params)) => {
            settle(state, now, params);
        }
        (Spent::LeakyBucket(state), Params::LeakyBucket(params)) => {
            settle(state, now, params);
        }
        _ => {}
    }
    open(state, params, now)
}

/// The state without a block that is over, and without units in a block or beside holds that do not
/// count any more.
pub fn open(mut state: State, params: &Params, now: i64) -> State {
    if state.blocked_until <= now {
        state.blocked_until = 0;
    }
    if state.blocked_until > 0 || !matches!(state.held, Held::None) {
        let mut beside = State { spent: state.spent.clone(), ..State::default() };
        let peek = EngineRequest { action: Action::Peek, ..check(1, now) };
        if beside.decide(params, peek).reset == 0 {
            state.spent = Spent::Nothing;
        }
    }
    state
}

fn integer(bytes: &[u8]) -> i64 {
    bytes.iter().rev().fold(0, |sum, byte| sum * 256 + i64::from(*byte))
}

/// Reads a head of this size, and the reservations behind it, if there are any.
fn reserved<S: Model>(text: &[u8], size: usize) -> Reserved<S> {
    let (head, tail) = text.split_at(size);
    let read = |bytes| S::decode(bytes).expect("a state");
    let waiting = (!tail.is_empty()).then(|| {
        let (base, entries) = tail.split_at(size);
        let entry = |bytes: &[u8]| {
            let number = |i: usize| f64::from_le_bytes(bytes[8 * i..][..8].try_into().unwrap());
            Reservation { instant: number(0) as i64, cost: number(1) as i64 }
        };
        assert!(!entries.is_empty() && entries.len() % 16 == 0, "{} bytes", entries.len());
        let entries = entries.chunks(16).map(entry).collect();
        Box::new(Reservations { base: read(base), entries })
    });
    Reserved { state: read(head), waiting }
}

impl Backend for Scripted {
    fn decide(&mut self, params: &Params, request: EngineRequest) -> EngineReply {
        let keys = [self.key.clone()];
        let edit = if self.has_fast_path { str::to_owned } else { cut_off_fast_path };
        let reply = eval_edited(&mut self.connection, &keys, &[*params], request, edit).0;
        self.compare(&reply, |engine| engine.decide(params, request));
        reply
    }

    fn release(&mut self, params: &Params, now: i64, releases: &[Release]) {
        let (mut command, script) = command(|write| script::release(&self.key, params, write));
        let item = |release| script::release_item(release, false);
        command.arg(releases.iter().flat_map(item).collect::<Vec<_>>());
        let reply = self.eval(command, script, now);
        assert_eq!(reply.len(), 1);
        self.compare(&(), |engine| engine.release(params, now, releases));
    }
}

impl Scripted {
    /// Releases reservations for others. Returns whether they are kept.
    pub fn release_for_others(&mut self, params: &Params, now: i64, releases: &[Release]) -> bool {
        let (mut command, script) = command(|write| script::release(&self.key, params, write));
        let item = |release| script::release_item(release, true);
        command.arg(releases.iter().flat_map(item).collect::<Vec<_>>());
        let is_kept = self.eval(command, script, now).len() > 1;
        self.compare(&is_kept, |engine| engine.release_for_others(params, now, releases));
        is_kept
    }
}

impl Holds for Scripted {
    fn change_holds(
        &mut self,
        params: &Params,
        now: i64,
        changes: &[HoldChange],
    ) -> Vec<HoldReply> {
        let keys = [(&*self.key, changes)].into_iter();
        let (command, script) = command(|write| script::change_holds(params, keys, write));
        let reply = self.eval(command, script, now);
        let results = script::read_changes(parts(&reply).1).expect("a reply");
        let replies = results.into_iter().next().expect("a key").unwrap().expect("a reply");
        self.compare(&replies, |engine| engine.change_holds(params, now, changes));
        replies
    }
}

/// Runs the script for limits with these parameters, each with the same request. Returns the reply
/// of the limit that binds, and its index.
pub fn eval(
    connection: &mut redis::Connection,
    keys: &[String],
    limits: &[Params],
    request: EngineRequest,
) -> (EngineReply, usize) {
    eval_edited(connection, keys, limits, request, str::to_owned)
}

fn cut_off_fast_path(text: &str) -> String {
    let start = "\ndo\n  local fast, write";
    let edited = text.replace(start, &format!("\nis_common = false{start}"));
    assert_ne!(edited, text, "the script has its fast path at another place");
    edited
}

fn eval_edited(
    connection: &mut redis::Connection,
    keys: &[String],
    limits: &[Params],
    request: EngineRequest,
    edit: fn(&str) -> String,
) -> (EngineReply, usize) {
    let EngineRequest { action, cost, max_wait, now, .. } = request;
    let limit = |(key, params): (&String, &Params)| Limit {
        key: key.clone(),
        params: *params,
        cost: cost as u64,
        max_wait: max_wait as u64,
        lifetime: match action {
            Action::Hold { lifetime, .. } => Some(lifetime),
            _ => None,
        },
    };
    let limits: Vec<_> = keys.iter().zip(limits).map(limit).collect();
    let (command, script) = command(|write| script::decide(action, &limits, write));
    let reply = eval_text(connection, command, &edit(&script.text), now);
    let (time, found) = parts(&reply);
    let decided = script::read(action, &limits, time, found).expect("a reply");
    assert_eq!((decided.now, decided.difference), (now, None), "{request:?}");
    (decided.reply, decided.limit)
}

/// Runs the script for a check of several limits, some of which hold. Returns the replies of all.
pub fn eval_limits(
    connection: &mut redis::Connection,
    limits: &[Limit],
    now: i64,
) -> Vec<EngineReply> {
    let (command, script) = command(|write| script::decide(Action::Check, limits, write));
    let reply = eval_text(connection, command, &script.text, now);
    let (time, found) = parts(&reply);
    let decided = script::read(Action::Check, limits, time, found).expect("a reply");
    assert_eq!(decided.difference, None, "{limits:?}");
    decided.all.into_vec()
}

/// Runs the script for several checks, each of a key.
pub fn eval_each(
    connection: &mut redis::Connection,
    checks: &[Limit],
    now: i64,
) -> Vec<EngineReply> {
    let mut order: Vec<_> = (0..checks.len()).collect();
    order.sort_by_key(|index| &checks[*index].key);
    let mut call = CheckEach::new(checks[0].params, None, checks.len());
    for of_key in order.chunk_by(|one, next| checks[*one].key == checks[*next].key) {
        let requests = of_key.iter().map(|index| (checks[*index].cost, checks[*index].max_wait));
        call.add(checks[of_key[0]].key.clone(), requests);
    }
    let (command, script) = command(|write| call.write(write));
    let reply = eval_text(connection, command, &script.text, now);
    let (time, found) = parts(&reply);
    let decided = call.read(time, found).expect("a reply");
    assert_eq!(decided.differences, []);
    let mut replies: Vec<_> = order.into_iter().zip(decided.replies).collect();
    replies.sort_by_key(|(index, _)| *index);
    replies.into_iter().map(|(_, reply)| reply.expect("a decision")).collect()
}

type Reply = Vec<redis::Value>;

/// Makes the command that the engine writes.
fn command(
    write: impl FnOnce(Arguments<'_>) -> &'static ScriptText,
) -> (redis::Cmd, &'static ScriptText) {
    let mut command = redis::Cmd::new();
    let script = write(&mut |argument| {
        command.arg(argument);
    });
    (command, script)
}

/// The time of a reply, and what it has found.
pub fn parts(reply: &Reply) -> (i64, impl Iterator<Item = Found<'_, redis::ServerError>>) {
    let [redis::Value::Int(now), found @ ..] = &reply[..] else { panic!("not a reply: {reply:?}") };
    let found = found.iter().map(|found| match found {
        redis::Value::BulkString(state) => Found::State(state),
        redis::Value::Array(both) => match &both[..] {
            [redis::Value::BulkString(state), redis::Value::BulkString(verdict)] => {
                Found::Denied(state, verdict)
            }
            _ => panic!("not a reply: {both:?}"),
        },
        redis::Value::Int(index) => Found::Limit(*index),
        redis::Value::ServerError(error) => Found::Error(error.clone()),
        other => panic!("not a reply: {other:?}"),
    });
    (*now, found)
}

/// Runs the command with this text, at this time.
fn eval_text(
    connection: &mut redis::Connection,
    command: redis::Cmd,
    text: &str,
    now: i64,
) -> Reply {
    command_at(command, text, now).query(connection).unwrap()
}

/// Returns the error of a call of checks, each of a key.
pub fn error_of_each(
    connection: &mut redis::Connection,
    checks: &[Limit],
    now: i64,
) -> redis::RedisError {
    let mut call = CheckEach::new(checks[0].params, None, checks.len());
    for check in checks {
        call.add(check.key.clone(), [(check.cost, check.max_wait)].into_iter());
    }
    let (command, script) = command(|write| call.write(write));
    command_at(command, &script.text, now).query::<Reply>(connection).unwrap_err()
}

fn command_at(command: redis::Cmd, text: &str, now: i64) -> redis::Cmd {
    let mut eval = redis::cmd("EVAL");
    eval.arg(CLOCK.to_owned() + text);
    for arg in command.args_iter().skip(2) {
        let redis::Arg::Simple(arg) = arg else { unreachable!("no cursor") };
        eval.arg(arg);
    }
    eval.arg(now as u64);
    eval
}

/// The time of most tests.
pub const START: i64 = 1_700_000_000_000_000;

impl EngineReply {
    /// The wait of a reply that knows it.
    pub fn known_wait(&self) -> i64 {
        self.wait.expect("a wait that does not depend on holds")
    }
}

/// Units of a cost, as tests write them.
pub trait Units {
    fn units(self) -> i64;
}

macro_rules! units {
    ($($type:ty),*) => {
        $(impl Units for $type {
            fn units(self) -> i64 {
                self as i64
            }
        })*
    };
}

units!(i32, u32, u64, i64);

pub fn check(cost: impl Units, now: i64) -> EngineRequest {
    EngineRequest {
        action: Action::Check,
        cost: cost.units(),
        max_wait: 0,
        now,
        admission: None,
        blocked: 0,
    }
}
