//! The formats of logs: finds the time stamp and the key of a line. Knows no limits.

use std::{
    borrow::Cow,
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tower_ratelimit::{Key, key};

use super::{
    Flags,
    stamp::{self, Stamp},
};

/// The names that time stamps have in JSON and CSV.
const TIMES: [&str; 10] = [
    "time",
    "timestamp",
    "ts",
    "@timestamp",
    "time_iso8601",
    "msec",
    "time_local",
    "datetime",
    "StartUTC",
    "date",
];
/// The names that addresses of clients have.
const ADDRESSES: [&str; 10] = [
    "ip",
    "remote_addr",
    "client_ip",
    "remote_ip",
    "clientip",
    "request.client_ip",
    "request.remote_ip",
    "ClientHost",
    "client",
    "peer",
];
/// The fields of the common and the combined format.
const COMMON: [&str; 9] =
    ["ip", "user", "time", "method", "path", "protocol", "status", "referer", "agent"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// By the first line of each file
    Auto,
    /// The common or combined format of Apache and nginx
    Common,
    /// One JSON object per line
    Json,
    /// CSV, with the names of the fields in the first line
    Csv,
}

/// A field, and the value that a request must have; a `*` at the end stands for any rest.
#[derive(Clone)]
pub struct Only {
    field: String,
    value: String,
}

impl FromStr for Only {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=').filter(|(field, _)| !field.trim().is_empty());
        let (field, value) = parts.ok_or("write a field and its value, such as path=/login")?;
        Ok(Self { field: field.trim().to_owned(), value: value.to_owned() })
    }
}

impl fmt::Display for Only {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.field, self.value)
    }
}

/// The reader of the lines of one file.
pub struct Reader {
    format: Option<Format>,
    /// The names that the time stamp may have, and those of each part of the key.
    time: Vec<String>,
    parts: Vec<Part>,
    filters: Vec<Filter>,
    /// Of JSON and CSV: the places of the time stamp, of each part and of each filter, if they are
    /// known.
    places: Vec<Option<usize>>,
    /// Of JSON: the paths of the names. Of CSV: the names of the columns.
    names: Vec<Vec<String>>,
    /// What separates the columns of CSV.
    separator: u8,
    found: Vec<Option<String>>,
    last_time: Vec<u8>,
    last_stamp: Option<Stamp>,
}

/// A part of the key.
#[derive(Clone)]
struct Part {
    scope: String,
    names: Vec<String>,
    is_address: bool,
}

impl Part {
    /// `ip` is the name of the field with the address, if it is not one of those that are known.
    fn new(name: &str, ip: Option<&str>) -> Self {
        let (names, is_address) = match (name, ip) {
            ("ip", Some(ip)) => (list(&[ip]), true),
            ("ip", None) => (list(&ADDRESSES), true),
            _ => (list(&[name]), false),
        };
        Self { scope: name.to_owned(), names, is_address }
    }
}

fn list(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// What the requests must be.
struct Filter {
    part: Part,
    value: Vec<u8>,
    /// True if the value is the beginning.
    is_prefix: bool,
    /// The key of an address, as reports print it.
    key: String,
}

impl Filter {
    fn new(only: &Only, ip: Option<&str>) -> Self {
        let part = Part::new(&only.field, ip);
        let (value, is_prefix) = match only.value.strip_suffix('*') {
            Some(begin) => (begin, true),
            None => (&*only.value, false),
        };
        let key = match value.parse::<IpAddr>() {
            Ok(address) => key::PeerIp.key(address).to_string(),
            Err(_) => format!("ip={value}"),
        };
        Self { part, value: value.into(), is_prefix, key }
    }

    fn matches(&self, value: &[u8]) -> bool {
        if self.is_prefix {
            return value.starts_with(&self.value);
        }
        // Of IPv6, each address of the network is one key.
        let is_v6 = self.part.is_address && memchr::memchr(b':', value).is_some();
        value == self.value || is_v6 && key_of(&self.part, value).as_str() == self.key
    }
}

/// Why a line is not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    TooLong,
    NotTheFormat,
    NoTime,
    NoKey,
}

