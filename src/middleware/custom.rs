//! Requests and responses of any type, rejected by a closure.

use std::{fmt, sync::Arc};

use super::protocol::{Charged, Charging, Exchange, Protocol, Rejection};
use crate::{
    limiter::{AnyLimiter, Charge},
    middleware::extractor::KeyExtractor,
    middleware::rule::Rule,
};

type Refusal<Req, Res> = Arc<dyn Fn(Rejection, &Req) -> Res + Send + Sync>;

/// Requests that are not HTTP, refused by a closure. See
/// [`RateLimitLayer::custom`](crate::RateLimitLayer::custom).
pub struct Custom<Req, Res> {
    charging: Charging<Req>,
    refusal: Refusal<Req, Res>,
}

impl<Req: 'static, Res: 'static> Custom<Req, Res> {
    pub(crate) fn by_key(
        limiter: AnyLimiter,
        key: impl KeyExtractor<Req>,
        refusal: impl Fn(Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self {
        Self { charging: Charging::by_key(limiter, key), refusal: Arc::new(refusal) }
    }

    pub(crate) fn by_rule(
        rule: impl Rule<Req>,
        refusal: impl Fn(Rejection, &Req) -> Res + Send + Sync + 'static,
    ) -> Self
    where
        Req: Send + Sync,
    {
        Self { charging: Charging::by_rule(rule), refusal: Arc::new(refusal) }
    }
}

impl<Req, Res> Clone for Custom<Req, Res> {
    fn clone(&self) -> Self {
        Self { charging: self.charging.clone(), refusal: self.refusal.clone() }
    }
}

impl<Req, Res> fmt::Debug for Custom<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custom").field("charging", &self.charging).finish_non_exhaustive()
    }
}

impl<Req: 'static, Res> Protocol for Custom<Req, Res> {
    type Head = Req;

    fn charging(&self) -> &Charging<Req> {
        &self.charging
    }

    fn charging_mut(&mut self) -> &mut Charging<Req> {
        &mut self.charging
    }
}

impl<Req: 'static, Res> Exchange<Req, Res> for Custom<Req, Res> {
    type Response = Res;
    type Rest = ();

    fn split(request: Req) -> (Req, ()) {
        (request, ())
    }

    fn join(head: Req, (): ()) -> Req {
        head
    }

    fn mark(&self, _: &mut Req, _: &mut Charged) {}

    fn respond(&self, response: Res, _: &mut Charged) -> Res {
        response
    }

    fn refuse(&self, rejection: Rejection, head: Req, _: &Charge) -> Res {
        (self.refusal)(rejection, &head)
    }
}
