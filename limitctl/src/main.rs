//! `limitctl`: looks at the keys of rate limits in Redis, blocks them and lets them go. For people
//! on call; docs/limitctl.md shows each command.

mod change;
mod flags;
mod keys;
mod limits;
mod list;
mod peek;
mod report;
mod text;
mod top;

use std::{process::ExitCode, time::Instant};

use clap::{Parser, error::ErrorKind};
use serde_json::json;

use self::{
    change::Change,
    flags::{Command, Flags, Shared},
    limits::{key_settings, sources},
    report::Failure,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let flags = match Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) => {
            let _ = error.print();
            let is_help =
                matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            return if is_help { ExitCode::SUCCESS } else { ExitCode::from(2) };
        }
    };
    match run(&flags).await {
        Ok(code) => code,
        Err(failure) => {
            if flags.shared.json {
                println!("{}", json!({ "error": failure.message }));
            }
            eprintln!("error: {}", failure.message.trim_end());
            failure.code()
        }
    }
}

async fn run(flags: &Flags) -> Result<ExitCode, Failure> {
    let shared = &flags.shared;
    match &flags.command {
        Command::Ping => ping(shared).await,
        Command::Limits { prefix, max_scans } => {
            list::run(shared, prefix.as_deref(), *max_scans).await
        }
        Command::Top { count, max_keys, max_scans } => {
            top::run(shared, *count, *max_keys, *max_scans).await
        }
        Command::Peek(key) => {
            let key = key_settings(shared)?.key(&key.parts).map_err(Failure::usage)?;
            peek::run(shared, &key).await
        }
        Command::Block { time, key } => change(shared, Change::Block(*time), &key.parts).await,
        Command::Unblock(key) => change(shared, Change::Unblock, &key.parts).await,
        Command::Reset(key) => change(shared, Change::Reset, &key.parts).await,
    }
}

async fn change(flags: &Shared, change: Change, key: &[String]) -> Result<ExitCode, Failure> {
    let key = key_settings(flags)?.key(key).map_err(Failure::usage)?;
    change::run(flags, change, &key).await
}

async fn ping(flags: &Shared) -> Result<ExitCode, Failure> {
    let store = limits::store(flags)?;
    let start = Instant::now();
    store.ping().await.map_err(|error| Failure::new(sources(&error)))?;
    let seconds = start.elapsed().as_secs_f64();
    match flags.json {
        true => println!("{}", json!({ "command": "ping", "ok": true, "seconds": seconds })),
        false => println!(
            "ok: the store decides, and the user of this URL lacks no permission ({:.1} ms, with \
             connecting)",
            seconds * 1_000.0
        ),
    }
    Ok(ExitCode::SUCCESS)
}
