//! Never more than the rate in any interval, whatever happens in between.

use std::{cell::RefCell, collections::HashMap};

use proptest::{
    prelude::*,
    test_runner::{TestCaseError, TestRunner},
};

use super::world::{Entry, Id, RedisServer, START, World};

#[derive(Clone, Debug)]
enum Step {
    /// Time passes, in 1/1000 of the interval and microseconds.
    Pass(u64, u64),
    /// The clock of the server steps back.
    ClockBack(u64),
    Acquire(u32),
    /// The same `EVAL` once more.
    Repeat(prop::sample::Index),
    /// Of what an acquire has taken, so many quarters.
    GiveBack(prop::sample::Index, u32),
    Release(u32),
    Available,
    Update(u64, u64),
    Set,
    /// The limiter shall expire so late, in milliseconds, or be kept alive for so long, or not expire.
    Expire(u64),
    KeepAlive(u64),
    ClearExpire,
    LoseValue,
    LosePermits,
    LoseTally,
    /// Which of the Java clients; their clocks are off.
    JavaAcquire(usize, u32),
    JavaAvailable(usize),
    JavaRelease(u32),
    JavaUpdate(u64, u64),
    /// An operator changes the rate with redis-cli.
    HandUpdate(u64),
    /// The template has another rate, and the next acquire brings it.
    Lend(u64, u64, u32),
}

fn steps(java: bool) -> impl Strategy<Value = Vec<Step>> {
    let pass = prop_oneof![6 => 0_u64..100, 3 => Just(0), 1 => 100_u64..1_200, 1 => 999_u64..1_001];
    let some = || 1_u32..6;
    let (rate, interval) = (|| 1_u64..12, || prop_oneof![3 => Just(1_000_u64), 1 => 1_u64..3_000]);
    let ours = prop_oneof![
        10 => (pass, 0_u64..1_000).prop_map(|(part, us)| Step::Pass(part, us)),
        12 => some().prop_map(Step::Acquire),
        1 => any::<prop::sample::Index>().prop_map(Step::Repeat),
        2 => (any::<prop::sample::Index>(), 1_u32..5)
            .prop_map(|(which, quarters)| Step::GiveBack(which, quarters)),
        1 => some().prop_map(Step::Release),
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
        2 => (rate(), interval(), some())
            .prop_map(|(rate, interval, permits)| Step::Lend(rate, interval, permits)),
    ];
    let theirs = prop_oneof![
        8 => (0_usize..3, some()).prop_map(|(who, permits)| Step::JavaAcquire(who, permits)),
        1 => (0_usize..3).prop_map(Step::JavaAvailable),
        1 => some().prop_map(Step::JavaRelease),
        1 => (rate(), interval()).prop_map(|(rate, interval)| Step::JavaUpdate(rate, interval)),
    ];
    let step = prop_oneof![
        20 => ours,
        1 => rare,
        if java { 10 } else { 0 } => theirs,
    ];
    prop::collection::vec(step, 1..80)
}

/// Permits that were taken, as the world knows it, whatever the log says.
#[derive(Clone, Debug)]
struct Taken {
    /// In microseconds of a clock that never steps back.
    at: u64,
    id: Id,
    permits: u64,
    /// Whether it had an entry in the log that was lost since.
    lost: bool,
}

struct History {
    rate: u64,
    interval: u64,
    taken: Vec<Taken>,
    /// What the server's clock is behind of one that never steps back.
    behind: u64,
    asked: Vec<(Id, u32)>,
    /// What stands for the entries that were lost.
    stand_in: u64,
    /// Whether `value` was last written by a rate that is not the rate any more.
    by_hand: bool,
    /// The clocks of the Java clients, in milliseconds from that of the server.
    skews: [i64; 3],
    java: bool,
}

impl History {
    fn now(&self, world: &World) -> u64 {
        world.now + self.behind
    }

    /// Drops what is over.
    fn prune(&mut self, world: &World) {
        let (now, interval) = (self.now(world), self.interval * 1_000);
        self.taken.retain(|it| it.at + interval > now);
    }

    /// When the limiter has expired, or what it had is gone with it, it is made anew.
    fn exist(&mut self, world: &mut World) {
        world.tick();
        if world.command::<u64>(&["EXISTS", "LIMITER_NAME"]) == 0 {
            assert!(world.set("try", self.rate, self.interval, 0));
            let lent = format!("{} {} 0", self.rate, self.interval);
            world.command::<()>(&["HSET", "LIMITER_NAME", "template", &lent]);
            world.lent = lent + " 9000";
            self.taken.clear();
        }
    }

