//! The setting for a full store. Its effect is in `shard` and `entry`.

/// The reaction of a full [`MemoryStore`](crate::MemoryStore) to a new key, if all keys that it
/// looks at are in use.
///
/// A key is in use while its quota is used up, while it is blocked, or until the `retry_after` of a
/// denied request has passed. Keys that are not in use make room under both settings: see
/// [`MemoryStore`](crate::MemoryStore#memory).
///
/// # Cost of an attack
///
/// A client that can invent keys can attack a store with either setting: values of a header that
/// is not authenticated, or addresses (a `/48` of IPv6 contains 65,536 networks of `/64`).
///
/// **To lock out new keys**, under `RejectNewKeys`, the client must hold all keys of the store in
/// use. It needs `max_keys` keys, and `max_keys x burst` units of cost to use them up (`limit`
/// where there is no burst). Then it needs `max_keys x limit / window` to use up the restored
/// units:
///
/// | 100,000 keys, each | to fill the store | to keep it full |
/// |---|---|---|
/// | 3 per day | 300,000 units | 3.5 per second |
/// | 100 per hour | 10,000,000 units | 2,800 per second |
/// | 100 per minute | 10,000,000 units | 170,000 per second |
/// | 10 per second | 1,000,000 units | 1,000,000 per second |
///
/// If all requests cost 1, a unit is a request. If a request can cost more, fewer requests are
/// needed. A denied request spends nothing, and keeps its key in use. So if the client can choose
/// the cost, two requests are enough for each key:
///
/// * After a request that costs 1, a request that costs the whole burst is denied: the key is in
///   use until that unit is restored.
/// * After a request that costs the whole burst, another one is denied: the key is in use until the
///   whole burst is restored.
///
/// Each limit of a rule counts as a separate key.
///
/// Small limits over long windows are at risk. If the client can choose the cost, so are large
/// limits over long windows. Limits per second and per minute are hardly at risk.
///
/// **To reset a particular key**, the client must make the store evict it: each key that is
/// compared with it must have used as much. First the client fills most of the store with keys that
/// have used as much as that key: `max_keys` x that usage. Then about `max_keys / 4` further keys
/// evict the key once. A key that has used a single unit is compared with none: up to `max_keys`
/// further keys evict it. If all requests cost 1, 100,000 keys and 5,000 requests per second give
/// the client one attempt to guess a password per 5 seconds, under any limit.
///
/// * Under both settings this resets a key that has units left: with 3 per day, 2 more attempts for
///   each 25,000 units, after the first 200,000.
/// * Under `EvictSoonest` it also resets a key that is denied: 3 more for each 300,000.
///
/// If the client can choose the cost, one request is enough for each of the `max_keys` keys.
///
/// `RejectNewKeys` is the default, because it enforces the limits: a key that was denied stays
/// denied until its `retry_after`, and a limit of one request holds. Choose `EvictSoonest` if
/// serving new clients matters more, such as for limits by address.
///
/// These measures make both attacks harder:
///
/// * Count keys that clients can make up in a separate store, apart from keys such as accounts.
/// * Set `max_keys` above the number of keys that can be in use at a time (a million keys take
///   about 140 MB).
/// * Count IPv6 addresses by network, as [`key::PeerIp`](crate::key::PeerIp) does, and
///   authenticate other keys before they are counted.
///
/// With the feature `serde`, it is read and written as `"reject-new-keys"` or `"evict-soonest"`.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::{MemoryStore, store::WhenFull};
///
/// let store = MemoryStore::with_max_keys(1_000_000);
/// store.set_when_full(WhenFull::EvictSoonest);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum WhenFull {
    /// Returns [`ErrorKind::Full`](crate::store::ErrorKind::Full) for the new key. The
    /// layer then applies its [`FailurePolicy`](crate::FailurePolicy): by default it responds with
    /// 503.
    ///
    /// With [`FailurePolicy::Open`](crate::FailurePolicy::Open), requests with new keys are not
    /// counted while the store is full. `EvictSoonest` admits fewer requests.
    #[default]
    RejectNewKeys,
    /// Evicts the key whose quota is restored soonest, of those that the store looks at. The store
    /// forgets the usage of that key, which gets its quota again. A blocked key counts as restored
    /// when its block has ended, too; evicting it ends the block.
    ///
    /// A key is never evicted while a request waits for it. If requests wait for all keys that are
    /// looked at, the new key gets [`ErrorKind::Full`](crate::store::ErrorKind::Full).
    /// [`max_waiting`](crate::RateLimitLayer::max_waiting) bounds how many keys waiting requests
    /// hold.
    EvictSoonest,
}
