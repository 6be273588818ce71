//! Tests of remembered denials, with scripted time.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    task::Poll,
};

use proptest::{collection::vec, prelude::*};
use tokio::task::coop;

use super::*;
use crate::{
    Limiter, MemoryStore, Quota,
    algorithm::{
        Algorithm, Combined, EngineReply, EngineRequest, Params, Refill, Release, State, combine,
    },
    decision::Source,
    store::{LimitRequest, Reporting, StoreFuture},
};

static NAME: &str = "limiter";
const MILLISECOND: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3_600);
const WINDOW: Duration = Duration::from_millis(10);

fn settings(algorithm: Algorithm, quota: Quota) -> Arc<Settings> {
    let params = Params::new(algorithm, quota).unwrap();
    Arc::new(Settings::new(NAME, algorithm, quota, params, Source::Store))
}

/// A bucket of ten units per second.
fn bucket() -> Arc<Settings> {
    settings(Algorithm::token_bucket(), Quota::per_second(10))
}

const ALGORITHMS: [Algorithm; 8] = [
    Algorithm::FixedWindow,
    Algorithm::SlidingLog,
    Algorithm::sliding_window().buckets(1),
    Algorithm::sliding_window().buckets(4),
    Algorithm::token_bucket(),
    Algorithm::token_bucket().refill(Refill::Interval).overdraft(2),
    Algorithm::token_bucket().overdraft(2),
    Algorithm::LeakyBucket,
];

impl Undecided {
    fn resolve_with(
        mut self,
        denials: &Denials,
        decision: Decision,
        now: impl FnOnce() -> Instant,
    ) -> Decision {
        self.resolve(denials, &decision, now);
        decision
    }
}

/// A check of one key, in milliseconds.
#[derive(Clone, Copy)]
struct Request<'a> {
    settings: &'a Arc<Settings>,
    key: &'a str,
    cost: u32,
    max_wait: f64,
}

impl<'a> Request<'a> {
    fn new(settings: &'a Arc<Settings>) -> Self {
        Self { settings, key: "key", cost: 1, max_wait: 0.0 }
    }

    fn look_up(self, denials: &Denials, action: Action, now: Instant) -> Lookup {
        let key = Key::from(self.key);
        let Self { settings, cost, max_wait, .. } = self;
        let observers = &Default::default();
        let limits = &[LimitRequest {
            settings,
            observers,
            key: &key,
            cost: cost.into(),
            max_wait: max_wait as u64,
            hold: None,
        }];
        denials.look_up(&StoreRequest::new(action, limits, Reporting::Nothing), now)
    }

    fn send(self, denials: &Denials, now: Instant) -> Undecided {
        match self.look_up(denials, Action::Check, now) {
            Lookup::Undecided(undecided) => undecided,
            Lookup::Denied(denial) => panic!("{denial:?}"),
        }
    }

    fn find(self, denials: &Denials, now: Instant) -> Option<Decision> {
        match self.look_up(denials, Action::Check, now) {
            Lookup::Undecided(_) => None,
            Lookup::Denied(denial) => Some(denial),
        }
    }

    /// A denial of this request by the store.
    fn denial(self, wait: Duration) -> Decision {
        self.decision(self.denied(wait))
    }

    fn denied(self, wait: Duration) -> EngineReply {
        let wait = wait.as_micros() as i64;
        EngineReply {
            admitted: false,
            wait: Some(wait),
            replenish: wait / 2,
            reset: 4 * wait,
            ..EngineReply::uncounted(0)
        }
    }

    /// A denial of this request by a block.
    fn blocked(self, rest: Duration) -> Decision {
        let blocked = rest.as_micros() as i64;
        let (admitted, wait) = (false, Some(blocked - self.max_wait as i64));
        self.decision(EngineReply { admitted, wait, blocked, ..EngineReply::uncounted(0) })
    }

    fn allowed(self, delay: Duration) -> Decision {
        let wait = Some(delay.as_micros() as i64);
        self.decision(EngineReply { wait, ..EngineReply::uncounted(0) })
    }

    fn decision(self, reply: EngineReply) -> Decision {
        Decision::new(self.settings.policy(self.cost.into()), reply, 0.0)
    }

    /// The request is denied at once.
    fn deny(self, denials: &Denials, wait: Duration, now: Instant) {
        let _ = self.send(denials, now).resolve_with(denials, self.denial(wait), || now);
    }
}

#[test]
fn a_denial_holds_until_the_denied_request_would_be_allowed_by_the_slowest_clock() {
    let (denials, settings, start) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let request = Request::new(&settings);
    let wait = 1_000 * MILLISECOND;
    let undecided = request.send(&denials, start);
    let received = start + 40 * MILLISECOND;
    let denial = undecided.resolve_with(&denials, request.denial(wait), || received);
    assert_eq!((denial.source(), denial.retry_after()), (Source::Store, Some(wait)));

    let cached = request.find(&denials, received).unwrap();
    assert_eq!((cached.source(), cached.retry_after()), (Source::Cached, Some(wait)));
    let cached = request.find(&denials, received + 600 * MILLISECOND).unwrap();
    assert_eq!(cached.retry_after(), Some(400 * MILLISECOND));
    assert_eq!(cached.replenish_after(), Duration::ZERO);
    assert_eq!(cached.reset_after(), 3_400 * MILLISECOND);
    assert_eq!((cached.remaining(), cached.is_allowed()), (0, false));
    assert_eq!((cached.limiter(), cached.quota()), (NAME, settings.quota));

    let end = start + 999 * MILLISECOND;
    let last = request.find(&denials, end - Duration::from_nanos(1)).unwrap();
    assert_eq!(last.retry_after(), Some(Duration::from_micros(41_001)), "rounded up");
    assert!(request.find(&denials, end).is_none());
}

