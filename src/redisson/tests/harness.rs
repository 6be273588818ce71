//! A limiter with scripted time, and scripts that do to its keys what a Java client does, according
//! to Redisson's documentation and format. Tests are in the other files.

use redis::{Connection, FromRedisValue};

use tower_ratelimit_redisson::{
    AcquireReply, Keys, Script, arguments, entry,
    status::{AGAIN, DONE, PER_CLIENT},
};

use super::super::script::{Acquired, sent};

#[path = "../../../tests/support/server.rs"]
#[allow(dead_code, unreachable_pub, missing_debug_implementations, clippy::duplicate_mod)]
mod server;

pub(super) use server::RedisServer;

/// Precedes a script and replaces the server's clock: the `TIME` command, and the expiry of keys.
/// The last argument is the time in microseconds.
const CLOCK: &str = r"
local redis = (function()
  local real, now = redis, tonumber(table.remove(ARGV))
  local ms = math.floor(now / 1000)
  local function ends(key)
    return tonumber(real.call('HGET', 'expiries', key))
  end
  local function forget(...)
    for _, key in ipairs({...}) do
      real.call('HDEL', 'expiries', key)
    end
  end
  for _, key in ipairs(KEYS) do
    if ends(key) and ends(key) <= ms then
      real.call('DEL', key)
      forget(key)
    end
  end
  return {pcall = real.pcall, call = function(name, key, ...)
    local rest = {...}
    if name == 'TIME' then
      return {string.format('%.0f', math.floor(now / 1e6)), string.format('%.0f', now % 1e6)}
    elseif name == 'PEXPIRE' then
      if real.call('EXISTS', key) == 0 then
        return 0
      end
      real.call('HSET', 'expiries', key, string.format('%.0f', ms + rest[1]))
      return 1
    elseif name == 'PTTL' then
      if real.call('EXISTS', key) == 0 then
        return -2
      end
      return ends(key) and ends(key) - ms or -1
    elseif name == 'PERSIST' then
      return real.call('HDEL', 'expiries', key)
    elseif name == 'SET' then
      forget(key)
      if rest[2] == 'PX' then
        real.call('HSET', 'expiries', key, string.format('%.0f', ms + rest[3]))
      end
      return real.call('SET', key, rest[1])
    elseif name == 'DEL' or name == 'UNLINK' then
      forget(key, ...)
    end
    local reply = real.call(name, key, ...)
    if real.call('EXISTS', key) == 0 then
      forget(key)
    end
    return reply
  end}
end)()
";

/// The common part of the Java scripts. They are written from the format, and have the known
/// defects.
const JAVA: &str = r"
local config = redis.call('HMGET', KEYS[1], 'rate', 'interval', 'type', 'keepAliveTime')
local rate, interval = tonumber(config[1]), tonumber(config[2])
local i = config[3] == '1' and 1 or 0
local value, log = KEYS[2 + i], KEYS[4 + i]
local function sum(first, last)
  local total = 0
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', log, first, last)) do
    total = total + struct.unpack('<I4', member, 2 + string.byte(member))
  end
  return total
end
local function sweep(now, clamped)
  local released = sum(0, now - interval)
  if released > 0 then
    redis.call('ZREMRANGEBYSCORE', log, 0, now - interval)
    local left = tonumber(redis.call('GET', value)) + released
    if clamped and left > rate then
      left = rate - sum('-inf', '+inf')
    end
    redis.call('SET', value, left)
  end
end
";

/// ARGV: permits, clock of the host, id.
const JAVA_ACQUIRE: &str = r"
local permits, now = tonumber(ARGV[1]), tonumber(ARGV[2])
assert(rate, 'RateLimiter is not initialized')
assert(permits <= rate, 'too many permits')
local wait = false
if redis.call('GET', value) then
  sweep(now, true)
  if tonumber(redis.call('GET', value)) < permits then
    local oldest = redis.call('ZRANGE', log, 0, 0, 'WITHSCORES')
    wait = 3 + interval - (now - tonumber(oldest[2]))
  end
else
  redis.call('SET', value, rate)
