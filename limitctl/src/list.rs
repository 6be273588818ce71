//! `limits`: the limits that have keys in Redis, found by a bounded scan, without a file.

use std::{
    collections::{BTreeMap, HashSet, hash_map::RandomState},
    hash::BuildHasher,
    process::ExitCode,
};

use serde_json::json;

use crate::{
    flags::Shared,
    limits::{self, sources},
    report::Failure,
    text::{Tone, count, headings, number, table},
};

/// The number of keys by prefix, limit and algorithm.
type Found = BTreeMap<[String; 3], u64>;

pub async fn run(
    flags: &Shared,
    prefix: Option<&str>,
    max_scans: usize,
) -> Result<ExitCode, Failure> {
    let store = limits::store(flags)?;
    let is_file = flags.limits.is_some() || flags.quota.is_some();
    let known = if is_file { limits::limits(flags, false)? } else { vec![] };
    let own = limits::prefix(flags);
    let is_wanted = |[under, limit, _]: &[String; 3]| {
        prefix.is_none_or(|prefix| prefix == under)
            && (flags.limit.is_empty() || flags.limit.contains(limit))
    };
    // The limits of the file without keys, too.
    let names = known.iter().map(|(name, limit)| [own, name, limit.algorithm().name()]);
    let names = names.map(|it| it.map(str::to_owned)).filter(is_wanted);
    let mut found: Found = names.map(|name| (name, 0)).collect();
    let (mut scan, mut scans, mut is_complete) = (store.scan_all(), 0, false);
    // A scan can find a key again.
    let (hasher, mut seen) = (RandomState::new(), HashSet::new());
    while scans < max_scans && !is_complete {
        let step = scan.next_names().await;
        let step = step.map_err(|error| Failure::new(sources(&error)))?;
        is_complete = step.is_none();
        scans += usize::from(!is_complete);
        for name in step.into_iter().flatten() {
            let Some(of) = limit_of(&name).filter(is_wanted) else { continue };
            if seen.insert(hasher.hash_one(&name)) {
                *found.entry(of).or_default() += 1;
            }
        }
    }
    let quota = |[prefix, name, algorithm]: &[String; 3]| {
        let mut known = known.iter().filter(|(known, _)| prefix == own && known == name);
        let limit = known.find(|(_, limit)| limit.algorithm().name() == algorithm)?;
        Some(limit.1.quota().to_string())
    };
    if flags.json {
        let limits = found.iter().map(|(of, keys)| {
            let [prefix, limit, algorithm] = of;
            json!({ "prefix": prefix, "limit": limit, "algorithm": algorithm, "quota": quota(of),
                "keys": keys })
        });
        let limits: Vec<_> = limits.collect();
        let head = json!({ "command": "limits", "scan_commands": scans, "complete": is_complete });
        println!("{}", crate::report::merged(head, json!({ "limits": limits })));
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![headings(&["prefix", "limit", "algorithm", "quota", "keys"])];
    rows.extend(found.iter().map(|(of, keys)| {
        let quota = quota(of).unwrap_or_else(|| "-".to_owned());
        let cells = of.iter().cloned().chain([quota, number(*keys)]);
        cells.map(|text| (text, Tone::Plain)).collect()
    }));
    print!("{}", table(&rows, &[4]));
    let end = if is_complete { "all" } else { "not all: see --max-scans" };
    println!("{}, by a scan of {end} keys of Redis", count(found.len(), "limit"));
    Ok(ExitCode::SUCCESS)
}

/// Returns the prefix, the limit and the algorithm in the name of a key.
fn limit_of(name: &str) -> Option<[String; 3]> {
    let (head, _) = name.split_once(":{")?;
    let mut parts = head.rsplitn(3, ':').map(str::to_owned);
    let (algorithm, limit) = (parts.next()?, parts.next()?);
    Some([parts.next()?, limit, algorithm])
}
