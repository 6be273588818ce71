//! Quotas as text: reading, writing, and the errors of text that is no quota. The valid values are
//! in `quota.rs`.

use std::{fmt, str::FromStr, time::Duration};

use super::{MAX_UNITS, MICROS_PER_DAY, Problem, Quota, QuotaError};

/// The units of time as they are printed, longest first, with their length in microseconds and
/// their other names, without the `s` of a plural.
const UNITS: [(&str, u64, &[&str]); 7] = [
    ("week", 7 * MICROS_PER_DAY, &["w"]),
    ("day", MICROS_PER_DAY, &["d"]),
    ("h", 3_600_000_000, &["hr", "hour"]),
    ("min", 60_000_000, &["m", "minute"]),
    ("s", 1_000_000, &["sec", "second"]),
    ("ms", 1_000, &["msec", "millisecond"]),
    ("us", 1, &["µs", "usec", "microsecond"]),
];

/// The units of a calendar, and what to write.
const NO_LENGTH: [(&str, &str); 2] = [("month", "30day"), ("year", "365day")];

const FORM: &str = "write LIMIT/WINDOW or LIMIT/WINDOW burst BURST, such as 10/s, 1_000/day or \
     100/min burst 20, or LIMIT concurrent, such as 10 concurrent";
const CONCURRENT: &str = "concurrent";
const USE_UNITS: &str = "use us, ms, s, min, h, day or week";

/// Writes the quota as [`FromStr`] reads it: `10/s`, `100/min burst 20`, `5/10s`, `10 concurrent`.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_concurrent() {
            return write!(f, "{} {CONCURRENT}", self.limit);
        }
        let (unit, length, _) = UNITS
            .iter()
            .find(|(_, length, _)| self.window_us.is_multiple_of(*length))
            .expect("1 us divides");
        write!(f, "{}/", self.limit)?;
        if self.window_us != *length {
            write!(f, "{}", self.window_us / length)?;
        }
        f.write_str(unit)?;
        if self.burst != self.limit {
            write!(f, " burst {}", self.burst)?;
        }
        Ok(())
    }
}

impl Quota {
    /// Returns the expression that makes the quota in code.
    pub(super) fn in_code(&self) -> String {
        let (limit, micros) = (self.limit, self.window_us);
        let quota = match micros {
            0 => format!("Quota::concurrent({limit})"),
            1_000_000 => format!("Quota::per_second({limit})"),
            60_000_000 => format!("Quota::per_minute({limit})"),
            3_600_000_000 => format!("Quota::per_hour({limit})"),
            MICROS_PER_DAY => format!("Quota::per_day({limit})"),
            _ if micros.is_multiple_of(1_000_000) => {
                format!("Quota::new({limit}, Duration::from_secs({}))", micros / 1_000_000)
            }
            _ => format!("Quota::new({limit}, Duration::from_micros({micros}))"),
        };
        match self.burst == limit {
            true => quota,
            false => format!("{quota}.burst({})", self.burst),
        }
    }
}

/// Reads `LIMIT/[N]UNIT [burst BURST]`: `10/s`, `100/min burst 20`, `5/10s`; or `LIMIT concurrent`.
///
/// The units are `us`, `ms`, `s`, `min` (`m`), `h`, `day` (`d`) and `week` (`w`). Their full names,
/// such as `second`, common short forms and plurals are also read, in any case.
///
/// Instead of the slash, the text can contain the word `per`: `10 per second`. Numbers are whole,
/// and can contain `_`: `1_000/day`. A comma may stand before `burst`, and `=` after it.
impl FromStr for Quota {
    type Err = QuotaError;

    fn from_str(text: &str) -> Result<Self, QuotaError> {
        let error = |problem| QuotaError::Invalid { message: format!("quota {text:?}: {problem}") };
        parse(text).map_err(error)
    }
}

