//! The address of the client as a key: the address of the peer, or the one behind trusted proxies.
//! A layer watches its first requests for the commonest mistake: all clients have one key, because
//! a proxy is in front of the service.

use std::{
    hash::BuildHasher,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use foldhash::fast::FixedState;
use http::{Extensions, HeaderMap, HeaderName, header::FORWARDED, request::Parts};
use ipnet::IpNet;

use super::{Key, KeyExtractor, forwarded};
use crate::{error::ConfigError, keys::written, middleware::rejection::RequestError, observe::log};

/// The header in which trusted proxies report the address of the client. Each trusted proxy must
/// write the header, or remove what the client wrote: there is no fallback to another header.
///
/// # Examples
///
/// ```
/// use http::HeaderName;
/// use tower_ratelimit::key::{ClientIp, ProxyHeader};
///
/// // nginx, with `proxy_set_header X-Real-IP $remote_addr`
/// let header = ProxyHeader::Single(HeaderName::from_static("x-real-ip"));
/// let client = ClientIp::new(header, ["127.0.0.1", "::1"]);
/// # let _ = client;
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProxyHeader {
    /// `X-Forwarded-For`: a list of addresses, to which each proxy appends the address of its peer.
    XForwardedFor,
    /// `Forwarded` of RFC 7239: a list of elements, to which each proxy appends one with the
    /// address of its peer in `for=`.
    Forwarded,
    /// A header with one address, such as `x-real-ip` or `cf-connecting-ip`, which the proxy sets.
    /// A request in which it occurs more than once is invalid.
    Single(HeaderName),
}

/// The address of the client behind trusted proxies. Clients cannot forge it.
///
/// The peer of the connection, found as by [`PeerIp`], is the client if it is
/// not a trusted proxy. If the peer is a trusted proxy, the header is searched from the right: the
/// first address that is not trusted belongs to the client. Entries left of it are ignored, because
/// a client can forge them.
///
/// An entry that is not an address ends the search: the trusted proxy to its right counts as the
/// client. If all entries are trusted, the leftmost one counts; without the header, the peer.
/// Entries can have ports and brackets.
///
/// IPv4 addresses that are mapped into IPv6 are IPv4 addresses. Addresses of NAT64, 6to4 and Teredo
/// make the same key as with [`PeerIp`]. A proxy with one of those addresses
/// is trusted only if a network contains the IPv6 address; its IPv4 address is not compared.
///
/// `Forwarded` is read from its end by the grammar of RFC 7239. The search also ends at a malformed
/// element, at an element without a `for`, and at one with two of them. An element of a proxy is
/// read as the proxy wrote it: a quote that a client left open has no effect on elements to its
/// right. A proxy that copies text of the client into an element, such as `host=`, must escape the
/// text as the RFC says. In `X-Forwarded-For` quotes have no meaning, and every comma is a
/// separator.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key::{ClientIp, ProxyHeader};
///
/// // A load balancer in 10.0.0.0/8, which appends to X-Forwarded-For.
/// let key = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8", "fd00::/8"]);
///
/// // One proxy on the same machine, which sets X-Real-IP. A /56 of IPv6 is one client.
/// let real_ip = ProxyHeader::Single(http::HeaderName::from_static("x-real-ip"));
/// let key = ClientIp::new(real_ip, ["127.0.0.1", "::1"]).ipv6_prefix(56);
/// # let _ = key;
/// ```
#[derive(Clone, Debug)]
pub struct ClientIp {
    header: ProxyHeader,
    trusted: Networks,
    ipv6_prefix: u8,
    peer_addr: Option<PeerAddr>,
}

/// The address of the peer of the connection: the client, or the last proxy in front of the
/// service.
///
/// The extensions of the request contain the address: as a [`SocketAddr`], or, with the feature
/// `axum`, as axum's `ConnectInfo<SocketAddr>`, and in tests as its `MockConnectInfo`. For other
/// servers, such as tonic's, set [`peer_addr`](ClientIp::peer_addr).
///
/// The key contains the first 64 bits of an IPv6 address, because a host can choose the others. If
/// an IPv6 address represents an IPv4 client, the key is the IPv4 address, because many of those
/// clients have the same first 64 bits, or one of them has many:
///
/// * an IPv4 address that is mapped into IPv6 (`::ffff:0:0/96`)
/// * the address of an IPv4 client behind a translator (NAT64, `64:ff9b::/96`)
/// * a Teredo address (`2001::/32`) or a 6to4 address (`2002::/16`), of which a client can choose
///   all parts except its IPv4 address
///
/// A translator with its own prefix, or in the local-use `64:ff9b:1::/48`, puts the IPv4 address at
/// a place that only its operator knows: read the address from there in a closure.
///
/// A request without an address is rejected with 500. Otherwise all clients of a misconfigured
/// service would share one quota. The types are those of axum 0.8: a server of another version
/// stores the address elsewhere. So does a server on a Unix socket, [as the guide
/// shows](crate::guide::keys#a-unix-socket-or-a-proxy-of-unknown-address).
///
/// # Behind a proxy
///
/// Behind a proxy all requests come from the address of the proxy and share one quota. Use
/// a [`ClientIp`] there, which trusts the proxy. A layer logs a warning, once, if 1,000 requests in
/// a row have one key and a header that proxies write, such as `X-Forwarded-For`. It watches its
/// first 100,000 requests.
#[allow(non_upper_case_globals)]
pub const PeerIp: ClientIp = ClientIp {
    header: ProxyHeader::XForwardedFor,
    trusted: Networks(Vec::new()),
    ipv6_prefix: IPV6_PREFIX,
    peer_addr: None,
};

impl ClientIp {
    /// Trusts the header if it comes from a proxy in one of these networks. A network is written as
    /// `10.0.0.0/8`, `2001:db8::/32`, or as one address.
    ///
    /// # Panics
    ///
    /// If one of them is not a network, or if they contain all public addresses of IPv4 or IPv6:
    /// then every client could choose its key. For networks that are not literals, use
    /// [`try_new`](ClientIp::try_new). If the addresses of the proxies are unknown, see [the
    /// guide](crate::guide::keys#a-unix-socket-or-a-proxy-of-unknown-address).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::key::{ClientIp, ProxyHeader};
    ///
    /// let client = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8", "fd00::/8"]);
    /// # let _ = client;
    /// ```
    #[must_use]
    #[track_caller]
    pub fn new<T: AsRef<str>>(header: ProxyHeader, trusted: impl IntoIterator<Item = T>) -> Self {
        match Self::try_new(header, trusted) {
            Ok(client_ip) => client_ip,
            Err(error) => panic!("{error}"),
        }
    }

    /// Does the same as [`new`](ClientIp::new), for networks that are not literals.
    ///
    /// # Errors
    ///
    /// If one of them is not a network, or if they contain all public addresses of IPv4 or IPv6.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::key::{ClientIp, ProxyHeader};
    ///
    /// let networks = "10.0.0.0/8,fd00::/8"; // of the configuration
    /// let client = ClientIp::try_new(ProxyHeader::XForwardedFor, networks.split(','))?;
    /// # let _ = client;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_new<T: AsRef<str>>(
        header: ProxyHeader,
        trusted: impl IntoIterator<Item = T>,
    ) -> Result<Self, ConfigError> {
        Ok(Self { header, trusted: Networks::of_proxies(trusted)?, ..PeerIp })
    }

    /// Sets how many bits of an IPv6 address identify a client. The default is 64, the smallest
    /// network that is assigned to a host. Many homes get a /56.
    ///
    /// # Panics
    ///
    /// If `bits` is above 128.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::key;
    ///
    /// let homes = key::PeerIp.ipv6_prefix(56);
    /// let one = [0x2001, 0xdb8, 0, 0, 0, 0, 0, 1];
    /// let other = [0x2001, 0xdb8, 0, 0xff, 0, 0, 0, 1];
    /// assert_eq!(homes.key(one), homes.key(other));
    /// ```
    #[must_use]
    #[track_caller]
    pub fn ipv6_prefix(self, bits: u8) -> Self {
        assert!(bits <= 128, "an IPv6 prefix has at most 128 bits, not {bits}");
        Self { ipv6_prefix: bits, ..self }
    }

    /// Sets where the server stores the address of the peer. No other place is searched.
    ///
    /// A request for which `peer_addr` returns `None` is rejected with 500.
    ///
    /// # Examples
    ///
    /// ```
    /// use tonic::transport::server::TcpConnectInfo;
    /// use tower_ratelimit::key::{ClientIp, ProxyHeader};
    ///
    /// let key = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8"])
    ///     .peer_addr(|it| it.get::<TcpConnectInfo>()?.remote_addr());
    /// # let _ = key;
    /// ```
    #[must_use]
    pub fn peer_addr(self, peer_addr: fn(&Extensions) -> Option<SocketAddr>) -> Self {
        Self { peer_addr: Some(peer_addr), ..self }
    }

    fn address(&self, head: &Parts) -> Result<IpAddr, RequestError> {
        self.client(of_peer(head, self.peer_addr)?, &head.headers)
    }

    fn client(&self, peer: IpAddr, headers: &HeaderMap) -> Result<IpAddr, RequestError> {
        let peer = peer.to_canonical();
        if !self.trusted.contains(peer) {
            return Ok(peer);
        }
        match &self.header {
            ProxyHeader::XForwardedFor => {
                let lines = headers.get_all("x-forwarded-for").iter().rev();
                // This header has no quoted strings: every comma is a separator.
                let entries = lines.flat_map(|line| line.as_bytes().rsplit(|&byte| byte == b','));
                Ok(self.walk(peer, entries.map(|entry| node(entry.trim_ascii()))))
            }
            ProxyHeader::Forwarded => {
                let lines = headers.get_all(FORWARDED).iter().rev();
                let nodes = lines.flat_map(|line| forwarded::from_the_right(line.as_bytes()));
                Ok(self.walk(peer, nodes.map(|text| node(&text?))))
            }
            ProxyHeader::Single(name) => {
                let mut values = headers.get_all(name).iter();
                let value = values.next();
                if values.next().is_some() {
                    return Err(RequestError::invalid(format!(
                        "header {name} occurs more than once"
                    )));
                }
                Ok(value.and_then(|value| node(value.as_bytes().trim_ascii())).unwrap_or(peer))
            }
        }
    }

    /// Returns the first entry that is not trusted. The entries are in order from the right.
    fn walk(&self, peer: IpAddr, entries: impl Iterator<Item = Option<IpAddr>>) -> IpAddr {
        let mut last = peer;
        for entry in entries {
            match entry {
                Some(address) if self.trusted.contains(address) => last = address,
                Some(address) => return address,
                None => return last,
            }
        }
        last
    }

    /// Returns the key of a client with this address, for
    /// [`Limiter::peek`](crate::Limiter::peek), [`reset`](crate::Limiter::reset) and other
    /// calls.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// limiter.reset(key::PeerIp.key([192, 0, 2, 1])).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn key(&self, address: impl Into<IpAddr>) -> Key<'static> {
        match client(address.into()) {
            IpAddr::V4(address) => Key::from(address),
            IpAddr::V6(address) => {
                let prefix = self.ipv6_prefix;
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                let network = Ipv6Addr::from_bits(address.to_bits() & mask);
                written(format_args!("ip={network}/{prefix}"))
            }
        }
    }

    /// Returns a closure that finds the requests of clients in these networks, for
    /// [`forbid`](crate::RateLimitLayer::forbid) and
    /// [`exempt`](crate::RateLimitLayer::exempt). A network is written as `10.0.0.0/8`,
    /// `2001:db8::/32`, or as one address.
    ///
    /// An IPv6 address that represents an IPv4 client, as for the key, is also compared as
    /// that IPv4 address. A request without an address is rejected with 500.
    ///
    /// # Panics
    ///
    /// If one of them is not a network. For networks that are not literals, use
    /// [`try_within`](ClientIp::try_within).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .forbid(key::PeerIp.within(["203.0.113.0/24"]));
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn within<T: AsRef<str>>(
        self,
        networks: impl IntoIterator<Item = T>,
    ) -> impl Fn(&Parts) -> Result<bool, RequestError> + Clone + Send + Sync + 'static {
        match self.try_within(networks) {
            Ok(matches) => matches,
            Err(error) => panic!("{error}"),
        }
    }

    /// Does the same as [`within`](ClientIp::within), for networks that are not literals.
    ///
    /// # Errors
    ///
    /// If one of them is not a network.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let quota = Quota::per_hour(3);
    /// # let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::sliding_log(), quota);
    /// let networks = ["203.0.113.0/24"]; // of the configuration
    /// let layer = RateLimitLayer::new(limiter, key::PeerIp)
    ///     .forbid(key::PeerIp.try_within(networks)?);
    /// # let _ = layer;
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_within<T: AsRef<str>>(
        self,
        networks: impl IntoIterator<Item = T>,
    ) -> Result<
        impl Fn(&Parts) -> Result<bool, RequestError> + Clone + Send + Sync + 'static,
        ConfigError,
    > {
        let networks = Networks::new(networks)?;
        Ok(move |head: &Parts| {
            let address = self.address(head)?.to_canonical();
            let client = client(address);
            Ok(networks.contains(address) || networks.contains(client))
        })
    }
}

