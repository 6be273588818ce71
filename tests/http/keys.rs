//! Keys: the types that can be one, the extractors of values, the keys that they return for calls
//! by hand, hashed values, and lists of clients. Addresses behind proxies are in `client_ip.rs`.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use axum::{body::Body, extract::OriginalUri};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, request::Parts};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Charge, Key, Quota, RateLimitLayer,
    key::{self, ClientIp, KeyExtractor, ProxyHeader},
    layer::{MissingKey, RequestError, ResponseBody},
};
use uuid::Uuid;

use crate::support::{counting, get, header, in_memory, json};

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> Response<ResponseBody<Body>> {
    layer.layer(counting(&Arc::default())).oneshot(request).await.unwrap()
}

fn head(uri: &str, headers: &[(&str, &str)]) -> Parts {
    let mut request = get(headers);
    *request.uri_mut() = uri.parse().unwrap();
    request.into_parts().0
}

fn from(address: &str) -> Request<Body> {
    let mut request = get(&[]);
    let address = SocketAddr::new(address.parse().unwrap(), 4711);
    request.extensions_mut().insert(address);
    request
}

fn detail(error: &RequestError) -> String {
    format!("{error:?}")
}

#[test]
fn many_types_are_keys() {
    fn text(key: impl Into<Key<'static>>) -> String {
        key.into().to_string()
    }
    assert_eq!([text(7_u8), text(7_u16), text(7_u32), text(7_usize), text(7)], ["7"; 5]);
    assert_eq!([text(-7_i8), text(-7_i16), text(-7_i64), text(-7_isize), text(-7)], ["-7"; 5]);
    assert_eq!(text(u128::MAX), u128::MAX.to_string());
    assert_eq!(text(i128::MIN), i128::MIN.to_string());
    let uuid = Uuid::from_u128(0x67e5_5044_10b1_426f_9247_bb68_0e5f_e0c8);
    assert_eq!(text(uuid), "67e55044-10b1-426f-9247-bb680e5fe0c8");
    assert_eq!(
        [
            text("a b"),
            text(String::from("a b")),
            text(Arc::<str>::from("a b")),
            text(Box::<str>::from("a b")),
            text(Cow::Borrowed("a b")),
            text(Cow::<str>::Owned("a b".into())),
            text(b"a b"),
            text(&b"a b"[..]),
            text(b"a b".to_vec()),
            text(Bytes::from("a b")),
            text(HeaderValue::from_static("a b")),
            text(head("/", &[("user", "a b")]).headers.get("user").unwrap()),
        ],
        ["a%20b"; 12]
    );
    let (shared, boxed, borrowed) =
        (Arc::<str>::from("k"), Box::<str>::from("k"), Cow::Borrowed("k"));
    let keys = [Key::from(&shared), Key::from(&boxed), Key::from(&borrowed)];
    assert!(keys.iter().all(|key| *key == Key::from("k")));
    let v4 = Ipv4Addr::new(192, 0, 2, 1);
    assert_eq!([text(v4), text(IpAddr::V4(v4)), text(v4.to_ipv6_mapped())], ["ip=192.0.2.1"; 3]);
    assert_eq!(text("2001:db8::1".parse::<Ipv6Addr>().unwrap()), "ip=2001:db8::1");
}

#[test]
fn a_tuple_is_one_key_of_up_to_four() {
    assert_eq!(Key::from(("a", 7)).as_str(), "a|7");
    assert_eq!(Key::from(("a", 7, "b|c")).as_str(), "a|7|b%7Cc");
    assert_eq!(Key::from((Key::scoped("s", "v"), 1, "x", 2_u8)).as_str(), "s=v|1|x|2");

    let head = head("/?b=2", &[("a", "1")]);
    let (a, b) = (key::header("a"), key::query("b"));
    let closure = |_: &Parts| 3;
    let four = (a.clone(), b.clone(), closure, key::Global);
    assert_eq!(four.extract(&head).unwrap().as_str(), "header:a=1|query:b=2|3|global");
    assert_eq!(
        four.extract(&head).unwrap(),
        Key::from((a.key("1"), b.key("2"), 3, key::Global.key()))
    );
    let three = (a, key::header("missing"), closure);
    assert!(matches!(three.extract(&head), Err(RequestError::MissingKey { .. })));
}

