//! The side of a measured program: reads commands from standard input, makes the requests, and
//! prints what it measured. It knows no rate limiter; each of those is a file in `bin/`.
//!
//! A program gets its variant and the URL of Redis as arguments, and prints `ready`. The commands,
//! and their replies:
//!
//! * `round WORKLOAD IN_FLIGHT MILLISECONDS`: `ok DECISIONS ADMITTED WALL_NS CPU_NS P50_NS P99_NS`
//! * `fill`: one request for each of the keys; `ok`
//! * `exact REQUESTS`: requests for one key with a limit of 1,000; `ok ADMITTED`
//!
//! Instead of `ok`, each can print `failed` and a reason.

use std::{
    env,
    error::Error as StdError,
    io::{self, BufRead, Write},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinSet, coop},
};

/// The keys of the workload with many keys.
const KEYS: u64 = 10_000;

/// The keys of the flood.
const FLOODED: u64 = 256;

/// The decisions after which the hot key is replaced by a new one, before its limit is reached.
const HOT: u64 = 50_000;

/// The requests in flight of `fill` and `exact`.
const IN_FLIGHT: u64 = 256;

/// One request in this many is timed.
const SAMPLED: u64 = 16;

/// For replies of Redis. A slow machine shows in the figures, and does not end the measurement.
pub const TIMEOUT: Duration = Duration::from_secs(30);

pub type Error = Box<dyn StdError + Send + Sync>;

/// A rate limiter that is measured.
pub trait Subject: Sized {
    type Limiter: Limiter;

    /// Connects to the Redis at `url`.
    fn connect(variant: &str, url: &str) -> impl Future<Output = Result<Self, Error>>;

    fn limiter(&self, quota: Quota) -> Result<Self::Limiter, Error>;
}

/// The limiter of one quota.
pub trait Limiter: Send + Sync + 'static {
    /// Charges a request to `key`, and returns whether it was admitted.
    fn check(&self, key: &str) -> impl Future<Output = Result<bool, Error>> + Send;
}

/// So many requests per day, which may come at once.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    pub name: &'static str,
    pub limit: u32,
}

impl Quota {
    /// No measured request is denied, and the state of a key does not expire between two requests.
    const PLENTY: Self = Self { name: "plenty", limit: 60_000 };
    const ONE: Self = Self { name: "one", limit: 1 };
    const EXACT: Self = Self { name: "exact", limit: 1_000 };
    pub const PERIOD: Duration = Duration::from_secs(24 * 60 * 60);
}

/// The main function of a measured program.
pub fn run<S: Subject>() -> ExitCode {
    match serve::<S>() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed {}", in_one_line(&error));
            ExitCode::FAILURE
        }
    }
}

fn serve<S: Subject>() -> Result<(), Error> {
    let mut args = env::args().skip(1);
    let (variant, url) = (args.next().unwrap_or_default(), args.next().ok_or("no URL")?);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let program = runtime.block_on(Program::<S>::connect(&variant, &url))?;
    println!("ready");
    for line in io::stdin().lock().lines() {
        match program.execute(&runtime, &line?) {
            Ok(reply) => println!("ok {reply}"),
            Err(error) => println!("failed {}", in_one_line(&error)),
        }
        io::stdout().flush()?;
    }
    Ok(())
}

fn in_one_line(error: &Error) -> String {
    error.to_string().replace('\n', " ")
}

struct Program<S: Subject> {
    plenty: Arc<S::Limiter>,
    one: Arc<S::Limiter>,
    exact: Arc<S::Limiter>,
    keys: Arc<[String]>,
    /// The requests of all rounds with a hot key.
    hot: Arc<AtomicU64>,
}

impl<S: Subject> Program<S> {
    async fn connect(variant: &str, url: &str) -> Result<Self, Error> {
        let subject = S::connect(variant, url).await?;
        Ok(Self {
            plenty: Arc::new(subject.limiter(Quota::PLENTY)?),
            one: Arc::new(subject.limiter(Quota::ONE)?),
            exact: Arc::new(subject.limiter(Quota::EXACT)?),
            keys: (0..KEYS).map(|index| format!("user-{index:06}")).collect(),
            hot: Arc::default(),
        })
    }

    fn execute(&self, runtime: &Runtime, line: &str) -> Result<String, Error> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["round", workload, in_flight, millis] => {
                let (limiter, keys) = self.workload(workload)?;
                let duration = Duration::from_millis(millis.parse()?);
                runtime.block_on(round(limiter, &keys, in_flight.parse()?, duration))
            }
            ["fill"] => {
                let keys = Keys::Each(self.keys.clone(), Arc::default());
                runtime.block_on(async {
                    requests(&self.exact, &keys, KEYS).await?;
                    // Some limiters write their counts to Redis after the decision.
                    tokio::time::sleep(Duration::from_secs(3)).await;
                    Ok::<(), Error>(())
                })?;
                Ok(String::new())
            }
            ["exact", count] => {
                let admitted = requests(&self.exact, &Keys::One, count.parse()?);
                Ok(runtime.block_on(admitted)?.to_string())
            }
            _ => Err(format!("no command {line}").into()),
        }
    }
    fn workload(&self, name: &str) -> Result<(&Arc<S::Limiter>, Keys), Error> {
        let keys = self.keys.clone();
        Ok(match name {
            "many" => (&self.plenty, Keys::Random(keys, KEYS)),
            "hot" => (&self.plenty, Keys::Hot(self.hot.clone())),
            "flood" => (&self.one, Keys::Random(keys, FLOODED)),
            _ => return Err(format!("no workload {name}").into()),
        })
    }
}

