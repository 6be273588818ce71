//! The headers of vendors, but for the drafts of the IETF: a table of the words that make up the
//! names of most of them, and a table of the others. A new vendor is a row.

use std::{
    collections::HashMap,
    iter,
    time::{Duration, SystemTime},
};

use http::HeaderMap;

use super::{
    fields::{self, Left, pair, text},
    time,
};

/// What a word says that stands behind `ratelimit` or `rate-limit` in the name of a header.
#[derive(Clone, Copy, PartialEq)]
enum Word {
    Means(Meaning),
    /// A time of this header is relative, so that it needs no clock.
    Relative,
    Millis,
    /// Nothing, or that requests are counted.
    Filler,
    /// The window or the owner of the limit: a vendor has several limits.
    Scope,
}

/// What a header says about a limit. Of several meanings, the greatest one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meaning {
    Limit,
    Used,
    Remaining,
    /// The length of the window: the reset is not later.
    Interval,
    Reset,
    RetryAfter,
}

/// All other words name a unit.
const WORDS: &[(&[&str], Word)] = &[
    (&["remaining", "remain", "left", "available"], Word::Means(Meaning::Remaining)),
    (&["reset", "resets", "resettime", "next"], Word::Means(Meaning::Reset)),
    (&["limit", "max", "total", "quota"], Word::Means(Meaning::Limit)),
    (&["used", "usage", "count"], Word::Means(Meaning::Used)),
    (&["interval"], Word::Means(Meaning::Interval)),
    (&["retry"], Word::Means(Meaning::RetryAfter)),
    (&["after", "in"], Word::Relative),
    (&["ms", "millis", "milliseconds"], Word::Millis),
    (&["at", "time", "timestamp", "seconds", "epoch", "utc"], Word::Filler),
    (&["request", "requests", "req", "reqs", "call", "calls", "api", "rest"], Word::Filler),
    (&["second", "secondly", "minute", "minutely", "hour", "hourly", "day", "daily"], Word::Scope),
    (&["month", "monthly", "burst", "sustained", "window", "per"], Word::Scope),
    (&["key", "user", "client", "ip", "app", "account", "global"], Word::Scope),
    (&["member", "project", "org", "organization", "workspace", "endpoint", "method"], Word::Scope),
    (&["tenant", "subscription", "reads", "writes", "deletes"], Word::Scope),
];

/// A header that other words make up, the header of its reset, and the form of its value.
type Row = (&'static str, Option<&'static str>, Form);

#[derive(Clone, Copy)]
enum Form {
    /// A number of units that remain.
    Count,
    /// The same, with a reset in milliseconds.
    CountMillis,
    /// `32/40`: used, and the limit. Of several pairs, also with names, the one binds that has
    /// fewer units left.
    UsedOf,
    /// Numbers that remain, with these names.
    Named(&'static [&'static str]),
}

const TRELLO_INTERVAL: &str = "x-rate-limit-api-token-interval-ms";

const ROWS: &[Row] = &[
    ("gw-ratelimit-remaining", Some("gw-ratelimit-reset"), Form::CountMillis), // KuCoin
    ("remaining-req", None, Form::Named(&["min", "sec"])),                     // Upbit
    ("sforce-limit-info", None, Form::UsedOf),                                 // Salesforce
    ("x-app-limit-24hour-remaining", Some("x-app-limit-24hour-reset"), Form::Count), // X
    ("x-user-limit-24hour-remaining", Some("x-user-limit-24hour-reset"), Form::Count),
    ("x-appminlimit-remaining", None, Form::Count), // Xero
    ("x-daylimit-remaining", None, Form::Count),
    ("x-minlimit-remaining", None, Form::Count),
    ("x-bapi-limit-status", Some("x-bapi-limit-reset-timestamp"), Form::Count), // Bybit
    ("x-current-token-count", Some("x-next-replenish-time"), Form::Count),      // Walmart
    ("x-rate-limit-api-token-remaining", Some(TRELLO_INTERVAL), Form::CountMillis), // Trello
    ("x-ratelimit-clientremaining", None, Form::Count),                         // Imgur
    ("x-ratelimit-userremaining", Some("x-ratelimit-userreset"), Form::Count),
    ("x-remaining-this-second", None, Form::Count), // Etsy
    ("x-remaining-today", None, Form::Count),
    ("x-rl", Some("x-ttl"), Form::Count), // ip-api
    ("x-shopify-shop-api-call-limit", None, Form::UsedOf),
    ("x-toggl-quota-remaining", Some("x-toggl-quota-resets-in"), Form::Count),
    ("x-trial-endpoint-call-remaining", None, Form::Count), // Cohere
];

