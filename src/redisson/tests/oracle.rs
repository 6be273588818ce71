//! Random steps of Rust and Java clients, and an oracle that knows the permits taken: at most the
//! rate in any interval, also after keys are lost, clocks step back or rates change.

use std::{cell::RefCell, collections::HashMap};

use proptest::{
    prelude::*,
    test_runner::{TestCaseError, TestRunner},
};

use super::harness::{Entry, Harness, Id, RedisServer, START};

#[derive(Clone, Debug)]
enum Step {
    /// Advances the time, by 1/1000 of the interval and by microseconds.
    Pass(u64, u64),
    /// Sets the clock of the server back, in 1/1000 of the interval.
    ClockBack(u64),
    Acquire(u32),
    /// Executes the script of an acquire again.
    Repeat(prop::sample::Index),
    /// Releases quarters of the permits of an acquire.
    ReleaseAcquire(prop::sample::Index, u32),
    Release(u32),
    Available,
    Update(u64, u64),
    Set,
    /// Sets the time to live, or the keep-alive time, in milliseconds.
    Expire(u64),
    KeepAlive(u64),
    ClearExpire,
    LoseValue,
    LosePermits,
    LoseTally,
    /// The number of the Java client; their clocks differ. Then the permits.
    JavaAcquire(usize, u32),
    JavaAvailable(usize),
    JavaRelease(u32),
    JavaUpdate(u64, u64),
    /// Changes the rate with `redis-cli`.
    HandUpdate(u64),
    /// Changes the rate of the template, and acquires permits.
    SetTemplate(u64, u64, u32),
}

fn steps(java: bool) -> impl Strategy<Value = Vec<Step>> {
    let pass = prop_oneof![6 => 0_u64..100, 3 => Just(0), 1 => 100_u64..1_200, 1 => 999_u64..1_001];
    let permits = || 1_u32..6;
    let (rate, interval) = (|| 1_u64..12, || prop_oneof![3 => Just(1_000_u64), 1 => 1_u64..3_000]);
    let ours = prop_oneof![
        10 => (pass, 0_u64..1_000).prop_map(|(part, us)| Step::Pass(part, us)),
        12 => permits().prop_map(Step::Acquire),
        1 => any::<prop::sample::Index>().prop_map(Step::Repeat),
        2 => (any::<prop::sample::Index>(), 1_u32..5)
            .prop_map(|(which, quarters)| Step::ReleaseAcquire(which, quarters)),
        1 => permits().prop_map(Step::Release),
        1 => Just(Step::Available),
        1 => (rate(), interval()).prop_map(|(rate, interval)| Step::Update(rate, interval)),
        1 => (0_u64..5_000).prop_map(Step::Expire),
        1 => (3_000_u64..9_000).prop_map(Step::KeepAlive),
        1 => Just(Step::ClearExpire),
        1 => Just(Step::LoseValue),
        1 => Just(Step::LosePermits),
        1 => Just(Step::LoseTally),
    ];
    let rare = prop_oneof![
        1 => prop_oneof![1_u64..1_500, Just(10_000)].prop_map(Step::ClockBack),
        1 => Just(Step::Set),
        1 => rate().prop_map(Step::HandUpdate),
        2 => (rate(), interval(), permits())
            .prop_map(|(rate, interval, permits)| Step::SetTemplate(rate, interval, permits)),
    ];
    let theirs = prop_oneof![
        8 => (0_usize..3, permits())
            .prop_map(|(client, permits)| Step::JavaAcquire(client, permits)),
        1 => (0_usize..3).prop_map(Step::JavaAvailable),
        1 => permits().prop_map(Step::JavaRelease),
        1 => (rate(), interval()).prop_map(|(rate, interval)| Step::JavaUpdate(rate, interval)),
    ];
    let step = prop_oneof![
        20 => ours,
        1 => rare,
        if java { 10 } else { 0 } => theirs,
    ];
    prop::collection::vec(step, 1..80)
}

/// Permits that were taken, independently of the log.
#[derive(Clone, Debug)]
struct Taken {
    /// The time in microseconds of a clock that never steps back.
    at: u64,
    id: Id,
    permits: u64,
    /// True if the log has lost the entry.
    lost: bool,
}

