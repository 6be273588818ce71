//! The library `struct` of Redis, as far as the scripts use it: integers, doubles and byte orders.
//! Like that library, it returns numbers as floats.

use mlua::{Lua, LuaString, MultiValue, Result, Value};

enum Item {
    Integer { size: usize, is_signed: bool },
    Double,
}

/// Reads a format: whether it is little-endian, and its items.
fn parse(format: &str) -> (bool, Vec<Item>) {
    let (is_little, items) = match format.split_at(1) {
        ("<", items) => (true, items),
        (">", items) => (false, items),
        _ => panic!("{format}: a format names its byte order"),
    };
    let mut letters = items.chars().peekable();
    let mut parsed = vec![];
    while let Some(letter) = letters.next() {
        let size = letters.next_if(char::is_ascii_digit).and_then(|digit| digit.to_digit(10));
        parsed.push(match (letter, size) {
            ('B', None) => Item::Integer { size: 1, is_signed: false },
            ('I', Some(size)) => Item::Integer { size: size as usize, is_signed: false },
            ('i', Some(size)) => Item::Integer { size: size as usize, is_signed: true },
            ('d', None) => Item::Double,
            other => panic!("{format}: {other:?} is not known"),
        });
    }
    (is_little, parsed)
}

fn number(value: &Value) -> f64 {
    match value {
        Value::Integer(number) => *number as f64,
        Value::Number(number) => *number,
        other => panic!("{other:?} is not a number"),
    }
}

fn pack(lua: &Lua, (format, values): (String, MultiValue)) -> Result<LuaString> {
    let (is_little, items) = parse(&format);
    assert!(values.len() >= items.len(), "{format}: too few values");
    let mut bytes = vec![];
    for (item, value) in items.iter().zip(values.iter()) {
        let (all, size) = match item {
            Item::Integer { size, .. } => ((number(value) as i64).to_le_bytes(), *size),
            Item::Double => (number(value).to_le_bytes(), 8),
        };
        let start = bytes.len();
        bytes.extend(&all[..size]);
        if !is_little {
            bytes[start..].reverse();
        }
    }
    lua.create_string(bytes)
}

fn unpack(
    _: &Lua,
    (format, bytes, start): (String, LuaString, Option<f64>),
) -> Result<MultiValue> {
    let (is_little, items) = parse(&format);
    let mut position = start.map_or(0, |start| start as usize - 1);
    let bytes = bytes.as_bytes();
    let mut values = MultiValue::new();
    for item in items {
        let size = if let Item::Integer { size, .. } = item { size } else { 8 };
        let Some(field) = bytes.get(position..position + size) else {
            return Err(mlua::Error::runtime("data string too short"));
        };
        let mut all = [0; 8];
        all[..size].copy_from_slice(field);
        if !is_little {
            all[..size].reverse();
        }
        let bits = u64::from_le_bytes(all);
        let unused = 64 - 8 * size as u32;
        values.push_back(Value::Number(match item {
            Item::Double => f64::from_bits(bits),
            Item::Integer { is_signed: false, .. } => bits as f64,
            Item::Integer { .. } => ((bits << unused) as i64 >> unused) as f64,
        }));
        position += size;
    }
    values.push_back(Value::Number((position + 1) as f64));
    Ok(values)
}

/// Adds `struct` to the globals.
pub fn register(lua: &Lua) -> Result<()> {
    let library = lua.create_table()?;
    library.set("pack", lua.create_function(pack)?)?;
    library.set("unpack", lua.create_function(unpack)?)?;
    lua.globals().set("struct", library)
}
