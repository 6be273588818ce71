//! The report as text: aligned columns, in colours on a terminal.

use std::{
    env,
    io::{IsTerminal, stdout},
};

use super::{
    Flags, Lines,
    candidate::Candidate,
    fields::Bad,
    order::WINDOW,
    stamp,
    traffic::{Traffic, WINDOWS},
};

/// How a cell is highlighted on a terminal.
#[derive(Clone, Copy)]
enum Tone {
    Plain,
    Heading,
    Bad,
}

type Row = Vec<(String, Tone)>;

pub fn text(
    flags: &Flags,
    lines: &Lines,
    traffic: &Traffic,
    tried: &[Candidate],
    notes: &[String],
) -> String {
    let mut text = head(lines, traffic);
    if traffic.requests == 0 {
        return text + "no line is a request: see --format, --key and --time\n";
    }
    text += &peaks(traffic);
    if tried.is_empty() {
        text +=
            "\nno limit was tried: write for example --quota 100/min --quota \"10/s burst 50\"\n";
        return text;
    }
    text += &limits(tried, traffic);
    for note in notes {
        text += &format!("{note}\n");
    }
    for candidate in tried.iter().filter(|it| it.was_full) {
        text += &format!(
            "{} {}: more keys than --max-keys were in use at once, so some denials are missing{}\n",
            candidate.quota,
            candidate.algorithm,
            match candidate.undecided {
                0 => String::new(),
                undecided => format!("; {} requests were not decided", number(undecided)),
            }
        );
    }
    text + &top(flags, tried, traffic)
}

fn head(lines: &Lines, traffic: &Traffic) -> String {
    let (keys, is_exact) = traffic.distinct.count();
    let about = if is_exact { "" } else { "about " };
    let mut text = format!("{} requests of {about}{}", number(traffic.requests), of_keys(keys));
    if traffic.requests > 0 {
        let (first, last) = (stamp::text(traffic.first), stamp::text(traffic.last));
        text += &format!(", {first} to {last} UTC\n");
        let (second, requests) = traffic.peak;
        let second = stamp::text(second * 1_000_000);
        text += &format!("peak: {} requests in the second {second}\n", number(requests));
    } else {
        text.push('\n');
    }
    let bad: u64 = lines.bad.iter().sum();
    if bad > 0 {
        let reasons = Bad::ALL.iter().zip(lines.bad).filter(|(_, count)| *count > 0);
        let reasons: Vec<_> =
            reasons.map(|(bad, count)| format!("{} {}", number(count), bad.text())).collect();
        text += &format!("bad lines: {} of {}", number(bad), number(lines.lines));
        text += &format!(" ({})\n", reasons.join(", "));
    }
    for line in &lines.shown {
        text += &format!("  {line}\n");
    }
    if lines.late > 0 {
        text += &format!(
            "late lines: {} are more than {WINDOW} s out of order, and count after their time\n",
            number(lines.late)
        );
    }
    if lines.stray > 0 {
        text += &format!(
            "stray lines: {} are more than a day ahead of their neighbours, and do not count\n",
            number(lines.stray)
        );
    }
    text
}

fn peaks(traffic: &Traffic) -> String {
    let parts = [("half of the keys", 0.5), ("90 %", 0.9), ("99 %", 0.99), ("all", 1.0)];
    let mut rows = vec![vec![("at most in a".to_owned(), Tone::Heading)]];
    rows[0].extend(parts.map(|(name, _)| (name.to_owned(), Tone::Heading)));
    for ((name, _), peaks) in WINDOWS.iter().zip(traffic.peaks()) {
        let mut row = vec![((*name).to_owned(), Tone::Plain)];
        row.extend(parts.map(|(_, part)| (number(peaks.quantile(part)), Tone::Plain)));
        rows.push(row);
    }
    let about = match traffic.forgets {
        true => " (about: there are more keys than --max-keys)",
        false => "",
    };
    format!("\nrequests of one key{about}\n{}", table(&rows, &[1, 2, 3, 4]))
}

