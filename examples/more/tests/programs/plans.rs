//! The example `plans`: limits by the plan of an API key.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::LazyLock,
};

use crate::support;

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| support::example("plans"));

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a question with this number of words. Returns the response.
fn post(address: &str, key: &str, words: usize) -> String {
    let question = "why ".repeat(words);
    let mut stream = TcpStream::connect(address).unwrap();
    let length = question.len();
    write!(
        stream,
        "POST /answer HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
         {key}content-length: {length}\r\n\r\n{question}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn plans_and_tokens_are_limited_and_an_answer_shows_what_was_settled() {
    let mut server = Command::new(&*PROGRAM);
    server.args(["--listen", "127.0.0.1:0", "--free", "3/d", "--pro", "10/d"]);
    server.args(["--tokens", "500/d", "--all-tokens", "785/d"]);
    let mut server = Server(server.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on http://").expect("the first line");

    for (key, words, status, expected) in [
        ("", 1, "400", "header x-api-key is missing"),
        ("x-api-key: dora\r\n", 1, "400", "unknown API key"),
        ("x-api-key: ada\r\n", 2, "200", "100 held first, 20 used, 80 returned, 480 left\n"),
        ("x-api-key: ada\r\n", 5, "200", "100 held first, 50 used, 50 returned, 430 left\n"),
        ("x-api-key: ada\r\n", 10, "200", "100 held first, 100 used, 0 returned, 330 left\n"),
        ("x-api-key: ada\r\n", 1, "429", "\"violated-policies\":[\"free\"]"),
        ("x-api-key: ben\r\n", 50, "200", "100 held first, 500 used, 400 more charged, 0 left\n"),
        ("x-api-key: ben\r\n", 1, "429", "\"violated-policies\":[\"tokens\"]"),
        ("x-api-key: carl\r\n", 3, "200", "100 held first, 30 used, 70 returned, 470 left\n"),
        ("x-api-key: carl\r\n", 1, "429", "\"violated-policies\":[\"all-tokens\"]"),
    ] {
        let answer = post(address, key, words);
        assert_eq!(&answer["HTTP/1.1 ".len()..][..3], status, "{answer}");
        assert!(answer.contains(expected), "{answer}");
    }
}

#[test]
fn an_invalid_flag_is_explained() {
    for (flags, complaint) in [
        (["--free", "0/s"], "the limit is 0"),
        (["--estimate", "0"], "0 is not in 1.."),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
    ] {
        let output = Command::new(&*PROGRAM).args(flags).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(complaint), "{stderr}");
    }
}
