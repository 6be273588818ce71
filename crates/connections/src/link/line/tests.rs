//! The order of commands, and those that are given up, over a server whose replies are scripted.

use std::sync::{Mutex, atomic::Ordering::SeqCst};

use redis::{ErrorKind, RedisConnectionInfo};

use super::{
    super::{
        endpoint::{CONNECT_TIMEOUT, Endpoint, Place},
        fake::Fake,
    },
    *,
};
use crate::sync::lock;

/// A server that writes down the words of commands, and a line to it.
struct Setup {
    line: Line,
    queue: Arc<CommandQueue>,
    seen: Arc<Mutex<Vec<String>>>,
    _server: Fake,
}

impl Setup {
    async fn new(answer: impl Fn(&[&str]) -> String + Send + Sync + 'static) -> Self {
        Self::over(Arc::default(), answer).await
    }

    /// A line that takes the commands of this queue.
    async fn over(
        queue: Arc<CommandQueue>,
        answer: impl Fn(&[&str]) -> String + Send + Sync + 'static,
    ) -> Self {
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
        let line = Line::new(session.await.unwrap(), &queue, Silence::default());
        Self { line, queue, seen, _server: server }
    }

    async fn of_echo() -> Self {
        Self::new(|_| "+OK\r\n".to_owned()).await
    }

    /// Adds a command, which the server sees as this word.
    fn push(&self, word: &str) -> Position {
        self.push_claimed(word, &Arc::default())
    }

    fn push_claimed(&self, word: &str, claim: &Arc<Claim>) -> Position {
        self.line.push(Command::new(&redis::cmd(word)), claim)
    }

    fn push_script(&self, argument: &str) -> Position {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg("hash").arg(0).arg(argument);
        self.line.push(Command::script(&cmd, "text"), &Arc::default())
    }

    fn seen(&self) -> Vec<String> {
        lock(&self.seen).clone()
    }
}

async fn outcome(mut position: Position) -> Outcome {
    position.outcome().await
}

fn is_reply(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Reply(Ok(_)))
}

#[tokio::test]
async fn commands_are_written_in_the_order_of_their_arrival() {
    let setup = Setup::of_echo().await;
    let words: Vec<_> = (0..100).map(|number| format!("C{number}")).collect();
    let outcomes: Vec<_> = words.iter().map(|word| setup.push(word)).collect();
    for position in outcomes {
        assert!(is_reply(outcome(position).await));
    }
    assert_eq!(setup.seen(), words);
}

#[tokio::test]
async fn a_command_is_not_written_if_it_is_given_up_or_its_caller_is_gone() {
    let setup = Setup::of_echo().await;
    let claim = Arc::<Claim>::default();
    let given_up = setup.push_claimed("LATE", &claim);
    assert!(claim.give_up(), "it was written");
    drop(setup.push("GONE"));
    let last = setup.push("LAST");
    assert!(matches!(outcome(given_up).await, Outcome::GivenUp));
    assert!(is_reply(outcome(last).await));
    assert_eq!(setup.seen(), ["LAST"]);
}

#[tokio::test]
async fn commands_that_a_line_has_not_written_are_written_first_by_the_next_one() {
    let first = Setup::of_echo().await;
    let kept: Vec<_> = ["A", "B"].map(|word| first.push(word)).into();
    let Setup { line, queue, .. } = first;
    drop(line); // before its task has run
    let next = Setup::over(queue, |_| "+OK\r\n".to_owned()).await;
    let last = next.push("LAST");
    // Their callers do not run meanwhile.
    assert!(is_reply(outcome(last).await));
    assert_eq!(next.seen(), ["A", "B", "LAST"]);
    for position in kept {
        let Outcome::Unsent(again) = outcome(position).await else { panic!("it was written") };
        assert!(is_reply(outcome(again).await));
    }
}

#[tokio::test]
async fn a_command_that_has_no_line_can_be_given_up_and_one_that_was_written_cannot() {
    let setup = Setup::new(|_| String::new()).await; // closes the connection
    let claims: [Arc<Claim>; 3] = Default::default();
    let written = setup.push_claimed("WRITTEN", &claims[0]);
    assert!(matches!(outcome(written).await, Outcome::Interrupted));
    let one = setup.push_claimed("ONE", &claims[1]);
    let other = setup.push_claimed("OTHER", &claims[2]);
    let Outcome::Unsent(one) = outcome(one).await else { panic!("it was written") };
    assert!(claims[1].give_up());
    let next = Setup::over(setup.queue, |_| "+OK\r\n".to_owned()).await;
    let Outcome::Unsent(other) = outcome(other).await else { panic!("it was written") };
    assert!(is_reply(outcome(other).await));
    assert!(matches!(outcome(one).await, Outcome::GivenUp));
    assert_eq!(claims.map(|claim| claim.give_up()), [false, true, false]);
    assert_eq!(next.seen(), ["OTHER"]);
}

#[tokio::test]
async fn a_line_that_another_one_has_replaced_takes_no_command() {
    let old = Setup::of_echo().await;
    let next = Setup::over(old.queue.clone(), |_| "+OK\r\n".to_owned()).await;
    let Outcome::Unsent(again) = outcome(old.push("WORD")).await else { panic!("written") };
    assert!(is_reply(outcome(again).await));
    assert_eq!((old.seen(), next.seen()), (vec![], vec!["WORD".to_owned()]));
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
    for (position, word) in outcomes.into_iter().zip(["a", "b", "c"]) {
        let Outcome::Reply(Ok(reply)) = outcome(position).await else {
            panic!("{word} has no reply")
        };
        assert_eq!(reply, Value::SimpleString(word.to_owned()));
    }
    let by_hash = ["a", "b", "c"].map(|word| format!("EVALSHA hash 0 {word}"));
    let again = ["EVAL text 0 a", "EVALSHA hash 0 b", "EVALSHA hash 0 c"];
    assert_eq!(setup.seen(), [&by_hash[..], &again.map(str::to_owned)].concat());
}

#[tokio::test]
async fn an_error_of_one_command_fails_no_other_one() {
    let setup = Setup::new(|words| match words[0] {
        "BAD" => "-ERR no\r\n".to_owned(),
        _ => "+OK\r\n".to_owned(),
    })
    .await;
    let outcomes = ["GOOD", "BAD", "ALSO"].map(|word| setup.push(word));
    let [good, bad, also] = outcomes;
    assert!(is_reply(outcome(good).await));
    let Outcome::Reply(Err(error)) = outcome(bad).await else { panic!("no error") };
    assert_eq!(error.kind(), ErrorKind::Server(ServerErrorKind::ResponseError));
    assert!(is_reply(outcome(also).await));
}