impl Bad {
    pub const ALL: [Self; 4] = [Self::TooLong, Self::NotTheFormat, Self::NoTime, Self::NoKey];

    pub fn text(self) -> &'static str {
        match self {
            Self::TooLong => "longer than 1 MiB",
            Self::NotTheFormat => "not in the format",
            Self::NoTime => "without a time stamp",
            Self::NoKey => "without a key",
        }
    }
}

/// What a line is.
pub enum Parsed {
    Request(Stamp),
    /// A request that is not one of those of `--only`.
    Other(Stamp),
    /// The header of a CSV file, or an empty line.
    Nothing,
    Bad(Bad),
}

impl Reader {
    pub fn new(flags: &Flags) -> Self {
        let ip = flags.ip.as_deref();
        let parts = flags.key.split(',').map(str::trim).filter(|it| !it.is_empty());
        Self {
            format: Some(flags.format).filter(|it| *it != Format::Auto),
            time: flags.time.as_ref().map_or_else(|| list(&TIMES), |time| list(&[time])),
            parts: parts.map(|name| Part::new(name, ip)).collect(),
            filters: flags.only.iter().map(|only| Filter::new(only, ip)).collect(),
            places: vec![],
            names: vec![],
            separator: b',',
            found: vec![],
            last_time: vec![],
            last_stamp: None,
        }
    }

    /// Reads a line. If it is a request, writes its key to `key`.
    pub fn read(&mut self, line: &[u8], key: &mut String) -> Parsed {
        if line.trim_ascii().is_empty() {
            return Parsed::Nothing;
        }
        let format = *self.format.get_or_insert_with(|| guess(line));
        let read = match format {
            Format::Json => self.json(line, key),
            Format::Csv => self.csv(line, key),
            Format::Common | Format::Auto => self.common(line, key),
        };
        read.unwrap_or_else(Parsed::Bad)
    }

    /// Returns what is wrong if no line of a file was a request: the name that is missing.
    pub fn missing(&self) -> Option<String> {
        let is_common = self.format == Some(Format::Common);
        let names: Vec<String> = match is_common {
            true => list(&COMMON),
            false => self.names.iter().map(|path| path.join(".")).collect(),
        };
        if names.is_empty() {
            return None;
        }
        let header = match self.format {
            Some(Format::Csv) => " (the first line of CSV has the names)",
            _ => "",
        };
        let problem = |flag: &str, what: String, write: &str| {
            Some(format!("{flag}: {what}; write {write}: {}{header}", names.join(", ")))
        };
        let is_known = |wanted: &[String]| wanted.iter().any(|name| names.contains(name));
        if !is_known(&self.time) && !is_common {
            return match &*self.time {
                [name] => problem("--time", unknown(name), "one of these"),
                _ => problem(
                    "--time",
                    "no field has a known name of a time stamp".into(),
                    "the name of one of these",
                ),
            };
        }
        let filters = self.filters.iter().map(|filter| ("--only", &filter.part));
        for (flag, part) in self.parts.iter().map(|part| ("--key", part)).chain(filters) {
            let is_here = match is_common {
                true => COMMON.contains(&&*part.scope),
                false => is_known(&part.names),
            };
            match &*part.names {
                _ if is_here => {}
                [name] if part.is_address => {
                    return problem("--ip", unknown(name), "one of these");
                }
                [name] => return problem(flag, unknown(name), "one of these"),
                _ => {
                    return problem(
                        "--ip",
                        "no field has a known name of an address".into(),
                        "the name of one of these, or name the fields of the key with --key",
                    );
                }
            }
        }
        None
    }

