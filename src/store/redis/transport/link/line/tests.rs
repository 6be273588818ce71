//! The order and the deadlines of commands, over a server whose replies are scripted.

use std::sync::{Mutex, atomic::AtomicBool, atomic::Ordering::SeqCst};

use redis::{ErrorKind, RedisConnectionInfo};

use super::{
    super::{
        endpoint::{CONNECT_TIMEOUT, Endpoint, Place},
        fake::Fake,
    },
    *,
};

const LONG: Duration = Duration::from_secs(60);

/// A server that writes down the words of commands, and a line to it.
struct Setup {
    line: Line,
    unsent: Arc<Unsent>,
    seen: Arc<Mutex<Vec<String>>>,
    _server: Fake,
}

impl Setup {
    async fn new(answer: impl Fn(&[&str]) -> String + Send + Sync + 'static) -> Self {
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let seen_by_server = seen.clone();
        let server = Fake::start(move |_, words| {
            lock(&seen_by_server).push(words.join(" "));
            answer(words)
        });
        let place = Place::Tcp(("127.0.0.1".to_owned(), server.port()));
        let login = RedisConnectionInfo::default().set_skip_set_lib_name();
        let endpoint = Endpoint::new(place, login, None);
        let session = endpoint.open(CONNECT_TIMEOUT, None, None);
        let unsent = Arc::<Unsent>::default();
        let line = Line::new(session.await.unwrap(), &unsent);
        Self { line, unsent, seen, _server: server }
    }

    async fn of_echo() -> Self {
        Self::new(|_| "+OK\r\n".to_owned()).await
    }

    /// Adds a command, which the server sees as this word.
    fn push(
        &self,
        word: &str,
        number: u64,
        within: Duration,
    ) -> impl Future<Output = Outcome> + use<> {
        self.line.push(Command::new(&redis::cmd(word)), Deadline::new(within), number)
    }

    fn push_script(&self, argument: &str) -> impl Future<Output = Outcome> + use<> {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg("hash").arg(0).arg(argument);
        self.line.push(Command::script(&cmd, "text"), Deadline::new(LONG), 0)
    }

    fn seen(&self) -> Vec<String> {
        lock(&self.seen).clone()
    }
}

fn is_reply(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Reply(Ok(_)))
}

#[tokio::test]
async fn commands_are_written_in_the_order_of_their_arrival() {
    let setup = Setup::of_echo().await;
    let words: Vec<_> = (0..100).map(|number| format!("C{number}")).collect();
    let outcomes: Vec<_> = words.iter().map(|word| setup.push(word, 0, LONG)).collect();
    for outcome in outcomes {
        assert!(is_reply(outcome.await));
    }
    assert_eq!(setup.seen(), words);
}

#[tokio::test]
async fn a_command_is_not_written_after_its_deadline_nor_if_its_caller_is_gone() {
    let setup = Setup::of_echo().await;
    let late = setup.push("LATE", 0, Duration::ZERO);
    drop(setup.push("GONE", 0, LONG));
    let last = setup.push("LAST", 0, LONG);
    assert!(matches!(late.await, Outcome::Late));
    assert!(is_reply(last.await));
    assert_eq!(setup.seen(), ["LAST"]);
}

#[tokio::test]
async fn commands_that_another_line_has_not_written_come_before_later_ones() {
    let setup = Setup::of_echo().await;
    for number in [1, 2] {
        setup.unsent.add(number);
    }
    // In the order in which their callers run.
    let outcomes = [3, 2, 1].map(|number| setup.push(&format!("C{number}"), number, LONG));
    for outcome in outcomes {
        assert!(is_reply(outcome.await));
    }
    assert_eq!(setup.seen(), ["C1", "C2", "C3"]);
}

#[tokio::test]
async fn later_commands_wait_for_one_that_is_not_sent_again_but_not_for_ever() {
    let setup = Setup::of_echo().await;
    let gone = setup.unsent.ticket(); // its drop gives the place up
    let stuck = setup.unsent.ticket();
    for ticket in [&gone, &stuck] {
        setup.unsent.add(ticket.number());
    }
    let last = setup.push("LAST", 3, LONG);
    drop(gone);
    assert!(is_reply(last.await), "the time for the other one is over");
    assert_eq!(setup.seen(), ["LAST"]);
    assert_eq!(setup.unsent.first(Waker::noop()), None);
}

#[tokio::test]
async fn scripts_that_the_server_does_not_know_are_written_again_in_order() {
    let is_known = AtomicBool::new(false);
    let setup = Setup::new(move |words| match words {
        ["EVAL", _, _, argument] => {
            is_known.store(true, SeqCst);
            format!("+{argument}\r\n")
        }
        ["EVALSHA", _, _, argument] if is_known.load(SeqCst) => format!("+{argument}\r\n"),
        _ => "-NOSCRIPT no\r\n".to_owned(),
    })
    .await;
    let outcomes: Vec<_> = ["a", "b", "c"].map(|word| setup.push_script(word)).into();
    for (outcome, word) in outcomes.into_iter().zip(["a", "b", "c"]) {
        let Outcome::Reply(Ok(reply)) = outcome.await else { panic!("{word} has no reply") };
        assert_eq!(reply, Value::SimpleString(word.to_owned()));
    }
    let by_hash = ["a", "b", "c"].map(|word| format!("EVALSHA hash 0 {word}"));
    let again = ["EVAL text 0 a", "EVALSHA hash 0 b", "EVALSHA hash 0 c"];
    assert_eq!(setup.seen(), [&by_hash[..], &again.map(str::to_owned)].concat());
}

#[tokio::test]
async fn a_command_that_was_written_is_not_repeated_and_one_that_was_not_keeps_its_place() {
    let setup = Setup::new(|_| String::new()).await; // closes the connection
    let written = setup.push("WRITTEN", 1, LONG);
    assert!(matches!(written.await, Outcome::Ended { was_written: true }));
    let unsent = setup.push("UNSENT", 2, LONG);
    assert_eq!(setup.unsent.first(Waker::noop()), Some(2));
    assert!(matches!(unsent.await, Outcome::Ended { was_written: false }));
    assert_eq!(setup.seen(), ["WRITTEN"]);
}

#[tokio::test]
async fn an_error_of_one_command_fails_no_other_one() {
    let setup = Setup::new(|words| match words[0] {
        "BAD" => "-ERR no\r\n".to_owned(),
        _ => "+OK\r\n".to_owned(),
    })
    .await;
    let outcomes = ["GOOD", "BAD", "ALSO"].map(|word| setup.push(word, 0, LONG));
    let [good, bad, also] = outcomes;
    assert!(is_reply(good.await));
    let Outcome::Reply(Err(error)) = bad.await else { panic!("no error") };
    assert_eq!(error.kind(), ErrorKind::Server(ServerErrorKind::ResponseError));
    assert!(is_reply(also.await));
}