#[test]
fn a_denial_is_remembered_for_the_ttl_since_its_check_was_sent() {
    let (denials, settings, start) =
        (Denials::new(300 * MILLISECOND, Arc::default()), bucket(), Instant::now());
    let request = Request::new(&settings);
    let undecided = request.send(&denials, start);
    let _ = undecided.resolve_with(&denials, request.denial(HOUR), || start + 100 * MILLISECOND);
    assert!(request.find(&denials, start + 299 * MILLISECOND).is_some());
    assert!(request.find(&denials, start + 300 * MILLISECOND).is_none());

    let late = request.send(&denials, start + HOUR);
    let _ = late.resolve_with(&denials, request.denial(HOUR), || start + HOUR + 300 * MILLISECOND);
    assert!(request.find(&denials, start + HOUR + 300 * MILLISECOND).is_none());

    let denials = Denials::new(Duration::ZERO, Arc::default());
    request.deny(&denials, HOUR, start);
    assert!(request.find(&denials, start).is_none());

    let denials = Denials::new(Duration::MAX, Arc::default());
    request.deny(&denials, 2 * HOUR, start);
    assert!(request.find(&denials, start + HOUR).is_some());
}

const SECOND: f64 = 1e6;

#[test]
fn a_denial_holds_for_no_smaller_cost_and_until_the_wait_of_a_request_would_suffice() {
    let (denials, settings, start) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let denied = Request { cost: 5, max_wait: 20.0 * SECOND, ..Request::new(&settings) };
    denied.deny(&denials, 10_000 * MILLISECOND, start);
    let find = |cost, max_wait, millis| {
        let request = Request { cost, max_wait: max_wait * SECOND, ..denied };
        let denial = request.find(&denials, start + millis * MILLISECOND)?;
        assert_eq!(denial.cost(), u64::from(cost));
        Some(denial.retry_after().unwrap().as_secs_f64())
    };
    // It conforms after 30 s.
    assert_eq!((find(5, 20.0, 0), find(7, 20.0, 4_000)), (Some(10.0), Some(6.0)));
    assert_eq!((find(5, 0.0, 0), find(5, 0.0, 29_000)), (Some(30.0), Some(1.0)));
    assert_eq!((find(5, 29.0, 0), find(5, 29.0, 998)), (Some(1.0), Some(0.002)));
    assert_eq!(
        (find(5, 20.0, 9_990), find(5, 29.0, 999), find(5, 0.0, 29_970)),
        (None, None, None)
    );
    assert_eq!((find(4, 20.0, 0), find(4, 0.0, 0), find(5, 30.0, 0)), (None, None, None));
}

#[test]
fn a_leaky_bucket_denies_until_there_is_room_and_a_request_may_wait_as_long() {
    let settings = settings(Algorithm::LeakyBucket, Quota::per_second(10));
    let start = Instant::now();
    // Requests leave after 40 s, and there is room in 25 s. So one that may wait 20 s is denied for
    // lack of room, and one that may wait 5 s because it may not wait as long.
    let denied = |max_wait: f64, seconds: u32| {
        let denials = Denials::new(HOUR, Arc::default());
        let request = Request { max_wait: max_wait * SECOND, ..Request::new(&settings) };
        let reply =
            EngineReply { reset: 40_000_000, ..request.denied(seconds * 1_000 * MILLISECOND) };
        let _ =
            request.send(&denials, start).resolve_with(&denials, request.decision(reply), || start);
        move |max_wait: f64, millis: u32| {
            let request = Request { max_wait: max_wait * SECOND, ..request };
            let denial = request.find(&denials, start + millis * MILLISECOND)?;
            Some(denial.retry_after().unwrap().as_secs())
        }
    };
    let find = denied(20.0, 25);
    assert_eq!([0.0, 5.0, 20.0, 50.0].map(|wait| find(wait, 0)), [40, 35, 25, 25].map(Some));
    assert_eq!((find(0.0, 39_000), find(50.0, 24_000)), (Some(1), Some(1)));
    assert_eq!((find(0.0, 39_970), find(50.0, 24_980)), (None, None));
    let find = denied(5.0, 35);
    assert_eq!([0.0, 5.0, 20.0, 39.0].map(|wait| find(wait, 0)), [40, 35, 20, 1].map(Some));
    assert_eq!(find(40.0, 0), None);
}

#[test]
fn a_key_has_one_denial_which_denies_every_cost_at_or_above_its_own() {
    let (denials, settings, now) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let request = |cost| Request { cost, ..Request::new(&settings) };
    let seconds = |denial: Decision| denial.retry_after().unwrap().as_secs();
    let found = || [1, 2, 3, 4, 5].map(|cost| request(cost).find(&denials, now).map(seconds));
    // Three checks are sent before the first answer.
    let sent = [4, 2, 3].map(|cost| (cost, request(cost).send(&denials, now)));
    let expected = [
        [None, None, None, Some(40), Some(40)],
        [None, Some(20), Some(20), Some(20), Some(20)], // of a smaller cost
        [None, Some(20), Some(20), Some(20), Some(20)], // not of a larger one
    ];
    for ((cost, undecided), expected) in sent.into_iter().zip(expected) {
        let denial = request(cost).denial(cost * 10_000 * MILLISECOND);
        let _ = undecided.resolve_with(&denials, denial, || now);
        assert_eq!(found(), expected);
    }
    // When it is over, the one of a larger cost takes its place.
    let later = now + 21_000 * MILLISECOND;
    request(4).deny(&denials, 19_000 * MILLISECOND, later);
    let found = [1, 2, 3, 4].map(|cost| request(cost).find(&denials, later).map(seconds));
    assert_eq!(found, [None, None, None, Some(19)]);
    drop(denials.begin_return(&settings, &Key::from("key")));
    assert!(request(4).find(&denials, later).is_none());
}