/// Where the keys of requests come from.
#[derive(Clone)]
enum Keys {
    /// A random one of the first keys.
    Random(Arc<[String]>, u64),
    /// Each key once.
    Each(Arc<[String]>, Arc<AtomicU64>),
    /// The same key, for this number of requests.
    Hot(Arc<AtomicU64>),
    One,
}

impl Keys {
    fn next<'a>(&'a self, random: &mut u64, hot: &'a mut (u64, String)) -> &'a str {
        match self {
            Self::Random(keys, count) => {
                // Xorshift.
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                &keys[(*random % count) as usize]
            }
            Self::Each(keys, index) => &keys[index.fetch_add(1, Relaxed) as usize % keys.len()],
            Self::Hot(count) => {
                let generation = count.fetch_add(1, Relaxed) / HOT + 1;
                if hot.0 != generation {
                    *hot = (generation, format!("user-hot-{generation:06}"));
                }
                &hot.1
            }
            Self::One => "user-exact",
        }
    }
}

/// What a task measured.
#[derive(Default)]
struct Tally {
    decisions: u64,
    admitted: u64,
    /// In nanoseconds.
    latencies: Vec<u64>,
}

/// Makes requests for `duration`, `in_flight` at a time.
async fn round<L: Limiter>(
    limiter: &Arc<L>,
    keys: &Keys,
    in_flight: u64,
    duration: Duration,
) -> Result<String, Error> {
    let stop = Arc::new(AtomicBool::new(false));
    thread::spawn({
        let stop = stop.clone();
        move || {
            thread::sleep(duration);
            stop.store(true, Relaxed);
        }
    });
    let (start, cpu_before) = (Instant::now(), cpu()?);
    let mut tasks = JoinSet::new();
    for task in 0..in_flight {
        let (limiter, keys, stop) = (limiter.clone(), keys.clone(), stop.clone());
        tasks.spawn(async move { requests_until(&*limiter, &keys, task, &stop).await });
    }
    let mut total = Tally::default();
    while let Some(tally) = tasks.join_next().await {
        let tally = tally??;
        total.decisions += tally.decisions;
        total.admitted += tally.admitted;
        total.latencies.extend(tally.latencies);
    }
    let (wall, cpu) = (start.elapsed().as_nanos(), cpu()? - cpu_before);
    let Tally { decisions, admitted, mut latencies } = total;
    latencies.sort_unstable();
    let quantile = |percent: usize| {
        let index = latencies.len().saturating_sub(1) * percent / 100;
        latencies.get(index).copied().unwrap_or_default()
    };
    let (p50, p99) = (quantile(50), quantile(99));
    Ok(format!("{decisions} {admitted} {wall} {cpu} {p50} {p99}"))
}

async fn requests_until<L: Limiter>(
    limiter: &L,
    keys: &Keys,
    task: u64,
    stop: &AtomicBool,
) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    let (mut random, mut hot) =
        ((task + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15), Default::default());
    while !stop.load(Relaxed) {
        let key = keys.next(&mut random, &mut hot);
        let timed = (tally.decisions + task).is_multiple_of(SAMPLED).then(Instant::now);
        tally.admitted += u64::from(limiter.check(key).await?);
        if let Some(start) = timed {
            tally.latencies.push(start.elapsed().as_nanos() as u64);
        }
        tally.decisions += 1;
        // A limiter that decides without waiting would keep the other tasks from running.
        coop::consume_budget().await;
    }
    Ok(tally)
}

/// Makes `count` requests, and returns the number of admitted ones.
async fn requests<L: Limiter>(limiter: &Arc<L>, keys: &Keys, count: u64) -> Result<u64, Error> {
    let mut tasks = JoinSet::new();
    for task in 0..IN_FLIGHT {
        let (limiter, keys) = (limiter.clone(), keys.clone());
        let share = (count + IN_FLIGHT - 1 - task) / IN_FLIGHT;
        tasks.spawn(async move {
            let (mut random, mut hot, mut admitted) = (1, Default::default(), 0);
            for _ in 0..share {
                let key = keys.next(&mut random, &mut hot);
                admitted += u64::from(limiter.check(key).await?);
                coop::consume_budget().await;
            }
            Ok::<u64, Error>(admitted)
        });
    }
    let mut admitted = 0;
    while let Some(of_task) = tasks.join_next().await {
        admitted += of_task??;
    }
    Ok(admitted)
}

/// The processor time of this process in nanoseconds.
fn cpu() -> Result<i64, Error> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    Ok((usage.user_time() + usage.system_time()).num_nanoseconds())
}
