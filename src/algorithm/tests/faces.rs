//! An algorithm behind one question, wherever its state is; time is part of the question.

use std::time::Duration;

use super::super::{
    Action, Ask, Params, Release, SCRIPTS, State, Verdict, fixed_window, leaky_bucket,
    reservations::{Count, Reservation, Reservations, Reserved, Waiting},
    script_alone, script_together, sliding_log, sliding_window, token_bucket,
};
use crate::decision::{Decision, Receipt};

#[path = "../../../tests/support/server.rs"]
#[allow(dead_code, unreachable_pub, missing_debug_implementations)]
mod server;

pub(super) use server::RedisServer;

pub(super) trait Face {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict;

    fn release(&mut self, params: &Params, now: f64, releases: &[Release]);
}

/// The twin.
impl Face for State {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict {
        params.step(self, &ask)
    }

    fn release(&mut self, params: &Params, now: f64, releases: &[Release]) {
        params.release(self, now, releases);
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
        let keys = [self.key.clone(), format!("{}:expiry", self.key)];
        redis::cmd("DEL").arg(&keys).exec(&mut self.connection).unwrap();
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// When the key expires, in milliseconds.
    pub(super) fn expiry(&mut self) -> Option<f64> {
        let expiry = format!("{}:expiry", self.key);
        redis::cmd("GET").arg(expiry).query(&mut self.connection).unwrap()
    }

    /// The bytes of the state: one text, or the elements of the list.
    pub(super) fn bytes(&mut self) -> Vec<Vec<u8>> {
        let key = self.key.clone();
        let kind: String = redis::cmd("TYPE").arg(&key).query(&mut self.connection).unwrap();
        let mut read = match &*kind {
            "none" => return vec![],
            "list" => redis::cmd("LRANGE"),
            _ => redis::cmd("GETRANGE"),
        };
        let value: redis::Value =
            read.arg(&key).arg(0).arg(-1).query(&mut self.connection).unwrap();
        match value {
            redis::Value::BulkString(text) => vec![text],
            list => redis::from_redis_value(list).unwrap(),
        }
    }

    /// The state, as the twin would hold it.
    pub(super) fn state(&mut self, params: &Params) -> State {
        let bytes = self.bytes();
        let Some(text) = bytes.first() else { return State::NeverSeen };
        match params {
            Params::FixedWindow(_) => State::FixedWindow(Some(reserved(text, 33, |text| {
                assert_eq!(text[0], b'F');
                let [start, ahead, count, length] = doubles(&text[1..]);
                fixed_window::State { start, ahead, count, length }
            }))),
            Params::TokenBucket(_) => State::TokenBucket(Some(reserved(text, 52, |text| {
                assert_eq!(text[0], b'T');
                let [at, debt, unit, period, lump, last] = doubles(&text[4..]);
                let excess = integer(&text[1..4]);
                token_bucket::State { at, debt, excess, unit, period, lump, last }
            }))),
            Params::LeakyBucket(_) => State::LeakyBucket(Some(reserved(text, 36, |text| {
                assert_eq!(text[0], b'L');
                let [at, debt, unit, tick] = doubles(&text[4..]);
                leaky_bucket::State { at, debt, excess: integer(&text[1..4]), unit, tick }
            }))),
            Params::SlidingWindow(_) => {
                let size = 4 * usize::from(text[1]) + 38;
                State::SlidingWindow(Some(reserved(text, size, |text| {
                    assert_eq!(text[0], b'W');
                    let [at, start, length, last] = doubles(&text[2..]);
                    let parts = f64::from(text[1]);
                    let index = ((last - start) * parts / length).floor();
                    let counts = text[34..].chunks(4).map(|count| integer(count) as u32).collect();
                    sliding_window::State { at, start, length, last, index, parts, counts }
                })))
            }
            Params::SlidingLog(_) => {
                let (summary, entries) = bytes.split_last().unwrap();
                assert_eq!(summary[0], b'S');
                let number = |i: usize| integer(&summary[1 + 7 * i..][..7]);
                let entry = |bytes: &Vec<u8>| (integer(&bytes[..7]), integer(&bytes[7..]));
                let entries: Vec<_> = entries.iter().map(entry).collect();
                let dead = entries.iter().filter(|(_, cost)| *cost == 0.0).count();
                assert_eq!((dead as f64, summary.len()), (number(4), 36), "dead entries");
                assert_ne!(entries.last().unwrap().1, 0.0, "a dead entry at the end");
                State::SlidingLog(Some(sliding_log::State {
                    at: number(0),
                    skew: number(1),
                    window: number(2),
                    sum: number(3),
                    // The twin drops dead entries at once.
                    entries: entries.into_iter().filter(|(_, cost)| *cost > 0.0).collect(),
                }))
            }
        }
    }
}

/// The state with all that has passed made part of the base, and without reservations of which none waits: script and
/// twin do both, at different times.
pub(super) fn settled(mut state: State, now: f64) -> State {
    fn settle<S: Count>(Reserved { state, waiting }: &mut Reserved<S>, now: f64) {
        // Of a clock that stepped back, both drop them with what they do next.
        if waiting.is_over(now) || state.clone().step_back(now) {
            waiting.0 = None;
        }
        if let Some(reservations) = &mut waiting.0 {
            reservations.fold(now, usize::MAX);
            reservations.base.advance(now);
        }
    }
    match &mut state {
        State::FixedWindow(Some(it)) => settle(it, now),
        State::SlidingWindow(Some(it)) => settle(it, now),
        State::TokenBucket(Some(it)) => settle(it, now),
        State::LeakyBucket(Some(it)) => settle(it, now),
        _ => {}
    }
    state
}

fn doubles<const N: usize>(text: &[u8]) -> [f64; N] {
    std::array::from_fn(|i| f64::from_le_bytes(text[8 * i..][..8].try_into().unwrap()))
}

fn integer(bytes: &[u8]) -> f64 {
    bytes.iter().rev().fold(0.0, |sum, byte| sum * 256.0 + f64::from(*byte))
}

/// A head of this size, and what may be behind it.
fn reserved<S>(text: &[u8], size: usize, read: impl Fn(&[u8]) -> S) -> Reserved<S> {
    let (head, tail) = text.split_at(size);
    let waiting = (!tail.is_empty()).then(|| {
        let (base, entries) = tail.split_at(size);
        let entry = |bytes: &[u8]| {
            let [instant, cost] = doubles(bytes);
            Reservation { instant, cost }
        };
        assert!(!entries.is_empty() && entries.len() % 16 == 0, "{} bytes", entries.len());
        let entries = entries.chunks(16).map(entry).collect();
        Box::new(Reservations { base: read(base), entries })
    });
    Reserved { state: read(head), waiting: Waiting(waiting) }
}

impl Face for Scripted {
    fn ask(&mut self, params: &Params, ask: Ask) -> Verdict {
        let keys = [self.key.clone()];
        eval(&mut self.connection, &keys, &[*params], ask).0
    }

