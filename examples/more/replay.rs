//! Tries limits on the traffic of a log: which requests and keys would have been denied, or would
//! have waited, by the time stamps of the log.
//!
//! ```text
//! cargo run --release -p more-examples --example replay -- --sample > access.log
//! cargo run --release -p more-examples --example replay -- access.log
//! cargo run --release -p more-examples --example replay -- access.log --quota 100/min \
//!     --quota "10/s burst 50" --svg replay.svg
//! ```
//!
//! The decisions are those of `MemoryStore`, under tokio's paused time: each thread sets its clock
//! to the time stamp of each request.

#[path = "replay/candidate.rs"]
mod candidate;
#[path = "replay/client.rs"]
mod client;
#[path = "replay/columns.rs"]
mod columns;
#[path = "replay/counts.rs"]
mod counts;
#[path = "replay/fields.rs"]
mod fields;
#[path = "replay/input.rs"]
mod input;
#[path = "replay/json.rs"]
mod json;
#[path = "replay/names.rs"]
mod names;
#[path = "replay/order.rs"]
mod order;
#[path = "replay/read.rs"]
mod read;
#[path = "replay/report.rs"]
mod report;
#[path = "replay/sample.rs"]
mod sample;
#[path = "replay/stamp.rs"]
mod stamp;
#[path = "replay/svg.rs"]
mod svg;
#[path = "replay/text.rs"]
mod text;
#[path = "replay/traffic.rs"]
mod traffic;

use std::{
    fs,
    io::{self, Write},
    path::PathBuf,
    pin::pin,
    process::ExitCode,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    task::{Context, Waker},
    thread,
    time::Duration,
};

use clap::Parser;
use tower_ratelimit::{Algorithm, Key, Quota};

use self::{
    candidate::Candidate,
    fields::{Format, Only},
    order::Batch,
    read::Lines,
    traffic::Traffic,
};

const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::fixed_window(),
    Algorithm::sliding_window(),
    Algorithm::sliding_log(),
    Algorithm::token_bucket(),
    Algorithm::leaky_bucket(),
];

/// The networks of `--trusted` by default.
const PRIVATE: &str = "10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 127.0.0.0/8, \
     169.254.0.0/16, fc00::/7, fe80::/10, ::1";

/// Batches of requests on their way to a thread.
const QUEUE: usize = 4;

/// Tries limits on the traffic of a log, by its time stamps
#[derive(Parser)]
#[command(name = "replay")]
#[command(after_help = "\
Logs: common and combined (Apache, nginx), HAProxy, Envoy, load balancers, and others by a pattern;
JSON lines, CSV with a header, IIS and CloudFront; also behind what syslog, Docker and Kubernetes
write in front, and compressed with gzip. Without --quota, only the traffic is shown: how many
requests the keys send at most within a second, a minute and an hour, and the busiest keys. A limit
is chosen by these numbers.")]
struct Flags {
    /// The logs, which are merged by time; - is standard input
    #[arg(value_name = "FILE", required_unless_present = "sample")]
    files: Vec<PathBuf>,

    /// The field that is the key: ip, user, path, or another of the log, such
    /// as request.user; several, joined by commas, are one key
    #[arg(long, value_name = "FIELDS", default_value = "ip", verbatim_doc_comment)]
    key: String,

    /// Try the limits on the requests with this value alone, such as
    /// path=/login or "path=/api/*"; can be repeated: all must match
    #[arg(long, value_name = "FIELD=VALUE", verbatim_doc_comment)]
    only: Vec<Only>,

    /// A quota to try, such as 100/min or "10/s burst 50"; can be repeated
    #[arg(long, value_name = "QUOTA")]
    quota: Vec<Quota>,

    /// An algorithm to try: fixed-window, sliding-window, sliding-log,
    /// token-bucket or leaky-bucket; can be repeated [default: all]
    #[arg(long, value_name = "NAME", verbatim_doc_comment)]
    algorithm: Vec<Algorithm>,

