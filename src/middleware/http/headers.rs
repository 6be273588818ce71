//! Rate limit headers, one dialect per variant of [`Headers`], and the headers of rejections.
//! Bodies and statuses of rejections are in `problem.rs` and `grpc.rs`.

use std::time::{Duration, SystemTime};

use bytes::{BufMut, Bytes};
use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER},
};

use super::problem::PROBLEM_JSON;
use crate::{
    decision::{Count, Decision, Source, whole_seconds},
    limiter::{AnyLimiter, Charge},
    middleware::rejection::Rejection,
    quota::Quota,
};

const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub(super) const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// RFC 6585: a cache must not store a 429. It would store the 200 of a gRPC status.
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

const TO_BE_REPLACED: HeaderValue = HeaderValue::from_static("");

/// The largest Integer of a structured header (RFC 9651): it has at most 15 digits.
const LARGEST_INTEGER: u64 = 999_999_999_999_999;

/// The names of the headers for the limit, what remains, and the reset.
type Triple = [HeaderName; 3];

const TRIPLE: Triple = [
    HeaderName::from_static("ratelimit-limit"),
    HeaderName::from_static("ratelimit-remaining"),
    HeaderName::from_static("ratelimit-reset"),
];
const X_TRIPLE: Triple = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
];

/// A dialect of the headers that report the state of a quota to clients. See
/// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
///
/// For a request that has waited, the headers report the units that remained when its instant was
/// reserved.
///
/// With the feature `serde`, a dialect is read and written by its name, such as `"draft11"` or
/// `"x-rate-limit-epoch"`.
///
/// # Examples
///
/// ```
/// # use tower_ratelimit::{
/// #     Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key, layer::Headers,
/// # };
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let quota = Quota::per_hour(3);
/// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
/// let layer = RateLimitLayer::new(limiter, key::PeerIp)
///     .headers([Headers::XRateLimit, Headers::RetryAfter]);
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Headers {
    /// `RateLimit` and `RateLimit-Policy` of draft-ietf-httpapi-ratelimit-headers-11. A later draft
    /// gets a variant of its own.
    ///
    /// Of several limits, `RateLimit` reports the one that [binds](crate::Decision::limiter): 59
    /// requests that remain come before 500 tokens. Stacked layers add their headers side by side.
    /// The policy contains the limit per window: with a burst above it, more units can remain. A
    /// limit on [concurrency](crate::Algorithm::Concurrency) has the unit `concurrent-requests`
    /// instead of a window.
    Draft11,
    /// The same headers, with an item in `RateLimit` for each limit of a request that has several:
    /// see [`Charge`]. The first item is the limit that binds.
    ///
    /// If the process [remembers](crate::store::Source::Cached) a denial, the response reports only
    /// the limit of that denial. In a cluster, a denial reports only the limits of the key that
    /// denies.
    Draft11All,
    /// `RateLimit-Limit`, `RateLimit-Remaining` and `RateLimit-Reset` of the versions of that draft
    /// up to 06: the limit, the remaining units, and the seconds until the key is in its initial
    /// state. With a burst above the limit per window, the limit is that burst, so that it is never
    /// below the remaining units. If layers are stacked, the headers are those of the layer with
    /// the least remaining. A limit on [concurrency](crate::Algorithm::Concurrency) has no reset.
    Draft06,
    /// The same three headers as `X-RateLimit-*`, which many APIs send.
    XRateLimit,
    /// The same as [`XRateLimit`](Self::XRateLimit), with another `X-RateLimit-Reset`: the instant
    /// in seconds since 1970-01-01 UTC, as GitHub reports it.
    XRateLimitEpoch,
    /// Only the `Retry-After` of a rejection, which all other variants send, too.
    RetryAfter,
}

impl Headers {
    /// Writes the headers of a dialect. A new dialect needs a variant above and an arm here.
    fn write(self, headers: &mut HeaderMap, report: &Report<'_>) {
        match self {
            Self::Draft11 | Self::Draft11All => {
                report.append_policies(headers);
                report.append_binding(headers);
                if self == Self::Draft11All {
                    report.append_others(headers);
                }
            }
            Self::Draft06 => insert_triple(headers, &TRIPLE, Duration::ZERO, report),
            Self::XRateLimit => insert_triple(headers, &X_TRIPLE, Duration::ZERO, report),
            Self::XRateLimitEpoch => {
                let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
                insert_triple(headers, &X_TRIPLE, now, report);
            }
            Self::RetryAfter => {} // the rejection writes it
        }
    }
}

