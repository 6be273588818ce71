//! Lines of text, by patterns: a new format of a server is a row of a table.

use std::{borrow::Cow, ops::Range};

use super::names::{ADDRESSES, TIMES, plain};

/// The patterns, as nginx writes them; `$_` is anything, and what is behind `..` can be missing.
/// Syslog, Docker and Kubernetes write something in front. The first pattern that fits and has an
/// address is taken.
const PATTERNS: [&str; 16] = [
    // HAProxy, of HTTP and of TCP.
    "$ip:$_ [$time] $frontend $backend .. $_ $status",
    // Nginx Proxy Manager.
    "[$time] - $_ $status - $method $scheme $host \"$uri\" [Client $ip]",
    "[$time] $_ $_ $status - $method $scheme $host \"$uri\" [Client $ip]",
    "[$time] $status - $method $scheme $host \"$uri\" [Client $ip]",
    // Common and combined, with a host or the addresses of proxies in front, and with
    // `$http_x_forwarded_for` behind; a user has up to three words.
    "$host:$_ $ip $_ $user [$time] \"$request\" .. $status $bytes \"$referer\" \"$agent\" \
     \"$forwarded\"",
    "$front $ip $_ $user [$time] \"$request\" .. $status $bytes \"$referer\" \"$agent\" \
     \"$forwarded\"",
    "$ip $_ $user [$time] \"$request\" .. $status $bytes \"$referer\" \"$agent\" \"$forwarded\"",
    "$ip - $user $user [$time] \"$request\" .. $status $bytes \"$referer\" \"$agent\" \
     \"$forwarded\"",
    "$ip - $user $user $user [$time] \"$request\" .. $status $bytes \"$referer\" \"$agent\"",
    "$ip $_ $user [$time] $_ \"$request\" .. $status",
    "$ip [$time] \"$request\" .. $status",
    // Envoy and Istio.
    "[$time] \"$request\" $status $_ $_ $_ \"$_\" $_ $_ $_ $_ \
     \"$forwarded\" \"$agent\" \"$_\" \"$host\" \"$_\" $_ $_ $_ $ip",
    "[$time] \"$request\" $status $_ $_ $_ $_ $_ \"$ip\" \"$agent\"",
    // Amazon S3; Elastic Load Balancing, with and without the type; Squid.
    "$_ $bucket [$time] $ip .. $user $_ $operation $object \"$request\" $status",
    "$time $_ $ip:$_ $_ $_ $_ $_ $status $_ $_ $_ \"$request\"",
    "$time $_ $ip $result $bytes $method $uri $user $_",
];

/// A pattern.
#[derive(Clone, Debug)]
pub struct Pattern {
    items: Vec<Item>,
    /// The number of items that a line must have.
    required: usize,
    pub names: Vec<String>,
    slots: Vec<Slot>,
    /// The places of the time stamp and of the address.
    time: Range<usize>,
    address: Option<usize>,
}

#[derive(Clone, Debug)]
struct Item {
    kind: Kind,
    /// What is in front of the variable.
    before: String,
    is_variable: bool,
    after: String,
    is_address: bool,
}

/// How a token is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Quoted,
    Bracketed,
}

/// Where a variable is: in these items, or a word of the request line in one.
#[derive(Clone, Debug)]
struct Slot {
    items: Range<usize>,
    word: Option<usize>,
}

#[derive(Clone, Debug)]
struct Token {
    range: Range<usize>,
    kind: Kind,
}

/// A line, whose tokens are found when they are needed.
pub struct Text<'a> {
    line: &'a [u8],
    tokens: Vec<Token>,
    at: usize,
    /// The place of the next `]`, or the end of the line.
    closing: usize,
}

/// A line that fits a pattern: the token of the first item.
#[derive(Clone, Copy)]
pub struct Fit {
    first: usize,
    pub has_address: bool,
}

/// Returns the patterns that are known.
pub fn known() -> Vec<Pattern> {
    PATTERNS.iter().map(|text| Pattern::new(text).expect("it has a time")).collect()
}

impl Pattern {
    /// Reads a pattern, such as `$ip - $user [$time] "$request"`.
    pub fn new(text: &str) -> Result<Self, String> {
        let (mut items, mut required) = (vec![], None);
        let (mut names, mut slots): (Vec<String>, Vec<Slot>) = (vec![], vec![]);
        let mut tokens = Text::new(text.as_bytes());
        let mut index = 0;
        while let Some(token) = tokens.token(index) {
            index += 1;
            let (kind, word) = (token.kind, text[token.range].to_owned());
            if word == ".." {
                required = Some(items.len());
                continue;
            }
            let (before, rest) = word.split_once('$').unwrap_or((&word, ""));
            let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_');
            let (name, after) = rest.split_at(end.unwrap_or(rest.len()));
            if after.starts_with('$') {
                return Err("write something between two variables".into());
            }
            let is_address = ADDRESSES.contains(&&*plain(name));
            let place = items.len();
            items.push(Item {
                kind,
                before: before.to_owned(),
                is_variable: !name.is_empty(),
                after: after.to_owned(),
                is_address,
            });
            if name == "_" {
                continue;
            }
            if name == "request" {
                for (number, name) in ["method", "path", "protocol"].into_iter().enumerate() {
                    names.push(name.to_owned());
                    slots.push(Slot { items: place..place + 1, word: Some(number) });
                }
            }
            if let Some(slot) = slots.last_mut()
                && names.last().is_some_and(|it| it == name)
            {
                slot.items.end = place + 1;
            } else if !name.is_empty() {
                names.push(name.to_owned());
                slots.push(Slot { items: place..place + 1, word: None });
            }
        }
        let find = |known: &[&str]| {
            let place = |known: &&str| names.iter().position(|name| plain(name) == *known);
            known.iter().find_map(place).map(|place| slots[place].items.clone())
        };
        let time = find(&TIMES).ok_or("write the time stamp as $time in it")?;
        let address = find(&ADDRESSES).map(|items| items.start);
        let required = required.unwrap_or(items.len());
        Ok(Self { items, required, names, slots, time, address })
    }

