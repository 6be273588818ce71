//! Whether a request comes from the page of a program that serves one.

use axum::http::{HeaderMap, header, uri::Authority};

/// Returns whether the request comes from the page of this server. Any website can open a
/// WebSocket to an address of this machine, also by a name of its own that leads here.
pub fn is_own_page(headers: &HeaderMap, is_local: bool) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(host) = text(header::HOST) else { return false };
    let is_same = match text(header::ORIGIN) {
        Some(origin) => origin.strip_prefix("http://") == Some(host),
        // Not a browser.
        None => true,
    };
    let name = host.parse::<Authority>();
    let is_loopback = name.is_ok_and(|name| {
        let name = name.host().trim_matches(['[', ']']);
        name == "localhost" || name.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
    });
    is_same && (is_loopback || !is_local)
}
