//! `recipes.md`: failed logins by name and address, and by address.

use axum::{
    Form, Router,
    extract::State,
    http::{StatusCode, request::Parts},
    routing::post,
};
use tower_ratelimit::{
    Admission, Algorithm, Key, Limiter, MemoryStore, Quota, RateLimitLayer,
    key::{self, KeyExtractor},
    layer::Rejection,
};

#[derive(serde::Deserialize)]
struct Login {
    name: String,
    password: String,
}

async fn login(
    State(failures): State<Limiter>,
    head: Parts,
    Form(login): Form<Login>,
) -> Result<(StatusCode, &'static str), Rejection> {
    let address = key::PeerIp.extract(&head).map_err(Rejection::Request)?;
    let client = Key::from(login.name.to_lowercase()).and(&address);
    // Held while the password is compared, so that guesses at the same time count, too.
    let guess = match failures.hold(&client, 1).await? {
        Admission::Admitted(guess) => guess,
        // The same 429 as from the layer.
        Admission::Denied(denied) => return Err(Rejection::Denied(denied)),
    };
    if login.password != "secret" {
        guess.settle(1);
        return Ok((StatusCode::UNAUTHORIZED, "wrong name or password"));
    }
    guess.cancel();
    let _ = failures.reset(&client).await; // if it fails, the old failures count a while longer
    Ok((StatusCode::OK, "welcome"))
}

fn app(store: &MemoryStore) -> Router {
    let log = Algorithm::sliding_log();
    let by_client = Limiter::new("login", store.clone(), log, Quota::per_minute(5));
    let by_address = Limiter::new("login-address", store.clone(), log, Quota::per_minute(20));
    let failed = RateLimitLayer::new(by_address, key::PeerIp)
        .charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    Router::new().route("/login", post(login).layer(failed)).with_state(by_client)
}

mod tests {
    use std::net::SocketAddr;

    use axum::body::Body;
    use http::Request;
    use tokio::{task::JoinSet, time::advance};
    use tower::ServiceExt;

    use super::*;

    const OK: u16 = 200;
    const WRONG: u16 = 401;
    const DENIED: u16 = 429;

    async fn send(app: &Router, address: [u8; 4], name: &str, password: &str) -> u16 {
        let request = Request::post("/login")
            .header("content-type", "application/x-www-form-urlencoded")
            .extension(SocketAddr::from((address, 4711)))
            .body(Body::from(format!("name={name}&password={password}")))
            .unwrap();
        app.clone().oneshot(request).await.unwrap().status().as_u16()
    }

    #[tokio::test(start_paused = true)]
    async fn wrong_passwords_lock_out_only_their_address_and_good_ones_count_nothing() {
        let app = app(&MemoryStore::new());
        let (home, attacker) = ([192, 0, 2, 1], [192, 0, 2, 2]);
        for _ in 0..30 {
            assert_eq!(send(&app, home, "ada", "secret").await, OK);
        }
        for name in ["ada", "Ada", "ADA", "ada", "aDa"] {
            assert_eq!(send(&app, attacker, name, "guess").await, WRONG);
        }
        assert_eq!(send(&app, attacker, "ada", "secret").await, DENIED);
        assert_eq!(send(&app, home, "ada", "secret").await, OK);

        // A good login forgets the failures before it.
        for _ in 0..3 {
            for _ in 0..4 {
                assert_eq!(send(&app, home, "ada", "typo").await, WRONG);
            }
            assert_eq!(send(&app, home, "ada", "secret").await, OK);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_has_twenty_failures_a_minute_over_all_names() {
        let app = app(&MemoryStore::new());
        let attacker = [192, 0, 2, 2];
        for number in 0..20 {
            assert_eq!(send(&app, attacker, &format!("user-{number}"), "guess").await, WRONG);
        }
        assert_eq!(send(&app, attacker, "another", "guess").await, DENIED);
        assert_eq!(send(&app, [192, 0, 2, 1], "another", "guess").await, WRONG);
        advance(std::time::Duration::from_secs(60)).await;
        assert_eq!(send(&app, attacker, "another", "guess").await, WRONG);
    }

    #[tokio::test]
    async fn guesses_at_the_same_time_count() {
        let app = app(&MemoryStore::new());
        let mut guesses = JoinSet::new();
        for _ in 0..15 {
            let app = app.clone();
            guesses.spawn(async move { send(&app, [192, 0, 2, 2], "ada", "guess").await });
        }
        let statuses = guesses.join_all().await;
        assert_eq!(statuses.iter().filter(|status| **status == WRONG).count(), 5);
        assert_eq!(statuses.iter().filter(|status| **status == DENIED).count(), 10);
    }
}