    fn live(&self) -> u64 {
        self.taken.iter().map(|it| it.permits).sum()
    }

    fn take(&mut self, world: &World, at: u64, id: Id, permits: u64) {
        let at = at.min(self.now(world));
        self.taken.push(Taken { at, id, permits, lost: false });
    }

    /// Follows what was taken out of the log on purpose, or by a Java client whose clock is off.
    fn follow(&mut self, world: &mut World) {
        let log: HashMap<Id, u64> = world.log().iter().map(|it| (it.id(), it.permits())).collect();
        let stand_in = stand_in(world);
        self.taken.retain_mut(|it| {
            if !it.lost {
                it.permits = log.get(&it.id).copied().unwrap_or(0);
            }
            it.permits > 0
        });
        let mut given_back = self.stand_in.saturating_sub(stand_in);
        for it in self.taken.iter_mut().filter(|it| it.lost) {
            let back = given_back.min(it.permits);
            (it.permits, given_back) = (it.permits - back, given_back - back);
        }
    }

    /// What `value` says is in use, where there is no log.
    fn unlogged(&self, world: &mut World) -> u64 {
        let left = world.value().map_or(self.rate as i64, |left| left.parse().unwrap());
        (self.rate as i64 - left).max(0) as u64
    }

    /// The entries are lost, and `value` says how many permits are in use.
    fn lose(&mut self, world: &mut World) {
        self.stand_in = 0;
        if world.value().is_none() {
            return self.taken.clear();
        }
        self.taken.iter_mut().for_each(|it| it.lost = true);
        if self.java || self.by_hand {
            // `value` may say anything.
            let used = self.unlogged(world);
            let at = self.now(world);
            self.taken = vec![Taken { at, id: [0; 16], permits: used, lost: true }];
        }
    }

    /// A call without a log to read has lost the entries.
    fn lose_unlogged(&mut self, world: &mut World) {
        if world.log().is_empty() {
            self.lose(world);
        }
    }

    /// The permits of a request, which are at most the rate.
    fn permits(&self, some: u32) -> u32 {
        some.min(self.rate as u32)
    }
}

/// Whether the rate is the one that a template has lent.
fn is_lent(world: &mut World) -> bool {
    let fields = ["HMGET", "LIMITER_NAME", "rate", "interval", "type", "template"];
    let fields: [Option<String>; 4] = world.command(&fields);
    let [rate, interval, kind, template] = fields.map(Option::unwrap_or_default);
    template == format!("{rate} {interval} {kind}")
}

/// The permits of the entry that the scripts put in the place of a lost log.
fn stand_in(world: &mut World) -> u64 {
    world.log().iter().find(|it| it.id() == [0; 16]).map_or(0, |it| it.permits())
}

const SKEWS: [[i64; 3]; 5] =
    [[0, 0, 0], [0, 40, -30], [0, 900, -700], [0, 4_000, 0], [0, 100_000, -100_000]];

fn history(
    world: &mut World,
    steps: &[Step],
    rate: u64,
    skews: [i64; 3],
    java: bool,
) -> Result<(), TestCaseError> {
    world.forget();
    world.now = START;
    let mut it = History {
        rate,
        interval: 1_000,
        taken: vec![],
        behind: 0,
        asked: vec![],
        stand_in: 0,
        by_hand: false,
        skews,
        java,
    };
    it.exist(world);
    for step in steps {
        it.prune(world);
        it.exist(world);
        it.stand_in = stand_in(world);
        one_step(world, &mut it, step)?;
    }

    // It heals: whatever happened, all permits can be taken again after a while.
    // What is far ahead may first have to wait for other entries, and then leaves within three intervals.
    let interval = it.interval;
    for _ in 0..3 {
        it.exist(world);
        for _ in 0..=world.log().len() {
            let _ = world.take(1); // a call drops only so many entries
        }
        world.advance(2 * interval + 1);
    }
    it.exist(world);
    prop_assert_eq!(world.available(), it.rate);
    prop_assert!(world.take(it.rate as u32), "it does not heal: {:?}", world.log());
    Ok(())
}

fn one_step(world: &mut World, history: &mut History, step: &Step) -> Result<(), TestCaseError> {
    pass_or_lose(world, history, step);
    acquire_or_release(world, history, step)?;
    change_settings(world, history, step)?;
    change_rate_from_outside(world, history, step)?;
    call_from_java(world, history, step);
    if matches!(step, Step::HandUpdate(_) | Step::JavaUpdate(..)) && is_lent(world) {
        // By chance the rate that was lent once.
        world.command::<()>(&["HDEL", "LIMITER_NAME", "template"]);
    }
    Ok(())
}