#[test]
fn a_closure_can_return_what_is_a_key() {
    fn key(extractor: impl KeyExtractor<Parts>) -> Option<String> {
        match extractor.extract(&head("/", &[])) {
            Ok(key) => Some(key.to_string()),
            Err(RequestError::MissingKey { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }
    let of_header = |head: &Parts| head.headers.get("user").cloned();
    assert_eq!(of_header.extract(&head("/", &[("user", "ada")])).unwrap().as_str(), "ada");
    assert!(of_header.extract(&head("/", &[("user", "")])).is_err());
    assert_eq!(key(|_: &Parts| (Some("a"), 7_i64)).as_deref(), Some("a|7"));
    assert_eq!(
        key(|_: &Parts| (Uuid::nil(), Bytes::from("a"), Arc::<str>::from("b"), 1)).unwrap().len(),
        42
    );
    assert_eq!(key(|_: &Parts| ("a", None::<u32>)), None);
    assert_eq!(key(|_: &Parts| ("a", "", 7)), None);
    assert_eq!(key(|_: &Parts| Vec::<u8>::new()), None);
    assert_eq!(key(|_: &Parts| Some(Cow::Borrowed(""))), None);
    assert_eq!(key(|_: &Parts| Ok(0_i8)).as_deref(), Some("0"));
}

/// Extracts from a request, and returns the key or the error.
fn extracted(extractor: &impl KeyExtractor<Parts>, head: &Parts) -> Result<String, String> {
    extractor.extract(head).map(|key| key.to_string()).map_err(|error| detail(&error))
}

#[test]
fn a_bearer_token_is_a_key() {
    let bearer = key::bearer();
    for (value, expected) in [
        ("Bearer abc", Some("bearer=abc")),
        ("bearer abc=", Some("bearer=abc%3D")),
        ("BEARER   abc ", Some("bearer=abc")),
        ("  Bearer\tabc", Some("bearer=abc")),
        ("Bearer ", None),
        ("Bearer", None),
        ("Bearerabc", None),
        ("Basic abc", None),
        ("", None),
        ("abc", None),
    ] {
        let key = extracted(&bearer, &head("/", &[("authorization", value)]));
        assert_eq!(key.as_deref().ok(), expected, "{value:?}");
        if let Err(error) = key {
            let name = "the bearer token in header authorization";
            assert!(error.contains(&format!("{name} is missing or empty")), "{error}");
        }
    }
    let twice = head("/", &[("authorization", "Bearer a"), ("authorization", "Basic b")]);
    assert!(extracted(&bearer, &twice).unwrap_err().contains("occurs more than once"));
    assert!(extracted(&bearer, &head("/", &[])).unwrap_err().contains("missing"));
    assert_eq!(bearer.key("abc="), Key::scoped("bearer", "abc="));
}

#[test]
fn a_cookie_is_a_key() {
    let session = key::cookie("session");
    for (lines, expected) in [
        (&["session=abc"][..], Ok("cookie:session=abc")),
        (&["a=1; session=abc; b=2"], Ok("cookie:session=abc")),
        (&["a=1;session=abc;b"], Ok("cookie:session=abc")),
        (&["a=1", "session=\"a=b\""], Ok("cookie:session=a%3Db")),
        (&["mysession=1; session2=2; Session=3"], Err("missing or empty")),
        (&["session"], Err("missing or empty")),
        (&["session="], Err("cookie session is missing or empty")),
        (&["session=a; session=b"], Err("cookie session occurs more than once")),
        (&["session=a", "session=a"], Err("occurs more than once")),
        (&[], Err("missing or empty")),
    ] {
        let lines: Vec<_> = lines.iter().map(|line| ("cookie", *line)).collect();
        let key = extracted(&session, &head("/", &lines));
        match expected {
            Ok(expected) => assert_eq!(key.as_deref(), Ok(expected)),
            Err(complaint) => assert!(key.as_ref().unwrap_err().contains(complaint), "{key:?}"),
        }
    }
}

#[test]
fn a_cookie_has_one_key_in_each_form_that_services_accept() {
    let session = key::cookie("session");
    for line in [
        "session= abc ",
        "a=1; session\t=\tabc; b=2",
        "session=%61bc",
        "s%65ssion=abc",
        "session=\"abc\"",
        "session= \"ab%63\"",
        "session=%22abc%22",
    ] {
        let key = extracted(&session, &head("/", &[("cookie", line)]));
        assert_eq!(key.as_deref(), Ok("cookie:session=abc"), "{line}");
    }
    // A service could read either of them.
    for line in ["session=abc; session =x", "session=x; s%65ssion=abc"] {
        let key = extracted(&session, &head("/", &[("cookie", line)]));
        assert!(key.unwrap_err().contains("occurs more than once"), "{line}");
    }
    for line in ["session=\"\"", "session= ", "session;=abc", "%=abc"] {
        let key = extracted(&session, &head("/", &[("cookie", line)]));
        assert!(key.unwrap_err().contains("missing or empty"), "{line}");
    }
    assert_eq!(
        extracted(&key::cookie("a%20b"), &head("/", &[("cookie", "a%20b=1")])).as_deref(),
        Ok("cookie:a%2520b=1")
    );
}

/// HTTP/2 passes spaces on, and a server behind a gateway removes them.
#[test]
fn spaces_around_the_value_of_a_header_make_no_other_key() {
    let api_key = key::header("x-api-key");
    let closure = |head: &Parts| head.headers.get("x-api-key").cloned();
    for value in ["k 1", " k 1", "k 1\t ", "\t k 1"] {
        // Another header that occurs twice has an effect on how the value is read.
        for others in [&[][..], &[("a", "1"), ("a", "2")]] {
            let head = head("/", &[&[("x-api-key", value)], others].concat());
            assert_eq!(extracted(&api_key, &head).as_deref(), Ok("header:x-api-key=k%201"));
            assert_eq!(extracted(&closure, &head).as_deref(), Ok("k%201"));
        }
    }
    let blank = head("/", &[("x-api-key", " \t")]);
    assert!(extracted(&api_key, &blank).unwrap_err().contains("MissingKey"));
    assert!(extracted(&closure, &blank).unwrap_err().contains("MissingKey"));
}

#[test]
fn a_query_parameter_is_a_key() {
    let api_key = key::query("api key");
    for (uri, expected) in [
        ("/?api+key=k1", Ok("query:api%20key=k1")),
        ("/?q=%61pi&api%20key=a%2Bb+c", Ok("query:api%20key=a+b%20c")),
        ("/?api+key=a=b&&x", Ok("query:api%20key=a%3Db")),
        ("/", Err("parameter api key is missing or empty")),
        ("/?api+key", Err("missing or empty")),
        ("/?api+key=", Err("missing or empty")),
        ("/?apikey=1&api+key2=2", Err("missing or empty")),
        ("/?api+key=1&api%20key=2", Err("parameter api key occurs more than once")),
    ] {
        let key = extracted(&api_key, &head(uri, &[]));
        match expected {
            Ok(expected) => assert_eq!(key.as_deref(), Ok(expected), "{uri}"),
            Err(complaint) => assert!(key.as_ref().unwrap_err().contains(complaint), "{key:?}"),
        }
    }
}

#[test]
fn a_hashed_key_depends_on_the_secret_and_does_not_contain_the_value() {
    let plain = key::header("x-api-key");
    let hashed = plain.clone().hashed("secret");
    let key = extracted(&hashed, &head("/", &[("x-api-key", "topaz")])).unwrap();
    // printf topaz | openssl dgst -sha256 -hmac secret -r | cut -c 1-32
    assert_eq!(key, "header:x-api-key==26a5f76be48899ff2925ed7697d3491b");
    assert_eq!(hashed.key("topaz").as_str(), key);
    assert_eq!(Key::hashed("header:x-api-key", "topaz", "secret"), hashed.key("topaz"));
    let digits = key.rsplit('=').next().unwrap();
    for other in [
        hashed.key("topas"),
        plain.clone().hashed("Secret").key("topaz"),
        key::header("x-api-kez").hashed("secret").key("topaz"),
        plain.key("topaz"),
        plain.key(format!("={digits}")),
        key::bearer().hashed("secret").key("topaz"),
        key::cookie("x-api-key").hashed("secret").key("topaz"),
        key::query("x-api-key").hashed("secret").key("topaz"),
    ] {
        assert_ne!(other.as_str(), key);
    }
    let debug = format!("{hashed:?}");
    assert!(!debug.contains("secret\"") && debug.contains("Secret(..)"), "{debug}");
    let empty = std::panic::catch_unwind(|| key::bearer().hashed(""));
    let message = *empty.unwrap_err().downcast::<&str>().unwrap();
    assert_eq!(message, "the secret of a hashed key is empty; use 32 random bytes");
}

#[tokio::test]
async fn the_key_of_an_extractor_is_the_one_that_the_layer_counts() {
    let limiter = in_memory(Quota::per_hour(1));
    let client = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8"]).ipv6_prefix(56);
    let elsewhere = key::PeerIp.peer_addr(|it| it.get().copied());
    let v4: Ipv4Addr = "192.0.2.1".parse().unwrap();
    let v6: Ipv6Addr = "2001:db8::12ff:1:2:3:4".parse().unwrap();
    let through_nat64: Ipv6Addr = "64:ff9b::192.0.2.1".parse().unwrap();
    let header = key::header("user").hashed("secret");
    let by_hand = vec![
        (RateLimitLayer::new(&limiter, key::PeerIp), from("192.0.2.1"), key::PeerIp.key(v4)),
        (
            RateLimitLayer::new(&limiter, key::PeerIp),
            from("64:ff9b::192.0.2.1"),
            key::PeerIp.key(through_nat64),
        ),
        (
            RateLimitLayer::new(&limiter, key::PeerIp),
            from("2001:db8::12ff:5:6:7:8"),
            key::PeerIp.key(v6),
        ),
        (RateLimitLayer::new(&limiter, elsewhere.clone()), from("192.0.2.1"), elsewhere.key(v4)),
        (
            RateLimitLayer::new(&limiter, client.clone()),
            from("2001:db8::12fe:5:6:7:8"),
            client.key(v6),
        ),
        (RateLimitLayer::new(&limiter, header.clone()), get(&[("user", "ada")]), header.key("ada")),
        (RateLimitLayer::new(&limiter, key::Global), get(&[]), key::Global.key()),
        (
            RateLimitLayer::new(&limiter, key::Route),
            {
                let mut request = get(&[]); // as a router of axum passes it to its fallback
                request.extensions_mut().insert(OriginalUri("/nowhere".parse().unwrap()));
                request
            },
            key::Route.key(""),
        ),
        (
            RateLimitLayer::new(&limiter, key::Global).missing_key(MissingKey::Share),
            get(&[]),
            key::Global.key(),
        ),
        (
            RateLimitLayer::new(&limiter, key::header("user")).missing_key(MissingKey::Share),
            get(&[]),
            Key::scoped("anonymous", ""),
        ),
        (
            RateLimitLayer::new(&limiter, (header.clone(), key::PeerIp, |_: &Parts| 7)),
            {
                let mut request = from("192.0.2.1");
                request.headers_mut().insert("user", HeaderValue::from_static("ada"));
                request
            },
            Key::from((header.key("ada"), key::PeerIp.key(v4), 7)),
        ),
    ];
    for (layer, request, key) in by_hand {
        limiter.reset(&key).await.unwrap();
        assert_eq!(send(&layer, request).await.status(), StatusCode::OK, "{key}");
        assert_eq!(limiter.peek(&key).await.unwrap().remaining(), 0, "{key}");
        limiter.reset(&key).await.unwrap();
        assert_eq!(limiter.peek(&key).await.unwrap().remaining(), 1, "{key}");
    }
}

#[tokio::test]
async fn lists_deny_or_exempt_clients() {
    let layer = || RateLimitLayer::new(in_memory(Quota::per_hour(1)), |_: &Parts| "all");
    let networks = ["198.51.100.0/24", "2001:db8::/32", "192.0.2.7"];
    let listed = [
        ("198.51.100.9", true),
        ("::ffff:198.51.100.9", true),
        ("64:ff9b::198.51.100.9", true),
        ("2001:db8::1", true),
        ("192.0.2.7", true),
        ("192.0.2.8", false),
        ("2001:db9::1", false),
    ];
    let denying = layer().forbid(key::PeerIp.within(networks));
    let exempting = layer().exempt(key::PeerIp.try_within(networks).unwrap());
    let _ = send(&exempting, from("203.0.113.1")).await;
    let _ = send(&denying, from("203.0.113.1")).await;
    for (address, is_listed) in listed {
        let response = send(&denying, from(address)).await;
        assert_eq!(response.status(), if is_listed { 403 } else { 429 }, "{address}");
        if is_listed {
            assert_eq!(header(&response, "cache-control"), ["no-store"]);
            assert!(header(&response, "ratelimit").is_empty());
            let problem = json(response).await;
            assert_eq!(problem["status"], 403);
            assert_eq!(problem["title"], "Forbidden");
            assert_eq!(problem["detail"], "access is not allowed");
        }
        let response = send(&exempting, from(address)).await;
        assert_eq!(response.status(), if is_listed { 200 } else { 429 }, "{address}");
    }
    assert!(key::PeerIp.try_within(["office"]).is_err());
    let without_address = send(&denying, get(&[])).await;
    assert_eq!(without_address.status(), 500, "a list that never matches is reported");
    assert_eq!(send(&exempting, get(&[])).await.status(), 500);

    let client = ClientIp::new(ProxyHeader::XForwardedFor, ["10.0.0.0/8"]);
    let behind_proxy = layer().forbid(client.within(["198.51.100.0/24"]));
    let mut request = from("10.0.0.1");
    request.headers_mut().insert("x-forwarded-for", HeaderValue::from_static("198.51.100.1"));
    assert_eq!(send(&behind_proxy, request).await.status(), 403);
}

#[tokio::test]
async fn values_can_be_denied_or_exempt() {
    let api_key = key::header("x-api-key").hashed("secret");
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), api_key.clone())
        .exempt(api_key.clone().one_of(["root", "both"]))
        .exempt(|head: &Parts| head.uri.path() == "/health")
        .forbid(api_key.one_of(["leaked", "both"]))
        .forbid(key::bearer().one_of([String::from("old")]))
        .forbid(|head: &Parts| {
            let teapot = RequestError::with_status(StatusCode::IM_A_TEAPOT, "no coffee");
            if head.headers.contains_key("coffee") { Err(teapot) } else { Ok(false) }
        });
    for (headers, status) in [
        (&[("x-api-key", "ada")][..], 200),
        (&[("x-api-key", "ada")], 429),
        (&[("x-api-key", "root")], 200),
        (&[("x-api-key", "root")], 200),
        (&[("x-api-key", "leaked")], 403),
        (&[("x-api-key", "both")], 403),
        (&[("x-api-key", "ben"), ("authorization", "Bearer old")], 403),
        (&[("x-api-key", "ben"), ("authorization", "Bearer new")], 200),
        (&[("x-api-key", "a"), ("x-api-key", "leaked")], 400),
        (&[("coffee", "")], 418),
        (&[], 400),
    ] {
        assert_eq!(send(&layer, get(headers)).await.status(), status, "{headers:?}");
    }
    let health = Request::get("/health").body(Body::empty()).unwrap();
    assert_eq!(send(&layer, health).await.status(), 200);
    let watching = layer.dry_run(true);
    assert_eq!(send(&watching, get(&[("x-api-key", "leaked")])).await.status(), 200);
}

#[tokio::test]
async fn a_missing_key_can_have_any_status() {
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key::bearer())
        .missing_key(MissingKey::reject_with(StatusCode::UNAUTHORIZED))
        .map_rejection(|_, _, mut response| {
            if response.status() == StatusCode::UNAUTHORIZED {
                let bearer = HeaderValue::from_static("Bearer");
                response.headers_mut().insert("www-authenticate", bearer);
            }
            response
        });
    let response = send(&layer, get(&[])).await;
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(header(&response, "www-authenticate"), ["Bearer"]);
    let problem = json(response).await;
    assert_eq!((&problem["status"], &problem["title"]), (&401.into(), &"Unauthorized".into()));
    assert_eq!(problem["detail"], "the bearer token in header authorization is missing or empty");
    assert_eq!(send(&layer, get(&[("authorization", "Bearer a")])).await.status(), 200);
}

