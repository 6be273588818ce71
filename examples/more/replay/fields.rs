//! The formats of logs: finds the time stamp and the key of a line. Knows no limits.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    fmt,
    net::{Ipv4Addr, SocketAddr},
    rc::Rc,
    str::FromStr,
};

use tower_ratelimit::Key;

use super::{
    Flags,
    client::Clients,
    columns::Columns,
    json::{self, Path},
    names::{self, ADDRESSES, FORWARDED, PREFIX, TIMES, plain},
    stamp::{self, Stamp},
    text::{self, Pattern, Text},
};

/// The fields of `--key` and `--only`, together.
const MAX_FIELDS: usize = 20;

/// The format of the lines.
#[derive(Clone, Debug)]
pub enum Format {
    /// By each line
    Auto,
    /// Those that `text.rs` knows
    Text,
    /// One JSON object per line
    Json,
    /// CSV, with the names of the fields in the first line
    Csv,
    Pattern(Pattern),
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "text" => Self::Text,
            "json" => Self::Json,
            "csv" => Self::Csv,
            pattern if pattern.contains('$') => Self::Pattern(Pattern::new(pattern)?),
            _ => {
                return Err(
                    "write auto, text, json, csv, or a line with the names of its fields, \
                            such as '$ip - $user [$time] \"$request\"'"
                        .to_owned(),
                );
            }
        })
    }
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

/// A field that is looked for.
struct Want {
    flag: &'static str,
    scope: String,
    kind: Kind,
    /// Its name in the log; `None` if it is one of those that are known.
    name: Option<String>,
    filter: Option<Filter>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Time,
    Address,
    Text,
}

impl Want {
    fn time(flags: &Flags) -> Self {
        let (flag, scope, kind, name) = ("--time", String::new(), Kind::Time, flags.time.clone());
        Self { flag, scope, kind, name, filter: None }
    }

    fn new(flag: &'static str, scope: &str, flags: &Flags) -> Self {
        let (kind, name) = match scope {
            "ip" => (Kind::Address, flags.ip.clone()),
            _ => (Kind::Text, Some(scope.to_owned())),
        };
        Self { flag, scope: scope.to_owned(), kind, name, filter: None }
    }

    /// Returns the names that it can have, as far as they are known.
    fn known(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::Time => &TIMES,
            Kind::Address => &ADDRESSES,
            Kind::Text => &[],
        }
    }
}

/// What a value must be.
struct Filter {
    value: String,
    /// True if the value is the beginning.
    is_prefix: bool,
}

impl Filter {
    /// Addresses are compared as reports print their keys.
    fn new(only: &Only, is_address: bool, clients: &mut Clients) -> Self {
        let (value, is_prefix) = match only.value.strip_suffix('*') {
            Some(begin) => (begin, true),
            None => (&*only.value, false),
        };
        let key = clients.key(value.as_bytes()).filter(|_| is_address && !is_prefix);
        let value = key.map(|key| key.as_str().trim_start_matches("ip=").to_owned());
        Self { value: value.unwrap_or_else(|| only.value.trim_end_matches('*').into()), is_prefix }
    }

    fn matches(&self, value: &[u8]) -> bool {
        match self.is_prefix {
            true => value.starts_with(self.value.as_bytes()),
            false => value == self.value.as_bytes(),
        }
    }
}

/// Why a line is not counted; the later, the more of it was understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bad {
    TooLong,
    NotTheFormat,
    NoTime,
    NoAddress,
    NoKey,
}

impl Bad {
    pub const ALL: [Self; 5] =
        [Self::TooLong, Self::NotTheFormat, Self::NoTime, Self::NoAddress, Self::NoKey];

    pub fn text(self) -> &'static str {
        match self {
            Self::TooLong => "longer than 1 MiB",
            Self::NotTheFormat => "not in the format",
            Self::NoTime => "without a time stamp",
            Self::NoAddress => "without an address of a client",
            Self::NoKey => "without a key",
        }
    }
}

/// What a line is.
pub enum Parsed {
    Request(Stamp),
    /// A request that is not one of those of `--only`.
    Other(Stamp),
    /// A header, a comment, or an empty line.
    Nothing,
    Bad(Bad),
}

/// Which names the fields of a line have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Json,
    Columns,
    Text(usize),
}

/// The places of a field among the names; two for a date and the time of the day.
type Place = (usize, Option<usize>);

