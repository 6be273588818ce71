//! The address of the peer, and the key of an address. Proxies are in `client_ip.rs`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use http::{Extensions, HeaderMap, request::Parts};

use super::Key;
use crate::{keys::written, middleware::rejection::RequestError};

/// Returns the address of the peer from the place where the server stores it.
pub(super) type PeerAddr = fn(&Extensions) -> Option<SocketAddr>;

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
pub(super) const IPV6_PREFIX: u8 = 64;

/// Returns the address of the peer: from `peer_addr` if it is set, else from the default places.
pub(super) fn of_peer(head: &Parts, peer_addr: Option<PeerAddr>) -> Result<IpAddr, RequestError> {
    let (address, missing) = match peer_addr {
        Some(peer_addr) => (peer_addr(&head.extensions), MISSING_THERE),
        None => (default_peer_addr(&head.extensions), MISSING),
    };
    address.map(|address| address.ip()).ok_or(RequestError::misconfigured(missing))
}

/// Returns the mistake of a service that takes the peer for the client, if the request comes from a
/// proxy.
pub(super) fn proxy_in_front(head: &Parts) -> Option<String> {
    let header = proxy_header(&head.headers)?;
    Some(format!(
        "the header {header}, which proxies write; if the service is behind a proxy, use \
         `key::ClientIp` in place of `key::PeerIp`"
    ))
}

/// Returns the name of a header by which a proxy reports the client.
pub(super) fn proxy_header(headers: &HeaderMap) -> Option<&'static str> {
    PROXY_HEADERS.into_iter().find(|&name| headers.contains_key(name))
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

/// Returns the key of an IPv4 client, or of the first `prefix` bits of the address of an IPv6
/// client.
pub(super) fn network(address: IpAddr, prefix: u8) -> Key<'static> {
    match client(address) {
        IpAddr::V4(address) => Key::from(address),
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            let network = Ipv6Addr::from_bits(address.to_bits() & mask);
            written(format_args!("ip={network}/{prefix}"))
        }
    }
}

/// Returns the IPv4 address of a client that the IPv6 address represents, or the address itself.
pub(super) fn client(address: IpAddr) -> IpAddr {
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
