//! The lines of the requests that wait without a reservation: one for each limiter and key, within
//! one process. They hold numbers, costs and instants, and know no limiters and no charges:
//! `limiter/in_line.rs` translates.
//!
//! A request keeps the number of its first poll, and stands in one line at a time. It checks when
//! no earlier request stands in a line of one of its keys; else it stands there. So the oldest
//! request can always go on. Only the first request of a line sleeps until an instant. Each change
//! of the key calls it, and so does the request before it that leaves.
//!
//! A request that was called and is not polled counts as absent after a while: any request may be
//! kept, so a task of its own, the `Watchdog`, calls the next one. Each runtime with requests has
//! one while requests wait: another runtime may stand still.
//!
//! One lock for all lines, which is not held while a store decides. Wakers are called without it.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, Hash},
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use foldhash::fast::RandomState;
use tokio::{
    runtime::{self, Handle},
    time::{Instant, Sleep, sleep_until},
};

use super::turns::Turns;
use crate::{
    keys::Key,
    quota::Quota,
    sync::{lock, wake_all},
};

/// The time after which a request that was called and is not polled holds up no others. `select!`
/// over a request and a slow branch is enough for that.
pub(crate) const STALL: Duration = Duration::from_millis(100);
/// The same after a check has begun: with `STALL`, ten times the default deadline of a check.
const CHECK: Duration = Duration::from_millis(900);
/// A timer is up to 1 ms late, on a busy machine some more. A first request that is due by its
/// deadline still checks.
const LATENESS: Duration = Duration::from_millis(5);
/// The longest time between two looks at the lines for absent requests.
const LONGEST_LOOK: Duration = Duration::from_secs(10);
/// The most requests of a line.
const MAX_LENGTH: usize = 10_000;
/// Longer than any process runs, and short enough that an `Instant` can hold it.
const FOREVER: Duration = Duration::from_secs(30 * 366 * 86_400);

/// The lines of the requests over one store.
#[derive(Debug, Default)]
pub struct Lines {
    hasher: RandomState,
    numbers: AtomicU64,
    state: Mutex<LineSet>,
    /// The number of lines and turns, which is read without the lock. `Relaxed`: a request that
    /// enters while units are returned checks once more.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct LineSet {
    /// By the hash of limiter and key. Two with equal hashes, which are unlikely, share a line.
    lines: HashMap<u64, KeyLine, RandomState>,
    turns: Turns,
    /// By runtime, the waker of its `Watchdog` while that sleeps.
    watchdogs: HashMap<runtime::Id, Option<Waker>>,
    /// When the first of them that runs then looks at the lines; `None` before the first look.
    looks_at: Option<Instant>,
}

/// A limit of a request, as a line needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LineLimit {
    /// The hash of the limiter and the key.
    pub(crate) line: u64,
    /// The hash of the limiter.
    pub(crate) limiter: u64,
    pub(crate) cost: u64,
    /// True if none of the units can return before the end of a wait.
    pub(crate) is_spent: bool,
    /// The hash of all limits of the request.
    pub(crate) group: u64,
    /// The units that the other limits of the group admit at once.
    pub(crate) max_units: u64,
    /// `None` until a denial says it.
    pub(crate) pace: Option<Pace>,
}

/// How fast a quota restores units.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pace {
    pub(crate) quota: Quota,
    /// True if units are restored one by one.
    pub(crate) is_smooth: bool,
}

impl Pace {
    /// Returns a lower bound of the time in which these units are restored.
    pub(crate) fn time_of(self, units: u64) -> Duration {
        let (limit, window) = (u128::from(self.quota.limit()), self.quota.window().as_micros());
        let micros = match self.is_smooth {
            true => u128::from(units) * window / limit,
            // The units of a window may be restored all at once.
            false => u128::from(units) / limit * window,
        };
        Duration::from_micros(micros.try_into().unwrap_or(u64::MAX))
    }
}

/// What a request that leaves knows about the next check.
pub(crate) enum NextCheck {
    Now,
    Due(DueCheck),
    /// These units are left: as many requests check side by side.
    Units(u64),
}

