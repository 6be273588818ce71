//! How processes share units: how often a waiting request asks for units that other processes hold,
//! the turn after which a process leaves its own to them, and the order in which processes ask for
//! units that are restored. It knows no queues.
//!
//! A request learns of a return in its own process before other processes do. So a process whose
//! requests take the last units again and again would keep them from the others, which write
//! nothing that shows that they wait (law 1).

use std::{collections::HashMap, time::Duration};

use foldhash::fast::RandomState;
use tokio::time::Instant;

use crate::time::random_fraction;

/// The longest time in which a process takes again what it returns. The bench `concurrency` has
/// what callers wait. A shorter turn needs a shorter pause, and more checks to find it.
const TURN: Duration = Duration::from_millis(400);
/// A turn lasts as long as so many holds, but no less than `SHORTEST_TURN`. Of two processes with a
/// caller each, one waits for half of them times the fair time, and twice as long if it misses a
/// pause, as on a busy machine.
const HOLDS: u32 = 4;
const SHORTEST_TURN: Duration = Duration::from_millis(24);
/// The time after the longest turn in which the process takes nothing: a twentieth of the turn, as
/// a process that is alone loses it.
const PAUSE: Duration = Duration::from_millis(20);
/// The same after a shorter turn: this part of it, but no more than `PAUSE`, and no less than two
/// checks of another process need.
const PAUSE_PART: u32 = 9;
const SHORTEST_PAUSE: Duration = Duration::from_millis(4);
/// The longest time between two checks of a request after a turn: it finds each pause, with 5 ms
/// for a timer and a call.
const RETRY_AFTER_TURN: Duration = Duration::from_millis(15);
/// The same of a request that has just begun to wait.
const LONGEST_HOLD_RETRY: Duration = Duration::from_millis(50);
/// The same of a request that has waited for long.
const SHORTEST_RETRY: Duration = Duration::from_millis(5);
/// The time for which a request looks for the pauses of the shortest turns, after it has begun to
/// wait.
const SHORT_WAIT: Duration = Duration::from_millis(200);
/// The keys for which requests of a process can wait before each of them is asked for less often.
/// A process checks 270 times per second for each of them, and 2,100 times for any number; each 2
/// to 3 ms in the first `SHORT_WAIT`. The keys that the process uses itself are counted apart.
const MAX_RETRIED: usize = 8;
/// The most keys that count as used by the process itself, and for how long after the last grant.
const MAX_USED: usize = 64;
const USED: Duration = Duration::from_secs(60);
/// A request that has just begun to wait leaves restored units to older ones of other processes for
/// this part of the time in which its cost is restored, but no longer than `PAUSE`.
const YIELD_PART: u32 = 8;
/// The most keys, some 80 bytes each. Beyond that, turns are forgotten, and only begin anew.
const MAX_KEYS: usize = 10_000;

/// By the hash of limiter and key. Two with equal hashes share their turns.
#[derive(Debug, Default)]
pub(super) struct Turns {
    keys: HashMap<u64, KeyTurn, RandomState>,
    /// The keys of which the process has taken the last units, the latest grant last.
    used: Vec<(u64, Instant)>,
}

#[derive(Debug)]
struct KeyTurn {
    /// A later instant than now is the end of a pause.
    began: Instant,
    returned: Option<Instant>,
    /// How long a turn lasts. Until the process knows how long units are held, it looks for the
    /// shortest turns.
    length: Duration,
    /// The last time at which a decision found no further units.
    full: Instant,
}

/// Returns the pause of the first request of a queue after a denial of unknown duration: units are
/// held, perhaps by another process, which ends its holds without a word to this one. The longer it
/// has `waited`, the more often it asks: of several processes, the one that waits for longest gets
/// the units most likely.
///
/// Random, between half and all: otherwise a request that began to wait when a unit was taken would
/// check just when it is returned, before the requests of other processes.
fn hold_retry(waited: Duration, keys: usize, shortest_pause: Duration) -> Duration {
    let of_turn = TURN.as_secs_f64() / waited.as_secs_f64(); // infinite at first
    let pause = RETRY_AFTER_TURN.as_secs_f64() * of_turn;
    let mut pause = pause.clamp(SHORTEST_RETRY.as_secs_f64(), LONGEST_HOLD_RETRY.as_secs_f64());
    let is_short = waited < SHORT_WAIT && keys <= MAX_RETRIED;
    let shortest = if is_short { Duration::ZERO } else { SHORTEST_RETRY };
    pause = pause.min(shortest_pause.max(shortest).as_secs_f64());
    let factor = keys.div_ceil(MAX_RETRIED).max(1) as f64;
    Duration::from_secs_f64(pause * factor * (1.0 - random_fraction() / 2.0))
}

