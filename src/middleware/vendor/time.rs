//! Reads times as vendors write them: numbers, durations with units, and the dates of HTTP and of
//! RFC 3339. Each answer is bounded, and a number that is too large is the bound.

use std::time::{Duration, SystemTime};

/// The longest time that is read: about 300 years. Limiters bound their blocks anyway.
pub(super) const LONGEST: Duration = Duration::from_secs(10_000_000_000);

/// Numbers from here on are instants: as a time in seconds, it would be 31 years.
const FIRST_EPOCH: f64 = 1e9;

/// From these numbers on, instants count ns, us and ms since 1970. In the unit before, the instants
/// would be after the year 5000.
const EPOCH_UNITS: [(f64, f64); 3] = [(1e17, 1e9), (1e14, 1e6), (1e11, 1e3)];

/// An instant that is longer ago is none: the number is a time that is too long.
const MAX_AGE: Duration = Duration::from_secs(86_400);

/// Reads a number that is not negative. Unlike `f64::parse`, without `inf` and exponents.
pub(super) fn number(text: &str) -> Option<f64> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|_| is_number).map(|number: f64| number.min(f64::MAX))
}

pub(super) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).map_or(LONGEST, |time| time.min(LONGEST))
}

/// Reads the time until a reset: a number of seconds, a duration with units, or an instant.
pub(super) fn time(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim_matches('"');
    match number(text) {
        Some(instant) if instant >= FIRST_EPOCH => Some(until(epoch(instant), now)),
        Some(number) => Some(seconds(number)),
        None => with_units(text).or_else(|| Some(until(Some(date(text)?), now))),
    }
}

/// Reads the time until a retry, like [`time`]. A number that is neither a time of some years nor
/// an instant of these days is the longest time.
pub(super) fn retry_time(text: &str, now: SystemTime) -> Option<Duration> {
    let instant = number(text).filter(|number| *number >= FIRST_EPOCH).and_then(epoch);
    let is_instant = |instant| now.duration_since(instant).is_ok_and(|age| age > MAX_AGE);
    if instant.is_some_and(is_instant) { Some(LONGEST) } else { time(text, now) }
}

/// Returns an instant, unless it is too late for the clock.
fn epoch(number: f64) -> Option<SystemTime> {
    let unit = EPOCH_UNITS.iter().find(|(first, _)| number >= *first);
    let since = Duration::try_from_secs_f64(number / unit.map_or(1.0, |(_, unit)| *unit)).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(since)
}

fn until(instant: Option<SystemTime>, now: SystemTime) -> Duration {
    let until = |instant: SystemTime| instant.duration_since(now).unwrap_or_default();
    instant.map_or(LONGEST, until).min(LONGEST)
}