/// When a request checks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DueCheck {
    /// `None` when the line is called.
    pub(crate) at: Option<Instant>,
    /// The instant at which so many units are available, if nothing can change it.
    pub(crate) known: Option<(Instant, u64)>,
}

/// What a request does now.
pub(crate) enum LineStep {
    Check,
    /// Its wait is over.
    Leave,
    Sleep(Option<Instant>),
}

#[derive(Debug, Default)]
struct KeyLine {
    limiter: u64,
    waiting: BTreeMap<u64, Waiting>,
    groups: HashMap<u64, LineGroup>,
    /// The sum of the units of the groups, each up to its maximum.
    units: u64,
    /// The instant at which so many units are available, if nothing can change it.
    known: Option<(Instant, u64)>,
    /// How often the line was called.
    calls: u64,
    pace: Option<Pace>,
    /// True if the requests have different quotas: an instant of one says nothing about another.
    is_mixed: bool,
}

/// The units for which the requests with the same limits wait. Beyond `max`, which the other limits
/// admit at once, requests leave when they check.
#[derive(Debug, Default)]
struct LineGroup {
    units: u64,
    max: u64,
}

#[derive(Debug)]
struct Waiting {
    limit: LineLimit,
    waker: Option<Waker>,
    /// When it is to be polled; `None` until it is called.
    due: Option<Instant>,
    /// The deadline of a request that sleeps: it is to be polled then, too.
    deadline: Option<Instant>,
    /// The calls of the line of which it knows: it was called, or checked after them. `None` while
    /// it stands behind others, and is not called beside them.
    told: Option<u64>,
    stage: Stage,
}

#[derive(Debug, PartialEq)]
enum Stage {
    Waiting,
    /// It may check beside those before it.
    Called,
    /// Units were returned during the check, which may not have seen them, if there is an instant.
    Checking(Option<Instant>),
}

impl Waiting {
    /// Returns the instant at which it is absent, unless it is polled before.
    fn absent_at(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.deadline).min().map(|at| after(at, STALL))
    }

    /// Returns whether the request is not polled, although it was called.
    fn is_absent(&self, now: Instant) -> bool {
        self.absent_at().is_some_and(|at| now >= at)
    }

    fn call(&mut self, at: Instant, calls: u64, change: &mut LineChange) {
        self.told = Some(calls);
        if let Stage::Checking(again) = &mut self.stage {
            *again = Some(at);
            return;
        }
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
        change.woken.extend(self.waker.take());
    }
}

/// A change of the lines at an instant, with the wakers to call and to drop after it, without the
/// lock: both can run foreign code.
struct LineChange {
    now: Instant,
    woken: Vec<Waker>,
    dropped: Vec<Waker>,
}

impl Lines {
    pub(crate) fn hash(&self, value: impl Hash) -> u64 {
        self.hasher.hash_one(value)
    }

    /// Returns the line of a key.
    pub(crate) fn line_of(&self, limiter: &str, key: &Key<'_>) -> u64 {
        self.hash((limiter, key))
    }