/// Returns for how long a request leaves units that are restored to older ones of other processes.
/// It will have `waited` so long; its cost is restored in `gap`. Without it, the request that has
/// just begun to wait would check at the same instant as one that others have outrun before. The
/// times differ by more than a timer does, so that the oldest request checks first.
pub(crate) fn yield_time(waited: Duration, gap: Duration) -> Duration {
    let rounds = waited.as_secs_f64() / gap.as_secs_f64().max(f64::MIN_POSITIVE);
    (gap / YIELD_PART).min(PAUSE).mul_f64((-rounds / 2.0).exp2())
}

/// Returns the time after a turn in which the process takes nothing.
fn pause_after(turn: Duration) -> Duration {
    (turn / PAUSE_PART).clamp(SHORTEST_PAUSE, PAUSE)
}

impl Turns {
    /// Returns the number of keys.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Records that a decision has found no units for a further request. If it `takes` the last
    /// ones, the process uses the key.
    pub(super) fn found_full(&mut self, key: u64, takes: bool, now: Instant) {
        if self.keys.len() >= MAX_KEYS {
            self.make_room(now);
        }
        let turn = KeyTurn { began: now, returned: None, length: SHORTEST_TURN, full: now };
        self.keys.entry(key).or_insert(turn).full = now;
        if takes {
            self.used.retain(|(used, at)| *used != key && *at + USED > now);
            if self.used.len() == MAX_USED {
                self.used.remove(0);
            }
            self.used.push((key, now));
        }
    }

    /// Records that this process returns units, which it has held since `taken`.
    pub(super) fn returned(&mut self, key: u64, taken: Instant, now: Instant) {
        // While there are units for all, no process has to leave any. The units were taken a moment
        // after the decision.
        let turn = self.keys.get_mut(&key).filter(|turn| turn.full + PAUSE >= taken);
        let Some(turn) = turn else { return };
        // Otherwise the units of the turn before were free, or another process had them, since. Not
        // if a call was late, or the turns of a busy machine would not end.
        if turn.returned.is_none_or(|returned| taken > returned + PAUSE) {
            turn.began = taken;
        }
        turn.returned = Some(now);
        turn.length = (HOLDS * (now - taken).min(TURN)).clamp(SHORTEST_TURN, TURN);
        if now >= turn.began + turn.length {
            turn.began = now + pause_after(turn.length);
        }
    }

    /// Returns the pause before the first request of one of so many lines, which has `waited`, asks
    /// for units that other processes may have returned.
    pub(super) fn retry(&self, key: u64, waited: Duration, lines: usize) -> Duration {
        let is_used = self.used.iter().any(|(used, _)| *used == key);
        let keys = if is_used { lines.min(self.used.len()) } else { lines };
        // Other processes hold units for as long as this one: half a pause finds each pause.
        let length = self.keys.get(&key).map_or(SHORTEST_TURN, |turn| turn.length);
        let pause = if length == TURN { LONGEST_HOLD_RETRY } else { pause_after(length) / 2 };
        hold_retry(waited, keys, pause)
    }

    /// Returns the end of the pause of a key, if there is one now.
    pub(super) fn pause_end(&self, key: u64, now: Instant) -> Option<Instant> {
        self.keys.get(&key).map(|turn| turn.began).filter(|end| *end > now)
    }