    /// Returns where this pattern is in a line. `is_stamp` tells time stamps.
    pub fn fit(
        &self,
        text: &mut Text<'_>,
        mut is_stamp: impl FnMut(&[u8]) -> bool,
        mut is_address: impl FnMut(&[u8]) -> bool,
    ) -> Option<Fit> {
        let kind = self.items[self.time.start].kind;
        let mut found = None;
        for place in self.time.start.. {
            let Some(token) = text.token(place) else { break };
            let first = place - self.time.start;
            if token.kind != kind
                || !self.value(text, first, &self.time).is_some_and(&mut is_stamp)
                || !(0..self.required).all(|item| self.item(text, first, item).is_some())
            {
                continue;
            }
            let address = self.address.and_then(|item| self.item(text, first, item));
            let has_address = address.is_none_or(|it| is_address(&text.line[it]));
            if has_address {
                return Some(Fit { first, has_address });
            }
            found = found.or(Some(Fit { first, has_address }));
        }
        found
    }

    /// Returns the value of a variable.
    pub fn get<'a>(&self, text: &mut Text<'a>, fit: Fit, variable: usize) -> Option<Cow<'a, [u8]>> {
        let Slot { items, word } = &self.slots[variable];
        let value = self.value(text, fit.first, items)?;
        let Some(number) = word else { return Some(value.into()) };
        let word = value.split(|it| *it == b' ').nth(*number)?;
        // The path is without its query.
        let end = word.iter().position(|it| *number == 1 && *it == b'?').unwrap_or(word.len());
        Some(word[..end].into())
    }

    fn value<'a>(
        &self,
        text: &mut Text<'a>,
        first: usize,
        items: &Range<usize>,
    ) -> Option<&'a [u8]> {
        let start = self.item(text, first, items.start)?.start;
        let end = self.item(text, first, items.end - 1)?.end;
        Some(&text.line[start..end])
    }

    /// Returns where the variable of an item is, if the token of the item fits.
    fn item(&self, text: &mut Text<'_>, first: usize, item: usize) -> Option<Range<usize>> {
        let token = text.token(first + item)?;
        let Item { kind, before, is_variable, after, is_address } = &self.items[item];
        // An address of IPv6 can be in brackets.
        if token.kind != *kind && !is_address {
            return None;
        }
        let inner = text.line[token.range.clone()].strip_prefix(before.as_bytes())?;
        let length = match after.split_once('$') {
            Some((separator, _)) => {
                let mut ends = inner.windows(separator.len());
                let is_end = |window: &[u8]| window == separator.as_bytes();
                // An address of IPv6 has colons, too.
                if *is_address { ends.rposition(is_end)? } else { ends.position(is_end)? }
            }
            None => inner.strip_suffix(after.as_bytes())?.len(),
        };
        let start = token.range.start + before.len();
        (*is_variable || length == 0).then(|| start..start + length)
    }
}

impl<'a> Text<'a> {
    pub fn new(line: &'a [u8]) -> Self {
        Self { line, tokens: vec![], at: 0, closing: 0 }
    }

    /// Returns whether a text in brackets looks like a time stamp, and is none.
    pub fn has_wrong_stamp(&mut self, mut is_stamp: impl FnMut(&[u8]) -> bool) -> bool {
        let line = self.line;
        let tokens = (0..).map_while(|place| self.token(place));
        let mut tokens = tokens.filter(|it| it.kind == Kind::Bracketed);
        tokens.any(|it| line[it.range.start].is_ascii_digit() && !is_stamp(&line[it.range]))
    }

    fn token(&mut self, place: usize) -> Option<Token> {
        while self.tokens.len() <= place {
            let token = self.find()?;
            self.tokens.push(token);
        }
        Some(self.tokens[place].clone())
    }

    fn find(&mut self) -> Option<Token> {
        let line = self.line;
        let is_space = |byte: u8| byte == b' ' || byte == b'\t';
        let start = self.at + line[self.at..].iter().position(|byte| !is_space(*byte))?;
        let is_end = |place: usize| line.get(place).is_none_or(|byte| is_space(*byte));
        let (kind, range) = match line[start] {
            b'"' => {
                let mut end = start + 1;
                while end < line.len() && line[end] != b'"' {
                    end += if line[end] == b'\\' { 2 } else { 1 };
                }
                (Kind::Quoted, start + 1..end.min(line.len()))
            }
            b'[' => {
                if self.closing <= start {
                    let length = memchr::memchr(b']', &line[start..]);
                    self.closing = length.map_or(line.len(), |length| start + length);
                }
                match self.closing < line.len() && is_end(self.closing + 1) {
                    true => (Kind::Bracketed, start + 1..self.closing),
                    false => (Kind::Plain, start..start),
                }
            }
            _ => (Kind::Plain, start..start),
        };
        if kind == Kind::Plain {
            let mut end = start;
            // A space behind a comma is in a list of addresses.
            while !is_end(end) || line[end - 1] == b',' && end < line.len() {
                end += 1;
            }
            self.at = end;
            return Some(Token { range: start..end, kind });
        }
        self.at = (range.end + 1).min(line.len());
        Some(Token { range, kind })
    }
}