impl KeyExtractor<Parts> for ClientIp {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(self.key(self.address(head)?))
    }

    fn can_mistake(&self) -> bool {
        true
    }

    /// Returns why requests of several clients have the address of the proxy.
    fn mistake(&self, head: &Parts) -> Option<String> {
        let of_proxy = || PROXY_HEADERS.into_iter().find(|&name| head.headers.contains_key(name));
        if self.trusted.0.is_empty() {
            let header = of_proxy()?;
            return Some(format!(
                "the header {header}, which proxies write; if the service is behind a proxy, use \
                 `key::ClientIp` in place of `key::PeerIp`"
            ));
        }
        let peer = of_peer(head, self.peer_addr).ok()?.to_canonical();
        if !self.trusted.contains(peer) {
            let header = of_proxy()?;
            return Some(format!(
                "the header {header}, but a peer outside of the trusted networks; if it is a \
                 proxy, add its network to `key::ClientIp`"
            ));
        }
        if self.client(peer, &head.headers).ok()? != peer {
            return None;
        }
        let header = match &self.header {
            ProxyHeader::XForwardedFor => "x-forwarded-for",
            ProxyHeader::Forwarded => "forwarded",
            ProxyHeader::Single(name) => name.as_str(),
        };
        Some(format!(
            "the trusted proxy names no client in the header {header}; give `key::ClientIp` the \
             header that it writes, or, if these are its health checks, exempt their route"
        ))
    }
}

