//! `block`, `unblock` and `reset`. Each looks at the key first, so that it can tell what changes.

use std::{process::ExitCode, time::Duration};

use serde_json::json;
use tower_ratelimit::{Algorithm, Key, Limiter, store::KeyState};

use crate::{
    flags::Shared,
    limits,
    peek::{as_json, no_state},
    report::{Failure, NO_STATE, Unreadable, is_seen, merged, readable, state_json, verdict},
    text::{number, time},
};

#[derive(Clone, Copy)]
pub enum Change {
    Block(Duration),
    Unblock,
    Reset,
}

impl Change {
    fn name(self) -> &'static str {
        match self {
            Self::Block(_) => "block",
            Self::Unblock => "unblock",
            Self::Reset => "reset",
        }
    }

    /// Returns whether it does something to a key without state.
    fn applies_to_unseen(self) -> bool {
        matches!(self, Self::Block(_))
    }

    /// Returns whether it does something to a key.
    fn changes(self, before: &KeyState) -> bool {
        match self {
            Self::Block(time) => before.blocked_for().is_none_or(|rest| rest <= time),
            Self::Unblock => before.blocked_for().is_some(),
            Self::Reset => is_seen(before),
        }
    }

    /// Makes the change. Returns the state of the key afterwards.
    async fn apply(self, limiter: &Limiter, key: &Key<'_>) -> Result<KeyState, Failure> {
        Ok(match self {
            Self::Block(time) => limiter.block(key, time).await?,
            Self::Unblock => limiter.unblock(key).await?,
            Self::Reset => {
                limiter.reset(key).await?;
                limiter.peek(key).await?
            }
        })
    }

    fn would(self, before: &KeyState) -> String {
        let (now, left) = (verdict(before).0, number(before.remaining()));
        match self {
            Self::Block(rest) if before.blocked_for().is_some_and(|it| it > rest) => {
                format!("would stay {now}, which is longer: `limitctl unblock` first")
            }
            Self::Block(rest) => format!("would be blocked for {}; now {now}", time(rest)),
            Self::Unblock if before.blocked_for().is_none() => {
                format!("is not blocked, and nothing would change; now {now}, {left} remaining")
            }
            Self::Unblock => format!("would be unblocked; now {now}"),
            Self::Reset => format!("would be reset; now {now}, {left} remaining"),
        }
    }

    fn done(self, before: &KeyState, after: &KeyState) -> String {
        let (was, now) = (verdict(before).0, verdict(after).0);
        let left = number(after.remaining());
        match self {
            Self::Block(rest) if before.blocked_for().is_some_and(|it| it > rest) => {
                format!("stays {now}, which is longer: `limitctl unblock` first")
            }
            Self::Block(_) => format!("is {now}"),
            Self::Unblock if before.blocked_for().is_none() => {
                format!("was not blocked: {was}, {left} remaining")
            }
            Self::Unblock if !after.allows() => {
                format!("is unblocked, but {now}: its quota is used up; `limitctl reset` frees it")
            }
            Self::Unblock => format!("is unblocked, {left} remaining"),
            Self::Reset => format!("is reset, {left} remaining; it was {was}"),
        }
    }
}

pub async fn run(flags: &Shared, change: Change, key: &Key<'_>) -> Result<ExitCode, Failure> {
    let limits = limits::limits(flags, true)?;
    let store = limits::store(flags)?;
    let (mut peeked, mut unreadable) = (vec![], vec![]);
    for (name, limit) in &limits {
        let limiter = limit.limiter(name, store.clone());
        let limiter = limiter.map_err(|error| Failure::usage(error.to_string()))?;
        match readable(limiter.peek(key).await)? {
            Ok(before) => peeked.push((name, limit, limiter, before)),
            Err(error) => unreadable.push((name, limit, limiter, error)),
        }
    }
    let mut found = vec![];
    let mut code = ExitCode::SUCCESS;
    let has_unreadable = !unreadable.is_empty();
    for (name, limit, limiter, Unreadable { is, error }) in unreadable {
        let is_reset = matches!(change, Change::Reset) && !flags.dry_run;
        if is_reset {
            limiter.reset(key).await?;
        }
        match (change, is_reset) {
            (Change::Reset, true) if !flags.json => {
                println!("{name}: {key} is reset; it was {is}: {error}");
            }
            (Change::Reset, false) if !flags.json => {
                println!("{name}: {key} would be reset; now {is}: {error}");
            }
            (Change::Reset, _) => {}
            _ => {
                eprintln!("error: {name}: {error}");
                code = ExitCode::FAILURE;
            }
        }
        let states = json!({ "would_change": matches!(change, Change::Reset), "changed": is_reset,
            "error": error });
        found.push(as_json(name, limit, states));
    }
    let seen = has_unreadable || peeked.iter().any(|(.., before)| is_seen(before));
    // Before a block, which is state, too.
    let warning = if seen { None } else { Some(no_state(flags, key, &limits).await?) };
    let mut may_be_remembered = false;
    for (name, limit, limiter, before) in peeked {
        // No denial of a limit on concurrency is, but that of a block.
        may_be_remembered |=
            limit.algorithm() != Algorithm::Concurrency || before.blocked_for().is_some();
        let applies = is_seen(&before) || change.applies_to_unseen();
        let after = match applies && !flags.dry_run {
            true => Some(change.apply(&limiter, key).await?),
            false => None,
        };
        if !flags.json {
            match &after {
                Some(after) => println!("{name}: {key} {}", change.done(&before, after)),
                None if applies => println!("{name}: {key} {}", change.would(&before)),
                None => println!("{name}: {key} has no state; nothing to {}", change.name()),
            }
            if matches!(change, Change::Reset) && before.held() > 0 {
                println!(
                    "{name}: processes that still hold units hold them again with their next \
                     renewal, within 30 s by default; those of a crashed process stay free"
                );
            }
        }
        let states = json!({
            "would_change": change.changes(&before),
            "changed": after.is_some() && change.changes(&before),
            "before": state_json(&before),
            "after": after.as_ref().map(state_json),
        });
        found.push(as_json(name, limit, states));
    }
    if flags.json {
        let head = json!({ "command": change.name(), "key": key.as_str(), "seen": seen });
        println!("{}", merged(head, json!({ "dry_run": flags.dry_run, "limits": found })));
    } else if flags.dry_run {
        println!("dry run: nothing was changed");
    } else if seen && may_be_remembered && !change.applies_to_unseen() {
        println!("replicas that remember a denial of the key deny it for up to 1 s more");
    }
    let Some(warning) = warning else { return Ok(code) };
    eprintln!("{warning}");
    Ok(if change.applies_to_unseen() { ExitCode::SUCCESS } else { NO_STATE.into() })
}