/// Headers that say when to try again, and the number of their units in a second.
const RETRY_AFTER: &[(&str, f64)] = &[
    ("retry-after-ms", 1e3),
    ("x-ms-retry-after-ms", 1e3), // Azure
    ("retry-after", 1.0),
    ("x-retry-after", 1.0),
];

/// What the headers say about one limit.
#[derive(Default)]
struct KnownLimit<'a> {
    remaining: Option<u64>,
    /// The time until the reset, with its kind and whether it is relative: greater ones are better.
    reset: Option<((Meaning, bool), Duration)>,
    total: Option<&'a str>,
    used: Option<&'a str>,
}

/// What the headers say.
#[derive(Default)]
pub(super) struct Said {
    /// What is left of each limit, with its unit.
    pub left: Vec<(String, Left)>,
    /// The time until a reset of which no remaining units are known.
    pub reset: Option<Duration>,
    pub retry_after: Option<Duration>,
}

/// The name of a header that the table of words makes up.
struct LimitHeader<'a> {
    vendor: &'a str,
    means: Option<Meaning>,
    is_relative: bool,
    is_millis: bool,
    /// The words of the window and of the owner.
    scope: String,
    unit: String,
}

impl<'a> LimitHeader<'a> {
    fn new(name: &'a str) -> Option<Self> {
        let halves = name.split_once("ratelimit").or_else(|| name.split_once("rate-limit"));
        let (vendor, rest) = halves?;
        // `fields.rs` reads the headers of the drafts.
        if vendor.is_empty() && ["", "-policy"].contains(&rest) {
            return None;
        }
        let means = rest.is_empty().then_some(Meaning::Limit);
        let (scope, unit) = (String::new(), String::new());
        let mut name = Self { vendor, means, is_relative: false, is_millis: false, scope, unit };
        for text in rest.split('-').filter(|word| !word.is_empty()) {
            name.add(text);
        }
        if name.unit.is_empty() {
            name.unit.push_str("requests");
        }
        Some(name)
    }

    fn add(&mut self, text: &str) {
        // `1s`, `24hour`
        let is_window = text.starts_with(|char: char| char.is_ascii_digit());
        let word = WORDS.iter().find(|(texts, _)| texts.contains(&text)).map(|(_, word)| *word);
        let place = match word.or(is_window.then_some(Word::Scope)) {
            // `Remaining-Limit` is about what remains, `Interval-Reset` about the reset.
            Some(Word::Means(means)) => return self.means = self.means.max(Some(means)),
            Some(Word::Relative) => return self.is_relative = true,
            Some(Word::Millis) => return self.is_millis = true,
            Some(Word::Filler) => return,
            Some(Word::Scope) => &mut self.scope,
            None => &mut self.unit,
        };
        if !place.is_empty() {
            place.push('-');
        }
        place.push_str(text);
    }

    fn time(&self, text: &str, now: SystemTime) -> Option<Duration> {
        let read =
            if self.means == Some(Meaning::RetryAfter) { time::retry_time } else { time::time };
        match time::number(text).filter(|number| self.is_millis && *number < 1e11) {
            Some(millis) => Some(time::seconds(millis / 1e3)),
            None => read(text, now),
        }
    }
}

/// Reads all headers, each of them once.
pub(super) fn read(headers: &HeaderMap, now: SystemTime) -> Said {
    let mut said = Said { retry_after: retry_after(headers, now), ..Said::default() };
    let mut limits: HashMap<[String; 3], KnownLimit<'_>> = HashMap::new();
    for (name, value) in headers {
        let (name, Ok(value)) = (name.as_str(), value.to_str().map(str::trim)) else { continue };
        let of_row = |(remaining, reset, _): &Row| *remaining == name || *reset == Some(name);
        if let Some(name) = LimitHeader::new(name).filter(|_| !ROWS.iter().any(of_row)) {
            add(&mut limits, &mut said, &name, value, now);
        }
    }
    for (remaining, reset, form) in ROWS {
        let remaining = text(headers, remaining).and_then(|value| form.remaining(value));
        let reset = reset.and_then(|name| form.reset(text(headers, name)?, now));
        let left = remaining.map(|remaining| Left { remaining, reset });
        said.left.extend(left.map(|left| ("requests".to_owned(), left)));
    }
    let mut shared = HashMap::new();
    for ([vendor, scope, unit], limit) in &limits {
        if let ("", "requests", Some(((Meaning::Reset, _), reset))) =
            (&**scope, &**unit, limit.reset)
        {
            shared.insert(vendor.clone(), reset);
        }
    }
    for ([vendor, _, unit], limit) in limits {
        let reset = limit.reset.map(|(_, reset)| reset);
        match limit.remaining.or_else(|| unused(limit.total?, limit.used?)) {
            // Contentful has one reset for all windows.
            Some(remaining) => {
                let shared = shared.get(&vendor).filter(|_| unit == "requests").copied();
                said.left.push((unit, Left { remaining, reset: reset.or(shared) }));
            }
            None => said.reset = said.reset.max(reset),
        }
    }
    said
}

