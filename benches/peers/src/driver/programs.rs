//! Builds the measured programs, each by itself, so that one that does not build leaves the others
//! measurable.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The seconds that a step of a build may take.
const BUILD_LIMIT: &str = "900";

/// A program that measures one or more subjects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// One of `src/bin`, which has a feature of the same name.
    Rust(&'static str),
    /// `src/bin/ours.rs` of another commit, with this crate at that commit.
    OtherCommit,
    Java,
    Node,
}

impl Program {
    /// Builds the program. Returns its command, or the reason for its failure.
    pub fn build(self, other_commit: &str) -> Result<Vec<OsString>, String> {
        match self {
            Self::Rust("limitador") => build_limitador(),
            Self::Rust(name) => build_rust(&folder(), &target(), name, &["--features", name]),
            Self::OtherCommit => build_other_commit(other_commit),
            Self::Java => build_java(),
            Self::Node => build_node(),
        }
    }
}

/// The folder of this package.
fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of this crate.
pub fn root() -> PathBuf {
    folder().join("../..")
}

/// The folder for everything that is built.
fn target() -> PathBuf {
    root().join("target/peers")
}

/// Where the programs write their errors.
pub fn log_file() -> Stdio {
    let file = File::options().create(true).append(true).open(target().join("errors.log"));
    file.map_or_else(|_| Stdio::null(), Stdio::from)
}

fn build_rust(
    package: &Path,
    target: &Path,
    name: &str,
    args: &[&str],
) -> Result<Vec<OsString>, String> {
    let mut cargo = Command::new("cargo");
    // Some of the crates ask for a newer Rust than they need.
    cargo.args(["build", "--release", "--ignore-rust-version", "--bin", name]);
    cargo.args(args).arg("--target-dir").arg(target).current_dir(package);
    run(&mut cargo)?;
    Ok(vec![target.join("release").join(name).into()])
}

/// Builds the program of the other commit, because the items that it uses may have other names now.
fn build_other_commit(commit: &str) -> Result<Vec<OsString>, String> {
    let source = target().join("other-commit-source");
    let archive = target().join("other-commit.tar");
    let mut git = Command::new("git");
    git.args(["archive", "--output"]).arg(&archive).arg(commit).current_dir(root());
    run(&mut git)?;
    replace_folder(&source)?;
    run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&source))?;
    let package = source.join("benches/peers");
    let built =
        build_rust(&package, &target().join("other-commit"), "ours", &["--features", "ours"]);
    remove(&[&archive, &source]);
    built
}

/// With storage in Redis alone, limitador 0.14 does not compile: it uses items that belong to its
/// storage on disk. So a copy of its source is built, in which these items have no condition.
fn build_limitador() -> Result<Vec<OsString>, String> {
    let source = target().join("limitador-source");
    replace_folder(&source)?;
    run(Command::new("cp").arg("-R").arg(source_of_limitador()?.join(".")).arg(&source))?;
    for file in ["src/counter.rs", "src/storage/keys.rs"] {
        let file = source.join(file);
        let text = fs::read_to_string(&file).map_err(|error| error.to_string())?;
        let changed = text.replace("#[cfg(feature = \"disk_storage\")]", "");
        fs::write(&file, changed).map_err(|error| error.to_string())?;
    }
    let built = build_rust(&folder().join("limitador"), &target(), "limitador", &[]);
    remove(&[&source]);
    built
}

/// The folder into which cargo has unpacked limitador.
fn source_of_limitador() -> Result<PathBuf, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--format-version", "1", "--features", "limitador"]);
    let metadata = run(cargo.current_dir(folder()))?;
    let mut manifests = metadata.split('"').filter_map(|word| word.strip_suffix("/Cargo.toml"));
    let folder = manifests.find(|path| path.contains("/limitador-"));
    folder.map(PathBuf::from).ok_or_else(|| "cargo has no source of limitador".to_owned())
}

fn build_java() -> Result<Vec<OsString>, String> {
    let mut maven = Command::new("mvn");
    run(maven.args(["--quiet", "--batch-mode", "compile"]).current_dir(folder().join("java")))?;
    let built = target().join("java");
    let path = format!("{0}/classes:{0}/lib/*", built.display());
    Ok(["java", "-cp", &path, "peers.Program"].map(OsString::from).into())
}

fn build_node() -> Result<Vec<OsString>, String> {
    let (from, to) = (folder().join("node"), target().join("node"));
    fs::create_dir_all(&to).map_err(|error| error.to_string())?;
    for file in ["package.json", "package-lock.json", "program.js"] {
        fs::copy(from.join(file), to.join(file)).map_err(|error| error.to_string())?;
    }
    run(Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(&to))?;
    Ok(vec!["node".into(), to.join("program.js").into()])
}

fn replace_folder(folder: &Path) -> Result<(), String> {
    remove(&[folder]);
    fs::create_dir_all(folder).map_err(|error| error.to_string())
}

fn remove(paths: &[&Path]) {
    for path in paths {
        // What cannot be removed is replaced by the next run.
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

/// Runs a command, for a limited time. Returns its output, or the first error that it printed.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().display().to_string();
    let mut limited = Command::new("timeout");
    limited.arg(BUILD_LIMIT).arg(command.get_program()).args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        limited.current_dir(folder);
    }
    let output = limited.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = format!("{}\n{text}", String::from_utf8_lossy(&output.stderr));
    let _ = fs::write(target().join("build-errors.log"), &errors);
    let mut lines = errors.lines().filter(|line| !line.trim().is_empty());
    let first = lines.clone().find(|line| line.to_lowercase().contains("error"));
    let line = first.or_else(|| lines.next()).unwrap_or("it printed nothing");
    Err(format!("{program} failed: {}", line.trim()))
}
