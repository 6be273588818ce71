use std::sync::Arc;

use super::{RateLimiter, keys::Keys, random};
use crate::{
    algorithm::Action,
    decision::Decision,
    error::{ConfigError, Error},
    key::Key,
    store::Answer,
};

/// What stands in a name for the key.
const PLACE: &str = "{key}";

impl RateLimiter {
    /// The limiter of one key, if the name is a template: `{key}` in it is replaced by the key, so that of
    /// `api:{key}` the limiter of `alice` is `api:alice`. Without it, the limiter is that of all keys.
    ///
    /// The key is put in as it is: [`key::Header`](crate::key::Header) makes `header:x-user=alice` of a field. For the
    /// name that Java uses, take a closure that returns the text alone.
    ///
    /// In a [`RateLimitLayer`](crate::RateLimitLayer) and in a [`Charge`](crate::Charge) that is done for each
    /// request. A limiter without a rate is then given that of the template, which is stored under the template's own
    /// name, and expires when it was not used for an interval. So it is the template on which to call
    /// [`try_set_rate`](RateLimiter::try_set_rate).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Slots`] as for [`try_new`](RateLimiter::try_new).
    pub fn for_key<'a>(&self, key: impl Into<Key<'a>>) -> Result<Self, ConfigError> {
        if !self.name().contains(PLACE) {
            return Ok(self.clone());
        }
        let name = self.name().replace(PLACE, key.into().as_str());
        let keys = Arc::new(Keys::new(&name, &self.keys.client_id)?);
        Ok(Self { keys, ..self.clone() })
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

    /// What a layer asks about a key.
    pub(crate) fn answer(
        &self,
        action: Action,
        key: &Key<'_>,
        cost: u32,
    ) -> Result<Answer<Decision>, Error> {
        if action != Action::Check {
            return Err(Error::Unsupported);
        }
        let (template, limiter) = (self.clone(), self.for_key(key)?);
        Ok(Answer::Pending(Box::pin(async move {
            match limiter.attempt(cost, random()).await {
                Err(Error::NoRate { .. }) if limiter.name() != template.name() => {
                    template.lend_rate(&limiter).await?;
                    limiter.attempt(cost, random()).await
                }
                decision => decision,
            }
        })))
    }

    async fn lend_rate(&self, limiter: &Self) -> Result<(), Error> {
        let config = self.config().await?.ok_or_else(|| self.no_rate())?;
        let keep_alive = config.keep_alive().unwrap_or(config.interval());
        let limiter = limiter.clone().keep_alive(keep_alive);
        limiter.try_set_rate(config.rate_type(), config.rate(), config.interval()).await?;
        Ok(())
    }
}
