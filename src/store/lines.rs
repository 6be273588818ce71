//! The lines of the requests that wait without a reservation: one for each limiter and key, within
//! one process. They hold numbers, costs and instants, and know no limiters and no charges:
//! `limiter/in_line.rs` translates.
//!
//! A request keeps the number of its first poll, and stands in one line at a time. It checks when
//! no earlier request stands in a line of one of its keys; else it stands there. So the oldest
//! request can always go on. Only the first request of a line sleeps until an instant. Each change
//! of the key calls it, and so does the request before it that leaves.
//!
//! A request that was called and is not polled counts as absent after a while. The second and the
//! third one of a line have timers for that, and the last one, which wakes others if all of them
//! are absent.
//!
//! One lock for all lines, which is not held while a store decides. Wakers are called without it.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, Hash, RandomState},
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Waker},
    time::Duration,
};

use tokio::time::Instant;

use super::turns::{Turns, yield_time};
use crate::{keys::Key, quota::Quota, sync::lock};

/// The time after which a request that was called and is not polled holds up no others. `select!`
/// over a request and a slow branch is enough for that.
pub(crate) const STALL: Duration = Duration::from_millis(100);
/// The same after a check has begun: with `STALL`, ten times the default deadline of a check.
const CHECK: Duration = Duration::from_millis(900);
/// A timer is up to 1 ms late, on a busy machine some more. A first request that is due by its
/// deadline still checks.
const LATENESS: Duration = Duration::from_millis(5);
/// The requests that watch the first one of a line. All of them can be kept, too.
const WATCHING: usize = 2;
/// The first request, and those that watch it.
const WATCHED: u32 = 1 + WATCHING as u32;
/// The requests that are woken if none watches.
const MAX_TENDED: usize = 8;
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
    lines: HashMap<u64, KeyLine>,
    turns: Turns,
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
}

/// How fast a quota restores units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) quota: Quota,
    /// True if units are restored one by one.
    pub(crate) is_smooth: bool,
}

impl Pace {
    /// Returns a lower bound of the time in which these units are restored.
    fn time_of(self, units: u64) -> Duration {
        let (limit, window) = (u128::from(self.quota.limit()), u128::from(self.quota.window_us()));
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
    /// At this instant, at which so many units are `known` to be available.
    At {
        at: Instant,
        known: Option<u64>,
    },
    /// When the line is called.
    Called,
    /// These units are left: as many requests check side by side.
    Units(u64),
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
    pace: Option<Pace>,
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
    stage: Stage,
}

#[derive(Debug, PartialEq)]
enum Stage {
    Undecided,
    /// It may check beside those before it.
    Called,
    /// Units were returned during the check, which may not have seen them, if there is an instant.
    Checking(Option<Instant>),
    Denied,
}

impl Waiting {
    /// Returns whether the request is not polled, although it was called.
    fn is_absent(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| now >= due + STALL)
    }
}