/// The reader of the lines of one file.
pub struct Reader {
    format: Format,
    clients: Clients,
    stamps: Stamps,
    patterns: Rc<[Pattern]>,
    /// The time stamp, the parts of the key, and the filters.
    wants: Vec<Want>,
    parts: usize,
    /// The shape and names of the last line that was looked at as a whole.
    shape: Option<Shape>,
    names: Vec<String>,
    paths: Vec<Path>,
    places: Vec<Option<Place>>,
    columns: Option<Columns>,
    has_begun: bool,
    /// A value that is no time stamp or no address.
    wrong: Option<(usize, String)>,
    is_in_lines: bool,
    pub hints: Hints,
}

/// What can make a report wrong without an error.
#[derive(Default)]
pub struct Hints {
    /// Other fields with addresses.
    pub others: BTreeSet<String>,
    /// The lists of addresses whose client is not the first.
    pub behind: u64,
    /// The values of `--key` that are addresses with ports, and their field.
    pub ports: u64,
    pub ports_in: String,
}

/// Reads time stamps. Neighbours often have the same.
#[derive(Default)]
struct Stamps {
    text: Vec<u8>,
    last: Option<Stamp>,
}

impl Stamps {
    fn parse(&mut self, text: &[u8]) -> Option<Stamp> {
        if self.text != text || self.last.is_none() {
            let stamp = stamp::parse(text)?;
            self.text.clear();
            self.text.extend(text);
            self.last = Some(stamp);
        }
        self.last
    }
}

/// Reads a field of a line by its place among the names.
type Values<'a, 'v> = &'a mut dyn FnMut(usize) -> Option<Cow<'v, [u8]>>;

impl Reader {
    pub fn new(flags: &Flags) -> Result<Self, String> {
        let mut clients = Clients::new(flags)?;
        let names = flags.key.split(',').map(str::trim).filter(|it| !it.is_empty());
        let parts = names.map(|name| Want::new("--key", name, flags));
        let mut wants: Vec<_> = [Want::time(flags)].into_iter().chain(parts).collect();
        let parts = wants.len() - 1;
        for only in &flags.only {
            let mut want = Want::new("--only", &only.field, flags);
            want.filter = Some(Filter::new(only, want.kind == Kind::Address, &mut clients));
            wants.push(want);
        }
        if parts == 0 {
            return Err("--key: no field; write ip, or the name of another".to_owned());
        }
        if wants.len() > MAX_FIELDS {
            return Err(format!("--key: write at most {} fields", MAX_FIELDS - 1));
        }
        if flags.ip.is_some() && wants.iter().all(|want| want.kind != Kind::Address) {
            return Err("--ip: no field of --key or --only is ip; leave --ip out".to_owned());
        }
        let patterns = match &flags.format {
            Format::Pattern(pattern) => vec![pattern.clone()],
            _ => text::known(),
        };
        Ok(Self {
            format: flags.format.clone(),
            clients,
            stamps: Stamps::default(),
            patterns: patterns.into(),
            wants,
            parts,
            shape: None,
            names: vec![],
            paths: vec![],
            places: vec![],
            columns: None,
            has_begun: false,
            wrong: None,
            is_in_lines: false,
            hints: Hints::default(),
        })
    }

    /// Reads a line. If it is a request, writes its key to `key`.
    pub fn read(&mut self, line: &[u8], key: &mut String) -> Parsed {
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        if line.trim_ascii().is_empty() {
            return Parsed::Nothing;
        }
        let read = match self.format {
            Format::Auto => self.any(line, key),
            Format::Json => self.json(b"", line, key),
            Format::Csv => self.csv(line, key),
            Format::Text | Format::Pattern(_) => self.text(line, key),
        };
        self.has_begun |= !matches!(read, Ok(Parsed::Nothing));
        read.unwrap_or_else(Parsed::Bad)
    }

    fn any(&mut self, line: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        if line[0] == b'#' {
            self.columns = Columns::of_comment(line).or(self.columns.take());
            return Ok(Parsed::Nothing);
        }
        let mut bad = Bad::NotTheFormat;
        if self.columns.is_some() {
            match self.csv(line, key) {
                Err(why) => bad = why,
                read => return read,
            }
        }
        let line = line.trim_ascii();
        if let Some(start) = object_in(line) {
            match self.json(&line[..start], &line[start..], key) {
                Err(why) => bad = bad.max(why),
                read => return read,
            }
        }
        match self.text(line, key) {
            Err(Bad::NotTheFormat) if !self.has_begun && self.columns.is_none() => {
                self.columns = Columns::of_first(line);
                self.is_in_lines |= line == b"[" || line == b"{" || line.starts_with(b"[{");
                self.columns.as_ref().map(|_| Parsed::Nothing).ok_or(bad)
            }
            read => read.map_err(|why| bad.max(why)),
        }
    }