/// Adds what a header says to its limit.
fn add<'a>(
    limits: &mut HashMap<[String; 3], KnownLimit<'a>>,
    said: &mut Said,
    name: &LimitHeader<'_>,
    value: &'a str,
    now: SystemTime,
) {
    if let Some(left) = fields::dictionary(iter::once(value)) {
        return said.left.push(("requests".to_owned(), left)); // of an endpoint of Zendesk
    }
    let Some(means) = name.means else { return };
    if means == Meaning::RetryAfter {
        said.retry_after = said.retry_after.or_else(|| name.time(value, now));
        return;
    }
    let key = [name.vendor, &name.scope, &name.unit].map(str::to_owned);
    let limit = limits.entry(key).or_default();
    match means {
        Meaning::Limit => limit.total = Some(value),
        Meaning::Used => limit.used = Some(value),
        Meaning::Remaining => {
            let least = counts(value).min();
            limit.remaining = limit.remaining.into_iter().chain(least).min();
        }
        // In whole seconds, it is no time that has to pass.
        Meaning::Interval if !name.is_millis => {}
        Meaning::Interval | Meaning::Reset | Meaning::RetryAfter => {
            let time = name.time(value, now).map(|time| ((means, name.is_relative), time));
            limit.reset = limit.reset.max(time);
        }
    }
}

/// Reads numbers of units, such as `76;w=21600` or `20:1,100:120`. Some vendors count fractions: a
/// part of a unit is none.
fn counts(text: &str) -> impl Iterator<Item = u64> {
    let items = text.split(',').map(|item| item.split([';', ':']).next().unwrap_or_default());
    items.filter_map(|item| time::number(item.trim()).map(|units| units as u64))
}

/// Returns what is left of limits of which as many units are used.
fn unused(total: &str, used: &str) -> Option<u64> {
    counts(total).zip(counts(used)).map(|(total, used)| total.saturating_sub(used)).min()
}

impl Form {
    fn remaining(self, text: &str) -> Option<u64> {
        let items = text.split([';', ',']);
        match self {
            Self::Count | Self::CountMillis => counts(text).min(),
            Self::UsedOf => items.filter_map(used_of).min(),
            Self::Named(names) => {
                let pairs = items.filter_map(pair);
                let named = pairs.filter(|(name, _)| names.contains(name));
                named.filter_map(|(_, count)| counts(count).next()).min()
            }
        }
    }

    fn reset(self, text: &str, now: SystemTime) -> Option<Duration> {
        match self {
            Self::CountMillis => time::number(text).map(|millis| time::seconds(millis / 1e3)),
            _ => time::time(text, now),
        }
    }
}

/// Reads `32/40`, also behind a name, and before a remark: `name=17/250(appName=crm)`.
fn used_of(item: &str) -> Option<u64> {
    let item = item.trim_start_matches(|char: char| !char.is_ascii_digit());
    let (used, limit) = item.split_once('/')?;
    let end = limit.find(|char: char| !char.is_ascii_digit()).unwrap_or(limit.len());
    unused(&limit[..end], used)
}

fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    RETRY_AFTER.iter().find_map(|(name, per_second)| {
        let lines = headers.get_all(*name).into_iter().filter_map(|line| line.to_str().ok());
        let times = lines.map(str::trim).filter_map(|text| {
            match time::number(text).filter(|_| *per_second > 1.0) {
                Some(number) => Some(time::seconds(number / per_second)),
                None => time::retry_time(text, now),
            }
        });
        // A proxy can add a line of its own: the longest time is right for both.
        times.max().filter(|time| !time.is_zero())
    })
}