#[test]
fn of_two_denials_of_one_cost_the_one_that_was_sent_later_stays() {
    let (settings, start) = (bucket(), Instant::now());
    let request = Request::new(&settings);
    for order in [[0, 1], [1, 0]] {
        let denials = Denials::new(HOUR, Arc::default());
        let later = start + 1_000 * MILLISECOND;
        let mut sent = [start, later].map(|sent| Some(request.send(&denials, sent)));
        for index in order {
            let denial = request.denial([10_000, 20_000][index] * MILLISECOND);
            let _ = sent[index].take().unwrap().resolve_with(&denials, denial, || later);
        }
        let found = request.find(&denials, later).unwrap();
        assert_eq!(found.retry_after(), Some(20_000 * MILLISECOND), "{order:?}");
    }
}

/// Requests of an exhausted key: their wait; the cost, and the time before each of them. With
/// several waits and costs, denials can take the place of each other.
fn flood() -> impl Strategy<Value = (f64, Vec<(u32, u64)>)> {
    ((0..30_000_u32).prop_map(f64::from), vec((1..4_u32, 0..20_u64), 500))
}

#[test]
fn a_flood_with_random_costs_sends_few_commands() {
    for algorithm in ALGORITHMS {
        let most = AtomicU64::new(0);
        proptest!(ProptestConfig::with_cases(50), |((max_wait, flood) in flood())| {
            let mut world = World::new(algorithm, 1.0);
            let params = world.settings().params;
            let spent = world.engine_request(Action::Spend, 5, 0.0);
            let _ = params.step(&mut world.state, &spent);
            let (mut denied, mut allowed) = (0, 0);
            for (cost, time) in flood {
                world.now += time;
                let settings = world.settings();
                let max_wait = max_wait.min(params.max_reservable() as f64);
                let request = Request { cost, max_wait, ..Request::new(&settings) };
                match request.look_up(&world.denials, Action::Check, world.instant()) {
                    Lookup::Denied(_) => {}
                    Lookup::Undecided(undecided) => {
                        let request = world.engine_request(Action::Check, cost, max_wait);
                        let reply = params.step(&mut world.state, &request);
                        allowed += u64::from(reply.admitted);
                        // The last thousandth of a wait is not used: clocks differ.
                        denied += u64::from(!reply.admitted && reply.known_wait() > 100);
                        let policy = settings.policy(cost.into());
                        let decision = Decision::new(policy, reply, 0.0);
                        let denials = &world.denials;
                        let _ = undecided.resolve_with(denials, decision, || world.instant());
                    }
                }
            }
            most.fetch_max(denied, Relaxed);
            // Of each cost, and again in the last thousandth of the denial that it has replaced.
            let most = 3 * 2 * (1 + allowed);
            prop_assert!(denied <= most, "{denied} denied, {allowed} allowed");
        });
        println!("{algorithm}: at most {most:?} commands that are denied");
    }
}

#[test]
fn a_denial_by_a_block_denies_every_cost() {
    let (denials, settings, now) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let request = Request { cost: 5, max_wait: 20.0 * SECOND, ..Request::new(&settings) };
    let undecided = request.send(&denials, now);
    let _ = undecided.resolve_with(&denials, request.blocked(30_000 * MILLISECOND), || now);
    for (cost, max_wait, retry_after) in [(5, 20.0, 10), (1, 0.0, 30), (9, 29.0, 1)] {
        let request = Request { cost, max_wait: max_wait * SECOND, ..request };
        let denial = request.find(&denials, now).unwrap();
        assert!(denial.is_blocked());
        assert_eq!(denial.retry_after(), Some(retry_after * 1_000 * MILLISECOND));
    }
    assert!(Request { max_wait: 30.0 * SECOND, ..request }.find(&denials, now).is_none());
}

/// Sends a check that finds a block, or one that finds none, and the answer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Finding {
    Send,
    Blocked,
    Free,
}

#[test]
fn a_block_is_forgotten_after_a_decision_that_was_sent_later_and_does_not_find_it() {
    use Finding::{Blocked, Free, Send};
    let (settings, now) = (bucket(), Instant::now());
    // Each check may wait, so that no remembered denial holds for it. The answers have the order
    // of the checks.
    for (events, knows) in [
        (vec![Send, Blocked], true),
        (vec![Send, Blocked, Send, Free], false),
        (vec![Send, Send, Blocked, Free], true),
        (vec![Send, Blocked, Send, Blocked, Send, Free], false),
        (vec![Send, Blocked, Send, Send, Blocked, Free], true),
        (vec![Send, Blocked, Send, Free, Send, Blocked], true),
    ] {
        for is_allowed in [true, false] {
            let denials = Denials::new(Duration::ZERO, Arc::default());
            let request = Request { max_wait: SECOND, ..Request::new(&settings) };
            let mut sent = std::collections::VecDeque::new();
            for event in &events {
                let decision = match event {
                    Send => {
                        sent.push_back(request.send(&denials, now));
                        continue;
                    }
                    Blocked => request.blocked(HOUR),
                    Free if is_allowed => request.allowed(MILLISECOND),
                    Free => request.denial(HOUR),
                };
                let _ = sent.pop_front().unwrap().resolve_with(&denials, decision, || now);
            }
            let known = denials.blocked_until(&settings, &Key::from("key")).is_some();
            assert_eq!(known, knows, "{events:?}, {is_allowed}");
        }
    }
}