    fn json(&mut self, prefix: &[u8], text: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        if self.knows(Shape::Json) {
            let places = self.places.iter().flatten();
            let places: Vec<_> =
                places.flat_map(|(one, two)| [Some(*one), *two]).flatten().collect();
            let paths: Vec<_> = places.iter().map(|place| &self.paths[*place]).collect();
            let found = json::some(text, &paths).ok_or(Bad::NotTheFormat)?;
            let stamp = paths.iter().any(|it| **it == [PREFIX]).then(|| stamp_in(prefix)).flatten();
            let value = |place| {
                let place = places.iter().position(|it| *it == place)?;
                found[place].as_deref().or(stamp).map(|it| it.as_bytes().into())
            };
            if let Ok(parsed) = self.finish(&mut { value }, key) {
                return Ok(parsed);
            }
        }
        let fields = json::all(text).ok_or(Bad::NotTheFormat)?;
        let stamp = stamp_in(prefix).map(|it| (vec![PREFIX.to_owned()], it.to_owned()));
        let (paths, values): (Vec<_>, Vec<_>) = fields.into_iter().chain(stamp).unzip();
        let names: Vec<_> = paths.iter().map(|path| path.join(".")).collect();
        let lines = names.iter().zip(&values).filter(|(name, _)| {
            matches!(self.format, Format::Auto) && names::LINES.contains(&&*plain(name))
        });
        let lines: Vec<_> = lines.map(|(_, line)| line.clone()).collect();
        self.paths = paths;
        let mut value = |place: usize| values.get(place).map(|it| it.as_bytes().into());
        self.record(Shape::Json, names, &mut value, key).or_else(|bad| {
            // The lines of another program, in the log of Docker or of the journal.
            let mut lines = lines.iter().filter(|line| !line.trim().is_empty());
            lines.find_map(|line| self.any(line.trim().as_bytes(), key).ok()).ok_or(bad)
        })
    }

    fn csv(&mut self, line: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        let Some(columns) = self.columns.take() else {
            self.columns = Columns::of_header(line);
            return self.columns.as_ref().map(|_| Parsed::Nothing).ok_or(Bad::NotTheFormat);
        };
        let values = columns.values(line).ok_or(Bad::NotTheFormat);
        let read = values.and_then(|values| {
            let mut value = |place: usize| values.get(place).map(|it| Cow::Borrowed(&**it));
            if self.knows(Shape::Columns)
                && self.names == columns.names
                && let Ok(parsed) = self.finish(&mut value, key)
            {
                return Ok(parsed);
            }
            self.record(Shape::Columns, columns.names.clone(), &mut value, key)
        });
        self.columns = Some(columns);
        read
    }

    fn text(&mut self, line: &[u8], key: &mut String) -> Result<Parsed, Bad> {
        let patterns = self.patterns.clone();
        let mut text = Text::new(line);
        let last = match self.shape {
            Some(Shape::Text(last)) => Some(last),
            _ => None,
        };
        let mut without_address = None;
        for number in last.into_iter().chain(0..patterns.len()) {
            let (stamps, clients) = (&mut self.stamps, &mut self.clients);
            let is_stamp = |text: &[u8]| stamps.parse(text).is_some();
            let is_address = |text: &[u8]| is_ipv4(text) || clients.key(text).is_some();
            let fit = patterns[number].fit(&mut text, is_stamp, is_address);
            match fit {
                Some(fit) if fit.has_address => {
                    return self.fitting(&patterns, number, &mut text, fit, key);
                }
                Some(fit) => without_address = without_address.or(Some((number, fit))),
                None => {}
            }
        }
        match without_address {
            Some((number, fit)) => self.fitting(&patterns, number, &mut text, fit, key),
            None if text.has_wrong_stamp(|it| self.stamps.parse(it).is_some()) => Err(Bad::NoTime),
            None => Err(Bad::NotTheFormat),
        }
    }

    /// Reads a line that fits a pattern.
    fn fitting(
        &mut self,
        patterns: &[Pattern],
        number: usize,
        text: &mut Text<'_>,
        fit: text::Fit,
        key: &mut String,
    ) -> Result<Parsed, Bad> {
        let pattern = &patterns[number];
        let mut value = |place: usize| pattern.get(text, fit, place);
        if self.knows(Shape::Text(number))
            && let Ok(parsed) = self.finish(&mut value, key)
        {
            return Ok(parsed);
        }
        self.record(Shape::Text(number), pattern.names.clone(), &mut value, key)
    }

