//! The command line. What the flags mean for a store or a limit is in `limits.rs`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};
use tower_ratelimit::{Algorithm, Quota};

use crate::text::duration_of;

/// Looks at the keys of rate limits in Redis, blocks them and lets them go
#[derive(Parser)]
#[command(name = "limitctl", version)]
#[command(after_help = "\
Keys, as the extractors of a layer make them; the parts of a tuple are several arguments:
  ip:203.0.113.7  ip:2001:db8::7  header:x-api-key=k1  bearer:TOKEN  cookie:session=s1
  query:api_key=k1  route:/users/{id}  global  anonymous  text:alice  scope:user=alice
  raw:header:x-api-key=k1   a key as logs, /top-denied and Redis print it

Exit codes: 0 done, 1 failed (Redis, permissions), 2 wrong usage, 3 no state of the key")]
pub struct Flags {
    #[command(flatten)]
    pub shared: Shared,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Args)]
pub struct Shared {
    /// The URL of the store, as in the service: redis://HOST/?prefix=shop
    /// [env: RATE_LIMIT_STORE]
    #[arg(long, value_name = "URL", env = "RATE_LIMIT_STORE", hide_env = true, global = true)]
    #[arg(verbatim_doc_comment)]
    pub store: Option<String>,

    /// The file with the limits of the service, in TOML or JSON
    /// [env: RATE_LIMIT_FILE]
    #[arg(long, value_name = "FILE", env = "RATE_LIMIT_FILE", hide_env = true, global = true)]
    #[arg(verbatim_doc_comment)]
    pub limits: Option<PathBuf>,

    /// The name of a limit; can be repeated. By default, `peek` and
    /// `top` take all limits of the file
    #[arg(long, value_name = "NAME", global = true, verbatim_doc_comment)]
    pub limit: Vec<String>,

    /// Without a file: the algorithm of the limit, such as token-bucket
    #[arg(long, value_name = "NAME", global = true, requires = "quota")]
    pub algorithm: Option<Algorithm>,

    /// Without a file: the quota of the limit, such as "10/s burst 20"
    /// or "10 concurrent"
    #[arg(long, value_name = "QUOTA", global = true, requires = "algorithm")]
    #[arg(verbatim_doc_comment)]
    pub quota: Option<Quota>,

    /// The environment variable with the secret of a `hashed` extractor
    #[arg(long, value_name = "VARIABLE", global = true)]
    pub hashed_with: Option<String>,

    /// The bits of an IPv6 address in a key, as in `ClientIp`
    #[arg(long, value_name = "BITS", global = true, default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u8).range(..=128))]
    pub ipv6_prefix: u8,

    /// Print one JSON object
    #[arg(long, global = true)]
    pub json: bool,

    /// Print what would change, and change nothing
    #[arg(long, global = true)]
    pub dry_run: bool,
}

#[derive(Subcommand)]
pub enum Command {
    /// Show what is left of the quota of a key
    Peek(KeyParts),
    /// Deny a key for a time, whatever is left of its quota
    Block {
        /// The time, such as 10m, 1h30m or 2d
        #[arg(long = "for", value_name = "TIME", value_parser = duration_of)]
        time: Duration,
        #[command(flatten)]
        key: KeyParts,
    },
    /// End the block of a key; its count stays
    Unblock(KeyParts),
    /// Delete the count and the block of a key: its next request counts as its first
    Reset(KeyParts),
    /// List the keys with the least remaining; scans all keys of the servers
    Top {
        /// The number of keys to print for each limit
        #[arg(long, value_name = "N", default_value_t = 20)]
        count: usize,
        /// The number of keys to look at, for each limit
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        max_keys: usize,
        /// The number of SCAN commands, of 1,000 keys each
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        max_scans: usize,
    },
    /// List the limits that have keys in Redis, without a file; scans all keys of the servers
    Limits {
        /// The prefix of the limits [default: all prefixes]
        #[arg(long, value_name = "PREFIX")]
        prefix: Option<String>,
        /// The number of SCAN commands, of 1,000 keys each
        #[arg(long, value_name = "N", default_value_t = 10_000)]
        max_scans: usize,
    },
    /// Prove that the store can decide; names the permission that is missing
    Ping,
}

#[derive(Args)]
pub struct KeyParts {
    /// The key, such as ip:203.0.113.7; the parts of a tuple in their order
    #[arg(value_name = "KEY", required = true, num_args = 1..)]
    pub parts: Vec<String>,
}
