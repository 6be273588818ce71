//! Whatever a client sends, it cannot choose its key: `cargo +nightly fuzz run client_ip`.

#![no_main]

use std::net::SocketAddr;

use http::{HeaderName, HeaderValue, Request, request::Parts};
use libfuzzer_sys::fuzz_target;
use tower_ratelimit::{
    KeyExtractor,
    key::{ClientIp, ProxyHeader},
};

const CLIENT: &str = "203.0.113.9";

fn head(peer: &str, name: &HeaderName, lines: &[Vec<u8>]) -> Option<Parts> {
    let mut request = Request::new(());
    request.extensions_mut().insert(SocketAddr::new(peer.parse().unwrap(), 80));
    for line in lines {
        request.headers_mut().append(name, HeaderValue::from_bytes(line).ok()?);
    }
    Some(request.into_parts().0)
}

fuzz_target!(|data: &[u8]| {
    let forged: Vec<_> = data.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    for (header, name, entry) in [
        (ProxyHeader::XForwardedFor, "x-forwarded-for", CLIENT.to_owned()),
        (ProxyHeader::Forwarded, "forwarded", format!("for=\"{CLIENT}\";proto=http")),
    ] {
        let key = ClientIp::new(header, ["10.0.0.0/8"]);
        let name = HeaderName::from_static(name);

        // To the service itself, and to a proxy that adds its entry in either way.
        let mut same_line = forged.clone();
        same_line.last_mut().unwrap().extend(format!(", {entry}").bytes());
        let mut own_line = forged.clone();
        own_line.push(entry.into_bytes());
        for (peer, lines) in [(CLIENT, &forged), ("10.0.0.1", &same_line), ("10.0.0.1", &own_line)]
        {
            let Some(head) = head(peer, &name, lines) else { return };
            assert_eq!(key.extract(&head).unwrap().as_str(), format!("ip={CLIENT}"));
        }
    }
});
