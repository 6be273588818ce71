//! The twin of the ends and renewals of `scripts/holding.lua`: holds that expire are changed by the
//! scripts alone. The laws are in the other files.

use super::super::{
    HoldAction, HoldChange, HoldReceipt, HoldReply, Lifetime, Params, State,
    hold::{Held, Slot, Slots},
};

impl Params {
    /// Ends and renews holds, all of one key. Calls `answer` with each reply.
    pub fn change_holds(
        &self,
        state: &mut State,
        now: i64,
        epoch: i64,
        changes: &[HoldChange],
        mut answer: impl FnMut(HoldReply),
    ) {
        let time = state.held.slots().map_or(now, |slots| slots.time(now));
        self.expire_holds(state, now);
        let mut used = 0;
        for change in changes {
            let left = change.receipt.ends - time;
            let (more, reply) = change_hold(&mut state.held, now, epoch, left, change);
            used += more;
            answer(reply);
        }
        if used > 0 {
            self.spend_bare(&mut state.spent, used, now);
        }
        state.held.forget_if_empty();
    }
}

/// Changes one hold. Returns the units to spend, too.
fn change_hold(
    held: &mut Held,
    now: i64,
    epoch: i64,
    left: i64,
    &HoldChange { receipt, units, action }: &HoldChange,
) -> (i64, HoldReply) {
    let has_expired = left <= 0;
    let is_known = knows(held, receipt);
    if is_known && !has_expired {
        take(held, now, receipt, units);
    }
    match action {
        // Its units were spent when it expired.
        HoldAction::End { used } if has_expired => ((used - units).max(0), HoldReply::Expired),
        HoldAction::End { used } if is_known => (used, HoldReply::Ended),
        HoldAction::End { used } => (used, HoldReply::Lost),
        HoldAction::Renew(_) if has_expired => (0, HoldReply::Expired),
        HoldAction::Renew(lifetime) => {
            let receipt = match is_known {
                // Not for less than is left of it: the holder may not get this reply.
                true => {
                    let time = lifetime.time.max(left);
                    hold_more(held, now, units, Lifetime { time, ..lifetime })
                }
                false => held.hold(now, units, lifetime, epoch),
            };
            (0, HoldReply::Renewed(receipt))
        }
    }
}

/// Returns whether units of this hold, if it has not expired, are held.
fn knows(held: &Held, receipt: HoldReceipt) -> bool {
    match held {
        Held::None => false,
        Held::Endless(core) => core.amount > 0 && core.at == receipt.epoch,
        Held::Expiring(slots) => !slots.is_empty() && slots.epoch == receipt.epoch,
    }
}

/// Removes units of a hold that is known.
fn take(held: &mut Held, now: i64, receipt: HoldReceipt, units: i64) {
    match held {
        Held::None => {}
        Held::Endless(core) => core.amount = (core.amount - units).max(0),
        Held::Expiring(slots) => take_from_slots(slots, now, receipt, units),
    }
}

/// Holds units of the same epoch, also if none are held at the moment: a hold that is renewed.
fn hold_more(held: &mut Held, now: i64, units: i64, lifetime: Lifetime) -> HoldReceipt {
    match held {
        Held::Expiring(slots) => slots.hold(now, units, lifetime),
        _ => held.hold(now, units, lifetime, now),
    }
}

/// Removes units, from the slot that the receipt names, or the later ones that it may have
/// joined. If they are not there, the units of other holds stay: after a failover, the state
/// can be older than the hold, although its epoch is the same.
fn take_from_slots(slots: &mut Slots, now: i64, receipt: HoldReceipt, mut units: i64) {
    slots.touch(now);
    let last = receipt.ends.max(slots.joined);
    let of_hold = |slot: &&mut Slot| slot.ends >= receipt.ends && slot.ends <= last;
    for slot in slots.slots.iter_mut().filter(of_hold) {
        let taken = slot.units.min(units);
        slot.units -= taken;
        units -= taken;
    }
    slots.slots.retain(|slot| slot.units > 0);
    let joined = slots.slots.iter().rfind(|slot| slot.ends <= slots.joined);
    slots.joined = joined.map_or(0, |slot| slot.ends);
}
