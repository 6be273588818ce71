//! A network namespace beside that of the program, and the link between them, which can drop all
//! packets. It does not hold the servers.

use std::{
    error::Error,
    fs,
    process::{Child, Command, Stdio},
};

use crate::load::until;

const LINK: &str = "faults0";
const PEER: &str = "faults1";
/// The addresses of the program's side and of the other side.
pub const OUTSIDE: &str = "10.98.0.1";
pub const INSIDE: &str = "10.98.0.2";
/// An address whose packets are dropped.
const BLACKHOLE: &str = "10.98.0.9";
/// An Ethernet address that no interface has: frames to it are dropped without an error.
const UNUSED: &str = "02:00:00:00:00:09";

pub fn start_loopback() -> Result<(), Box<dyn Error>> {
    run("ip", &["link", "set", "lo", "up"])
}

pub fn run(program: &str, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program} cannot be run: {error}; install it"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{program} {}: {text}", arguments.join(" ")).into())
}

/// A network namespace. It ends when this is dropped.
pub struct Namespace {
    /// A process that keeps the namespace, until its input is closed.
    holder: Child,
}

impl Namespace {
    pub fn start() -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new("unshare");
        let holder = command.args(["--net", "cat"]).stdin(Stdio::piped()).spawn()?;
        let namespace = Self { holder };
        let of = |id: &str| fs::read_link(format!("/proc/{id}/ns/net")).ok();
        let id = namespace.id();
        until("the namespace exists", || of(&id).is_some_and(|inode| Some(inode) != of("self")))?;
        run("ip", &["link", "add", LINK, "type", "veth", "peer", "name", PEER])?;
        run("ip", &["link", "set", PEER, "netns", &id])?;
        run("ip", &["address", "add", &format!("{OUTSIDE}/24"), "dev", LINK])?;
        run("ip", &["link", "set", LINK, "up"])?;
        namespace.run(&["ip", "address", "add", &format!("{INSIDE}/24"), "dev", PEER])?;
        namespace.run(&["ip", "link", "set", PEER, "up"])?;
        namespace.run(&["ip", "link", "set", "lo", "up"])?;
        run("ip", &neighbour(BLACKHOLE, LINK))?;
        Ok(namespace)
    }

    fn id(&self) -> String {
        self.holder.id().to_string()
    }

    /// Runs a program in the namespace.
    fn run(&self, words: &[&str]) -> Result<(), Box<dyn Error>> {
        run("nsenter", &[&["--target", &self.id(), "--net"], words].concat())
    }

    pub fn host(&self) -> Host {
        Host { address: INSIDE, namespace: Some(self.id()) }
    }

    /// Drops all packets between the two sides, without an error for the senders.
    pub fn cut(&self) -> Result<(), Box<dyn Error>> {
        run("ip", &neighbour(INSIDE, LINK))?;
        self.run(&[&["ip"], &neighbour(OUTSIDE, PEER)[..]].concat())
    }

    pub fn heal(&self) -> Result<(), Box<dyn Error>> {
        run("ip", &["neighbour", "delete", INSIDE, "dev", LINK])?;
        self.run(&["ip", "neighbour", "delete", OUTSIDE, "dev", PEER])
    }
}

/// An address, and the id of a process in its network namespace, if it is not that of the program.
#[derive(Clone, Debug)]
pub struct Host {
    pub address: &'static str,
    pub namespace: Option<String>,
}

impl Host {
    pub const LOCAL: Self = Self { address: "127.0.0.1", namespace: None };

    /// Returns a command that runs a program in the namespace.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let Some(id) = &self.namespace else { return Command::new(program) };
        let mut command = Command::new("nsenter");
        command.args(["--target", id, "--net", "--"]).arg(program);
        command
    }
}

/// Returns the program's side of a namespace.
pub fn outside() -> Host {
    Host { address: OUTSIDE, namespace: None }
}

/// Returns a URL whose packets are dropped while a [`Namespace`] exists.
pub fn blackhole() -> String {
    format!("redis://{BLACKHOLE}:6379")
}

fn neighbour<'a>(address: &'a str, link: &'a str) -> [&'a str; 9] {
    ["neighbour", "replace", address, "lladdr", UNUSED, "dev", link, "nud", "permanent"]
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = run("ip", &["link", "delete", LINK]);
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
