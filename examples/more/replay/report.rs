//! The report as text: aligned columns, in colours on a terminal.

use std::{
    env,
    io::{IsTerminal, stdout},
};

use super::{
    Flags,
    candidate::{Candidate, Suffered},
    fields::Bad,
    order::WINDOW,
    read::Lines,
    stamp,
    traffic::{Requests, Traffic, WINDOWS},
};

/// A log with few more clients than these is not that of a proxy's service alone.
const MAX_PROXIES: u64 = 3;

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
    let mut text = head(flags, lines, traffic);
    if traffic.requests == 0 {
        return text;
    }
    text += &peaks(traffic);
    if tried.is_empty() {
        text += &busiest(flags, traffic);
        return text + &recommended(traffic);
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
    let mut shown = vec![];
    for Candidate { quota, .. } in tried {
        if !shown.contains(&quota) {
            shown.push(quota);
            let of_quota: Vec<_> = tried.iter().filter(|it| it.quota == *quota).collect();
            text += &top(flags, &of_quota, traffic);
        }
    }
    text
}

fn head(flags: &Flags, lines: &Lines, traffic: &Traffic) -> String {
    let (keys, is_exact) = traffic.distinct.count();
    let about = if is_exact { "" } else { "about " };
    let mut text = format!("{} requests of {about}{}", number(traffic.requests), of_keys(keys));
    if traffic.requests > 0 {
        let (first, last) = (stamp::text(traffic.first), stamp::text(traffic.last));
        text += &format!(", {first} to {last} UTC");
    }
    text.push('\n');
    if !flags.only.is_empty() {
        let only: Vec<_> = flags.only.iter().map(ToString::to_string).collect();
        let (matching, all) = (number(lines.matching), number(lines.requests));
        text += &format!("only {}: {matching} of {all} requests\n", only.join(", "));
    }
    // Before the peak, because they can make it too high.
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
    if traffic.requests > 0 {
        let (second, requests) = traffic.peak;
        let second = stamp::text(second * 1_000_000);
        text += &format!("peak: {} requests in the second {second}\n", number(requests));
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
    for note in lines.notes.iter().chain(&few_clients(flags, lines, keys)) {
        text += &format!("note: {note}\n");
    }
    text
}

/// Returns a note if the clients can be proxies.
fn few_clients(flags: &Flags, lines: &Lines, keys: u64) -> Option<String> {
    let others: Vec<_> = lines.others.iter().map(String::as_str).collect();
    let is_few = keys == 1 && lines.matching > 1 || keys <= MAX_PROXIES && !others.is_empty();
    let is_by_address = flags.key.trim() == "ip" && flags.only.is_empty();
    let fields = match &*others {
        [] => String::new(),
        others => format!("; addresses are also in {}", others.join(", ")),
    };
    (is_by_address && is_few && lines.matching > keys).then(|| {
        format!(
            "all requests are of {}: if this is a proxy, name the field with the addresses of its \
             clients with --ip{fields}",
            of_keys(keys)
        )
    })
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

/// Returns a limit to begin with. A key that sends `n` requests in a minute of the clock sends at
/// most 2 `n` at once, at the boundary of two minutes, and `n` more in each further minute.
fn recommended(traffic: &Traffic) -> String {
    let [_, per_minute, _] = traffic.peaks();
    let peak = per_minute.quantile(0.99);
    let quota = format!("{}/min", 2 * peak);
    format!(
        "\nno limit was tried; to begin with, try --quota {quota} --algorithm token-bucket\n\
         It denies no request of the 99 % of the keys that send at most {} in a minute of the \
         clock.\n\
         In a file of limits: algorithm = \"token-bucket\", quota = \"{quota}\"\n",
        number(peak)
    )
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

/// Returns the keys that suffer most under the first algorithm that denies any: all of them deny
/// much the same keys. If none denies any, those that wait most.
fn top(flags: &Flags, of_quota: &[&Candidate], traffic: &Traffic) -> String {
    let denies = of_quota.iter().find(|it| it.denied > 0);
    let delays = || of_quota.iter().find(|it| it.waits.count() > 0);
    let Some(candidate) = denies.or_else(delays) else { return String::new() };
    let verb = if candidate.denied > 0 { "denies" } else { "delays" };
    let title = format!("keys that {} {} {verb} most", candidate.quota, candidate.algorithm);
    let mut rows = vec![heading(&[&title, "denied", "waited"])];
    let is_listed = |suffered: &Suffered| candidate.denied == 0 || suffered.denied > 0;
    let top = candidate.keys.top(flags.top);
    for (hash, key, suffered) in top.into_iter().filter(|(_, _, it)| is_listed(it)) {
        let numbers = [suffered.denied, suffered.waited].map(|it| (number(it), Tone::Plain));
        let mut row = vec![(format!("  {key}"), Tone::Plain)];
        row.extend(numbers);
        row.extend(sent(traffic.keys.find(hash)));
        rows.push(row);
    }
    format!("\n{}", table(&rows, &[1, 2, 3, 4, 5, 6]))
}

/// Returns the keys with the most requests.
fn busiest(flags: &Flags, traffic: &Traffic) -> String {
    let mut rows = vec![heading(&["busiest keys"])];
    for (_, key, requests) in traffic.keys.top(flags.top) {
        let mut row = vec![(format!("  {key}"), Tone::Plain)];
        row.extend(sent(Some(requests)));
        rows.push(row);
    }
    format!("\n{}", table(&rows, &[1, 2, 3, 4]))
}

/// Returns the names of columns, before those of [`sent`].
fn heading(names: &[&str]) -> Row {
    let sent = ["requests", "peak/s", "peak/min", "peak/h"];
    names.iter().chain(&sent).map(|name| ((*name).to_owned(), Tone::Heading)).collect()
}

/// Returns what a key has sent: all requests, and those in its busiest second, minute and hour.
fn sent(requests: Option<&Requests>) -> Row {
    let numbers = requests.map(|it| {
        let [second, minute, hour] = it.peaks();
        [it.all, second, minute, hour].map(number)
    });
    let unknown = || [(); 4].map(|()| "?".to_owned());
    numbers.unwrap_or_else(unknown).map(|text| (text, Tone::Plain)).into()
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
