//! No header lets a client choose its key: `cargo +nightly fuzz run client_ip`.

#![no_main]

use std::net::SocketAddr;

use http::{HeaderName, HeaderValue, Request, request::Parts};
use libfuzzer_sys::fuzz_target;
use tower_ratelimit::key::{ClientIp, KeyExtractor, ProxyHeader};

const CLIENT: &str = "203.0.113.9";

fn head(peer: &str, name: &HeaderName, lines: &[Vec<u8>]) -> Option<Parts> {
    let mut request = Request::new(());
    request.extensions_mut().insert(SocketAddr::new(peer.parse().unwrap(), 80));
    for line in lines {
        request.headers_mut().append(name, HeaderValue::from_bytes(line).ok()?);
    }
    Some(request.into_parts().0)
}

/// Quotes a text of the client, as a proxy does in an element.
fn quoted(text: &[u8]) -> Vec<u8> {
    let escaped = text.iter().flat_map(|&byte| match byte {
        b'"' | b'\\' => vec![b'\\', byte],
        _ => vec![byte],
    });
    [vec![b'"'], escaped.collect(), vec![b'"']].concat()
}

// The first line of the data is the `Host` of the client, the others are lines of the header.
fuzz_target!(|data: &[u8]| {
    let mut lines = data.split(|byte| *byte == b'\n').map(<[u8]>::to_vec);
    let host = quoted(&lines.next().unwrap_or_default());
    let forged: Vec<_> = lines.collect();
    let address = CLIENT.as_bytes();
    for (header, name, element) in [
        (ProxyHeader::XForwardedFor, "x-forwarded-for", address.to_vec()),
        (ProxyHeader::Forwarded, "forwarded", [b"for=", address, b";host=", &host].concat()),
        (ProxyHeader::Forwarded, "forwarded", [b"host=", &host[..], b";for=", address].concat()),
    ] {
        let key = ClientIp::new(header, ["10.0.0.0/8"]);
        let name = HeaderName::from_static(name);

        // The proxy appends its element to the last line, or adds a line.
        let mut same_line = forged.clone();
        match same_line.last_mut() {
            Some(line) => line.extend([b", ", &element[..]].concat()),
            None => same_line.push(element.clone()),
        }
        let mut own_line = forged.clone();
        own_line.push(element);
        for (peer, lines) in [(CLIENT, &forged), ("10.0.0.1", &same_line), ("10.0.0.1", &own_line)]
        {
            let Some(head) = head(peer, &name, lines) else { return };
            assert_eq!(key.extract(&head).unwrap().as_str(), format!("ip={CLIENT}"));
        }
    }
});
