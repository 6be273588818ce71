//! Lines of JSON: all fields of an object, or quickly those that are wanted.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Deeper fields are not read.
const MAX_DEPTH: usize = 8;

/// The names that lead to a field; an item of an array has its number as its name.
pub type Path = Vec<String>;

/// Returns all fields of an object with their values.
pub fn all(text: &[u8]) -> Option<Vec<(Path, String)>> {
    let value: Value = serde_json::from_slice(text).ok().filter(Value::is_object)?;
    let mut fields = vec![];
    collect(value, &[], &mut fields);
    Some(fields)
}

fn collect(value: Value, path: &[String], fields: &mut Vec<(Path, String)>) {
    let below = |name: String| [path, &[name]].concat();
    match value {
        Value::Object(object) if path.len() < MAX_DEPTH => {
            object.into_iter().for_each(|(name, value)| collect(value, &below(name), fields));
        }
        Value::Array(items) if path.len() < MAX_DEPTH => {
            let items = items.into_iter().enumerate();
            items.for_each(|(number, value)| collect(value, &below(number.to_string()), fields));
        }
        Value::String(text) => fields.push((path.into(), text)),
        Value::Null => fields.push((path.into(), String::new())),
        value => fields.push((path.into(), value.to_string())),
    }
}

/// Reads the fields with these paths, and skips the others. `None` if the text is no object.
pub fn some(text: &[u8], paths: &[&Path]) -> Option<Vec<Option<String>>> {
    let mut found = vec![None; paths.len()];
    let mut json = serde_json::Deserializer::from_slice(text);
    let mask = (1u32 << paths.len()) - 1;
    Wanted { paths, depth: 0, mask, found: &mut found }.deserialize(&mut json).ok()?;
    json.end().ok()?;
    Some(found)
}

struct Wanted<'a> {
    paths: &'a [&'a Path],
    /// The length of the path that leads here.
    depth: usize,
    /// The wanted fields that are here or below.
    mask: u32,
    found: &'a mut [Option<String>],
}

impl Wanted<'_> {
    /// Returns the wanted fields that are here or below `name`.
    fn below(&self, name: &str) -> u32 {
        let Self { paths, depth, mask, .. } = self;
        let is_here = |index: &usize| {
            mask & 1 << index != 0 && paths[*index].get(*depth).is_some_and(|part| part == name)
        };
        (0..paths.len()).filter(is_here).map(|index| 1 << index).sum()
    }

    fn inner(&mut self, mask: u32) -> Wanted<'_> {
        Wanted { paths: self.paths, depth: self.depth + 1, mask, found: self.found }
    }

    fn keep(self, text: impl Into<String>) {
        let text = text.into();
        for (index, path) in self.paths.iter().enumerate() {
            if self.mask & 1 << index != 0 && path.len() == self.depth {
                self.found[index] = Some(text.clone());
            }
        }
    }
}

/// Reads the name of a field: returns the wanted fields that are in it.
struct Name<'a>(&'a Wanted<'a>);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = u32;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_str<E>(self, name: &str) -> Result<u32, E> {
        Ok(self.0.below(name))
    }
}

impl<'de> DeserializeSeed<'de> for Wanted<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Wanted<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(mask) = map.next_key_seed(Name(&self))? {
            match mask {
                0 => drop(map.next_value::<IgnoredAny>()?),
                mask => map.next_value_seed(self.inner(mask))?,
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        for number in 0.. {
            let mask = self.below(&number.to_string());
            if items.next_element_seed(self.inner(mask))?.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.keep(text);
        Ok(())
    }

    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.keep(number.to_string());
        Ok(())
    }

    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.keep(number.to_string());
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.keep(number.to_string());
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.keep(value.to_string());
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}
