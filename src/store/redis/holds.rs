//! The holds of a store in Redis: when each is renewed while its permit is held, and the ends that
//! are to be sent. It sends nothing, as `keeper.rs` does.

use std::{
    collections::{BTreeSet, HashMap},
    mem,
    time::{Duration, Instant},
};

use tokio::time;

use super::{
    connections::{ANSWER_TIMEOUT, MAX_JOB_AGE},
    ends::OpenEnd,
};
use crate::{
    algorithm::{HoldReceipt, Lifetime},
    observe::Event,
    store::{RenewableHold, denials::Change},
};

/// A new hold lives for a quarter of the lifetime of its limiter, so that units whose reply is lost
/// are held no longer than that.
const FIRST_PART: u32 = 4;
/// A hold is renewed when half of what it may live has passed: an answer that fails is repeated in
/// time.
const RENEWED_AFTER: u32 = 2;
/// The pause after a call that the server has not executed, as for other calls in the background.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// A hold that has expired is not renewed.
const NEVER: Duration = Duration::from_secs(365 * 86_400);
/// The most ends that wait for a server that does not answer, some 100 bytes each. Further ones are
/// dropped, and reported: their holds last until they expire.
const MAX_ENDED: usize = 100_000;

/// The holds of a store and its clones.
#[derive(Default)]
pub(super) struct HoldTable {
    live: HashMap<u64, Live>,
    /// When each of them is renewed: a task that wakes for an end looks at no other holds.
    renewals: BTreeSet<(Instant, u64)>,
    ended: Vec<Ended>,
    next_id: u64,
    pub(super) has_task: bool,
    /// The time at which the task wakes. `None` if it looks for work before it sleeps.
    wakes_at: Option<Instant>,
}

/// A hold whose permit is held.
pub(super) struct Live {
    hold: RenewableHold,
    /// True while a renewal is under way.
    is_renewed: bool,
    /// By the clock of the caller, which a test can script.
    taken: time::Instant,
    /// The time at which it is renewed, and at which it has expired.
    due: Instant,
    expires: Instant,
}

/// A hold whose permit has ended. If it is dropped without an answer, that is reported.
pub(super) struct Ended {
    pub(super) id: u64,
    pub(super) hold: RenewableHold,
    pub(super) used: u64,
    /// True while a renewal is under way: the end is sent after it. Before it, the renewal would
    /// find no units, and hold them again.
    pub(super) is_renewed: bool,
    /// The units have been spent then.
    pub(super) expires: Instant,
    /// True once the server has executed it in time.
    pub(super) is_settled: bool,
    pub(super) _open: OpenEnd,
    /// Lets later checks ask the server, as units may be returned, and calls the line of the key.
    pub(super) _change: Change,
}

impl Ended {
    /// Returns whether the end is given up. The units were spent when the hold expired, but not
    /// what was used beyond them: that is sent for as long as a job in the background.
    fn is_too_late(&self, now: Instant) -> bool {
        let is_beyond = self.used > self.hold.units;
        self.expires + if is_beyond { MAX_JOB_AGE } else { Duration::ZERO } <= now
    }
}

/// Reports that all units count as used, instead of those that were. Units that count at a time
/// stay held instead, until the hold expires.
impl Drop for Ended {
    fn drop(&mut self) {
        let Self { hold, used, expires, is_settled, .. } = self;
        let (key, held, used) = (&hold.key, hold.units, *used);
        let matters = match hold.settings.params.spends() {
            true => used != held,
            false => Instant::now() < *expires,
        };
        if !*is_settled && matters {
            let limiter = hold.settings.name;
            hold.observers.report(&Event::HoldUnsettled { limiter, key, held, used });
        }
    }
}

/// What has to be sent.
pub(super) struct Due {
    /// The ends that are too late for it.
    pub(super) late: Vec<Ended>,
    pub(super) ended: Vec<Ended>,
    pub(super) renewals: Vec<(u64, RenewableHold)>,
    /// The time of the next renewal, if there is one.
    pub(super) next: Option<Instant>,
}