    /// Returns whether no request waits, and no process shares units with others by turns.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Returns the number of a request, which is polled now for the first time.
    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Relaxed)
    }

    fn change<R>(&self, change: impl FnOnce(&mut LineSet, &mut LineChange) -> R) -> R {
        let mut changed = LineChange { now: Instant::now(), woken: vec![], dropped: vec![] };
        let result = {
            let state = &mut *lock(&self.state);
            let result = change(state, &mut changed);
            self.count.store(state.lines.len() + state.turns.len(), Relaxed);
            result
        };
        wake_all(changed.woken);
        result
    }

    /// Calls the line of a key whose units were returned, or may fit sooner for another reason.
    #[inline]
    pub(crate) fn key_returned(&self, limiter: &str, key: &Key<'_>) {
        if !self.is_empty() {
            self.returned(self.line_of(limiter, key));
        }
    }

    /// Does the same for a line.
    pub(crate) fn returned(&self, line: u64) {
        if !self.is_empty() {
            self.change(|state, change| {
                state.update(line, change, |line, change| line.call(change.now, change));
            });
        }
    }

    /// Calls all lines of a limiter whose settings have changed.
    pub(crate) fn limiter_changed(&self, limiter: &str) {
        if self.is_empty() {
            return;
        }
        let limiter = self.hash(limiter);
        self.change(|state, change| {
            let lines = state.lines.iter().filter(|(_, line)| line.limiter == limiter);
            for line in lines.map(|(line, _)| *line).collect::<Vec<_>>() {
                state.update(line, change, |line, change| {
                    (line.pace, line.is_mixed) = (None, false);
                    line.call(change.now, change);
                });
            }
        });
    }

    /// Records that a decision has found no units of these keys for a further request, perhaps as
    /// it `takes` the last ones.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn found_full(&self, keys: impl IntoIterator<Item = u64>, takes: bool) {
        self.change(|state, LineChange { now, .. }| {
            keys.into_iter().for_each(|key| state.turns.found_full(key, takes, *now));
        });
    }

    /// Records that this process returns units of a key, which it has held since `taken`. After a
    /// turn, it leaves units to other processes for a pause.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn units_end(&self, key: u64, taken: Instant) {
        self.change(|state, change| state.turns.returned(key, taken, change.now));
    }

    /// Returns whether requests stand in this line.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn has_waiting(&self, line: u64) -> bool {
        lock(&self.state).lines.contains_key(&line)
    }

    /// Returns the pause before the first request of a line, which has `waited`, asks whether
    /// another process has returned units.
    pub(crate) fn hold_retry(&self, waited: Duration, line: u64) -> Duration {
        let LineSet { lines, turns, .. } = &*lock(&self.state);
        turns.retry(line, waited, lines.len())
    }
}

impl LineSet {
    /// Returns the first other limit in whose line an earlier request stands, which is polled.
    fn obstacle(&self, place: &LinePlace, now: Instant) -> Option<usize> {
        let is_before = |(index, limit): (usize, &LineLimit)| {
            let line = self.lines.get(&limit.line).filter(|_| place.at != Some(index));
            line.is_some_and(|line| line.is_behind(place.number, now)).then_some(index)
        };
        place.limits.iter().enumerate().find_map(is_before)
    }

    /// Returns until when this process leaves the units of a key to others: not beyond a deadline.
    fn pause_end(&self, line: u64, deadline: Option<Instant>, now: Instant) -> Option<Instant> {
        let is_before = |end: &Instant| deadline.is_none_or(|deadline| *end < deadline);
        self.turns.pause_end(line, now).filter(is_before)
    }

    /// Changes a line, if requests stand there.
    fn update<R>(
        &mut self,
        line: u64,
        change: &mut LineChange,
        update: impl FnOnce(&mut KeyLine, &mut LineChange) -> R,
    ) -> Option<R> {
        let found = self.lines.get_mut(&line)?;
        let result = update(found, change);
        if let Some(at) = found.absent_at(change.now)
            && self.looks_at.is_some_and(|watched| at < watched)
        {
            self.looks_at = Some(at);
            // Two: one of their runtimes may stand still. It is not woken again before it looks.
            let asleep = self.watchdogs.values_mut().filter_map(Option::take);
            change.woken.extend(asleep.take(2));
        }
        if found.waiting.is_empty() {
            self.lines.remove(&line);
        }
        Some(result)
    }

    /// Stands in the line of a limit, if the line `admits` the request.
    fn enter(
        &mut self,
        place: &mut LinePlace,
        index: usize,
        admits: impl FnOnce(&KeyLine, &LineLimit) -> bool,
        change: &mut LineChange,
    ) -> bool {
        let limit = place.limits[index];
        let new = || KeyLine { limiter: limit.limiter, ..KeyLine::default() };
        self.lines.entry(limit.line).or_insert_with(new);
        let entered = self.update(limit.line, change, |line, change| {
            let admits = admits(line, &limit);
            if admits {
                line.insert(place.number, limit, change.now);
            }
            admits
        });
        place.at = entered.filter(|entered| *entered).map(|_| index);
        place.at.is_some()
    }