#[tokio::test]
async fn a_rule_can_deny_with_any_status() {
    let limiter = in_memory(Quota::per_hour(9));
    let counted = limiter.clone();
    let layer = RateLimitLayer::by_rule(move |head: &Parts| {
        match head.headers.get("status").and_then(|it| it.to_str().ok()?.parse().ok()) {
            Some(status) => Err(RequestError::with_status(status, "not now")),
            None => Ok(Charge::new(&limiter, "ada")),
        }
    });
    let grpc = |status: &'static str| {
        let mut request = get(&[("content-type", "application/grpc"), ("status", status)]);
        *request.method_mut() = http::Method::POST;
        request
    };
    for (status, code) in [
        ("401", "16"),
        ("403", "7"),
        ("404", "3"),
        ("429", "8"),
        ("503", "14"),
        ("500", "13"),
        ("400", "3"),
    ] {
        let response = send(&layer, get(&[("status", status)])).await;
        assert_eq!(response.status().as_str(), status);
        assert!(header(&response, "ratelimit").is_empty());
        assert_eq!(json(response).await["detail"], "not now");
        let response = send(&layer, grpc(status)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(header(&response, "grpc-status"), [code], "{status}");
        assert_eq!(header(&response, "grpc-message"), ["not now"]);
    }
    assert_eq!(counted.peek("ada").await.unwrap().remaining(), 9, "a denial is not counted");
}

