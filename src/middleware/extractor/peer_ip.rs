//! The address of the peer as a key.

use std::net::{IpAddr, SocketAddr};

use http::{Extensions, request::Parts};

use super::{
    Key, KeyExtractor,
    address::{self, IPV6_PREFIX, address_methods, network},
    client_ip::{ClientIp, ProxyHeader},
    networks::Networks,
};
use crate::middleware::rejection::RequestError;

/// The address of the peer of the connection: the client, or the last proxy in front of the
/// service.
///
/// The extensions of the request contain the address: as a [`SocketAddr`], or, with the feature
/// `axum`, as axum's `ConnectInfo<SocketAddr>`, and in tests as its `MockConnectInfo`. For other
/// servers, such as tonic's, set [`peer_addr`](PeerIp::peer_addr).
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
/// [`ClientIp`](super::ClientIp) there. A layer logs a warning, once, if 1,000 requests in a row
/// have one key and a header that proxies write, such as `X-Forwarded-For`. It watches its first
/// 100,000 requests.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct PeerIp {}

/// The extractor [`PeerIp`](struct@PeerIp).
#[allow(non_upper_case_globals)]
pub const PeerIp: PeerIp = PeerIp {};

impl PeerIp {
    /// Sets where the server stores the address of the peer. No other place is searched. The result
    /// is a [`ClientIp`] that trusts no proxy, and makes the same keys.
    ///
    /// A request for which `peer_addr` returns `None` is rejected with 500.
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
    pub fn peer_addr(self, peer_addr: fn(&Extensions) -> Option<SocketAddr>) -> ClientIp {
        ClientIp::new(ProxyHeader::XForwardedFor, [""; 0]).peer_addr(peer_addr)
    }

    fn address(&self, head: &Parts) -> Result<IpAddr, RequestError> {
        address::of_peer(head, None)
    }

    fn find_mistake(&self, head: &Parts) -> Option<String> {
        address::proxy_in_front(head)
    }

    fn key_of(&self, address: IpAddr) -> Key<'static> {
        network(address, IPV6_PREFIX)
    }
}

address_methods!(PeerIp);
