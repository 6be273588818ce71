//! The address of a client behind proxies, which clients cannot forge.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderName, HeaderValue, Request, request::Parts};
use proptest::prelude::*;
use tower_ratelimit::{
    config::ConfigError,
    key::{self, ClientIp, KeyExtractor, ProxyHeader},
    layer::RequestError,
};

const TRUSTED: [&str; 3] = ["10.0.0.0/8", "192.0.2.7", "fd00::/8"];

fn head(peer: &str, lines: &[(&str, &[u8])]) -> Parts {
    let mut request = Request::new(());
    let peer = SocketAddr::new(peer.parse::<IpAddr>().unwrap(), 4711);
    request.extensions_mut().insert(peer);
    for (name, value) in lines {
        let name = HeaderName::try_from(*name).unwrap();
        request.headers_mut().append(name, HeaderValue::from_bytes(value).unwrap());
    }
    request.into_parts().0
}

fn key(header: &ProxyHeader, peer: &str, lines: &[&[u8]]) -> Result<String, RequestError> {
    let name = match header {
        ProxyHeader::XForwardedFor => "x-forwarded-for",
        ProxyHeader::Forwarded => "forwarded",
        _ => "x-real-ip",
    };
    let lines: Vec<_> = lines.iter().map(|line| (name, *line)).collect();
    let key = ClientIp::new(header.clone(), TRUSTED).extract(&head(peer, &lines))?;
    Ok(key.as_str().strip_prefix("ip=").expect("the scope").to_owned())
}

fn check(header: ProxyHeader, table: &[(&str, &[&str], &str)]) {
    for &(peer, lines, expected) in table {
        let lines: Vec<_> = lines.iter().map(|line| line.as_bytes()).collect();
        assert_eq!(key(&header, peer, &lines).unwrap(), expected, "{header:?} {peer} {lines:?}");
    }
}