    fn leave(&mut self, place: &mut LinePlace, next: NextCheck, change: &mut LineChange) {
        if let Some(index) = place.at.take() {
            let line = place.limits[index].line;
            self.update(line, change, |line, change| line.leave(place.number, next, change));
        }
    }

    /// Returns whether a runtime is to start a `Watchdog`: it has none.
    fn begin_watch(&mut self, runtime: runtime::Id) -> bool {
        let is_new = !self.watchdogs.contains_key(&runtime);
        self.watchdogs.entry(runtime).or_default();
        is_new
    }

    /// Looks at the lines, if no other runtime has. Returns when to look again, with this waker;
    /// `None` if no request waits.
    fn watch(
        &mut self,
        runtime: runtime::Id,
        waker: &mut Option<Waker>,
        change: &mut LineChange,
    ) -> Option<Instant> {
        if self.lines.is_empty() {
            change.dropped.extend(self.watchdogs.remove(&runtime).flatten());
            return None;
        }
        mem::swap(self.watchdogs.entry(runtime).or_default(), waker);
        let now = change.now;
        if self.looks_at.is_none_or(|at| at <= now) {
            let next = self.lines.values_mut().filter_map(|line| line.look(change)).min();
            let longest = now + LONGEST_LOOK;
            self.looks_at = Some(next.map_or(longest, |at| at.clamp(now + STALL / 4, longest)));
        }
        self.looks_at
    }
}

impl KeyLine {
    /// Returns the first request that is not absent.
    fn first(&mut self, now: Instant) -> Option<&mut Waiting> {
        self.waiting.values_mut().find(|waiting| !waiting.is_absent(now))
    }

    /// Returns when the first request that is not absent will be.
    fn absent_at(&mut self, now: Instant) -> Option<Instant> {
        self.first(now)?.absent_at()
    }

    /// Returns whether an earlier request stands in the line, which is polled.
    fn is_behind(&self, number: u64, now: Instant) -> bool {
        let mut earlier = self.waiting.iter().take_while(|(other, _)| **other < number);
        earlier.any(|(_, waiting)| !waiting.is_absent(now))
    }

    /// Calls the first request, if those before it are absent, and with it up to three times as
    /// many as these: if they are absent, too, they hold up others together. One of them that is
    /// polled goes on waiting behind those before it. Returns when the first one is absent, too.
    fn look(&mut self, change: &mut LineChange) -> Option<Instant> {
        let (now, calls) = (change.now, self.calls);
        let absent = self.waiting.values().take_while(|waiting| waiting.is_absent(now)).count();
        let mut called = self.waiting.values_mut().skip(absent).take((3 * absent).max(1));
        let first = called.next()?;
        if first.told != Some(calls) {
            first.call(now, calls, change);
            called.for_each(|next| next.call(now, calls, change));
        }
        first.absent_at()
    }

    fn update_group(&mut self, limit: &LineLimit, change: impl Fn(u64) -> u64) {
        if !limit.is_spent {
            return;
        }
        let group = self.groups.entry(limit.group).or_default();
        let before = group.units.min(group.max);
        *group = LineGroup { units: change(group.units), max: limit.max_units };
        self.units = self.units.saturating_sub(before).saturating_add(group.units.min(group.max));
        if group.units == 0 {
            self.groups.remove(&limit.group);
        }
    }

    fn follow(&mut self, pace: Option<Pace>) {
        self.is_mixed |= pace.is_some() && self.pace.is_some() && pace != self.pace;
        self.pace = pace.or(self.pace);
    }

    fn insert(&mut self, number: u64, limit: LineLimit, now: Instant) {
        // Once more: units that were returned since its denial have called no request.
        let is_first = !self.is_behind(number, now);
        let (due, told) = (is_first.then_some(now), is_first.then_some(self.calls));
        let (waker, deadline, stage) = (None, None, Stage::Waiting);
        let waiting = Waiting { limit, waker, due, deadline, told, stage };
        self.waiting.insert(number, waiting);
        self.update_group(&limit, |units| units.saturating_add(limit.cost));
        self.follow(limit.pace);
    }

