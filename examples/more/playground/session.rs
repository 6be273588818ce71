//! One open page: its limiters, its traffic, and the messages to and from it. What the numbers mean
//! is in `tally.rs`.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::extract::ws::{Message, WebSocket};
use serde_json::json;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{Instant, Interval, MissedTickBehavior, interval},
};
use tower_ratelimit::{Error, Limiter, MemoryStore, Permit, RedisStore, store::Source};

use crate::{
    App,
    algorithms::{SHOWN, Shown},
    flight::{Checked, Flight, hold, spend},
    observed::Observed,
    settings::{Counts, Policy, Request, Settings},
    support::{Context, Failure},
    tally::{ADMITTED, DENIED, DEPARTED, FAILED, Fresh, Most, TICK, Totals, WAITING, tick},
    traffic::{Arrivals, Traffic},
};

/// How often requests come.
const STEP: Duration = Duration::from_millis(10);

/// The steps between two messages to the page.
const STEPS_PER_FRAME: u64 = 5;

/// More calls than those of requests that wait for the longest time are in progress only if Redis
/// fails.
const MAX_CALLS: usize = 60_000;

/// A call without an answer after this time is shown as waiting.
const SHOWN_AS_WAITING: Duration = Duration::from_millis(100);

/// How many messages a page gets at first: those of the time that its chart shows.
const MAX_PAST: usize = 240;

/// A session that has begun, and what its page has missed.
pub struct Begun {
    session: Session,
    steps: Interval,
    step: u64,
    past: VecDeque<String>,
}

/// Runs the traffic of a page until the page is closed.
pub async fn run(app: Arc<App>, mut socket: WebSocket) {
    let (claim, begun) = oneshot::channel();
    let _ = app.claims.send(claim).await;
    let begun = begun.await.map_or_else(|_| Begun::new(app), Ok);
    let Begun { mut session, mut steps, mut step, past } = match begun {
        Ok(begun) => begun,
        Err(error) => return eprintln!("cannot begin: {error}"),
    };
    session.open();
    if send(&mut socket, session.hello().to_string()).await.is_none() {
        return;
    }
    for message in past {
        if send(&mut socket, message).await.is_none() {
            return;
        }
    }
    loop {
        let message = tokio::select! {
            biased;
            message = socket.recv() => match message {
                Some(Ok(Message::Text(text))) => Some(session.request(&text).await.to_string()),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                Some(Ok(_)) => None,
            },
            due = session.due(&mut steps) => session.go_on(due, &mut step).await,
        };
        if let Some(message) = message
            && send(&mut socket, message).await.is_none()
        {
            return;
        }
    }
}

async fn send(socket: &mut WebSocket, message: String) -> Option<()> {
    socket.send(Message::Text(message.into())).await.ok()
}

/// Runs a session until a page claims it, and then the next one: the first chart of a page is full
/// at once. With Redis, a session begins with its page: others may use the server.
pub async fn run_ahead(app: Arc<App>, mut claims: mpsc::Receiver<oneshot::Sender<Begun>>) {
    while app.redis.is_none()
        && let Ok(mut begun) = Begun::new(app.clone())
    {
        let claim = loop {
            tokio::select! {
                claim = claims.recv() => break claim,
                due = begun.session.due(&mut begun.steps) => {
                    let message = begun.session.go_on(due, &mut begun.step).await;
                    begun.past.extend(message);
                    let excess = begun.past.len().saturating_sub(MAX_PAST);
                    begun.past.drain(..excess);
                }
            }
        };
        let Some(claim) = claim else { return };
        let _ = claim.send(begun);
    }
}

impl Begun {
    fn new(app: Arc<App>) -> Result<Self, Failure> {
        let mut steps = interval(STEP);
        steps.set_missed_tick_behavior(MissedTickBehavior::Skip);
        Ok(Self { session: Session::new(app)?, steps, step: 0, past: VecDeque::new() })
    }
}

