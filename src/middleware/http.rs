//! HTTP and gRPC: which rejection each of them gets.

mod body;
mod grpc;
mod headers;

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, request::Parts, response};

pub use self::{
    body::ResponseBody,
    headers::{Headers, Reset},
};
use super::protocol::{Charged, Charging, Exchange, Protocol, Rejection};
use crate::{
    limiter::{AnyLimiter, Charge},
    middleware::extractor::KeyExtractor,
    middleware::http::headers::{Fields, forbid_storing},
    middleware::rule::Rule,
};

type ChargeWhen = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;
type MapRefusal = Arc<dyn Fn(&Rejection, &Parts, Response<Bytes>) -> Response<Bytes> + Send + Sync>;

/// HTTP requests, refused with 429 and a problem description; those that are gRPC with its status
/// `RESOURCE_EXHAUSTED`.
#[derive(Clone)]
pub struct Http {
    charging: Charging<Parts>,
    pub(crate) fields: Fields,
    pub(crate) extensions: bool,
    pub(crate) charge_handle: bool,
    pub(crate) map_refusal: Option<MapRefusal>,
    pub(crate) charge_when: Option<ChargeWhen>,
}

impl Http {
    pub(crate) fn by_key(limiter: AnyLimiter, key: impl KeyExtractor<Parts>) -> Self {
        let fields = Fields::of(&limiter);
        Self::new(Charging::by_key(limiter, key), fields)
    }

    pub(crate) fn by_rule(rule: impl Rule<Parts>) -> Self {
        Self::new(Charging::by_rule(rule), Fields::default())
    }

    fn new(charging: Charging<Parts>, fields: Fields) -> Self {
        Self {
            charging,
            fields,
            extensions: true,
            charge_handle: false,
            map_refusal: None,
            charge_when: None,
        }
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http")
            .field("charging", &self.charging)
            .field("headers", &self.fields.headers)
            .field("extensions", &self.extensions)
            .finish_non_exhaustive()
    }
}

impl Protocol for Http {
    type Head = Parts;

    fn charging(&self) -> &Charging<Parts> {
        &self.charging
    }

    fn charging_mut(&mut self) -> &mut Charging<Parts> {
        &mut self.charging
    }

    fn keeps_charge(&self) -> bool {
        self.charge_handle || self.charge_when.is_some()
    }

    fn timeout(head: &Parts) -> Option<Duration> {
        if grpc::is_grpc(head) { grpc::timeout(head) } else { None }
    }
}

impl<ReqBody, ResBody> Exchange<Request<ReqBody>, Response<ResBody>> for Http {
    type Response = Response<ResponseBody<ResBody>>;
    type Rest = ReqBody;

    fn split(request: Request<ReqBody>) -> (Parts, ReqBody) {
        request.into_parts()
    }

    fn join(head: Parts, body: ReqBody) -> Request<ReqBody> {
        Request::from_parts(head, body)
    }

    #[inline]
    fn mark(&self, head: &mut Parts, charged: &mut Charged) {
        if self.extensions
            && let Some(decision) = &charged.decision
        {
            head.extensions.insert(decision.clone());
        }
        if !self.keeps_charge() {
            return;
        }
        let is_charged = charged.bind();
        if self.charge_handle {
            let charge = if is_charged { charged.charge.clone() } else { Charge::exempt() };
            head.extensions.insert(charge);
        }
    }

    #[inline]
    fn respond(&self, mut response: Response<ResBody>, charged: &mut Charged) -> Self::Response {
        let mut counts = true;
        if let Some(charge_when) = &self.charge_when {
            let (head, body) = response.into_parts();
            counts = charge_when(&head);
            response = Response::from_parts(head, body);
        }
        if let Some(decision) = &charged.decision {
            self.fields.add(response.headers_mut(), decision, &charged.charge);
            if self.extensions {
                response.extensions_mut().insert(decision.clone());
            }
        }
        if !counts {
            charged.charge.release_later();
        }
        response.map(ResponseBody::service)
    }

    fn refuse(&self, rejection: Rejection, head: Parts, charge: &Charge) -> Self::Response {
        let mut response = if grpc::is_grpc(&head) {
            self.fields.grpc_refusal(&rejection, charge)
        } else {
            self.fields.refusal(&rejection, charge)
        };
        if let Some(map) = &self.map_refusal {
            response = map(&rejection, &head, response);
            forbid_storing(response.headers_mut()); // the closure may have made another response
        }
        if self.extensions {
            if let Rejection::Denied(decision) = &rejection {
                response.extensions_mut().insert(decision.clone());
            }
            response.extensions_mut().insert(rejection);
        }
        response.map(ResponseBody::refusal)
    }
}