struct Oracle {
    rate: u64,
    interval: u64,
    taken: Vec<Taken>,
    /// The microseconds by which the server's clock is behind a clock that never steps back.
    behind: u64,
    acquires: Vec<(Id, u32)>,
    /// The permits of the entry that replaces lost entries.
    stand_in: u64,
    /// True if the rate has changed since `value` was last written.
    by_hand: bool,
    /// The permits by which `value` and the log exceed the rate before a step: a Java client that
    /// finds no `value` sets it as if the log were empty.
    excess: i64,
    /// The milliseconds by which the clocks of the Java clients are ahead of the server's.
    skews: [i64; 3],
    java: bool,
}

impl Oracle {
    fn now(&self, harness: &Harness) -> u64 {
        harness.now + self.behind
    }

    /// Drops permits that have expired.
    fn prune(&mut self, harness: &Harness) {
        let (now, interval) = (self.now(harness), self.interval * 1_000);
        self.taken.retain(|taken| taken.at + interval > now);
    }

    /// Sets the rate again if the limiter has expired, together with its permits.
    fn recreate(&mut self, harness: &mut Harness) {
        harness.tick();
        if harness.command::<u64>(&["EXISTS", "LIMITER_NAME"]) == 0 {
            assert!(harness.set("try", self.rate, self.interval, 0));
            let rate = format!("{} {} 0", self.rate, self.interval);
            harness.command::<()>(&["HSET", "LIMITER_NAME", "template", &rate]);
            harness.template_rate = rate + " 9000";
            self.taken.clear();
        }
    }

    fn live(&self) -> u64 {
        self.taken.iter().map(|taken| taken.permits).sum()
    }

    fn take(&mut self, harness: &Harness, at: u64, id: Id, permits: u64) {
        let at = at.min(self.now(harness));
        self.taken.push(Taken { at, id, permits, lost: false });
    }

    /// Forgets permits that were released, or swept by a Java client whose clock is wrong.
    fn follow(&mut self, harness: &mut Harness) {
        let log: HashMap<Id, u64> =
            harness.log().iter().map(|entry| (entry.id(), entry.permits())).collect();
        let stand_in = stand_in(harness);
        self.taken.retain_mut(|taken| {
            if !taken.lost {
                taken.permits = log.get(&taken.id).copied().unwrap_or(0);
            }
            taken.permits > 0
        });
        let mut released = self.stand_in.saturating_sub(stand_in);
        for taken in self.taken.iter_mut().filter(|taken| taken.lost) {
            let part = released.min(taken.permits);
            (taken.permits, released) = (taken.permits - part, released - part);
        }
    }

    /// Returns the permits in use according to `value`.
    fn unlogged(&self, harness: &mut Harness) -> u64 {
        let left = harness.value().map_or(self.rate as i64, |left| left.parse().unwrap());
        (self.rate as i64 - left).max(0) as u64
    }

    /// Handles the loss of the log: `value` decides how many permits are in use.
    fn lose(&mut self, harness: &mut Harness) {
        self.stand_in = 0;
        if harness.value().is_none() {
            return self.taken.clear();
        }
        self.taken.iter_mut().for_each(|taken| taken.lost = true);
        if self.java || self.by_hand {
            // `value` may differ from the permits taken.
            let used = self.unlogged(harness);
            let at = self.now(harness);
            self.taken = vec![Taken { at, id: [0; 16], permits: used, lost: true }];
        }
    }

    /// Handles a call that finds no log.
    fn lose_unlogged(&mut self, harness: &mut Harness) {
        if harness.log().is_empty() {
            self.lose(harness);
        }
    }

    /// Limits the permits of a request to the rate.
    fn at_most_rate(&self, permits: u32) -> u32 {
        permits.min(self.rate as u32)
    }
}

/// Returns true if the rate was inherited from a template.
fn is_inherited(harness: &mut Harness) -> bool {
    let fields = ["HMGET", "LIMITER_NAME", "rate", "interval", "type", "template"];
    let fields: [Option<String>; 4] = harness.command(&fields);
    let [rate, interval, kind, template] = fields.map(Option::unwrap_or_default);
    template == format!("{rate} {interval} {kind}")
}