struct Session {
    app: Arc<App>,
    start: Instant,
    settings: Settings,
    traffic: Traffic,
    arrivals: Arrivals,
    observed: Arc<Observed>,
    lanes: Vec<Lane>,
    stores: Vec<RedisStore>,
    calls: JoinSet<Answer>,
    /// Which replica the next request goes to.
    turn: usize,
    arrived: Fresh,
    arrivals_so_far: u64,
    /// True if a page shows it.
    is_open: bool,
    /// Each start counts under a key of its own.
    starts: u64,
    began: Duration,
    prefix: String,
    last_tick: u64,
}

/// One algorithm.
struct Lane {
    is_on: bool,
    /// True if the requests hold their units while they are in progress.
    holds: bool,
    /// True if the requests in flight are counted, and not those that passed.
    at_a_time: bool,
    /// The largest number of units that remain.
    capacity: u64,
    flight: Flight,
    /// One for each replica.
    limiters: Vec<Limiter>,
    totals: Totals,
    fresh: Fresh,
    most: Most,
    /// After the last decision: what is left, if that is known, when all is back, when a denied
    /// request is allowed.
    remaining: Option<u64>,
    reset_at: Duration,
    retry_at: Option<Duration>,
    /// The last windows, if the algorithm has windows.
    windows: Option<VecDeque<Window>>,
}

/// A window, which ends between two instants, and the number of requests admitted in it.
struct Window {
    earliest: Duration,
    latest: Duration,
    admitted: u64,
}

/// The answer to a check.
struct Answer {
    lane: usize,
    start: u64,
    sent: Duration,
    result: Result<Checked, Error>,
}