/// Wakers to call, and to drop, without the lock: both can run foreign code.
#[derive(Default)]
struct Wakers(Vec<Waker>, Vec<Waker>);

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

    fn change<R>(&self, change: impl FnOnce(&mut LineSet, Instant, &mut Wakers) -> R) -> R {
        let (now, mut wakers) = (Instant::now(), Wakers::default());
        let result = {
            let state = &mut *lock(&self.state);
            let result = change(state, now, &mut wakers);
            self.count.store(state.lines.len() + state.turns.len(), Relaxed);
            result
        };
        wakers.0.into_iter().for_each(Waker::wake);
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
        if !self.is_waited_for(line) {
            return; // without a look at the clock
        }
        self.change(|state, now, wakers| {
            if let Some(line) = state.lines.get_mut(&line) {
                line.call(now, now, wakers);
            }
        });
    }

    /// Calls all lines of a limiter whose settings have changed.
    pub(crate) fn limiter_changed(&self, limiter: &str) {
        if !self.is_empty() {
            let limiter = self.hash(limiter);
            self.change(|state, now, wakers| {
                let lines = state.lines.values_mut().filter(|line| line.limiter == limiter);
                lines.for_each(|line| line.call(now, now, wakers));
            });
        }
    }

    /// Records that a decision has found no units of these keys for a further request, perhaps as
    /// it `takes` the last ones.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn found_full(&self, keys: impl IntoIterator<Item = u64>, takes: bool) {
        let mut keys = keys.into_iter().peekable();
        if keys.peek().is_some() {
            self.change(|state, now, _| {
                keys.for_each(|key| state.turns.found_full(key, takes, now));
            });
        }
    }

    /// Records that this process returns units of a key, which it has held since `taken`. After a
    /// turn, it leaves units to other processes for a pause.
    #[cfg_attr(not(feature = "redis"), allow(dead_code))]
    pub(crate) fn units_end(&self, key: u64, taken: Instant) {
        self.change(|state, now, _| state.turns.returned(key, taken, now));
    }

    /// Returns whether requests stand in this line.
    pub(crate) fn is_waited_for(&self, line: u64) -> bool {
        lock(&self.state).lines.contains_key(&line)
    }

    /// Returns the pause before the first request of a line, which has `waited`, asks whether
    /// another process has returned units.
    pub(crate) fn hold_retry(&self, waited: Duration, line: u64) -> Duration {
        let LineSet { lines, turns, .. } = &*lock(&self.state);
        turns.retry(line, waited, lines.len())
    }

    /// Returns for how long a request leaves units that are restored to older ones of other
    /// processes. It will have `waited` so long; its cost is restored in `gap`.
    pub(crate) fn yield_time(waited: Duration, gap: Duration) -> Duration {
        yield_time(waited, gap)
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

    fn line(&mut self, limit: &LineLimit) -> &mut KeyLine {
        let new = || KeyLine { limiter: limit.limiter, ..KeyLine::default() };
        self.lines.entry(limit.line).or_insert_with(new)
    }

    fn leave(&mut self, place: &mut LinePlace, next: NextCheck, now: Instant, wakers: &mut Wakers) {
        let Some(index) = place.at.take() else { return };
        let id = place.limits[index].line;
        if let Some(line) = self.lines.get_mut(&id) {
            line.leave(place.number, next, now, wakers);
            if line.waiting.is_empty() {
                self.lines.remove(&id);
            }
        }
    }
}

impl KeyLine {
    /// Returns for each earlier request the instant at which it and those before it are absent, up
    /// to the first one that is polled. The instants grow.
    fn absences(&self, number: u64) -> impl Iterator<Item = Option<Instant>> {
        self.waiting.range(..number).scan(None, |absent_at, (_, waiting)| {
            *absent_at = match (*absent_at, waiting.due, &waiting.stage) {
                (at, Some(due), _) => at.max(Some(due + STALL)),
                // It would have checked when those before it were absent.
                (Some(at), None, Stage::Undecided) => Some(at + STALL),
                _ => None,
            };
            Some(*absent_at)
        })
    }

    /// Returns whether an earlier request stands in the line, which is polled.
    fn is_behind(&self, number: u64, now: Instant) -> bool {
        self.absences(number).any(|at| at.is_none_or(|at| now < at))
    }

