//! `peek`: what is left of the quota of a key, and the explanation if it has no state.

use std::process::ExitCode;

use serde_json::{Value, json};
use tower_ratelimit::{Algorithm, Key, Quota, config::Limit};

use crate::{
    flags::Shared,
    limits::{self, Named},
    report::{
        Failure, NO_STATE, Unreadable, is_seen, limit_json, merged, readable, rest, state_json,
        verdict,
    },
    text::{Tone, headings, table},
};

pub async fn run(flags: &Shared, key: &Key<'_>) -> Result<ExitCode, Failure> {
    let limits = limits::limits(flags, false)?;
    let store = limits::store(flags)?;
    let mut rows = vec![headings(&[
        "limit",
        "algorithm",
        "quota",
        "now",
        "remaining",
        "next unit in",
        "all back in",
    ])];
    let mut found = vec![];
    let (mut seen, mut unreadable) = (false, vec![]);
    for (name, limit) in &limits {
        let limiter =
            limit.limiter(name, store.clone()).map_err(|it| Failure::usage(it.to_string()))?;
        let state = readable(limiter.peek(key).await)?;
        let plain = |text: &str| (text.to_owned(), Tone::Plain);
        let settings = [plain(name), plain(limit.algorithm().name())];
        let quota = plain(&limit.quota().to_string());
        let cells = settings.into_iter().chain([quota]);
        match state {
            Ok(state) => {
                seen |= is_seen(&state);
                rows.push(cells.chain([verdict(&state)]).chain(rest(&state)).collect());
                found.push(merged(limit_json(name, limit), state_json(&state)));
            }
            Err(Unreadable { is, error }) => {
                rows.push(cells.chain([(is.to_owned(), Tone::Bad)]).collect());
                found.push(merged(limit_json(name, limit), json!({ "error": error })));
                unreadable.push(error);
            }
        }
    }
    match flags.json {
        true => println!(
            "{}",
            json!({ "command": "peek", "key": key.as_str(), "seen": seen, "limits": found })
        ),
        false => print!("key {key}\n{}", table(&rows, &[4])),
    }
    if !unreadable.is_empty() {
        unreadable.iter().for_each(|error| eprintln!("error: {error}"));
        return Ok(ExitCode::FAILURE);
    }
    if seen {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("{}", no_state(flags, key, &limits).await?);
    Ok(NO_STATE.into())
}

/// Returns why a key may have no state: its quota is full again, or the service never saw it, since
/// the key is mistyped or the settings are not those of the service.
pub async fn no_state(flags: &Shared, key: &Key<'_>, limits: &[Named]) -> Result<String, Failure> {
    for (name, limit) in limits {
        if let Some(other) = other_algorithm(flags, key, name, limit).await? {
            return Ok(format!(
                "no state under {}, but {name} has counted {key} with {other}: the service uses \
                 another algorithm than this command; correct the file or --algorithm",
                limit.algorithm().name()
            ));
        }
    }
    let names: Vec<_> = limits.iter().map(|(name, _)| name.as_str()).collect();
    Ok(format!(
        "no state of the key {key} under {}: all of its quota is available, or it was never seen, \
         because the key, the name of the limit or the prefix is not that of the service; \
         `limitctl top` lists the keys with state",
        names.join(", ")
    ))
}

/// Returns the algorithm under which the limit has state of a key.
async fn other_algorithm(
    flags: &Shared,
    key: &Key<'_>,
    name: &str,
    limit: &Limit,
) -> Result<Option<&'static str>, Failure> {
    let store = limits::store(flags)?;
    for algorithm in Algorithm::ALL.iter().copied() {
        if algorithm.name() == limit.algorithm().name() {
            continue;
        }
        // A peek finds state under any quota of the right kind.
        let quota = match algorithm {
            Algorithm::Concurrency => Quota::concurrent(1),
            _ => Quota::per_second(1),
        };
        let Ok(limit) = Limit::try_new(algorithm, quota) else { continue };
        // The name is free again when the limiter is dropped.
        let Ok(limiter) = limit.limiter(name, store.clone()) else { continue };
        if readable(limiter.peek(key).await)?.is_ok_and(|state| is_seen(&state)) {
            return Ok(Some(algorithm.name()));
        }
    }
    Ok(None)
}

/// Returns the states of a key as JSON.
pub fn as_json(name: &str, limit: &Limit, state: Value) -> Value {
    merged(limit_json(name, limit), state)
}