    /// Returns an error if a flag names a field of JSON or CSV, and no file is JSON or CSV.
    pub fn unused(flags: &Flags, readers: &[&Self]) -> Option<String> {
        let is_common = |reader: &&Self| reader.format == Some(Format::Common);
        if readers.is_empty() || !readers.iter().all(is_common) {
            return None;
        }
        let flags = [("--time", &flags.time, "time stamp"), ("--ip", &flags.ip, "address")];
        let (flag, _, what) = flags.iter().find(|(_, name, _)| name.is_some())?;
        Some(format!(
            "{flag}: the {what} has a fixed place in lines of the common format; leave {flag} out"
        ))
    }

    fn stamp(&mut self, text: &[u8]) -> Result<Stamp, Bad> {
        // Neighbours often have the same stamp.
        if self.last_time == text
            && let Some(stamp) = self.last_stamp
        {
            return Ok(stamp);
        }
        let stamp = stamp::parse(text).ok_or(Bad::NoTime)?;
        self.last_time.clear();
        self.last_time.extend(text);
        self.last_stamp = Some(stamp);
        Ok(stamp)
    }

    fn common(&mut self, line: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        let line = Common::split(line).ok_or(Bad::NotTheFormat)?;
        let stamp = self.stamp(line.time)?;
        let matches = |filter: &Filter| {
            line.field(&filter.part.scope).is_some_and(|value| filter.matches(value))
        };
        if !self.filters.iter().all(matches) {
            return Ok(Parsed::Other(stamp));
        }
        for (number, part) in self.parts.iter().enumerate() {
            let value = line.field(&part.scope).ok_or(Bad::NoKey)?;
            write_part(key, part, number, value)?;
        }
        Ok(Parsed::Request(stamp))
    }

    fn json(&mut self, line: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        if self.places.is_empty() || self.places.contains(&None) {
            let value: serde_json::Value =
                serde_json::from_slice(line).map_err(|_| Bad::NotTheFormat)?;
            let fields = value.as_object().ok_or(Bad::NotTheFormat)?;
            self.names = paths(fields, &[]);
            self.find_places();
        }
        let path = |place: &Option<usize>| place.map_or(&[][..], |place| &*self.names[place]);
        let wanted: Vec<&[String]> = self.places.iter().map(path).collect();
        self.found.resize(wanted.len(), None);
        self.found.iter_mut().for_each(|it| *it = None);
        let mut json = serde_json::Deserializer::from_slice(line);
        let all = (1u32 << wanted.len()) - 1;
        let seed = Wanted { paths: &wanted, depth: 0, mask: all, found: &mut self.found };
        seed.deserialize(&mut json).map_err(|_| Bad::NotTheFormat)?;
        json.end().map_err(|_| Bad::NotTheFormat)?;

        let time = self.found[0].take().ok_or(Bad::NoTime)?;
        let stamp = self.stamp(time.as_bytes())?;
        let (parts, filters) = self.found[1..].split_at(self.parts.len());
        let value = |found: &Option<String>, filter: &Filter| {
            found.as_ref().is_some_and(|value| filter.matches(value.as_bytes()))
        };
        if !filters.iter().zip(&self.filters).all(|(found, filter)| value(found, filter)) {
            return Ok(Parsed::Other(stamp));
        }
        for (number, (part, found)) in self.parts.iter().zip(parts).enumerate() {
            write_part(key, part, number, found.as_ref().ok_or(Bad::NoKey)?.as_bytes())?;
        }
        Ok(Parsed::Request(stamp))
    }

