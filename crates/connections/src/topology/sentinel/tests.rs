//! The choice of the master from scripted answers. Real Sentinels are in `tests/redis/sentinel.rs`.

use redis::{IntoConnectionInfo, RedisConnectionInfo};

use super::{
    super::super::{
        health::Nobody,
        link::fake::{Fake, array, map},
    },
    *,
};

fn endpoint(url: &str) -> Endpoint {
    let info = url.into_connection_info().unwrap();
    let redis::ConnectionAddr::Tcp(host, port) = info.addr() else { panic!("{url}") };
    let login: RedisConnectionInfo = info.redis_settings().clone().set_skip_set_lib_name();
    Endpoint::new(Place::Tcp((host.clone(), *port)), login, None)
}

fn sentinels(configured: &[&str], mapping: Mapping) -> Sentinels {
    let configured = configured.iter().map(|url| endpoint(url)).collect();
    Sentinels::new(
        configured,
        "limits".to_owned(),
        endpoint("redis://limits/3"),
        mapping,
        Arc::new(Nobody),
    )
}

fn identity() -> Mapping {
    Arc::new(|host: &str, port| (host.to_owned(), port))
}

fn address(host: &str) -> Address {
    (host.to_owned(), 6379)
}

fn named(host: &str) -> Report {
    Report::Named(address(host), Instant::now())
}

fn failed() -> Report {
    Report::Failed(error("no answer".to_owned()), Instant::now())
}

fn report(sentinels: &Sentinels, reports: &[Report]) {
    for (sentinel, report) in sentinels.0.sentinels().iter().zip(reports) {
        lock(&sentinel.state).report = report.clone();
    }
}

fn peers(of: &Sentinel, id: &str, peers: &[(&str, &str)]) {
    let peer = |&(id, host): &(&str, &str)| Peer { id: id.to_owned(), address: address(host) };
    let mut state = lock(&of.state);
    (state.id, state.peers) = (Some(id.to_owned()), Some(peers.iter().map(peer).collect()));
}

fn addresses(sentinels: &Sentinels) -> Vec<String> {
    sentinels.0.sentinels().iter().map(|sentinel| sentinel.endpoint.name().to_string()).collect()
}

const THREE: [&str; 3] = ["redis://a:6379", "redis://b:6379", "redis://c:6379"];

#[test]
fn more_answers_are_awaited_while_they_can_change_the_result() {
    let old = [named("old"), failed()];
    let called_at = Instant::now();
    let (old_name, old_failure) = (old[0].clone(), old[1].clone());
    let unknown = Report::Unknown(Instant::now());
    for (reports, expected) in [
        (vec![Report::Awaited; 3], Wait::Needed),
        (vec![named("x"), Report::Awaited, Report::Awaited], Wait::LongGrace),
        (vec![named("x"), Report::Awaited], Wait::Grace),
        (vec![named("x"), named("y"), Report::Awaited], Wait::Grace),
        (vec![named("x"), named("x"), Report::Awaited], Wait::Over),
        (vec![named("x"), named("y"), named("z")], Wait::Over),
        // A hung Sentinel named a master before, and may do so again.
        (vec![named("x"), old_name.clone(), failed()], Wait::LongGrace),
        (vec![named("x"), old_failure.clone(), failed()], Wait::Over),
        (vec![unknown.clone(), Report::Awaited], Wait::Needed),
        (vec![unknown, old_failure.clone()], Wait::Over),
        (vec![old_failure, failed()], Wait::Needed),
        (vec![failed(), failed()], Wait::Over),
    ] {
        assert_eq!(wait(&reports, called_at), expected, "{reports:?}");
    }
    assert_eq!(wait(&[old_name, named("x")], None), Wait::Over);
}

#[tokio::test]
async fn the_majority_of_the_answers_names_the_master() {
    let sentinels = sentinels(&THREE, identity());
    for (reports, expected) in [
        ([named("wrong"), named("x"), named("x")], vec!["x"]),
        ([named("wrong"), named("x"), failed()], vec!["wrong", "x"]),
        ([failed(), failed(), named("x")], vec!["x"]),
        ([Report::Unknown(Instant::now()), Report::Awaited, named("x")], vec!["x"]),
        ([failed(), failed(), Report::Unknown(Instant::now())], vec![]),
    ] {
        report(&sentinels, &reports);
        let expected: Vec<_> = expected.into_iter().map(address).collect();
        assert_eq!(sentinels.0.candidates().await, expected, "{reports:?}");
    }
    let error = sentinels.0.no_master().to_string();
    assert_eq!(
        error,
        "the Sentinels that answered know no master named limits: no answer from \
         a:6379 (no answer), b:6379 (no answer); check the name"
    );
}