#[test]
fn of_several_limits_an_allowed_decision_ends_each_block_after_which_the_request_proceeds() {
    let (first, second) = (bucket(), other_limiter());
    let requests = [Request::new(&first), Request::new(&second)];
    for (delay, forgotten) in [(MILLISECOND, true), (2 * HOUR, false)] {
        let (denials, now) = (Denials::new(Duration::ZERO, Arc::default()), Instant::now());
        let ends = Some(now + HOUR - HOUR / 1_000);
        for request in requests {
            let _ =
                request.send(&denials, now).resolve_with(&denials, request.blocked(HOUR), || now);
        }
        let known = |settings: &Settings| denials.blocked_until(settings, &Key::from("key"));
        assert_eq!((known(&first), known(&second)), (ends, ends));
        // It is about the first limit alone.
        let denied = send_all(&denials, &requests, now);
        let _ = denied.resolve_with(&denials, requests[0].denial(HOUR), || now);
        assert_eq!((known(&first), known(&second)), (None, ends));
        let allowed = send_all(&denials, &requests, now);
        let _ = allowed.resolve_with(&denials, requests[0].allowed(delay), || now);
        assert_eq!(known(&second).is_none(), forgotten);
    }
}

#[test]
fn a_denial_is_of_one_limiter_and_key() {
    let (denials, settings, now) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let (request, other) = (Request::new(&settings), other_limiter());
    request.deny(&denials, HOUR, now);
    assert!(Request { key: "other", ..request }.find(&denials, now).is_none());
    assert!(Request::new(&other).find(&denials, now).is_none());
    assert!(Request::new(&bucket()).find(&denials, now).is_some(), "of an equal quota");
}

#[test]
fn a_request_with_another_quota_or_algorithm_drops_the_denial() {
    let (settings, now) = (bucket(), Instant::now());
    let request = Request::new(&settings);
    let others = [
        self::settings(Algorithm::token_bucket(), Quota::per_second(11)),
        self::settings(Algorithm::LeakyBucket, settings.quota),
    ];
    for other in &others {
        for action in [Action::Check, Action::Spend] {
            let denials = Denials::new(HOUR, Arc::default());
            request.deny(&denials, HOUR, now);
            let Lookup::Undecided(change) = Request::new(other).look_up(&denials, action, now)
            else {
                panic!("another quota decides")
            };
            // The store may decide it before the change.
            request.deny(&denials, HOUR, now);
            let _ = change.resolve_with(&denials, Request::new(other).denial(HOUR), || now);
            assert!(request.find(&denials, now).is_none(), "{action:?}");
        }
    }
}

#[test]
fn only_checks_get_a_remembered_denial_and_refunds_drop_it() {
    let (denials, settings, now) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let request = Request::new(&settings);
    request.deny(&denials, HOUR, now);
    for action in [Action::Peek, Action::Spend] {
        assert!(matches!(request.look_up(&denials, action, now), Lookup::Undecided(_)));
        assert!(request.find(&denials, now).is_some(), "{action:?}");
    }
    assert!(matches!(request.look_up(&denials, Action::Refund, now), Lookup::Undecided(_)));
    assert!(request.find(&denials, now).is_none());
}

static OTHER: &str = "other-limiter";