    fn csv(&mut self, line: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        if self.names.is_empty() {
            let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
            self.separator = separator(line).unwrap_or(b',');
            let columns = columns(line, self.separator).ok_or(Bad::NotTheFormat)?;
            let name = |it: &Cow<'_, [u8]>| vec![String::from_utf8_lossy(it).trim().to_owned()];
            self.names = columns.iter().map(name).collect();
            self.find_places();
            return Ok(Parsed::Nothing);
        }
        let columns = columns(line, self.separator).ok_or(Bad::NotTheFormat)?;
        if columns.len() != self.names.len() {
            return Err(Bad::NotTheFormat);
        }
        let value = |place: usize| self.places[place].map(|place| &*columns[place]);
        let time = value(0).ok_or(Bad::NoTime)?;
        let matches = |(number, filter): (usize, &Filter)| {
            value(1 + self.parts.len() + number).is_some_and(|value| filter.matches(value))
        };
        let is_other = !self.filters.iter().enumerate().all(matches);
        for (number, part) in self.parts.iter().enumerate().filter(|_| !is_other) {
            write_part(key, part, number, value(number + 1).ok_or(Bad::NoKey)?)?;
        }
        let stamp = self.stamp(time)?;
        Ok(if is_other { Parsed::Other(stamp) } else { Parsed::Request(stamp) })
    }

    /// Finds the fields of the time stamp, of the key and of the filters among the names of a line.
    fn find_places(&mut self) {
        let place = |wanted: &Vec<String>| {
            let place = |name: &String| self.names.iter().position(|path| path.join(".") == *name);
            wanted.iter().find_map(place)
        };
        let parts = self.parts.iter().chain(self.filters.iter().map(|filter| &filter.part));
        let wanted = std::iter::once(&self.time).chain(parts.map(|part| &part.names));
        self.places = wanted.map(place).collect();
    }
}

fn unknown(name: &str) -> String {
    format!("no field has the name {name:?}")
}

/// Returns what separates the columns of a line: the first of these that is in it.
fn separator(line: &[u8]) -> Option<u8> {
    [b',', b';', b'\t'].into_iter().find(|separator| line.contains(separator))
}

fn guess(line: &[u8]) -> Format {
    match line.trim_ascii_start().first() {
        Some(b'{') => Format::Json,
        _ if Common::split(line).is_some() => Format::Common,
        _ if separator(line).is_some() && !line.contains(&b'[') => Format::Csv,
        _ => Format::Common,
    }
}

/// Adds a part of the key, as the extractor of an address or `Key::scoped` makes it.
fn write_part(key: &mut String, part: &Part, number: usize, value: &[u8]) -> Result<(), Bad> {
    if value.is_empty() || value == b"-" {
        return Err(Bad::NoKey);
    }
    if number > 0 {
        let first = Key::from_text(key).expect("a key was written");
        let text = first.and(&key_of(part, value)).to_string();
        *key = text;
        return Ok(());
    }
    if part.is_address
        && let Ok(text) = str::from_utf8(value)
        && text.parse::<Ipv4Addr>().is_ok()
    {
        key.push_str("ip=");
        key.push_str(text);
    } else {
        key.push_str(key_of(part, value).as_str());
    }
    Ok(())
}

fn key_of(part: &Part, value: &[u8]) -> Key<'static> {
    let address = str::from_utf8(value).ok().filter(|_| part.is_address);
    match address.and_then(|it| it.parse::<IpAddr>().ok()) {
        Some(address) => key::PeerIp.key(address),
        None => Key::scoped(&part.scope, value),
    }
}

/// A line of the common or the combined format.
struct Common<'a> {
    line: &'a [u8],
    time: &'a [u8],
    /// What is behind the time stamp.
    rest: &'a [u8],
}

impl<'a> Common<'a> {
    fn split(line: &'a [u8]) -> Option<Self> {
        let open = memchr::memchr(b'[', line)?;
        let length = memchr::memchr(b']', &line[open..])?;
        let time = &line[open + 1..open + length];
        let is_stamp = time.len() >= 20 && time[2] == b'/' && time[6] == b'/';
        let rest = &line[open + length + 1..];
        is_stamp.then_some(Self { line, time, rest })
    }

