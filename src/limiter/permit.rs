//! `Permit`: the units that an admitted request holds, until it is known how many of them are used.
//! The calls that make a permit are in `hold.rs`.

use std::{fmt, time::Duration};

use smallvec::SmallVec;

use super::{
    admission::{Admission, Guard},
    charge::Charge,
    handle::{KeptHold, Limiter},
};
use crate::{
    algorithm::{HoldReceipt, Kind},
    decision::{Decision, Outcome, Receipt},
    error::Error,
    keys::Key,
    observe::Event,
};

/// Units that are held, for a cost that is known later. A permit that is dropped counts as used: a
/// call that is cut off has used its units.
///
/// A permit ends once, in one of these ways:
///
/// | call | units that were used |
/// |---|---|
/// | [`settle`](Permit::settle) | those that the caller reports; unused ones are returned |
/// | [`cancel`](Permit::cancel) | none |
/// | drop | all of them, or what [`set_used`](Permit::set_used) says |
///
/// Units of [`Algorithm::concurrency`](crate::Algorithm::concurrency) are not used up: they are
/// available again, however the permit ends.
///
/// Unused units are returned exactly, in every algorithm, however long the permit was held. The
/// calls return immediately: with a [`MemoryStore`](crate::MemoryStore) the call itself returns the
/// units, with a `RedisStore` a background task does. If Redis executes the end of a permit and the
/// reply is lost, or does not answer until the hold expires, the units count as used, or, in a
/// limit on concurrency, stay held until then.
///
/// A permit cannot be cloned. To end it from several places, such as a stream and its timeout,
/// share it behind a lock.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{Admission, Algorithm, Limiter, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::Error> {
/// let quota = Quota::per_day(100_000);
/// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::token_bucket(), quota);
///
/// let Admission::Admitted(permit) = tokens.hold("alice", 500).await? else {
///     return Ok(()); // denied: fewer than 500 are left
/// };
/// let used = 180; // as the response reports
/// permit.settle(used);
/// assert_eq!(tokens.peek("alice").await?.remaining(), 99_820);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a permit that is dropped counts as used: call `settle` or `cancel`"]
pub struct Permit {
    decision: Decision,
    holds: Holds,
}

impl Permit {
    /// Returns the decision that admitted the request.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Some(permit) = limiter.hold("alice", 2).await?.admitted() {
    ///     assert_eq!(permit.decision().remaining(), 1);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Ends the permit: `used` units were used. If more were used than are held, the rest is spent,
    /// whatever is left of the quota, as by [`spend`](Limiter::spend).
    ///
    /// A permit of several limits settles each of them that is still held with the same number of
    /// units. To settle them separately, call [`settle_for`](Permit::settle_for).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Some(permit) = limiter.hold("alice", 3).await?.admitted() {
    ///     permit.settle(1);
    /// }
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn settle(mut self, used: u64) {
        self.holds.end(|_| used);
    }

    /// Ends the permit: none of its units were used.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Some(permit) = limiter.hold("alice", 3).await?.admitted() {
    ///     permit.cancel();
    /// }
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn cancel(self) {
        self.settle(0);
    }

    /// Ends the part of the permit that the limiter of this name holds: `used` units were used. The
    /// other parts stay held.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if the permit holds no units of a limiter of this name, and
    /// [`Error::HoldEnded`] if that part has ended already. A permit that counts nothing, under
    /// [`FailurePolicy::Open`](crate::FailurePolicy::Open), accepts every name.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Charge, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let store = MemoryStore::new();
    /// let limiter = |name, quota| {
    ///     Limiter::new(name, store.clone(), Algorithm::token_bucket(), quota)
    /// };
    /// let input = limiter("input", Quota::per_minute(50_000));
    /// let output = limiter("output", Quota::per_minute(10_000));
    ///
    /// let charge = Charge::new(&input, "alice").estimate(2_000).also(&output).estimate(500);
    /// if let Some(mut permit) = charge.hold().await?.admitted() {
    ///     permit.settle_for("input", 1_900)?;
    ///     permit.settle_for("output", 120)?;
    /// }
    /// assert_eq!(output.peek("alice").await?.remaining(), 9_880);
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle_for(&mut self, limiter: &str, used: u64) -> Result<(), Error> {
        self.holds.take(limiter)?.end(|_| used);
        Ok(())
    }

