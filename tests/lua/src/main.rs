//! Runs a stream of calls to the scripts under the version of Lua that it was built with, and
//! prints each reply and the stored values. `make test-lua54` compares what the versions print. The
//! stream is that of `crates/engine/src/algorithm/tests/stream.rs`; the server is replaced by a
//! map.

mod pack;
mod server;

use std::{
    collections::HashMap,
    env, fs,
    io::{BufWriter, Write, stdout},
};

use mlua::{Function, Lua, MultiValue, Result, Value};

use crate::server::Server;

/// Splits the stream into records of fields.
fn records(mut bytes: &[u8]) -> Vec<Vec<&[u8]>> {
    fn number(bytes: &mut &[u8]) -> usize {
        let (size, rest) = bytes.split_first_chunk().expect("a size");
        *bytes = rest;
        u32::from_le_bytes(*size) as usize
    }
    let mut records = vec![];
    while !bytes.is_empty() {
        let count = number(&mut bytes);
        let mut field = |_| {
            let size = number(&mut bytes);
            let (field, rest) = bytes.split_at(size);
            bytes = rest;
            field
        };
        records.push((0..count).map(&mut field).collect());
    }
    records
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// Prints a reply as the server would send it.
fn print(value: &Value, out: &mut impl Write) -> Result<()> {
    match value {
        Value::Table(items) => {
            for item in items.sequence_values::<Value>() {
                print(&item?, out)?;
            }
        }
        Value::String(bytes) => write!(out, " {:?}", bytes.as_bytes())?,
        Value::Integer(number) => write!(out, " :{number}")?,
        // A server truncates it.
        Value::Number(number) => write!(out, " :{}", *number as i64)?,
        Value::Nil | Value::Boolean(false) => write!(out, " nil")?,
        other => write!(out, " {other:?}")?,
    }
    Ok(())
}

fn strings<'a>(lua: &Lua, fields: impl Iterator<Item = &'a [u8]>) -> Result<mlua::Table> {
    let fields: Result<Vec<_>> = fields.map(|field| lua.create_string(field)).collect();
    lua.create_sequence_from(fields?)
}

fn main() -> Result<()> {
    let path = env::args().nth(1).expect("the path of the stream");
    let bytes = fs::read(&path)?;
    let mut out = BufWriter::new(stdout().lock());
    let lua = Lua::new();
    let server = Server::new();
    server.register(&lua)?;
    pack::register(&lua)?;
    let mut scripts: HashMap<Vec<u8>, Function> = HashMap::new();
    for record in records(&bytes) {
        match record[..] {
            [b"script", hash, source] => {
                scripts.insert(hash.to_vec(), lua.load(source).into_function()?);
            }
            [b"flush"] => server.flush(),
            [b"call", hash, now, count, ref arguments @ ..] => {
                server.set_time(text(now).parse().expect("a time"));
                let keys: usize = text(count).parse().expect("a number of keys");
                let (keys, arguments) = arguments.split_at(keys);
                lua.globals().set("KEYS", strings(&lua, keys.iter().copied())?)?;
                lua.globals().set("ARGV", strings(&lua, arguments.iter().copied())?)?;
                write!(out, "{}", text(now))?;
                match scripts[hash].call::<MultiValue>(()) {
                    Ok(reply) => reply.iter().try_for_each(|value| print(value, &mut out))?,
                    Err(error) => panic!("{} at {}: {error}", text(hash), text(now)),
                }
                writeln!(out, " {}", server.contents())?;
            }
            _ => panic!("no such record"),
        }
    }
    Ok(out.flush()?)
}