fn pass_or_lose(world: &mut World, history: &mut History, step: &Step) {
    match *step {
        Step::Pass(part, us) => world.now += part * history.interval + us,
        Step::ClockBack(part) => {
            let back = part * history.interval;
            world.now -= back;
            history.behind += back;
        }
        Step::LoseValue => {
            world.lose(1);
            if world.log().is_empty() {
                history.taken.clear();
            }
        }
        Step::LosePermits => {
            history.lose(world);
            world.lose(3);
        }
        Step::LoseTally => world.lose(5),
        _ => {}
    }
}

fn acquire_or_release(
    world: &mut World,
    history: &mut History,
    step: &Step,
) -> Result<(), TestCaseError> {
    match *step {
        Step::Acquire(some) => {
            let id = world.id();
            acquire(world, history, history.permits(some), id)
        }
        Step::Repeat(which) if !history.asked.is_empty() => {
            let (id, some) = history.asked[which.index(history.asked.len())];
            // If part of it was released, it is another request.
            let is_changed = |entry: &Entry| entry.id() == id && entry.permits() != u64::from(some);
            let is_same = !world.log().iter().any(is_changed);
            if u64::from(some) <= history.rate && is_same {
                acquire(world, history, some, id)?;
            }
            Ok(())
        }
        Step::GiveBack(which, quarters) if !history.asked.is_empty() => {
            let which = which.index(history.asked.len());
            let (id, some) = history.asked[which];
            let part = (some * quarters).div_ceil(4);
            world.give_back(part, some, &id);
            history.asked[which].1 = some - part;
            history.asked.retain(|(_, some)| *some > 0);
            history.follow(world);
            consistent(world, history)
        }
        Step::Release(some) => release(world, history, some),
        Step::Available => {
            let before = world.dump();
            let available = world.available();
            prop_assert!(available <= history.rate);
            prop_assert_eq!(world.dump(), before);
            Ok(())
        }
        _ => Ok(()),
    }
}

fn release(world: &mut World, history: &mut History, some: u32) -> Result<(), TestCaseError> {
    let live = |world: &mut World| {
        let start = world.now_ms() - history.interval;
        let log = world.log();
        log.iter().filter(|entry| entry.score > start).map(Entry::permits).sum::<u64>()
    };
    let before = live(world);
    if world.log().is_empty() {
        history.stand_in = history.unlogged(world);
    }
    let latest = world.now_ms() + history.interval;
    let near = world.log().iter().all(|entry| entry.score <= latest);
    world.release(some);
    let after = live(world);
    if before > 0 && near {
        prop_assert_eq!(before - after, before.min(some.into()));
    }
    history.follow(world);
    consistent(world, history)
}

fn change_settings(
    world: &mut World,
    history: &mut History,
    step: &Step,
) -> Result<(), TestCaseError> {
    match *step {
        Step::Update(rate, interval) => {
            prop_assert!(world.set("update", rate, interval, 0));
            (history.rate, history.interval) = (rate, interval);
            consistent(world, history)?;
        }
        Step::Set => {
            world.set("set", history.rate, history.interval, 0);
            history.taken.clear();
        }
        Step::Expire(ms) => {
            prop_assert!(world.expire(&ms.max(1).to_string()));
        }
        Step::KeepAlive(ms) => {
            let (rate, interval) = (history.rate, history.interval);
            world.set_and_keep_alive("update", rate, interval, 0, &ms.to_string());
            consistent(world, history)?;
        }
        Step::ClearExpire => {
            world.expire("");
        }
        _ => {}
    }
    Ok(())
}

fn change_rate_from_outside(
    world: &mut World,
    history: &mut History,
    step: &Step,
) -> Result<(), TestCaseError> {
    match *step {
        Step::HandUpdate(rate) => {
            world.command::<()>(&["HSET", "LIMITER_NAME", "rate", &rate.to_string()]);
            (history.rate, history.by_hand) = (rate, true);
            history.lose_unlogged(world);
        }
        Step::Lend(rate, interval, some) => {
            world.lent = format!("{rate} {interval} 0 9000");
            if is_lent(world) {
                (history.rate, history.interval, history.by_hand) = (rate, interval, true);
                history.prune(world);
                history.lose_unlogged(world);
            }
            let id = world.id();
            acquire(world, history, history.permits(some), id)?;
            let config = world.config().unwrap();
            prop_assert_eq!((config[0], config[1]), (history.rate, history.interval));
        }
        _ => {}
    }
    Ok(())
}