/// Parses a node of RFC 7239: an address, optionally with brackets and a port.
fn node(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    let (address, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            (IpAddr::V6(address.parse().ok()?), port)
        }
        // Many proxies write IPv6 addresses without brackets, and then without a port.
        None => match text.parse() {
            Ok(address) => (address, ""),
            Err(_) => {
                let (address, port) = text.split_at(text.find(':')?);
                (IpAddr::V4(address.parse().ok()?), port)
            }
        },
    };
    (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then(|| address.to_canonical())
}

/// Checks a `node-port = 1*5DIGIT / "_" 1*( ALPHA / DIGIT / "." / "_" / "-" )`. The second form is
/// a hidden port.
fn is_port(text: &str) -> bool {
    let is_hidden = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match text.strip_prefix('_') {
        Some(hidden) => !hidden.is_empty() && hidden.bytes().all(is_hidden),
        None => (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

/// Returns the address of the peer from the place where the server stores it.
type PeerAddr = fn(&Extensions) -> Option<SocketAddr>;

/// The headers by which proxies report the client.
const PROXY_HEADERS: [&str; 6] = [
    "x-forwarded-for",
    "forwarded",
    "x-real-ip",
    "cf-connecting-ip",
    "true-client-ip",
    "fly-client-ip",
];

/// The smallest network that is assigned to a host.
const IPV6_PREFIX: u8 = 64;

/// Returns the address of the peer: from `peer_addr` if it is set, else from the default places.
fn of_peer(head: &Parts, peer_addr: Option<PeerAddr>) -> Result<IpAddr, RequestError> {
    let (address, missing) = match peer_addr {
        Some(peer_addr) => (peer_addr(&head.extensions), MISSING_THERE),
        None => (default_peer_addr(&head.extensions), MISSING),
    };
    address.map(|address| address.ip()).ok_or_else(|| RequestError::misconfigured(missing))
}

fn default_peer_addr(extensions: &Extensions) -> Option<SocketAddr> {
    let address = extensions.get::<SocketAddr>().copied();
    #[cfg(feature = "axum")]
    let address = address.or_else(|| {
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
        let info = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
        let mock = extensions.get::<MockConnectInfo<SocketAddr>>().map(|mock| mock.0);
        info.or(mock)
    });
    address
}

/// Returns the IPv4 address of a client that the IPv6 address represents, or the address itself.
fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => embedded_ipv4(address).map_or(address.into(), IpAddr::from),
        address => address,
    }
}

/// Returns the address of the IPv4 client behind a NAT64 address (RFC 6052), a 6to4 address (RFC
/// 3056) or a Teredo address (RFC 4380, which inverts the bits).
fn embedded_ipv4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let low = address.to_bits() as u32;
    match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => Some(Ipv4Addr::from_bits(low)),
        [0x2001, 0, ..] => Some(Ipv4Addr::from_bits(!low)),
        [0x2002, high, low, ..] => {
            Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        _ => None,
    }
}