/// The state of a quota after a request, for the dialects.
struct Report<'a> {
    /// A quota of the layer's limiter and its `RateLimit-Policy`, if all requests have one limiter.
    policy: Option<&'a (Quota, HeaderValue)>,
    charge: Option<&'a Charge>,
    /// `None` if the request costs more than the quota can grant.
    decision: Option<&'a Decision>,
    /// The time until more remains or, after a denial, until the request is allowed, from now;
    /// `None` if all of the quota remains.
    replenish_after: Option<Duration>,
}

impl Report<'_> {
    /// Appends the state of the limit that binds.
    fn append_binding(&self, headers: &mut HeaderMap) {
        if let Some(decision) = self.decision {
            let (limiter, remaining) = (decision.limiter(), decision.remaining());
            let seconds = self.replenish_after.map(whole_seconds);
            headers.append(RATELIMIT, ratelimit(limiter, remaining, seconds));
        }
    }

    /// Appends the states of the other limits. If one is charged for several keys, the key with the
    /// least remaining binds.
    fn append_others(&self, headers: &mut HeaderMap) {
        let Some(decision) = self.decision else { return };
        let counts: Vec<_> = decision.counts().collect();
        let mut names = vec![decision.limiter()];
        for Count { limiter, .. } in counts.iter().copied() {
            if names.contains(&limiter) {
                continue;
            }
            names.push(limiter);
            let of_limiter = counts.iter().filter(|count| count.limiter == limiter);
            let Some(count) = of_limiter.min_by_key(|count| count.remaining) else { continue };
            let replenish_after = count.replenish_after().saturating_sub(decision.delay());
            let seconds = (!replenish_after.is_zero()).then(|| whole_seconds(replenish_after));
            headers.append(RATELIMIT, ratelimit(limiter, count.remaining, seconds));
        }
    }

    fn append_policies(&self, headers: &mut HeaderMap) {
        let own_quota = self.decision.map(Decision::quota);
        // A fallback has another quota, and that of the limiter can change.
        if let Some((_, policy)) = self.policy.filter(|(quota, _)| own_quota == Some(*quota)) {
            headers.append(RATELIMIT_POLICY, policy.clone());
            return;
        }
        if let Some(decision) = self.decision.filter(|_| self.charge.is_none_or(Charge::is_exempt))
        {
            headers.append(RATELIMIT_POLICY, policy(decision.limiter(), decision.quota()));
        }
        let limiters = || self.charge.into_iter().flat_map(Charge::limiters);
        // The quota of some limiters is known only by the decision.
        for (i, limiter) in limiters().enumerate() {
            // One limiter can be charged for two keys.
            let is_first = limiters().take(i).all(|it| it.name() != limiter.name());
            if let Some(quota) = limiter.quota().or(own_quota).filter(|_| is_first) {
                headers.append(RATELIMIT_POLICY, policy(limiter.name(), quota));
            }
        }
    }
}

/// Writes the chosen dialects. The names of limiters need no escaping: see
/// [`Limiter::new`](crate::Limiter::new).
#[derive(Clone, Debug)]
pub(crate) struct HeaderWriter {
    dialects: Box<[Headers]>,
    /// The first quota and its `RateLimit-Policy`, if all requests have the same limiter.
    policy: Option<(Quota, HeaderValue)>,
    /// The headers of a denial with that quota, if they are those of most layers. A copy of all
    /// takes less time than insertions of five.
    denial: Option<HeaderMap>,
}

impl HeaderWriter {
    /// `limiter`: that of all requests, if they have the same one.
    pub(crate) fn new(limiter: Option<&AnyLimiter>) -> Self {
        let policy =
            limiter.and_then(|it| it.quota().map(|quota| (quota, policy(it.name(), quota))));
        let mut writer = Self { dialects: Box::default(), policy, denial: None };
        writer.set_dialects([Headers::Draft11]);
        writer
    }

