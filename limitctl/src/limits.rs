//! The store and the limits that the flags name.

use std::{env, fs, path::Path, time::Duration};

use serde::Deserialize;
use tower_ratelimit::{
    RedisStore,
    config::{Limit, Limits},
    store::{RedisConfig, StoreError},
};

use crate::{flags::Shared, keys::Settings, report::Failure};

/// The deadline of a call, if the URL has none. People can wait longer than requests.
const DEADLINE: Duration = Duration::from_secs(2);

/// The environment variable for `--limits`.
const FILE_VARIABLE: &str = "RATE_LIMIT_FILE";

/// A limit and its name.
pub type Named = (String, Limit);

/// Returns the store, which connects when it is first used.
pub fn store(flags: &Shared) -> Result<RedisStore, Failure> {
    let missing = "--store: no URL; write --store redis://HOST/?prefix=PREFIX as in the service, \
         or set RATE_LIMIT_STORE";
    let url = flags.store.as_deref().filter(|url| !url.is_empty());
    let url = url.ok_or_else(|| Failure::usage(missing))?;
    if url.starts_with("memory") {
        return Err(Failure::usage(
            "--store: counts in memory are inside of the service; write the URL of a Redis",
        ));
    }
    let invalid = |error: StoreError| Failure::usage(format!("--store: {}", sources(&error)));
    let config = RedisConfig::from_url(url).map_err(invalid)?;
    // This process asks once: a remembered denial could be out of date.
    let config = config.denial_ttl(Duration::ZERO);
    let has_deadline = url.contains("?deadline=") || url.contains("&deadline=");
    let config = if has_deadline { config } else { config.deadline(DEADLINE) };
    RedisStore::new(config).map_err(invalid)
}

/// Returns the prefix in the URL of the store.
pub fn prefix(flags: &Shared) -> &str {
    let parameters = flags.store.as_deref().unwrap_or_default().split(['?', '&']).skip(1);
    parameters.filter_map(|it| it.strip_prefix("prefix=")).next().unwrap_or("ratelimit")
}

/// Returns an error with its causes in one line.
pub fn sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        if !text.ends_with(&error.to_string()) {
            text += &format!(": {error}");
        }
        source = error.source();
    }
    text
}

/// Returns the limits that a command concerns. A change needs their names, if there are several.
pub fn limits(flags: &Shared, is_change: bool) -> Result<Vec<Named>, Failure> {
    let by_flags = flags.algorithm.zip(flags.quota);
    match (&flags.limits, by_flags) {
        (_, Some((algorithm, quota))) => {
            let [name] = &*flags.limit else {
                return Err(Failure::usage(
                    "--limit: --algorithm and --quota describe one limit; write its name, such as \
                     --limit api",
                ));
            };
            let limit = Limit::try_new(algorithm, quota)
                .map_err(|error| Failure::usage(format!("--quota: {error}")))?;
            Limits::default()
                .insert(name, limit)
                .map_err(|error| Failure::usage(format!("--limit: {error}")))?;
            Ok(vec![(name.clone(), limit)])
        }
        (Some(file), None) => chosen(&read(file)?, file, &flags.limit, is_change),
        (None, None) => {
            const ONE: &str = "--algorithm ALGORITHM --quota QUOTA as in the service, or ";
            let (problem, one) = match &*flags.limit {
                [] => ("no limits".to_owned(), format!("--limit NAME {ONE}")),
                [name] => (format!("--limit {name}: no algorithm and quota"), ONE.to_owned()),
                names => (format!("--limit {}: no quotas", names.join(", ")), String::new()),
            };
            Err(Failure::usage(format!(
                "{problem}; add {one}--limits FILE with the limits of the service, or set \
                 {FILE_VARIABLE} to that file; `limitctl limits` lists the names and algorithms \
                 that have keys"
            )))
        }
    }
}

fn chosen(
    limits: &Limits,
    file: &Path,
    names: &[String],
    is_change: bool,
) -> Result<Vec<Named>, Failure> {
    let known: Vec<_> = limits.iter().map(|(name, _)| name).collect();
    let known = known.join(", ");
    if names.is_empty() {
        let all: Vec<Named> = limits.clone().into_iter().collect();
        return match all.len() {
            0 => Err(Failure::usage(format!("{}: no limits", named(file)))),
            2.. if is_change => Err(Failure::usage(format!(
                "--limit: {} has several limits; write --limit with one of them, or repeat it: \
                 {known}",
                file.display()
            ))),
            _ => Ok(all),
        };
    }
    let found = names.iter().map(|name| match limits.get(name) {
        Some(limit) => Ok((name.clone(), limit)),
        None => Err(Failure::usage(format!(
            "--limit: {} has no limit {name:?}; write one of: {known}",
            file.display()
        ))),
    });
    found.collect()
}

/// Returns the file, behind the flag or the environment variable that names it.
fn named(file: &Path) -> String {
    let is_variable = env::var_os(FILE_VARIABLE).is_some_and(|name| name == file);
    format!("{} {}", if is_variable { FILE_VARIABLE } else { "--limits" }, file.display())
}

/// Reads a file that is a table of limits, or has one in `limits`, beside other settings.
fn read(file: &Path) -> Result<Limits, Failure> {
    #[derive(Deserialize)]
    struct Config {
        limits: Limits,
    }

    let wrong = |why: String| Failure::usage(format!("{}: {why}", named(file)));
    let text = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    if file.extension().is_some_and(|it| it == "json") {
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        return match value.get("limits").is_some_and(|it| it.get("algorithm").is_none()) {
            true => serde_json::from_str(&text).map(|config: Config| config.limits),
            false => serde_json::from_str(&text),
        }
        .map_err(|error| wrong(error.to_string()));
    }
    let table: toml::Table = toml::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    match table.get("limits").is_some_and(|it| it.get("algorithm").is_none()) {
        true => toml::from_str(&text).map(|config: Config| config.limits),
        false => toml::from_str(&text),
    }
    .map_err(|error| wrong(error.to_string()))
}

/// Returns the settings of the extractors.
pub fn key_settings(flags: &Shared) -> Result<Settings, Failure> {
    let secret = flags.hashed_with.as_deref().map(|variable| {
        let secret = env::var(variable).ok().filter(|secret| !secret.is_empty());
        secret.map(String::into_bytes).ok_or_else(|| {
            Failure::usage(format!(
                "--hashed-with: the environment variable {variable} is not set; set it to the \
                 secret of the service"
            ))
        })
    });
    Ok(Settings { ipv6_prefix: flags.ipv6_prefix, secret: secret.transpose()? })
}
