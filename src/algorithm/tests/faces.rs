//! An algorithm behind one question, wherever its state is; time is part of the question.

use super::super::{
    Action, Ask, Params, State, Verdict, fixed_window, leaky_bucket, sliding_log, sliding_window,
    token_bucket,
};

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
    connection: redis::Connection,
    key: String,
}

const CLOCK: &str = r"
local redis = (function()
  local real, now, expiry = redis, tonumber(table.remove(ARGV)), KEYS[1] .. ':expiry'
  local ends = real.call('GET', expiry)
  if ends and ends * 1000 <= now then
    real.call('DEL', KEYS[1], expiry)
  end
  return {call = function(name, key, ...)
    local rest = {...}
    if name == 'TIME' then
      return {string.format('%.0f', math.floor(now / 1e6)), string.format('%.0f', now % 1e6)}
    elseif name == 'SET' then
      assert(rest[2] == 'PXAT')
      real.call('SET', expiry, rest[3])
      return real.call('SET', key, rest[1])
    elseif name == 'PEXPIREAT' then
      return real.call('SET', expiry, rest[1])
    elseif name == 'DEL' then
      return real.call('DEL', key, expiry)
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
        let keys = [self.key.clone(), self.expiry_key()];
        redis::cmd("DEL").arg(&keys).exec(&mut self.connection).unwrap();
    }

    fn expiry_key(&self) -> String {
        format!("{}:expiry", self.key)
    }

    /// When the key expires, in milliseconds.
    pub(super) fn expiry(&mut self) -> Option<f64> {
        redis::cmd("GET").arg(self.expiry_key()).query(&mut self.connection).unwrap()
    }

    /// The bytes of the state: one text, or the elements of the list.
    pub(super) fn bytes(&mut self) -> Vec<Vec<u8>> {
        let kind: String = redis::cmd("TYPE").arg(&self.key).query(&mut self.connection).unwrap();
        let mut read = match &*kind {
            "none" => return vec![],
            "list" => redis::cmd("LRANGE"),
            _ => redis::cmd("GETRANGE"),
        };
        let value: redis::Value =
            read.arg(&self.key).arg(0).arg(-1).query(&mut self.connection).unwrap();
        match value {
            redis::Value::BulkString(text) => vec![text],
            list => redis::from_redis_value(list).unwrap(),
        }
    }

    /// The state, as the twin would hold it.
    pub(super) fn state(&mut self, params: &Params) -> State {
        let bytes = self.bytes();
        let Some(text) = bytes.first() else { return State::NeverSeen };
        let double = |i: usize| f64::from_le_bytes(text[8 * i..][..8].try_into().unwrap());
        match params {
            Params::FixedWindow(_) => State::FixedWindow(fixed_window::State {
                start: double(0),
                ahead: double(1),
                count: double(2),
                window: double(3),
            }),
            Params::TokenBucket(_) => State::TokenBucket(token_bucket::State {
                at: double(0),
                debt: double(1),
                unit: double(2),
                period: double(3),
                lump: double(4),
            }),
            Params::LeakyBucket(_) => State::LeakyBucket(leaky_bucket::State {
                at: double(0),
                debt: double(1),
                unit: double(2),
                tick: double(3),
            }),
            Params::SlidingWindow(_) => State::SlidingWindow(Box::new(sliding_window::State {
                at: double(0),
                start: double(1),
                length: double(2),
                index: double(3),
                parts: text[32].into(),
                counts: text[33..]
                    .chunks(4)
                    .map(|count| u32::from_le_bytes(count.try_into().unwrap()))
                    .collect(),
            })),
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
                State::SlidingLog(Box::new(sliding_log::State {
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

impl Face for Scripted {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict {
        let mut eval = redis::cmd("EVAL");
        eval.arg(CLOCK.to_owned() + params.script()).arg(1).arg(&self.key);
        eval.arg(ask.action.name()).arg(ask.cost as u64).arg(ask.max_wait as u64);
        for arg in params.args() {
            eval.arg(arg as u64);
        }
        let reply: (i64, i64, i64, i64, i64) =
            eval.arg(ask.now as u64).query(&mut self.connection).unwrap();
        let (admitted, wait, remaining, replenish, reset) = reply;
        Verdict {
            admitted: admitted == 1,
            wait: wait as f64,
            remaining: remaining as f64,
            replenish: replenish as f64,
            reset: reset as f64,
        }
    }
}

pub(super) fn check(cost: u32, now: f64) -> Ask {
    Ask { action: Action::Check, cost: cost.into(), max_wait: 0.0, now }
}

/// Like the limiter, which lets a leaky bucket delay.
pub(super) fn default_wait(params: &Params) -> f64 {
    if matches!(params, Params::LeakyBucket(_)) { params.longest_wait() } else { 0.0 }
}
