//! `top`: the keys with the least remaining, among those that a bounded scan finds.

use std::{cmp::Reverse, collections::BTreeMap, process::ExitCode};

use serde_json::json;
use tokio::task::JoinSet;
use tower_ratelimit::{Key, Limiter, RedisStore, config::Limit, store::KeyState};

use crate::{
    flags::Shared,
    limits::{self, sources},
    peek::as_json,
    report::{
        DAMAGED, Failure, OF_ANOTHER_VERSION, Unreadable, is_seen, merged, readable, rest,
        state_json, verdict,
    },
    text::{Tone, count as counted, headings, table},
};

/// The peeks under way. They hold up the requests of the service for microseconds each.
const PEEKS: usize = 32;

/// What a scan has found.
#[derive(Default)]
struct Scanned {
    keys: BTreeMap<String, KeyState>,
    /// The errors of keys that cannot be read.
    unreadable: BTreeMap<String, Unreadable>,
    scans: usize,
    is_complete: bool,
}

pub async fn run(
    flags: &Shared,
    count: usize,
    max_keys: usize,
    max_scans: usize,
) -> Result<ExitCode, Failure> {
    let limits = limits::limits(flags, false)?;
    let store = limits::store(flags)?;
    let mut found = vec![];
    let mut code = ExitCode::SUCCESS;
    for (name, limit) in &limits {
        let scanned = scan(&store, name, limit, max_keys, max_scans).await?;
        if !scanned.unreadable.is_empty() {
            code = ExitCode::FAILURE;
        }
        let all = scanned.keys.len();
        let mut keys: Vec<_> = scanned.keys.iter().collect();
        let blocked = |state: &KeyState| state.blocked_for().is_some();
        keys.sort_by_key(|(_, it)| (!blocked(it), it.remaining(), Reverse(it.reset_after())));
        keys.truncate(count);
        if flags.json {
            let keys: Vec<_> = keys
                .iter()
                .map(|(key, it)| merged(json!({ "key": key }), state_json(it)))
                .collect();
            let errors = |is| -> BTreeMap<_, _> {
                let those = scanned.unreadable.iter().filter(|(_, it)| it.is == is);
                those.map(|(key, it)| (key, &it.error)).collect()
            };
            let scan = json!({
                "keys_with_state": all,
                "scan_commands": scanned.scans,
                "complete": scanned.is_complete,
                "damaged": errors(DAMAGED),
                "other_version": errors(OF_ANOTHER_VERSION),
                "keys": keys,
            });
            found.push(as_json(name, limit, scan));
            continue;
        }
        let end = if scanned.is_complete { "all" } else { "not all: see --max-keys, --max-scans" };
        println!(
            "{name}: {}, {}; {} with state, by a scan of {end} keys of Redis",
            limit.algorithm().name(),
            limit.quota(),
            counted(all, "key")
        );
        if !keys.is_empty() {
            let mut rows =
                vec![headings(&["key", "now", "remaining", "next unit in", "all back in"])];
            rows.extend(keys.iter().map(|(key, state)| {
                let cells = [((*key).clone(), Tone::Plain), verdict(state)];
                cells.into_iter().chain(rest(state)).collect()
            }));
            print!("{}", table(&rows, &[2]));
        }
        for (key, Unreadable { is, error }) in &scanned.unreadable {
            eprintln!("error: {name}: {key} is {is}: {error}");
        }
    }
    if flags.json {
        println!("{}", json!({ "command": "top", "limits": found }));
    }
    Ok(code)
}

async fn scan(
    store: &RedisStore,
    name: &str,
    limit: &Limit,
    max_keys: usize,
    max_scans: usize,
) -> Result<Scanned, Failure> {
    let limiter =
        limit.limiter(name, store.clone()).map_err(|it| Failure::usage(it.to_string()))?;
    let mut scan = store.scan(name, limit.algorithm());
    let mut scanned = Scanned::default();
    let mut peeks = JoinSet::new();
    while scanned.scans < max_scans && scanned.keys.len() + scanned.unreadable.len() < max_keys {
        let step = scan.next().await;
        let Some(keys) = step.map_err(|error| Failure::new(sources(&error)))? else {
            scanned.is_complete = true;
            break;
        };
        scanned.scans += 1;
        for key in keys {
            if peeks.len() >= PEEKS {
                add(&mut scanned, peeks.join_next().await)?;
            }
            peeks.spawn(peek(limiter.clone(), key));
        }
        while let Some(peeked) = peeks.join_next().await {
            add(&mut scanned, Some(peeked))?;
        }
    }
    Ok(scanned)
}

type Peeked = (String, Result<KeyState, tower_ratelimit::Error>);

async fn peek(limiter: Limiter, key: Key<'static>) -> Peeked {
    let state = limiter.peek(&key).await;
    (key.to_string(), state)
}

fn add(
    scanned: &mut Scanned,
    peeked: Option<Result<Peeked, tokio::task::JoinError>>,
) -> Result<(), Failure> {
    let Some(peeked) = peeked else { return Ok(()) };
    let (key, state) = peeked.map_err(|error| Failure::new(error.to_string()))?;
    match readable(state)? {
        // A key whose quota is restored expires a little later.
        Ok(state) if !is_seen(&state) => {}
        Ok(state) => drop(scanned.keys.insert(key, state)),
        Err(error) => drop(scanned.unreadable.insert(key, error)),
    }
    Ok(())
}