    /// Forgets the turns that no units continue which are taken from now on.
    fn make_room(&mut self, now: Instant) {
        self.keys.retain(|_, turn| turn.full + TURN + PAUSE > now);
        if self.keys.len() > MAX_KEYS / 2 {
            self.keys.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USE: Duration = Duration::from_millis(50);

    /// Takes units at an instant, and returns them after `time`. Returns when, and whether a pause
    /// begins.
    fn use_at(turns: &mut Turns, taken: Instant, time: Duration) -> (Instant, bool) {
        turns.found_full(1, true, taken);
        turns.returned(1, taken, taken + time);
        let pause_end = turns.pause_end(1, taken + time);
        assert!(pause_end.is_none_or(|end| end == taken + time + PAUSE));
        (taken + time, pause_end.is_some())
    }

    #[test]
    fn a_process_pauses_after_a_turn_and_begins_another_one() {
        let (mut turns, mut at) = (Turns::default(), Instant::now());
        for _ in 0..3 {
            for number in 1..=HOLDS {
                let (returned, pauses) = use_at(&mut turns, at, USE);
                assert_eq!(pauses, number == HOLDS, "{number}");
                at = returned + if pauses { PAUSE } else { Duration::ZERO };
            }
            assert_eq!(turns.pause_end(1, at), None);
            at += Duration::from_millis(1);
        }
    }

    #[test]
    fn units_that_were_free_or_those_of_others_begin_a_turn() {
        let (mut turns, mut at) = (Turns::default(), Instant::now());
        for _ in 0..100 {
            let (returned, pauses) = use_at(&mut turns, at, USE);
            assert!(!pauses);
            at = returned + USE;
        }
    }

    #[test]
    fn each_return_of_units_that_were_held_for_a_turn_begins_a_pause() {
        let (mut turns, mut at) = (Turns::default(), Instant::now());
        for _ in 0..3 {
            let (returned, pauses) = use_at(&mut turns, at, 10 * TURN);
            assert!(pauses);
            at = returned + PAUSE;
        }
    }

    #[test]
    fn a_process_that_finds_units_for_all_has_no_turns() {
        let (mut turns, start) = (Turns::default(), Instant::now());
        turns.returned(1, start, start + TURN);
        turns.found_full(1, true, start);
        turns.returned(1, start + TURN, start + 2 * TURN);
        assert_eq!(turns.pause_end(1, start + 2 * TURN), None);
    }

    #[test]
    fn several_places_have_one_pause_at_a_time() {
        let (mut turns, start) = (Turns::default(), Instant::now());
        let millis = Duration::from_millis;
        turns.found_full(1, true, start);
        for place in 0..10 {
            turns.returned(1, start, start + TURN + millis(place));
        }
        assert_eq!(turns.pause_end(1, start + TURN + millis(9)), Some(start + TURN + PAUSE));
        let after = start + TURN + PAUSE + millis(1);
        turns.returned(1, start, after);
        assert_eq!(turns.pause_end(1, after), None);
    }

    #[test]
    fn the_number_of_turns_is_limited() {
        let (mut turns, start) = (Turns::default(), Instant::now());
        for number in 0..100_000 {
            let at = start + Duration::from_micros(number);
            turns.found_full(number, true, at);
            assert!(turns.len() <= MAX_KEYS);
        }
    }

    #[test]
    fn keys_that_the_process_uses_are_asked_for_first_and_are_limited() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let waited = 3 * TURN; // it asks each 2.5 to 5 ms, unless it has many keys
        let longest = |turns: &Turns, key| {
            let all = (0..100).map(|_| turns.retry(key, waited, 3_000));
            all.max().unwrap_or_default()
        };
        turns.found_full(1, false, now);
        assert!(longest(&turns, 1) > Duration::from_secs(1));
        turns.found_full(1, true, now);
        assert!(longest(&turns, 1) <= SHORTEST_RETRY);
        for key in 2..10_000 {
            turns.found_full(key, true, now);
            assert!(turns.used.len() <= MAX_USED);
        }
        assert!(longest(&turns, 9_999) <= SHORTEST_RETRY * (MAX_USED / MAX_RETRIED) as u32);
        assert!(longest(&turns, 1) > Duration::from_secs(1));
        // Keys of which the process has taken nothing for long are no longer in use.
        turns.found_full(1, true, now + USED);
        assert_eq!(turns.used.len(), 1);
    }

    #[test]
    fn of_requests_that_wait_for_restored_units_the_oldest_one_checks_first() {
        let gap = Duration::from_millis(100);
        let times: Vec<_> = (0..5).map(|rounds| yield_time(rounds * gap, gap)).collect();
        assert_eq!(times[0], gap / YIELD_PART);
        assert!(times.is_sorted_by(|newer, older| *newer >= *older * 5 / 4), "{times:?}");
        assert_eq!(yield_time(u32::MAX * gap, gap), Duration::ZERO);
        assert_eq!(yield_time(Duration::ZERO, Duration::MAX), PAUSE);
        assert_eq!(yield_time(gap, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn a_request_asks_more_often_the_longer_it_waits() {
        let millis = |waited, queues| {
            let all = (0..100)
                .map(|_| hold_retry(Duration::from_millis(waited), queues, LONGEST_HOLD_RETRY));
            let all: Vec<u128> = all.map(|pause| pause.as_micros() / 1_000).collect();
            (*all.iter().min().unwrap(), *all.iter().max().unwrap())
        };
        let within = |found: (u128, u128), least, most| {
            assert!(found.0 >= least && found.1 <= most && found.0 < found.1, "{found:?}");
        };
        within(millis(0, 1), 25, 50);
        within(millis(400, 1), 7, 15);
        within(millis(400, 8), 7, 15);
        within(millis(800, 1), 3, 8);
        within(millis(1 << 40, 1), 2, 5);
        within(millis(1 << 40, 80), 25, 50);
    }
}
