//! SIGTERM: each program that serves ends its requests, and its places are free again.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

use tower_ratelimit::{Algorithm, Limiter, Quota, key};

use crate::support::{self, server::RedisServer};

/// Starts a program that serves. Returns the address in the first line with a URL.
fn start(name: &str, flags: &[&str]) -> (Child, String) {
    let mut command = Command::new(support::example(name));
    let mut process = command.args(flags).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
    let address = lines.find_map(|line| {
        let (_, address) = line.as_ref().unwrap().split_once("http://")?;
        Some(address.split('/').next().unwrap().to_owned())
    });
    (process, address.expect("the program listens"))
}

fn terminate(process: &mut Child) {
    let kill = Command::new("kill").args(["-TERM", &process.id().to_string()]).status();
    assert!(kill.unwrap().success());
}

#[test]
fn sigterm_ends_each_program_that_serves_in_order() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../limits.toml");
    let limits = fs::read_to_string(limits).unwrap().replace("127.0.0.1:3000", "127.0.0.1:0");
    fs::write(file.path(), limits).unwrap();
    let redis = RedisServer::start();
    let any = ["--listen", "127.0.0.1:0"];
    let failover = [any[0], any[1], "--redis", &support::patient(&redis)];
    for (name, flags) in [
        ("configured", &[file.path().to_str().unwrap()][..]),
        ("failover", &failover),
        ("grpc", &any),
        ("llm_gateway", &any),
        ("plans", &any),
        ("playground", &any),
        ("server", &any),
        ("streams", &any),
    ] {
        let (mut process, _) = start(name, flags);
        terminate(&mut process);
        let mut rest = String::new();
        process.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
        let status = process.wait().unwrap();
        assert!(status.success(), "{name}: {status}");
    }
}

#[tokio::test]
async fn sigterm_ends_the_streams_and_returns_their_places() {
    let redis = RedisServer::start();
    let url = support::patient(&redis);
    let flags = ["--listen", "127.0.0.1:0", "--redis", &url, "--events", "100000"];
    let (mut process, address) = start("streams", &flags);
    let mut streams = [(); 3].map(|()| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(b"GET /events HTTP/1.0\r\nx-customer: ada\r\n\r\n").unwrap();
        stream.read_exact(&mut [0; 12]).unwrap();
        stream
    });
    let store = support::redis_store(&redis).await;
    let limiter = Limiter::new("streams", store, Algorithm::concurrency(), Quota::concurrent(3));
    let held = async || limiter.peek(key::header("x-customer").key("ada")).await.unwrap().held();
    assert_eq!(held().await, 3);
    terminate(&mut process);
    for stream in &mut streams {
        stream.read_to_end(&mut vec![]).unwrap();
    }
    assert!(process.wait().unwrap().success());
    assert_eq!(held().await, 0);
}

#[test]
fn the_page_has_the_code_of_the_programs() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    let code = fs::read_to_string(format!("{root}examples/support/shutdown.rs")).unwrap();
    let (_, code) = code.split_once("\n\n").unwrap();
    let page = fs::read_to_string(format!("{root}docs/redis-connecting.md")).unwrap();
    assert!(page.contains(code), "docs/redis-connecting.md");
}