/// Returns the permits of the entry with which the scripts replace a lost log.
fn stand_in(harness: &mut Harness) -> u64 {
    harness.log().iter().find(|entry| entry.id() == [0; 16]).map_or(0, Entry::permits)
}

/// Returns the permits by which `value` and all entries of the log together exceed the rate.
fn excess(harness: &mut Harness, rate: u64) -> i64 {
    let value = harness.value().map_or(0, |value| value.parse::<i64>().unwrap());
    let sum: i64 = harness.log().iter().map(|entry| entry.permits() as i64).sum();
    (value + sum - rate as i64).max(0)
}

const SKEWS: [[i64; 3]; 5] =
    [[0, 0, 0], [0, 40, -30], [0, 900, -700], [0, 4_000, 0], [0, 100_000, -100_000]];

fn check(
    harness: &mut Harness,
    steps: &[Step],
    rate: u64,
    skews: [i64; 3],
    java: bool,
) -> Result<(), TestCaseError> {
    harness.reset();
    harness.now = START;
    let mut oracle = Oracle {
        rate,
        interval: 1_000,
        taken: vec![],
        behind: 0,
        acquires: vec![],
        stand_in: 0,
        by_hand: false,
        excess: 0,
        skews,
        java,
    };
    oracle.recreate(harness);
    for step in steps {
        oracle.prune(harness);
        oracle.recreate(harness);
        oracle.stand_in = stand_in(harness);
        oracle.excess = excess(harness, oracle.rate);
        one_step(harness, &mut oracle, step)?;
    }

    // In the end, all permits can be taken again. Entries far ahead may have to wait for other
    // entries first, and then leave within three intervals.
    let interval = oracle.interval;
    for _ in 0..3 {
        oracle.recreate(harness);
        for _ in 0..=harness.log().len() {
            let _ = harness.take(1); // a call drops a limited number of entries
        }
        harness.advance(2 * interval + 1);
    }
    oracle.recreate(harness);
    prop_assert_eq!(harness.available(), oracle.rate);
    prop_assert!(harness.take(oracle.rate as u32), "permits are lost: {:?}", harness.log());
    Ok(())
}

fn one_step(harness: &mut Harness, oracle: &mut Oracle, step: &Step) -> Result<(), TestCaseError> {
    pass_or_lose(harness, oracle, step);
    acquire_or_release(harness, oracle, step)?;
    change_settings(harness, oracle, step)?;
    change_rate_from_outside(harness, oracle, step)?;
    call_from_java(harness, oracle, step);
    if matches!(step, Step::HandUpdate(_) | Step::JavaUpdate(..)) && is_inherited(harness) {
        // By chance, this is the rate that was inherited before.
        harness.command::<()>(&["HDEL", "LIMITER_NAME", "template"]);
    }
    Ok(())
}

fn pass_or_lose(harness: &mut Harness, oracle: &mut Oracle, step: &Step) {
    match *step {
        Step::Pass(part, us) => harness.now += part * oracle.interval + us,
        Step::ClockBack(part) => {
            let back = part * oracle.interval;
            harness.now -= back;
            oracle.behind += back;
        }
        Step::LoseValue => {
            harness.lose(1);
            if harness.log().is_empty() {
                oracle.taken.clear();
            }
        }
        Step::LosePermits => {
            oracle.lose(harness);
            harness.lose(3);
        }
        Step::LoseTally => harness.lose(5),
        _ => {}
    }
}

