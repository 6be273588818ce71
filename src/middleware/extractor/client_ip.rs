//! The address of the client as a key: the address of the peer, or the one behind trusted proxies.

use std::net::{IpAddr, SocketAddr};

use http::{Extensions, HeaderMap, HeaderName, header::FORWARDED, request::Parts};

use super::{
    Key, KeyExtractor,
    address::{self, PeerAddr},
    forwarded,
    networks::Networks,
};
use crate::{error::ConfigError, middleware::rejection::RequestError};

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
    trusted: Networks::NONE,
    ipv6_prefix: address::IPV6_PREFIX,
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
        let trusted = Networks::of_proxies(trusted)?;
        Ok(Self { header, trusted, ipv6_prefix: address::IPV6_PREFIX, peer_addr: None })
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
        self.client(address::of_peer(head, self.peer_addr)?, &head.headers)
    }

    /// Returns why requests of several clients have the address of the proxy.
    fn find_mistake(&self, head: &Parts) -> Option<String> {
        if self.trusted.is_empty() {
            return address::proxy_in_front(head);
        }
        let peer = address::of_peer(head, self.peer_addr).ok()?.to_canonical();
        if !self.trusted.contains(peer) {
            let header = address::proxy_header(&head.headers)?;
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

    fn key_of(&self, address: IpAddr) -> Key<'static> {
        address::network(address, self.ipv6_prefix)
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
}

impl ClientIp {
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
        self.key_of(address.into())
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
        self.matcher(Networks::literal(networks))
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
        Ok(self.matcher(Networks::new(networks)?))
    }

    fn matcher(
        self,
        networks: Networks,
    ) -> impl Fn(&Parts) -> Result<bool, RequestError> + Clone + Send + Sync + 'static {
        move |head: &Parts| {
            let address = self.address(head)?.to_canonical();
            let client = address::client(address);
            Ok(networks.contains(address) || networks.contains(client))
        }
    }
}

impl KeyExtractor<Parts> for ClientIp {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(self.key_of(self.address(head)?))
    }

    fn can_mistake(&self) -> bool {
        true
    }

    fn mistake(&self, head: &Parts) -> Option<String> {
        self.find_mistake(head)
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
