//! The races of a line: each step of a request or a release takes one lock, once. So the orders of
//! the steps are all that threads can do. Two requests take every order, more of them random ones.

use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    task::Wake,
};

use super::*;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

/// The next step of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Next {
    Enter,
    Check,
    /// The store has denied it.
    Stand,
    Poll,
    Sleep,
    /// The store has admitted it, and this is left.
    Leave(u64),
    GiveBack,
    /// The store has the units.
    Call,
    End,
}

struct Request {
    place: Option<LinePlace>,
    cost: u64,
    next: Next,
    woken: Arc<Woken>,
}

/// A key with places, and its requests.
struct Race {
    lines: Arc<Lines>,
    free: u64,
    is_shared: bool,
    requests: Vec<Request>,
}

/// Returns a request for units of the key, which stands nowhere.
fn place(lines: &Arc<Lines>, cost: u64) -> LinePlace {
    let (line, limiter, group, max_units) = (1, 1, 1, u64::MAX);
    let (is_spent, pace) = (false, None);
    let limit = LineLimit { line, limiter, cost, is_spent, group, max_units, pace };
    LinePlace::new(lines.clone(), lines.next_number(), vec![limit])
}

impl Race {
    fn new(places: u64, costs: &[u64], is_shared: bool) -> Self {
        let lines = Arc::<Lines>::default();
        let new = |&cost: &u64| {
            let place = Some(place(&lines, cost));
            Request { place, cost, next: Next::Enter, woken: Arc::default() }
        };
        let requests = costs.iter().map(new).collect();
        Self { lines, free: places, is_shared, requests }
    }

    fn can_go_on(&self, index: usize) -> bool {
        let request = &self.requests[index];
        match request.next {
            Next::Sleep => request.woken.0.load(SeqCst),
            next => next != Next::End,
        }
    }

    fn step(&mut self, index: usize) {
        let Self { lines, free, is_shared, requests } = self;
        let Request { place, cost, next, woken } = &mut requests[index];
        let Some(place) = place else { return };
        *next = match *next {
            Next::Enter => place.enter(None).map_or(Next::Check, |_| Next::Poll),
            Next::Check => match free.checked_sub(*cost) {
                Some(left) => {
                    *free = left;
                    Next::Leave(left)
                }
                None => Next::Stand,
            },
            Next::Stand => {
                place.denied(Refusal { limit: 0, due: DueCheck::default(), pace: None }, None);
                Next::Poll
            }
            Next::Poll | Next::Sleep => {
                woken.0.store(false, SeqCst);
                let waker = Waker::from(woken.clone());
                match place.poll(&Context::from_waker(&waker), None) {
                    LineStep::Check => Next::Check,
                    _ => Next::Sleep,
                }
            }
            Next::Leave(left) => {
                place.leave(match left {
                    0 => NextCheck::Due(DueCheck::default()),
                    _ if *is_shared => NextCheck::Units(left),
                    _ => NextCheck::Now,
                });
                Next::GiveBack
            }
            Next::GiveBack => {
                *free += *cost;
                Next::Call
            }
            Next::Call => {
                lines.returned(1);
                Next::End
            }
            Next::End => Next::End,
        };
    }

    /// Drops a request, which gives back what it has taken.
    fn give_up(&mut self, index: usize) {
        let request = &mut self.requests[index];
        if matches!(request.next, Next::Leave(_) | Next::GiveBack | Next::Call) {
            self.free += if request.next == Next::Call { 0 } else { request.cost };
            self.lines.returned(1);
        }
        (request.place, request.next) = (None, Next::End);
    }

    /// Takes steps until none is left: `choose` takes one of so many.
    fn run(mut self, mut choose: impl FnMut(usize) -> usize, mut drops: impl FnMut() -> bool) {
        let mut steps = vec![];
        loop {
            let ready = (0..self.requests.len()).filter(|index| self.can_go_on(*index));
            let ready: Vec<usize> = ready.collect();
            if ready.is_empty() {
                break;
            }
            let index = ready[choose(ready.len())];
            steps.push((index, self.requests[index].next));
            if drops() { self.give_up(index) } else { self.step(index) }
        }
        let asleep = self.requests.iter().filter(|request| request.next != Next::End).count();
        assert_eq!(asleep, 0, "{steps:?}");
        assert!(lock(&self.lines.state).lines.is_empty());
    }
}

/// Stops the time: no request is due or absent because of it.
fn paused(test: impl FnOnce()) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async { test() });
}

#[test]
fn in_every_order_of_two_requests_none_sleeps_beside_units_that_are_returned() {
    paused(|| {
        for (places, costs) in [(1, [1, 1]), (2, [2, 1]), (2, [1, 2]), (2, [2, 2])] {
            let mut path: Vec<(usize, usize)> = vec![];
            let mut runs = 0;
            loop {
                let mut depth = 0;
                let choose = |options| {
                    if depth == path.len() {
                        path.push((0, options));
                    }
                    depth += 1;
                    path[depth - 1].0
                };
                Race::new(places, &costs, false).run(choose, || false);
                runs += 1;
                while path.pop_if(|(taken, options)| *taken + 1 == *options).is_some() {}
                let Some((taken, _)) = path.last_mut() else { break };
                *taken += 1;
            }
            println!("{runs} orders");
        }
    });
}

#[test]
fn in_random_orders_of_requests_that_can_give_up_none_sleeps_beside_units_that_are_returned() {
    paused(|| {
        let mut random = fastrand::Rng::with_seed(1);
        for number in 0..20_000 {
            let places = random.u64(1..4);
            let costs: Vec<u64> = (0..random.usize(2..6)).map(|_| random.u64(1..=places)).collect();
            let mut drops = random.fork();
            let race = Race::new(places, &costs, number % 2 == 0);
            race.run(|options| random.usize(..options), || drops.u8(..20) == 0);
        }
    });
}

#[test]
fn a_call_wakes_two_runtimes_to_look_for_absent_requests_however_many_there_are() {
    let new = |_| tokio::runtime::Builder::new_current_thread().build().unwrap();
    let runtimes: Vec<_> = (0..8).map(new).collect();
    paused(|| {
        let (lines, now) = (Arc::<Lines>::default(), Instant::now());
        let mut first = place(&lines, 1);
        let due = DueCheck { at: Some(now + LONGEST_LOOK), known: None };
        for _ in 0..2 {
            first.denied(Refusal { limit: 0, due, pace: None }, None);
        }
        let sleeping = |_| Arc::<Woken>::default();
        let sleeping: Vec<_> = (0..runtimes.len()).map(sleeping).collect();
        let woken = || sleeping.iter().filter(|woken| woken.0.load(SeqCst)).count();
        for (runtime, woken) in runtimes.iter().zip(&sleeping) {
            let waker = &mut Some(Waker::from(woken.clone()));
            lines.change(|state, change| {
                let at = state.watch(runtime.handle().id(), waker, change);
                assert!(at > Some(now + STALL));
            });
        }
        lines.returned(1);
        assert_eq!(woken(), 2);
        drop(first);
    });
}