/// Looks up a request with several limits.
fn look_up_all(
    denials: &Denials,
    action: Action,
    requests: &[Request<'_>],
    now: Instant,
) -> Lookup {
    let keys: Vec<_> = requests.iter().map(|request| Key::from(request.key)).collect();
    let (mut limits, observers) = (vec![], &Default::default());
    for (&Request { settings, cost, max_wait, .. }, key) in requests.iter().zip(&keys) {
        limits.push(LimitRequest {
            settings,
            observers,
            key,
            cost: cost.into(),
            max_wait: max_wait as u64,
            hold: None,
        });
    }
    denials.look_up(&StoreRequest::new(action, &limits, Reporting::Nothing), now)
}

fn send_all(denials: &Denials, requests: &[Request<'_>], now: Instant) -> Undecided {
    match look_up_all(denials, Action::Check, requests, now) {
        Lookup::Undecided(undecided) => undecided,
        Lookup::Denied(denial) => panic!("{denial:?}"),
    }
}

fn other_limiter() -> Arc<Settings> {
    let Settings { algorithm, quota, params, source, .. } = *bucket();
    Arc::new(Settings::new(OTHER, algorithm, quota, params, source))
}

#[test]
fn of_several_limits_the_one_that_denies_is_remembered() {
    let (first, second) = (bucket(), other_limiter());
    let now = Instant::now();
    let (one, two) = (Request::new(&first), Request { cost: 5, ..Request::new(&second) });
    let denials = Denials::new(HOUR, Arc::default());
    let _ = send_all(&denials, &[one, two], now).resolve_with(&denials, two.denial(HOUR), || now);
    let find = |requests: &[_]| match look_up_all(&denials, Action::Check, requests, now) {
        Lookup::Denied(denial) => Some((denial.limiter(), denial.cost(), denial.source())),
        Lookup::Undecided(_) => None,
    };
    let denied = Some((OTHER, 5, Source::Cached));
    assert_eq!(find(&[one, two]), denied);
    assert_eq!(find(&[two, one]), denied);
    assert_eq!(find(&[two]), denied);
    assert_eq!(find(&[one, Request { cost: 6, ..two }]), Some((OTHER, 6, Source::Cached)));
    for other in [
        Request { cost: 4, ..two },
        Request { max_wait: 3_600.0 * SECOND, ..two },
        Request { key: "other", ..two },
        one,
    ] {
        assert_eq!(find(&[other]), None);
        assert_eq!(find(&[Request { key: "another", ..one }, other]), None);
    }
    assert!(matches!(
        look_up_all(&denials, Action::Refund, &[one, two], now),
        Lookup::Undecided(_)
    ));
    assert_eq!(find(&[one, two]), None);
}

#[test]
fn of_several_denials_the_longest_is_returned() {
    let (first, second, now) = (bucket(), other_limiter(), Instant::now());
    for (one, two, longest) in [(HOUR, 2 * HOUR, OTHER), (2 * HOUR, HOUR, NAME)] {
        let denials = Denials::new(3 * HOUR, Arc::default());
        let requests = [Request::new(&first), Request::new(&second)];
        requests[0].deny(&denials, one, now);
        requests[1].deny(&denials, two, now);
        match look_up_all(&denials, Action::Check, &requests, now) {
            Lookup::Denied(denial) => {
                let expected = (longest, Some(2 * HOUR));
                assert_eq!((denial.limiter(), denial.retry_after()), expected);
            }
            Lookup::Undecided(_) => panic!("two denials hold"),
        }
    }
}

#[test]
fn a_change_of_any_limit_of_a_check_prevents_that_its_denial_is_remembered() {
    let (first, second, now) = (bucket(), other_limiter(), Instant::now());
    let requests = [Request::new(&first), Request::new(&second)];
    // Another quota of the first limit.
    let denials = Denials::new(HOUR, Arc::default());
    requests[0].deny(&denials, HOUR, now);
    let larger = settings(Algorithm::token_bucket(), Quota::per_second(11));
    let changed = [Request::new(&larger), requests[1]];
    let undecided = send_all(&denials, &changed, now);
    assert!(requests[0].find(&denials, now).is_none(), "the quota is applied");
    let _ = undecided.resolve_with(&denials, requests[1].denial(HOUR), || now);
    assert!(requests[1].find(&denials, now).is_none());
    // A reset of the limit that denies.
    let denials = Denials::new(HOUR, Arc::default());
    let undecided = send_all(&denials, &requests, now);
    drop(denials.begin_return(&second, &Key::from("key")));
    let _ = undecided.resolve_with(&denials, requests[1].denial(HOUR), || now);
    assert!(requests[1].find(&denials, now).is_none());
}

#[test]
fn a_denial_that_names_a_limiter_of_two_limits_is_not_remembered() {
    let (denials, settings, now) = (Denials::new(HOUR, Arc::default()), bucket(), Instant::now());
    let requests = [Request::new(&settings), Request { key: "other", ..Request::new(&settings) }];
    let _ =
        send_all(&denials, &requests, now).resolve_with(&denials, requests[0].denial(HOUR), || now);
    assert!(requests.iter().all(|request| request.find(&denials, now).is_none()));
}

#[test]
fn a_denial_that_may_be_older_than_a_change_is_not_remembered_after_it() {
    let (settings, now) = (bucket(), Instant::now());
    let request = Request::new(&settings);
    #[derive(Clone, Copy, PartialEq)]
    enum Event {
        Send,
        Receive,
        Begin,
        End,
    }
    use Event::{Begin, End, Receive, Send};
    for (events, is_remembered) in [
        ([Send, Receive, Begin, End], false),
        ([Send, Begin, Receive, End], false),
        ([Send, Begin, End, Receive], false),
        ([Begin, Send, Receive, End], false),
        ([Begin, Send, End, Receive], false),
        ([Begin, End, Send, Receive], true),
    ] {
        let denials = Denials::new(HOUR, Arc::default());
        let (mut undecided, mut change) = (None, None);
        for event in events {
            match event {
                Send => undecided = Some(request.send(&denials, now)),
                Receive => {
                    let denial = request.denial(HOUR);
                    let _ = undecided.take().unwrap().resolve_with(&denials, denial, || now);
                }
                Begin => change = Some(denials.begin_return(&settings, &Key::from("key"))),
                End => drop(change.take()),
            }
        }
        assert_eq!(request.find(&denials, now).is_some(), is_remembered);
    }
}

fn count(denials: &Denials) -> usize {
    let shards = &denials.memory.shards;
    shards.iter().map(|shard| lock(shard).denials.len()).sum()
}

#[test]
fn the_number_of_denials_is_bounded() {
    let (denials, settings, start) =
        (Denials::new(1_000 * MILLISECOND, Arc::default()), bucket(), Instant::now());
    let deny = |key: u32, now| {
        let key = key.to_string();
        Request { key: &key, ..Request::new(&settings) }.deny(&denials, HOUR, now);
    };
    for key in 0..200_000 {
        deny(key, start);
    }
    let full = count(&denials);
    assert!((28_672..=57_344).contains(&full), "{full}: as the documentation says");
    let shards = denials.memory.shards.iter();
    let tables: usize = shards.map(|shard| lock(shard).denials.allocation_size()).sum();
    let keys = 57_344 * 144; // of 128 bytes
    assert!(tables + keys <= 23_000_000, "{tables} bytes, as the documentation says");
    let last = Request { key: "199999", ..Request::new(&settings) };
    assert!(last.find(&denials, start).is_some());
}

#[test]
fn denials_that_are_over_make_room_for_others() {
    let (denials, settings, start) =
        (Denials::new(1_000 * MILLISECOND, Arc::default()), bucket(), Instant::now());
    let keys: Vec<_> = (0..50_000).map(|key: u32| key.to_string()).collect();
    let (over, live) = keys.split_at(25_000);
    let request = |key| Request { key, ..Request::new(&settings) };
    let later = start + 2_000 * MILLISECOND;
    over.iter().for_each(|key| request(key).deny(&denials, HOUR, start));
    live.iter().for_each(|key| request(key).deny(&denials, HOUR, later));
    assert!(live.iter().all(|key| request(key).find(&denials, later).is_some()));
}

/// Uses up the cooperative budget of the task.
async fn exhaust_budget() {
    poll_fn(|cx| {
        while let Poll::Ready(used) = coop::poll_proceed(cx) {
            used.made_progress();
        }
        Poll::Ready(())
    })
    .await;
}

#[tokio::test]
async fn a_remembered_denial_needs_budget_and_a_decision_in_memory_needs_none() {
    let settings = bucket();
    let memory = Limiter::new("default", MemoryStore::new(), settings.algorithm, settings.quota);
    let mut denied = StoreFuture::cached(Request::new(&settings).denial(HOUR));
    assert!(denied.now().is_none(), "it would be taken without budget");
    exhaust_budget().await;
    let polled = poll_fn(|cx| {
        let mut check = std::pin::pin!(memory.check("key"));
        let in_memory = check.as_mut().poll(cx).is_ready();
        Poll::Ready((in_memory, Pin::new(&mut denied).poll(cx).is_ready()))
    });
    assert_eq!(polled.await, (true, false));
    assert!(!denied.await.unwrap().is_allowed());
}

#[derive(Clone, Debug)]
enum Step {
    Pass(u64),
    /// Passes the time until shortly before the last denied request would be allowed.
    Approach(u64),
    /// This process checks. The answer is received now or by a later step.
    Check {
        cost: u32,
        max_wait: usize,
        latency: u64,
        is_late: bool,
    },
    /// Another process.
    Other {
        action: Action,
        cost: u32,
        max_wait: usize,
    },
    Receive,
    /// This process changes the quota.
    ChangeQuota {
        cost: u32,
    },
    Begin(Changing),
    Execute,
    End,
}

#[derive(Clone, Debug)]
enum Changing {
    Refund(u32),
    /// Of the last allowed request.
    Cancel,
    Reset,
    /// For as long as one of the waits.
    Block(usize),
    Unblock,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cost = || 1..4_u32;
    let max_wait = || 0..MAX_WAITS.len();
    let changing = prop_oneof![
        cost().prop_map(Changing::Refund),
        Just(Changing::Cancel),
        Just(Changing::Reset),
        (0..MAX_WAITS.len() - 1).prop_map(Changing::Block),
        Just(Changing::Unblock),
    ];
    let action = prop_oneof![
        6 => Just(Action::Check),
        2 => Just(Action::Spend),
        1 => (0..MAX_WAITS.len() - 1).prop_map(block),
    ];
    let step = prop_oneof![
        5 => (0..4_000_u64).prop_map(Step::Pass),
        2 => (0..150_u64).prop_map(Step::Approach),
        9 => (cost(), max_wait(), 1..300_u64, prop::bool::weighted(0.2)).prop_map(
            |(cost, max_wait, latency, is_late)| Step::Check { cost, max_wait, latency, is_late }
        ),
        3 => (action, cost(), max_wait())
            .prop_map(|(action, cost, max_wait)| Step::Other { action, cost, max_wait }),
        2 => Just(Step::Receive),
        1 => cost().prop_map(|cost| Step::ChangeQuota { cost }),
        1 => changing.prop_map(Step::Begin),
        2 => Just(Step::Execute),
        2 => Just(Step::End),
    ];
    vec(step, 1..200)
}

/// In microseconds.
const MAX_WAITS: [f64; 6] = [0.0, 1e3, 3e3, 8e3, 3e4, 1e6];

fn block(duration: usize) -> Action {
    Action::Block { duration: MAX_WAITS[duration] as i64 }
}

/// A process and its store, with one key. Times are in microseconds.
struct World {
    denials: Denials,
    start: Instant,
    now: u64,
    /// The speed of the clock of the store.
    speed: f64,
    state: State,
    quotas: [Arc<Settings>; 2],
    quota: usize,
    in_flight: Vec<(Undecided, Decision)>,
    begun: Vec<(Changing, Option<Change>, Undecided)>,
    /// Changes that were executed, of which the process does not know yet.
    executed: Vec<(Option<Change>, Undecided)>,
    allowed: Option<(i64, u32)>,
    /// The instant at which the last denied request would be allowed.
    retry_at: u64,
    remembered: u64,
}

impl World {
    fn new(algorithm: Algorithm, speed: f64) -> Self {
        Self {
            denials: Denials::new(HOUR, Arc::default()),
            start: Instant::now(),
            now: 0,
            speed,
            state: State::default(),
            quotas: [5, 8].map(|limit| settings(algorithm, Quota::new(limit, WINDOW))),
            quota: 0,
            in_flight: vec![],
            begun: vec![],
            executed: vec![],
            allowed: None,
            retry_at: 0,
            remembered: 0,
        }
    }

    fn settings(&self) -> Arc<Settings> {
        self.quotas[self.quota].clone()
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    fn engine_request(&self, action: Action, cost: u32, max_wait: f64) -> EngineRequest {
        let now = (1e15 + self.now as f64 * self.speed) as i64;
        let (cost, max_wait) = (cost.into(), max_wait as i64);
        EngineRequest { action, cost, max_wait, now, admission: None, blocked: 0 }
    }

    fn request<'a>(settings: &'a Arc<Settings>, cost: u32, max_wait: usize) -> Request<'a> {
        let max_wait = MAX_WAITS[max_wait].min(settings.params.max_reservable() as f64);
        let cost = cost.min(settings.params.max_cost() as u32);
        Request { cost, max_wait, ..Request::new(settings) }
    }

    fn check(&mut self, cost: u32, max_wait: usize, latency: u64, is_late: bool) {
        let settings = self.settings();
        let request = Self::request(&settings, cost, max_wait);
        let (cost, max_wait) = (request.cost, request.max_wait);
        match request.look_up(&self.denials, Action::Check, self.instant()) {
            Lookup::Denied(denial) => {
                assert!(!denial.is_allowed());
                if self.executed.is_empty() {
                    let engine_request = self.engine_request(Action::Check, cost, max_wait);
                    let reply = settings.params.step(&mut self.state.clone(), &engine_request);
                    assert!(!reply.admitted, "{denial:?} but {reply:?}");
                    self.remembered += 1;
                }
            }
            Lookup::Undecided(undecided) => {
                self.now += latency;
                let engine_request = self.engine_request(Action::Check, cost, max_wait);
                let reply = settings.params.step(&mut self.state, &engine_request);
                match reply.admitted {
                    true => self.allowed = Some((reply.instant, cost)),
                    false => self.retry_at = self.now + reply.known_wait() as u64,
                }
                let decision = Decision::new(settings.policy(cost.into()), reply, 0.0);
                self.in_flight.push((undecided, decision));
                self.now += latency;
                if !is_late {
                    self.receive();
                }
            }
        }
    }

    /// Receives the answer to the last check.
    fn receive(&mut self) {
        if let Some((undecided, decision)) = self.in_flight.pop() {
            let _ = undecided.resolve_with(&self.denials, decision, || self.instant());
        }
    }

    fn begin(&mut self, changing: Changing) {
        let settings = self.settings();
        let key = &Key::from("key");
        let mut undecided = Undecided::default();
        let mut look_up = |action, cost, max_wait| {
            let request = Self::request(&settings, cost, max_wait);
            match request.look_up(&self.denials, action, self.instant()) {
                Lookup::Undecided(sent) => undecided = sent,
                Lookup::Denied(denial) => panic!("{denial:?}"),
            }
        };
        let change = match changing {
            Changing::Refund(cost) => {
                look_up(Action::Refund, cost, 0);
                None
            }
            Changing::Block(rest) => {
                look_up(block(rest), 1, 0);
                None
            }
            Changing::Unblock => {
                look_up(Action::Unblock, 1, 0);
                None
            }
            Changing::Cancel => Some(self.denials.begin_return(&settings, key)),
            Changing::Reset => Some(self.denials.begin_reset(&settings, key)),
        };
        self.begun.push((changing, change, undecided));
    }

    fn execute(&mut self) {
        let Some((changing, change, undecided)) = self.begun.pop() else { return };
        let settings = self.settings();
        match changing {
            Changing::Refund(cost) => {
                let request = self.engine_request(Action::Refund, cost, 0.0);
                let _ = settings.params.step(&mut self.state, &request);
            }
            Changing::Block(rest) => {
                let request = self.engine_request(block(rest), 1, 0.0);
                let _ = settings.params.step(&mut self.state, &request);
            }
            Changing::Unblock => {
                let request = self.engine_request(Action::Unblock, 1, 0.0);
                let _ = settings.params.step(&mut self.state, &request);
            }
            Changing::Cancel => {
                if let Some((instant, cost)) = self.allowed.take() {
                    let units = cost.into();
                    let release = Release { instant: Some(instant), units };
                    let now = self.engine_request(Action::Peek, 1, 0.0).now;
                    settings.params.return_units(&mut self.state, now, &[release]);
                }
            }
            Changing::Reset => self.state = State::default(),
        }
        self.executed.push((change, undecided));
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Pass(time) => self.now += time,
            Step::Approach(time) => self.now = self.now.max(self.retry_at.saturating_sub(time)),
            Step::Check { cost, max_wait, latency, is_late } => {
                self.check(cost, max_wait, latency, is_late);
            }
            Step::Other { action, cost, max_wait } => {
                let settings = self.settings();
                let blocks = matches!(action, Action::Block { .. });
                if blocks && settings.algorithm == Algorithm::LeakyBucket {
                    return; // a request may wait for the end of a block in a bucket that was full
                }
                let Request { cost, max_wait, .. } = Self::request(&settings, cost, max_wait);
                let request = self.engine_request(action, cost, max_wait);
                let _ = settings.params.step(&mut self.state, &request);
            }
            Step::Receive => self.receive(),
            Step::ChangeQuota { cost } => {
                while !self.in_flight.is_empty() {
                    self.receive();
                }
                // A shaper does not say when a count of another quota is over, so its denials can
                // last longer.
                if !self.settings().params.shapes() {
                    self.quota = 1 - self.quota;
                }
                self.check(cost, 0, 1, false);
            }
            Step::Begin(changing) => self.begin(changing),
            Step::Execute => self.execute(),
            Step::End => drop(self.executed.pop()),
        }
    }
}

