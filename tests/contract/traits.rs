//! The traits of the public types, which applications and their tests compare, print and share. A
//! test finds a type without a row.

use std::{
    convert::Infallible,
    error::Error as StdError,
    fmt::{Debug, Display},
    future::Ready,
    hash::Hash,
    str::FromStr,
};

use ::http::{Request, Response};
use tower::util::ServiceFn;
use tower_ratelimit::{
    Admission, Algorithm, Charge, Decision, Error, FailurePolicy, Key, Limiter, MemoryStore,
    Permit, Quota, RateLimitLayer, RedisStore, Reservation, VendorState, call, config, key, layer,
    observe, redisson,
    store::{self, ErrorKind, Source},
};

/// Checks at compile time that each type implements the traits behind it, and `Debug`, `Send` and
/// `Sync`.
macro_rules! implements {
    ($($type:ty: $($bound:path),*;)*) => {$(
        const _: () = {
            const fn check<T: Debug + Send + Sync + ?Sized $(+ $bound)*>() {}
            check::<$type>();
        };
    )*};
}

// Values: they compare, and are keys of maps. A policy has a fraction, which is no key.
implements! {
    Algorithm: Copy, Display, Eq, FromStr, Hash;
    Decision: Clone, Eq, Hash;
    FailurePolicy: Copy, Default, PartialEq;
    Key<'_>: Clone, Display, Eq, Hash;
    Quota: Copy, Display, Eq, FromStr, Hash;
    config::Limit: Copy, Eq, Hash;
    config::Limits: Clone, Default, Eq;
    config::Refill: Copy, Default, Eq, Hash;
    layer::Headers: Copy, Eq, Hash;
    layer::MissingKey: Copy, Default, Eq, Hash;
    layer::Tokens: Copy, Default, Eq, Hash;
    layer::Usage: Clone, Default, Eq, Hash;
    VendorState: Copy, Default, Eq, Hash;
    key::ProxyHeader: Clone, Eq, Hash;
    observe::DeniedKey: Clone, Eq, Hash;
    observe::Event<'_>: Copy, Eq;
    redisson::RateLimiterConfig: Copy, Eq, Hash;
    ErrorKind: Copy, Display, Eq, Hash;
    store::Credentials: Clone, Eq;
    store::Health: Clone, Display, Eq, Hash;
    store::KeyState: Clone, Eq, Hash;
    Source: Copy, Display, Eq, Hash;
    store::WhenFull: Copy, Default, Eq, Hash;
}

// Errors: `'static`, so that they fit into a boxed error.
implements! {
    Error: Clone, Eq, StdError;
    config::ConfigError: Clone, Eq, StdError;
    config::QuotaError: Clone, Eq, StdError;
    layer::Rejection: Clone, Eq, StdError;
    layer::RequestError: Clone, Eq, StdError;
    redisson::RateLimiterError: Clone, Eq, StdError;
    store::StoreError: Clone, Eq, StdError;
}

// Handles: clones are the same limiter, store or layer, so that a comparison would mislead.
implements! {
    Charge: Clone;
    Limiter: Clone;
    MemoryStore: Clone, Default;
    RateLimitLayer: Clone;
    RedisStore: Clone;
    config::Limiters: Clone;
    layer::Settle: Clone;
    layer::Custom<String, String>: Clone;
    redisson::RateLimiter: Clone;
    store::AnyStore: Clone;
    store::RedisConfig: Clone;
}

// What happens once, such as a permit, has no clones.
implements! {
    Admission<Permit>: ;
    Permit: ;
    Reservation: ;
    layer::ResponseBody: Default;
    layer::TokenMeter: layer::Meter;
    observe::TopDenied: observe::Observer;
    store::KeyScan: ;
}

// Extractors and services.
implements! {
    key::ClientIp: Clone;
    key::Global: Copy, Default;
    key::Route: Copy, Default;
    key::Value: Clone;
    layer::RateLimit<()>: Clone;
}

/// Calls and responses are sent, but not shared: they contain the answer of a store, or the futures
/// of the application.
const _: () = {
    type Service = ServiceFn<fn(Request<String>) -> Ready<Result<Response<String>, Infallible>>>;
    const fn check<T: Debug + Send>() {}
    check::<call::Acquire<'_, &str>>();
    check::<call::Check<'_, &str>>();
    check::<call::Hold<'_, &str>>();
    check::<<layer::RateLimit<Service> as tower::Service<Request<String>>>::Future>();
};

#[tokio::test]
async fn tests_compare_results_and_errors() {
    let limiter =
        |name, store| Limiter::new(name, store, Algorithm::fixed_window(), Quota::per_hour(1));
    assert_eq!(Charge::exempt().check().await, Err(Error::NoLimits));

    let (api, login) = (limiter("api", MemoryStore::new()), limiter("login", MemoryStore::new()));
    let twice = async |limiter| {
        Charge::new(limiter, "ada").and(Charge::new(limiter, "ada")).check().await.unwrap_err()
    };
    assert_eq!(twice(&api).await, twice(&api).await);
    assert_ne!(twice(&api).await, twice(&login).await);
    assert_eq!((twice(&login).await.limiter(), twice(&login).await.kind()), (Some("login"), None));

    let mut full = vec![];
    for max_keys in [1, 2] {
        let small = limiter("small", MemoryStore::with_max_keys(max_keys));
        let keys = (0..=max_keys).map(|key| Charge::new(&small, key));
        for charge in keys {
            full.extend(charge.check().await.err());
        }
    }
    let [one, two] = &full[..] else { panic!("{full:?}") };
    assert_eq!(one, two, "errors of stores compare by their kind");
    assert_ne!(format!("{one:?}"), format!("{two:?}"));
    assert_eq!((one.limiter(), one.kind()), (Some("small"), Some(ErrorKind::Full)));
}

#[test]
fn names_of_labels_are_printed_and_padded() {
    assert_eq!(format!("{:>6}", ErrorKind::Full), "  full");
    assert_eq!(Source::Cached.to_string(), Source::Cached.as_str());
}

#[test]
fn main_prints_the_text_of_an_error_with_its_causes() {
    let quota = "0/s".parse::<Quota>().unwrap_err();
    let text = "quota \"0/s\": the limit is 0, but must be at least 1";
    let config = config::ConfigError::Quota(quota.clone());
    let of_limiter = format!("the settings of the rate limiter are invalid: {text}");
    assert_eq!(format!("{quota:?} {config:?}"), format!("{text} {text}"));
    assert_eq!(format!("{:?}", Error::from(config)), of_limiter);

    let empty = store::lazy("").unwrap_err();
    let text = format!("{empty:?}");
    assert!(text.starts_with("cannot use the URL \"\" of a store: it is empty; write"), "{text}");
    let causes = format!("the store of the rate limiter failed: {text}");
    assert_eq!(format!("{:?}", Error::from(empty)), causes);

    assert_eq!(format!("{:?}", Error::NoEstimate), Error::NoEstimate.to_string());
    assert_eq!(format!("{:?}", Error::ZeroCost), Error::ZeroCost.to_string());
}
