//! The keeper of holds: a task at home renews them while their permits are held, and ends them, in
//! calls of many keys. What the calls say is in the engine.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, mem,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use redis::{RedisError, ServerErrorKind};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout, timeout_at},
};
use tower_ratelimit_engine::script;

use super::{
    backend::Backend,
    connections::{ANSWER_TIMEOUT, Command, Deadline, TransportError, home},
    holds::{Due, Ended, PAUSE, lifetime},
    wire,
};
use crate::{
    algorithm::{HoldAction, HoldChange, HoldReply},
    observe::Event,
    store::{HoldGuard, RenewableHold},
    sync::lock,
};

/// The delay before a call, which collects ends, if no request waits for them.
const GATHER: Duration = Duration::from_millis(5);
/// The most keys of a call, and the most changes, as for checks.
const MAX_KEYS: usize = 64;
const MAX_CHANGES: usize = 512;
/// The most calls under way at each node: in a cluster, each has one key.
const MAX_CALLS: usize = 16;
/// The time after which ends are sent beside calls that have no answer yet. Before it, a call
/// collects the ends that come during the one before.
const ROUND: Duration = Duration::from_millis(20);

/// Keeps the holds of a store and its clones.
#[derive(Clone)]
pub(super) struct Keeper(Arc<Backend>);

/// The change of a hold, which a call carries.
enum Sent {
    Renewal(Renewal),
    End(Ended),
}

/// A renewal under way. The drop ends it.
struct Renewal {
    id: u64,
    hold: RenewableHold,
    keeper: Keeper,
}

impl Drop for Renewal {
    fn drop(&mut self) {
        lock(&self.keeper.0.holds).end_renewal(self.id);
        // The next renewal can be due before the task wakes, and an end may have waited for this.
        self.keeper.wake();
    }
}

impl Sent {
    fn hold(&self) -> &RenewableHold {
        let (Self::Renewal(Renewal { hold, .. }) | Self::End(Ended { hold, .. })) = self;
        hold
    }

    fn change(&self) -> HoldChange {
        match self {
            Self::Renewal(Renewal { hold, .. }) => {
                let action = HoldAction::Renew(lifetime(hold.lifetime));
                HoldChange { action, ..hold.end(0) }
            }
            Self::End(Ended { hold, used, .. }) => hold.end(*used),
        }
    }
}

impl Keeper {
    pub(super) fn of(backend: &Arc<Backend>) -> Self {
        Self(backend.clone())
    }

    /// Keeps a hold until its guard ends it.
    pub(super) fn keep(&self, hold: RenewableHold) -> Box<dyn HoldGuard> {
        let (id, due) = lock(&self.0.holds).keep(hold);
        self.wake_by(due);
        Box::new(RedisHold { id, keeper: self.clone() })
    }

    fn queue(&self, end: Ended) {
        let too_many = lock(&self.0.holds).end(end);
        drop(too_many); // not under the lock
        self.wake();
    }

    /// Lets the task look for work now.
    fn wake(&self) {
        self.wake_by(Instant::now());
    }

    /// Lets the task look for work at this time at the latest. Starts one, if there is none.
    fn wake_by(&self, at: Instant) {
        let mut holds = lock(&self.0.holds);
        if !mem::replace(&mut holds.has_task, true) {
            drop(holds);
            let keeper = self.clone();
            home::supervise(move || run(keeper.clone()));
        } else if holds.wakes_by(at) {
            drop(holds);
            self.0.holds_changed.notify_one();
        }
    }

    /// Takes what has to be sent now. Returns the time of the next renewal, too, if there is one.
    fn take_due(&self) -> (Vec<Sent>, Option<Instant>) {
        let Due { late, ended, renewals, next } = lock(&self.0.holds).take_due();
        drop(late);
        let end = |mut end: Ended| {
            end.hold.update_settings();
            Sent::End(end)
        };
        let renewal = |(id, mut hold): (u64, RenewableHold)| {
            hold.update_settings();
            Sent::Renewal(Renewal { id, hold, keeper: self.clone() })
        };
        let ends = ended.into_iter().map(end);
        (ends.chain(renewals.into_iter().map(renewal)).collect(), next)
    }