end
if not wait then
  redis.call('ZADD', log, now, struct.pack('<Bc0I4', #ARGV[3], ARGV[3], permits))
  redis.call('DECRBY', value, permits)
end
local keep_alive, ms = tonumber(config[4] or 0), redis.call('PTTL', KEYS[1])
if keep_alive > 0 then
  redis.call('PEXPIRE', KEYS[1], keep_alive)
  ms = keep_alive
end
if ms > 0 then
  redis.call('PEXPIRE', value, ms)
  redis.call('PEXPIRE', log, ms)
end
return wait
";

/// ARGV: clock of the host.
const JAVA_AVAILABLE: &str = r"
if redis.call('GET', value) then
  sweep(tonumber(ARGV[1]), false)
else
  redis.call('SET', value, rate)
end
return tonumber(redis.call('GET', value))
";

/// ARGV: permits.
const JAVA_RELEASE: &str = r"
if redis.call('GET', value) then
  redis.call('SET', value, math.min(rate, redis.call('GET', value) + ARGV[1]))
end
return 0
";

/// ARGV: rate, interval.
const JAVA_UPDATE: &str = r"
local left = redis.call('GET', value)
if left then
  redis.call('SET', value, math.max(ARGV[1] - (rate - left), 0))
end
redis.call('HSET', KEYS[1], 'rate', ARGV[1], 'interval', ARGV[2])
return 0
";

#[derive(Debug, PartialEq)]
pub(super) struct Reply {
    pub(super) status: i64,
    /// In microseconds.
    pub(super) wait: u64,
    pub(super) remaining: u64,
    pub(super) reset: u64,
}

impl Reply {
    pub(super) fn granted(&self) -> bool {
        self.status == DONE
    }
}

pub(super) type Id = [u8; 16];

/// An entry of the log.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) score: u64,
    pub(super) member: Vec<u8>,
}

impl Entry {
    pub(super) fn id(&self) -> Id {
        self.member[1..17].try_into().unwrap()
    }

    pub(super) fn permits(&self) -> u64 {
        u32::from_le_bytes(self.member[self.member.len() - 4..].try_into().unwrap()).into()
    }
}

/// The reply to an acquire, and what it has stored.
#[derive(Debug, PartialEq)]
pub(super) struct Trace {
    reply: AcquireReply,
    value: Option<String>,
    log: Vec<Entry>,
    ttls: [Option<u64>; 3],
}

pub(super) struct Harness {
    pub(super) connection: Connection,
    pub(super) keys: Keys,
    /// The clock of the server, in microseconds.
    pub(super) now: u64,
    /// Leaves all decisions to the second part of the script of an acquire.
    pub(super) is_slow: bool,
    /// The last reply to an acquire.
    last_reply: AcquireReply,
    /// The replies to the acquires, and what these have stored.
    pub(super) traces: Vec<Trace>,
    /// Treats logs of more than 2 entries as long.
    pub(super) tiny: bool,
    /// Starts each step of an acquire without the tally of the previous one, as a new caller does
    /// after a timeout.
    pub(super) drops_tally: bool,
    /// The rate of the template as the scripts take it.
    pub(super) template_rate: String,
    /// The number of scripts that the last call has executed.
    pub(super) steps: u32,
    ids: u64,
}

pub(super) const START: u64 = 1_700_000_000_000_000;

impl Harness {
    pub(super) fn new(server: &RedisServer) -> Self {
        let keys = Keys::new("LIMITER_NAME", "client").unwrap();
        let connection = server.connection();
        Self {
            connection,
            keys,
            now: START,
            is_slow: false,
            last_reply: AcquireReply::default(),
            traces: vec![],
            tiny: false,
            drops_tally: false,
            template_rate: String::new(),
            steps: 0,
            ids: 0,
        }
    }

    pub(super) fn reset(&mut self) {
        self.ids = 0;
        self.traces.clear();
        redis::cmd("FLUSHALL").exec(&mut self.connection).unwrap();
        self.now = START;
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.now / 1_000
    }

    /// Drops the keys that have expired.
    pub(super) fn tick(&mut self) {
        let keys = self.keys.all.clone();
        let _: i64 = self.eval("return 0", &keys, &[]);
    }

    pub(super) fn advance(&mut self, ms: u64) {
        self.now += ms * 1_000;
    }

    pub(super) fn id(&mut self) -> Id {
        self.ids += 1;
        // Not in increasing order.
        let id = self.ids.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut bytes = [7; 16];
        bytes[..8].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    fn eval<T: FromRedisValue>(&mut self, text: &str, keys: &[String], args: &[&[u8]]) -> T {
        let mut eval = redis::cmd("EVAL");
        eval.arg(CLOCK.to_owned() + text).arg(keys.len()).arg(keys).arg(args);
        let reply = eval.arg(self.now).query(&mut self.connection);
        reply.unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_eval<T: FromRedisValue>(&mut self, text: &str, args: &[&[u8]]) -> Option<T> {
        let mut eval = redis::cmd("EVAL");
        eval.arg(CLOCK.to_owned() + text).arg(5).arg(&self.keys.all[..5]).arg(args);
        eval.arg(self.now).query(&mut self.connection).ok()
    }

    pub(super) fn execute<T: FromRedisValue>(
        &mut self,
        script: Script,
        args: &[&[u8]],
        template_rate: &str,
        tally: &[u8],
    ) -> T {
        self.steps += 1;
        assert!(self.steps < 1_000, "the call does not end");
        let keys = self.keys.all.clone();
        self.execute_with(script, &keys, args, template_rate, tally)
    }

    fn execute_with<T: FromRedisValue>(
        &mut self,
        script: Script,
        keys: &[String],
        args: &[&[u8]],
        template_rate: &str,
        tally: &[u8],
    ) -> T {
        let mut text = sent(script).text.clone();
        if self.tiny {
            let limits = "SHORT, HEAD, MAX_ENTRIES = 8, 128, 1000";
            assert!(text.contains(limits));
            text = text.replace(limits, "SHORT, HEAD, MAX_ENTRIES = 2, 2, 3");
        }
        if self.is_slow && script == Script::Acquire {
            let quick = "\nrepeat\n";
            assert_eq!(text.matches(quick).count(), 1);
            text = text.replace(quick, "\nrepeat\n  do break end\n");
        }
        self.eval(&text, keys, &[args, &arguments(template_rate, tally)].concat())
    }

    fn execute_in_steps(
        &mut self,
        script: Script,
        args: &[&[u8]],
        template_rate: &str,
    ) -> (i64, u64) {
        let mut tally = vec![];
        self.steps = 0;
        loop {
            let (status, number, next): (i64, u64, Vec<u8>) =
                self.execute(script, args, template_rate, &tally);
            if status != AGAIN {
                return (status, number);
            }
            tally = next;
        }
    }

    pub(super) fn acquire(&mut self, permits: u32, id: Id) -> Reply {
        let (entry, rate) = (entry(&id, permits.into()), self.template_rate.clone());
        let mut keys = self.keys.overall().map(str::to_owned).to_vec();
        let mut tally = vec![];
        self.steps = 0;
        loop {
            self.steps += 1;
            assert!(self.steps < 1_000, "the call does not end");
            let Acquired(reply) =
                self.execute_with(Script::Acquire, &keys, &[&entry], &rate, &tally);
            match reply.status {
                PER_CLIENT => (keys, self.steps) = (self.keys.all.to_vec(), 0),
                AGAIN if self.drops_tally => tally = vec![],
                AGAIN => tally = reply.tally,
                _ => {
                    self.last_reply = reply.clone();
                    return Reply {
                        status: reply.status,
                        wait: reply.wait as u64,
                        remaining: reply.remaining as u64,
                        reset: reply.reset as u64,
                    };
                }
            }
        }
    }

    /// Adds the last acquire to the traces.
    pub(super) fn trace(&mut self) {
        let (reply, value, log) = (self.last_reply.clone(), self.value(), self.log());
        let ttls = [0, 1, 3].map(|key| self.ttl(key));
        self.traces.push(Trace { reply, value, log, ttls });
    }

    /// Acquires permits with a new id. Returns true if they were granted.
    pub(super) fn take(&mut self, permits: u32) -> bool {
        let id = self.id();
        self.acquire(permits, id).granted()
    }

    pub(super) fn release(&mut self, permits: u32) {
        self.release_taken(permits, 0, &[]);
    }

    pub(super) fn release_taken(&mut self, permits: u32, taken: u32, id: &[u8]) {
        let mut rest = u64::from(permits);
        while rest > 0 {
            let (permits, taken) = (rest.to_string(), taken.to_string());
            rest = self
                .execute_in_steps(Script::Release, &[permits.as_bytes(), id, taken.as_bytes()], "")
                .1;
        }
    }

    pub(super) fn available(&mut self) -> u64 {
        self.execute_in_steps(Script::AvailablePermits, &[], &self.template_rate.clone()).1
    }

    /// Returns the rate, the interval, 1 if the rate is per client, and the keep-alive time.
    pub(super) fn config(&mut self) -> Option<[u64; 4]> {
        self.steps = 0;
        let reply: [i64; 5] = self.execute(Script::Config, &[], &self.template_rate.clone(), b"");
        (reply[0] == DONE).then(|| [1, 2, 3, 4].map(|i| reply[i] as u64))
    }

    pub(super) fn set(&mut self, mode: &str, rate: u64, interval: u64, rate_type: u8) -> bool {
        self.set_and_keep_alive(mode, rate, interval, rate_type, "")
    }

    pub(super) fn set_and_keep_alive(
        &mut self,
        mode: &str,
        rate: u64,
        interval: u64,
        rate_type: u8,
        keep_alive: &str,
    ) -> bool {
        let [rate, interval] = [rate, interval].map(|number| number.to_string());
        let args = [mode, &rate, &interval, &rate_type.to_string(), keep_alive];
        self.execute_in_steps(Script::SetRate, &args.map(|arg| arg.as_bytes()), "").1 == 1
    }

    pub(super) fn expire(&mut self, ms: &str) -> bool {
        self.execute::<i64>(Script::Expire, &[ms.as_bytes()], "", b"") == 1
    }

    /// Returns `Ok` if the acquire was granted, else the delay in milliseconds, or `None` if the
    /// script fails.
    pub(super) fn java_acquire(
        &mut self,
        permits: u32,
        skew: i64,
        id: Id,
    ) -> Option<Result<(), i64>> {
        let clock = self.now_ms().saturating_add_signed(skew).to_string();
        let permits = permits.to_string();
        let text = JAVA.to_owned() + JAVA_ACQUIRE;
        let reply: Option<Option<i64>> =
            self.try_eval(&text, &[permits.as_bytes(), clock.as_bytes(), &id]);
        reply.map(|delay| delay.map_or(Ok(()), Err))
    }

    pub(super) fn java_available(&mut self, skew: i64) -> i64 {
        let clock = self.now_ms().saturating_add_signed(skew).to_string();
        let keys = self.keys.all[..5].to_vec();
        self.eval(&(JAVA.to_owned() + JAVA_AVAILABLE), &keys, &[clock.as_bytes()])
    }

    pub(super) fn java_release(&mut self, permits: u32) {
        let permits = permits.to_string();
        let keys = self.keys.all[..5].to_vec();
        let _: i64 = self.eval(&(JAVA.to_owned() + JAVA_RELEASE), &keys, &[permits.as_bytes()]);
    }

    pub(super) fn java_update(&mut self, rate: u64, interval: u64) {
        let [rate, interval] = [rate, interval].map(|number| number.to_string());
        let args = [rate.as_bytes(), interval.as_bytes()];
        let keys = self.keys.all[..5].to_vec();
        let _: i64 = self.eval(&(JAVA.to_owned() + JAVA_UPDATE), &keys, &args);
    }

    pub(super) fn command<T: FromRedisValue>(&mut self, words: &[&str]) -> T {
        redis::cmd(words[0]).arg(&words[1..]).query(&mut self.connection).unwrap()
    }

    pub(super) fn lose(&mut self, key: usize) {
        let key = self.keys.all[key].clone();
        self.command::<()>(&["DEL", &key]);
        self.command::<()>(&["HDEL", "expiries", &key]);
    }

    pub(super) fn value(&mut self) -> Option<String> {
        let key = self.keys.all[1].clone();
        self.command(&["GET", &key])
    }

    pub(super) fn log(&mut self) -> Vec<Entry> {
        let key = self.keys.all[3].clone();
        let entries: Vec<(Vec<u8>, f64)> = self.command(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]);
        let entry = |(member, score)| {
            assert_eq!(f64::trunc(score), score);
            Entry { member, score: score as u64 }
        };
        entries.into_iter().map(entry).collect()
    }

    /// Returns the time to live of a key, in milliseconds.
    pub(super) fn ttl(&mut self, key: usize) -> Option<u64> {
        let key = self.keys.all[key].clone();
        let ends: Option<u64> = self.command(&["HGET", "expiries", &key]);
        ends.map(|ends| ends - self.now_ms())
    }

    /// Returns all keys in Redis that have not expired, with their contents.
    pub(super) fn dump(&mut self) -> Vec<(String, Vec<u8>)> {
        self.tick();
        let mut keys: Vec<String> = self.command(&["KEYS", "*"]);
        keys.sort_unstable();
        keys.into_iter().map(|key| (key.clone(), self.command(&["DUMP", &key]))).collect()
    }
}