impl HoldTable {
    /// Keeps a hold. Returns its id, and when it is to be renewed.
    pub(super) fn keep(&mut self, hold: RenewableHold) -> (u64, Instant) {
        let lives = hold.lifetime / FIRST_PART;
        let (now, taken) = (Instant::now(), time::Instant::now());
        // By the clock of the server, it began with the decision, not with its arrival.
        let left = |part: Duration| now + part.saturating_sub(hold.age);
        let (due, expires) = (left(lives / RENEWED_AFTER), left(lives));
        self.next_id += 1;
        self.renewals.insert((due, self.next_id));
        self.live.insert(self.next_id, Live { hold, is_renewed: false, taken, due, expires });
        (self.next_id, due)
    }

    /// Returns a hold, when it was taken, and when it expires.
    pub(super) fn find(&self, id: u64) -> Option<(RenewableHold, time::Instant, Instant)> {
        self.live.get(&id).map(|live| (live.hold.clone(), live.taken, live.expires))
    }

    pub(super) fn is_expired(&self, id: u64) -> bool {
        self.live.get(&id).is_some_and(|live| live.expires <= Instant::now())
    }

    /// Queues an end, and returns it if too many wait. Its hold is not renewed any more.
    pub(super) fn end(&mut self, mut end: Ended) -> Option<Ended> {
        // At once: the answer to a renewal finds the hold before, or its end.
        if let Some(Live { mut hold, is_renewed, expires, .. }) = self.take(end.id) {
            hold.update_settings(); // while the permit keeps the limiter: later it may be gone
            (end.hold, end.is_renewed, end.expires) = (hold, is_renewed, expires);
        }
        if self.ended.len() == MAX_ENDED {
            return Some(end);
        }
        self.ended.push(end);
        None
    }

    /// Renews a hold again, whose renewal has failed: the units are found by the old receipt, too.
    /// But if the state is lost and so is the reply, each one holds them again, so not at once. A
    /// hold that has expired is renewed rarely: another version can have written the state.
    pub(super) fn renew_again(&mut self, id: u64, may_have_run: bool) {
        let now = Instant::now();
        let left = self.live.get(&id).map_or(PAUSE, |live| live.expires - now);
        let pause = match may_have_run {
            true if left.is_zero() => ANSWER_TIMEOUT,
            true => left / 4,
            false => PAUSE,
        };
        self.renew_at(id, now + pause.max(PAUSE));
    }

    pub(super) fn take(&mut self, id: u64) -> Option<Live> {
        let live = self.live.remove(&id)?;
        self.renewals.remove(&(live.due, id));
        Some(live)
    }

    /// Sets the time at which a hold is renewed, if its permit has not ended.
    fn renew_at(&mut self, id: u64, due: Instant) {
        if let Some(live) = self.live.get_mut(&id) {
            self.renewals.remove(&(live.due, id));
            live.due = due;
            self.renewals.insert((due, id));
        }
    }

    pub(super) fn renewed(
        &mut self,
        id: u64,
        receipt: HoldReceipt,
        began: Instant,
        lifetime: Duration,
    ) {
        self.renew_at(id, began + lifetime / RENEWED_AFTER);
        if let Some((hold, expires, _)) = self.find_mut(id) {
            (hold.receipt, *expires) = (receipt, began + lifetime);
        }
    }

    /// Ends a renewal, whatever its answer. If the permit has ended meanwhile, its end is sent now.
    pub(super) fn end_renewal(&mut self, id: u64) {
        if let Some((_, _, is_renewed)) = self.find_mut(id) {
            *is_renewed = false;
        }
    }

    /// Finds a hold, when it expires, and whether a renewal is under way. Its permit can have ended
    /// meanwhile: the units are those of the new receipt then.
    fn find_mut(&mut self, id: u64) -> Option<(&mut RenewableHold, &mut Instant, &mut bool)> {
        match self.live.get_mut(&id) {
            Some(Live { hold, expires, is_renewed, .. }) => Some((hold, expires, is_renewed)),
            None => {
                let ended = self.ended.iter_mut().find(|ended| ended.id == id)?;
                Some((&mut ended.hold, &mut ended.expires, &mut ended.is_renewed))
            }
        }
    }

