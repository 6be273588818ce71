//! Many concurrent requests through layers, while their store fails.

use std::{
    panic, slice,
    sync::{
        Arc, Once,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use http::StatusCode;
use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit},
    task::{self, JoinSet},
    time::sleep,
};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Error, Key, Limiter, Quota, RateLimitLayer, RedisStore, key, store::RedisConfig,
};

use super::{counting, get};

/// The number of requests in flight for each layer.
const AT_ONCE: usize = 150;
const PAUSE: Duration = Duration::from_millis(250);
/// Longer than any wait of a test, even on a busy machine.
const MAX_TIME: Duration = Duration::from_secs(120);

pub const LIMIT: u32 = 100;

/// A limiter of `LIMIT` per day for each key: hardly any unit is restored while a test runs. The
/// store is to be a [`forgetful`] one.
pub fn limiter(store: &RedisStore) -> Limiter {
    let algorithm = tower_ratelimit::Algorithm::token_bucket();
    Limiter::new("default", store.clone(), algorithm, Quota::per_day(LIMIT.into()))
}

/// A store that remembers no denials, so that each request depends on the server.
pub fn forgetful(config: RedisConfig) -> RedisStore {
    RedisStore::new(config.denial_ttl(Duration::ZERO)).unwrap()
}

/// The key of a user.
pub fn key(user: &str) -> Key<'static> {
    Key::scoped("header:x-user", user)
}

/// The key of a user in Redis.
pub fn redis_key(user: &str) -> String {
    format!("ratelimit:default:token-bucket:{{{}}}", key(user).as_str())
}

/// Requests of `users`, until the load is [finished](Load::finish).
pub struct Load {
    users: Vec<String>,
    is_over: Arc<AtomicBool>,
    tasks: JoinSet<Vec<Seen>>,
}

struct Seen {
    user: usize,
    status: StatusCode,
    took: Duration,
}

impl Load {
    pub fn start(limiters: &[Limiter], users: &[String]) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for limiter in limiters {
            let layer = RateLimitLayer::new(limiter.clone(), key::header("x-user"));
            for task in 0..AT_ONCE {
                let service = layer.layer(counting(&Arc::new(AtomicUsize::new(0))));
                let (users, is_over) = (users.to_vec(), is_over.clone());
                tasks.spawn(async move {
                    let mut seen = vec![];
                    for user in task.. {
                        if is_over.load(Ordering::SeqCst) {
                            break;
                        }
                        let user = user % users.len();
                        let start = Instant::now();
                        let request = get(&[("x-user", &users[user])]);
                        let status = service.clone().oneshot(request).await.unwrap().status();
                        seen.push(Seen { user, status, took: start.elapsed() });
                        sleep(PAUSE).await;
                    }
                    seen
                });
            }
        }
        Self { users: users.to_vec(), is_over, tasks }
    }

    /// Ends the load. Asserts that every request was answered, by the limiter or by the policy.
    pub async fn finish(self, fault: &str) -> Answers {
        self.is_over.store(true, Ordering::SeqCst);
        let seen = tokio::time::timeout(MAX_TIME, self.tasks.join_all()).await;
        let seen: Vec<_> = seen.expect("a request hangs").into_iter().flatten().collect();
        let longest = seen.iter().map(|seen| seen.took).max().unwrap_or_default();
        let answers = Answers { users: self.users, seen };
        let count = |status| answers.count(|seen| seen.status == status);
        let (allowed, denied) = (count(StatusCode::OK), count(StatusCode::TOO_MANY_REQUESTS));
        let failed = count(StatusCode::SERVICE_UNAVAILABLE);
        println!(
            "{fault}: {allowed} allowed, {denied} denied, {failed} failed; longest {longest:?}"
        );
        assert_eq!(allowed + denied + failed, answers.seen.len());
        assert!(longest < MAX_TIME, "a request waited for {longest:?}");
        answers
    }
}

pub struct Answers {
    users: Vec<String>,
    seen: Vec<Seen>,
}

impl Answers {
    fn count(&self, what: impl Fn(&Seen) -> bool) -> usize {
        self.seen.iter().filter(|seen| what(seen)).count()
    }

    pub fn failed(&self, user: &str) -> usize {
        self.of(user, StatusCode::SERVICE_UNAVAILABLE)
    }

    pub fn decided(&self, user: &str) -> usize {
        self.of(user, StatusCode::OK) + self.of(user, StatusCode::TOO_MANY_REQUESTS)
    }

    fn of(&self, user: &str, status: StatusCode) -> usize {
        self.count(|seen| self.users[seen.user] == user && seen.status == status)
    }

    /// Uses up the quotas of users. Asserts that each user got its quota in all, apart from
    /// requests that failed, which may have been counted.
    pub async fn check_counts(&self, limiter: &Limiter, users: &[String]) {
        let _ = until_decided(slice::from_ref(limiter), users).await;
        let mut tasks = JoinSet::new();
        for user in users {
            let (limiter, key) = (limiter.clone(), key(user));
            let (allowed, failed) = (self.of(user, StatusCode::OK), self.failed(user));
            let user = user.clone();
            tasks.spawn(async move {
                let mut allowed = allowed;
                while limiter.check(key.clone()).await.unwrap().is_allowed() {
                    allowed += 1;
                }
                let limit = LIMIT as usize;
                let min = limit.saturating_sub(failed);
                assert!((min..=limit + 1).contains(&allowed), "{user}: {allowed} of {limit}");
            });
        }
        tasks.join_all().await;
    }
}

/// Waits until every limiter decides about every user again. Returns the time that it took.
pub async fn until_decided(limiters: &[Limiter], users: &[String]) -> Duration {
    let start = Instant::now();
    for limiter in limiters {
        for user in users {
            let _ = eventually(async || limiter.peek(key(user)).await).await;
        }
    }
    start.elapsed()
}

/// Waits until a store answers.
pub async fn eventually<T>(call: impl AsyncFn() -> Result<T, Error>) -> T {
    let start = Instant::now();
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => assert!(start.elapsed() < MAX_TIME, "{error:?}"),
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until a condition holds.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < MAX_TIME, "still not true: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a condition of a server holds, while other tasks run.
pub async fn until_server(what: &str, is_so: impl Fn() -> bool) {
    until(what, async || task::block_in_place(&is_so)).await;
}

/// Limits the number of concurrent tests that start many servers, which must keep their timeouts.
pub async fn many_servers() -> SemaphorePermit<'static> {
    static PERMITS: Semaphore = Semaphore::const_new(6);
    PERMITS.acquire().await.expect("the semaphore is never closed")
}

/// Detects tasks that stay behind, and panics that no test reports.
pub struct Tasks {
    alive: usize,
    panics: usize,
}

static PANICS: AtomicUsize = AtomicUsize::new(0);

impl Tasks {
    pub fn count() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let others = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                // The harness names a thread after its test, and reports a panic there.
                if thread::current().name().is_none_or(|name| !name.contains("::")) {
                    PANICS.fetch_add(1, Ordering::SeqCst);
                }
                others(info);
            }));
        });
        Self { alive: alive(), panics: PANICS.load(Ordering::SeqCst) }
    }

    /// Asserts that all tasks have ended and none panicked. Call it after everything with tasks is
    /// dropped.
    pub async fn check(self) {
        until("all tasks have ended", async || alive() <= self.alive).await;
        assert_eq!(PANICS.load(Ordering::SeqCst), self.panics, "a task panicked");
    }
}

fn alive() -> usize {
    Handle::current().metrics().num_alive_tasks()
}