    /// Sets how many units count as used if the permit is dropped. The default is all of them. It
    /// calls no store, so a stream can set it with each frame: if the client cuts it off, what was
    /// sent until then counts.
    ///
    /// If the process crashes, all units count as used when the hold expires; those of a limit on
    /// concurrency are available again then.
    ///
    /// A permit of several limits sets the same number for each. To set them separately, call
    /// [`set_used_for`](Permit::set_used_for).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_ratelimit::Error> {
    /// let quota = Quota::per_minute(100_000);
    /// let tokens = Limiter::new("tokens", MemoryStore::new(), Algorithm::sliding_log(), quota);
    ///
    /// if let Some(mut permit) = tokens.hold("alice", 500).await?.admitted() {
    ///     for token in 1..=180 {
    ///         permit.set_used(token); // it is sent
    ///     }
    /// } // cut off
    /// assert_eq!(tokens.peek("alice").await?.remaining(), 99_820);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_used(&mut self, used: u64) {
        self.holds.parts.iter_mut().for_each(|part| part.used_at_drop = used);
    }

    /// Sets how many units of the limiter of this name count as used if the permit is dropped: see
    /// [`set_used`](Permit::set_used).
    ///
    /// # Errors
    ///
    /// As for [`settle_for`](Permit::settle_for).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Some(mut permit) = limiter.hold("alice", 3).await?.admitted() {
    ///     permit.set_used_for("api", 1)?;
    /// } // dropped
    /// assert_eq!(limiter.peek("alice").await?.remaining(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_used_for(&mut self, limiter: &str, used: u64) -> Result<(), Error> {
        self.holds.named(limiter)?.for_each(|part| part.used_at_drop = used);
        Ok(())
    }

    /// Returns whether the hold has expired: no renewal reached the store within its
    /// [lifetime](Limiter::hold_lifetime). The units count as used then; those of a limit on
    /// concurrency are available to other requests. The request should stop: from now on it may
    /// exceed the limit. In memory a permit never expires.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// if let Some(permit) = limiter.hold("alice", 3).await?.admitted() {
    ///     assert!(!permit.is_expired()); // over Redis, look between two steps of a long job
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn is_expired(&self) -> bool {
        self.holds.is_expired()
    }

    /// Returns the admission of a request, with what `holds` returns of its receipts.
    #[inline]
    pub(super) fn admission(
        outcome: Outcome,
        holds: impl FnOnce(&Outcome) -> Holds,
    ) -> Admission<Self> {
        if outcome.decision.is_allowed() {
            let holds = holds(&outcome);
            Admission::Admitted(Self { decision: outcome.decision, holds })
        } else {
            Admission::Denied(outcome.decision)
        }
    }

    /// Returns the admission of the request of a charge.
    pub(super) fn of_charge(charge: Charge, outcome: Outcome) -> Admission<Self> {
        Self::admission(outcome, |outcome| charge.holds(outcome))
    }
}

impl Guard for Permit {
    fn decision(&self) -> &Decision {
        self.decision()
    }
}

impl Charge {
    /// Returns the units that an admitted request holds.
    pub(crate) fn holds(&self, Outcome { decision, receipts }: &Outcome) -> Holds {
        // A foreign limiter shares no charge.
        let held = self.own_parts().enumerate().filter_map(|(index, (limiter, key, units))| {
            let Receipt::Hold(receipt, algorithm) = receipts.get(index) else { return None };
            let taken = (receipt, algorithm, decision.age());
            Some(HeldUnits::new(limiter, key.clone(), units, taken))
        });
        Holds { parts: held.collect(), is_counted: !self.is_exempt() }
    }
}

/// The units that a request holds, of each limiter. The drop ends all of them as used.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    /// Those of one limiter need no allocation.
    parts: SmallVec<[HeldUnits; 1]>,
    /// False if the request proceeds uncounted: there is nothing to settle.
    is_counted: bool,
}

impl Holds {
    /// Returns the units of one limiter, of an admitted request.
    #[inline]
    pub(crate) fn of_one(limiter: &Limiter, key: Key<'_>, units: u64, outcome: &Outcome) -> Self {
        let parts = match outcome.receipts.get(0) {
            Receipt::Hold(receipt, algorithm) => {
                let taken = (receipt, algorithm, outcome.decision.age());
                SmallVec::from([HeldUnits::new(limiter, key.into_owned(), units, taken)])
            }
            _ => SmallVec::new(),
        };
        Self { parts, is_counted: true }
    }

    /// Ends what is still held, with the units that `used` returns for the number of units held.
    #[inline]
    pub(crate) fn end(&mut self, used: impl Fn(u64) -> u64) {
        self.parts.iter_mut().for_each(|part| part.end(used(part.units)));
    }