impl Session {
    fn new(app: Arc<App>) -> Result<Self, Failure> {
        let settings = Settings {
            limit: 1_000,
            window_ms: 3_000,
            burst: 1_000,
            max_wait_ms: 0,
            duration_ms: 1_000,
            in_flight: 500,
            holds: false,
            used_percent: 50,
            replicas: 1,
            store: if app.redis.is_some() { Counts::Redis } else { Counts::Memory },
            policy: Policy::Closed,
            lanes: SHOWN.iter().map(|shown| shown.id.to_owned()).collect(),
        };
        let start = Instant::now();
        let id = start_id();
        let traffic = Traffic::Boundary;
        let mut session = Self {
            arrivals: Arrivals::new(&traffic, &settings, Duration::ZERO),
            app,
            start,
            settings,
            traffic,
            observed: Arc::default(),
            lanes: vec![],
            stores: vec![],
            calls: JoinSet::new(),
            turn: 0,
            arrived: Fresh::default(),
            arrivals_so_far: 0,
            is_open: false,
            starts: 0,
            began: Duration::ZERO,
            prefix: format!("playground-{id}"),
            last_tick: 0,
        };
        session.restart()?;
        Ok(session)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Counts its decisions among those of the open pages.
    fn open(&mut self) {
        self.is_open = true;
        self.app.sessions.add(&self.observed);
    }

    /// Waits for an answer to a call, or for the time of a step: then, it returns `None`.
    async fn due(&mut self, steps: &mut Interval) -> Option<Answer> {
        tokio::select! {
            biased;
            _ = steps.tick() => None,
            Some(Ok(answer)) = self.calls.join_next() => Some(answer),
        }
    }

    /// Counts an answer, or makes a step. Returns a message for the page, if it is time for one.
    async fn go_on(&mut self, due: Option<Answer>, step: &mut u64) -> Option<String> {
        if let Some(answer) = due {
            self.answered(answer);
            return None;
        }
        self.step().await;
        *step += 1;
        if !step.is_multiple_of(STEPS_PER_FRAME) {
            return None;
        }
        Some(self.frame().await.to_string())
    }

    /// Begins again, with new limiters and stores.
    fn restart(&mut self) -> Result<(), Failure> {
        self.starts += 1;
        self.calls = JoinSet::new();
        let observed = Arc::<Observed>::default();
        self.observed = observed.clone();
        if self.is_open {
            self.open();
        }
        self.stores.clear();
        let mut limiters: Vec<Vec<Limiter>> = SHOWN.iter().map(|_| vec![]).collect();
        for _ in 0..self.settings.replicas {
            let replica = match (self.settings.store, &self.app.redis) {
                (Counts::Redis, Some(redis)) => {
                    let store = redis.store(&self.prefix)?;
                    store.add_observer(observed.clone());
                    self.stores.push(store.clone());
                    self.replica(|| store.clone())?
                }
                _ => {
                    let store = MemoryStore::new();
                    store.add_observer(observed.clone());
                    self.replica(|| store.clone())?
                }
            };
            for (limiters, limiter) in limiters.iter_mut().zip(replica) {
                limiters.push(limiter);
            }
        }
        let lanes = SHOWN.iter().zip(limiters);
        let lanes = lanes.map(|(shown, limiters)| self.lane(shown, limiters));
        self.lanes = lanes.collect::<Result<_, _>>()?;
        self.arrived = Fresh::default();
        self.arrivals_so_far = 0;
        self.began = self.now();
        self.arrivals = Arrivals::new(&self.traffic, &self.settings, self.began);
        Ok(())
    }

    /// Returns the number of counts of each algorithm.
    fn counts(&self) -> usize {
        if self.stores.is_empty() { self.settings.replicas } else { 1 }
    }

    /// Returns the limiters of one replica, over its store.
    fn replica<S: tower_ratelimit::store::Store>(
        &self,
        store: impl Fn() -> S,
    ) -> Result<Vec<Limiter>, Failure> {
        let policy = self.settings.failure_policy();
        let limiter = |shown: &Shown| {
            let quota = self.settings.quota(shown).map_err(Failure::new)?;
            let limiter = Limiter::try_new(shown.id, store(), (shown.algorithm)(), quota);
            Ok(limiter.context(shown.id)?.on_failure(policy))
        };
        SHOWN.iter().map(limiter).collect()
    }

    fn lane(&self, shown: &Shown, limiters: Vec<Limiter>) -> Result<Lane, Failure> {
        let holds = self.settings.holds(shown);
        // Replicas that count for themselves have windows of their own. A unit that is held counts
        // in the window in which it is used.
        let has_windows = shown.has_windows && self.counts() == 1 && !holds;
        let capacity = self.capacity(shown)?;
        Ok(Lane {
            is_on: self.settings.lanes.iter().any(|on| on == shown.id),
            holds,
            at_a_time: shown.at_a_time,
            capacity,
            flight: Flight::default(),
            windows: has_windows.then(VecDeque::new),
            limiters,
            totals: Totals::default(),
            fresh: Fresh::default(),
            most: Most::new(self.settings.window()),
            remaining: Some(capacity),
            reset_at: Duration::ZERO,
            retry_at: None,
        })
    }

    /// Returns the units of a key that has spent none, in one count.
    fn capacity(&self, shown: &Shown) -> Result<u64, Failure> {
        let quota = self.settings.quota(shown).map_err(Failure::new)?;
        Ok(if shown.has_burst { quota.burst_size() } else { quota.limit() })
    }

    /// Carries out a request of the page. Returns the state for the page.
    async fn request(&mut self, text: &str) -> serde_json::Value {
        let done = match serde_json::from_str(text) {
            Ok(request) => self.carry_out(request).await,
            Err(error) => Err(Failure::from(error)),
        };
        self.state(done.err())
    }

    async fn carry_out(&mut self, request: Request) -> Result<(), Failure> {
        match request {
            Request::Set(settings) => self.set(settings.bounded())?,
            Request::Traffic(traffic) => {
                self.traffic = traffic;
                self.arrivals = Arrivals::new(&self.traffic, &self.settings, self.now());
            }
            Request::Burst { n } => self.arrive(n.min(2_000)).await,
            Request::Restart => self.restart()?,
            Request::Redis { run } => {
                let app = self.app.clone();
                // To start a server takes some milliseconds.
                tokio::task::spawn_blocking(move || match (&app.redis, run) {
                    (Some(redis), true) => redis.revive(),
                    (Some(redis), false) => {
                        redis.kill();
                        Ok(())
                    }
                    (None, _) => Ok(()),
                })
                .await??;
            }
        }
        Ok(())
    }

    fn set(&mut self, mut new: Settings) -> Result<(), Failure> {
        if self.app.redis.is_none() {
            new.store = Counts::Memory;
        }
        let old = std::mem::replace(&mut self.settings, new);
        if old.needs_restart(&self.settings) {
            return self.restart();
        }
        let policy = self.settings.failure_policy();
        let new_window = self.settings.window();
        let mut is_changed = false;
        for (index, shown) in SHOWN.iter().enumerate() {
            let quota = self.settings.quota(shown).map_err(Failure::new)?;
            let capacity = self.capacity(shown)?;
            let lane = &mut self.lanes[index];
            lane.is_on = self.settings.lanes.iter().any(|on| on == shown.id);
            if old.policy != self.settings.policy {
                let limiters = lane.limiters.iter().map(|it| it.clone().on_failure(policy));
                lane.limiters = limiters.collect();
            }
            if Ok(quota) == old.quota(shown) {
                continue;
            }
            is_changed |= !shown.at_a_time;
            for limiter in &lane.limiters {
                limiter.set_quota(quota)?;
            }
            lane.capacity = capacity;
            // What was admitted under another quota says nothing about this one.
            lane.most.restart(new_window);
            lane.retry_at = None;
        }
        if is_changed {
            // Patterns depend on the quota.
            self.arrivals = Arrivals::new(&self.traffic, &self.settings, self.now());
        }
        Ok(())
    }

    /// Ends the requests whose duration is over, and lets those come that are due.
    async fn step(&mut self) {
        while let Some(Ok(answer)) = self.calls.try_join_next() {
            self.answered(answer);
        }
        for lane in &mut self.lanes {
            lane.end_requests(self.start, &self.settings);
        }
        let due = self.arrivals.due(self.now());
        self.arrive(due).await;
        let now = self.now();
        let last = tick(now);
        for lane in &mut self.lanes {
            let within = lane.within(now);
            if last != self.last_tick {
                lane.fresh.curve.push((last, within));
            }
        }
        self.last_tick = last;
    }

    /// Checks requests that come now, with each algorithm.
    async fn arrive(&mut self, requests: u64) {
        let max_wait = Duration::from_millis(self.settings.max_wait_ms);
        for _ in 0..requests {
            let now = self.now();
            self.arrived.add(now, ADMITTED);
            self.arrivals_so_far += 1;
            self.turn = (self.turn + 1) % self.settings.replicas;
            for lane in 0..self.lanes.len() {
                if self.lanes[lane].is_on {
                    self.check(lane, now, max_wait).await;
                }
            }
        }
    }

    async fn check(&mut self, lane: usize, now: Duration, max_wait: Duration) {
        let Lane { limiters, totals, fresh, flight, holds, .. } = &mut self.lanes[lane];
        let limiter = &limiters[self.turn];
        let key = format!("client-{}", self.starts);
        totals.arrived += 1;
        let (holds, sent, start) = (*holds, self.start.elapsed(), self.starts);
        let waits = holds && !max_wait.is_zero();
        if self.stores.is_empty() && !waits {
            let result = match holds {
                true => hold(limiter, key, max_wait).await,
                false => spend(limiter, key, max_wait).await,
            };
            return self.answered(Answer { lane, start, sent, result });
        }
        if self.calls.len() >= MAX_CALLS {
            totals.failed += 1;
            return fresh.add(now, FAILED);
        }
        if waits {
            flight.sent(sent);
        }
        let limiter = limiter.clone();
        self.calls.spawn(async move {
            let result = match holds {
                true => hold(&limiter, key, max_wait).await,
                false => spend(&limiter, key, max_wait).await,
            };
            Answer { lane, start, sent, result }
        });
    }

    /// Counts a decision.
    fn answered(&mut self, answer: Answer) {
        let Answer { lane, start, sent, result } = answer;
        let now = self.now();
        let Some(lane) = self.lanes.get_mut(lane).filter(|_| start == self.starts) else { return };
        lane.flight.answered(sent);
        let Ok(Checked { decision, permit, has_waited }) = result else {
            lane.totals.failed += 1;
            lane.remaining = None;
            return lane.fresh.add(sent, FAILED);
        };
        match decision.source() {
            Source::Cached => lane.totals.remembered += 1,
            Source::Local => lane.totals.local += 1,
            Source::Open => lane.totals.uncounted += 1,
            _ => {}
        }
        lane.remaining = (decision.source() != Source::Open).then(|| decision.remaining());
        lane.reset_at = now + decision.reset_after();
        if !decision.is_allowed() {
            lane.totals.denied += 1;
            lane.retry_at = decision.retry_after().map(|wait| now + wait);
            return lane.fresh.add(sent, DENIED);
        }
        lane.retry_at = None;
        if let Some(permit) = permit {
            let end = now + self.settings.duration();
            return lane.begin_request(permit, has_waited, sent, now, end);
        }
        lane.count_in_window(sent + decision.reset_after(), now + decision.reset_after());
        let delay = decision.delay();
        match delay < TICK / 10 {
            true => {
                lane.totals.admitted += 1;
                lane.fresh.add(sent, ADMITTED);
            }
            false => {
                lane.totals.waited += 1;
                lane.fresh.add(sent, WAITING);
                lane.fresh.add(now + delay, DEPARTED);
            }
        }
        lane.most.add(sent + delay, now + delay);
        lane.most.advance(now);
    }

    /// Returns what the page needs once.
    fn hello(&self) -> serde_json::Value {
        let mut hello = self.state(None);
        hello["type"] = json!("hello");
        hello["algorithms"] = json!(SHOWN);
        hello["tick"] = json!(TICK.as_millis() as u64);
        hello
    }

    /// Returns the settings and their consequences.
    fn state(&self, error: Option<Failure>) -> serde_json::Value {
        // Replicas that count for themselves have a quota each.
        let counts = self.counts() as u64;
        let most = |shown: &Shown| {
            let quota = self.settings.quota(shown).ok();
            quota.map(|quota| counts * (shown.most)(quota))
        };
        let lanes = SHOWN.iter().map(|shown| (shown.id.to_owned(), json!(most(shown))));
        json!({
            "type": "state",
            "settings": self.settings,
            "traffic": self.traffic,
            "promises": serde_json::Map::from_iter(lanes),
            "redis": self.app.redis.as_ref().map(|redis| json!({
                "private": redis.is_private(),
                "running": redis.is_running(),
            })),
            "start": self.starts,
            "began": millis(self.began),
            "error": error.map(|error| error.to_string()),
        })
    }

    /// Returns what has happened since the last frame.
    async fn frame(&mut self) -> serde_json::Value {
        let now = self.now();
        let (is_redis, key) = (!self.stores.is_empty(), format!("client-{}", self.starts));
        let health = self.stores.first().map(RedisStore::health);
        // While Redis fails, only the counts of the process are known.
        let is_known = health.as_ref().is_none_or(|health| health.is_available)
            || self.settings.policy == Policy::Local;
        let mut lanes = serde_json::Map::new();
        for (index, (shown, lane)) in SHOWN.iter().zip(&mut self.lanes).enumerate() {
            if !is_redis {
                lane.peek(&key).await;
            } else if !is_known {
                lane.remaining = None;
            } else if now >= lane.reset_at {
                lane.remaining = Some(lane.capacity.saturating_sub(lane.flight.len() as u64));
            }
            let (calls, checks) = self.observed.calls(index);
            lanes.insert(shown.id.to_owned(), lane.frame(now, calls, checks));
        }
        json!({
            "type": "frame",
            "now": millis(now),
            "start": self.starts,
            "arrived": self.arrived.take().ticks(),
            "arrivals": self.arrivals_so_far,
            "lanes": lanes,
            "redis": health.map(|health| json!({
                "status": health.status(),
                "says": health.to_string(),
                "available": health.is_available,
            })),
        })
    }
}

impl Lane {
    /// Looks at what is left, which spends nothing. In memory, it costs nothing either.
    async fn peek(&mut self, key: &str) {
        let mut remaining = 0;
        for limiter in &self.limiters {
            if let Ok(state) = limiter.peek(key).await {
                remaining += state.remaining();
            }
        }
        self.remaining = Some(remaining);
    }