    /// Returns whether all places in lines of this shape are known.
    fn knows(&self, shape: Shape) -> bool {
        self.shape == Some(shape) && self.places.iter().all(Option::is_some)
    }

    /// Reads a line whose fields have these names: finds the places of those that are wanted.
    fn record(
        &mut self,
        shape: Shape,
        names: Vec<String>,
        value: Values<'_, '_>,
        key: &mut String,
    ) -> Result<Parsed, Bad> {
        let plain: Vec<_> = names.iter().map(|name| plain(name)).collect();
        self.places.clear();
        for want in 0..self.wants.len() {
            let place = self.find(want, &names, &plain, value);
            self.places.push(place);
        }
        (self.shape, self.names) = (Some(shape), names);
        self.finish(value, key)
    }

    /// Finds the place of a field: of the known names, the first whose value is as it should be.
    fn find(
        &mut self,
        want: usize,
        names: &[String],
        plain: &[String],
        value: Values<'_, '_>,
    ) -> Option<Place> {
        let Want { kind, name, .. } = &self.wants[want];
        let of = |list: &str, names: &[String]| {
            let mut places = list.split(',').map(|it| names.iter().position(|name| name == it));
            Some((places.next()??, places.next().map_or(Some(None), |it| it.map(Some))?))
        };
        if let Some(name) = name {
            // The name of a field can have commas.
            let whole = names.iter().position(|it| it == name).map(|place| (place, None));
            return whole.or_else(|| of(name, names).filter(|_| *kind == Kind::Time));
        }
        let kind = *kind;
        let known = self.wants[want].known().iter();
        let known: Vec<Place> = known.filter_map(|name| of(name, plain)).collect();
        let found = known.iter().find(|place| {
            let value = joined(**place, value);
            value.is_some_and(|value| match kind {
                Kind::Time => self.stamps.parse(&value).is_some(),
                _ => self.clients.key(&value).is_some(),
            })
        });
        if kind == Kind::Address
            && let Some(found) = found
        {
            let mut key = |place| self.clients.key(&joined(place, value)?);
            let of_found = key(*found);
            let others = FORWARDED.iter().filter_map(|name| of(name, plain));
            let others = others.filter(|it| key(*it).is_some_and(|it| Some(it) != of_found));
            let others: Vec<_> = others.map(|(place, _)| names[place].clone()).collect();
            self.hints.others.extend(others);
        }
        found.or(known.first()).copied()
    }

    /// Reads the fields at the known places.
    fn finish(&mut self, value: Values<'_, '_>, key: &mut String) -> Result<Parsed, Bad> {
        key.clear();
        let time = self.places[0].and_then(|place| joined(place, value)).ok_or(Bad::NoTime)?;
        let Some(stamp) = self.stamps.parse(&time) else {
            self.note_wrong(0, &time);
            return Err(Bad::NoTime);
        };
        for want in 1 + self.parts..self.wants.len() {
            let value = self.places[want].and_then(|place| joined(place, value));
            if !value.is_some_and(|value| self.matches(want, &value)) {
                return Ok(Parsed::Other(stamp));
            }
        }
        for want in 1..=self.parts {
            let bad = match self.wants[want].kind {
                Kind::Address => Bad::NoAddress,
                _ => Bad::NoKey,
            };
            let value = self.places[want].and_then(|place| joined(place, value)).ok_or(bad)?;
            if !self.write(want, &value, key) {
                self.note_wrong(want, &value);
                return Err(bad);
            }
        }
        Ok(Parsed::Request(stamp))
    }

    fn note_wrong(&mut self, want: usize, value: &[u8]) {
        let text = || (want, String::from_utf8_lossy(value).into_owned());
        self.wrong.get_or_insert_with(text);
    }

    fn matches(&mut self, want: usize, value: &[u8]) -> bool {
        let Want { kind, filter: Some(filter), .. } = &self.wants[want] else { return true };
        if *kind != Kind::Address || is_ipv4(value) {
            return filter.matches(value.trim_ascii());
        }
        let key = self.clients.key(value);
        key.is_some_and(|key| filter.matches(key.as_str().trim_start_matches("ip=").as_bytes()))
    }

