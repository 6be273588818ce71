//! The settings and the results that serde writes: their forms, which others store and read.

use std::{fmt::Debug, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;
use tower_ratelimit::{
    Algorithm, Charge, FailurePolicy, Limiter, MemoryStore, Quota,
    layer::Headers,
    observe::TopDenied,
    store::{self, WhenFull},
};

/// A value in a table, because TOML has no other values at its top.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Table<T> {
    value: T,
}

fn assert_form<T>(value: T, json: &serde_json::Value)
where
    T: Clone + Debug + DeserializeOwned + PartialEq + Serialize,
{
    assert_eq!(&serde_json::to_value(&value).unwrap(), json);
    assert_eq!(serde_json::from_value::<T>(json.clone()).unwrap(), value);
    let toml = toml::to_string(&Table { value: value.clone() }).unwrap();
    assert_eq!(toml::from_str::<Table<T>>(&toml).unwrap(), Table { value }, "{toml}");
}

#[test]
fn settings_are_read_as_they_are_written() {
    for (policy, form) in [
        (FailurePolicy::Closed, json!("closed")),
        (FailurePolicy::Wait, json!("wait")),
        (FailurePolicy::Open, json!("open")),
        (FailurePolicy::local(0.25), json!({ "local": { "share": 0.25 } })),
    ] {
        assert_form(policy, &form);
    }
    for (when_full, form) in
        [(WhenFull::RejectNewKeys, "reject-new-keys"), (WhenFull::EvictSoonest, "evict-soonest")]
    {
        assert_form(when_full, &json!(form));
    }
    for (headers, form) in [
        (Headers::Draft11, "draft11"),
        (Headers::Draft11All, "draft11-all"),
        (Headers::Draft06, "draft06"),
        (Headers::XRateLimit, "x-rate-limit"),
        (Headers::XRateLimitEpoch, "x-rate-limit-epoch"),
        (Headers::RetryAfter, "retry-after"),
    ] {
        assert_form(headers, &json!(form));
    }
    assert_form(Quota::per_second(10).burst(20), &json!("10/s burst 20"));
    for algorithm in Algorithm::ALL {
        assert_form(*algorithm, &json!(algorithm.name()));
    }
}

#[test]
fn a_mistake_in_a_setting_names_the_values_that_are_valid() {
    for (text, complaint) in [
        (
            r#""opened""#,
            "unknown variant `opened`, expected one of `closed`, `wait`, `open`, `local`",
        ),
        (r#"{"local": {"share": 0.0}}"#, "a share must be above 0 and at most 1, not 0"),
        (r#"{"local": {"share": 1.5}}"#, "a share must be above 0 and at most 1, not 1.5"),
        (r#"{"local": {"share": -1}}"#, "a share must be above 0 and at most 1, not -1"),
        (r#"{"local": {}}"#, "missing field `share`"),
        (r#"{"local": {"share": 0.5, "of": 4}}"#, "unknown field `of`, expected `share`"),
    ] {
        let error = serde_json::from_str::<FailurePolicy>(text).unwrap_err();
        assert!(error.to_string().starts_with(complaint), "{error}");
        assert_eq!(error.line(), 1, "{error}");
    }
    let error = serde_json::from_str::<WhenFull>(r#""evict""#).unwrap_err().to_string();
    let complaint = "unknown variant `evict`, expected `reject-new-keys` or `evict-soonest`";
    assert!(error.starts_with(complaint), "{error}");
    let error = serde_json::from_str::<Headers>(r#""draft""#).unwrap_err().to_string();
    assert!(error.starts_with("unknown variant `draft`, expected one of `draft11`,"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn decisions_and_states_of_keys_have_times_in_milliseconds_rounded_up() {
    let quota = Quota::per_second(3);
    let limiter = Limiter::new("api", MemoryStore::new(), Algorithm::token_bucket(), quota);
    let charge = Charge::new(&limiter, "alice");
    let allowed = charge.check().await.unwrap();
    let form = json!({
        "is_allowed": true,
        "delay_ms": 0,
        "retry_after_ms": null,
        "is_blocked": false,
        "blocked_for_ms": null,
        "remaining": 2,
        "replenish_after_ms": 334,
        "reset_after_ms": 334,
        "limiter": "api",
        "quota": "3/s",
        "cost": 1,
        "source": "store",
    });
    assert_eq!(serde_json::to_value(&allowed).unwrap(), form);
    let state = serde_json::to_value(charge.spend().await.unwrap().unwrap()).unwrap();
    let form = json!({
        "limiter": "api",
        "quota": "3/s",
        "remaining": 1,
        "held": 0,
        "replenish_after_ms": 334,
        "reset_after_ms": 667,
        "blocked_for_ms": null,
        "allows": true,
        "retry_after_ms": null,
        "delay_ms": 0,
        "source": "store",
    });
    assert_eq!(state, form);

    limiter.block("alice", Duration::from_micros(1_500_001)).await.unwrap();
    let denied = serde_json::to_value(charge.check().await.unwrap()).unwrap();
    assert_eq!((&denied["is_allowed"], &denied["is_blocked"]), (&json!(false), &json!(true)));
    assert_eq!(
        (&denied["retry_after_ms"], &denied["blocked_for_ms"]),
        (&json!(1501), &json!(1501))
    );

    // TOML has no null: such a field is left out.
    let toml = toml::to_string(&allowed).unwrap();
    assert!(toml.contains("reset_after_ms = 334\n") && !toml.contains("retry_after_ms"), "{toml}");
}

#[tokio::test]
async fn the_keys_that_are_denied_most_and_the_health_are_written_for_a_page() {
    let store = MemoryStore::new();
    let top = Arc::new(TopDenied::new(10));
    store.add_observer(top.clone());
    let health = store::lazy("memory:").unwrap().health();
    let health = serde_json::to_value(health).unwrap();
    let form = json!({
        "status": "ready",
        "is_available": true,
        "consecutive_failures": 0,
        "recent_failures": 0,
        "last_error": null,
        "last_error_at_unix_ms": null,
        "answers": 0,
        "timeouts": 0,
        "interrupted": 0,
        "errors": 0,
        "skipped": 0,
        "outages": 0,
    });
    assert_eq!(health, form);

    let limiter = Limiter::new("api", store, Algorithm::fixed_window(), Quota::per_hour(1));
    for _ in 0..3 {
        let _ = Charge::new(&limiter, "a b").check().await.unwrap();
    }
    let denied = top.top(1).remove(0);
    let last = denied.last_denied.duration_since(std::time::UNIX_EPOCH).unwrap();
    let form = json!({
        "limiter": "api",
        "key": "a%20b",
        "count": 2,
        "max_error": 0,
        "last_denied_unix_ms": last.as_millis() as u64,
        "is_blocked": false,
    });
    assert_eq!(serde_json::to_value(&denied).unwrap(), form);
}

#[test]
fn the_status_of_a_store_is_written_as_its_name() {
    let health = store::lazy("memory:").unwrap().health();
    assert_eq!(serde_json::to_value(&health).unwrap()["status"], json!(health.status()));
}
