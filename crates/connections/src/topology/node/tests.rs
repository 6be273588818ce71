//! What is known of commands without an answer, over a server whose replies are scripted.

use std::sync::mpsc;

use redis::{Cmd, RedisConnectionInfo, Value};
use tokio::task::JoinHandle;

use super::{
    super::super::{
        health::Nobody,
        link::{Endpoint, MAX_SILENCE, Place, fake::Fake},
    },
    *,
};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

/// A server that answers `hang` on a signal of the test, and does not know the script `unknown`.
struct Setup {
    node: Arc<Node>,
    seen: Arc<Mutex<Vec<String>>>,
    answer: mpsc::Sender<()>,
    _server: Fake,
}

impl Setup {
    fn new() -> Self {
        let (answer, answers) = mpsc::channel();
        let (seen, answers) = (Arc::<Mutex<Vec<String>>>::default(), Mutex::new(answers));
        let seen_by_server = seen.clone();
        let server = Fake::start(move |_, words| {
            if words[0] == "TIME" {
                return "*2\r\n:1\r\n:1\r\n".to_owned();
            }
            lock(&seen_by_server).push(words.join(" "));
            match words {
                [.., "hang"] => drop(lock(&answers).recv()),
                ["EVALSHA", .., "unknown"] => return "-NOSCRIPT no\r\n".to_owned(),
                _ => {}
            }
            "+OK\r\n".to_owned()
        });
        let place = Place::Tcp(("127.0.0.1".to_owned(), server.port()));
        let login = RedisConnectionInfo::default().set_skip_set_lib_name();
        let endpoint = Endpoint::new(place, login, None);
        let common = Common { connections: 1, header: None, owner: Arc::new(Nobody) };
        let node = Arc::new(Node::new(Server::One(endpoint), common));
        Self { node, seen, answer, _server: server }
    }

    /// Executes a script. The breaker does not count its timeout.
    fn execute(&self, word: &str, within: Duration) -> JoinHandle<Result<(), TransportError>> {
        let (node, cmd) = (self.node.clone(), script(word));
        tokio::spawn(async move {
            let deadline = Deadline::new(within).shared(false);
            let executed = node.execute::<Value>(deadline, Command::script(&cmd, "text")).await;
            executed.map(drop)
        })
    }

    fn count(&self, word: &str) -> usize {
        lock(&self.seen).iter().filter(|command| command.ends_with(word)).count()
    }

    async fn until_seen(&self, word: &str) {
        while self.count(word) == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

fn script(word: &str) -> Cmd {
    let mut cmd = redis::cmd("EVALSHA");
    cmd.arg("hash").arg(1).arg("key").arg(word);
    cmd
}

#[tokio::test]
async fn a_command_that_is_in_the_queue_at_its_deadline_has_not_run() {
    let setup = Setup::new();
    setup.execute("first", LONG).await.unwrap().unwrap();
    let unknown = setup.execute("unknown", LONG);
    let hanging = setup.execute("hang", LONG);
    setup.until_seen("hang").await;
    // Nothing is written until the text of the unknown script is, after the answer to `hang`.
    let mut sent = 0;
    while setup.execute("late", SHORT).await.unwrap().unwrap_err().may_have_run() {
        sent += 1;
        assert!(sent < 100, "none is known to be in the queue");
    }
    setup.answer.send(()).unwrap();
    for command in [unknown, hanging, setup.execute("last", LONG)] {
        command.await.unwrap().unwrap();
    }
    assert_eq!(setup.count("late"), sent);
}

#[tokio::test]
async fn a_server_that_answers_a_command_whose_caller_is_gone_is_not_silent() {
    let setup = Setup::new();
    let gone = setup.execute("hang", LONG);
    setup.until_seen("hang").await;
    gone.abort();
    setup.answer.send(()).unwrap();
    let connection = setup.node.channels.current().get(0).current().unwrap();
    while !connection.silence().is_zero() {
        sleep(Duration::from_millis(1)).await;
        assert!(connection.silence() < MAX_SILENCE, "it counts as silent");
    }
}