    fn release(&mut self, params: &Params, now: f64, releases: &[Release]) {
        let mut eval = redis::cmd("EVAL");
        eval.arg(CLOCK.to_owned() + &script_alone(params.place())).arg(1).arg(&self.key);
        eval.arg("release").arg(0).arg(0);
        for arg in params.args() {
            eval.arg(arg as u64);
        }
        let packed =
            |it: &Release| [it.instant.unwrap(), it.units, it.kept].map(f64::to_le_bytes).concat();
        eval.arg(releases.iter().flat_map(packed).collect::<Vec<_>>());
        let reply: Vec<u64> = eval.arg(now as u64).query(&mut self.connection).unwrap();
        assert!(reply.is_empty());
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
    eval.arg(ask.action.name());
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
        instant: reply[5] as f64,
    };
    (verdict, reply.get(6).map_or(0, |&number| number as usize - 1))
}

pub(super) fn check(cost: impl Into<f64>, now: f64) -> Ask {
    Ask { action: Action::Check, cost: cost.into(), max_wait: 0.0, now, outcome: None }
}

pub(super) fn verdict_of(decision: Decision) -> Verdict {
    let micros = |time: Duration| time.as_micros() as f64;
    Verdict {
        admitted: decision.is_allowed(),
        wait: micros(decision.retry_after().unwrap_or(decision.delay())),
        remaining: decision.remaining() as f64,
        replenish: micros(decision.replenish_after()),
        reset: micros(decision.reset_after()),
        instant: match decision.receipt() {
            Receipt::At(instant) => *instant,
            _ => 0.0,
        },
    }
}

/// Like the limiter, which lets a leaky bucket delay.
pub(super) fn default_wait(params: &Params) -> f64 {
    if matches!(params, Params::LeakyBucket(_)) { params.longest_wait() } else { 0.0 }
}
