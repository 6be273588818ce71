//! An algorithm behind one question, wherever its state is; time is part of the question.

use std::time::Duration;

use super::super::{
    Action, Ask, Params, SCRIPTS, State, Verdict, fixed_window, leaky_bucket, script_alone,
    script_together, sliding_log, sliding_window, token_bucket,
    turns::{Booked, Turn, Turns},
};
use crate::decision::Decision;

#[path = "../../../tests/support/server.rs"]
#[allow(dead_code, unreachable_pub, missing_debug_implementations)]
mod server;

pub(super) use server::RedisServer;

pub(super) trait Face {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict;
}

/// The twin.
impl Face for State {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict {
        params.step(self, &ask)
    }
}

/// The script, in front of which a few lines take the place of the server's clock: `TIME` and the
/// expiry of keys. The expiry is kept as a value, in milliseconds.
pub(super) struct Scripted {
    pub(super) connection: redis::Connection,
    key: String,
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
  return {call = function(name, key, ...)
    local rest, expiry = {...}, key and key .. ':expiry'
    if name == 'TIME' then
      return {string.format('%.0f', math.floor(now / 1e6)), string.format('%.0f', now % 1e6)}
    elseif name == 'SET' then
      assert(rest[2] == 'PXAT')
      real.call('SET', expiry, rest[3])
      return real.call('SET', key, rest[1])
    elseif name == 'PEXPIREAT' then
      return real.call('SET', expiry, rest[1])
    elseif name == 'DEL' then
      for _, key in ipairs({key, ...}) do
        real.call('DEL', key, key .. ':expiry')
      end
      return
    end
    return real.call(name, key, ...)
  end}
end)()
";

impl Scripted {
    pub(super) fn new(server: &RedisServer, key: &str) -> Self {
        Self { connection: server.connection(), key: key.to_owned() }
    }

    pub(super) fn forget(&mut self) {
        for key in self.keys() {
            let keys = [format!("{key}:expiry"), key];
            redis::cmd("DEL").arg(&keys).exec(&mut self.connection).unwrap();
        }
    }

    pub(super) fn keys(&self) -> [String; 2] {
        [self.key.clone(), self.turns_key()]
    }

    fn turns_key(&self) -> String {
        format!("{}:turns", self.key)
    }

    /// When the key expires, in milliseconds.
    pub(super) fn expiry(&mut self) -> Option<f64> {
        let expiry = format!("{}:expiry", self.key);
        redis::cmd("GET").arg(expiry).query(&mut self.connection).unwrap()
    }

    /// The bytes of the state: one text, or the elements of the list.
    pub(super) fn bytes(&mut self) -> Vec<Vec<u8>> {
        self.bytes_of(&self.key.clone())
    }

    fn bytes_of(&mut self, key: &str) -> Vec<Vec<u8>> {
        let kind: String = redis::cmd("TYPE").arg(key).query(&mut self.connection).unwrap();
        let mut read = match &*kind {
            "none" => return vec![],
            "list" => redis::cmd("LRANGE"),
            _ => redis::cmd("GETRANGE"),
        };
        let value: redis::Value = read.arg(key).arg(0).arg(-1).query(&mut self.connection).unwrap();
        match value {
            redis::Value::BulkString(text) => vec![text],
            list => redis::from_redis_value(list).unwrap(),
        }
    }

    /// The state, as the twin would hold it.
    pub(super) fn state(&mut self, params: &Params) -> State {
        let bytes = self.bytes();
        let Some(text) = bytes.first() else { return State::NeverSeen };
        let turns = self.bytes_of(&self.turns_key());
        match params {
            Params::FixedWindow(_) => State::FixedWindow(Some(booked(text, &turns, |text| {
                let [start, ahead, count, length] = doubles(text);
                fixed_window::State { start, ahead, count, length }
            }))),
            Params::TokenBucket(_) => State::TokenBucket(Some(booked(text, &turns, |text| {
                let [at, debt, unit, period, lump, last] = doubles(text);
                token_bucket::State { at, debt, unit, period, lump, last }
            }))),
            Params::LeakyBucket(_) => State::LeakyBucket(Some(booked(text, &turns, |text| {
                let [at, debt, unit, tick] = doubles(text);
                leaky_bucket::State { at, debt, unit, tick }
            }))),
            Params::SlidingWindow(_) => State::SlidingWindow(Some(booked(text, &turns, |text| {
                let [at, start, length, last] = doubles(text);
                let parts = f64::from(text[32]);
                let index = ((last - start) * parts / length).floor();
                let counts = text[33..]
                    .chunks(4)
                    .map(|count| u32::from_le_bytes(count.try_into().unwrap()))
                    .collect();
                sliding_window::State { at, start, length, last, index, parts, counts }
            }))),
            Params::SlidingLog(_) => {
                let numbers = |element: &[u8], lengths: &[usize]| -> Vec<f64> {
                    let mut rest = element;
                    let mut number = |length: &usize| {
                        let (bytes, behind) = rest.split_at(*length);
                        rest = behind;
                        bytes.iter().rev().fold(0.0, |sum, byte| sum * 256.0 + f64::from(*byte))
                    };
                    lengths.iter().map(&mut number).collect()
                };
                let (summary, entries) = bytes.split_last().unwrap();
                let summary = numbers(summary, &[7, 7, 6, 6]);
                let entry = |bytes: &Vec<u8>| {
                    let entry = numbers(bytes, &[7, 6]);
                    (entry[0], entry[1])
                };
                State::SlidingLog(Some(sliding_log::State {
                    at: summary[0],
                    skew: summary[1],
                    window: summary[2],
                    total: summary[3],
                    entries: entries.iter().map(entry).collect(),
                }))
            }
        }
    }
}