    pub(crate) fn set_dialects(&mut self, dialects: impl IntoIterator<Item = Headers>) {
        self.dialects = dialects.into_iter().collect();
        self.denial = match (&*self.dialects, &self.policy) {
            ([], _) => Some(denial_without_dialects()),
            ([Headers::Draft11], Some((_, policy))) => Some(denial(policy.clone())),
            _ => None,
        };
    }

    #[inline]
    pub(crate) fn dialects(&self) -> &[Headers] {
        &self.dialects
    }

    /// Returns the headers of a denial, with the type of the body, as
    /// [`for_rejection`](Self::for_rejection) does in the most common case; else `None`.
    pub(crate) fn for_denial(&self, decision: &Decision) -> Option<HeaderMap> {
        let known = self.denial.as_ref()?;
        if self.dialects.is_empty() {
            return Some(known.clone());
        }
        self.policy.as_ref().filter(|(quota, _)| decision.quota() == *quota)?;
        let seconds = decision.retry_after_secs().filter(|_| !decision.is_blocked())?;
        let mut headers = known.clone();
        for (name, value) in headers.iter_mut() {
            if *name == RETRY_AFTER {
                *value = number(seconds);
            } else if *name == RATELIMIT {
                *value = ratelimit(decision.limiter(), decision.remaining(), Some(seconds));
            }
        }
        Some(headers)
    }

    /// Adds headers to a response of the service, or of an inner layer.
    pub(crate) fn add(
        &self,
        headers: &mut HeaderMap,
        decision: &Decision,
        charge: Option<&Charge>,
    ) {
        if decision.source() == Source::Open {
            return;
        }
        // The time counts from the decision, and the request has waited since.
        let replenish_after = decision.replenish_after().saturating_sub(decision.delay());
        let more_after = Some(replenish_after).filter(|time| !time.is_zero());
        self.write(headers, charge, Some(decision), more_after);
        // A retry has the same cost.
        if decision.remaining() < decision.cost() {
            raise_retry_after(headers, whole_seconds(replenish_after));
        }
    }

    /// Returns the headers of a rejection.
    pub(crate) fn for_rejection(
        &self,
        rejection: &Rejection,
        charge: Option<&Charge>,
    ) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CACHE_CONTROL, NO_STORE);
        if self.dialects.is_empty() {
            return headers;
        }
        let retry_after = rejection.retry_after();
        if let Some(time) = retry_after {
            headers.insert(RETRY_AFTER, number(whole_seconds(time)));
        }
        match rejection {
            Rejection::Denied(decision) => {
                self.write(&mut headers, charge, Some(decision), retry_after);
            }
            Rejection::CostAboveQuota { .. } => self.write(&mut headers, charge, None, None),
            Rejection::Request(_) | Rejection::Store(_) => {}
        }
        headers
    }

    fn write(
        &self,
        headers: &mut HeaderMap,
        charge: Option<&Charge>,
        decision: Option<&Decision>,
        replenish_after: Option<Duration>,
    ) {
        let report = Report { policy: self.policy.as_ref(), charge, decision, replenish_after };
        for dialect in &self.dialects {
            dialect.write(headers, &report);
        }
    }
}

/// Returns the headers of a denial, of which two values are to be replaced.
fn denial(policy: HeaderValue) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(5);
    headers.insert(RETRY_AFTER, TO_BE_REPLACED);
    headers.insert(RATELIMIT, TO_BE_REPLACED);
    headers.insert(RATELIMIT_POLICY, policy);
    headers.extend(denial_without_dialects());
    headers
}

fn denial_without_dialects() -> HeaderMap {
    HeaderMap::from_iter([(CACHE_CONTROL, NO_STORE), (CONTENT_TYPE, PROBLEM_JSON)])
}

/// Forbids caches to store a rejection, if its headers do not control caching already.
pub(crate) fn forbid_storing(headers: &mut HeaderMap) {
    headers.entry(CACHE_CONTROL).or_insert(NO_STORE);
}

/// Raises the `Retry-After` of an inner layer: a retry must satisfy both layers.
fn raise_retry_after(headers: &mut HeaderMap, seconds: u64) {
    if let Some(other) = headers.get(RETRY_AFTER)
        && let Some(other) = other.to_str().ok().and_then(|it| it.parse::<u64>().ok())
        && other < seconds
    {
        headers.insert(RETRY_AFTER, number(seconds));
    }
}