fn parse(text: &str) -> Result<Quota, String> {
    let text = text.to_lowercase();
    if let Some(limit) = text.trim_end().strip_suffix(CONCURRENT) {
        let limit = number("limit", limit.trim())?;
        return Quota::checked_concurrent(limit).map_err(text_of);
    }
    let (limit, rest) = text
        .split_once('/')
        .or_else(|| text.split_once(" per "))
        .map(|(limit, rest)| (limit.trim(), rest.trim()))
        .filter(|(limit, rest)| !limit.is_empty() && !rest.is_empty())
        .ok_or(FORM)?;
    let limit = number("limit", limit)?;
    let (window, rest) = window(rest)?;
    let quota = Quota::checked(limit, window).map_err(text_of)?;
    match burst(rest)? {
        Some(burst) => quota.with_burst(burst).map_err(text_of),
        None => Ok(quota),
    }
}

fn text_of(problem: Problem) -> String {
    problem.to_string()
}

/// Reads the window. Returns the text behind it, too.
fn window(text: &str) -> Result<(Duration, &str), String> {
    let is_count = |c: char| c.is_ascii_digit() || "_.+-".contains(c);
    let behind = text.trim_start_matches(is_count);
    let count = &text[..text.len() - behind.len()];
    let behind = behind.trim_start();
    let end = behind.find(|c: char| !c.is_alphanumeric()).unwrap_or(behind.len());
    let (unit, rest) = behind.split_at(end);
    let length = match unit {
        "" | "burst" => return Err(format!("the window {count:?} has no unit; {USE_UNITS}")),
        unit => unit_us(unit).ok_or_else(|| {
            let instead = NO_LENGTH.iter().find(|(name, _)| unit.trim_end_matches('s') == *name);
            match instead {
                Some((unit, days)) => {
                    format!("a {unit} has no fixed length; count in days, such as {days}")
                }
                None => format!("the unit {unit:?} is unknown; {USE_UNITS}"),
            }
        })?,
    };
    let digits = digits(if count.is_empty() { "1" } else { count }).ok_or_else(|| {
        format!("the window {count:?} is not a whole number; use a smaller unit, such as 1500ms")
    })?;
    match digits.parse().ok().and_then(|count| length.checked_mul(count)) {
        Some(window) => Ok((Duration::from_micros(window), rest)),
        None => {
            Err(format!("the window \"{count}{unit}\" is too large; it must be 1 ms to 366 days"))
        }
    }
}

fn unit_us(name: &str) -> Option<u64> {
    let find =
        |name: &str| UNITS.iter().find(|(unit, _, others)| *unit == name || others.contains(&name));
    let singular = || name.strip_suffix('s').filter(|it| it.len() > 1 && !it.ends_with('s'));
    let unit = find(name).or_else(|| find(singular()?));
    unit.map(|(_, length, _)| *length)
}

/// Reads what stands behind the window.
fn burst(text: &str) -> Result<Option<u64>, String> {
    let mut words = text
        .split(|c: char| c.is_whitespace() || ",=:".contains(c))
        .filter(|word| !word.is_empty());
    match (words.next(), words.next(), words.next()) {
        (None, ..) => Ok(None),
        (Some("burst"), None, _) => {
            Err(String::from("the burst has no number; write it behind, such as burst 20"))
        }
        (Some("burst"), Some(burst), None) => number("burst", burst).map(Some),
        (Some("burst"), _, Some(word)) | (Some(word), ..) => {
            Err(format!("{word:?} is unexpected behind the window; {FORM}"))
        }
    }
}

fn number(name: &str, text: &str) -> Result<u64, String> {
    let digits = digits(text).ok_or_else(|| {
        let word = text.trim_start_matches(|it: char| it.is_ascii_digit() || it == '_').trim();
        let remedy = match word {
            _ if name == "limit" && word.starts_with('.') => {
                "use a longer window in place of a fraction: 3/2s is 1.5/s".to_owned()
            }
            _ if word.len() < text.len() && word.bytes().all(|it| it.is_ascii_alphabetic()) => {
                format!("leave {word:?} out")
            }
            _ => "use digits, such as 10 or 1_000".to_owned(),
        };
        format!("the {name} {text:?} is not a whole number; {remedy}")
    })?;
    digits
        .parse()
        .map_err(|_| format!("the {name} {text} is too large; the maximum is {MAX_UNITS}"))
}

/// Returns the digits of a number, without the underscores between them.
fn digits(text: &str) -> Option<String> {
    let is_number = text
        .split('_')
        .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    is_number.then(|| text.replace('_', ""))
}
