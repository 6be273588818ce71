//! The example `llm_gateway`: budgets of tokens and money, in memory and in Redis.

use std::process::{Command, Output};

use crate::support::{self, server::RedisServer};

fn run(flags: &[&str]) -> Output {
    let program = support::example("llm_gateway");
    Command::new(program).args(flags).output().expect("the example starts")
}

/// The row of a request, without its first columns and with single blanks.
fn row(stdout: &str, request: &str) -> String {
    let rest = stdout.lines().find_map(|line| Some(line.split_once(request)?.1));
    let rest = rest.unwrap_or_else(|| panic!("no row {request}: {stdout}"));
    rest.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn what_requests_do_not_use_is_returned_and_a_denied_one_spends_nothing() {
    let redis = RedisServer::start();
    for flags in [&[][..], &["--redis", &support::patient(&redis)]] {
        let output = run(flags);
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));

        // Tokens held, used and returned, in and out; nano-dollars held and used.
        for (request, expected) in [
            ("an answer", "5 200 4 60 1 140 401250 121000"),
            ("a stream ", "5 200 4 60 1 140 401250 121000"),
            ("the model fails", "5 200 0 0 5 200 401250 0"),
            ("no usage in the answer", "5 100 5 100 0 0 201250 201250"),
            ("two streams: the first", "5 500 4 60 1 440 1001250 121000"),
            ("two streams: the second waits", "5 500 4 60 1 440 1001250 121000"),
            ("a long question", "327 20 245 5 82 15 121750 71250"),
        ] {
            assert_eq!(row(&stdout, request), expected, "{stdout}");
        }
        for (request, limit) in [
            ("more than is left", "key-output"),
            ("the eighth request", "key-requests"),
            ("more than the team has left", "team-money"),
            ("another one", "key-input"),
        ] {
            let denied = format!("denied by {limit}: nothing is spent or held");
            assert!(row(&stdout, request).ends_with(&denied), "{stdout}");
        }
        // Its end is noticed after ten tokens or a few more.
        let cut_off = row(&stdout, "a stream that the client cuts off");
        let numbers: Vec<u64> = cut_off.split(' ').map(|it| it.parse().unwrap()).collect();
        let [_, held, _, used, _, returned, ..] = numbers[..] else { panic!("{stdout}") };
        assert!((10..300).contains(&used) && held == used + returned, "{stdout}");

        let counts: Vec<Vec<u64>> = stdout
            .lines()
            .filter(|line| line.contains(" used = "))
            .map(|line| line.split_whitespace().filter_map(|it| it.parse().ok()).collect())
            .collect();
        assert_eq!(counts.len(), 4, "{stdout}");
        for count in counts {
            let [quota, used, left] = count[..] else { panic!("{stdout}") };
            assert_eq!(quota - used, left, "{stdout}");
        }
    }
}

#[test]
fn an_invalid_flag_of_the_gateway_is_explained() {
    for (flags, complaint) in [
        (["--redis", "redis://127.0.0.1:1/"], "cannot use the Redis server"),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
    ] {
        let output = run(&flags);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(complaint), "{stderr}");
    }
}
