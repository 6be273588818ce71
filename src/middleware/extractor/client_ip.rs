//! The address of the client as a key, behind trusted proxies.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use http::{Extensions, HeaderMap, HeaderName, header::FORWARDED, request::Parts};
use ipnet::IpNet;

use super::{
    Key, KeyExtractor, forwarded,
    peer_ip::{self, PeerAddr},
};
use crate::error::{ConfigError, RequestError};

/// The header field in which trusted proxies say whom they speak for. Each of them must write it, or remove
/// what the client wrote: there is no fallback to another field.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProxyHeader {
    /// `X-Forwarded-For`: addresses, to which each proxy adds that of its peer.
    XForwardedFor,
    /// `Forwarded` of RFC 7239, to whose end each proxy adds an element with a `for=`, the address of
    /// its peer.
    Forwarded,
    /// A field with one address, such as `x-real-ip` or `cf-connecting-ip`, which the proxy sets.
    Single(HeaderName),
}

/// The address of the client behind trusted proxies, which no client can choose.
///
/// The peer of the connection, found as by [`PeerIp`](super::PeerIp), is the client, unless it is one of the
/// trusted proxies. Then the header field says who its peer was; if that was a trusted proxy too, then
/// the entry before it, and so on from the right: the first address that is not trusted is the client's.
/// What is left of it is not looked at, since anybody can have written it.
///
/// An entry that is not an address ends the search: the last trusted proxy before it counts as the client.
/// If all are trusted, the leftmost one does; without the field, the peer. Entries may have ports and
/// brackets. IPv4 addresses that are mapped into IPv6 are IPv4 addresses. Addresses of NAT64 and
/// Teredo make the same key as with [`PeerIp`](super::PeerIp), but a proxy with such an address is
/// trusted only if a network contains the address as it stands, not the IPv4 address in it.
///
/// `Forwarded` is read from its end by the grammar of RFC 7239: a malformed element, an element
/// without a `for`, and one with two of them end the search, too. What a proxy appended, to the last
/// line or as a line of its own, is read as the proxy wrote it, whatever stands left of it: a quote
/// that a client left open does not reach it. A proxy that copies text of the client into an element,
/// such as `host=`, must escape it as the RFC says. In `X-Forwarded-For` quotes have no meaning, and
/// each comma separates.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::key::{ClientIp, ProxyHeader};
///
/// // A load balancer in 10.0.0.0/8 that adds to X-Forwarded-For.
/// let key = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8", "fd00::/8"]);
///
/// // A site behind one proxy on the same machine that sets X-Real-IP; of IPv6, a /56 is one client.
/// let real_ip = ProxyHeader::Single(http::HeaderName::from_static("x-real-ip"));
/// let key = ClientIp::new(real_ip, ["127.0.0.1", "::1"]).ipv6_prefix(56);
/// # let _ = key;
/// ```
#[derive(Clone, Debug)]
pub struct ClientIp {
    header: ProxyHeader,
    trusted: Arc<[IpNet]>,
    ipv6_prefix: u8,
    peer_addr: Option<PeerAddr>,
}

impl ClientIp {
    /// Trusts what the proxies in these networks write into the field. A network is written as
    /// `10.0.0.0/8`, `2001:db8::/32`, or as one address.
    ///
    /// # Panics
    ///
    /// If one of them is not a network. For networks that are not literals there is
    /// [`try_new`](ClientIp::try_new).
    #[must_use]
    #[track_caller]
    pub fn new<T: AsRef<str>>(header: ProxyHeader, trusted: impl IntoIterator<Item = T>) -> Self {
        match Self::try_new(header, trusted) {
            Ok(key) => key,
            Err(error) => panic!("{error}"),
        }
    }

    /// Like [`new`](ClientIp::new), for networks that are not literals.
    ///
    /// # Errors
    ///
    /// If one of them is not a network.
    pub fn try_new<T: AsRef<str>>(
        header: ProxyHeader,
        trusted: impl IntoIterator<Item = T>,
    ) -> Result<Self, ConfigError> {
        let trusted =
            trusted.into_iter().map(|it| network(it.as_ref())).collect::<Result<_, _>>()?;
        Ok(Self { header, trusted, ipv6_prefix: peer_ip::IPV6_PREFIX, peer_addr: None })
    }

    /// Sets how many bits of an IPv6 address make a client, 64 by default: the least that one host is
    /// given. Many homes are given a /56.
    ///
    /// # Panics
    ///
    /// If `bits` is above 128.
    #[must_use]
    pub fn ipv6_prefix(self, bits: u8) -> Self {
        assert!(bits <= 128, "an IPv6 address has 128 bits, not {bits}");
        Self { ipv6_prefix: bits, ..self }
    }

    /// Says where a server puts the address of the peer: there, and nowhere else, it is looked for.
    ///
    /// A request for which `peer_addr` returns `None` is answered with 500.
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

    fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(&address))
    }

    fn client(&self, peer: IpAddr, headers: &HeaderMap) -> Result<IpAddr, RequestError> {
        let peer = peer.to_canonical();
        if !self.trusts(peer) {
            return Ok(peer);
        }
        match &self.header {
            ProxyHeader::XForwardedFor => {
                let lines = headers.get_all("x-forwarded-for").iter().rev();
                // It has no quotes: every comma separates.
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
                    return Err(RequestError::invalid(format!("the field {name} comes twice")));
                }
                Ok(value.and_then(|value| node(value.as_bytes().trim_ascii())).unwrap_or(peer))
            }
        }
    }

    /// Returns the first entry that is not trusted, of entries from the right.
    fn walk(&self, peer: IpAddr, entries: impl Iterator<Item = Option<IpAddr>>) -> IpAddr {
        let mut last = peer;
        for entry in entries {
            match entry {
                Some(address) if self.trusts(address) => last = address,
                Some(address) => return address,
                None => return last,
            }
        }
        last
    }
}

impl KeyExtractor<Parts> for ClientIp {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        let client = self.client(peer_ip::address(head, self.peer_addr)?, &head.headers)?;
        Ok(peer_ip::network(client, self.ipv6_prefix))
    }
}

fn network(text: &str) -> Result<IpNet, ConfigError> {
    let network = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    let network = network.map_err(|_| ConfigError::Network { network: text.to_owned() })?;
    Ok(match network {
        // As of addresses: 96 bits say that it is mapped.
        IpNet::V6(mapped) if mapped.prefix_len() >= 96 => match mapped.addr().to_ipv4_mapped() {
            Some(address) => IpNet::new_assert(address.into(), mapped.prefix_len() - 96),
            None => network,
        },
        _ => network,
    })
}

/// A node of RFC 7239: an address, which may have brackets and a port.
fn node(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    let (address, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            (IpAddr::V6(address.parse().ok()?), port)
        }
        // Many proxies write an IPv6 address without the brackets; it has no port then.
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

/// node-port = 1*5DIGIT / "_" 1*( ALPHA / DIGIT / "." / "_" / "-" ), the latter if it is hidden.
fn is_port(text: &str) -> bool {
    let is_hidden = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match text.strip_prefix('_') {
        Some(hidden) => !hidden.is_empty() && hidden.bytes().all(is_hidden),
        None => (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit()),
    }
}
