//! Callers in several processes that share the places of a key, in simulated time: how much of it
//! the places are in use, and how long the callers wait.

use std::future::poll_fn;

use tokio::{task::JoinSet, time::sleep};

use super::*;
use crate::{
    Algorithm, MemoryStore,
    limiter::{admission::Admission, permit::Permit},
};

const MEASURED: Duration = Duration::from_secs(60);
/// The way to the server, or back.
const WAY: Duration = Duration::from_millis(1);

fn places(count: u64) -> Limiter {
    let (algorithm, quota) = (Algorithm::concurrency(), Quota::concurrent(count));
    Limiter::new("places", MemoryStore::new(), algorithm, quota)
}

/// A caller of a process, which has the line of its own limiter.
#[derive(Clone)]
struct Caller {
    charge: Charge,
    lines: Arc<Lines>,
    line: u64,
    server: Limiter,
    /// How long the caller keeps its place.
    time: Duration,
    end: Instant,
}

impl Caller {
    fn new(own: &Limiter, server: &Limiter, time: Duration) -> Self {
        let (charge, lines) = (Charge::new(own, "key"), own.lines().clone());
        let line = lines.line_of(own.name(), &"key".into());
        Self { charge, lines, line, server: server.clone(), time, end: Instant::now() + MEASURED }
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
            let answer = self.server.hold("key", 1).await.unwrap();
            sleep(WAY).await;
            if answer.decision().remaining() == 0 {
                self.lines.found_full([self.line]);
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

    /// Uses places until the end. Returns for how long, and the longest wait.
    async fn use_places(self) -> (Duration, Duration) {
        let (mut used, mut longest) = (Duration::ZERO, Duration::ZERO);
        loop {
            let asked = Instant::now();
            let permit = self.take().await;
            let taken = Instant::now();
            longest = longest.max(taken - asked);
            let Some(permit) = permit else { return (used, longest) };
            sleep(self.time).await;
            used += self.time;
            self.give_back(permit, taken);
        }
    }
}

/// Returns the share of the time in which the places are in use, and the longest wait, compared
/// with the time in which each caller is served once.
async fn share(processes: u32, callers: u32, count: u32, time: Duration) -> (f64, f64) {
    let (server, mut tasks) = (places(count.into()), JoinSet::new());
    for _ in 0..processes {
        let own = places(count.into());
        for _ in 0..callers {
            tasks.spawn(Caller::new(&own, &server, time).use_places());
        }
    }
    let (used, waits): (Vec<_>, Vec<_>) = tasks.join_all().await.into_iter().unzip();
    let in_use = used.iter().sum::<Duration>().as_secs_f64() / (MEASURED * count).as_secs_f64();
    let longest = waits.into_iter().max().unwrap_or_default().as_secs_f64();
    (in_use, longest / (time * processes * callers / count).as_secs_f64())
}

#[tokio::test(start_paused = true)]
async fn processes_share_places_and_leave_few_of_them_unused() {
    // A caller that is alone in its process asks again before its end has reached the server. With
    // 2 callers, the fair share is a fourth of a turn.
    let cases = [
        ([2, 4, 1], 50, 5.0),
        ([2, 1, 1], 50, 10.0),
        ([4, 4, 1], 50, 6.0),
        ([8, 1, 1], 50, 20.0),
        ([2, 8, 4], 50, 5.0),
        ([1, 8, 1], 50, 1.5),
        ([2, 1, 1], 10, 14.0),
        ([2, 4, 1], 10, 14.0),
        ([2, 1, 1], 1, 150.0),
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
        assert!(in_use > 0.85 * alone);
        assert!(longest < most, "{longest:.1} x fair");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pause_after_a_turn_holds_for_requests_in_line() {
    let (own, server) = (places(1), places(1));
    let caller = Caller::new(&own, &server, WAY);
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
        caller.lines.found_full([caller.line]);
    }
    assert!(place.denied(&caller.charge, &denied, Some(caller.end)));
    caller.lines.units_end(caller.line, taken - Duration::from_secs(1));
    caller.lines.returned(caller.line);
    let begin = Instant::now();
    assert!(poll_fn(|cx| place.poll(cx, Some(caller.end))).await);
    assert!(begin.elapsed() >= Duration::from_millis(20), "{:?}", begin.elapsed());
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
