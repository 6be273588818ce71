//! `Http`: HTTP and gRPC requests, what the layer adds to them and to their responses, and their
//! rejections.

mod body;
mod grpc;
mod guard;
mod handler;
mod headers;
mod mapped;
mod meter;
mod problem;
mod tokens;

use std::{fmt, sync::Arc, time::Duration};

use http::{Extensions, HeaderMap, Method, Request, Response, request::Parts, response};

pub use self::{
    body::{RejectionBody, ResponseBody},
    headers::Headers,
    meter::{Meter, Usage},
    tokens::{TokenMeter, Tokens},
};
use self::{guard::BodyGuard, headers::HeaderWriter, mapped::Mapped};
pub(crate) use self::{
    mapped::{BoxError, MapRejection},
    meter::MakeMeter,
};
use crate::{
    limiter::{AnyLimiter, Charge},
    middleware::{
        extractor::KeyExtractor,
        pricing::{ChargeState, Pricing},
        protocol::{Protocol, ProtocolBase, Rejected},
        rejection::Rejection,
        rule::Rule,
        settle::{Expects, RequestHolds},
    },
};

type ChargeWhen = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;

/// HTTP requests. They are rejected with 429 and problem details, or for gRPC with the status
/// `RESOURCE_EXHAUSTED`.
#[derive(Clone)]
pub struct Http {
    pricing: Pricing<Parts>,
    pub(crate) headers: HeaderWriter,
    pub(crate) extensions: bool,
    pub(crate) settle_handle: bool,
    pub(crate) settle_by: Option<MakeMeter>,
    pub(crate) map_rejection: Option<MapRejection>,
    pub(crate) charge_when: Option<ChargeWhen>,
}

impl Http {
    pub(crate) fn by_key(limiter: AnyLimiter, key: impl KeyExtractor<Parts>) -> Self {
        let headers = HeaderWriter::for_limiter(&limiter);
        Self::new(Pricing::by_key(limiter, key), headers)
    }

    pub(crate) fn by_rule(rule: impl Rule<Parts>) -> Self {
        Self::new(Pricing::by_rule(rule), HeaderWriter::default())
    }

    fn new(pricing: Pricing<Parts>, headers: HeaderWriter) -> Self {
        Self {
            pricing,
            headers,
            extensions: false,
            settle_handle: false,
            settle_by: None,
            map_rejection: None,
            charge_when: None,
        }
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http")
            .field("pricing", &self.pricing)
            .field("headers", &self.headers.dialects)
            .field("extensions", &self.extensions)
            .finish_non_exhaustive()
    }
}

impl ProtocolBase for Http {
    type Head = Parts;

    fn pricing(&self) -> &Pricing<Parts> {
        &self.pricing
    }

    fn pricing_mut(&mut self) -> &mut Pricing<Parts> {
        &mut self.pricing
    }

    fn holds_costs(&self) -> bool {
        // A rule says which costs are estimates.
        self.charge_when.is_some() || self.settles() && self.pricing.limiter().is_some()
    }

    fn shares_holds(&self) -> bool {
        self.settle_handle
    }

    fn timeout(head: &Parts) -> Option<Duration> {
        if grpc::is_grpc(head) { grpc::timeout(head) } else { None }
    }
}

impl<ReqBody, ResBody> Protocol<Request<ReqBody>, Response<ResBody>> for Http {
    type Response = Response<ResponseBody<ResBody>>;
    type Rest = ReqBody;
    type Rejecting = Mapped<ResBody>;

    fn split(request: Request<ReqBody>) -> (Parts, ReqBody) {
        request.into_parts()
    }

    fn join(head: Parts, body: ReqBody) -> Request<ReqBody> {
        Request::from_parts(head, body)
    }

    #[inline]
    fn annotate(&self, head: &mut Parts, state: &mut ChargeState) {
        if self.extensions
            && let Some(decision) = &state.decision
        {
            head.extensions.insert(decision.clone());
        }
        if self.settle_handle
            && let Some(holds) = &state.holds
        {
            head.extensions.insert(holds.handle().clone());
        }
        if let Some(holds) = &mut state.holds {
            holds.expects = match head.method {
                Method::HEAD => Expects::NoBody,
                Method::CONNECT => Expects::Tunnel,
                _ => Expects::Body,
            };
        }
    }

    #[inline]
    fn respond(&self, mut response: Response<ResBody>, state: &mut ChargeState) -> Self::Response {
        let mut is_charged = true;
        if let Some(charge_when) = &self.charge_when {
            let (head, body) = response.into_parts();
            is_charged = charge_when(&head);
            response = Response::from_parts(head, body);
        }
        if let Some(decision) = &state.decision {
            self.headers.add(response.headers_mut(), decision, &state.charge);
            if self.extensions {
                response.extensions_mut().insert(decision.clone());
            }
        }
        let mut guard = None;
        if let Some(holds) = state.holds.take() {
            if !is_charged {
                holds.end_spent(|_| 0);
            } else if !self.settles() {
                holds.end_spent(|held| held);
            }
            let (head, body) = response.into_parts();
            guard = self.guard(holds, &head);
            response = Response::from_parts(head, body);
        }
        response.map(|body| ResponseBody::service(body, guard))
    }

    fn reject(
        &self,
        rejection: Rejection,
        head: &Parts,
        charge: &Charge,
    ) -> Rejected<Self::Response, Self::Rejecting> {
        let headers = self.headers.for_rejection(&rejection, charge);
        let is_grpc = grpc::is_grpc(head);
        let respond = if is_grpc { grpc::response } else { problem::response };
        let Some(map) = &self.map_rejection else {
            let mut response = respond(headers, &rejection);
            self.annotate_rejection(response.extensions_mut(), rejection);
            return Rejected::Now(response.map(ResponseBody::rejection));
        };
        // The status of a gRPC response is in other headers.
        let missing = if is_grpc { HeaderMap::new() } else { headers.clone() };
        let mut mapped = map.call(&rejection, head, respond(headers, &rejection), missing);
        self.annotate_rejection(mapped.extensions_mut(), rejection);
        Rejected::Later(mapped)
    }
}

impl Http {
    /// Returns whether a hold can be settled with another number of units than it holds.
    fn settles(&self) -> bool {
        self.settle_handle || self.settle_by.is_some()
    }

    /// Returns the guard that ends with the body what is still held.
    fn guard(&self, holds: RequestHolds, head: &response::Parts) -> Option<Box<BodyGuard>> {
        if !holds.is_open() {
            return None;
        }
        BodyGuard::new(holds, self.settle_by.as_ref(), head)
    }

    fn annotate_rejection(&self, extensions: &mut Extensions, rejection: Rejection) {
        if !self.extensions {
            return;
        }
        if let Rejection::Denied(decision) = &rejection {
            extensions.insert(decision.clone());
        }
        extensions.insert(rejection);
    }
}
