//! A limiter shared with Java services: Redisson's `RRateLimiter` of the same name, from Rust.
//!
//! ```text
//! cargo run -p examples --example redisson -- --redis redis://127.0.0.1/
//! ```
//!
//! It calls the limiter's methods, and prints the keys in Redis after each step. The keys expire
//! after ten minutes. Until then, list them with `redis-cli --scan`, or use the limiter from Java
//! with `redisson.getRateLimiter("LIMITER_NAME")`.

mod support;

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use redis::{Connection, FromRedisValue};
use support::{Context, Failure, exit_code};
use tokio::{task::JoinSet, time::Instant};
use tower_ratelimit::{
    RedisStore,
    redisson::{RateLimiter, RateLimiterConfig},
};

const NAME: &str = "LIMITER_NAME";
const KEEP: Duration = Duration::from_secs(600);
const SECOND: Duration = Duration::from_secs(1);

/// Calls the methods of a limiter shared with Java services, and prints its keys in Redis
#[derive(Parser)]
#[command(name = "redisson")]
struct Flags {
    /// The Redis server
    #[arg(long, value_name = "URL", default_value = "redis://127.0.0.1/")]
    redis: String,
}

type Result<T = ()> = std::result::Result<T, Failure>;

async fn walk(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    set_rate(limiter, redis).await?;
    acquire(limiter, redis).await?;
    release(limiter, redis).await?;
    wait(limiter, redis).await?;
    lower_rate(limiter, redis).await?;
    expire(limiter).await?;
    count_per_client(limiter, redis).await?;
    delete(limiter, redis).await
}

async fn set_rate(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("set the rate to 5 permits per 2 s, if none is set");
    let set = limiter.try_set_rate(RateLimiterConfig::overall(5, 2 * SECOND)).await?;
    println!("try_set_rate: {set}, again: {}", {
        limiter.try_set_rate(RateLimiterConfig::overall(100, SECOND)).await?
    });
    show_config(limiter).await?;
    redis.print()
}

async fn acquire(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("take permits without waiting");
    for permits in [2, 3, 1] {
        let decision = limiter.try_acquire(permits, Duration::ZERO).await?;
        match decision.retry_after() {
            None => println!("try_acquire({permits}): taken, {} left", decision.remaining()),
            Some(wait) => println!("try_acquire({permits}): denied, retry in {wait:.1?}"),
        }
    }
    println!("available_permits: {}", limiter.available_permits().await?);
    redis.print()
}

async fn release(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("release 2 permits");
    limiter.release(2).await?;
    println!("available_permits: {}", limiter.available_permits().await?);
    redis.print()
}

async fn wait(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("wait for permits: 8 tasks take one each");
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.try_acquire(1, 10 * SECOND).await });
    }
    while let Some(taken) = tasks.join_next().await {
        let taken = taken??.is_allowed();
        println!("after {:.1} s: {}", start.elapsed().as_secs_f64(), outcome(taken));
    }
    redis.print()
}

async fn lower_rate(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("lower the rate: permits that were taken still count, so there is a debt");
    limiter.update_rate(RateLimiterConfig::overall(2, 2 * SECOND)).await?;
    show_config(limiter).await?;
    println!("available_permits: {}", limiter.available_permits().await?);
    redis.print()
}

async fn expire(limiter: &RateLimiter) -> Result {
    title("expire");
    println!("expire: {}", limiter.expire(KEEP).await?);
    println!("clear_expire: {}", limiter.clear_expire().await?);
    println!("remaining_ttl: {:?}", limiter.remaining_ttl().await?);
    Ok(())
}

async fn count_per_client(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("a rate per client; the id of this client is \"example\"");
    let client = limiter.clone().client_id("example").keep_alive(KEEP);
    client.set_rate(RateLimiterConfig::per_client(5, 10 * SECOND)).await?;
    let taken = client.try_acquire(1, SECOND).await?.is_allowed();
    println!("try_acquire(1): {}", outcome(taken));
    redis.print()
}

async fn delete(limiter: &RateLimiter, redis: &mut Keys) -> Result {
    title("delete the limiter, and leave a new one with keys to look at");
    println!("delete: {}", limiter.delete().await?);
    redis.print()?;
    limiter.set_rate(RateLimiterConfig::overall(5, 10 * SECOND)).await?;
    limiter.expire(KEEP).await?;
    let _ = limiter.acquire(1).await?;
    let _ = limiter.acquire(2).await?;
    redis.print()
}

async fn show_config(limiter: &RateLimiter) -> Result {
    let config = limiter.config().await?;
    let config =
        config.ok_or_else(|| Failure::new("the rate was deleted during the run; start again"))?;
    println!("config: rate {} per {:?}", config.rate(), config.interval());
    Ok(())
}

fn outcome(taken: bool) -> &'static str {
    if taken { "taken" } else { "denied" }
}

fn title(text: &str) {
    println!("\n# {text}");
}

/// A connection that prints the keys of the limiter.
struct Keys(Connection);

impl Keys {
    fn execute<T: FromRedisValue>(&mut self, words: &[&str]) -> Result<T> {
        Ok(redis::cmd(words[0]).arg(&words[1..]).query(&mut self.0)?)
    }

    fn print(&mut self) -> Result {
        let mut keys: Vec<String> = self.execute(&["KEYS", &format!("*{NAME}*")])?;
        keys.sort_unstable();
        for key in keys {
            let ttl: i64 = self.execute(&["PTTL", &key])?;
            let ttl = if ttl < 0 { String::new() } else { format!(" (expires in {ttl} ms)") };
            println!("  {key}{ttl}");
            match &*self.execute::<String>(&["TYPE", &key])? {
                "hash" => {
                    let fields: Vec<(String, String)> = self.execute(&["HGETALL", &key])?;
                    fields.iter().for_each(|(field, value)| println!("    {field} {value}"));
                }
                "zset" => {
                    let log: Vec<(Vec<u8>, u64)> =
                        self.execute(&["ZRANGE", &key, "0", "-1", "WITHSCORES"])?;
                    for (entry, time) in log {
                        let hex: String = entry.iter().map(|byte| format!("{byte:02x}")).collect();
                        println!("    {time} {hex}");
                    }
                }
                _ => {
                    let value: Option<String> = self.execute(&["GET", &key])?;
                    println!("    {}", value.as_deref().unwrap_or("expired meanwhile"));
                }
            }
        }
        Ok(())
    }
}

async fn run(flags: Flags) -> Result {
    let what = "cannot use the Redis server at --redis";
    let store = RedisStore::connect(&flags.redis).await.context(what)?;
    let connection = redis::Client::open(flags.redis).and_then(|client| client.get_connection());
    let mut keys = Keys(connection.context(what)?);
    let limiter = RateLimiter::new(store, NAME);
    limiter.delete().await?;
    walk(&limiter, &mut keys).await
}

#[tokio::main]
async fn main() -> ExitCode {
    exit_code(run(Flags::parse()).await)
}
