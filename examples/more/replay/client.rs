//! The key of a client, from its address as logs write it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::http::{HeaderName, HeaderValue, Request, header::FORWARDED, request::Parts};
use tower_ratelimit::{
    Key,
    key::{ClientIp, KeyExtractor, ProxyHeader},
};

use super::Flags;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The peer of the requests that are made up, which is no client.
const PEER: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

/// Reads addresses with the extractor of the crate: a value of the log is the header of a request.
#[derive(Clone)]
pub struct Clients {
    list: ClientIp,
    forwarded: ClientIp,
    head: Parts,
}

impl Clients {
    pub fn new(flags: &Flags) -> Result<Self, String> {
        let networks = flags.trusted.split(',').map(str::trim).filter(|it| !it.is_empty());
        let networks: Vec<_> = networks.map(str::to_owned).chain([PEER.to_string()]).collect();
        let extractor = |header| {
            let extractor = ClientIp::try_new(header, &networks);
            let extractor = extractor.map(|it| it.ipv6_prefix(flags.ipv6_prefix));
            extractor.map_err(|error| format!("--trusted: {error}"))
        };
        let request = Request::builder().extension(SocketAddr::from((PEER, 0))).body(());
        let (head, ()) = request.map_err(|error| error.to_string())?.into_parts();
        Ok(Self {
            list: extractor(ProxyHeader::XForwardedFor)?,
            forwarded: extractor(ProxyHeader::Forwarded)?,
            head,
        })
    }

    /// Returns the key of an address, or of the client in a list of addresses.
    pub fn key(&mut self, value: &[u8]) -> Option<Key<'static>> {
        let text = str::from_utf8(value).ok()?.trim();
        let is_forwarded = text.contains('=');
        let (name, extractor) = match is_forwarded {
            true => (FORWARDED, &self.forwarded),
            false => (X_FORWARDED_FOR, &self.list),
        };
        let entries = text.split(',').map(|entry| match is_forwarded {
            true => entry.to_owned(),
            false => node(entry),
        });
        let entries: Vec<_> = entries.collect();
        let header = HeaderValue::from_str(&entries.join(",")).ok()?;
        self.head.headers.insert(&name, header);
        let key = extractor.extract(&self.head).ok()?;
        (key != Key::from(PEER)).then_some(key)
    }

    /// Returns whether the client in a list of addresses is not the first of them.
    pub fn is_behind_others(&mut self, list: &[u8], client: &Key<'_>) -> bool {
        let first = list.split(|it| *it == b',').next().unwrap_or_default();
        first.len() < list.len() && self.key(first).is_some_and(|key| key != *client)
    }
}

/// Returns an address as `ClientIp` reads it: without quotes and the zone of a network interface,
/// and an IPv6 address with a port in brackets.
fn node(text: &str) -> String {
    let text = text.trim().trim_matches(['"', '\'']);
    let (address, rest) = text.split_once('%').unwrap_or((text, ""));
    let port = rest.find(']').map_or("", |end| &rest[end..]);
    let text = [address, port].concat();
    match text.rsplit_once(':') {
        Some((address, port))
            if text.parse::<Ipv6Addr>().is_err()
                && address.parse::<Ipv6Addr>().is_ok()
                && port.parse::<u16>().is_ok() =>
        {
            format!("[{address}]:{port}")
        }
        _ => text,
    }
}