#[test]
fn a_remembered_denial_denies_only_what_the_engine_would_deny() {
    for algorithm in ALGORITHMS {
        let remembered = AtomicU64::new(0);
        proptest!(|(steps in steps(), speed in 0.9995..1.0005)| {
            let mut world = World::new(algorithm, speed);
            steps.into_iter().for_each(|step| world.step(step));
            remembered.fetch_add(world.remembered, Relaxed);
        });
        let remembered = remembered.into_inner();
        println!("{algorithm}: {remembered} remembered denials");
        assert!(remembered > 0, "{algorithm}: {remembered} remembered denials");
    }
}

#[test]
fn a_denial_of_a_request_that_may_wait_ends_when_the_count_of_another_quota_is_over() {
    let mut world = World::new(Algorithm::token_bucket(), 1.0);
    world.quota = 1; // 8 per window
    for cost in [8, 3] {
        world.step(Step::Other { action: Action::Spend, cost, max_wait: 0 });
    }
    world.step(Step::Pass(10_000));
    world.quota = 0; // 5 per window: the count is over after 13.75 ms, as the other quota counts it
    world.step(Step::Check { cost: 2, max_wait: 2, latency: 1, is_late: false });
    assert!(world.allowed.is_none());
    world.step(Step::Pass(3_751));
    world.step(Step::Check { cost: 2, max_wait: 0, latency: 1, is_late: false });
    assert!(world.allowed.is_some());
}

