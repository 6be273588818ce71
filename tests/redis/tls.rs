//! Redis over TLS, with client certificates: one server, Sentinels and a cluster. It needs real
//! servers that are built with TLS.

use std::{net::TcpStream, time::Duration};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, SanType, date_time_ymd,
};
use tokio::{task, time::sleep};
use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore, store::RedisConfig};

use crate::support::{
    self,
    certificates::Certificates,
    cluster::{self, Cluster, free_port},
    limits,
    load::{eventually, until},
    sentinel::Watched,
    server::RedisServer,
    with_sources,
};

/// Adds the CA and the client certificate.
fn with(certificates: &Certificates, config: RedisConfig) -> RedisConfig {
    let (certificate, key) = (certificates.read("client.pem"), certificates.read("client.key"));
    let config = config.ca_certificates(certificates.read("ca.pem")).unwrap();
    config.client_certificate(certificate, key).unwrap()
}

fn start(certificates: &Certificates, more: &[&str]) -> (RedisServer, u16) {
    let port = free_port();
    let text = port.to_string();
    let mut settings = vec!["--tls-port".to_owned(), text];
    for (name, value) in certificates.settings() {
        settings.extend([format!("--{name}"), value]);
    }
    let settings: Vec<_> =
        settings.iter().map(|setting| &**setting).chain(more.iter().copied()).collect();
    let server = RedisServer::start_with(&settings);
    cluster::until("the port is open", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    (server, port)
}

fn store(config: RedisConfig) -> RedisStore {
    RedisStore::new(config.deadline(Duration::from_secs(30))).unwrap()
}

/// The provider comes with the feature: these tests install none.
#[tokio::test]
async fn one_server_over_tls() {
    let certificates = Certificates::new();
    let (server, port) = start(&certificates, &[]);
    for url in [format!("rediss://localhost:{port}"), format!("redis://127.0.0.1:{port}")] {
        limits(store(with(&certificates, RedisConfig::server(&url).unwrap()))).await;
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}

#[tokio::test]
async fn errors_are_reported_over_tls() {
    let certificates = Certificates::new();
    let (_server, port) = start(&certificates, &[]);
    let others = Certificates::new();
    let ca = certificates.read("ca.pem");
    let good = |config| with(&certificates, config);
    let without_client = |config: RedisConfig| config.ca_certificates(&ca).unwrap();
    let unknown_ca = |config| with(&others, config);
    type Change<'a> = &'a dyn Fn(RedisConfig) -> RedisConfig;
    let none: Change<'_> = &|config| config;
    let rediss = format!("rediss://127.0.0.1:{port}");
    let without_tls = RedisServer::start_with(&["--port", &free_port().to_string()]);
    let mut admin = without_tls.connection();
    let (_, plain_port): (String, u16) =
        redis::cmd("CONFIG").arg(&["GET", "port"]).query(&mut admin).unwrap();
    for (url, change, text) in [
        (
            &*rediss,
            &without_client as Change<'_>,
            "check the certificate of `RedisConfig::client_certificate`",
        ),
        (
            &rediss,
            &unknown_ca,
            "give the CA that signed the certificate to `RedisConfig::ca_certificates`",
        ),
        (&rediss, none, "certificate"),
        (&format!("redis://127.0.0.1:{port}"), none, "write rediss:// instead of redis://"),
        (&format!("rediss://127.0.0.1:{plain_port}"), &good, "write redis:// and set no"),
    ] {
        let store = RedisStore::new(change(RedisConfig::server(url).unwrap())).unwrap();
        until(text, async || {
            let message = with_sources(&store.ping().await.unwrap_err());
            // A busy machine can need longer for a handshake than a ping has for it.
            if message.contains("no answer from Redis") {
                return false;
            }
            assert!(message.contains(text) && message.contains("127.0.0.1:"), "{url}: {message}");
            true
        })
        .await;
    }
    let config = RedisConfig::server(&rediss).unwrap();
    let garbage = config.clone().ca_certificates("garbage").unwrap_err();
    assert!(garbage.to_string().contains("the CA certificates"), "{garbage}");
    let (certificate, key) = (certificates.read("client.pem"), "garbage");
    let garbage = config.client_certificate(certificate, key).unwrap_err();
    assert!(garbage.to_string().contains("private key"), "{garbage}");
}

#[tokio::test]
async fn each_mistake_in_the_certificate_of_a_server_has_a_remedy_of_its_own() {
    let client = [ExtendedKeyUsagePurpose::ClientAuth];
    let configured = |certificates: &Certificates, trusted: &Certificates, ca: &str| {
        let (_server, port) = start(certificates, &[]);
        let config = RedisConfig::server(&format!("rediss://localhost:{port}")).unwrap();
        (_server, with(trusted, config).ca_certificates(trusted.read(ca)).unwrap())
    };
    let self_signed = |is_ca| {
        let certificates = Certificates::self_signed(is_ca);
        configured(&certificates, &certificates, "server.pem")
    };
    let signed = |change: &dyn Fn(&mut CertificateParams)| {
        let certificates = Certificates::with(change);
        configured(&certificates, &certificates, "ca.pem")
    };
    let other_ca = || configured(&Certificates::new(), &Certificates::new(), "ca.pem");
    for ((_server, config), texts) in [
        (signed(&|it| it.not_after = date_time_ymd(2020, 1, 1)), &["renew the certificate"][..]),
        (signed(&|it| it.not_before = date_time_ymd(3000, 1, 1)), &["set the clock"]),
        (
            signed(&|it| {
                it.subject_alt_names = vec![SanType::DnsName("redis".try_into().unwrap())];
            }),
            &["connect by a name that is in the certificate"],
        ),
        // Only a common name.
        (signed(&|it| it.subject_alt_names.clear()), &["a subject alternative name"]),
        (
            signed(&|it| it.extended_key_usages = client.to_vec()),
            &["a certificate for servers (extended key usage `serverAuth`)"],
        ),
        // Both have a CA of the same name.
        (other_ca(), &["give the CA that signed the certificate"]),
        (
            self_signed(IsCa::Ca(BasicConstraints::Unconstrained)),
            &["give it one without `CA:TRUE`"],
        ),
        (self_signed(IsCa::NoCa), &[]),
    ] {
        let store = RedisStore::new(config).unwrap();
        until("an answer", async || match store.ping().await {
            Ok(()) => texts.is_empty(),
            Err(error) => {
                let message = with_sources(&error);
                // A busy machine can need longer for a handshake than a ping has for it.
                if message.contains("no answer") {
                    return false;
                }
                let is_named = |text: &&str| message.contains(text);
                assert!(!texts.is_empty() && texts.iter().all(is_named), "{texts:?}: {message}");
                assert!(!message.contains("CA that") || texts[0].contains("CA that"), "{message}");
                true
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_connection_over_tls_that_the_server_closes_fails_no_later_request() {
    let certificates = Certificates::new();
    let (server, port) = start(&certificates, &["--timeout", "1"]);
    let url = format!("rediss://127.0.0.1:{port}");
    let store = store(with(&certificates, RedisConfig::server(&url).unwrap()));
    let limiter =
        Limiter::new("default", store.clone(), Algorithm::FixedWindow, Quota::per_hour(100));
    for _ in 0..3 {
        let _ = limiter.check("key").await.unwrap();
        let is_open = || {
            // A new connection each time: the server closes idle ones.
            let mut admin = server.connection();
            let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut admin).unwrap();
            clients.lines().any(|line| line.contains("cmd=evalsha"))
        };
        while is_open() {
            sleep(Duration::from_millis(50)).await;
        }
    }
    assert_eq!(limiter.peek("key").await.unwrap().remaining(), 97);
    assert_eq!(store.health().errors + store.health().interrupted, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_behind_sentinels_over_tls_is_followed() {
    let certificates = Certificates::new();
    let watched = task::block_in_place(|| {
        let mut watched = Watched::start_with_tls(&certificates);
        watched.watch();
        watched
    });
    let sentinels = watched.tls_sentinel_urls();
    let config = RedisConfig::sentinels(&sentinels, support::sentinel::NAME).unwrap();
    let config = with(&certificates, config);
    let (others, key) = (Certificates::new(), certificates.read("client.key"));
    for ping in [
        store(config.clone().sentinel_ca_certificates(others.read("ca.pem")).unwrap()).ping().await,
        store(with(&others, config.clone())).ping().await,
    ] {
        let error = with_sources(&ping.unwrap_err());
        assert!(error.contains("certificate"), "{error}");
    }
    // These settings of the Sentinels replace those of the servers one by one.
    let config = config.sentinel_client_certificate(certificates.read("client.pem"), key).unwrap();
    let store = store(config);
    limits(store.clone()).await;
    let master = watched.master();
    task::block_in_place(|| {
        watched.fail_over();
        cluster::until("there is another master", || watched.master() != master);
    });
    let limiter = Limiter::new("other", store, Algorithm::FixedWindow, Quota::per_hour(2));
    let mut decisions = [0; 3];
    while decisions[1] + decisions[2] == 0 {
        let _ = eventually(async || limiter.peek("key").await).await;
        decisions = task::block_in_place(|| watched.decisions());
    }
    assert!(limiter.check("key").await.unwrap().is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_over_tls() {
    let certificates = Certificates::new();
    let mut settings = vec!["--tls-cluster".to_owned(), "yes".to_owned()];
    for (name, value) in certificates.settings() {
        settings.extend([format!("--{name}"), value]);
    }
    let settings: Vec<_> = settings.iter().map(|setting| &**setting).collect();
    let cluster = task::block_in_place(|| Cluster::start(3, false, &settings));
    let seed = format!("rediss://localhost:{}", cluster.masters[0].port);
    let store = store(with(&certificates, RedisConfig::cluster([seed]).unwrap()));
    store.ping().await.unwrap();
    let limiter = Limiter::new("default", store, Algorithm::FixedWindow, Quota::per_hour(2));
    for user in 0..100 {
        let _ = limiter.check(user).await.unwrap();
    }
    let decided = |node: &cluster::Node| node.server.calls("evalsha") > 0;
    assert!(task::block_in_place(|| cluster.masters.iter().all(decided)));
}