    /// Takes what has to be sent now, and the ends that are too late for it.
    pub(super) fn take_due(&mut self) -> Due {
        let now = Instant::now();
        let ended = self.ended.extract_if(.., |ended| !ended.is_renewed);
        let (late, ended): (Vec<_>, Vec<_>) = ended.partition(|ended| ended.is_too_late(now));
        let mut renewals = vec![];
        while let Some((_, id)) = self.renewals.first().filter(|(at, _)| *at <= now).copied()
            && let Some(live) = self.live.get_mut(&id)
        {
            if !mem::replace(&mut live.is_renewed, true) {
                renewals.push((id, live.hold.clone()));
            }
            self.renew_at(id, now + ANSWER_TIMEOUT); // unless an answer arrives
        }
        let next = self.renewals.first().map(|(at, _)| *at);
        let is_idle = ended.is_empty() && renewals.is_empty();
        self.wakes_at = is_idle.then(|| next.unwrap_or(now + NEVER));
        Due { late, ended, renewals, next }
    }

    /// Returns whether the task is to be woken for work at this time.
    pub(super) fn wakes_by(&mut self, at: Instant) -> bool {
        self.wakes_at.take_if(|wakes_at| at < *wakes_at).is_some()
    }

    /// Ends the task, if there are no holds. Under one lock: a hold that begins now starts another
    /// task.
    pub(super) fn end_task(&mut self) -> bool {
        let is_over = self.live.is_empty() && self.ended.is_empty();
        self.has_task = !is_over;
        is_over
    }

    pub(super) fn expired(&mut self, id: u64) {
        self.renew_at(id, Instant::now() + NEVER);
        if let Some(live) = self.live.get_mut(&id) {
            live.expires = live.expires.min(Instant::now());
        }
    }
}

/// Returns the first lifetime of a hold, until its first renewal.
pub(super) fn first_lifetime(of_hold: Duration) -> Lifetime {
    lifetime(of_hold / FIRST_PART)
}

pub(super) fn lifetime(lifetime: Duration) -> Lifetime {
    Lifetime::new(lifetime.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{super::ends::Ends, *};
    use crate::{
        algorithm::{Algorithm, Params},
        keys::Key,
        observe::Observers,
        quota::Quota,
        store::{Lines, Settings, Source, denials::Denials},
    };

    #[test]
    fn an_end_is_given_up_when_its_hold_expires_or_an_hour_later_if_more_was_used() {
        let (algorithm, quota) = (Algorithm::token_bucket(), Quota::per_day(9));
        let params = Params::new(algorithm, quota).unwrap();
        let settings = Arc::new(Settings::new("a", algorithm, quota, params, Source::Store));
        let lines = Arc::<Lines>::default();
        let (denials, key) = (Denials::new(Duration::ZERO, lines.clone()), "k".into());
        let (receipt, expires) = (HoldReceipt { epoch: 0, ends: 0 }, Instant::now());
        for (used, hour) in [(0, 0), (5, 0), (6, 1)] {
            let end = Ended {
                id: 1,
                hold: RenewableHold {
                    settings: settings.clone(),
                    observers: Observers::default(),
                    key: Key::clone(&key),
                    units: 5,
                    lifetime: Duration::from_secs(1),
                    receipt,
                    age: Duration::ZERO,
                },
                used,
                is_renewed: false,
                expires,
                is_settled: false,
                _open: Ends::new(lines.clone()).begin(1),
                _change: denials.begin_return(&settings, &key),
            };
            let given_up = expires + hour * Duration::from_secs(3_600);
            assert!(!end.is_too_late(given_up - Duration::from_micros(1)), "{used}");
            assert!(end.is_too_late(given_up), "{used}");
        }
    }
}
