//! The example `demo`: two replicas go on without Redis, and with it again.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;

use crate::support;

struct Demo(Child);

impl Drop for Demo {
    /// By SIGTERM: a demo that is killed leaves its Redis behind.
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

/// Asks for the numbers until they are as expected.
async fn until(url: &str, expected: impl Fn(&Value, [u64; 2]) -> bool) {
    for _ in 0..300 {
        let text = reqwest::get(format!("{url}/numbers")).await.unwrap().text().await.unwrap();
        let numbers: Value = serde_json::from_str(&text).unwrap();
        let seconds = numbers["seconds"].as_array().unwrap();
        let last = seconds.len().checked_sub(2).map(|last| &seconds[last]);
        let admitted = [0, 1]
            .map(|replica| last.map_or(0, |second| second[replica]["admitted"].as_u64().unwrap()));
        if expected(&numbers, admitted) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the numbers are never as expected");
}

#[tokio::test(flavor = "multi_thread")]
async fn both_replicas_admit_with_redis_and_without_it() {
    let mut demo = Command::new(support::example("demo"));
    demo.args(["--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
    let mut demo = Demo(demo.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(demo.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").expect("the first line");
    let client = reqwest::Client::new();
    let switch = |body| client.post(format!("{url}/redis")).body(body).send();

    let both = |admitted: [u64; 2]| admitted.iter().all(|count| *count > 0);
    until(url, |numbers, admitted| numbers["redis"] == true && both(admitted)).await;
    let foreign = client.post(format!("{url}/redis")).header("origin", "http://example.com");
    assert_eq!(foreign.body("break").send().await.unwrap().status(), 403);
    assert_eq!(switch("break").await.unwrap().status(), 204);
    until(url, |numbers, admitted| numbers["redis"] == false && both(admitted)).await;
    assert_eq!(switch("repair").await.unwrap().status(), 204);
    until(url, |numbers, admitted| numbers["redis"] == true && both(admitted)).await;
}
