//! A limiter for each key, which inherits the rate of a template.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tower_ratelimit_redisson::{is_template, name_of_key, rate_argument};

use super::{MAX_INTERVAL, RateLimiter, keys_of, millis};
use crate::{
    error::{Error, RateLimiterError},
    keys::Key,
    observe::LimiterObservers,
    store::Deadline,
    sync::lock,
};

/// The minimum keep-alive of the limiter of a key, so that rare use does not create it anew each
/// time.
const MIN_KEEP_ALIVE: Duration = Duration::from_secs(60);

/// The maximum delay after which a new rate of the template is noticed.
const MAX_CACHE_AGE: Duration = Duration::from_secs(1);

impl RateLimiter {
    /// Returns the limiter of a key, if the name is a template: `{key}` in it is replaced by the
    /// key, so the limiter of `alice` in `api:{key}` is `api:alice`. If the name contains no
    /// `{key}`, returns this limiter for every key.
    ///
    /// A [`RateLimitLayer`](crate::RateLimitLayer) and a [`Charge`](crate::Charge) do this for each
    /// request.
    ///
    /// # The name
    ///
    /// The name contains the text of the [`Key`]: for a header,
    /// [`key::header`](crate::key::header()) makes `header:x-user=alice`. To use the names of a
    /// Java service, write a closure that returns the text alone. Special characters are escaped,
    /// and a key of more than 128 bytes is replaced by its hash, as described in [`Key`].
    ///
    /// The names must belong to this template alone. For example, `api:{key}` can produce all names
    /// of `api:v2:{key}`.
    ///
    /// # The rate
    ///
    /// The template's rate is stored under the template's own name: call
    /// [`try_set_rate`](RateLimiter::try_set_rate) on the template. A limiter of a key that has no
    /// rate inherits this rate with its first [`acquire`](RateLimiter::acquire).
    ///
    /// If the template's rate changes, the limiters that inherited the old one inherit the new one,
    /// and keep the permits taken. A `RateLimiter` that sets the rate itself, and its clones, apply
    /// it immediately; others read the template once per second, because the two names can be in
    /// different slots of a cluster. Java sees the new rate after the next acquire from this crate.
    ///
    /// A rate that is set for one key (by this crate, by Java or with `redis-cli`) is not
    /// overwritten. It expires like an inherited one: when the key is not used for the
    /// [`keep_alive`](RateLimiter::keep_alive) time of the template, by default an interval and at
    /// least a minute. To keep it for good, call [`set_rate`](RateLimiter::set_rate) without this
    /// time.
    ///
    /// # Errors
    ///
    /// [`RateLimiterError::Slots`] as for [`try_new`](RateLimiter::try_new), or if a key could
    /// address other names, because the template has braces other than a pair around the key, or
    /// contains only the key.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// let alice = limiter.for_key("alice")?; // "shared:alice" or, with a template, as it says
    /// println!("{}", alice.name());
    /// # Ok(())
    /// # }
    /// ```
    pub fn for_key<'a>(&self, key: impl Into<Key<'a>>) -> Result<Self, RateLimiterError> {
        if !self.is_template() {
            return Ok(self.clone());
        }
        let name = name_of_key(self.name(), key.into().as_str());
        let name = name.ok_or_else(|| RateLimiterError::Slots { name: self.name().into() })?;
        let keys = Arc::new(keys_of(&name, &self.keys.client_id)?);
        Ok(Self { keys, template: Some(Arc::new(self.clone())), ..self.clone() })
    }

    /// Sets the name of this limiter in headers and in
    /// [`Decision::limiter`](crate::Decision::limiter), `redisson` by default. The name in Redis is
    /// separate, because it may contain characters that a header cannot.
    ///
    /// # Panics
    ///
    /// If the label is not 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{RedisStore, redisson::RateLimiter};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// # let limiter = RateLimiter::new(store, "shared");
    /// let limiter = limiter.label("partner-api"); // in logs and metrics
    /// # let _ = limiter;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    #[track_caller]
    pub fn label(self, label: &'static str) -> Self {
        if let Err(error) = crate::limiter::check_name(label) {
            panic!("{error}");
        }
        let observers = LimiterObservers::new(self.observers.added, label);
        Self { label, observers, ..self }
    }

    pub(super) fn is_template(&self) -> bool {
        is_template(self.name())
    }

    /// Returns the template's rate as an argument of the scripts. It is empty if there is no
    /// template, or the template has no rate.
    pub(super) async fn template_rate(&self, deadline: Deadline) -> Result<String, Error> {
        let Some(template) = &self.template else { return Ok(String::new()) };
        let cached = *lock(&template.cached_rate);
        let config = match cached.filter(|(read_at, _)| read_at.elapsed() < MAX_CACHE_AGE) {
            Some((_, config)) => config,
            None => {
                let read_at = Instant::now();
                let Some(config) = template.read_config(deadline, "").await? else {
                    return Ok(String::new());
                };
                *lock(&template.cached_rate) = Some((read_at, config));
                config
            }
        };
        let keep_alive = self.keep_alive.unwrap_or(MIN_KEEP_ALIVE);
        let keep_alive = keep_alive.clamp(config.interval(), MAX_INTERVAL);
        let (rate, interval) = (config.rate(), millis(config.interval()));
        Ok(rate_argument(rate, interval, config.is_per_client(), millis(keep_alive)))
    }
}
