//! Applies a failure policy to a request about which the store has not decided. The policies are in
//! `failure_policy.rs`.

use super::{charge::Charge, failure_policy::FailurePolicy};
use crate::{
    algorithm::Action,
    decision::Decision,
    error::{Error, ErrorKind},
    observe::log,
};

/// The treatment of a charge about which the store has not decided.
pub(crate) enum Recovery {
    /// The request proceeds uncounted. There is no decision if the quota is unknown.
    Uncounted(Option<Decision>),
    /// A charge in memory decides.
    Fallback(Charge),
}

impl Charge {
    /// Applies the policy after the store has failed. Returns an error that it does not hide.
    pub(crate) fn recover(&self, policy: FailurePolicy, error: Error) -> Result<Recovery, Error> {
        let error = self.name_failure(error);
        let Error::Store(failure) = &error else { return Err(error) };
        match policy {
            FailurePolicy::Open => {
                log::hidden(failure);
                let decision = self.uncounted_decision();
                decision.iter().for_each(|decision| self.report(decision));
                Ok(Recovery::Uncounted(decision))
            }
            // The fallback is a store in memory, too: it would be no better than the full one.
            FailurePolicy::Local { share } if failure.kind() != ErrorKind::Full => {
                // The cost can be above the fraction of the quota, but within the quota.
                let granted = |fallback: &Self| fallback.can_be_granted(Action::HOLD);
                let Some(fallback) = self.fallback(share).filter(granted) else {
                    return Err(error);
                };
                log::hidden(failure);
                Ok(Recovery::Fallback(fallback))
            }
            _ => Err(error),
        }
    }

    /// Applies the policy that all limiters have, which are used without a layer.
    pub(super) fn recover_by_limiter(&self, error: Error) -> Result<Recovery, Error> {
        self.recover(self.failure_policy(), error)
    }

    /// Returns whether a request that may wait asks again while the store fails.
    pub(super) fn waits_for_store(&self) -> bool {
        self.failure_policy() == FailurePolicy::Wait
    }

    /// Returns the policy of its limiters; `Closed` if they differ.
    fn failure_policy(&self) -> FailurePolicy {
        let mut policies = self.own_parts().map(|(limiter, ..)| limiter.failure_policy());
        let first = policies.next().unwrap_or_default();
        if policies.all(|policy| policy == first) { first } else { FailurePolicy::Closed }
    }

    /// Adds the name of the first limiter to a failure of its store.
    pub(super) fn name_failure(&self, error: Error) -> Error {
        match (error, self.limiters().next()) {
            (Error::Store(error), Some(limiter)) => Error::Store(error.of_limiter(limiter.name())),
            (error, _) => error,
        }
    }
}