#[cfg(feature = "axum")]
const MISSING: &str = "the extensions of the request contain no peer address: serve the router \
     with `into_make_service_with_connect_info::<SocketAddr>()` of axum 0.8; with a Unix socket, \
     another version of axum or another server, set `peer_addr`";
#[cfg(not(feature = "axum"))]
const MISSING: &str = "the extensions of the request contain no peer address: set `peer_addr`, or \
     enable the feature `axum` of tower-ratelimit and serve the router with \
     `into_make_service_with_connect_info::<SocketAddr>()` of axum 0.8";
const MISSING_THERE: &str = "the extensions of the request contain no peer address: `peer_addr` \
     returned `None`; make it read the place where the server stores the address, or return a \
     fixed one if there is none, as with a Unix socket";

/// The networks of which no client on the internet has an address.
const NO_CLIENTS: [&str; 11] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "224.0.0.0/3",
    // All that is not in 2000::/3.
    "::/3",
    "4000::/2",
    "8000::/1",
];

/// A list of networks.
#[derive(Clone, Debug)]
struct Networks(Vec<IpNet>);

impl Networks {
    fn new<T: AsRef<str>>(networks: impl IntoIterator<Item = T>) -> Result<Self, ConfigError> {
        let networks = networks.into_iter().map(|it| parsed(it.as_ref()));
        Ok(Self(networks.collect::<Result<_, _>>()?))
    }

