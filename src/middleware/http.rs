//! `Http`: HTTP and gRPC requests, what the layer adds to them and to their responses, and their
//! rejections.

mod body;
mod grpc;
mod handler;
mod headers;
mod mapped;
mod meter;
mod problem;
mod tokens;

use std::{fmt, ops::ControlFlow, sync::Arc, time::Duration};

use http::{
    Extensions, HeaderMap, Method, Request, Response, StatusCode, request::Parts, response,
};

pub(crate) use self::mapped::{BoxError, MapRejection};
pub use self::{
    body::ResponseBody,
    headers::Headers,
    meter::{Meter, Usage},
    tokens::{TokenMeter, Tokens},
};
use self::{
    body::{BodyGuard, RejectionBody},
    headers::HeaderWriter,
    mapped::Mapped,
    meter::MakeMeter,
};
use crate::{
    limiter::{Charge, VendorState},
    middleware::{
        passage::{Bill, Expects, Pricing, RequestHolds},
        protocol::{Protocol, ProtocolBase},
        rejection::Rejection,
    },
    observe::log,
};

type ChargeWhen = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;
type LearnHead = Arc<dyn Fn(StatusCode, &HeaderMap) -> VendorState + Send + Sync>;

/// HTTP requests. They are rejected with 429 and problem details, or for gRPC with the status
/// `RESOURCE_EXHAUSTED`.
#[derive(Clone)]
pub struct Http {
    pricing: Pricing<Parts>,
    pub(crate) headers: HeaderWriter,
    pub(crate) extensions: bool,
    pub(crate) error_details: bool,
    pub(crate) settle_handle: bool,
    pub(crate) settle_by: Option<MakeMeter>,
    pub(crate) map_rejection: Option<MapRejection>,
    pub(crate) charge_when: Option<ChargeWhen>,
    pub(crate) learn: Option<LearnHead>,
}

impl Http {
    pub(crate) fn new(pricing: Pricing<Parts>) -> Self {
        let headers = HeaderWriter::new(pricing.limiter());
        Self {
            pricing,
            headers,
            extensions: false,
            error_details: false,
            settle_handle: false,
            settle_by: None,
            map_rejection: None,
            charge_when: None,
            learn: None,
        }
    }

    /// Returns whether a hold can be settled with another number of units than it holds.
    fn settles(&self) -> bool {
        self.settle_handle || self.settle_by.is_some()
    }

    #[inline]
    fn add_extension(&self, extensions: &mut Extensions, bill: &Bill) {
        if self.extensions
            && let Some(decision) = bill.decision()
        {
            extensions.insert(decision.clone());
        }
    }

    /// Adds the decision and the handle of the holds to the head of a request.
    #[inline(never)]
    fn add_to_head(&self, head: &mut Parts, bill: &mut Bill) {
        self.add_extension(&mut head.extensions, bill);
        if let Some(holds) = &mut bill.holds {
            if self.settle_handle {
                head.extensions.insert(holds.share());
            }
            holds.expects = match head.method {
                Method::HEAD => Expects::NoBody,
                Method::CONNECT => Expects::Tunnel,
                _ => Expects::Body,
            };
        }
    }

    /// Adds the headers and the decision to a response.
    #[inline]
    fn add_to_response<B>(&self, response: &mut Response<B>, bill: &Bill) {
        if let Some(decision) = bill.decision()
            && !self.headers.dialects().is_empty()
        {
            self.headers.add(response.headers_mut(), decision, bill.charge());
        }
        self.add_extension(response.extensions_mut(), bill);
    }

    /// Converts a response, and ends what its request holds, now or with the body.
    #[inline(never)]
    fn respond_with_guard<B>(
        &self,
        response: Response<B>,
        mut holds: Box<RequestHolds>,
        bill: &Bill,
    ) -> Response<ResponseBody<B>> {
        // Declared after `holds`, so dropped before it: if a closure panics, what the request holds
        // ends after its body.
        let (head, body) = response.into_parts();
        let is_charged = self.charge_when.as_ref().is_none_or(|charge_when| charge_when(&head));
        if !is_charged {
            holds.end_spent(|_| 0);
        } else if !self.settles() {
            holds.end_spent(|held| held);
        }
        let make_meter = self.settle_by.as_ref().filter(|_| holds.is_open());
        let meter = make_meter.map(|make_meter| make_meter(&head));
        let guard = BodyGuard::new(holds, meter, &head);
        let mut response = Response::from_parts(head, body);
        self.add_to_response(&mut response, bill);
        response.map(|body| ResponseBody::service(body, guard))
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

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http")
            .field("pricing", &self.pricing)
            .field("headers", &self.headers.dialects())
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
    type Rejecting = Mapped;

    fn split(request: Request<ReqBody>) -> (Parts, ReqBody) {
        request.into_parts()
    }

    fn join(head: Parts, body: ReqBody) -> Request<ReqBody> {
        Request::from_parts(head, body)
    }

    #[inline]
    fn annotate(&self, head: &mut Parts, bill: &mut Bill) {
        if self.extensions || bill.holds.is_some() {
            self.add_to_head(head, bill);
        }
    }

    #[inline]
    fn learned(&self, response: &Response<ResBody>) -> Option<VendorState> {
        let learn = self.learn.as_ref()?;
        Some(learn(response.status(), response.headers()))
    }

    #[inline(always)]
    fn respond(&self, mut response: Response<ResBody>, bill: &mut Bill) -> Self::Response {
        if let Some(holds) = bill.holds.take() {
            return self.respond_with_guard(response, holds, bill);
        }
        self.add_to_response(&mut response, bill);
        response.map(|body| ResponseBody::service(body, None))
    }

    fn reject(
        &self,
        rejection: Rejection,
        head: &Parts,
        charge: Option<&Charge>,
    ) -> ControlFlow<Self::Response, Mapped> {
        let is_grpc = grpc::is_grpc(head);
        if let Rejection::Denied(decision) = &rejection
            && !is_grpc
            && self.map_rejection.is_none()
            && let Some(headers) = self.headers.for_denial(decision)
            && let Some(body) = problem::denied(decision)
        {
            let (status, body) = (StatusCode::TOO_MANY_REQUESTS, ResponseBody::rejection(body));
            let mut response = problem::of(status, headers, body);
            self.annotate_rejection(response.extensions_mut(), rejection);
            return ControlFlow::Break(response);
        }
        if let Rejection::Store(error) = &rejection {
            log::hidden(error);
        }
        let headers = self.headers.for_rejection(&rejection, charge);
        let respond = |headers| {
            let respond = if is_grpc { grpc::response } else { problem::response };
            match self.error_details {
                true => respond(headers, &rejection.detailed()),
                false => respond(headers, &rejection),
            }
        };
        let Some(map) = &self.map_rejection else {
            let mut response = respond(headers);
            self.annotate_rejection(response.extensions_mut(), rejection);
            return ControlFlow::Break(response.map(ResponseBody::rejection));
        };
        // The status of a gRPC response is in other headers.
        let missing = if is_grpc { HeaderMap::new() } else { headers.clone() };
        let response = respond(headers);
        let mut extensions = Extensions::new();
        self.annotate_rejection(&mut extensions, rejection.clone());
        let details = self.error_details;
        ControlFlow::Continue(map.call(&rejection, head, response, missing, extensions, details))
    }

    fn rejected(response: Response<RejectionBody>) -> Self::Response {
        response.map(ResponseBody::rejection)
    }
}
