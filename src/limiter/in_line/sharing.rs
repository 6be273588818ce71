//! Callers in several processes that share the places of a key, in simulated time: how much of it
//! the places are in use, and how long the callers wait.

use std::future::poll_fn;

use tokio::{task::JoinSet, time::sleep};

use super::*;
use crate::{
    Algorithm, MemoryStore, Quota,
    limiter::{admission::Admission, permit::Permit},
};

const MEASURED: Duration = Duration::from_secs(40);
/// The time after which the burst of a rate has been used.
const SETTLED: Duration = Duration::from_secs(10);
/// The way to the server, or back.
const WAY: Duration = Duration::from_millis(1);

fn places(count: u64) -> Limiter {
    let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(count));
    Limiter::new("places", MemoryStore::new(), algorithm, quota)
}

fn tokens(per_second: u64, burst: u64) -> Limiter {
    let quota = Quota::per_second(per_second).burst(burst);
    Limiter::new("tokens", MemoryStore::new(), Algorithm::token_bucket(), quota)
}

/// A caller of a process, which has the line of its own limiter.
#[derive(Clone)]
struct Caller {
    charge: Charge,
    cost: u64,
    lines: Arc<Lines>,
    line: u64,
    server: Limiter,
    /// How long the caller keeps its place.
    time: Duration,
    end: Instant,
}

impl Caller {
    fn new(own: &Limiter, server: &Limiter, cost: u64, time: Duration) -> Self {
        let (lines, server) = (own.lines().clone(), server.clone());
        let charge = match own.params().spends() {
            true => Charge::new(own, "key").estimate(cost),
            false => Charge::new(own, "key").cost(cost),
        };
        let line = lines.line_of(own.name(), &"key".into());
        Self { charge, cost, lines, line, server, time, end: Instant::now() + MEASURED }
    }

    async fn take(&self) -> Option<Permit> {
        let deadline = Some(self.end);
        let first_poll = (self.lines.next_number(), Instant::now());
        let mut place = InLine::new(&self.charge, first_poll).unwrap();
        place.is_shared = true;
        let mut stands = place.enter(deadline).is_some();
        while Instant::now() < self.end {
            if stands && !poll_fn(|cx| place.poll(cx, deadline)).await {
                break;
            }
            sleep(WAY).await;
            let answer = self.server.hold("key", self.cost).await.unwrap();
            sleep(WAY).await;
            let decision = answer.decision();
            let is_full = match decision.is_allowed() {
                true => decision.remaining() < self.cost,
                false => decision.waits_for_holds() || decision.held() > 0,
            };
            if is_full {
                self.lines.found_full([self.line], decision.is_allowed());
            }
            match answer {
                Admission::Admitted(permit) => {
                    place.allowed(&self.charge, permit.decision());
                    return Some(permit);
                }
                Admission::Denied(denied) => {
                    stands = place.denied(&self.charge, &denied, deadline);
                }
            }
        }
        None
    }

    fn give_back(&self, permit: Permit, taken: Instant) {
        let Self { lines, line, .. } = self.clone();
        lines.units_end(line, taken);
        tokio::spawn(async move {
            sleep(WAY).await;
            drop(permit);
            sleep(WAY).await;
            lines.returned(line);
        });
    }

    /// Uses units until the end. Returns when each was asked for and taken.
    async fn use_units(self) -> Vec<(Instant, Instant)> {
        let mut uses = vec![];
        loop {
            let asked = Instant::now();
            let permit = self.take().await;
            uses.push((asked, Instant::now()));
            let Some(permit) = permit else { return uses };
            let taken = Instant::now();
            sleep(self.time).await;
            self.give_back(permit, taken);
        }
    }
}

/// Returns the share of the time in which the places are in use, and the longest wait, compared
/// with the time in which each caller is served once.
async fn share(processes: u32, callers: u32, count: u32, time: Duration) -> (f64, f64) {
    let server = places(count.into());
    let mut tasks = JoinSet::new();
    for _ in 0..processes {
        let own = places(count.into());
        for _ in 0..callers {
            tasks.spawn(Caller::new(&own, &server, 1, time).use_units());
        }
    }
    let uses = tasks.join_all().await;
    // The last one of each caller ends without a place.
    let used: usize = uses.iter().map(|uses| uses.len() - 1).sum();
    let in_use = (time * used as u32).as_secs_f64() / (MEASURED * count).as_secs_f64();
    let longest = uses.into_iter().flatten().map(|(asked, taken)| taken - asked).max();
    let fair = time * processes * callers / count;
    (in_use, longest.unwrap_or_default().as_secs_f64() / fair.as_secs_f64())
}

/// Returns the units per second that processes with a caller each use of a rate, and the longest
/// time in which one of them gets none, compared with the time in which each is served once.
async fn share_rate(
    processes: u32,
    rate: u64,
    burst: u64,
    cost: u64,
    time: Duration,
) -> (f64, f64) {
    let server = tokens(rate, burst);
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..processes {
        let own = tokens(rate, burst);
        tasks.spawn(Caller::new(&own, &server, cost, time).use_units());
    }
    let uses = tasks.join_all().await;
    let settled = begin + SETTLED;
    let inside = |at: &&(Instant, Instant)| at.1 >= settled;
    let used: usize = uses.iter().map(|uses| uses.iter().filter(inside).count() - 1).sum();
    let per_second = used as f64 * cost as f64 / (MEASURED - SETTLED).as_secs_f64();
    let gaps = uses.iter().flat_map(|uses| {
        let uses: Vec<Instant> = uses.iter().map(|(_, taken)| *taken).collect();
        uses.windows(2).map(|both| both[1] - both[0].max(settled)).collect::<Vec<_>>()
    });
    let longest = gaps.max().unwrap_or_default().as_secs_f64();
    (per_second, longest / (f64::from(processes) * cost as f64 / rate as f64))
}

