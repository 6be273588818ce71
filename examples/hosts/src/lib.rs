//! Rate limits in other frameworks and clients, a module each. The tests use local servers.

pub mod actix;
pub mod github;
pub mod kubernetes;
pub mod lambda;
pub mod loco;
pub mod openai;
pub mod pingora;
pub mod reqwest_middleware;
pub mod salvo;
#[cfg(test)]
mod tests;

use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota};

/// Makes a limiter in memory. With several processes, use a store in Redis.
pub fn limiter(name: &str, quota: Quota) -> Limiter {
    Limiter::new(name, MemoryStore::new(), Algorithm::token_bucket(), quota)
}
