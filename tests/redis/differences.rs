//! Decisions that Redis and the process compute differently: over a connection that changes the
//! script of the token bucket.

use std::time::Duration;

use redis::{
    Arg, Cmd, Pipeline, RedisFuture, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::task::JoinSet;
use tower_ratelimit::{
    Algorithm, Charge, FailurePolicy, Limiter, Quota, RedisStore,
    store::{ErrorKind, RedisConfig, Source},
};

use crate::support::{
    load::until,
    log::Log,
    recorder::{Recorder, observed},
    server::RedisServer,
};

/// A line of the script, and what stands in its place.
type Edit = [&'static str; 2];

const DOUBLED: Edit = ["\nforms, reads =", "\nlimit = 2 * limit\nforms, reads ="];
const HALVED: Edit = ["\nforms, reads =", "\nlimit = limit / 2\nforms, reads ="];

const LIFETIME: Duration = Duration::from_secs(8);

/// A connection on which the server runs another script.
#[derive(Clone)]
struct Edited {
    connection: MultiplexedConnection,
    edit: Edit,
}

impl Edited {
    fn command(&self, command: &Cmd) -> Cmd {
        let simple = |arg| match arg {
            Arg::Simple(arg) => arg,
            _ => panic!("no cursor"),
        };
        let args: Vec<&[u8]> = command.args_iter().map(simple).collect();
        let mut edited = Cmd::new();
        for (index, &arg) in args.iter().enumerate() {
            match (args[0], index) {
                (b"EVALSHA", 1) => edited.arg("0".repeat(40)), // no server has it
                (b"EVAL", 1) => {
                    let text = str::from_utf8(arg).unwrap();
                    assert!(text.contains(self.edit[0]), "the script has no such line");
                    edited.arg(text.replace(self.edit[0], self.edit[1]))
                }
                _ => edited.arg(arg),
            };
        }
        edited
    }
}

impl ConnectionLike for Edited {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        let command = self.command(command);
        Box::pin(async move { self.connection.req_packed_command(&command).await })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

async fn store(server: &RedisServer, edit: Edit) -> RedisStore {
    let client = redis::Client::open(server.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let config = RedisConfig::from_connection(Edited { connection, edit });
    RedisStore::new(config.deadline(Duration::from_secs(30))).unwrap()
}

fn limiter(store: &RedisStore, name: &str, limit: u64) -> Limiter {
    Limiter::new(name, store.clone(), Algorithm::token_bucket(), Quota::per_day(limit))
        .hold_lifetime(LIFETIME)
}

fn differed(limiter: &str, admitted: bool) -> String {
    format!("decision differed {limiter} ratelimit:{limiter}:token-bucket:{{alice}} {admitted}")
}

#[tokio::test]
async fn a_check_that_redis_admits_otherwise_than_computed_is_allowed_and_reported() {
    let (log, _guard) = Log::start(tracing::Level::INFO);
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(store(&server, DOUBLED).await, recorder.clone());
    let api = limiter(&store, "api", 2);
    for _ in 0..2 {
        assert!(api.check("alice").await.unwrap().is_allowed());
    }
    assert_eq!(recorder.take_of("decision differed"), [""; 0]);
    let third = api.check("alice").await.unwrap();
    assert!(third.is_allowed(), "{third:?}");
    assert_eq!((third.remaining(), third.delay()), (0, Duration::ZERO));
    assert_eq!(recorder.take_of("decision differed"), [differed("api", true)]);
    let text = log.text();
    let event = "ERROR tower_ratelimit: Redis decides otherwise than this process";
    assert!(text.contains(event) && !text.contains("alice"), "{text}");
}

#[tokio::test]
async fn each_check_of_a_call_has_what_redis_has_decided_about_it() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    for (edit, limit, allowed, differing) in [(DOUBLED, 6, 12, 6), (HALVED, 24, 12, 12)] {
        let store = observed(store(&server, edit).await, recorder.clone());
        let api = limiter(&store, &format!("api-{limit}"), limit);
        let mut checks = JoinSet::new();
        for _ in 0..30 {
            let api = api.clone();
            checks.spawn(async move { api.check("alice").await.unwrap().is_allowed() });
        }
        let results = checks.join_all().await;
        assert_eq!(results.iter().filter(|is_allowed| **is_allowed).count(), allowed);
        let events = recorder.take_of("decision differed");
        // A denied check spends nothing, and the process computes each call from its own start.
        assert!(events.len() >= differing, "{events:?}");
        let event = differed(api.name(), allowed as u64 > limit);
        assert!(events.iter().all(|it| *it == event), "{events:?}");
    }
}

#[tokio::test]
async fn a_check_that_redis_denies_otherwise_than_computed_has_no_time_and_is_not_remembered() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(store(&server, HALVED).await, recorder.clone());
    let api = limiter(&store, "api", 4);
    for _ in 0..2 {
        assert!(api.check("alice").await.unwrap().is_allowed());
    }
    for _ in 0..2 {
        let denied = api.check("alice").await.unwrap();
        assert!(!denied.is_allowed() && denied.source() == Source::Store, "{denied:?}");
        assert_eq!((denied.remaining(), denied.retry_after()), (0, None));
        assert_eq!(recorder.take_of("decision differed"), [differed("api", false)]);
    }
    assert!(api.hold("alice", 1).await.unwrap().admitted().is_none());
    assert_eq!(recorder.take_of("decision differed"), [differed("api", false)]);
}

#[tokio::test]
async fn several_limits_have_what_redis_has_decided_about_them() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(store(&server, HALVED).await, recorder.clone());
    let (plan, api) = (limiter(&store, "plan", 100), limiter(&store, "api", 4));
    let check = async || Charge::new(&plan, "alice").also(&api).check().await.unwrap();
    for _ in 0..2 {
        assert!(check().await.is_allowed());
    }
    assert_eq!(recorder.take_of("decision differed"), [""; 0]);
    let denied = check().await;
    assert!(!denied.is_allowed(), "{denied:?}");
    assert_eq!((denied.limiter(), denied.remaining(), denied.retry_after()), ("api", 0, None));
    let name = "ratelimit:api:token-bucket:{alice}";
    let event = format!("decision differed api {name} false");
    assert_eq!(recorder.take_of("decision differed"), [event]);
}

#[tokio::test]
async fn a_request_whose_units_are_not_known_fails_and_they_expire() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(store(&server, DOUBLED).await, recorder.clone());
    let api = limiter(&store, "api", 2);
    let permit = api.hold("alice", 2).await.unwrap().admitted().unwrap();
    let held = api.hold("alice", 2).await.unwrap_err();
    assert_eq!(held.kind(), Some(ErrorKind::Different), "{held}");
    assert_eq!(recorder.take_of("decision differed"), [differed("api", true)]);
    until("the lost hold has expired", async || api.peek("alice").await.unwrap().held() == 2).await;
    permit.cancel();

    let login = limiter(&store, "login", 2);
    assert!(login.check("alice").cost(2).await.unwrap().is_allowed());
    let reserved = login.reserve("alice", 1, Duration::from_secs(60)).await.unwrap_err();
    assert_eq!(reserved.kind(), Some(ErrorKind::Different), "{reserved}");
    assert_eq!(recorder.take_of("decision differed"), [differed("login", true)]);
}

#[tokio::test]
async fn a_request_whose_units_are_not_known_takes_no_more_by_asking_again() {
    let (server, recorder) = (RedisServer::start(), Recorder::new());
    let store = observed(store(&server, DOUBLED).await, recorder.clone());
    let api = limiter(&store, "api", 10).on_failure(FailurePolicy::Wait);
    assert!(api.check("alice").cost(10).await.unwrap().is_allowed());
    let long = Duration::from_secs(3_600);
    let held = api.hold("alice", 1).max_wait(long).await.unwrap_err();
    let reserved = api.try_acquire("alice", 1, long).await.unwrap_err();
    for error in [held, reserved] {
        assert_eq!(error.kind(), Some(ErrorKind::Different), "{error}");
    }
    assert_eq!(recorder.take_of("decision differed"), [(); 2].map(|()| differed("api", true)));
}