/// Reads a duration as Go writes it, such as `6m0s`, `1h2m3.5s` or `20ms`, or in words.
fn with_units(mut text: &str) -> Option<Duration> {
    let mut sum = if text.is_empty() { return None } else { 0.0 };
    while !text.is_empty() {
        let (digits, rest) = text.split_at(text.find(|it: char| it.is_ascii_alphabetic())?);
        let end = rest.find(|it: char| !it.is_ascii_alphabetic()).unwrap_or(rest.len());
        let (unit, rest) = rest.split_at(end);
        sum += number(digits.trim())?
            * match unit {
                "d" | "day" | "days" => 86_400.0,
                "h" | "hour" | "hours" => 3_600.0,
                "m" | "min" | "minute" | "minutes" => 60.0,
                "s" | "sec" | "second" | "seconds" => 1.0,
                "ms" | "millisecond" | "milliseconds" => 1e-3,
                "us" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        text = rest;
    }
    Some(seconds(sum))
}

/// Reads a date of HTTP in any of its three forms, also with a zone in digits, or of RFC 3339.
pub(super) fn date(text: &str) -> Option<SystemTime> {
    let http = |text: &str| httpdate::parse_http_date(text).ok();
    let zone = || ["+0000", "-0000", "UTC"].iter().find_map(|zone| text.strip_suffix(zone));
    http(text).or_else(|| rfc3339(text)).or_else(|| http(&format!("{}GMT", zone()?)))
}

/// Reads a date of RFC 3339. Vendors leave out the seconds, the colon of the offset or the zone,
/// which is UTC then, and write a space in place of the `T`.
fn rfc3339(text: &str) -> Option<SystemTime> {
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let date = integers::<3>(date, '-').filter(|_| date.find('-') == Some(4))?;
    let (time, offset) = zone(time)?;
    let (clock, second) = match time.match_indices(':').nth(1) {
        Some((i, _)) => (&time[..i], number(&time[i + 1..])?),
        None => (time, 0.0),
    };
    let ([year, month, day], [hour, minute]) = (date, integers::<2>(clock, ':')?);
    let is_date = (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_date || hour > 24 || minute > 59 || second >= 61.0 {
        return None;
    }
    let minutes = (days_since_1970(year, month, day) * 24 + hour) * 60 + minute - offset;
    let since = seconds((minutes * 60).max(0) as f64) + seconds(second);
    SystemTime::UNIX_EPOCH.checked_add(since)
}

/// Splits the zone off a time. Returns its offset in minutes.
fn zone(time: &str) -> Option<(&str, i64)> {
    let utc = ["Z", "z", "UTC", "GMT"].iter().find_map(|zone| time.strip_suffix(zone));
    if let Some(time) = utc {
        return Some((time.trim_end(), 0));
    }
    let Some(i) = time.find(['+', '-']) else { return Some((time, 0)) };
    let (time, offset) = time.split_at(i);
    let (sign, offset) = (if offset.starts_with('-') { -1 } else { 1 }, &offset[1..]);
    let [hours, minutes] = match offset.len() {
        2 => [integer(offset)?, 0],
        4 => [integer(offset.get(..2)?)?, integer(offset.get(2..)?)?],
        _ => integers::<2>(offset, ':')?,
    };
    Some((time.trim_end(), sign * (hours * 60 + minutes)))
}

fn integers<const N: usize>(text: &str, separator: char) -> Option<[i64; N]> {
    let mut numbers = [0; N];
    let mut parts = text.split(separator);
    for number in &mut numbers {
        *number = integer(parts.next()?)?;
    }
    parts.next().is_none().then_some(numbers)
}

/// Reads up to four digits.
fn integer(text: &str) -> Option<i64> {
    let is_integer = text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_integer)
}

/// Counts the days in a calendar whose years begin in March, so that leap days are their last ones.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month < 3 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_795_608_000; // Wed, 25 Nov 2026 12:00:00 GMT

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)
    }

    fn millis(text: &str) -> Option<u128> {
        time(text, now()).map(|time| time.as_millis())
    }

    #[test]
    fn dates_of_all_forms_are_instants() {
        for text in [
            "Wed, 25 Nov 2026 12:01:00 GMT",
            "Wednesday, 25-Nov-26 12:01:00 GMT",
            "Wed Nov 25 12:01:00 2026",
            "Wed, 25 Nov 2026 12:01:00 +0000",
            "Wed, 25 Nov 2026 12:01:00 UTC",
            "2026-11-25T12:01:00Z",
            "2026-11-25t12:01:00z",
            "2026-11-25T12:01Z",
            "2026-11-25T12:01",
            "2026-11-25 12:01:00",
            "2026-11-25 12:01:00 UTC",
            "2026-11-25T12:01:00.000Z",
            "2026-11-25T12:01:00.000000+00:00",
            "2026-11-25T13:01:00+01:00",
            "2026-11-25T17:31:00+0530",
            "2026-11-25T04:01-08",
            "2026-11-25 07:01:00 -0500",
            "\"2026-11-25T12:01:00Z\"",
            "1795608060",
            "1795608060000",
            "1795608060000000",
            "1795608060000000000",
            "60",
            "60.0",
            "1m0s",
            "60 seconds",
            "1 minute",
        ] {
            assert_eq!(millis(text), Some(60_000), "{text}");
        }
        assert_eq!(millis("2026-11-25T12:00:00.25Z"), Some(250));
        assert_eq!(millis("2026-11-25T11:59:59Z"), Some(0));
        assert_eq!(millis("1969-12-31T23:59:59Z"), Some(0));
        assert_eq!(millis("2028-02-29T00:00:00Z"), Some(39_787_200_000));
    }

    #[test]
    fn malformed_times_are_unknown() {
        for text in [
            "",
            ".",
            "-5",
            "1e3",
            "inf",
            "soon",
            "5 parsecs",
            "6m0",
            "2026-11-25",
            "2026-11-25T",
            "2026-11-25T12",
            "2026-13-25T12:00Z",
            "2026-11-32T12:00Z",
            "2026-11-25T25:00Z",
            "2026-11-25T12:60Z",
            "2026-11-25T12:00:61Z",
            "2026-11-25T12:00:00:00Z",
            "26-11-25T12:00:00Z",
            "2026-11-25T12:00:00+1",
            "2026-11-25T12:00:00+01:00:00",
            "99999-11-25T12:00:00Z",
        ] {
            assert_eq!(millis(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_too_long_is_the_longest_time() {
        let nines = "9".repeat(400);
        for text in ["10000000000000000000", "99999999999d", "9999-12-31T23:59:59Z", &nines] {
            assert!(millis(text) > Some(200 * 365 * 86_400_000), "{text}");
            assert!(time(text, now()) <= Some(LONGEST), "{text}");
        }
        for text in ["1000000000", "10000000000", "100000000000", "1000000000000", &nines] {
            assert!(retry_time(text, now()).unwrap().as_secs() > 200 * 365 * 86_400, "{text}");
        }
        assert_eq!(retry_time("1795608060", now()), Some(Duration::from_secs(60)));
        assert_eq!(retry_time("1795607000", now()), Some(Duration::ZERO));
    }
}
