//! Times and numbers as text, and tables in aligned columns.

use std::{
    env,
    io::{IsTerminal, stdout},
    time::Duration,
};

const UNITS: [(&str, u64); 6] = [
    ("w", 604_800_000),
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// Reads a time such as `10m` or `1h30m`.
pub fn duration_of(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time; write for example 90s, 10m, 1h30m or 2d");
    let (mut rest, mut millis) = (text.trim(), 0u64);
    while !rest.is_empty() {
        let digits = rest.find(|it: char| !it.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..digits].parse().map_err(|_| wrong())?;
        rest = &rest[digits..];
        let end = rest.find(|it: char| it.is_ascii_digit()).unwrap_or(rest.len());
        let name = match rest[..end].trim() {
            "min" => "m",
            name => name,
        };
        let (_, unit) = UNITS.iter().find(|(unit, _)| *unit == name).ok_or_else(wrong)?;
        rest = &rest[end..];
        let part = number.checked_mul(*unit).ok_or_else(wrong)?;
        millis = millis.checked_add(part).ok_or_else(wrong)?;
    }
    match millis {
        0 => Err(wrong()),
        millis => Ok(Duration::from_millis(millis)),
    }
}

/// Prints a time, rounded up, with one or two units: `600 ms`, `59.4 s`, `9 min 58 s`.
pub fn time(time: Duration) -> String {
    let millis = time.as_micros().div_ceil(1_000);
    let seconds = millis.div_ceil(1_000);
    let two = |unit: u128, name: &str, part: u128, part_name: &str| {
        let (whole, rest) = (seconds / unit, seconds % unit / part);
        match rest {
            0 => format!("{whole} {name}"),
            rest => format!("{whole} {name} {rest} {part_name}"),
        }
    };
    let tenths = millis.div_ceil(100);
    match millis {
        0..1_000 => format!("{millis} ms"),
        _ if tenths < 600 && tenths.is_multiple_of(10) => format!("{} s", tenths / 10),
        _ if tenths < 600 => format!("{}.{} s", tenths / 10, tenths % 10),
        _ if seconds < 3_600 => two(60, "min", 1, "s"),
        _ if seconds < 86_400 => two(3_600, "h", 60, "min"),
        _ => two(86_400, "d", 3_600, "h"),
    }
}

/// Prints a number with commas: `1,234`.
pub fn number(number: impl TryInto<u64>) -> String {
    let digits = number.try_into().unwrap_or(u64::MAX).to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Prints how many things there are: `1 key`, `1,234 keys`.
pub fn count(count: usize, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", number(count))
}

/// How a cell is highlighted on a terminal.
#[derive(Clone, Copy, PartialEq)]
pub enum Tone {
    Plain,
    Heading,
    Good,
    Warning,
    Bad,
}

pub type Cell = (String, Tone);

/// Returns the rows with their columns aligned. A column of numbers is aligned on the right.
pub fn table(rows: &[Vec<Cell>], right: &[usize]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|(text, _)| text.chars().count()).max().unwrap_or(0)
    };
    let colored = stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|it| it.is_empty());
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, tone)) in row.iter().enumerate() {
            let space = " ".repeat(width(column) - cell.chars().count());
            let cell = match tone {
                _ if !colored => cell.clone(),
                Tone::Plain => cell.clone(),
                Tone::Heading => format!("\x1b[1m{cell}\x1b[0m"),
                Tone::Good => format!("\x1b[32m{cell}\x1b[0m"),
                Tone::Warning => format!("\x1b[33m{cell}\x1b[0m"),
                Tone::Bad => format!("\x1b[31m{cell}\x1b[0m"),
            };
            line += &if right.contains(&column) { space + &cell } else { cell + &space };
            line += "  ";
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

pub fn headings(names: &[&str]) -> Vec<Cell> {
    names.iter().map(|name| ((*name).to_owned(), Tone::Heading)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, seconds) in
            [("90s", 90), ("10m", 600), ("10min", 600), ("1h30m", 5_400), ("2d", 172_800)]
        {
            assert_eq!(duration_of(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(duration_of("250ms"), Ok(Duration::from_millis(250)));
        for text in ["", "10", "0s", "m", "10 fortnights", "-5s", "99999999999999999w"] {
            assert!(duration_of(text).unwrap_err().contains("write for example"), "{text}");
        }
    }

    #[test]
    fn times_and_numbers_are_printed() {
        for (millis, text) in [
            (0, "0 ms"),
            (600, "600 ms"),
            (59_400, "59.4 s"),
            (5_000, "5 s"),
            (33_301, "33.4 s"),
            (59_901, "1 min"),
            (598_000, "9 min 58 s"),
            (11_520_000, "3 h 12 min"),
            (183_600_000, "2 d 3 h"),
        ] {
            assert_eq!(time(Duration::from_millis(millis)), text);
        }
        assert_eq!([0u64, 999, 1_000, 1_234_567].map(number), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1, 2_000].map(|it| count(it, "key")), ["0 keys", "1 key", "2,000 keys"]);
    }

    #[test]
    fn columns_are_aligned() {
        let cell = |text: &str| (text.to_owned(), Tone::Plain);
        let rows = [headings(&["a", "n"]), vec![cell("bcd"), cell("1")]];
        assert_eq!(table(&rows, &[1]), "a    n\nbcd  1\n");
    }
}