/// The state without turns of which the last has passed: Redis drops them at once, the twin later.
pub(super) fn without_past_turns(mut state: State, now: f64) -> State {
    fn clean<S>(Booked { turns: Turns(turns), .. }: &mut Booked<S>, now: f64) {
        turns.take_if(|turns| turns.back().is_none_or(|newest| newest.instant <= now));
    }
    match &mut state {
        State::FixedWindow(Some(booked)) => clean(booked, now),
        State::SlidingWindow(Some(booked)) => clean(booked, now),
        State::TokenBucket(Some(booked)) => clean(booked, now),
        State::LeakyBucket(Some(booked)) => clean(booked, now),
        _ => {}
    }
    state
}

fn doubles<const N: usize>(text: &[u8]) -> [f64; N] {
    std::array::from_fn(|i| f64::from_le_bytes(text[8 * i..][..8].try_into().unwrap()))
}

fn booked<S>(state: &[u8], turns: &[Vec<u8>], read: impl Fn(&[u8]) -> S) -> Booked<S> {
    let turn = |text: &Vec<u8>| {
        let [instant, cost] = doubles(text);
        Turn { instant, cost, before: read(&text[16..]) }
    };
    let turns = (!turns.is_empty()).then(|| Box::new(turns.iter().map(turn).collect()));
    Booked { state: read(state), turns: Turns(turns) }
}

impl Face for Scripted {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict {
        let keys = self.keys();
        eval(&mut self.connection, &keys, &[*params], ask).0
    }
}

/// Asks the script about limits with these parameters, all the same question. Returns the verdict, and the
/// place of the limit that binds.
pub(super) fn eval(
    connection: &mut redis::Connection,
    keys: &[String],
    limits: &[Params],
    ask: Ask,
) -> (Verdict, usize) {
    let script = match limits {
        [params] => script_alone(params.place()),
        _ => script_together(limits.iter().fold(0, |all, params| all | 1 << params.place())),
    };
    let mut eval = redis::cmd("EVAL");
    eval.arg(CLOCK.to_owned() + &script).arg(keys.len()).arg(keys);
    eval.arg(ask.action.name()).arg(ask.turn as u64);
    for params in limits {
        let args = params.args();
        if limits.len() > 1 {
            eval.arg(SCRIPTS[params.place()].0).arg(args.len() + 2);
        }
        eval.arg(ask.cost as u64).arg(ask.max_wait as u64);
        for arg in args {
            eval.arg(arg as u64);
        }
    }
    let reply: Vec<u64> = eval.arg(ask.now as u64).query(connection).unwrap();
    let verdict = Verdict {
        admitted: reply[0] == 1,
        wait: reply[1] as f64,
        remaining: reply[2] as f64,
        replenish: reply[3] as f64,
        reset: reply[4] as f64,
        turn: reply[5] as f64,
    };
    (verdict, reply.get(6).map_or(0, |&number| number as usize - 1))
}

pub(super) fn check(cost: impl Into<f64>, now: f64) -> Ask {
    Ask { action: Action::Check, cost: cost.into(), max_wait: 0.0, turn: 0.0, now, outcome: None }
}

pub(super) fn verdict_of(decision: Decision) -> Verdict {
    let micros = |time: Duration| time.as_micros() as f64;
    Verdict {
        admitted: decision.is_allowed(),
        wait: micros(decision.retry_after().unwrap_or(decision.delay())),
        remaining: decision.remaining() as f64,
        replenish: micros(decision.replenish_after()),
        reset: micros(decision.reset_after()),
        turn: decision.turn(),
    }
}

/// Like the limiter, which lets a leaky bucket delay.
pub(super) fn default_wait(params: &Params) -> f64 {
    if matches!(params, Params::LeakyBucket(_)) { params.longest_wait() } else { 0.0 }
}
