//! The setting for a full store.

/// What a full [`MemoryStore`](crate::MemoryStore) does with a new key when the keys that it looks
/// at are in use.
///
/// A key is in use while nothing is left of its quota, or until the `retry_after` of a denied
/// request has passed. Keys that are not in use make room under both settings: see
/// [`MemoryStore`](crate::MemoryStore#memory).
///
/// # What an attack takes
///
/// Either setting can be attacked by a client that can make up keys: values of a header that
/// nothing authenticates, or addresses (a `/48` of IPv6 contains 65,536 networks of `/64`).
///
/// **To lock out new keys**, under `RejectNewKeys`, the client must hold all keys of the store in
/// use. It takes `max_keys` keys, and `max_keys x burst` units of cost that use them up (`limit`
/// where there is no burst), then `max_keys x limit / window` to use up what is restored:
///
/// | 100,000 keys, each | to fill the store | to keep it full |
/// |---|---|---|
/// | 3 per day | 300,000 units | 3.5 per second |
/// | 100 per hour | 10,000,000 units | 2,800 per second |
/// | 100 per minute | 10,000,000 units | 170,000 per second |
/// | 10 per second | 1,000,000 units | 1,000,000 per second |
///
/// Where all requests cost 1, a unit is a request. Where one can cost more, it takes fewer
/// requests. A denied request spends nothing, and holds its key in use. So if the client can choose
/// the cost, two requests are enough for each key:
///
/// * after a request that costs 1, one that costs the whole burst is denied: the key is in use
///   until that unit is restored;
/// * after a request that costs the whole burst, another one is denied: the key is in use until the
///   whole burst is restored.
///
/// Each limit of a rule counts as a key of its own.
///
/// Small limits over long windows are at risk, and large ones too if the client can choose the
/// cost; limits per second and per minute hardly are.
///
/// **To reset a particular key**, the client must make the store prefer it to the others: with
/// `max_keys` keys that have used as much as that key. So it gets one more unit on the key for each
/// `max_keys` units that it spends on others. Where all requests cost 1, 100,000 keys and 5,000
/// requests per second give it one attempt to guess a password per 20 seconds, whatever the limit.
///
/// * Under both settings this resets a key that has something left: with 3 per day, 2 more attempts
///   for each 200,000 units.
/// * Under `EvictSoonest` it resets a key that is denied, too: 3 more for each 300,000.
///
/// If the client can choose the cost, one request is enough for each of the `max_keys` keys.
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
