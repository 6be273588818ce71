//! The setting for a full store.

/// What a full [`MemoryStore`](crate::MemoryStore) does with a new key when the keys that it looks
/// at are in use.
///
/// A key is in use while it has no request left, or while a request that was denied would still be.
/// Keys that are not in use make room under both settings: see
/// [`MemoryStore`](crate::MemoryStore#memory).
///
/// # What an attack takes
///
/// Either setting can be attacked by a client that can make up keys: values of a header that
/// nothing authenticates, or addresses (a `/48` of IPv6 contains 65,536 networks of `/64`).
///
/// **To lock out new keys**, under `RejectNewKeys`, the client must hold all keys of the store in
/// use. It takes `max_keys` different keys and `max_keys x burst` requests that use them up
/// (`limit` where there is no burst), then `max_keys x limit / window` to use up what is restored:
///
/// | 100,000 keys, each | to fill the store | to keep it full |
/// |---|---|---|
/// | 3 per day | 300,000 requests | 3.5 per second |
/// | 100 per hour | 10,000,000 requests | 2,800 per second |
/// | 100 per minute | 10,000,000 requests | 170,000 per second |
/// | 10 per second | 1,000,000 requests | 1,000,000 per second |
///
/// Small limits over long windows are at risk; limits per second and per minute hardly are.
///
/// **To reset a particular key**, the client must make the store prefer it to the others: with
/// `max_keys` keys that have used as much as that key. So it gets one more unit on the key for each
/// `max_keys` requests. 100,000 keys and 5,000 requests per second give it one attempt to guess
/// a password per 20 seconds, whatever the limit.
///
/// * Under both settings this resets a key that has something left: with 3 per day, 2 more attempts
///   for each 200,000 requests.
/// * Under `EvictSoonest` it resets a key that is denied, too: 3 more for each 300,000.
///
/// `RejectNewKeys` is the default, as [`FailurePolicy::Closed`](crate::FailurePolicy::Closed) is:
/// what was denied stays denied until its `retry_after`, and a limit of one request holds. Choose
/// `EvictSoonest` where serving new callers matters more, such as for limits by address.
///
/// Both attacks become harder if
///
/// * keys that clients can make up are in a store of their own, apart from accounts and the like;
/// * `max_keys` is above the number of keys that can be in use at a time (a million keys take
///   some 140 MB);
/// * IPv6 addresses are counted by network, as [`key::PeerIp`](crate::key::PeerIp) does, and other
///   keys are authenticated before they are counted.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{MemoryStore, WhenFull};
///
/// let store = MemoryStore::with_max_keys(1_000_000).when_full(WhenFull::EvictSoonest);
/// # let _ = store;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WhenFull {
    /// Returns [`StoreError::is_full`](crate::StoreError::is_full) for the new key. The layer then
    /// answers 503, or does what its [`FailurePolicy`](crate::FailurePolicy) says.
    ///
    /// With [`FailurePolicy::Open`](crate::FailurePolicy::Open), requests with new keys are not
    /// counted while the store is full. `EvictSoonest` admits less.
    #[default]
    RejectNewKeys,
    /// Evicts the key whose quota is restored soonest, of those that are looked at: what that key
    /// used is forgotten, and it gets its quota once more.
    ///
    /// A key is never evicted while a request waits for it. If requests wait for all keys that are
    /// looked at, the new key gets [`StoreError::is_full`](crate::StoreError::is_full).
    /// [`max_waiting`](crate::RateLimitLayer::max_waiting) bounds how many keys waiting requests
    /// hold.
    EvictSoonest,
}
