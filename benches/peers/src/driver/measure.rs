//! The workloads, and the rounds in which the subjects take turns.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
    fs,
    net::{SocketAddr, TcpListener},
    time::Duration,
};

use redis::{Client, Commands, Connection, InfoDict};

use crate::{
    child::Running,
    programs::Program,
    proxy,
    server::RedisServer,
    subjects::{Kind, Subject},
};

/// The keys that `fill` writes.
const KEYS: f64 = 10_000.0;

/// `exact` has a limit of 1,000. Each of two processes makes the first number of requests, and then
/// the second: limiters that count by themselves know the key by then.
const EXACT_LIMIT: i64 = 1_000;
const EXACT_REQUESTS: [u64; 2] = [100, 1_400];

/// The rounds of a workload in which a subject may fail.
const FAILURES: usize = 2;

/// Half of the round-trip time to a far Redis.
const DELAY: Duration = Duration::from_micros(250);

/// How long a subject works before it is measured. A compiler at run time needs longer.
const WARM_UP: Duration = Duration::from_secs(1);
const WARM_UP_OF_JAVA: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Workload {
    Many,
    Hot,
    Flood,
    Single,
    Far,
}

impl Workload {
    pub const ALL: [Self; 5] = [Self::Many, Self::Hot, Self::Flood, Self::Single, Self::Far];

    pub fn label(self) -> &'static str {
        match self {
            Self::Many => "10,000 keys, 256 requests in flight",
            Self::Hot => "one key, 256 requests in flight",
            Self::Flood => "denied requests of 256 keys, 256 in flight",
            Self::Single => "one request in flight",
            Self::Far => "Redis 0.5 ms away, 16 requests in flight",
        }
    }

    /// The name and the number of requests in flight, as `round` takes them.
    fn command(self) -> &'static str {
        match self {
            Self::Many => "many 256",
            Self::Hot => "hot 256",
            Self::Flood => "flood 256",
            Self::Single => "many 1",
            Self::Far => "many 16",
        }
    }

    /// The share of the requests that the workload admits.
    pub fn admits(self) -> f64 {
        if self == Self::Flood { 0.0 } else { 1.0 }
    }

    pub fn includes(self, subject: &Subject) -> bool {
        if subject.is_permits() {
            return matches!(self, Self::Many | Self::Hot);
        }
        let compares_all = matches!(self, Self::Many | Self::Hot | Self::Flood);
        compares_all || subject.is_own() || subject.kind == Kind::Baseline
    }
}

/// What a round measured. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub per_second: f64,
    pub p50: f64,
    pub p99: f64,
    /// CPU of the main thread of Redis per decision.
    pub redis: f64,
    /// CPU of the measured process per decision.
    pub client: f64,
    /// Commands that Redis executed per decision, those of scripts included.
    pub commands: f64,
    /// The share of the requests that were admitted.
    pub admitted: f64,
}

impl Round {
    /// `reply` is that of the command `round`.
    fn new(reply: &str, before: &Used, after: &Used) -> Result<Self, String> {
        let numbers: Result<Vec<f64>, _> = reply.split(' ').map(str::parse).collect();
        let Ok([decisions, admitted, wall, cpu, p50, p99]) = numbers.as_deref() else {
            return Err(format!("reply {reply}"));
        };
        if *decisions == 0.0 {
            return Err("no decision in a round".to_owned());
        }
        Ok(Self {
            per_second: decisions / wall * 1e9,
            p50: p50 / 1e3,
            p99: p99 / 1e3,
            redis: (after.nanos - before.nanos) / decisions / 1e3,
            client: cpu / decisions / 1e3,
            // The command that reads the number counts, too.
            commands: (after.commands - before.commands - 1.0) / decisions,
            admitted: admitted / decisions,
        })
    }
}

/// The rounds of a subject.
#[derive(Debug, Default)]
pub struct Outcome {
    pub rounds: BTreeMap<usize, Round>,
    /// Why rounds are missing. After `FAILURES` the workload is over for the subject.
    pub failures: Vec<String>,
}

/// Everything that was measured of a subject.
#[derive(Debug, Default)]
pub struct Results {
    pub outcomes: HashMap<Workload, Outcome>,
    pub bytes_per_key: Option<f64>,
    /// Requests of two processes that were admitted over a limit of 1,000.
    pub over: Option<i64>,
    /// Why it was not measured at all.
    pub not_run: Option<String>,
}