    /// Takes the parts of the limiter of this name out, so that they can be ended without a lock.
    pub(crate) fn take(&mut self, limiter: &str) -> Result<Self, Error> {
        let parts = self.named(limiter)?.filter_map(HeldUnits::take).collect();
        Ok(Self { parts, is_counted: true })
    }

    /// Returns the parts of the limiter of this name.
    fn named(&mut self, limiter: &str) -> Result<impl Iterator<Item = &mut HeldUnits>, Error> {
        let named = || self.parts.iter().filter(|part| part.limiter.name() == limiter);
        if named().next().is_none() && self.is_counted {
            return Err(Error::NotHeld { limiter: limiter.to_owned().into() });
        }
        if named().next().is_some() && named().all(HeldUnits::has_ended) {
            return Err(Error::HoldEnded { limiter: limiter.to_owned().into() });
        }
        Ok(self.parts.iter_mut().filter(move |part| part.limiter.name() == limiter))
    }

    /// Takes all parts out. What remains has ended.
    pub(crate) fn take_all(&mut self) -> Self {
        self.take_if(|_| true)
    }

    /// Takes the parts out whose units can be spent, and leaves those that count at a time.
    pub(crate) fn take_spent(&mut self) -> Self {
        self.take_if(HeldUnits::is_spent)
    }

    fn take_if(&mut self, is_taken: impl Fn(&HeldUnits) -> bool) -> Self {
        let taken = self.parts.iter_mut().filter(|part| is_taken(part));
        Self { parts: taken.filter_map(HeldUnits::take).collect(), is_counted: self.is_counted }
    }

    /// Returns whether units are held that can be spent.
    #[inline]
    pub(crate) fn has_spent(&self) -> bool {
        self.parts.iter().any(HeldUnits::is_spent)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns whether nothing is held any more.
    #[inline]
    pub(crate) fn have_ended(&self) -> bool {
        self.parts.iter().all(HeldUnits::has_ended)
    }

    pub(crate) fn is_expired(&self) -> bool {
        let mut holds = self.parts.iter().filter_map(|part| part.hold.as_ref());
        holds.any(KeptHold::is_expired)
    }
}

/// The units of one limiter. The drop ends them as used.
pub(crate) struct HeldUnits {
    limiter: Limiter,
    key: Key<'static>,
    units: u64,
    /// The units that count as used if nothing settles them.
    used_at_drop: u64,
    /// None once they have ended.
    hold: Option<KeptHold>,
}

impl HeldUnits {
    #[inline]
    fn new(
        limiter: &Limiter,
        key: Key<'static>,
        units: u64,
        taken: (HoldReceipt, Kind, Duration),
    ) -> Self {
        let hold = Some(limiter.keep_hold(&key, units, taken));
        let held = Self { limiter: limiter.clone(), key, units, used_at_drop: units, hold };
        let (limiter, observers) = (limiter.name(), limiter.observers());
        observers.report(&Event::HoldBegan { limiter, key: &held.key, held: units });
        held
    }

    fn has_ended(&self) -> bool {
        self.hold.is_none()
    }

    /// Returns false if the limiter counts units at a time, whose end only makes them available
    /// again, or if they have ended.
    fn is_spent(&self) -> bool {
        self.hold.as_ref().is_some_and(KeptHold::is_spent)
    }

    /// Returns the units to be ended elsewhere. What remains has ended.
    fn take(&mut self) -> Option<Self> {
        let hold = Some(self.hold.take()?);
        let Self { units, used_at_drop, .. } = *self;
        let (limiter, key) = (self.limiter.clone(), self.key.clone());
        Some(Self { limiter, key, units, used_at_drop, hold })
    }

    /// Ends the units, unless they have ended.
    #[inline]
    fn end(&mut self, used: u64) {
        if let Some(hold) = self.hold.take() {
            let Self { limiter, key, units: held, .. } = &*self;
            limiter.end_hold(hold, key, *held, used);
            let (limiter, observers) = (limiter.name(), limiter.observers());
            observers.report(&Event::HoldEnded { limiter, key, held: *held, used });
        }
    }
}

impl Drop for HeldUnits {
    #[inline]
    fn drop(&mut self) {
        self.end(self.used_at_drop);
    }
}

impl fmt::Debug for HeldUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldUnits")
            .field("limiter", &self.limiter.name())
            .field("units", &self.units)
            .field("has_ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}
