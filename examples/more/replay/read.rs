//! Reads the logs: merges the requests of all files by time, hands them to the threads, and counts
//! the other lines. Knows no limits.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, IsTerminal},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::SyncSender,
    },
    time::Instant,
};

use super::{
    Flags,
    fields::{Bad, Hints, Parsed, Reader},
    input::{self, Line},
    order::{Batch, JUMP, Sorter},
    report::number,
};

const DESCRIBE: &str =
    "describe the lines with --format, such as --format '$ip - $user [$time] \"$request\"'";

/// The first bad lines are shown.
const BAD_SHOWN: usize = 3;

/// What was read.
#[derive(Default)]
pub struct Lines {
    pub lines: u64,
    pub requests: u64,
    /// The requests that are those of `--only`.
    pub matching: u64,
    pub bad: [u64; Bad::ALL.len()],
    /// The first bad lines: file, number, reason, beginning.
    pub shown: Vec<String>,
    pub late: u64,
    pub stray: u64,
    /// What can be wrong with the numbers, and which flag mends it.
    pub notes: Vec<String>,
    /// Other fields with addresses.
    pub others: BTreeSet<String>,
    /// Why no line of a file is a request, as far as that is known.
    problem: Option<String>,
}

impl Lines {
    fn add(&mut self, hints: Vec<Hints>) {
        let behind = hints.iter().map(|it| it.behind).sum();
        if behind > 0 {
            self.notes.push(format!(
                "lists of addresses: in {} of them, the client is the last that is not in \
                 --trusted, and not the first",
                number(behind)
            ));
        }
        let ports: u64 = hints.iter().map(|it| it.ports).sum();
        if ports > self.matching / 2 {
            let fields = hints.iter().map(|it| &*it.ports_in).find(|it| !it.is_empty());
            self.notes.push(format!(
                "{0} are addresses with ports, so each connection is a key; to count by address, \
                 write --ip {0}, without --key",
                fields.unwrap_or_default()
            ));
        }
        self.others.extend(hints.into_iter().flat_map(|it| it.others));
    }

    /// Returns an error if the limits were tried on no request.
    pub fn check(&self, flags: &Flags) -> Result<(), String> {
        if self.matching > 0 {
            return Ok(());
        }
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        if self.requests > 0 {
            let only: Vec<_> = flags.only.iter().map(|only| format!("--only {only}")).collect();
            let (only, requests) = (only.join(" "), number(self.requests));
            return Err(format!(
                "{only}: none of {requests} requests matches; write a value as the log has it"
            ));
        }
        Err(match self.lines {
            0 => "the logs are empty; name others".to_owned(),
            _ => format!("no line is a request; {DESCRIBE}"),
        })
    }
}

/// A file, and its next request.
struct Source<'a> {
    path: &'a Path,
    lines: input::Lines,
    reader: Reader,
    number: u64,
    bad: u64,
    next: Option<Parsed>,
    key: String,
    /// The time stamp of the next request, and the time at which its turn comes.
    micros: Option<i64>,
    turn: i64,
    /// When it had its last turn.
    used: u64,
}

impl<'a> Source<'a> {
    fn open(path: &'a Path, flags: &Flags, bytes: &Arc<AtomicU64>) -> Result<Self, String> {
        let lines = input::open(path, bytes);
        let lines = lines.map_err(|error| format!("{}: {error}", path.display()))?;
        let (reader, key) = (Reader::new(flags)?, String::new());
        let (number, bad, next, micros, turn, used) = (0, 0, None, None, 0, 0);
        Ok(Self { path, lines, reader, number, bad, next, key, micros, turn, used })
    }