fn limits(tried: &[Candidate], traffic: &Traffic) -> String {
    let names =
        ["quota", "algorithm", "denied", "of all", "keys denied", "of all", "waited", "p50", "p99"];
    let mut rows: Vec<Row> =
        vec![names.iter().map(|name| ((*name).to_owned(), Tone::Heading)).collect()];
    let (all_keys, _) = traffic.distinct.count();
    let mut last = None;
    for candidate in tried {
        let (keys, is_exact) = candidate.denied_keys.count();
        let about = if is_exact { "" } else { "~" };
        let tone = if candidate.denied > 0 { Tone::Bad } else { Tone::Plain };
        let waits = &candidate.waits;
        let wait = |part| match waits.count() {
            0 => "-".to_owned(),
            _ => time(waits.quantile(part)),
        };
        let quota = candidate.quota.to_string();
        // Once for all algorithms.
        let shown =
            if last.replace(candidate.quota) == Some(candidate.quota) { "" } else { &quota };
        rows.push(vec![
            (shown.to_owned(), Tone::Plain),
            (candidate.algorithm.name().to_owned(), Tone::Plain),
            (number(candidate.denied), tone),
            (percent(candidate.denied, traffic.requests), Tone::Plain),
            (format!("{about}{}", number(keys)), tone),
            (percent(keys, all_keys), Tone::Plain),
            (number(waits.count()), Tone::Plain),
            (wait(0.5), Tone::Plain),
            (wait(0.99), Tone::Plain),
        ]);
    }
    format!("\n{}", table(&rows, &[2, 3, 4, 5, 6, 7, 8]))
}

/// Returns the keys that suffer most, under the first algorithm of each quota that denies any.
fn top(flags: &Flags, tried: &[Candidate], traffic: &Traffic) -> String {
    let mut text = String::new();
    let mut shown = vec![];
    for candidate in tried {
        let top = candidate.keys.top(flags.top);
        if top.is_empty() || shown.contains(&candidate.quota) {
            continue;
        }
        shown.push(candidate.quota);
        let title = format!("keys that {} {} denies most", candidate.quota, candidate.algorithm);
        let mut rows = vec![vec![(title, Tone::Heading), ("denied".into(), Tone::Heading)]];
        rows[0].push(("waited".into(), Tone::Heading));
        rows[0].push(("requests".into(), Tone::Heading));
        for (hash, key, suffered) in top {
            let requests = traffic.keys.find(hash).map(|it| number(it.all));
            rows.push(vec![
                (format!("  {key}"), Tone::Plain),
                (number(suffered.denied), Tone::Plain),
                (number(suffered.waited), Tone::Plain),
                (requests.unwrap_or_else(|| "?".to_owned()), Tone::Plain),
            ]);
        }
        text += &format!("\n{}", table(&rows, &[1, 2, 3]));
    }
    text
}

fn percent(part: u64, all: u64) -> String {
    match (part, part as f64 * 100.0 / all.max(1) as f64) {
        (0, _) => "0 %".to_owned(),
        (_, percent) if percent < 0.1 => "< 0.1 %".to_owned(),
        (_, percent) => format!("{percent:.1} %"),
    }
}

/// Prints a time in microseconds.
fn time(micros: u64) -> String {
    match micros {
        ..1_000 => format!("{micros} us"),
        1_000..1_000_000 => format!("{} ms", number(micros / 1_000)),
        1_000_000..60_000_000 => format!("{:.1} s", micros as f64 / 1e6),
        _ => format!("{:.1} min", micros as f64 / 60e6),
    }
}

/// Prints a number of keys.
pub fn of_keys(keys: u64) -> String {
    format!("{} {}", number(keys), if keys == 1 { "key" } else { "keys" })
}

/// Prints a number with commas.
pub fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns the rows with aligned columns; those of numbers on the right.
fn table(rows: &[Row], right: &[usize]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|(text, _)| text.chars().count()).max().unwrap_or(0)
    };
    let is_colored =
        stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|it| it.is_empty());
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, tone)) in row.iter().enumerate() {
            let space = " ".repeat(width(column) - cell.chars().count());
            let cell = match tone {
                Tone::Heading if is_colored => format!("\x1b[1m{cell}\x1b[0m"),
                Tone::Bad if is_colored => format!("\x1b[31m{cell}\x1b[0m"),
                _ => cell.clone(),
            };
            line += &if right.contains(&column) { space + &cell } else { cell + &space };
            line += "  ";
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}
