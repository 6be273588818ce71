//! The program `quickstart`, which is that of the README, and the commands in the docs.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::support;

const README: &str = include_str!("../../../../README.md");
const PROGRAM: &str = include_str!("../../../quickstart/src/main.rs");

/// Packages to build for the first command. Most of them are those of axum and tokio.
const MAX_PACKAGES: usize = 75;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_sixth_request_in_a_minute_is_a_429() {
    let mut program = Command::new(support::program("quickstart"));
    let mut process = program.arg("127.0.0.1:0").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
    let first = lines.next().unwrap();
    let address = first.strip_prefix("listening on http://").expect("the address");
    let try_it = lines.by_ref().take(2).last().unwrap();
    let statuses = (0..7).map(|_| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer["HTTP/1.1 ".len()..][..3].to_owned()
    });
    let statuses: Vec<_> = statuses.collect();
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(statuses, ["200", "200", "200", "200", "200", "429", "429"]);
    assert_eq!(try_it, format!("try it: for i in $(seq 7); do curl -i http://{address}/; done"));
}

#[test]
fn a_port_that_is_taken_is_an_error_that_names_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let output = Command::new(support::program("quickstart")).arg(&address).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.starts_with(&format!("error: cannot listen on {address}: ")), "{errors}");
    assert!(errors.contains("give another address") && !errors.contains("Os {"), "{errors}");
}

#[test]
fn the_program_of_the_readme_is_the_quickstart() {
    let (_, code) = README.split_once("```rust,no_run\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    // The program also takes an address.
    let lines = code.lines().filter(|line| !line.contains("TcpListener::bind"));
    let missing: Vec<_> = lines.filter(|line| !PROGRAM.lines().any(|it| it == *line)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn the_first_command_builds_few_packages() {
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--offline", "--package", "quickstart", "--edges", "normal,build"]);
    let output = tree.args(["--prefix", "none", "--format", "{p}"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    let packages: BTreeSet<_> = tree.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    assert!(packages.len() <= MAX_PACKAGES, "{}: {packages:#?}", packages.len());
}

/// The pages and programs of a folder that name commands.
fn texts(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|it| it == "md" || it == "rs")).collect()
}

/// Without its package, `cargo run --example` does not find an example.
#[test]
fn each_command_in_the_docs_names_an_example_and_its_package() {
    let root = root();
    let folders = ["", "docs", "examples", "examples/more"].map(|folder| root.join(folder));
    let mut commands = 0;
    for path in folders.iter().flat_map(|folder| texts(folder)) {
        let text = fs::read_to_string(&path).unwrap();
        for command in text.split("cargo run ").skip(1) {
            let command = command.split(['\n', '`', '"']).next().unwrap();
            let mut words = command.split_whitespace();
            let mut after = |flag| words.find(|word| *word == flag).and_then(|_| words.next());
            let (package, example) = (after("-p"), after("--example"));
            let folder = match (package, example) {
                (Some("examples"), Some(_)) => "examples",
                (Some("more-examples"), Some(_)) => "examples/more",
                (Some("quickstart" | "pictures" | "limitctl"), None) => continue,
                _ if command.contains("--manifest-path") => continue,
                _ => panic!("{}: cargo run {command}", path.display()),
            };
            let file = root.join(folder).join(example.unwrap());
            let files = [file.with_extension("rs"), file.join("main.rs")];
            let is_there = files.iter().any(|file| file.is_file());
            assert!(is_there, "{}: cargo run {command}", path.display());
            commands += 1;
        }
    }
    assert!(commands >= 15, "{commands} commands were found");
}