/// A subject that is measured.
pub struct Entry {
    pub subject: &'static Subject,
    pub results: Results,
    command: Vec<OsString>,
    /// The database of the subject in Redis.
    database: usize,
    running: Option<Running>,
}

/// The lengths of a run.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    pub rounds: usize,
    pub round: Duration,
}

pub struct Bench {
    /// Ends the server when dropped.
    _server: RedisServer,
    control: Connection,
    /// The process of the server.
    process: u32,
    address: SocketAddr,
    far: SocketAddr,
    lengths: Lengths,
}

impl Bench {
    pub fn start(lengths: Lengths) -> Result<Self, String> {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let address = port.map_err(in_words)?;
        let port = address.port().to_string();
        let server =
            RedisServer::start_with(&["--port", &port, "--bind", "127.0.0.1", "--databases", "64"]);
        let far = proxy::start(address, DELAY).map_err(in_words)?;
        let client = Client::open(format!("redis://{address}")).map_err(in_words)?;
        let mut control = client.get_connection().map_err(in_words)?;
        let info: InfoDict =
            redis::cmd("INFO").arg("server").query(&mut control).map_err(in_words)?;
        let process = info.get("process_id").ok_or("the server has no process_id")?;
        Ok(Self { _server: server, control, process, address, far, lengths })
    }