    /// Does what the answer to a change demands.
    fn answered(&self, mut sent: Sent, began: Instant, reply: HoldReply) {
        if let Sent::End(end) = &mut sent {
            let is_late = matches!(reply, HoldReply::Expired) && end.used < end.hold.units;
            end.is_settled = !is_late;
        }
        let hold = sent.hold();
        let RenewableHold { settings, observers, key, units: held, receipt, lifetime, .. } = hold;
        let (limiter, held) = (settings.name, *held);
        let lost = Event::HoldLost { limiter, key, held };
        match (&sent, reply) {
            (Sent::Renewal(Renewal { id, .. }), HoldReply::Renewed(new)) => {
                lock(&self.0.holds).renewed(*id, new, began, *lifetime);
                if new.epoch != receipt.epoch {
                    observers.report(&lost);
                }
            }
            (Sent::Renewal(Renewal { id, .. }), HoldReply::Expired) => {
                lock(&self.0.holds).expired(*id);
                observers.report(&Event::HoldExpired { limiter, key, held });
            }
            (_, HoldReply::Lost) => observers.report(&lost),
            _ => {}
        }
    }

    /// Keeps a change whose call has failed for another try, if the server has not executed it.
    fn failed(&self, sent: Sent, may_have_run: bool) {
        match sent {
            Sent::Renewal(Renewal { id, .. }) => {
                lock(&self.0.holds).renew_again(id, may_have_run);
            }
            // Repeated, an end would take the units of another hold. A state that another version
            // has written stays unreadable for this process. The drop reports the end.
            Sent::End(_) if may_have_run => {}
            Sent::End(end) => self.queue(end),
        }
    }
}

/// Sends what is due, until there are no holds.
async fn run(keeper: Keeper) {
    let (keeper, changed) = (&keeper, &keeper.0.holds_changed);
    // For the calls to each node.
    let mut permits: HashMap<usize, Arc<Semaphore>> = HashMap::new();
    loop {
        drop(timeout(GATHER, keeper.0.ends.needed()).await);
        let (due, next) = keeper.take_due();
        if due.is_empty() {
            match next {
                Some(next) => drop(timeout_at(next.into(), changed.notified()).await),
                None if lock(&keeper.0.holds).end_task() => return,
                // An end that waits for a renewal.
                None => changed.notified().await,
            }
            continue;
        }
        let by_key = keeper.0.is_clustered.load(Relaxed);
        permits.retain(|_, permits| Arc::strong_count(permits) > 1); // nodes leave a cluster
        let mut round = JoinSet::new();
        for call in calls(keeper, due, by_key) {
            let new = || Arc::new(Semaphore::new(MAX_CALLS));
            let permits = permits.entry(call.node_id()).or_insert_with(new).clone();
            // A node that does not answer must not delay the calls to others. One server gets a
            // call with the changes that come while its permits are taken.
            let permit = if by_key { None } else { permits.clone().acquire_owned().await.ok() };
            round.spawn(async move {
                let _permit =
                    if permit.is_some() { permit } else { permits.acquire_owned().await.ok() };
                send(call).await;
            });
        }
        drop(timeout(ROUND, async { while round.join_next().await.is_some() {} }).await);
        round.detach_all();
    }
}

/// The changes of some keys, which one call carries. Those that are left when it is dropped have
/// failed.
struct Call {
    keeper: Keeper,
    keys: BTreeMap<String, Vec<Sent>>,
    /// True if the server may have executed the changes that are left.
    may_have_run: bool,
}

impl Call {
    fn node_id(&self) -> usize {
        let Backend { client, .. } = &*self.keeper.0;
        let hold = self.keys.values().flatten().next().map(Sent::hold);
        let name = hold.map(|hold| self.keeper.0.key(&hold.settings, &hold.key));
        Arc::as_ptr(&client.node_of(name.map_or(0, |name| client.slot_of(&name)))).addr()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        for sent in mem::take(&mut self.keys).into_values().flatten() {
            self.keeper.failed(sent, self.may_have_run);
        }
    }
}

