//! A server for the scripts: the commands that they call, on a map of strings, at a time that is
//! set. Without other types of values.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use mlua::{Error, Lua, MultiValue, Result, Table, Value};

#[derive(Clone, Default)]
pub struct Server(Rc<RefCell<Contents>>);

#[derive(Default)]
struct Contents {
    /// In microseconds.
    now: u64,
    values: BTreeMap<Vec<u8>, Stored>,
}

#[derive(Default)]
struct Stored {
    bytes: Vec<u8>,
    /// In milliseconds.
    expiry: Option<u64>,
}

/// An argument of a command, as a server converts it.
fn argument(value: &Value) -> Vec<u8> {
    match value {
        Value::String(bytes) => bytes.as_bytes().to_vec(),
        Value::Integer(number) => number.to_string().into_bytes(),
        // `%.17g` prints whole numbers so.
        Value::Number(number) if number.fract() == 0.0 && number.abs() < 1e17 => {
            format!("{number:.0}").into_bytes()
        }
        other => panic!("{other:?} is not an argument"),
    }
}

fn number(bytes: &[u8]) -> i64 {
    std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok()).expect("an integer")
}

fn range(bytes: &[u8], from: i64, to: i64) -> &[u8] {
    let size = bytes.len() as i64;
    let from_start = |index: i64| if index < 0 { (size + index).max(0) } else { index };
    let (from, to) = (from_start(from), from_start(to).min(size - 1));
    if from > to { &[] } else { &bytes[from as usize..=to as usize] }
}

fn set(stored: &mut Stored, new: Vec<u8>, options: &[&[u8]]) {
    stored.bytes = new;
    match options {
        [b"KEEPTTL"] => {}
        [b"PXAT", at] | [b"PXAT", at, b"NX"] => stored.expiry = Some(number(at) as u64),
        other => panic!("{other:?}: options of SET"),
    }
}

impl Contents {
    fn execute(&mut self, lua: &Lua, arguments: &[&[u8]]) -> Result<Value> {
        let found = |key: &[u8]| self.values.get(key).map(|stored| &stored.bytes[..]);
        let string = |bytes: &[u8]| lua.create_string(bytes).map(Value::String);
        match *arguments {
            [b"TIME"] => {
                let parts = [self.now / 1_000_000, self.now % 1_000_000];
                let parts = parts.map(|part| part.to_string());
                return Ok(Value::Table(lua.create_sequence_from(parts)?));
            }
            [b"MGET", ref keys @ ..] => {
                let value = |key: &&[u8]| found(key).map_or(Ok(Value::Boolean(false)), string);
                let values = keys.iter().map(value).collect::<Result<Vec<_>>>()?;
                return Ok(Value::Table(lua.create_sequence_from(values)?));
            }
            [b"GETRANGE", key, from, to] => {
                return string(range(found(key).unwrap_or_default(), number(from), number(to)));
            }
            [b"STRLEN", key] => {
                return Ok(Value::Integer(found(key).unwrap_or_default().len() as _));
            }
            [b"SET", key, value, ref options @ ..] => {
                if !options.contains(&&b"NX"[..]) || found(key).is_none() {
                    set(self.values.entry(key.to_vec()).or_default(), value.to_vec(), options);
                }
            }
            [b"SETRANGE", key, from, value] => {
                let bytes = &mut self.values.entry(key.to_vec()).or_default().bytes;
                let end = number(from) as usize + value.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[end - value.len()..end].copy_from_slice(value);
            }
            [b"PEXPIREAT", key, at] => {
                if let Some(stored) = self.values.get_mut(key) {
                    stored.expiry = Some(number(at) as u64);
                }
            }
            [b"DEL", key] => drop(self.values.remove(key)),
            _ => return Err(Error::runtime(format!("no such command: {arguments:?}"))),
        }
        Ok(Value::Boolean(true))
    }
}

impl Server {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn flush(&self) {
        self.0.borrow_mut().values.clear();
    }

    /// Sets the time, and drops the keys that have expired.
    pub fn set_time(&self, now: u64) {
        let mut contents = self.0.borrow_mut();
        contents.now = now;
        contents.values.retain(|_, stored| stored.expiry.is_none_or(|at| at * 1_000 > now));
    }

    /// All keys, with their values and expiries.
    pub fn contents(&self) -> String {
        let contents = self.0.borrow();
        let key = |(key, stored): (&Vec<u8>, &Stored)| {
            let hex: String =
                stored.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{} {hex} {:?}", String::from_utf8_lossy(key), stored.expiry)
        };
        contents.values.iter().map(key).collect::<Vec<_>>().join("; ")
    }

    /// Adds `redis` to the globals.
    pub fn register(&self, lua: &Lua) -> Result<()> {
        let redis: Table = lua.create_table()?;
        for name in ["call", "pcall"] {
            let server = self.clone();
            let call = move |lua: &Lua, values: MultiValue| {
                let arguments: Vec<_> = values.iter().map(argument).collect();
                let arguments: Vec<_> = arguments.iter().map(|bytes| &bytes[..]).collect();
                server.0.borrow_mut().execute(lua, &arguments)
            };
            redis.set(name, lua.create_function(call)?)?;
        }
        lua.globals().set("redis", redis)
    }
}