/// A request with several limits, in the model of their store.
#[derive(Clone, Debug)]
enum OfSeveral {
    Pass(u64),
    /// For each limit the cost, if it is checked.
    Check {
        costs: [Option<u32>; LIMITS],
        max_wait: usize,
        latency: u64,
    },
    /// Another process spends.
    Spend(usize, u32),
    Refund(usize, u32),
}

const LIMITS: usize = 3;
const MAX_LATENCY: Duration = Duration::from_micros(300);

fn of_several() -> impl Strategy<Value = Vec<OfSeveral>> {
    let cost = || 1..4_u32;
    let costs = [(); LIMITS].map(|()| prop::option::weighted(0.6, cost()));
    let step = prop_oneof![
        3 => (0..4_000_u64).prop_map(OfSeveral::Pass),
        9 => (costs, 0..MAX_WAITS.len(), 1..MAX_LATENCY.as_micros() as u64)
            .prop_map(|(costs, max_wait, latency)| OfSeveral::Check { costs, max_wait, latency }),
        1 => (0..LIMITS, cost()).prop_map(|(limit, cost)| OfSeveral::Spend(limit, cost)),
        1 => (0..LIMITS, cost()).prop_map(|(limit, cost)| OfSeveral::Refund(limit, cost)),
    ];
    vec(step, 1..200)
}

