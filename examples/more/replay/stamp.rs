//! Time stamps of logs as microseconds since 1970, and back as text. No time zones but offsets.

/// A time stamp of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub micros: i64,
    /// True if the text has no fraction of a second.
    pub is_whole: bool,
}

/// The end of the year 2199: later stamps are mistakes, and would overflow clocks.
const LAST: i64 = 7_258_118_400_000_000;

const MONTHS: [&[u8]; 12] = [
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
];

/// Earlier numbers, before September 2001, are no time stamps: they are durations.
const FIRST_NUMBER: i64 = 1_000_000_000;

/// Reads a number since 1970, or a date since then: `2026-03-02T08:00:00.123Z`,
/// `02/Mar/2026:08:00:00 +0000` or `Mon, 02 Mar 2026 08:00:00 GMT`. Without a zone, it is UTC.
pub fn parse(text: &[u8]) -> Option<Stamp> {
    let text = text.trim_ascii();
    let text = if text.get(3) == Some(&b',') { text[4..].trim_ascii() } else { text };
    let stamp = match (text.get(2), text.get(4)) {
        (Some(b'/' | b'-' | b' '), _) => common(text),
        (_, Some(b'-' | b'/')) => iso(text),
        _ => number(text),
    };
    stamp.filter(|stamp| (0..=LAST).contains(&stamp.micros))
}

/// Seconds, milliseconds, microseconds or nanoseconds, by their size.
fn number(text: &[u8]) -> Option<Stamp> {
    let text = str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let number: i64 = whole.parse().ok().filter(|it| *it >= FIRST_NUMBER)?;
    let (per_second, is_seconds) = match whole.len() {
        ..=11 => (1, true),
        12..=14 => (1_000, false),
        15..=17 => (1_000_000, false),
        _ => (1_000_000_000, false),
    };
    let micros = i128::from(number) * 1_000_000 / per_second;
    let part = if fraction.is_empty() { 0 } else { fraction_micros(fraction.as_bytes())? };
    let micros = micros as i64 + part / per_second as i64;
    Some(Stamp { micros, is_whole: is_seconds && fraction.is_empty() })
}

fn fraction_micros(digits: &[u8]) -> Option<i64> {
    let mut micros = 0;
    for place in 0..6 {
        micros = micros * 10 + digits.get(place).map_or(Some(0), digit)?;
    }
    digits.iter().all(u8::is_ascii_digit).then_some(micros)
}

fn digit(byte: &u8) -> Option<i64> {
    byte.is_ascii_digit().then(|| i64::from(byte - b'0'))
}

fn digits(text: &[u8]) -> Option<i64> {
    text.iter().try_fold(0, |number, byte| Some(number * 10 + digit(byte)?))
}

fn common(text: &[u8]) -> Option<Stamp> {
    if text.len() < 20 {
        return None;
    }
    let month = MONTHS.iter().position(|month| text[3..6].eq_ignore_ascii_case(month))? as i64 + 1;
    let (day, year) = (digits(&text[..2])?, digits(&text[7..11])?);
    rest(at(year, month, day, &text[12..20])?, &text[20..])
}

fn iso(text: &[u8]) -> Option<Stamp> {
    if text.len() < 19 {
        return None;
    }
    let (year, month, day) = (digits(&text[..4])?, digits(&text[5..7])?, digits(&text[8..10])?);
    rest(at(year, month, day, &text[11..19])?, &text[19..])
}

/// Adds the fraction of a second and the time zone to a time in whole seconds.
fn rest(seconds: i64, rest: &[u8]) -> Option<Stamp> {
    let fraction = match rest {
        [b'.' | b',', digits @ ..] => {
            let end = digits.iter().position(|it| !it.is_ascii_digit()).unwrap_or(digits.len());
            &digits[..end]
        }
        _ => &[],
    };
    let zone = if fraction.is_empty() { rest } else { &rest[1 + fraction.len()..] };
    let micros = if fraction.is_empty() { 0 } else { fraction_micros(fraction)? };
    let seconds = seconds - offset(zone)?;
    Some(Stamp { micros: seconds * 1_000_000 + micros, is_whole: fraction.is_empty() })
}

/// Reads the time of a day, `08:00:00`.
fn at(year: i64, month: i64, day: i64, time: &[u8]) -> Option<i64> {
    let [h1, h2, b':', m1, m2, b':', s1, s2] = time else { return None };
    let (hour, minute) = (digits(&[*h1, *h2])?, digits(&[*m1, *m2])?);
    let second = digits(&[*s1, *s2])?;
    let is_valid = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    is_valid.then(|| ((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second)
}

/// Reads the offset of a time zone in seconds: `Z`, `+0200`, `+02:00`, or nothing for UTC.
fn offset(text: &[u8]) -> Option<i64> {
    let text = text.trim_ascii();
    let (sign, rest) = match text {
        [] | b"Z" | b"z" | b"UTC" | b"GMT" => return Some(0),
        [b'+', rest @ ..] => (1, rest),
        [b'-', rest @ ..] => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = match rest {
        [h1, h2] => (digits(&[*h1, *h2])?, 0),
        [h1, h2, m1, m2] | [h1, h2, b':', m1, m2] => (digits(&[*h1, *h2])?, digits(&[*m1, *m2])?),
        _ => return None,
    };
    Some(sign * (hours * 60 + minutes) * 60)
}

/// Returns the days since 1970 of a date in the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Prints a time as `2026-03-02 08:00:00`, in UTC.
pub fn text(micros: i64) -> String {
    let seconds = micros.div_euclid(1_000_000);
    let (day, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let shifted = day + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    let (hour, minute) = (second / 3_600, second / 60 % 60);
    format!("{year:04}-{month:02}-{date:02} {hour:02}:{minute:02}:{:02}", second % 60)
}