#[test]
fn connections_are_outdated_after_a_change_and_masters_found_before_it_are_not_used() {
    let sentinels = sentinels(&THREE, identity());
    let shared = &sentinels.0;
    assert_eq!(shared.switch_to(0, address("x")), Some(1));
    assert_eq!(shared.switch_to(0, address("x")), Some(1), "another connection to the same master");
    assert_eq!(shared.switch_to(1, address("y")), Some(2));
    assert!(sentinels.is_outdated(1) && !sentinels.is_outdated(2));
    assert_eq!(shared.switch_to(1, address("x")), None, "the master was found before the change");
}

#[test]
fn sentinels_that_the_majority_knows_are_discovered_and_counted_once() {
    let sentinels = sentinels(&["redis://:secret@a:6379", "redis://b:6379"], identity());
    let configured = ["a:6379", "b:6379"].map(str::to_owned);
    let known = sentinels.0.sentinels();
    let discover = |expected: &[&str]| {
        sentinels.0.discover();
        let discovered: Vec<_> = expected.iter().map(|host| format!("{host}:6379")).collect();
        assert_eq!(addresses(&sentinels), [&configured[..], &discovered].concat());
    };
    peers(&known[0], "A", &[("B", "10.0.0.2"), ("C", "c"), ("ghost", "d")]);
    discover(&[]); // not before the other Sentinel has answered, too
    peers(&known[1], "B", &[("A", "10.0.0.1"), ("C", "c")]);
    discover(&["c"]);
    let discovered = sentinels.0.sentinels().pop().unwrap();
    assert_eq!(discovered.endpoint.login.password(), Some("secret"));
    peers(&discovered, "C", &[("A", "10.0.0.1"), ("B", "10.0.0.2")]);
    discover(&["c"]);
    assert!(Arc::ptr_eq(&discovered, sentinels.0.sentinels().last().unwrap()));
    peers(&known[1], "B", &[("A", "10.0.0.1")]);
    discover(&[]); // only one of two others knows the Sentinel
    peers(&known[0], "A", &[("B", "10.0.0.2")]);
    let many: Vec<_> = (0..100).map(|n| (format!("many-{n}"), format!("m{n}"))).collect();
    let many: Vec<_> = many.iter().map(|(id, host)| (id.as_str(), host.as_str())).collect();
    known.iter().zip(["A", "B"]).for_each(|(node, id)| peers(node, id, &many));
    sentinels.0.discover();
    assert_eq!(sentinels.0.sentinels().len(), 2 + MAX_DISCOVERED);
}

#[tokio::test]
async fn of_two_answers_the_newer_configuration_comes_first() {
    let answer = |host: &'static str, epoch: &'static str| {
        Fake::start(move |_, words| match words {
            ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", _] => array(&[host, "6379"]),
            ["SENTINEL", "MASTER", _] => map(&[("config-epoch", epoch)]),
            _ => "-ERR unknown\r\n".to_owned(),
        })
    };
    let (old, new) = (answer("old", "9"), answer("new", "10"));
    for urls in [[old.url(), new.url()], [new.url(), old.url()]] {
        let sentinels = sentinels(&urls.each_ref().map(String::as_str), identity());
        // On a busy machine, the other Sentinel may answer later than the grace period.
        let mut candidates = vec![];
        while candidates.len() < 2 {
            candidates = sentinels.0.poll_all().await.unwrap();
        }
        assert_eq!(candidates, ["new", "old"].map(address));
    }
}

#[tokio::test]
async fn the_addresses_that_sentinels_name_are_mapped() {
    let fake = Fake::start(|_, words| match words {
        ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", _] => array(&["172.17.0.2", "6379"]),
        ["SENTINEL", "SENTINELS", _] => {
            let other = [("runid", "other"), ("ip", "172.17.0.3"), ("port", "26379")];
            "*1\r\n".to_owned() + &map(&other)
        }
        _ => "-ERR unknown\r\n".to_owned(),
    });
    let mapping = |host: &str, port| {
        assert!(host.starts_with("172.17.0."), "{host}");
        ("127.0.0.1".to_owned(), port + 1)
    };
    let sentinels = sentinels(&[&fake.url()], Arc::new(mapping));
    let candidates = sentinels.0.poll_all().await.unwrap();
    assert_eq!(candidates, [("127.0.0.1".to_owned(), 6380)]);
    while sentinels.0.sentinels().len() < 2 {
        sleep(MIN_PAUSE).await;
    }
    assert_eq!(addresses(&sentinels)[1], "127.0.0.1:26380");
}