/// Limits of different algorithms and windows.
struct Several {
    denials: Denials,
    start: Instant,
    now: u64,
    settings: [Arc<Settings>; LIMITS],
    states: [State; LIMITS],
    remembered: u64,
}

impl Several {
    fn new() -> Self {
        static NAMES: [&str; LIMITS] = ["seconds", "minutes", "days"];
        let algorithms = [
            Algorithm::token_bucket(),
            Algorithm::sliding_window().buckets(4),
            Algorithm::FixedWindow,
        ];
        let settings = [0, 1, 2].map(|i| {
            let quota = Quota::new(4 + 2 * i as u64, WINDOW * (1 + i as u32));
            let Settings { algorithm, quota, params, source, .. } = *settings(algorithms[i], quota);
            Arc::new(Settings::new(NAMES[i], algorithm, quota, params, source))
        });
        let states = [(); LIMITS].map(|()| State::default());
        let (denials, start) = (Denials::new(HOUR, Arc::default()), Instant::now());
        Self { denials, start, now: 0, settings, states, remembered: 0 }
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    /// Decides about the limits with these indexes.
    fn decide(
        &self,
        states: &mut [State; LIMITS],
        action: Action,
        limits: &[(usize, u32)],
        max_wait: f64,
    ) -> Decision {
        let now = 1_000_000_000_000_000 + self.now as i64;
        let request = |&(_, cost): &(usize, u32)| EngineRequest {
            action,
            cost: cost.into(),
            max_wait: max_wait as i64,
            now,
            admission: None,
            blocked: 0,
        };
        let requests: Vec<_> = limits.iter().map(request).collect();
        let Combined { replies, binding: index } = combine(&requests, |index, request| {
            let limit = limits[index].0;
            self.settings[limit].params.step(&mut states[limit], request)
        });
        let (limit, cost) = limits[index];
        Decision::new(self.settings[limit].policy(cost.into()), replies[index], 0.0)
    }

    fn check(&mut self, limits: &[(usize, u32)], max_wait: f64, latency: u64) {
        let settings = self.settings.clone();
        let request = |&(limit, cost): &(usize, u32)| Request {
            cost,
            max_wait,
            ..Request::new(&settings[limit])
        };
        let requests: Vec<_> = limits.iter().map(request).collect();
        let mut states = self.states.clone();
        match look_up_all(&self.denials, Action::Check, &requests, self.instant()) {
            Lookup::Denied(denial) => {
                let decision = self.decide(&mut states, Action::Check, limits, max_wait);
                assert!(!decision.is_allowed(), "{denial:?} but {decision:?}");
                // The wait counts from the receipt of the answer.
                let wait = decision.retry_after().unwrap() + MAX_LATENCY;
                assert!(denial.retry_after() <= Some(wait), "{denial:?} but {decision:?}");
                self.remembered += 1;
            }
            Lookup::Undecided(undecided) => {
                self.now += latency;
                let decision = self.decide(&mut states, Action::Check, limits, max_wait);
                self.states = states;
                self.now += latency;
                let now = self.instant();
                let _ = undecided.resolve_with(&self.denials, decision, || now);
            }
        }
    }

    fn step(&mut self, step: OfSeveral) {
        match step {
            OfSeveral::Pass(time) => self.now += time,
            OfSeveral::Check { costs, max_wait, latency } => {
                let limits: Vec<_> = costs.into_iter().enumerate().collect();
                let limits = limits.into_iter().filter_map(|(limit, cost)| Some((limit, cost?)));
                let limits: Vec<_> = limits.collect();
                if !limits.is_empty() {
                    self.check(&limits, MAX_WAITS[max_wait], latency);
                }
            }
            OfSeveral::Spend(limit, cost) => {
                let mut states = self.states.clone();
                let _ = self.decide(&mut states, Action::Spend, &[(limit, cost)], 0.0);
                self.states = states;
            }
            OfSeveral::Refund(limit, cost) => {
                let change = self.denials.begin_return(&self.settings[limit], &Key::from("key"));
                let mut states = self.states.clone();
                let _ = self.decide(&mut states, Action::Refund, &[(limit, cost)], 0.0);
                self.states = states;
                drop(change);
            }
        }
    }
}

#[test]
fn a_remembered_denial_of_one_limit_denies_only_what_several_limits_would_deny() {
    let remembered = AtomicU64::new(0);
    proptest!(|(steps in of_several())| {
        let mut several = Several::new();
        steps.into_iter().for_each(|step| several.step(step));
        remembered.fetch_add(several.remembered, Relaxed);
    });
    let remembered = remembered.into_inner();
    println!("{remembered} remembered denials");
    assert!(remembered > 0);
}