/// Returns the `RateLimit-Policy` of a limiter.
fn policy(name: &str, quota: Quota) -> HeaderValue {
    let mut policy = format!("\"{name}\";q={}", quota.limit());
    let window = quota.window();
    if quota.is_concurrent() {
        policy.push_str(";qu=\"concurrent-requests\"");
    } else if window.subsec_nanos() == 0 {
        // The header can only contain whole seconds.
        policy.push_str(&format!(";w={}", window.as_secs()));
    }
    HeaderValue::from_maybe_shared(Bytes::from(policy)).expect("printable ASCII")
}

/// Returns the `RateLimit` of a limit, without an allocation except for the header itself.
fn ratelimit(limiter: &str, remaining: u64, replenish_secs: Option<u64>) -> HeaderValue {
    let mut digits = itoa::Buffer::new();
    let mut buffer = [0; 128]; // a name has at most 64 characters
    let mut text = &mut buffer[..];
    text.put_slice(b"\"");
    text.put_slice(limiter.as_bytes());
    text.put_slice(b"\";r=");
    text.put_slice(digits.format(remaining.min(LARGEST_INTEGER)).as_bytes());
    if let Some(seconds) = replenish_secs {
        text.put_slice(b";t=");
        text.put_slice(digits.format(seconds).as_bytes());
    }
    let rest = text.len();
    let text = &buffer[..buffer.len() - rest];
    HeaderValue::from_bytes(text).expect("printable ASCII")
}

/// Returns a number as a value, in one allocation: `HeaderValue::from` makes two.
fn number(number: u64) -> HeaderValue {
    let mut digits = itoa::Buffer::new();
    HeaderValue::from_str(digits.format(number)).expect("digits are ASCII")
}

/// Inserts the three headers, unless an inner layer has at most as much remaining. The reset counts
/// in seconds from now, or since 1970-01-01 UTC if `now` does: there is no standard.
fn insert_triple(headers: &mut HeaderMap, names: &Triple, now: Duration, report: &Report<'_>) {
    let Some(decision) = report.decision else { return };
    let [limit_name, remaining_name, reset_name] = names;
    let other = headers.get(remaining_name).and_then(|other| other.to_str().ok()?.parse().ok());
    // The rates of Redisson go up to 2^53, which has 16 digits. The other numbers are shorter: a
    // limit has 10 digits, and times are below 10^15 s.
    let own = decision.remaining().min(LARGEST_INTEGER);
    if other.is_some_and(|other: u64| other <= own) {
        return;
    }
    let time = now + decision.reset_after().saturating_sub(decision.delay());
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    let quota = decision.quota();
    headers.insert(limit_name, number(own.max(quota.limit().max(quota.burst_size()))));
    headers.insert(remaining_name, number(own));
    match quota.is_concurrent() {
        true => drop(headers.remove(reset_name)), // unknown
        false => drop(headers.insert(reset_name, number(seconds))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Limiter, MemoryStore, limiter::IntoLimiter};

    #[test]
    fn the_prepared_headers_of_a_denial_are_those_of_its_rejection() {
        let (quota, store) = (Quota::per_hour(1), MemoryStore::new());
        let limiter = Limiter::new("api", store, Algorithm::token_bucket(), quota);
        let decisions = [(); 2].map(|()| limiter.check("alice").now().unwrap());
        let rejection = Rejection::Denied(decisions[1].clone());
        for dialects in [&[][..], &[Headers::Draft11]] {
            let mut writer = HeaderWriter::new(Some(&(&limiter).into_limiter()));
            writer.set_dialects(dialects.iter().copied());
            let prepared = writer.for_denial(&decisions[1]).unwrap();
            let mut expected = writer.for_rejection(&rejection, None);
            expected.insert(CONTENT_TYPE, PROBLEM_JSON);
            assert_eq!(prepared, expected);
        }
        // The policy is that of another quota.
        limiter.set_quota(Quota::per_hour(2)).unwrap();
        let writer = HeaderWriter::new(Some(&(&limiter).into_limiter()));
        assert_eq!(writer.for_denial(&decisions[1]), None);
    }
}