fn call_from_java(world: &mut World, history: &mut History, step: &Step) {
    match *step {
        Step::JavaAcquire(who, some) => {
            let (some, skew, id) = (history.permits(some), history.skews[who], world.id());
            let empty = world.log().is_empty();
            let granted = world.java_acquire(some, skew, id) == Some(Ok(()));
            if empty && granted {
                history.taken.clear(); // what was lost before is not seen behind its entry
            }
            history.follow(world);
            if granted {
                // In whole milliseconds of its own clock.
                let at = world.now_ms().saturating_add_signed(skew.min(0)) * 1_000;
                history.take(world, at + history.behind, id, some.into());
            }
        }
        Step::JavaAvailable(who) => {
            let _ = world.java_available(history.skews[who]);
            history.follow(world);
        }
        Step::JavaRelease(some) => {
            world.java_release(some);
            history.lose_unlogged(world);
        }
        Step::JavaUpdate(rate, interval) => {
            world.java_update(rate, interval);
            (history.rate, history.interval) = (rate, interval);
            history.lose_unlogged(world);
        }
        _ => {}
    }
}

fn acquire(world: &mut World, it: &mut History, permits: u32, id: Id) -> Result<(), TestCaseError> {
    let time_of =
        |world: &mut World| world.log().iter().find(|it| it.id() == id).map(|it| it.score);
    let now = world.now_ms();
    let known = time_of(world).filter(|time| *time > now - it.interval);
    let answer = world.acquire(permits, id);
    it.asked.push((id, permits));
    if known.is_some_and(|time| time <= now + it.interval) {
        prop_assert!(answer.granted(), "an EVAL that is repeated is denied");
    }
    if known.is_some() && known == time_of(world) {
        it.follow(world);
        return consistent(world, it);
    }
    if answer.granted() {
        it.take(world, it.now(world), id, permits.into());
        prop_assert!(it.live() <= it.rate, "{} of {}: {:?}", it.live(), it.rate, it.taken);
    } else {
        prop_assert!(answer.wait > 0);
    }
    consistent(world, it)
}

/// `value` and the log say the same.
fn consistent(world: &mut World, it: &mut History) -> Result<(), TestCaseError> {
    it.by_hand = false;
    let log = world.log();
    let sum: i64 = log.iter().map(|it| it.permits() as i64).sum();
    let value = world.value().map(|value| value.parse::<i64>().unwrap());
    let start = world.now_ms() - it.interval;
    if log.is_empty() {
        prop_assert!(value.is_none_or(|value| value == it.rate as i64), "of nothing: {:?}", value);
    } else if log[0].score > start {
        prop_assert_eq!(value.unwrap() + sum, it.rate as i64);
    } else {
        prop_assert!(value.unwrap() + sum <= it.rate as i64, "{:?} and {}", value, sum);
    }
    Ok(())
}

fn always(java: bool, skews: impl Strategy<Value = [i64; 3]>) {
    let server = RedisServer::start();
    let world = RefCell::new(World::new(&server));
    let cases = std::env::var("CASES").ok().and_then(|it| it.parse().ok()).unwrap_or(400);
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    TestRunner::new(config)
        .run(&(steps(java), 1_u64..12, any::<[bool; 2]>(), skews), |(steps, rate, sort, skews)| {
            let mut world = world.borrow_mut();
            [world.tiny, world.gives_up] = sort;
            history(&mut world, &steps, rate, skews, java)
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn alone_it_is_never_over_whatever_is_lost_or_repeated() {
    always(false, Just([0; 3]));
}

#[test]
fn beside_java_it_is_never_over() {
    always(true, Just([0; 3]));
}

#[test]
fn beside_java_clients_whose_clocks_are_off_it_is_never_over() {
    always(true, prop::sample::select(&SKEWS[1..]));
}

#[test]
fn it_heals_from_clocks_that_were_far_ahead_of_each_other() {
    use Step::{ClockBack, Expire, JavaAcquire, JavaUpdate, KeepAlive, Pass};
    let server = RedisServer::start();
    let mut world = World::new(&server);
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
        world.tiny = tiny;
        history(&mut world, &steps, 3, [0, 4_000, 0], true).unwrap();
    }
}

#[test]
fn what_java_takes_counts_from_a_whole_millisecond_of_its_own_clock() {
    use Step::{Acquire, ClockBack, JavaAcquire, JavaUpdate, Pass};
    let server = RedisServer::start();
    let mut world = World::new(&server);
    let steps = [
        JavaUpdate(1, 500),
        // By half a millisecond.
        ClockBack(1),
        JavaAcquire(0, 1),
        Pass(999, 0),
        Acquire(1),
    ];
    history(&mut world, &steps, 1, [0; 3], true).unwrap();
}