    /// Returns whether there is room for a request that could be served by its deadline. Units that
    /// others wait for are not there for it.
    fn admits(
        &self,
        number: u64,
        limit: &LineLimit,
        deadline: Option<Instant>,
        known: Option<(Instant, u64)>,
        now: Instant,
    ) -> bool {
        let has_room = self.waiting.len() < MAX_LENGTH;
        let pace = limit.pace.or(self.pace);
        let (Some(deadline), Some(pace)) = (deadline, pace) else { return has_room };
        if self.is_mixed || self.pace.is_some_and(|others| others != pace) {
            return has_room;
        }
        // If it came before some of them, how much is before it would take a scan, and the answer
        // is a lower bound anyway.
        let is_last = self.waiting.last_key_value().is_none_or(|(last, _)| *last < number);
        // A limit that holds up an earlier request of the group holds up this one, too.
        let held_up = self.groups.get(&limit.group);
        let held_up = held_up.map_or(0, |group| group.units - group.units.min(group.max));
        let before = if is_last { self.units.saturating_add(held_up) } else { 0 };
        let units = before.saturating_add(limit.cost);
        let is_in_time = |(at, available): (Instant, u64)| {
            after(at.max(now), pace.time_of(units.saturating_sub(available))) <= deadline
        };
        has_room && known.into_iter().chain(self.known).all(is_in_time)
    }

    /// Lets the first request that is not absent check at this instant.
    fn call(&mut self, at: Instant, change: &mut LineChange) {
        self.known = None;
        self.calls += 1;
        for waiting in self.waiting.values_mut() {
            let is_absent = waiting.is_absent(change.now);
            if !is_absent || matches!(waiting.stage, Stage::Checking(_)) {
                waiting.call(at, self.calls, change);
            }
            if !is_absent {
                break;
            }
        }
    }

    /// Removes a request, and calls the next one.
    fn leave(&mut self, number: u64, next: NextCheck, change: &mut LineChange) {
        let now = change.now;
        let is_behind = self.is_behind(number, now);
        let Some(mut left) = self.waiting.remove(&number) else { return };
        self.update_group(&left.limit, |units| units.saturating_sub(left.limit.cost));
        change.dropped.extend(left.waker.take());
        if is_behind {
            return;
        }
        let known = self.known.take();
        let cost = self.first(now).map_or(0, |waiting| waiting.limit.cost);
        let next = match (next, left.stage) {
            (_, Stage::Checking(Some(at))) => {
                NextCheck::Due(DueCheck { at: Some(at), known: None })
            }
            _ if self.is_mixed => NextCheck::Now,
            // What it waited for is known, and the next one needs no less.
            (NextCheck::Now, Stage::Waiting)
                if cost >= left.limit.cost && left.told == Some(self.calls) =>
            {
                NextCheck::Due(DueCheck { at: left.due, known })
            }
            (next, _) => next,
        };
        match next {
            NextCheck::Now => self.call(now, change),
            NextCheck::Due(DueCheck { at, known }) => {
                let calls = self.calls;
                match at {
                    Some(at) => self.call(at, change),
                    None => self.first(now).into_iter().for_each(|it| it.told = Some(calls)),
                }
                self.known = known;
            }
            NextCheck::Units(mut units) => {
                self.call(now, change);
                for waiting in self.waiting.values_mut() {
                    let Some(left) = units.checked_sub(waiting.limit.cost) else { break };
                    units = left;
                    if !matches!(waiting.stage, Stage::Checking(_)) {
                        waiting.stage = Stage::Called;
                        waiting.call(now, self.calls, change);
                    }
                }
            }
        }
    }