    /// Counts an admitted request that holds its unit until it ends.
    fn begin_request(
        &mut self,
        permit: Permit,
        has_waited: bool,
        sent: Duration,
        now: Duration,
        end: Duration,
    ) {
        self.flight.begin(permit, end);
        match has_waited {
            false => {
                self.totals.admitted += 1;
                self.fresh.add(sent, ADMITTED);
            }
            true => {
                self.totals.waited += 1;
                self.fresh.add(sent, WAITING);
                self.fresh.add(now, DEPARTED);
            }
        }
        // After a lower limit, requests that are in flight already go on.
        let in_flight = self.flight.len() as u64;
        if self.at_a_time && in_flight > self.most.most {
            (self.most.most, self.most.at) = (in_flight, now);
        }
    }

    /// Ends the requests whose duration is over. A unit counts as used at the end of its request,
    /// when it is certainly still held.
    fn end_requests(&mut self, start: Instant, settings: &Settings) {
        let now = start.elapsed();
        while let Some(permit) = self.flight.ended(now) {
            let used = if self.at_a_time { 0 } else { self.flight.used(settings.used_percent) };
            let at = start.elapsed();
            if used > 0 {
                self.most.add(at, at);
                self.reset_at = self.reset_at.max(at + settings.window());
            } else {
                self.remaining = self.remaining.map(|it| (it + 1).min(self.capacity));
            }
            permit.settle(used);
        }
    }