    /// Adds a part of the key, as an extractor of an address or `Key::scoped` makes it. Returns
    /// false if there is none.
    fn write(&mut self, want: usize, value: &[u8], key: &mut String) -> bool {
        let Want { scope, kind, .. } = &self.wants[want];
        let value = value.trim_ascii();
        let part = match kind {
            Kind::Address if is_ipv4(value) && want == 1 => {
                key.push_str("ip=");
                key.push_str(str::from_utf8(value).expect("it is an address"));
                return true;
            }
            Kind::Address => {
                let Some(part) = self.clients.key(value) else { return false };
                self.hints.behind += u64::from(self.clients.is_behind_others(value, &part));
                part
            }
            _ if value.is_empty() || value == b"-" => return false,
            _ => {
                let text = str::from_utf8(value).ok().filter(|it| it.contains(':'));
                if text.is_some_and(|it| it.parse::<SocketAddr>().is_ok()) {
                    self.hints.ports += 1;
                    self.hints.ports_in.clone_from(scope);
                }
                Key::scoped(scope, value)
            }
        };
        *key = match want {
            1 => part.to_string(),
            _ => Key::from_text(key).expect("a key was written").and(&part).to_string(),
        };
        true
    }

    /// Returns what is wrong if no line of a file was a request: the flag to write.
    pub fn missing(&self) -> Option<String> {
        if self.is_in_lines {
            return Some(
                "--format json: an object must be in one line; convert the log, such as by \
                 jq -c '.[]'"
                    .to_owned(),
            );
        }
        if self.names.is_empty() {
            return None;
        }
        let header = match self.shape {
            Some(Shape::Columns) => " (the first line of CSV has the names)",
            _ => "",
        };
        let of_these = format!("{}{header}", self.names.join(", "));
        for (number, Want { flag, kind, name, .. }) in self.wants.iter().enumerate() {
            let (flag, what) = match kind {
                Kind::Time => (*flag, "a time stamp"),
                Kind::Address => ("--ip", "an address of a client"),
                Kind::Text => (*flag, "a value"),
            };
            let or_key = match kind {
                Kind::Address => ", or name the fields of the key with --key",
                _ => "",
            };
            let Some(place) = self.places.get(number).copied().flatten() else {
                let problem = match name {
                    Some(name) => format!("no field has the name {name:?}"),
                    None => format!("no field has a known name of {what}"),
                };
                return Some(format!(
                    "{flag}: {problem}; write the name of one of these{or_key}: {of_these}"
                ));
            };
            if let Some((wrong, value)) = &self.wrong
                && *wrong == number
            {
                let (name, value) = (&self.names[place.0], shortened(value));
                return Some(format!(
                    "{flag}: {value:?} in the field {name} is not {what}; write the name of \
                     another field{or_key}: {of_these}"
                ));
            }
        }
        None
    }
}

/// Returns the beginning of a text.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

fn is_ipv4(value: &[u8]) -> bool {
    str::from_utf8(value).is_ok_and(|text| text.parse::<Ipv4Addr>().is_ok())
}

/// Returns the value at one place, or the values at two.
fn joined<'v>(place: Place, value: Values<'_, 'v>) -> Option<Cow<'v, [u8]>> {
    let first = value(place.0)?;
    let Some(second) = place.1 else { return Some(first) };
    let (mut values, mut both) = ([first, value(second)?], vec![]);
    // The date, which is the longer one, is in front.
    values.sort_by_key(|it| it.iter().filter(|byte| **byte == b':').count());
    both.extend(&*values[0]);
    both.push(b' ');
    both.extend(&*values[1]);
    Some(both.into())
}

/// Returns where an object of JSON begins in a line that ends with one.
fn object_in(line: &[u8]) -> Option<usize> {
    match line {
        [b'{', ..] => Some(0),
        [.., b'}'] => (1..line.len()).find(|at| line[*at] == b'{' && line[at - 1] == b' '),
        _ => None,
    }
}

/// Returns the last time stamp among the words in front of an object of JSON.
fn stamp_in(prefix: &[u8]) -> Option<&str> {
    let prefix = str::from_utf8(prefix).ok()?;
    let words: Vec<_> = prefix.split_ascii_whitespace().collect();
    let stamp = |words: &[&'_ str]| {
        // A date and the time of the day are two words with one space.
        let start = words[0].as_ptr() as usize - prefix.as_ptr() as usize;
        let last = words[words.len() - 1];
        let end = last.as_ptr() as usize - prefix.as_ptr() as usize + last.len();
        Some(&prefix[start..end]).filter(|it| stamp::parse(it.as_bytes()).is_some())
    };
    words.windows(1).chain(words.windows(2)).filter_map(stamp).next_back()
}