#[test]
fn the_client_is_the_first_untrusted_address_from_the_right() {
    check(
        ProxyHeader::XForwardedFor,
        &[
            // Without a proxy, the peer is the client.
            ("203.0.113.9", &["198.51.100.1"], "203.0.113.9"),
            ("10.1.2.3", &["198.51.100.1"], "198.51.100.1"),
            ("192.0.2.7", &["198.51.100.1"], "198.51.100.1"),
            ("192.0.2.8", &["198.51.100.1"], "192.0.2.8"),
            ("fd00::1", &["198.51.100.1"], "198.51.100.1"),
            // Any client can have written the addresses further left.
            ("10.0.0.1", &["1.1.1.1, 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1, 198.51.100.1, 10.0.0.2, 192.0.2.7"], "198.51.100.1"),
            // All lines form one list.
            ("10.0.0.1", &["1.1.1.1", "198.51.100.1", "10.0.0.2"], "198.51.100.1"),
            ("10.0.0.1", &["198.51.100.1, 10.0.0.3", "10.0.0.2"], "198.51.100.1"),
            // Ports and brackets.
            ("10.0.0.1", &["198.51.100.1:4711"], "198.51.100.1"),
            ("10.0.0.1", &["198.51.100.1,10.0.0.2:80"], "198.51.100.1"),
            ("10.0.0.1", &["[2001:db8:1:2:3::4]:443"], "2001:db8:1:2::/64"),
            ("10.0.0.1", &["[2001:db8:1:2:3::4]"], "2001:db8:1:2::/64"),
            ("10.0.0.1", &["2001:db8:1:2:3::4"], "2001:db8:1:2::/64"),
            // Mapped addresses are IPv4, also as peers, and do not share one IPv6 network.
            ("::ffff:10.0.0.1", &["198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["::ffff:198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["::ffff:c633:6402"], "198.51.100.2"),
            ("10.0.0.1", &["198.51.100.1, ::ffff:10.0.0.2"], "198.51.100.1"),
            // Text that is no address is not skipped.
            ("10.0.0.1", &["198.51.100.1, unknown"], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.1, garbage, 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", &["198.51.100.1, , 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", &["198.51.100.1,"], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.1:http"], "10.0.0.1"),
            ("10.0.0.1", &["[198.51.100.1]"], "10.0.0.1"),
            ("10.0.0.1", &["[2001:db8::1]x"], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.256"], "10.0.0.1"),
            ("10.0.0.1", &["0x7f.1"], "10.0.0.1"),
            // No entry, or only proxies.
            ("10.0.0.1", &[], "10.0.0.1"),
            ("10.0.0.1", &[""], "10.0.0.1"),
            ("10.0.0.1", &["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ],
    );
}

#[test]
fn forwarded_is_read_by_rfc_7239() {
    check(
        ProxyHeader::Forwarded,
        &[
            ("203.0.113.9", &["for=198.51.100.1"], "203.0.113.9"),
            ("10.0.0.1", &["for=198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["For=\"198.51.100.1:80\";proto=https;by=10.0.0.1"], "198.51.100.1"),
            ("10.0.0.1", &["proto=http ; FOR=\"[2001:db8:1:2:3::4]:4711\""], "2001:db8:1:2::/64"),
            ("10.0.0.1", &["for=1.1.1.1, for=198.51.100.1, for=10.0.0.2"], "198.51.100.1"),
            ("10.0.0.1", &["for=1.1.1.1", "for=198.51.100.1"], "198.51.100.1"),
            // The text of the client cannot extend into the element of the proxy.
            ("10.0.0.1", &["for=\"1.1.1.1, for=198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["for=\"1.1.1.1\\\", for=198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["for=\"", "for=198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["for=1.1.1.1;, for=\"198.51.100.1\""], "198.51.100.1"),
            // Hidden, unknown, duplicate or missing.
            ("10.0.0.1", &["for=198.51.100.1, for=_hidden, for=10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", &["for=198.51.100.1, for=unknown"], "10.0.0.1"),
            ("10.0.0.1", &["for=198.51.100.1;for=198.51.100.2"], "10.0.0.1"),
            ("10.0.0.1", &["for=198.51.100.1, proto=http"], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.1"], "10.0.0.1"),
            // Separators and quotes within a quoted string are text.
            ("10.0.0.1", &["for=198.51.100.1;x=\"a, for=6.6.6.6\""], "198.51.100.1"),
            ("10.0.0.1", &["for=198.51.100.1;x=\"a;for=6.6.6.6;b\""], "198.51.100.1"),
            ("10.0.0.1", &["for=198.51.100.1;host=\"a\\\"b\""], "198.51.100.1"),
            ("10.0.0.1", &["for=198.51.100.1;host=\"a\\\\\""], "198.51.100.1"),
            ("10.0.0.1", &["host=\"\\\\\\\"\";for=198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["for=\"198\\.51.100.1\""], "198.51.100.1"),
            ("10.0.0.1", &[";for=198.51.100.1;;by=_x;"], "198.51.100.1"),
            // Ports may be hidden; quotes may be missing, except around separators.
            ("10.0.0.1", &["for=\"198.51.100.1:_a.b-c\""], "198.51.100.1"),
            ("10.0.0.1", &["for=\"[2001:db8:1:2::4]:_x\""], "2001:db8:1:2::/64"),
            ("10.0.0.1", &["for=198.51.100.1:80;host=a:80"], "198.51.100.1"),
            ("10.0.0.1", &["for=[2001:db8:1:2::4]:80"], "2001:db8:1:2::/64"),
        ],
    );
}

#[test]
fn a_malformed_element_ends_the_search_at_the_last_trusted_proxy() {
    for malformed in [
        "",
        "for",
        "for=",
        "=198.51.100.1",
        "for =198.51.100.1",
        "for= 198.51.100.1",
        "for=198.51.100.1 x",
        "for=198.51.100.1;x",
        "for=198.51.100.1;x=",
        "for=198.51.100.1;=x",
        "for=198.51.100.1;x y=z",
        "for=198.51.100.1;x=a/b",
        "for=198.51.100.1;x=a=b",
        "for=198.51.100.1;x=\"",
        "for=198.51.100.1;x=\"a",
        "for=198.51.100.1;x=a\"",
        "for=198.51.100.1;x=\"a\"b",
        "for=198.51.100.1;x=a\"b\"",
        "for=198.51.100.1;x=\"a\"b\"",
        "for=198.51.100.1;x=\"a\" \"b\"",
        "for=198.51.100.1;x=\"a\\\"",
        "for=198.51.100.1;x=\"a\\\\\"\"",
        "for=198.51.100.1;x=\\\"a\\\"",
        "for=198.51.100.1\\",
        "for=\"198.51.100.1",
        "for=198.51.100.1\"",
        "for=\"198.51.100.1\"80",
        "for=\"\"",
        "for=\" 198.51.100.1\"",
        "for=\"198.51.100.1, 198.51.100.2\"",
        "for=\"198.51.100.1:\"",
        "for=\"198.51.100.1:+80\"",
        "for=\"198.51.100.1:123456\"",
        "for=\"198.51.100.1:_\"",
        "for=\"198.51.100.1:_a b\"",
        "for=\"[2001:db8::1]80\"",
        "for=198.51.100.1;for=198.51.100.1",
        "for=198.51.100.1;For=_x",
    ] {
        let behind = [malformed, ", for=10.0.0.2;host=\"a\\\"b\""].concat();
        check(
            ProxyHeader::Forwarded,
            &[
                ("10.0.0.1", &[malformed], "10.0.0.1"),
                ("10.0.0.1", &[&behind], "10.0.0.2"),
                ("10.0.0.1", &["for=6.6.6.6", malformed, "for=10.0.0.2"], "10.0.0.2"),
            ],
        );
    }
}

#[test]
fn an_open_quote_of_a_client_does_not_extend_into_the_element_of_a_proxy() {
    for line in [
        "for=1.1.1.1;x=\"a, ;for=6.6.6.6;\", for=9.9.9.9;host=\"a\\\"b\"",
        "for=6.6.6.6;x=\", for=9.9.9.9;host=\"b\"",
        "for=6.6.6.6;x=\", for=9.9.9.9;host=\";for=6.6.6.6;y=\"",
        "for=6.6.6.6;x=\", for=9.9.9.9;host=\"\\\";for=6.6.6.6;y=\\\"\"",
        "for=6.6.6.6;x=\"\\, for=9.9.9.9;host=\"\\\\\"",
        "for=6.6.6.6;x=\\, for=\"9.9.9.9\"",
        "\", for=9.9.9.9;host=\", for=6.6.6.6, x=\"",
        "\"\"\",host=\", for=6.6.6.6;y=\";for=\"9.9.9.9:80\"",
        "for=6.6.6.6;x=\", for=9.9.9.9;host=\"a\\\"b\", for=10.0.0.2;host=\"\\\\\"",
    ] {
        check(ProxyHeader::Forwarded, &[("10.0.0.1", &[line], "9.9.9.9")]);
    }
}

#[test]
fn a_comma_in_x_forwarded_for_separates_also_within_quotes() {
    check(
        ProxyHeader::XForwardedFor,
        &[
            ("10.0.0.1", &["\"6.6.6.6, 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["\"6.6.6.6, 198.51.100.1, 10.0.0.2"], "198.51.100.1"),
            ("10.0.0.1", &["\", 198.51.100.1, 10.0.0.2, 10.0.0.3\", 10.0.0.4"], "10.0.0.4"),
            ("10.0.0.1", &["198.51.100.1, \"10.0.0.2, 10.0.0.3\""], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.1, \"10.0.0.2\", 10.0.0.3"], "10.0.0.3"),
            ("10.0.0.1", &["\\, 198.51.100.1"], "198.51.100.1"),
        ],
    );
}

#[test]
fn a_header_with_one_address_counts_only_from_a_trusted_peer() {
    let real_ip = || ProxyHeader::Single(HeaderName::from_static("x-real-ip"));
    check(
        real_ip(),
        &[
            ("203.0.113.9", &["198.51.100.1"], "203.0.113.9"),
            ("10.0.0.1", &["198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["[2001:db8::1]:80"], "2001:db8::/64"),
            ("10.0.0.1", &["198.51.100.1, 198.51.100.2"], "10.0.0.1"),
            ("10.0.0.1", &["x"], "10.0.0.1"),
            ("10.0.0.1", &[], "10.0.0.1"),
        ],
    );
    let error = key(&real_ip(), "10.0.0.1", &[b"198.51.100.1", b"198.51.100.2"]).unwrap_err();
    assert!(matches!(error, RequestError::Invalid { .. }));
}

#[test]
fn the_prefix_of_ipv6_can_be_set() {
    for (bits, expected) in
        [(56, "2001:db8:1:ff00::/56"), (128, "2001:db8:1:ffff::1/128"), (0, "::/0")]
    {
        let key = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED).ipv6_prefix(bits);
        let key = key.extract(&head("2001:db8:1:ffff::1", &[])).unwrap();
        assert_eq!(key.as_str(), format!("ip={expected}"));
        let mapped = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED).ipv6_prefix(bits);
        let mapped = mapped.extract(&head("::ffff:203.0.113.9", &[])).unwrap();
        assert_eq!(mapped.as_str(), "ip=203.0.113.9");
    }
}

#[test]
fn an_ipv4_client_behind_nat64_teredo_or_6to4_is_identified_by_its_ipv4_address() {
    for (peer, expected) in [
        ("64:ff9b::203.0.113.9", "203.0.113.9"),
        ("64:ff9b::203.0.113.10", "203.0.113.10"),
        ("64:ff9b::0.0.0.0", "0.0.0.0"),
        // A server (here 192.0.2.45), flags, and the inverted port and address.
        ("2001:0:c000:22d:8000:63bf:34ff:8ef6", "203.0.113.9"),
        ("2001:0:c000:22d:8000:63bf:34ff:8ef5", "203.0.113.10"),
        // The bits that a client can choose do not change the key.
        ("2001:0:c000:22d:1234:5678:34ff:8ef6", "203.0.113.9"),
        ("2001:0:c633:6401:8000:63bf:34ff:8ef6", "203.0.113.9"),
        // A client has 65,536 networks of 64 bits.
        ("2002:cb00:7109::1", "203.0.113.9"),
        ("2002:cb00:7109:ffff:1:2:3:4", "203.0.113.9"),
        ("2002:cb00:710a:ffff:1:2:3:4", "203.0.113.10"),
        // Only the prefixes that define the position of the address.
        ("64:ff9b:0:0:0:1:cb00:7109", "64:ff9b::/64"),
        ("64:ff9b:1::203.0.113.9", "64:ff9b:1::/64"),
        ("64:ff9c::203.0.113.9", "64:ff9c::/64"),
        ("2001:1:c000:22d:8000:63bf:34ff:8ef6", "2001:1:c000:22d::/64"),
        ("2001:db8::203.0.113.9", "2001:db8::/64"),
    ] {
        let expected = format!("ip={expected}");
        let direct = head(peer, &[]);
        assert_eq!(key::PeerIp.extract(&direct).unwrap().as_str(), expected, "{peer}");
        let by_proxy = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED);
        assert_eq!(by_proxy.extract(&direct).unwrap().as_str(), expected, "{peer}");
        let behind = head("10.0.0.1", &[("x-forwarded-for", peer.as_bytes())]);
        assert_eq!(by_proxy.extract(&behind).unwrap().as_str(), expected, "{peer}");
    }
}

#[test]
fn a_proxy_is_not_trusted_for_the_ipv4_address_in_its_ipv6_address() {
    let key = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED);
    let lines = [("x-forwarded-for", &b"198.51.100.1"[..])];
    for peer in ["64:ff9b::10.0.0.1", "2001:0:c000:22d:8000:63bf:f5ff:fffe", "2002:a00:1::1"] {
        assert_eq!(key.extract(&head(peer, &lines)).unwrap().as_str(), "ip=10.0.0.1", "{peer}");
    }
}

#[test]
fn networks_are_checked() {
    for network in ["", "10.0.0.0/33", "10.0.0", "example.com", "fd00::/129"] {
        let error = ClientIp::try_new(ProxyHeader::Forwarded, [network]).unwrap_err();
        assert!(matches!(&error, ConfigError::Network { .. }));
        assert!(error.to_string().contains(&format!("{network:?}")), "{error}");
    }
    let mapped = ClientIp::new(ProxyHeader::XForwardedFor, ["::ffff:10.0.0.0/104"]);
    let key = mapped.extract(&head("10.1.1.1", &[("x-forwarded-for", b"198.51.100.1")])).unwrap();
    assert_eq!(key.as_str(), "ip=198.51.100.1");
}

#[test]
fn a_list_of_all_clients_is_no_list_of_proxies() {
    let halves = ["0.0.0.0/1", "128.0.0.0/1"];
    for (networks, version) in [
        (&["0.0.0.0/0"][..], "IPv4"),
        (&["10.0.0.0/8", "0.0.0.0/0"], "IPv4"),
        (&["::ffff:0:0/96"], "IPv4"),
        (&halves, "IPv4"),
        // All but the networks that are not public.
        (&["0.0.0.0/2", "64.0.0.0/2", "128.0.0.0/2", "192.0.0.0/3"], "IPv4"),
        (&["::/0"], "IPv6"),
        (&["fd00::/8", "2000::/4", "3000::/4"], "IPv6"),
        (&["10.0.0.0/8", "8000::/1", "::/1"], "IPv6"),
    ] {
        let error = ClientIp::try_new(ProxyHeader::XForwardedFor, networks).unwrap_err();
        assert!(matches!(error, ConfigError::AllTrusted { .. }));
        let text = error.to_string();
        assert!(text.contains(&format!("every client with {version}")), "{networks:?}: {text}");
        let panic = std::panic::catch_unwind(|| ClientIp::new(ProxyHeader::Forwarded, networks));
        assert_eq!(*panic.unwrap_err().downcast::<String>().unwrap(), text);
    }
    for networks in [&[][..], &halves[..1], &["10.0.0.0/8", "fc00::/7"], &["8000::/1", "::/3"]] {
        assert!(ClientIp::try_new(ProxyHeader::XForwardedFor, networks).is_ok(), "{networks:?}");
    }
    let _ = key::PeerIp.within(["0.0.0.0/0", "::/0"]); // trusts no client
}

#[test]
fn the_peer_is_found_by_peer_addr() {
    #[derive(Clone)]
    struct Peer(SocketAddr);

    let key = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED)
        .peer_addr(|extensions| Some(extensions.get::<Peer>()?.0));
    let mut head = head("203.0.113.9", &[("x-forwarded-for", b"198.51.100.1")]);
    let error = key.extract(&head).unwrap_err();
    assert!(matches!(error, RequestError::Misconfigured { .. }), "another extension was used");
    for (peer, expected) in [("10.0.0.1:80", "198.51.100.1"), ("192.0.2.8:80", "192.0.2.8")] {
        head.extensions.insert(Peer(peer.parse().unwrap()));
        assert_eq!(key.extract(&head).unwrap().as_str(), format!("ip={expected}"));
    }
}

#[test]
fn a_missing_peer_is_named_in_the_error() {
    let head = Request::new(()).into_parts().0;
    let error = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED).extract(&head).unwrap_err();
    assert!(matches!(error, RequestError::Misconfigured { .. }));
}

/// Texts of a client, of pieces that could open, close or fake an element.
fn pieces(max: usize) -> impl Strategy<Value = String> {
    let known = prop::sample::select(vec![
        "10.0.0.2",
        "for=10.0.0.2",
        "6.6.6.6",
        "for=6.6.6.6",
        "for=\"",
        "x=\"",
        "host=",
        "\"",
        "\"\"",
        "\\",
        "\\\"",
        ",",
        ", ",
        ";",
        "=",
        ":80",
        "[",
    ]);
    let piece = prop_oneof![3 => known.prop_map(str::to_owned), 1 => "[ -~]{0,12}"];
    prop::collection::vec(piece, 0..max).prop_map(|pieces| pieces.concat())
}

/// The lines of a header that a client can send: any bytes, and imitations of a proxy.
fn forged() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let text = pieces(8).prop_map(String::into_bytes);
    let bytes = prop::collection::vec(prop_oneof![0x20_u8..0x7f, 0x80_u8..=0xff], 0..40);
    prop::collection::vec(prop_oneof![3 => text, 1 => bytes], 0..4)
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// A well-formed element, and its address, if it has one.
#[derive(Clone, Debug)]
struct Element {
    node: Option<&'static str>,
    text: String,
}

fn element() -> impl Strategy<Value = Element> {
    let address = prop::sample::select(vec!["10.0.0.2", "10.3.2.1", "6.6.6.6", "198.51.100.1"]);
    let node = prop::option::weighted(0.9, address);
    let name = prop::sample::select(vec!["by", "host", "x", "forx", "fo"]);
    let other = prop_oneof![
        (name.clone(), "[a-z0-9.:_-]{1,6}").prop_map(|(name, value)| format!("{name}={value}")),
        (name, pieces(5)).prop_map(|(name, value)| format!("{name}={}", quoted(&value))),
    ];
    let others = prop::collection::vec(other, 0..3);
    let gap = prop::sample::select(vec![";", "; ", " ;", ";;"]);
    (node, others, 0_usize..3, 0..3, gap).prop_map(|(node, mut pairs, at, form, gap)| {
        let text = match (node, form) {
            (Some(node), 0) => format!("for={node}"),
            (Some(node), 1) => format!("For={}", quoted(node)),
            (Some(node), _) => format!("FOR=\"{}\"", node.replace('.', "\\.")),
            (None, _) => "for=_hidden".to_owned(),
        };
        pairs.insert(at.min(pairs.len()), text);
        Element { node, text: pairs.join(gap) }
    })
}

/// Makes the entry that a proxy adds for its peer.
fn entry_of_proxy(
    header: &ProxyHeader,
    peer: IpAddr,
    port: bool,
    host: &str,
    order: i32,
) -> String {
    let node = match peer {
        IpAddr::V4(ip) if port => format!("{ip}:4711"),
        IpAddr::V6(ip) if port => format!("[{ip}]:4711"),
        ip => ip.to_string(),
    };
    let quoted_node = match peer {
        IpAddr::V6(ip) if !port => format!("\"[{ip}]\""),
        _ => format!("\"{node}\""),
    };
    let host = quoted(host);
    match (header, order) {
        (ProxyHeader::XForwardedFor, _) => node,
        (_, 0) => format!("for={quoted_node};proto=http"),
        (_, 1) => format!("for={quoted_node};host={host}"),
        (_, 2) => format!("host={host};for={quoted_node}"),
        (_, _) => format!("by=_x; For={node}; host={host}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 5_000,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_client_cannot_choose_its_key(
        forged in forged(),
        client in prop_oneof![
            any::<[u8; 4]>().prop_map(IpAddr::from),
            any::<[u8; 16]>().prop_map(IpAddr::from),
        ],
        same_line in any::<bool>(),
        port in any::<bool>(),
        // A proxy also passes on the `Host` of the client.
        hosts in prop::collection::vec(pieces(5), 3),
        order in 0..4,
        comma in prop::sample::select(vec![",", ", ", " ,\t"]),
        hops in 0_usize..3,
    ) {
        let proxies = ["10.0.0.1", "192.0.2.7", "fd00::1"];
        let is_trusted = |ip: &IpAddr| match ip.to_canonical() {
            IpAddr::V4(ip) => ip.octets()[0] == 10 || ip.octets() == [192, 0, 2, 7],
            IpAddr::V6(ip) => ip.octets()[0] == 0xfd,
        };
        prop_assume!(!is_trusted(&client));
        let direct = ClientIp::new(ProxyHeader::XForwardedFor, TRUSTED);
        let direct = direct.extract(&head(&client.to_string(), &[])).unwrap();
        let expected = direct.as_str().strip_prefix("ip=").unwrap();

        for header in [ProxyHeader::XForwardedFor, ProxyHeader::Forwarded] {
            let sent: Vec<_> = forged.iter().map(|line| &line[..]).collect();
            prop_assert_eq!(key(&header, &client.to_string(), &sent).unwrap(), expected);

            // Each proxy adds its peer: to the last line, or in a new line.
            let mut lines = forged.clone();
            let mut peer = client;
            for (proxy, host) in proxies[..=hops].iter().zip(&hosts) {
                let entry = entry_of_proxy(&header, peer, port, host, order);
                match lines.last_mut() {
                    Some(line) if same_line => line.extend(format!("{comma}{entry}").bytes()),
                    _ => lines.push(entry.into_bytes()),
                }
                peer = proxy.parse().unwrap();
            }
            let lines: Vec<_> = lines.iter().map(|line| &line[..]).collect();
            prop_assert_eq!(key(&header, &peer.to_string(), &lines).unwrap(), expected);
        }
    }

    #[test]
    fn a_well_formed_line_is_read_as_it_was_written(
        elements in prop::collection::vec(element(), 0..5),
        split_at in 0_usize..5,
    ) {
        let mut expected = "10.0.0.1";
        for element in elements.iter().rev() {
            let Some(node) = element.node else { break };
            expected = node;
            if !node.starts_with("10.") {
                break;
            }
        }
        let (first, second) = elements.split_at(split_at.min(elements.len()));
        let lines = [first, second].map(|elements| {
            let texts: Vec<_> = elements.iter().map(|element| &*element.text).collect();
            texts.join(", ").into_bytes()
        });
        let lines = lines.iter().map(|line| &line[..]);
        let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
        prop_assert_eq!(key(&ProxyHeader::Forwarded, "10.0.0.1", &lines).unwrap(), expected);
    }
}

/// All texts of a client with up to four pieces, before the element of a proxy.
#[test]
fn no_short_prefix_changes_the_address_that_a_proxy_appended() {
    const PIECES: [&str; 7] = ["\"", "\\", ",", ";", "for=6.6.6.6", "x=", " "];
    const HOSTS: [&str; 9] = [
        "a",
        "",
        "\"",
        "\\",
        ",",
        "\\\"",
        "\";for=6.6.6.6;x=\"",
        ";for=6.6.6.6;x=",
        ", for=6.6.6.6",
    ];

    let mut prefixes = vec![String::new()];
    let mut longest = 0..1;
    for _ in 0..4 {
        let end = prefixes.len();
        for i in longest {
            prefixes.extend(PIECES.map(|piece| [&prefixes[i], piece].concat()));
        }
        longest = end..prefixes.len();
    }
    assert_eq!(prefixes.len(), 1 + 7 + 49 + 343 + 2_401);

    let client_ip = ClientIp::new(ProxyHeader::Forwarded, TRUSTED);
    let extract = |lines: &[&str]| {
        let lines: Vec<_> = lines.iter().map(|line| ("forwarded", line.as_bytes())).collect();
        client_ip.extract(&head("10.0.0.1", &lines)).unwrap()
    };
    for host in HOSTS.map(quoted) {
        for element in [format!("for=9.9.9.9;host={host}"), format!("host={host};for=\"9.9.9.9\"")]
        {
            for prefix in &prefixes {
                let same_line = extract(&[&format!("{prefix},{element}")]);
                assert_eq!(same_line.as_str(), "ip=9.9.9.9", "{prefix:?} {element:?}");
                let own_line = extract(&[prefix, &element]);
                assert_eq!(own_line.as_str(), "ip=9.9.9.9", "{prefix:?} {element:?}");
            }
        }
    }
}
