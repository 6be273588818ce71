//! Limiters and charges, and waiting for quota: the one door of this storey, which re-exports. It
//! knows no HTTP.

// rustdoc lists the methods of `Limiter` in the order of these modules.
mod handle;

mod check;

mod acquire;
mod reservation;

mod hold;

mod change;

mod admission;
mod backoff;
mod call;
mod charge;
mod failure_policy;
mod in_line;
mod learn;
mod permit;
mod recovery;
mod report;
mod version;
mod wait_queue;
mod waiter;

#[allow(unused_imports, reason = "only optional features use them")]
pub(crate) use self::handle::{ForeignLimiter, check_name};
pub use self::{
    acquire::Acquire,
    admission::Admission,
    charge::Charge,
    check::Check,
    failure_policy::FailurePolicy,
    handle::{AnyLimiter, IntoLimiter, Limiter},
    hold::Hold,
    learn::VendorState,
    permit::Permit,
    reservation::Reservation,
};
pub(crate) use self::{
    permit::Holds,
    recovery::Recovery,
    version::MaxWait,
    wait_queue::{WaitQueue, WaitSlot},
    waiter::{DEFAULT_MAX_LATENESS, Waiter},
};