    /// Records the denial of a request that stands in the line.
    fn denied(&mut self, number: u64, refusal: &Refusal, now: Instant) {
        let is_behind = self.is_behind(number, now);
        let Some(waiting) = self.waiting.get_mut(&number) else { return };
        let again = match mem::replace(&mut waiting.stage, Stage::Waiting) {
            Stage::Checking(again) => again,
            _ => None,
        };
        waiting.due = again.or(refusal.due.at);
        if is_behind {
            (waiting.due, waiting.told) = (None, None);
        }
        self.known = refusal.due.known.filter(|_| again.is_none());
        self.follow(refusal.pace);
    }

    /// Returns what a request does now, which sleeps with this waker.
    fn step(
        &mut self,
        number: u64,
        [deadline, pause_end]: [Option<Instant>; 2],
        waker: &mut Option<Waker>,
        now: Instant,
    ) -> LineStep {
        let is_behind = self.is_behind(number, now);
        let Some(waiting) = self.waiting.get_mut(&number) else { return LineStep::Check };
        if is_behind && waiting.stage != Stage::Called {
            (waiting.due, waiting.told, waiting.stage) = (None, None, Stage::Waiting);
        } else if waiting.told != Some(self.calls) {
            waiting.due = Some(now); // those before it are absent
        }
        let due = waiting.due.map(|due| pause_end.map_or(due, |end| due.max(end)));
        let is_in_time = |due: &Instant| {
            deadline.is_none_or(|deadline| *due <= deadline && now <= deadline + LATENESS)
        };
        if due.filter(is_in_time).is_some_and(|due| due <= now) {
            (waiting.due, waiting.stage) = (Some(now + CHECK), Stage::Checking(None));
            (waiting.told, waiting.deadline) = (Some(self.calls), None);
            return LineStep::Check;
        }
        if deadline.is_some_and(|deadline| now >= deadline) {
            return LineStep::Leave;
        }
        mem::swap(&mut waiting.waker, waker);
        waiting.deadline = deadline;
        LineStep::Sleep(due.into_iter().chain(deadline).min())
    }
}

/// A request that may stand in a line. Dropping it lets the request leave.
#[derive(Debug)]
pub(crate) struct LinePlace {
    pub(crate) lines: Arc<Lines>,
    number: u64,
    pub(crate) limits: Vec<LineLimit>,
    /// The limit in whose line it stands.
    pub(crate) at: Option<usize>,
}

/// A denial, as a line needs it.
pub(crate) struct Refusal {
    /// The index of the limit.
    pub(crate) limit: usize,
    pub(crate) due: DueCheck,
    pub(crate) pace: Option<Pace>,
}

impl LinePlace {
    pub(crate) fn new(lines: Arc<Lines>, number: u64, limits: Vec<LineLimit>) -> Self {
        Self { lines, number, limits, at: None }
    }

    /// Stands in the line of the first limit for which an earlier request waits, or whose units
    /// this process leaves to others for a pause. Returns `None` if there is none, and false if
    /// the request could not be served by its deadline.
    pub(crate) fn enter(&mut self, deadline: Option<Instant>) -> Option<bool> {
        self.lines.clone().change(|state, change| {
            let (now, number) = (change.now, self.number);
            let is_paused =
                |limit: &LineLimit| state.pause_end(limit.line, deadline, now).is_some();
            let pauses = || self.limits.iter().position(is_paused);
            let index = state.obstacle(self, now).or_else(pauses)?;
            let admits =
                |line: &KeyLine, limit: &_| line.admits(number, limit, deadline, None, now);
            Some(state.enter(self, index, admits, change))
        })
    }

    /// Returns what the request does now, which stands in a line.
    pub(crate) fn poll(&mut self, cx: &Context<'_>, deadline: Option<Instant>) -> LineStep {
        let (lines, mut waker) = (self.lines.clone(), Some(cx.waker().clone()));
        let (step, runtime) = lines.change(|state, change| {
            let step = self.step(state, deadline, &mut waker, change);
            let sleeps = matches!(step, LineStep::Sleep(_));
            let runtime = if sleeps { Handle::try_current().ok() } else { None };
            (step, runtime.filter(|runtime| state.begin_watch(runtime.id())))
        });
        if let Some(runtime) = runtime {
            Watchdog::start(&lines, &runtime);
        }
        step
    }