    /// Returns when a request looks after those before it, if it is to.
    fn watches_at(&self, number: u64, now: Instant) -> Option<Instant> {
        let is_last = self.waiting.last_key_value().is_some_and(|(last, _)| *last == number);
        let first = self.waiting.first_key_value().and_then(|(_, first)| first.due);
        let tends_at =
            first.filter(|_| is_last).map(|due| (due + WATCHED * STALL).max(now + STALL));
        let mut absences = self.absences(number).skip_while(|at| at.is_some_and(|at| at <= now));
        let watched = absences.by_ref().take(WATCHING).try_fold(None, |_, at| at.map(Some));
        watched.flatten().filter(|_| absences.next().is_none()).into_iter().chain(tends_at).min()
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

    fn insert(&mut self, number: u64, limit: LineLimit, due: Instant, now: Instant) {
        let due = (!self.is_behind(number, now)).then_some(due);
        let waiting = Waiting { limit, waker: None, due, stage: Stage::Undecided };
        self.waiting.insert(number, waiting);
        self.update_group(&limit, |units| units.saturating_add(limit.cost));
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
        let (Some(deadline), Some(pace)) = (deadline, self.pace) else { return has_room };
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

    /// Lets the first requests check at this instant: up to the first one that is not absent. Wakes
    /// it, and those that watch it.
    fn call(&mut self, at: Instant, now: Instant, wakers: &mut Wakers) {
        self.known = None;
        let mut watching = None;
        for waiting in self.waiting.values_mut() {
            let is_absent = waiting.is_absent(now);
            match &mut waiting.stage {
                _ if watching.is_some() => {}
                Stage::Checking(again) => *again = Some(at),
                _ if is_absent => {}
                _ => waiting.due = Some(waiting.due.map_or(at, |due| due.min(at))),
            }
            wakers.0.extend(waiting.waker.take());
            watching = match watching {
                None if is_absent => None,
                None => Some(0),
                Some(count) => Some(count + 1),
            };
            if watching == Some(WATCHING) {
                break;
            }
        }
        self.wake_last(wakers);
    }

    fn wake_last(&mut self, wakers: &mut Wakers) {
        wakers.0.extend(self.waiting.last_entry().and_then(|mut last| last.get_mut().waker.take()));
    }

    /// Wakes the first requests before this one, if none of them checks: more of them are kept than
    /// are watched.
    fn tend(&mut self, number: u64, now: Instant, wakers: &mut Wakers) {
        if self.waiting.first_key_value().is_some_and(|(_, first)| first.is_absent(now)) {
            let before = self.waiting.range_mut(..number);
            wakers.0.extend(before.filter_map(|(_, it)| it.waker.take()).take(MAX_TENDED));
        }
    }

    /// Removes a request, and calls the next one.
    fn leave(&mut self, number: u64, next: NextCheck, now: Instant, wakers: &mut Wakers) {
        let is_behind = self.is_behind(number, now);
        let Some(mut left) = self.waiting.remove(&number) else { return };
        self.update_group(&left.limit, |units| units.saturating_sub(left.limit.cost));
        wakers.1.extend(left.waker.take());
        if is_behind {
            // It may have watched the first one.
            let mut after = self.waiting.range_mut(number..);
            wakers.0.extend(after.next().and_then(|(_, waiting)| waiting.waker.take()));
            self.wake_last(wakers);
            return self.tend(number, now, wakers);
        }
        let known = self.known.take();
        let cost = self.waiting.first_key_value().map_or(0, |(_, waiting)| waiting.limit.cost);
        let next = match (next, left.stage) {
            (_, Stage::Checking(Some(at))) => NextCheck::At { at, known: None },
            // What it waited for is known, and the next one needs no less.
            (NextCheck::Now, Stage::Denied) if cost >= left.limit.cost => match left.due {
                Some(at) => {
                    let known = known.filter(|known| known.0 == at);
                    NextCheck::At { at, known: known.map(|(_, units)| units) }
                }
                None => NextCheck::Called,
            },
            (next, _) => next,
        };
        match next {
            NextCheck::Now => self.call(now, now, wakers),
            NextCheck::At { at, known } => {
                self.call(at, now, wakers);
                self.known = known.map(|units| (at, units));
            }
            NextCheck::Called => {
                let first = self.waiting.values_mut().find(|waiting| !waiting.is_absent(now));
                first.into_iter().for_each(|first| {
                    if first.stage == Stage::Undecided {
                        first.stage = Stage::Denied;
                    }
                });
            }
            NextCheck::Units(mut units) => {
                self.call(now, now, wakers);
                for waiting in self.waiting.values_mut() {
                    let Some(left) = units.checked_sub(waiting.limit.cost) else { break };
                    units = left;
                    if !matches!(waiting.stage, Stage::Checking(_)) {
                        (waiting.stage, waiting.due) = (Stage::Called, Some(now));
                        wakers.0.extend(waiting.waker.take());
                    }
                }
            }
        }
    }

    /// Returns what a request does now.
    fn step(
        &mut self,
        number: u64,
        deadline: Option<Instant>,
        pause_end: Option<Instant>,
        now: Instant,
        wakers: &mut Wakers,
    ) -> LineStep {
        let (is_behind, watches_at) = (self.is_behind(number, now), self.watches_at(number, now));
        let tends_at = self.waiting.first_key_value().and_then(|(_, first)| first.due);
        let is_last = self.waiting.last_key_value().is_some_and(|(last, _)| *last == number);
        if is_last && tends_at.is_some_and(|due| now >= due + WATCHED * STALL) {
            self.tend(number, now, wakers);
        }
        let Some(waiting) = self.waiting.get_mut(&number) else { return LineStep::Check };
        let is_over = deadline.is_some_and(|deadline| now >= deadline);
        let until = |at: Option<Instant>| match deadline {
            Some(deadline) => LineStep::Sleep(Some(at.map_or(deadline, |at| at.min(deadline)))),
            None => LineStep::Sleep(at),
        };
        if is_behind && waiting.stage != Stage::Called {
            (waiting.due, waiting.stage) = (None, Stage::Undecided);
            return if is_over { LineStep::Leave } else { until(watches_at) };
        }
        if waiting.due.is_none() && waiting.stage == Stage::Undecided {
            waiting.due = Some(now); // those before it are absent
        }
        let is_in_time =
            |due| deadline.is_none_or(|deadline| due <= deadline && now <= deadline + LATENESS);
        match waiting.due.map(|due| pause_end.map_or(due, |end| due.max(end))) {
            Some(due) if due <= now && is_in_time(due) => LineStep::Check,
            _ if is_over => LineStep::Leave,
            due => until(due),
        }
    }
}

/// A request that may stand in a line. Dropping it lets the request leave.
#[derive(Debug)]
pub(crate) struct LinePlace {
    lines: Arc<Lines>,
    number: u64,
    limits: Vec<LineLimit>,
    /// The limit in whose line it stands.
    at: Option<usize>,
}

/// A denial, as a line needs it.
pub(crate) struct Refusal {
    /// The index of the limit.
    pub(crate) limit: usize,
    /// When the request checks again; `None` when it is called.
    pub(crate) due: Option<Instant>,
    /// The instant at which so many units are available, if nothing can change it.
    pub(crate) known: Option<(Instant, u64)>,
    pub(crate) pace: Option<Pace>,
}

impl LinePlace {
    pub(crate) fn new(lines: Arc<Lines>, number: u64, limits: Vec<LineLimit>) -> Self {
        Self { lines, number, limits, at: None }
    }

    pub(crate) fn lines(&self) -> &Lines {
        &self.lines
    }

    pub(crate) fn limits(&self) -> &[LineLimit] {
        &self.limits
    }

    /// Returns the limit in whose line the request stands.
    pub(crate) fn at(&self) -> Option<usize> {
        self.at
    }

    /// Stands in the line of the first limit for which an earlier request waits, or whose units
    /// this process leaves to others for a pause. Returns `None` if there is none, and false if
    /// the request could not be served by its deadline.
    pub(crate) fn enter(&mut self, deadline: Option<Instant>) -> Option<bool> {
        self.lines.clone().change(|state, now, wakers| {
            let is_paused =
                |limit: &LineLimit| state.pause_end(limit.line, deadline, now).is_some();
            let pauses = || self.limits.iter().position(is_paused);
            let index = state.obstacle(self, now).or_else(pauses)?;
            let limit = self.limits[index];
            let line = state.line(&limit);
            line.tend(self.number, now, wakers);
            let admits = line.admits(self.number, &limit, deadline, None, now);
            if admits {
                line.insert(self.number, limit, now, now);
                self.at = Some(index);
            }
            Some(admits)
        })
    }

    /// Returns what the request does now, which stands in a line.
    pub(crate) fn poll(&mut self, cx: &Context<'_>, deadline: Option<Instant>) -> LineStep {
        self.lines.clone().change(|state, now, wakers| {
            loop {
                let Some(index) = self.at else { return LineStep::Check };
                let (number, limit) = (self.number, self.limits[index]);
                let pause_end = state.pause_end(limit.line, deadline, now);
                let step = state.line(&limit).step(number, deadline, pause_end, now, wakers);
                if let LineStep::Check = step
                    && let Some(other) = state.obstacle(self, now)
                {
                    state.leave(self, NextCheck::Now, now, wakers);
                    let limit = self.limits[other];
                    state.line(&limit).insert(number, limit, now, now);
                    self.at = Some(other);
                    continue;
                }
                if let Some(waiting) = state.line(&limit).waiting.get_mut(&number) {
                    match &step {
                        LineStep::Check => {
                            let (due, stage) = (Some(now + CHECK), Stage::Checking(None));
                            (waiting.due, waiting.stage) = (due, stage);
                        }
                        LineStep::Sleep(_) => match &waiting.waker {
                            Some(known) if known.will_wake(cx.waker()) => {}
                            _ => wakers.1.extend(waiting.waker.replace(cx.waker().clone())),
                        },
                        LineStep::Leave => {}
                    }
                }
                return step;
            }
        })
    }

    /// Stands in the line of the limit that has denied the request. Returns false, and leaves, if
    /// it could not be served by its deadline.
    pub(crate) fn denied(&mut self, refusal: Refusal, deadline: Option<Instant>) -> bool {
        let Refusal { limit: index, due, known, pace } = refusal;
        self.lines.clone().change(|state, now, wakers| {
            let (number, limit) = (self.number, self.limits[index]);
            if self.at == Some(index) {
                let line = state.line(&limit);
                let is_behind = line.is_behind(number, now);
                let mut changes = None;
                if let Some(waiting) = line.waiting.get_mut(&number) {
                    changes = match mem::replace(&mut waiting.stage, Stage::Undecided) {
                        Stage::Checking(again) => again,
                        _ => None,
                    };
                    waiting.due = changes.filter(|_| !is_behind);
                    if !is_behind && changes.is_none() {
                        (waiting.due, waiting.stage) = (due, Stage::Denied);
                    }
                }
                line.known = known.filter(|_| changes.is_none());
                line.pace = pace.or(line.pace);
                // The second one watches for the end of the check, which was expected later.
                let second = line.waiting.range_mut(number + 1..).next();
                wakers.0.extend(second.and_then(|(_, waiting)| waiting.waker.take()));
                return true;
            }
            state.leave(self, NextCheck::Now, now, wakers);
            let line = state.line(&limit);
            line.pace = pace.or(line.pace);
            let admits = line.admits(number, &limit, deadline, known, now);
            if admits {
                // Once more: units that were returned since have called no request.
                line.insert(number, limit, now, now);
                self.at = Some(index);
            } else if line.waiting.is_empty() {
                state.lines.remove(&limit.line);
            }
            admits
        })
    }

    /// Stands in the line of this limit until an instant, if it stands in none.
    /// Returns false if there is no room.
    pub(crate) fn pause(&mut self, until: Instant) -> bool {
        let limit = self.at.unwrap_or(0);
        let refusal = || Refusal { limit, due: Some(until), known: None, pace: None };
        (self.at.is_some() || self.denied(refusal(), None)) && self.denied(refusal(), None)
    }

    pub(crate) fn leave(&mut self, next: NextCheck) {
        self.lines.clone().change(|state, now, wakers| state.leave(self, next, now, wakers));
    }
}

impl Drop for LinePlace {
    fn drop(&mut self) {
        if self.at.is_some() {
            self.leave(NextCheck::Now);
        }
    }
}

/// Returns the instant after a pause, however long.
pub(crate) fn after(now: Instant, pause: Duration) -> Instant {
    now.checked_add(pause).unwrap_or_else(|| now + FOREVER)
}