/// Divides changes into calls: each of keys of one limiter, and in a cluster of one key.
fn calls(keeper: &Keeper, due: Vec<Sent>, by_key: bool) -> Vec<Call> {
    let mut limiters: HashMap<usize, Vec<Sent>> = HashMap::new();
    for sent in due {
        limiters.entry(Arc::as_ptr(&sent.hold().settings) as usize).or_default().push(sent);
    }
    let max_keys = if by_key { 1 } else { MAX_KEYS };
    let mut calls = vec![];
    let mut add = |keys| calls.push(Call { keeper: keeper.clone(), keys, may_have_run: false });
    for all in limiters.into_values() {
        let (mut keys, mut count) = (BTreeMap::<_, Vec<_>>::new(), 0);
        for sent in all {
            let key = sent.hold().key.as_str().to_owned();
            if keys.len() == max_keys && !keys.contains_key(&key) || count == MAX_CHANGES {
                add(mem::take(&mut keys));
                count = 0;
            }
            keys.entry(key).or_default().push(sent);
            count += 1;
        }
        add(keys);
    }
    calls
}

/// Executes a call.
async fn send(mut call: Call) {
    let (began, keeper) = (Instant::now(), call.keeper.clone());
    let first = call.keys.values().flatten().next();
    let Some(settings) = first.map(|sent| sent.hold().settings.clone()) else { return };
    let keys = call.keys.values().map(|sent| {
        let key = keeper.0.key(&settings, &sent[0].hold().key);
        (key, sent.iter().map(Sent::change).collect())
    });
    let keys: Vec<(String, Vec<HoldChange>)> = keys.collect();
    let changes = keys.iter().map(|(key, changes)| (&**key, &**changes));
    let (command, script) = wire::command(keys.len(), |arguments| {
        script::change_holds(&settings.params, changes, arguments)
    });
    let command = Command::script(&command, &script.text);
    call.may_have_run = true;
    let reply = keeper.0.client.execute(Deadline::new(ANSWER_TIMEOUT), command).await;
    let results = reply.and_then(|(reply, _)| {
        let results = wire::parts(&reply, |_, found| script::read_changes(found));
        results.map_err(TransportError::of_redis)
    });
    match results {
        Ok(results) => {
            call.may_have_run = false;
            for ((key, sent), result) in mem::take(&mut call.keys).into_iter().zip(results) {
                let replies = result.map_err(RedisError::from);
                let replies = replies.and_then(|replies| replies.ok_or_else(wire::malformed));
                match replies.map_err(TransportError::of_redis) {
                    Ok(replies) => {
                        let both = sent.into_iter().zip(replies);
                        both.for_each(|(sent, reply)| keeper.answered(sent, began, reply));
                    }
                    Err(error) if error.may_have_run() => {
                        sent.into_iter().for_each(|sent| keeper.failed(sent, true));
                    }
                    Err(_) => _ = call.keys.insert(key, sent),
                }
            }
        }
        Err(error) => {
            let is_split = error.server_kind() == Some(ServerErrorKind::CrossSlot);
            keeper.0.is_clustered.fetch_or(is_split, Relaxed);
            call.may_have_run = error.may_have_run() && !is_split;
        }
    }
    if !call.may_have_run && !call.keys.is_empty() {
        sleep(PAUSE).await;
    }
}

/// The guard of a hold.
struct RedisHold {
    id: u64,
    keeper: Keeper,
}

impl HoldGuard for RedisHold {
    fn end(self: Box<Self>, used: u64) {
        let (id, Backend { holds, ends, denials, lines, .. }) = (self.id, &*self.keeper.0);
        let known = lock(holds).find(id);
        let Some((hold, taken, expires)) = known else { return };
        let key = lines.line_of(hold.settings.name, &hold.key);
        lines.units_end(key, taken);
        let (is_renewed, is_settled) = (false, false);
        let (_open, _change) = (ends.begin(key), denials.begin_return(&hold.settings, &hold.key));
        // Units that count at a time are free when they are returned, and not before.
        let hurries = !hold.settings.params.spends() || lines.has_waiting(key);
        let end = Ended { id, hold, used, is_renewed, expires, is_settled, _open, _change };
        self.keeper.queue(end);
        // Not before: the task could look for the end too early, and gather others with it then.
        if hurries {
            ends.hurry();
        }
    }

    fn is_expired(&self) -> bool {
        lock(&self.keeper.0.holds).is_expired(self.id)
    }
}

/// Without an end, the hold lasts until it expires.
impl Drop for RedisHold {
    fn drop(&mut self) {
        let live = lock(&self.keeper.0.holds).take(self.id);
        // Not under the lock. The task ends with the last hold.
        if live.is_some() {
            self.keeper.wake();
        }
    }
}

impl fmt::Debug for RedisHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisHold").field("id", &self.id).finish_non_exhaustive()
    }
}