    fn field(&self, name: &str) -> Option<&'a [u8]> {
        match name {
            "ip" | "host" => self.line.split(|it| *it == b' ').next(),
            "user" => {
                let head = &self.line[..self.line.len() - self.rest.len() - self.time.len() - 2];
                let mut words = head.trim_ascii_end().splitn(3, |it| *it == b' ');
                words.nth(2)
            }
            "time" => Some(self.time),
            "method" => self.request()?.split(|it| *it == b' ').next(),
            "path" => {
                let target = self.request()?.split(|it| *it == b' ').nth(1)?;
                target.split(|it| *it == b'?').next()
            }
            "protocol" => self.request()?.split(|it| *it == b' ').nth(2),
            "status" => {
                let behind = quoted(self.rest)?.1;
                behind.trim_ascii_start().split(|it| *it == b' ').next()
            }
            "referer" => Some(quoted(quoted(self.rest)?.1)?.0),
            "agent" => Some(quoted(quoted(quoted(self.rest)?.1)?.1)?.0),
            _ => None,
        }
    }

    fn request(&self) -> Option<&'a [u8]> {
        Some(quoted(self.rest)?.0)
    }
}

/// Returns the next text in quotes, and what is behind it.
fn quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let open = memchr::memchr(b'"', text)? + 1;
    let mut end = open;
    while end < text.len() {
        match text[end] {
            b'"' => return Some((&text[open..end], &text[end + 1..])),
            b'\\' => end += 2,
            _ => end += 1,
        }
    }
    None
}

/// Splits a line of CSV; `None` if a quote has no end.
fn columns(line: &[u8], separator: u8) -> Option<Vec<Cow<'_, [u8]>>> {
    let (mut columns, mut rest) = (vec![], line);
    loop {
        if let [b'"', quoted @ ..] = rest {
            let (mut value, mut text) = (vec![], quoted);
            loop {
                let end = memchr::memchr(b'"', text)?;
                value.extend(&text[..end]);
                text = &text[end + 1..];
                let [b'"', behind @ ..] = text else { break };
                value.push(b'"');
                text = behind;
            }
            columns.push(Cow::Owned(value));
            match text {
                [] => return Some(columns),
                [first, behind @ ..] if *first == separator => rest = behind,
                _ => return None,
            }
        } else {
            match memchr::memchr(separator, rest) {
                Some(end) => {
                    columns.push(Cow::Borrowed(&rest[..end]));
                    rest = &rest[end + 1..];
                }
                None => {
                    columns.push(Cow::Borrowed(rest));
                    return Some(columns);
                }
            }
        }
    }
}

/// Returns the paths of all fields of an object.
fn paths(fields: &serde_json::Map<String, serde_json::Value>, head: &[String]) -> Vec<Vec<String>> {
    let path = |(name, value): (&String, &serde_json::Value)| {
        let path = [head, std::slice::from_ref(name)].concat();
        match value.as_object() {
            Some(fields) if path.len() < 8 => paths(fields, &path),
            _ => vec![path],
        }
    };
    fields.iter().flat_map(path).collect()
}

/// Reads the wanted fields of an object, and skips the others.
struct Wanted<'a> {
    paths: &'a [&'a [String]],
    /// The length of the path that leads here.
    depth: usize,
    /// The wanted fields that are here or below.
    mask: u32,
    found: &'a mut [Option<String>],
}

impl Wanted<'_> {
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
        let Wanted { paths, depth, mask, .. } = self.0;
        let is_here = |index: &usize| {
            mask & 1 << index != 0 && paths[*index].get(*depth).is_some_and(|part| part == name)
        };
        Ok((0..paths.len()).filter(is_here).map(|index| 1 << index).sum())
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

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(mask) = map.next_key_seed(Name(&self))? {
            if mask == 0 {
                map.next_value::<IgnoredAny>()?;
            } else {
                let Self { paths, depth, .. } = self;
                let found = &mut *self.found;
                map.next_value_seed(Wanted { paths, depth: depth + 1, mask, found })?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
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