    /// Builds the programs of the subjects, and makes their entries.
    pub fn entries(subjects: &[&'static Subject], other_commit: &str) -> Vec<Entry> {
        let mut built: HashMap<Program, Result<Vec<OsString>, String>> = HashMap::new();
        let mut entries = Vec::new();
        for (database, &subject) in subjects.iter().enumerate() {
            let command = built.entry(subject.program).or_insert_with(|| {
                println!("building {:?}", subject.program);
                subject.program.build(other_commit)
            });
            let (command, not_run) = match command {
                Ok(command) => (command.clone(), None),
                Err(reason) => {
                    println!("{} does not run: {reason}", subject.id);
                    (Vec::new(), Some(reason.clone()))
                }
            };
            let results = Results { not_run, ..Results::default() };
            entries.push(Entry { subject, results, command, database, running: None });
        }
        entries
    }

    pub fn run(&mut self, entries: &mut [Entry]) {
        let has_promises =
            |entry: &&mut Entry| entry.results.not_run.is_none() && !entry.subject.is_permits();
        for entry in entries.iter_mut().filter(has_promises) {
            if let Err(reason) = self.measure_promises(entry) {
                println!("{}: {reason}", entry.subject.id);
                entry.results.not_run = Some(reason);
            }
        }
        let is_measured =
            |workload: &Workload| entries.iter().any(|entry| workload.includes(entry.subject));
        let workloads: Vec<Workload> = Workload::ALL.into_iter().filter(is_measured).collect();
        for workload in workloads {
            println!("{}", workload.label());
            if workload == Workload::Far {
                // The connections of that workload are others.
                entries.iter_mut().for_each(|entry| entry.running = None);
            }
            // Round 0 is not counted.
            for round in 0..=self.lengths.rounds {
                for turn in 0..entries.len() {
                    let index = (turn + round) % entries.len();
                    self.take_turn(&mut entries[index], workload, round);
                }
            }
        }
        entries.iter_mut().for_each(|entry| entry.running = None);
    }

    /// Measures the memory of keys in Redis, and what is admitted over the limit.
    fn measure_promises(&self, entry: &mut Entry) -> Result<(), String> {
        let mut first = self.start_program(entry, self.address)?;
        first.execute("fill", Duration::from_secs(10))?;
        let bytes = self.bytes(entry.database).map_err(in_words)?;
        entry.results.bytes_per_key = Some(bytes / KEYS);
        let mut second = self.start_program(entry, self.address)?;
        let programs = [&mut first, &mut second];
        let admitted = exact(programs).map_err(|reason| format!("exact: {reason}"))?;
        entry.results.over = Some(admitted - EXACT_LIMIT);
        println!(
            "{:<32} {:7.1} bytes per key, {} over the limit",
            entry.subject.id,
            bytes / KEYS,
            admitted - EXACT_LIMIT
        );
        Ok(())
    }

    fn start_program(&self, entry: &Entry, address: SocketAddr) -> Result<Running, String> {
        let url = format!("redis://{address}/{}", entry.database);
        Running::start(&entry.command, entry.subject.variant, &url)
    }

    fn take_turn(&mut self, entry: &mut Entry, workload: Workload, round: usize) {
        let (subject, results) = (entry.subject, &entry.results);
        let past = results.outcomes.get(&workload);
        let is_over = past.is_some_and(|past| past.failures.len() == FAILURES);
        if results.not_run.is_some() || is_over || !workload.includes(subject) {
            return;
        }
        let measured = self.measure(entry, workload, round == 0);
        let outcome = entry.results.outcomes.entry(workload).or_default();
        match measured {
            Ok(_) if round == 0 => {}
            Ok(measured) => {
                print(subject, round, &measured);
                outcome.rounds.insert(round, measured);
            }
            Err(reason) => {
                println!("  {round} {:<32} failed: {reason}", subject.id);
                outcome.failures.push(reason);
                // The next turn starts the program again.
                entry.running = None;
            }
        }
    }

    fn measure(
        &mut self,
        entry: &mut Entry,
        workload: Workload,
        warm_up: bool,
    ) -> Result<Round, String> {
        let running = match entry.running.take() {
            Some(running) => running,
            None => {
                let far = workload == Workload::Far;
                self.start_program(entry, if far { self.far } else { self.address })?
            }
        };
        let duration = match entry.subject.program {
            Program::Java if warm_up => WARM_UP_OF_JAVA,
            _ if warm_up => WARM_UP,
            _ => self.lengths.round,
        };
        let before = self.used()?;
        let command = format!("round {} {}", workload.command(), duration.as_millis());
        let reply = running.execute(&command, duration)?;
        let after = self.used()?;
        entry.running = Some(running);
        Round::new(&reply, &before, &after)
    }

    /// What Redis has used.
    fn used(&mut self) -> Result<Used, String> {
        let info: InfoDict =
            redis::cmd("INFO").arg("stats").query(&mut self.control).map_err(in_words)?;
        let commands = info.get("total_commands_processed").unwrap_or_default();
        let path = format!("/proc/{0}/task/{0}/schedstat", self.process);
        let schedstat = fs::read_to_string(path).map_err(in_words)?;
        let nanos = schedstat.split(' ').next().and_then(|nanos| nanos.parse().ok());
        Ok(Used { nanos: nanos.ok_or("no schedstat")?, commands })
    }

    /// The memory of all keys of a database.
    fn bytes(&self, database: usize) -> redis::RedisResult<f64> {
        let mut connection = self.connection(database)?;
        let keys: Vec<Vec<u8>> = connection.keys("*")?;
        let mut sum = 0;
        for some in keys.chunks(1_000) {
            let mut pipe = redis::pipe();
            for key in some {
                pipe.cmd("MEMORY").arg("USAGE").arg(key).arg("SAMPLES").arg(0);
            }
            let bytes: Vec<Option<u64>> = pipe.query(&mut connection)?;
            sum += bytes.into_iter().flatten().sum::<u64>();
        }
        Ok(sum as f64)
    }

    fn connection(&self, database: usize) -> redis::RedisResult<Connection> {
        Client::open(format!("redis://{}/{database}", self.address))?.get_connection()
    }
}

fn in_words(error: impl ToString) -> String {
    error.to_string()
}

/// The requests of both programs that were admitted.
fn exact(programs: [&mut Running; 2]) -> Result<i64, String> {
    let mut admitted = 0;
    for requests in EXACT_REQUESTS {
        for program in &programs {
            program.send(&format!("exact {requests}"))?;
        }
        for program in &programs {
            let reply = program.reply(Duration::from_secs(10))?;
            admitted += reply.parse::<i64>().map_err(|error| format!("{error}: {reply}"))?;
        }
    }
    Ok(admitted)
}

struct Used {
    /// CPU of the main thread in nanoseconds.
    nanos: f64,
    commands: f64,
}

fn print(subject: &Subject, round: usize, measured: &Round) {
    println!(
        "  {round} {:<32} {:>9.0} per s  p50 {:>8.1}  p99 {:>8.1}  redis {:>6.2}  \
         client {:>6.2} us",
        subject.id,
        measured.per_second,
        measured.p50,
        measured.p99,
        measured.redis,
        measured.client
    );
}