fn acquire_or_release(
    harness: &mut Harness,
    oracle: &mut Oracle,
    step: &Step,
) -> Result<(), TestCaseError> {
    match *step {
        Step::Acquire(permits) => {
            let id = harness.id();
            acquire(harness, oracle, oracle.at_most_rate(permits), id)
        }
        Step::Repeat(which) if !oracle.acquires.is_empty() => {
            let (id, permits) = oracle.acquires[which.index(oracle.acquires.len())];
            // After a partial release, the script would be another request.
            let is_changed =
                |entry: &Entry| entry.id() == id && entry.permits() != u64::from(permits);
            let is_same = !harness.log().iter().any(is_changed);
            if u64::from(permits) <= oracle.rate && is_same {
                acquire(harness, oracle, permits, id)?;
            }
            Ok(())
        }
        Step::ReleaseAcquire(which, quarters) if !oracle.acquires.is_empty() => {
            let which = which.index(oracle.acquires.len());
            let (id, permits) = oracle.acquires[which];
            let part = (permits * quarters).div_ceil(4);
            harness.release_taken(part, permits, &id);
            oracle.acquires[which].1 = permits - part;
            oracle.acquires.retain(|(_, permits)| *permits > 0);
            oracle.follow(harness);
            consistent(harness, oracle)
        }
        Step::Release(permits) => release(harness, oracle, permits),
        Step::Available => {
            let before = harness.dump();
            let available = harness.available();
            prop_assert!(available <= oracle.rate);
            prop_assert_eq!(harness.dump(), before);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn release(harness: &mut Harness, oracle: &mut Oracle, permits: u32) -> Result<(), TestCaseError> {
    let live = |harness: &mut Harness| {
        let start = harness.now_ms() - oracle.interval;
        let log = harness.log();
        log.iter().filter(|entry| entry.score > start).map(Entry::permits).sum::<u64>()
    };
    let before = live(harness);
    if harness.log().is_empty() {
        oracle.stand_in = oracle.unlogged(harness);
    }
    let latest = harness.now_ms() + oracle.interval;
    let near = harness.log().iter().all(|entry| entry.score <= latest);
    harness.release(permits);
    let after = live(harness);
    if before > 0 && near {
        prop_assert_eq!(before - after, before.min(permits.into()));
    }
    oracle.follow(harness);
    consistent(harness, oracle)
}

fn change_settings(
    harness: &mut Harness,
    oracle: &mut Oracle,
    step: &Step,
) -> Result<(), TestCaseError> {
    match *step {
        Step::Update(rate, interval) => {
            prop_assert!(harness.set("update", rate, interval, 0));
            (oracle.rate, oracle.interval) = (rate, interval);
            consistent(harness, oracle)?;
        }
        Step::Set => {
            harness.set("set", oracle.rate, oracle.interval, 0);
            oracle.taken.clear();
        }
        Step::Expire(ms) => {
            prop_assert!(harness.expire(&ms.max(1).to_string()));
        }
        Step::KeepAlive(ms) => {
            let (rate, interval) = (oracle.rate, oracle.interval);
            harness.set_and_keep_alive("update", rate, interval, 0, &ms.to_string());
            consistent(harness, oracle)?;
        }
        Step::ClearExpire => {
            harness.expire("");
        }
        _ => {}
    }
    Ok(())
}

fn change_rate_from_outside(
    harness: &mut Harness,
    oracle: &mut Oracle,
    step: &Step,
) -> Result<(), TestCaseError> {
    match *step {
        Step::HandUpdate(rate) => {
            harness.command::<()>(&["HSET", "LIMITER_NAME", "rate", &rate.to_string()]);
            (oracle.rate, oracle.by_hand) = (rate, true);
            oracle.lose_unlogged(harness);
        }
        Step::SetTemplate(rate, interval, permits) => {
            harness.template_rate = format!("{rate} {interval} 0 9000");
            if is_inherited(harness) {
                (oracle.rate, oracle.interval, oracle.by_hand) = (rate, interval, true);
                oracle.prune(harness);
                oracle.lose_unlogged(harness);
            }
            let id = harness.id();
            acquire(harness, oracle, oracle.at_most_rate(permits), id)?;
            let config = harness.config().unwrap();
            prop_assert_eq!((config[0], config[1]), (oracle.rate, oracle.interval));
        }
        _ => {}
    }
    Ok(())
}

fn call_from_java(harness: &mut Harness, oracle: &mut Oracle, step: &Step) {
    match *step {
        Step::JavaAcquire(client, permits) => {
            let (permits, skew, id) =
                (oracle.at_most_rate(permits), oracle.skews[client], harness.id());
            let empty = harness.log().is_empty();
            let granted = harness.java_acquire(permits, skew, id) == Some(Ok(()));
            if empty && granted {
                oracle.taken.clear(); // the entry of Java hides an earlier loss
            }
            oracle.follow(harness);
            if granted {
                // In whole milliseconds of the client's clock.
                let at = harness.now_ms().saturating_add_signed(skew.min(0)) * 1_000;
                oracle.take(harness, at + oracle.behind, id, permits.into());
            }
        }
        Step::JavaAvailable(client) => {
            let _ = harness.java_available(oracle.skews[client]);
            oracle.follow(harness);
        }
        Step::JavaRelease(permits) => {
            harness.java_release(permits);
            oracle.lose_unlogged(harness);
        }
        Step::JavaUpdate(rate, interval) => {
            harness.java_update(rate, interval);
            (oracle.rate, oracle.interval) = (rate, interval);
            oracle.lose_unlogged(harness);
        }
        _ => {}
    }
}

fn acquire(
    harness: &mut Harness,
    oracle: &mut Oracle,
    permits: u32,
    id: Id,
) -> Result<(), TestCaseError> {
    let time_of = |harness: &mut Harness| {
        harness.log().iter().find(|entry| entry.id() == id).map(|entry| entry.score)
    };
    let now = harness.now_ms();
    let old_time = time_of(harness).filter(|time| *time > now - oracle.interval);
    let reply = harness.acquire(permits, id);
    harness.trace();
    oracle.acquires.push((id, permits));
    if old_time.is_some_and(|time| time <= now + oracle.interval) {
        prop_assert!(reply.granted(), "a repeated script is denied");
    }
    if old_time.is_some() && old_time == time_of(harness) {
        oracle.follow(harness);
        return consistent(harness, oracle);
    }
    if reply.granted() {
        oracle.take(harness, oracle.now(harness), id, permits.into());
        prop_assert!(
            oracle.live() <= oracle.rate,
            "{} of {}: {:?}",
            oracle.live(),
            oracle.rate,
            oracle.taken
        );
    } else {
        prop_assert!(reply.wait > 0);
    }
    consistent(harness, oracle)
}

/// Checks that `value` and the log agree.
fn consistent(harness: &mut Harness, oracle: &mut Oracle) -> Result<(), TestCaseError> {
    oracle.by_hand = false;
    let log = harness.log();
    let sum: i64 = log.iter().map(|entry| entry.permits() as i64).sum();
    let value = harness.value().map(|value| value.parse::<i64>().unwrap());
    let start = harness.now_ms() - oracle.interval;
    if log.is_empty() {
        prop_assert!(
            value.is_none_or(|value| value == oracle.rate as i64),
            "no log, but a value: {:?}",
            value
        );
    } else if log[0].score > start {
        prop_assert_eq!(value.unwrap() + sum, oracle.rate as i64);
    } else {
        // Not all expired entries were swept. Until they are, an excess stays.
        let all = value.unwrap() + sum;
        prop_assert!(all <= oracle.rate as i64 + oracle.excess, "{:?} and {}", value, sum);
    }
    Ok(())
}

/// Checks the steps with quick.lua, and with acquire.lua alone.
fn check_both_parts(
    harness: &mut Harness,
    steps: &[Step],
    rate: u64,
    skews: [i64; 3],
    java: bool,
) -> Result<(), TestCaseError> {
    harness.is_slow = false;
    check(harness, steps, rate, skews, java)?;
    let traces = harness.traces.split_off(0);
    harness.is_slow = true;
    check(harness, steps, rate, skews, java)?;
    prop_assert_eq!(traces, harness.traces.split_off(0), "both parts decide the same");
    Ok(())
}

fn check_random(java: bool, skews: impl Strategy<Value = [i64; 3]>) {
    let server = RedisServer::start();
    let harness = RefCell::new(Harness::new(&server));
    let cases = std::env::var("CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(400);
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(steps(java), 1_u64..12, any::<[bool; 2]>(), skews), |(steps, rate, flags, skews)| {
            let mut harness = harness.borrow_mut();
            [harness.tiny, harness.drops_tally] = flags;
            check_both_parts(&mut harness, &steps, rate, skews, java)
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn rust_clients_never_exceed_the_rate_even_if_keys_are_lost_or_scripts_repeated() {
    check_random(false, Just([0; 3]));
}

#[test]
fn rust_and_java_clients_never_exceed_the_rate() {
    check_random(true, Just([0; 3]));
}

#[test]
fn java_clients_with_wrong_clocks_do_not_make_rust_clients_exceed_the_rate() {
    check_random(true, prop::sample::select(&SKEWS[1..]));
}

#[test]
fn all_permits_return_after_clocks_were_far_ahead_of_each_other() {
    use Step::{ClockBack, Expire, JavaAcquire, JavaUpdate, KeepAlive, Pass};
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    let steps = [
        KeepAlive(3_994),
        JavaAcquire(1, 1),
        ClockBack(1),
        JavaAcquire(2, 1),
        ClockBack(10_000),
        Expire(0),
        JavaAcquire(1, 1),
        Pass(18, 0),
        JavaUpdate(1, 1_996),
    ];
    for tiny in [false, true] {
        harness.tiny = tiny;
        check(&mut harness, &steps, 3, [0, 4_000, 0], true).unwrap();
    }
}

#[test]
fn clocks_that_were_far_ahead_stay_known_while_the_log_grows() {
    use Step::{Acquire, HandUpdate, JavaAcquire, Pass, Update};
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.tiny = true;
    let steps = [
        JavaAcquire(1, 1),
        Pass(1, 0),
        Update(4, 1_000),
        HandUpdate(1),
        JavaAcquire(1, 1),
        Pass(495, 463),
        Acquire(1),
        Update(3, 1_753),
        Pass(999, 290),
        Acquire(1),
        Update(1, 1_000),
        Acquire(1),
    ];
    check_both_parts(&mut harness, &steps, 1, [0, 4_000, 0], true).unwrap();
}

#[test]
fn the_tally_of_a_log_that_was_lost_does_not_describe_the_next_one() {
    use Step::{Acquire, JavaAcquire, JavaUpdate, LosePermits, Pass, Release, Update};
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.tiny = true;
    let steps = [
        Update(5, 1_000),
        JavaAcquire(0, 3),
        LosePermits,
        Release(2), // leaves one permit in the entry that replaces the log
        Pass(0, 1),
        Acquire(1),
        JavaAcquire(0, 2),
        Acquire(2), // denied: stores the tally
        LosePermits,
        Acquire(1),
        Release(3), // leaves the same entry again
        JavaUpdate(7, 1_000),
        Acquire(1),
        Acquire(1), // found as many entries as in the tally, and the same oldest one
    ];
    check_both_parts(&mut harness, &steps, 1, [0; 3], true).unwrap();
}

#[test]
fn a_value_that_java_set_anew_is_mended_when_the_log_is_swept() {
    use Step::{Acquire, HandUpdate, JavaAcquire, LoseValue, Pass};
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    harness.tiny = true;
    let steps = [
        Pass(0, 0),
        HandUpdate(8),
        JavaAcquire(0, 1),
        Acquire(1),
        JavaAcquire(2, 1),
        JavaAcquire(2, 1),
        Acquire(1),
        LoseValue,
        JavaAcquire(2, 1),
        JavaAcquire(2, 1),
        LoseValue,
        Pass(300, 0),
        JavaAcquire(0, 1),
        Acquire(1),
        // Sweeps the last expired entry: the log and `value` agree exactly.
        Acquire(1),
    ];
    check_both_parts(&mut harness, &steps, 1, [0, 900, -700], true).unwrap();
}

#[test]
fn permits_of_java_count_from_a_whole_millisecond_of_the_clients_clock() {
    use Step::{Acquire, ClockBack, JavaAcquire, JavaUpdate, Pass};
    let server = RedisServer::start();
    let mut harness = Harness::new(&server);
    let steps = [
        JavaUpdate(1, 500),
        // Half a millisecond.
        ClockBack(1),
        JavaAcquire(0, 1),
        Pass(999, 0),
        Acquire(1),
    ];
    check(&mut harness, &steps, 1, [0; 3], true).unwrap();
}