    /// Does the same as [`new`](Networks::new), for trusted proxies: not all clients can be some.
    fn of_proxies<T: AsRef<str>>(
        networks: impl IntoIterator<Item = T>,
    ) -> Result<Self, ConfigError> {
        let networks = Self::new(networks)?;
        let no_clients = NO_CLIENTS.iter().map(|it| it.parse().expect("a network"));
        let known: Vec<_> = networks.0.iter().copied().chain(no_clients).collect();
        // With the addresses that no client has, the trusted ones are all.
        match IpNet::aggregate(&known).iter().find(|network| network.prefix_len() == 0) {
            Some(IpNet::V4(_)) => Err(ConfigError::AllTrusted { version: "IPv4" }),
            Some(IpNet::V6(_)) => Err(ConfigError::AllTrusted { version: "IPv6" }),
            None => Ok(networks),
        }
    }

    fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

fn parsed(text: &str) -> Result<IpNet, ConfigError> {
    let text = text.trim(); // of a list in an environment variable, say
    let network = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    let network = network.map_err(|_| ConfigError::Network { network: text.to_owned() })?;
    Ok(match network {
        // A prefix of 96 bits covers only mapped IPv4 addresses.
        IpNet::V6(mapped) if mapped.prefix_len() >= 96 => match mapped.addr().to_ipv4_mapped() {
            Some(address) => IpNet::new_assert(address.into(), mapped.prefix_len() - 96),
            None => network,
        },
        _ => network,
    })
}

/// The requests in a row with one key that are suspect.
const RUN: u32 = 1_000;
/// The number of requests that are watched. The others cost one comparison.
const WATCHED: u32 = 100_000;

/// Returns the extractor, which watches the requests if it can be mistaken in the client.
pub(crate) fn watched<H: 'static>(key: impl KeyExtractor<H>) -> Arc<dyn KeyExtractor<H>> {
    if !key.can_mistake() {
        return Arc::new(key);
    }
    Arc::new(Watched {
        key,
        left: AtomicU32::new(WATCHED),
        last: AtomicU64::new(0),
        run: AtomicU32::new(0),
        has_warned: AtomicBool::new(false),
    })
}