#[tokio::test]
async fn a_cost_of_zero_exempts_the_request() {
    let limiter = in_memory(Quota::per_hour(9));
    let by_key = RateLimitLayer::new(&limiter, key::Global)
        .cost(|head: &Parts| head.headers.contains_key("user").into());
    for layer in [by_key.clone(), by_key.clone().settle_handle(true), by_key] {
        let response = send(&layer, get(&[])).await;
        assert_eq!(response.status(), 200);
        assert!(response.headers().is_empty() && response.extensions().is_empty());
    }
    assert_eq!(limiter.peek("global").await.unwrap().remaining(), 9);

    let store = tower_ratelimit::MemoryStore::new();
    let [requests, tokens] = ["requests", "tokens"].map(|name| {
        let quota = Quota::per_hour(9);
        let algorithm = tower_ratelimit::Algorithm::sliding_log();
        tower_ratelimit::Limiter::new(name, store.clone(), algorithm, quota)
    });
    let (of_requests, of_tokens) = (requests.clone(), tokens.clone());
    let by_rule = RateLimitLayer::by_rule(move |head: &Parts| {
        let charge = Charge::new(&of_requests, "ada").also(&of_tokens).cost(0);
        Ok(if head.headers.contains_key("user") { charge } else { charge.of("tokens") })
    });
    let response = send(&by_rule, get(&[])).await;
    assert!(response.headers().is_empty() && response.extensions().is_empty());
    let response = send(&by_rule, get(&[("user", "ada")])).await;
    assert_eq!(header(&response, "ratelimit-policy"), ["\"requests\";q=9;w=3600"]);
    assert_eq!(requests.peek("ada").await.unwrap().remaining(), 8);
    assert_eq!(tokens.peek("ada").await.unwrap().remaining(), 9);
}