    /// Let requests wait for up to this time, in seconds, before they are
    /// denied; in a leaky bucket requests wait in any case
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, verbatim_doc_comment)]
    max_wait: f64,

    /// The format of the lines: auto, text, json, csv, or the fields of a line
    /// as in nginx: '$ip - $user [$time] "$request"'
    #[arg(long, default_value = "auto", verbatim_doc_comment)]
    format: Format,

    /// The field with the time stamp; a date and the time of the day are two,
    /// joined by a comma [default: by known names]
    #[arg(long, value_name = "FIELD", verbatim_doc_comment)]
    time: Option<String>,

    /// The field with the address of the client, or with a list of addresses
    /// as in X-Forwarded-For [default: by known names]
    #[arg(long, value_name = "FIELD", verbatim_doc_comment)]
    ip: Option<String>,

    /// The networks of proxies: in a list of addresses, the client is the last
    /// that is in none of them, as in ClientIp [default: private networks]
    #[arg(long, value_name = "NETWORKS", default_value = PRIVATE, hide_default_value = true)]
    #[arg(verbatim_doc_comment)]
    trusted: String,

    /// The bits of an IPv6 address in a key, as in ClientIp
    #[arg(long, value_name = "BITS", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=128))]
    ipv6_prefix: u8,

    /// Keep requests with stamps of whole seconds at the beginning of their
    /// second; by default they are spread over it, in their order
    #[arg(long, verbatim_doc_comment)]
    no_spread: bool,

    /// The number of keys to list
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,

    /// The number of keys in memory, for each limit
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    max_keys: u32,

    /// Draw the traffic and the denials into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print a sample log, in the combined format, and exit
    #[arg(long)]
    sample: bool,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<(), String> {
    if flags.sample {
        return print(&sample::log());
    }
    let (specs, notes) = specs(flags)?;
    let mut traffic = None;
    let (lines, mut tried) = replay(flags, specs, &mut traffic)?;
    let traffic = traffic.expect("the first thread counts it");
    tried.sort_by_key(|(index, _)| *index);
    let tried: Vec<_> = tried.into_iter().map(|(_, candidate)| candidate).collect();
    print(&report::text(flags, &lines, &traffic, &tried, &notes))?;
    lines.check(flags)?;
    if let Some(path) = &flags.svg {
        let drawing = svg::draw(flags, &traffic, &tried);
        fs::write(path, drawing).map_err(|error| format!("--svg {}: {error}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

/// Prints text. A closed pipe, as in `| head`, is no failure.
fn print(text: &str) -> Result<(), String> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// A limit to try.
#[derive(Clone, Copy)]
struct Spec {
    /// Its place in the report.
    index: usize,
    quota: Quota,
    algorithm: Algorithm,
    max_keys: usize,
    max_wait: Duration,
}

impl Spec {
    fn candidate(&self) -> Result<Candidate, String> {
        let Self { quota, algorithm, max_keys, max_wait, .. } = *self;
        let candidate = Candidate::new(quota, algorithm, max_keys, max_wait);
        candidate.map_err(|error| format!("--quota: {error}"))
    }
}

/// Returns the limits to try, and why some combinations are left out.
fn specs(flags: &Flags) -> Result<(Vec<Spec>, Vec<String>), String> {
    let max_wait = Duration::try_from_secs_f64(flags.max_wait)
        .map_err(|_| "--max-wait: it is no time; write seconds, such as 0.5".to_owned())?;
    let algorithms = if flags.algorithm.is_empty() { &ALGORITHMS[..] } else { &flags.algorithm };
    let no_durations =
        "a log has no durations of requests, so it is unknown how many are in flight";
    if algorithms.contains(&Algorithm::Concurrency) {
        return Err(format!("--algorithm concurrency: {no_durations}; write another algorithm"));
    }
    let (mut specs, mut notes) = (vec![], vec![]);
    for &quota in &flags.quota {
        if quota.is_concurrent() {
            return Err(format!("--quota \"{quota}\": {no_durations}; write a rate, as 100/min"));
        }
        let (mut left_out, tried) = (vec![], specs.len());
        for &algorithm in algorithms {
            let (index, max_keys) = (specs.len(), flags.max_keys as usize);
            let spec = Spec { index, quota, algorithm, max_keys, max_wait };
            match spec.candidate() {
                Ok(_) => specs.push(spec),
                Err(error) => left_out.push((algorithm.name(), error)),
            }
        }
        if specs.len() == tried
            && let Some((_, error)) = left_out.pop()
        {
            return Err(error);
        }
        if !left_out.is_empty() {
            let names: Vec<_> = left_out.iter().map(|(name, _)| *name).collect();
            let names = names.join(", ");
            notes.push(format!("{quota}: only buckets have a burst; without {names}"));
        }
    }
    Ok((specs, notes))
}

/// The limits that were tried, with their places in the report.
type Tried = Vec<(usize, Candidate)>;

/// Reads the logs in this thread, and tries the limits in others.
fn replay(
    flags: &Flags,
    specs: Vec<Spec>,
    traffic: &mut Option<Traffic>,
) -> Result<(Lines, Tried), String> {
    let threads = thread::available_parallelism().map_or(2, usize::from);
    let threads = threads.min(specs.len().max(1));
    let mut parts: Vec<Vec<Spec>> = (0..threads).map(|_| vec![]).collect();
    for spec in specs {
        parts[spec.index % threads].push(spec);
    }
    thread::scope(|scope| {
        let (mut senders, mut workers) = (vec![], vec![]);
        for (number, part) in parts.into_iter().enumerate() {
            let (sender, receiver) = sync_channel(QUEUE);
            senders.push(sender);
            let traffic = (number == 0).then(|| Traffic::new(flags.max_keys as usize));
            workers.push(scope.spawn(move || work(&part, traffic, &receiver)));
        }
        let lines = read::read(flags, &senders);
        drop(senders);
        let mut tried = vec![];
        for worker in workers {
            let (part, counted) = worker.join().expect("a thread does not panic")?;
            tried.extend(part);
            *traffic = traffic.take().or(counted);
        }
        Ok((lines?, tried))
    })
}

/// Tries limits on all requests, under the time of the log.
fn work(
    specs: &[Spec],
    mut traffic: Option<Traffic>,
    batches: &Receiver<Arc<Batch>>,
) -> Result<(Tried, Option<Traffic>), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let tried = specs.iter().map(|spec| Ok((spec.index, spec.candidate()?)));
        let mut tried = tried.collect::<Result<Tried, String>>()?;
        // The clock of a store begins at 0, here at 1970: windows of a minute begin as in Redis.
        let (mut now, mut first) = (0, None);
        let start = tokio::time::Instant::now();
        while let Ok(batch) = batches.recv() {
            for event in &batch.events {
                if event.micros > now {
                    advance(Duration::from_micros((event.micros - now) as u64));
                    now = event.micros;
                }
                let second = event.micros.div_euclid(1_000_000);
                let second = (second - *first.get_or_insert(second)) as u64;
                let text = batch.key(event);
                if let Some(traffic) = &mut traffic {
                    traffic.add(event.micros, event.hash, text);
                }
                let key = Key::from_text(text).expect("a key was written");
                for (_, candidate) in &mut tried {
                    let decided = candidate.decide(&key, event.hash, second).await;
                    decided.map_err(|error| error.to_string())?;
                }
            }
            assert_eq!(start.elapsed().as_micros(), now as u128, "the clock is that of the log");
        }
        Ok((tried, traffic))
    })
}

/// Advances the paused clock of this thread. The future does so when it is first polled. Then it
/// yields to other tasks: there are none, and a turn of the scheduler costs as much as a decision.
fn advance(duration: Duration) {
    let advance = pin!(tokio::time::advance(duration));
    let _ = advance.poll(&mut Context::from_waker(Waker::noop()));
}
