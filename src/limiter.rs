//! Limiters and charges, and waiting for quota: the one door of this storey, which re-exports. It
//! knows no HTTP.

mod acquire;
mod charge;
mod core;
mod failure_policy;
mod max_wait;
mod report;
mod retry;
mod retry_queue;
mod target;
mod version;
mod wait_queue;

pub(crate) use self::{
    acquire::{Acquire, DEFAULT_MAX_LATENESS},
    failure_policy::Recovery,
    max_wait::MaxWait,
    wait_queue::{WaitQueue, WaitSlot},
};
pub use self::{charge::Charge, core::Limiter, failure_policy::FailurePolicy, target::AnyLimiter};
#[allow(unused_imports, reason = "only optional features use them")]
pub(crate) use self::{
    core::{check_name, retry_queues},
    report::{Wait, report_decided, report_released},
    retry::{Retry, visit_queue, yield_to_queue},
    retry_queue::{MAX_STALL, RetryQueues},
    target::ChargeTarget,
};