#[test]
fn another_key_replaces_only_a_missing_one() {
    let address = |mut head: Parts| {
        head.extensions.insert(SocketAddr::from(([192, 0, 2, 1], 4711)));
        head
    };
    let key = key::header("x-api-key").or(key::cookie("session")).or(key::PeerIp);
    let extract = |headers: &[_]| key.extract(&address(head("/", headers)));
    let text = |headers: &[_]| extract(headers).unwrap().to_string();
    assert_eq!(text(&[("x-api-key", "k1"), ("cookie", "session=s")]), "header:x-api-key=k1");
    assert_eq!(text(&[("cookie", "session=s")]), "cookie:session=s");
    assert_eq!(text(&[("x-api-key", " "), ("cookie", "session=")]), "ip=192.0.2.1");
    assert_eq!(text(&[]), "ip=192.0.2.1");
    let twice = extract(&[("x-api-key", "k1"), ("x-api-key", "k2")]);
    assert!(matches!(twice, Err(RequestError::Invalid { .. })), "{twice:?}");

    // A value that a client chooses never equals the key of an address.
    assert_eq!(text(&[("x-api-key", "ip=192.0.2.1")]), "header:x-api-key=ip%3D192.0.2.1");
    let named = (|head: &Parts| head.headers.get("user").cloned()).or(key::PeerIp);
    let forged = named.extract(&address(head("/", &[("user", "ip=192.0.2.1")]))).unwrap();
    assert_eq!(forged.as_str(), "ip%3D192.0.2.1");
    assert_eq!(named.extract(&address(head("/", &[]))).unwrap().as_str(), "ip=192.0.2.1");

    // Without the last one, the service is misconfigured, as without the first.
    let error = key.extract(&head("/", &[]));
    assert!(matches!(error, Err(RequestError::Misconfigured { .. })), "{error:?}");
    let neither = key::header("a").or(key::header("b")).extract(&head("/", &[]));
    assert_eq!(neither, Err(RequestError::missing_key("header b is missing or empty")));
}

#[tokio::test]
async fn a_layer_counts_by_the_api_key_or_else_by_the_address() {
    let key = key::header("x-api-key").hashed("secret").or(key::PeerIp);
    let layer = RateLimitLayer::new(in_memory(Quota::per_hour(1)), key);
    let request = |address, api_key: &str| {
        let mut request = from(address);
        request.headers_mut().insert("x-api-key", api_key.parse().unwrap());
        request
    };
    for (request, status) in [
        (request("192.0.2.1", "k1"), StatusCode::OK),
        (request("192.0.2.2", "k1"), StatusCode::TOO_MANY_REQUESTS),
        (request("192.0.2.2", "k2"), StatusCode::OK),
        (from("192.0.2.2"), StatusCode::OK),
        (request("192.0.2.2", ""), StatusCode::TOO_MANY_REQUESTS),
        (from("192.0.2.3"), StatusCode::OK),
    ] {
        assert_eq!(send(&layer, request).await.status(), status);
    }
}