    /// Returns the requests in flight, or those that passed in the window that ends now.
    fn within(&mut self, now: Duration) -> usize {
        let passed = self.most.advance(now);
        if self.at_a_time { self.flight.len() } else { passed }
    }

    /// Counts an admitted request in its window, which ends between these instants.
    fn count_in_window(&mut self, earliest: Duration, latest: Duration) {
        let Some(windows) = &mut self.windows else { return };
        let known = windows
            .iter_mut()
            .rev()
            .find(|window| earliest <= window.latest + TICK && window.earliest <= latest + TICK);
        match known {
            Some(window) => {
                window.earliest = window.earliest.max(earliest);
                window.latest = window.latest.min(latest);
                window.admitted += 1;
            }
            None => windows.push_back(Window { earliest, latest, admitted: 1 }),
        }
        if windows.len() > 3 {
            windows.pop_front();
        }
    }

    fn frame(&mut self, now: Duration, calls: u64, checks: u64) -> serde_json::Value {
        let fresh = self.fresh.take();
        let windows = self.windows.iter().flatten();
        let windows = windows.map(|window| (millis(window.latest), window.admitted));
        let retry = self.retry_at.filter(|at| *at > now);
        json!({
            "on": self.is_on,
            "ticks": fresh.ticks(),
            "curve": fresh.curve,
            "windows": windows.collect::<Vec<_>>(),
            "totals": self.totals,
            "remaining": self.remaining,
            "retryAt": retry.map(millis),
            "within": self.within(now),
            "held": self.flight.len(),
            "pending": self.flight.pending(now.saturating_sub(SHOWN_AS_WAITING)),
            "most": self.most.most,
            "mostAt": millis(self.most.at),
            "calls": calls,
            "checks": checks,
        })
    }
}

fn millis(time: Duration) -> f64 {
    (time.as_micros() / 100) as f64 / 10.0
}

/// Returns a number that no other page has, here or in another playground over the same Redis.
fn start_id() -> String {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::SystemTime,
    };
    static PAGES: AtomicU64 = AtomicU64::new(0);
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}-{}", time.as_millis(), std::process::id(), PAGES.fetch_add(1, Ordering::Relaxed))
}
