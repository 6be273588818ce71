//! A limiter of Redisson for each key, which copies a template's rate.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{LONGEST, RateLimiter, RateType, id_of, keys::Keys, millis, random};
use crate::{
    algorithm::Action,
    decision::{Decision, Receipt},
    error::{ConfigError, Error},
    keys::Key,
    store::{Deadline, StoreFuture},
    sync::lock,
};

/// So that a key that comes now and then is not looked up each time.
const SHORTEST_KEEP_ALIVE: Duration = Duration::from_secs(60);

/// For how long a template's rate is not read again.
const LONGEST_KNOWN: Duration = Duration::from_secs(1);

/// What stands in a name for the key.
const PLACE: &str = "{key}";

impl RateLimiter {
    /// The limiter of one key, if the name is a template: `{key}` in it is replaced by the key, so that of
    /// `api:{key}` the limiter of `alice` is `api:alice`. Without it, the limiter is that of all keys.
    ///
    /// It is put in as the text of the [`Key`]: [`key::Header`](crate::key::Header) makes `header:x-user=alice` of a
    /// field. For the name that Java uses, take a closure that returns the text alone; of that, all but plain characters
    /// is escaped, and more than 128 bytes are hashed, as `Key` says. The names must be for this limiter alone: of
    /// templates `api:{key}` and `api:v2:{key}`, the first makes names of the second, too.
    ///
    /// In a [`RateLimitLayer`](crate::RateLimitLayer) and in a [`Charge`](crate::Charge) that is done for each
    /// request.
    ///
    /// # The rate
    ///
    /// The template lends the rate that is stored under its own name, so that it is the template on which to call
    /// [`try_set_rate`](RateLimiter::try_set_rate): the limiter of a key without a rate gets it with the first
    /// [`acquire`](RateLimiter::acquire). When the template gets another one, the limiters that were lent the old one
    /// follow, and keep what was taken: at once from where it is set, and from elsewhere when what is known of
    /// the template is a second old, as the two can be in different slots of a cluster. To Java a limiter follows with the
    /// next acquire from here.
    ///
    /// A rate that somebody sets for the limiter of one key, from here, from Java or with `redis-cli`, stays that of
    /// this key. Like one that was lent, it is gone when the key was not used for the
    /// [`keep_alive`](RateLimiter::keep_alive) time of the template, by default an interval and at least a minute; without
    /// such a time, [`set_rate`](RateLimiter::set_rate) makes it stay for good.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Slots`] as for [`try_new`](RateLimiter::try_new), or if there are other braces in the template,
    /// but for a pair around the key, or nothing else, so that keys could name what is not theirs.
    pub fn for_key<'a>(&self, key: impl Into<Key<'a>>) -> Result<Self, ConfigError> {
        if !self.is_template() {
            return Ok(self.clone());
        }
        let rest = self.name().replace("{{key}}", "").replace(PLACE, "");
        if rest.is_empty() || rest.contains(['{', '}']) {
            return Err(ConfigError::Slots { name: self.name().to_owned() });
        }
        let name = self.name().replace(PLACE, key.into().as_str());
        let keys = Arc::new(Keys::new(&name, &self.keys.client_id)?);
        Ok(Self { keys, template: Some(Arc::new(self.clone())), ..self.clone() })
    }

    /// Sets what [`Decision::limiter`] and the header fields call it, `redisson` by default: the name may have
    /// characters that a header field cannot.
    ///
    /// # Panics
    ///
    /// If it is not 1 to 64 of the characters `A-Z a-z 0-9 - _ . /`.
    #[must_use]
    #[track_caller]
    pub fn label(self, label: &'static str) -> Self {
        if let Err(error) = crate::limiter::check_name(label) {
            panic!("{error}");
        }
        Self { label, ..self }
    }

    pub(super) fn is_template(&self) -> bool {
        self.name().contains(PLACE)
    }

    /// What a layer asks about a key.
    pub(crate) fn answer(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u32,
    ) -> Result<StoreFuture<Decision>, Error> {
        if action != Action::Check {
            return Err(Error::Unsupported);
        }
        let (limiter, deadline) = (self.for_key(key)?, self.store.start_deadline());
        let decision = async move { limiter.attempt(deadline, cost, random()).await };
        Ok(StoreFuture::Pending(Box::pin(decision)))
    }

    /// Returns `permits` of those that a decision about a key has `taken`.
    pub(crate) fn release_for(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        taken: u32,
        permits: u32,
    ) -> StoreFuture<()> {
        let (limiter, id) = match (self.for_key(key), receipt) {
            (Ok(limiter), Receipt::Id(id)) => (limiter, id_of(*id)),
            (Err(error), _) => return StoreFuture::ready(Err(error.into())),
            _ => return StoreFuture::ready(Ok(())),
        };
        let deadline = self.store.start_deadline();
        StoreFuture::Pending(Box::pin(async move {
            unless_gone(limiter.give_back(deadline, permits, taken, &id).await)
        }))
    }

    /// The same in the background, as far as that is possible.
    pub(crate) fn release_later_for(
        &self,
        key: &Key<'_>,
        receipt: &Receipt,
        taken: u32,
        permits: u32,
    ) {
        if let (Ok(limiter), Receipt::Id(id)) = (self.for_key(key), receipt) {
            limiter.release_later(permits, taken, *id);
        }
    }

    /// Grants permits of a key, the oldest.
    pub(crate) async fn refund_for(&self, key: &Key<'_>, permits: u32) -> Result<(), Error> {
        let deadline = self.store.start_deadline();
        unless_gone(self.for_key(key)?.give_back(deadline, permits, 0, b"").await)
    }

    /// What the template lends, as the scripts take it; nothing if there is no template, or it has no rate.
    pub(super) async fn lent(&self, deadline: Deadline) -> Result<String, Error> {
        let Some(template) = &self.template else { return Ok(String::new()) };
        let known = *lock(&template.known);
        let config = match known.filter(|(at, _)| at.elapsed() < LONGEST_KNOWN) {
            Some((_, config)) => config,
            None => {
                let asked = Instant::now();
                let Some(config) = template.read(deadline, "").await? else {
                    return Ok(String::new());
                };
                *lock(&template.known) = Some((asked, config));
                config
            }
        };
        let keep_alive = self.keep_alive.unwrap_or(SHORTEST_KEEP_ALIVE);
        let keep_alive = keep_alive.clamp(config.interval(), LONGEST);
        let (rate, interval) = (config.rate(), millis(config.interval()));
        let rate_type = if config.rate_type() == RateType::PerClient { 1 } else { 0 };
        Ok(format!("{rate} {interval} {rate_type} {}", millis(keep_alive)))
    }
}

/// A limiter without a rate is gone, with all that was taken.
fn unless_gone(result: Result<(), Error>) -> Result<(), Error> {
    result.or_else(|error| match error {
        Error::NoRate { .. } => Ok(()),
        error => Err(error),
    })
}