#[tokio::test(start_paused = true)]
async fn no_process_is_kept_from_a_rate_by_others() {
    for (processes, rate, burst, cost, time) in [
        (2, 10, 10, 5, 50),
        (4, 10, 10, 5, 100),
        (4, 10, 10, 1, 50),
        (4, 100, 100, 50, 50),
        (4, 10, 100, 10, 2_000),
        (8, 10, 10, 5, 50),
        (1, 10, 10, 5, 50),
        (4, 100, 10, 10, 50),
        (1, 10, 10, 10, 50),
    ] {
        let held = Duration::from_millis(time);
        let (per_second, longest) = share_rate(processes, rate, burst, cost, held).await;
        println!(
            "{processes} processes, {cost} of {rate}/s held for {held:?}, burst {burst}: \
             {per_second:.2}/s, longest gap {longest:.2} x fair"
        );
        assert!(longest <= 3.0, "{longest:.2} x fair");
        // What is held is not restored, if the burst is no larger.
        assert!(burst == cost || per_second > 0.95 * rate as f64, "{per_second:.2}");
    }
}

#[tokio::test(start_paused = true)]
async fn processes_share_places_and_leave_few_of_them_unused() {
    // A caller that is alone in its process asks again before its end has reached the server. With
    // 2 callers, the fair share is a third of a turn.
    let cases = [
        ([2, 4, 1], 50, 4.0),
        ([2, 1, 1], 50, 4.0),
        ([4, 4, 1], 50, 6.0),
        ([2, 8, 4], 50, 4.0),
        ([1, 8, 1], 50, 1.5),
        ([2, 1, 1], 10, 6.0),
        ([2, 4, 1], 10, 6.0),
        ([2, 1, 1], 1, 40.0),
    ];
    for ([processes, callers, places], time, most) in cases {
        let time = Duration::from_millis(time);
        let (in_use, longest) = share(processes, callers, places, time).await;
        // A process alone, which has the ways to the server, too.
        let (alone, _) = share(1, callers, places, time).await;
        println!(
            "{processes} x {callers} callers, {places} places for {time:?}: in use {:.1} %, of one \
             process alone {:.1} %, longest wait {longest:.1} x fair",
            in_use * 100.0,
            alone * 100.0
        );
        assert!(in_use > 0.9 * alone);
        assert!(longest < most, "{longest:.1} x fair");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pause_after_a_turn_holds_for_requests_in_line() {
    let (own, server) = (places(1), places(1));
    let caller = Caller::new(&own, &server, 1, WAY);
    let first_poll = (caller.lines.next_number(), Instant::now());
    let mut place = InLine::new(&caller.charge, first_poll).unwrap();
    place.is_shared = true;
    sleep(Duration::from_secs(2)).await;
    let _held = server.hold("key", 1).await.unwrap().admitted().unwrap();
    let Admission::Denied(denied) = server.hold("key", 1).await.unwrap() else { panic!("it fits") };
    let taken = Instant::now();
    for _ in 0..2 {
        assert!(place.denied(&caller.charge, &denied, Some(caller.end)));
        assert!(poll_fn(|cx| place.poll(cx, Some(caller.end))).await);
        caller.lines.found_full([caller.line], true);
    }
    assert!(place.denied(&caller.charge, &denied, Some(caller.end)));
    caller.lines.units_end(caller.line, taken - Duration::from_secs(1));
    caller.lines.returned(caller.line);
    let begin = Instant::now();
    assert!(poll_fn(|cx| place.poll(cx, Some(caller.end))).await);
    assert!(begin.elapsed() >= Duration::from_millis(20), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_time_that_units_are_left_to_other_processes_denies_no_request() {
    let (own, server) = (tokens(10, 1), tokens(10, 1));
    let charge = Charge::new(&own, "key").and(Charge::new(&own, "other"));
    let new = || {
        let first_poll = (own.lines().next_number(), Instant::now());
        InLine { is_shared: true, ..InLine::new(&charge, first_poll).unwrap() }
    };
    let millis = |count| Some(Instant::now() + Duration::from_millis(count));
    for is_served in [true, false] {
        server.reset("key").await.unwrap();
        let [mut first, mut second, mut in_time, mut too_late] = [new(), new(), new(), new()];
        assert!(server.check("key").await.unwrap().is_allowed());
        let denied = server.check("key").await.unwrap();
        // It checks once more when it stands in the line.
        assert!(first.denied(&charge, &denied, None));
        assert!(poll_fn(|cx| first.poll(cx, None)).await);
        assert!(first.denied(&charge, &denied, None));
        assert_eq!(second.enter(None), Some(true));
        if is_served {
            assert!(poll_fn(|cx| first.poll(cx, None)).await);
            let allowed = server.check("key").await.unwrap();
            assert!(allowed.is_allowed());
            first.allowed(&charge, &allowed);
        } else {
            drop(first);
        }
        // Units are restored after 100 and 200 ms.
        assert_eq!(too_late.enter(millis(198)), Some(false));
        assert_eq!(in_time.enter(millis(202)), Some(true));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_beyond_the_longest_line_does_not_wait_for_a_store_that_fails() {
    let own = places(1);
    let charge = Charge::new(&own, "key");
    let new = || InLine::new(&charge, (own.lines().next_number(), Instant::now())).unwrap();
    let mut waiting: Vec<_> = (0..10_000).map(|_| new()).collect();
    assert!(waiting.iter_mut().all(|request| request.store_failed(None)));
    assert!(!new().store_failed(None));
}
