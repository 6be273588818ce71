use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use http::request::Parts;

use super::{Key, KeyExtractor};
use crate::error::RequestError;

/// The address of the peer of the connection: the client, or the last proxy in front of the service.
///
/// It is taken from the extensions of the request: a [`SocketAddr`], or, with the feature `axum`, axum's
/// `ConnectInfo<SocketAddr>`, and in tests its `MockConnectInfo`. For other types use a closure:
///
/// ```
/// use http::request::Parts;
/// use std::net::{IpAddr, Ipv6Addr, SocketAddr};
///
/// #[derive(Clone)]
/// struct Peer(SocketAddr);
///
/// let peer_ip = |head: &Parts| head.extensions.get::<Peer>().map(|peer| peer.0.ip());
/// # let _ = peer_ip;
/// ```
///
/// or a layer outside of this one that puts a [`SocketAddr`] into the extensions. A tonic server needs that: its
/// type is `TcpConnectInfo`.
///
/// Of an IPv6 address the first 64 bits count: a host can choose the others as it likes.
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

impl KeyExtractor<Parts> for PeerIp {
    fn extract(&self, head: &Parts) -> Result<Key<'static>, RequestError> {
        Ok(network(address(head)?, IPV6_PREFIX))
    }
}

/// The least that one host is given.
pub(super) const IPV6_PREFIX: u8 = 64;

/// The address of the peer.
pub(super) fn address(head: &Parts) -> Result<IpAddr, RequestError> {
    let address = head.extensions.get::<SocketAddr>().copied();
    #[cfg(feature = "axum")]
    let address = address.or_else(|| {
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
        let info = head.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
        let mock = head.extensions.get::<MockConnectInfo<SocketAddr>>().map(|mock| mock.0);
        info.or(mock)
    });
    address.map(|address| address.ip()).ok_or(RequestError::misconfigured(MISSING))
}

/// The address; of an IPv6 address the first `prefix` bits.
pub(super) fn network(address: IpAddr, prefix: u8) -> Key<'static> {
    match address.to_canonical() {
        IpAddr::V4(address) => Key::from(IpAddr::V4(address)),
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            let network = Ipv6Addr::from_bits(address.to_bits() & mask);
            Key::scoped("ip", format!("{network}/{prefix}"))
        }
    }
}

#[cfg(feature = "axum")]
const MISSING: &str = "the rate limiter does not know the peer's address: serve the router with \
     `into_make_service_with_connect_info::<SocketAddr>()`, or put a `SocketAddr` into the extensions \
     of the request";
#[cfg(not(feature = "axum"))]
const MISSING: &str = "the rate limiter does not know the peer's address: put a `SocketAddr` into the \
     extensions of the request, or enable the feature `axum` of tower-ratelimit and serve the router \
     with `into_make_service_with_connect_info::<SocketAddr>()`";
