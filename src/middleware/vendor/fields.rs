//! Reads `RateLimit` and `RateLimit-Policy` of the IETF drafts from 07 on, in time linear in their
//! length: a vendor can send as many policies and items as fit into a response.

use std::{collections::HashMap, time::Duration};

use http::HeaderMap;

use super::time;

/// What remains, and the time until more does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Left {
    pub remaining: u64,
    pub reset: Option<Duration>,
}

/// Reads what is left of a unit: an answer for each item.
pub(super) fn left<'a>(unit: &str, headers: &'a HeaderMap) -> Vec<Left> {
    let all = |name: &str| headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    let lists = |name: &str| all(name).flat_map(|line| split(line, ',')).map(Item::new);
    if let Some(left) = dictionary(all("ratelimit")) {
        return if unit == "requests" { vec![left] } else { vec![] };
    }
    // Of equal names, the first one counts.
    let mut units: HashMap<&'a str, &'a str> = HashMap::new();
    for policy in lists("ratelimit-policy") {
        units.entry(policy.name).or_insert(policy.param("qu").map_or("requests", unquoted));
    }
    let of_unit = lists("ratelimit")
        .filter(|item| units.get(item.name).copied().unwrap_or("requests") == unit)
        .filter_map(|item| Left::new(item.param("r")?, item.param("t")));
    of_unit.collect()
}

/// Reads a dictionary, as draft 07 and some vendors have it: `limit=100, remaining=99, reset=44`.
pub(super) fn dictionary<'a>(lines: impl Iterator<Item = &'a str>) -> Option<Left> {
    let (mut remaining, mut reset) = (None, None);
    for (name, value) in lines.flat_map(|line| line.split([',', ';'])).filter_map(pair) {
        match name {
            "remaining" => remaining = remaining.or(Some(value)),
            "reset" | "resets" => reset = reset.or(Some(value)),
            _ => {}
        }
    }
    Left::new(remaining?, reset)
}

impl Left {
    fn new(remaining: &str, reset: Option<&str>) -> Option<Self> {
        let remaining = time::number(remaining)? as u64;
        Some(Self { remaining, reset: reset.and_then(time::number).map(time::seconds) })
    }
}

/// An item of a list.
struct Item<'a> {
    name: &'a str,
    text: &'a str,
}

impl<'a> Item<'a> {
    fn new(text: &'a str) -> Self {
        Self { name: split(text, ';').next().map_or("", unquoted), text }
    }

    fn param(&self, key: &str) -> Option<&'a str> {
        let params = split(self.text, ';').skip(1).filter_map(pair);
        params.filter(|(name, _)| *name == key).map(|(_, value)| value).next()
    }
}

/// Splits a name from its value.
pub(super) fn pair(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').map(|(key, value)| (key.trim(), value.trim()))
}

/// Returns the text of a string. Escapes stay: both headers have the same ones.
fn unquoted(text: &str) -> &str {
    text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text)
}

/// Splits a text at a separator outside of strings.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut in_string, mut is_escaped) = (false, false);
    let parts = text.split(move |char| {
        let is_end = char == separator && !in_string;
        in_string ^= char == '"' && !is_escaped;
        is_escaped = char == '\\' && in_string && !is_escaped;
        is_end
    });
    parts.map(str::trim).filter(|part| !part.is_empty())
}

pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    Some(headers.get(name)?.to_str().ok()?.trim())
}