    fn step(
        &mut self,
        state: &mut LineSet,
        deadline: Option<Instant>,
        waker: &mut Option<Waker>,
        change: &mut LineChange,
    ) -> LineStep {
        let now = change.now;
        while let Some(index) = self.at {
            let (number, line) = (self.number, self.limits[index].line);
            let ends = [deadline, state.pause_end(line, deadline, now)];
            let step = state.update(line, change, |line, _| line.step(number, ends, waker, now));
            match step.unwrap_or(LineStep::Check) {
                LineStep::Check => {}
                step => return step,
            }
            let Some(other) = state.obstacle(self, now) else { break };
            state.leave(self, NextCheck::Now, change);
            state.enter(self, other, |_, _| true, change);
        }
        LineStep::Check
    }

    /// Stands in the line of the limit that has denied the request. Returns false, and leaves, if
    /// it could not be served by its deadline.
    pub(crate) fn denied(&mut self, refusal: Refusal, deadline: Option<Instant>) -> bool {
        self.lines.clone().change(|state, change| {
            let (now, number, index) = (change.now, self.number, refusal.limit);
            self.limits[index].pace = refusal.pace.or(self.limits[index].pace);
            if self.at == Some(index) {
                let line = self.limits[index].line;
                state.update(line, change, |line, _| line.denied(number, &refusal, now));
                return true;
            }
            state.leave(self, NextCheck::Now, change);
            let admits = |line: &KeyLine, limit: &_| {
                line.admits(number, limit, deadline, refusal.due.known, now)
            };
            state.enter(self, index, admits, change)
        })
    }

    /// Stands in the line of this limit until an instant, if it stands in none.
    /// Returns false if there is no room.
    pub(crate) fn pause(&mut self, until: Instant) -> bool {
        let limit = self.at.unwrap_or(0);
        let due = DueCheck { at: Some(until), known: None };
        let refusal = || Refusal { limit, due, pace: None };
        (self.at.is_some() || self.denied(refusal(), None)) && self.denied(refusal(), None)
    }

    pub(crate) fn leave(&mut self, next: NextCheck) {
        self.lines.clone().change(|state, change| state.leave(self, next, change));
    }
}

impl Drop for LinePlace {
    fn drop(&mut self) {
        if self.at.is_some() {
            self.leave(NextCheck::Now);
        }
    }
}

/// The task that calls the next request of a line whose first one is absent. It ends when it looks
/// and no request waits.
struct Watchdog {
    lines: Weak<Lines>,
    runtime: runtime::Id,
    has_ended: bool,
    timer: Pin<Box<Sleep>>,
}

impl Watchdog {
    fn start(lines: &Arc<Lines>, runtime: &Handle) {
        let timer = Box::pin(sleep_until(Instant::now())); // panics without timers, here
        let (lines, has_ended) = (Arc::downgrade(lines), false);
        runtime.spawn(Self { lines, runtime: runtime.id(), has_ended, timer });
    }
}

impl Future for Watchdog {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let mut waker = Some(cx.waker().clone());
            let next = self.lines.upgrade().and_then(|lines| {
                lines.change(|state, change| state.watch(self.runtime, &mut waker, change))
            });
            let Some(next) = next else {
                self.has_ended = true;
                return Poll::Ready(());
            };
            self.timer.as_mut().reset(next);
            ready!(self.timer.as_mut().poll(cx));
        }
    }
}

impl Drop for Watchdog {
    /// The runtime ends: another one can have its number.
    fn drop(&mut self) {
        if let Some(lines) = self.lines.upgrade().filter(|_| !self.has_ended) {
            lines.change(|state, change| {
                change.dropped.extend(state.watchdogs.remove(&self.runtime).flatten());
            });
        }
    }
}

/// Returns the instant after a pause, however long.
pub(crate) fn after(now: Instant, pause: Duration) -> Instant {
    now.checked_add(pause).unwrap_or_else(|| now + FOREVER)
}

#[cfg(test)]
mod tests;