    /// Reads up to the next request.
    fn advance(&mut self, counts: &mut Lines, progress: &Progress) {
        self.next = None;
        loop {
            // A file that ends too soon, such as a gzip file that is being written.
            let line = match self.lines.next() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => {
                    let Self { path, number, .. } = self;
                    counts.shown.push(format!("{} after line {number}: {error}", path.display()));
                    break;
                }
            };
            self.number += 1;
            counts.lines += 1;
            progress.show(counts.lines);
            self.key.clear();
            let (parsed, text) = match line {
                Line::Text(text) => (self.reader.read(text, &mut self.key), text),
                Line::TooLong => (Parsed::Bad(Bad::TooLong), &b""[..]),
            };
            match parsed {
                Parsed::Request(stamp) | Parsed::Other(stamp) => {
                    let last = self.micros.replace(stamp.micros).unwrap_or(stamp.micros);
                    // A wrong stamp would keep back the rest of the file.
                    let is_jump = stamp.micros > last + JUMP * 1_000_000;
                    self.turn = if is_jump { last } else { stamp.micros };
                    self.next = Some(parsed);
                    return;
                }
                Parsed::Nothing => {}
                Parsed::Bad(bad) => {
                    self.bad += 1;
                    counts.bad[bad as usize] += 1;
                    if counts.bad.iter().sum::<u64>() <= BAD_SHOWN as u64 {
                        counts.shown.push(shown(self.path, self.number, bad, text));
                    }
                }
            }
        }
        let problem = self.reader.missing();
        if self.bad > self.number / 2 {
            let (path, problem) = (self.path.display(), problem.as_deref().unwrap_or(DESCRIBE));
            counts.notes.push(format!("most lines of {path} are bad: {problem}"));
        }
        counts.problem = counts.problem.take().or(problem);
    }
}

/// Reads the logs, and hands their requests to the threads in order.
pub fn read(flags: &Flags, senders: &[SyncSender<Arc<Batch>>]) -> Result<Lines, String> {
    let mut sorter = Sorter::new(!flags.no_spread);
    let (mut lines, progress) = (Lines::default(), Progress::new(flags));
    let open = |path| Source::open(path, flags, &progress.bytes);
    let mut sources = flags.files.iter().map(|path| open(path)).collect::<Result<Vec<_>, _>>()?;
    sources.iter_mut().for_each(|source| source.advance(&mut lines, &progress));
    let hand_on = |sorter: &mut Sorter| {
        let batch = Arc::new(sorter.take());
        // A thread that has failed reports why.
        senders.iter().for_each(|sender| drop(sender.send(batch.clone())));
    };
    // Of requests of the same second, each file has one in turn.
    while let Some(source) = sources
        .iter_mut()
        .filter(|source| source.next.is_some())
        .min_by_key(|source| (source.turn, source.used))
    {
        let (stamp, key) = match source.next.take() {
            Some(Parsed::Request(stamp)) => (stamp, &*source.key),
            // Keeps its place in its second.
            Some(Parsed::Other(stamp)) => (stamp, ""),
            _ => continue,
        };
        lines.requests += 1;
        lines.matching += u64::from(!key.is_empty());
        source.used = lines.requests;
        if sorter.add(stamp, key) {
            hand_on(&mut sorter);
        }
        source.advance(&mut lines, &progress);
    }
    sorter.finish();
    hand_on(&mut sorter);
    (lines.late, lines.stray) = (sorter.late, sorter.stray);
    progress.end();
    let hints: Vec<_> = sources.into_iter().map(|source| source.reader.hints).collect();
    lines.add(hints);
    Ok(lines)
}

/// Describes a bad line, without its control characters.
fn shown(path: &Path, number: u64, bad: Bad, text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let begin: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    let dots = if text.chars().nth(60).is_some() { ".." } else { "" };
    format!("{}:{number}: {}: {begin}{dots}", path.display(), bad.text())
}

/// The progress, on a terminal.
struct Progress {
    bytes: Arc<AtomicU64>,
    size: Option<u64>,
    start: Instant,
    is_shown: bool,
}

impl Progress {
    fn new(flags: &Flags) -> Self {
        let sizes = flags.files.iter().map(|path| Some(fs::metadata(path).ok()?.len()));
        Self {
            bytes: Arc::default(),
            size: sizes.sum::<Option<u64>>().filter(|size| *size > 0),
            start: Instant::now(),
            is_shown: io::stderr().is_terminal(),
        }
    }

    fn show(&self, lines: u64) {
        if !self.is_shown || !lines.is_multiple_of(131_072) {
            return;
        }
        let rate = lines as f64 / self.start.elapsed().as_secs_f64() / 1e6;
        let millions = lines as f64 / 1e6;
        let bar = self.size.map_or_else(String::new, |size| {
            let part = (self.bytes.load(Relaxed) as f64 / size as f64).min(1.0);
            let full = (part * 30.0) as usize;
            format!("[{}{}] {:3.0} %  ", "#".repeat(full), ".".repeat(30 - full), part * 100.0)
        });
        eprint!("\r{bar}{millions:.1} million lines, {rate:.1} million per second ");
    }

    fn end(&self) {
        if self.is_shown {
            eprint!("\r{:78}\r", "");
        }
    }
}