/// An extractor, and the keys of the requests of one layer. Threads may overwrite the counts of
/// each other: the exact number does not matter.
struct Watched<K> {
    key: K,
    left: AtomicU32,
    /// The hash of the last key, and the number of requests in a row that have it.
    last: AtomicU64,
    run: AtomicU32,
    has_warned: AtomicBool,
}

impl<H: 'static, K: KeyExtractor<H>> KeyExtractor<H> for Watched<K> {
    #[inline]
    fn extract(&self, head: &H) -> Result<Key<'static>, RequestError> {
        let key = self.key.extract(head);
        let left = self.left.load(Relaxed);
        if left > 0
            && let Ok(key) = &key
        {
            self.count(left, head, key);
        }
        key
    }
}

impl<K> Watched<K> {
    #[inline(never)]
    fn count<H>(&self, left: u32, head: &H, key: &Key<'_>)
    where
        K: KeyExtractor<H>,
    {
        self.left.store(left - 1, Relaxed);
        let hash = FixedState::default().hash_one(key.as_bytes());
        let is_same = self.last.swap(hash, Relaxed) == hash;
        let run = if is_same { self.run.load(Relaxed) + 1 } else { 1 };
        self.run.store(run, Relaxed);
        if run.is_multiple_of(RUN) {
            self.suspect(head);
        }
    }

    #[cold]
    fn suspect<H>(&self, head: &H)
    where
        K: KeyExtractor<H>,
    {
        let Some(mistake) = self.key.mistake(head) else { return };
        if !self.has_warned.swap(true, Relaxed) {
            log::suspected(&format!(
                "all clients may share one limit: {RUN} requests in a row had the same key, and \
                 {mistake}"
            ));
        }
        self.left.store(0, Relaxed);
    }
}
