//! The address of the peer as a key.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use http::{Extensions, request::Parts};

use super::{Key, KeyExtractor};
use crate::{error::RequestError, keys::written};

/// The address of the peer of the connection: the client, or the last proxy in front of the service.
///
/// It is taken from the extensions of the request: a [`SocketAddr`], or, with the feature `axum`, axum's
/// `ConnectInfo<SocketAddr>`, and in tests its `MockConnectInfo`. For other servers, such as tonic's,
/// [`peer_addr`](PeerIp::peer_addr) says where it is.
///
/// Of an IPv6 address the first 64 bits count: a host can choose the others as it likes. An IPv6
/// address that stands for an IPv4 client is that client's IPv4 address, because the first 64 bits
/// are the same for many of those clients:
///
/// * an IPv4 address that is mapped into IPv6 (`::ffff:0:0/96`)
/// * the address of an IPv4 client behind a translator (NAT64, `64:ff9b::/96`)
/// * an address of Teredo (`2001::/32`), of which a client can choose all parts but its IPv4 address
///
/// A translator with a prefix of its own, or in the local-use `64:ff9b:1::/48`, puts the IPv4 address
/// where only its operator knows: take the address from there in a closure.
///
/// A request without an address is answered with 500: a service that is set up wrong must not make all
/// of its clients share one quota.
///
/// # Behind a proxy
///
/// All requests then come from the proxy's address, and share one quota: use
/// [`ClientIp`](super::ClientIp).
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerIp;

impl PeerIp {
    /// Says where a server puts the address of the peer: there, and nowhere else, it is looked for.
    ///
    /// A request for which `peer_addr` returns `None` is answered with 500.
    ///
    /// # Examples
    ///
    /// ```
    /// use tonic::transport::server::TcpConnectInfo;
    /// use tower_ratelimit::key;
    ///
    /// let peer_ip = key::PeerIp.peer_addr(|it| it.get::<TcpConnectInfo>()?.remote_addr());
    /// # let _ = peer_ip;
    /// ```
    #[must_use]
    pub fn peer_addr(self, peer_addr: fn(&Extensions) -> Option<SocketAddr>) -> PeerIpFrom {
        PeerIpFrom { peer_addr }
    }
}

impl KeyExtractor<Parts> for PeerIp {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(network(address(head, None)?, IPV6_PREFIX))
    }
}

/// A [`PeerIp`] that knows [where the address is](PeerIp::peer_addr).
#[derive(Clone, Copy, Debug)]
pub struct PeerIpFrom {
    peer_addr: PeerAddr,
}

impl KeyExtractor<Parts> for PeerIpFrom {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(network(address(head, Some(self.peer_addr))?, IPV6_PREFIX))
    }
}

/// Where a server puts the address of the peer.
pub(super) type PeerAddr = fn(&Extensions) -> Option<SocketAddr>;

/// The least that one host is given.
pub(super) const IPV6_PREFIX: u8 = 64;

/// The address of the peer, where `peer_addr` finds it, or else in one of the usual places.
pub(super) fn address(head: &Parts, peer_addr: Option<PeerAddr>) -> Result<IpAddr, RequestError> {
    let (address, missing) = match peer_addr {
        Some(peer_addr) => (peer_addr(&head.extensions), MISSING_THERE),
        None => (usual(&head.extensions), MISSING),
    };
    address.map(|address| address.ip()).ok_or(RequestError::misconfigured(missing))
}

fn usual(extensions: &Extensions) -> Option<SocketAddr> {
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

/// The key of an IPv4 client's address, or of the first `prefix` bits of an IPv6 client's.
pub(super) fn network(address: IpAddr, prefix: u8) -> Key<'static> {
    match address.to_canonical() {
        IpAddr::V4(address) => Key::from(IpAddr::V4(address)),
        IpAddr::V6(address) => match embedded_ipv4(address) {
            Some(address) => Key::from(IpAddr::V4(address)),
            None => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                let network = Ipv6Addr::from_bits(address.to_bits() & mask);
                written(format_args!("ip={network}/{prefix}"))
            }
        },
    }
}

/// The address of the IPv4 client behind a NAT64 (RFC 6052) or a Teredo address (RFC 4380, which
/// inverts its bits).
fn embedded_ipv4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let low = address.to_bits() as u32;
    match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => Some(Ipv4Addr::from_bits(low)),
        [0x2001, 0, ..] => Some(Ipv4Addr::from_bits(!low)),
        _ => None,
    }
}

#[cfg(feature = "axum")]
const MISSING: &str = "the rate limiter does not know the peer's address: serve the router with \
     `into_make_service_with_connect_info::<SocketAddr>()`, or say with `peer_addr` where it is";
#[cfg(not(feature = "axum"))]
const MISSING: &str = "the rate limiter does not know the peer's address: say with `peer_addr` where it \
     is, or enable the feature `axum` of tower-ratelimit and serve the router with \
     `into_make_service_with_connect_info::<SocketAddr>()`";
const MISSING_THERE: &str = "the rate limiter does not know the peer's address: it is not where \
     `peer_addr` looks for it in the extensions of the request";
