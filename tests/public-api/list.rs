//! Compares `tests/public-api.txt` with the public items of the crate. `make public-api` writes the
//! file.
//!
//! Each compiler writes the JSON of rustdoc in a form of its own. It is that of the oldest Rust
//! version here, which `make lint` needs too, whatever compiler runs the tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use public_api::{Builder, PublicApi, PublicItem};

const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// At most so many of each, as the head of the list counts them. Fewer are better: a type belongs
/// to the crate if users name it, or match on it.
const LIMITS: [(&str, usize); 7] = [
    ("public types and traits", 61),
    ("public types and traits at the root", 15),
    ("methods of Limiter", 21),
    ("methods of Charge", 14),
    ("methods of RateLimitLayer", 26),
    ("lines that name the crate `redis`, without the feature `redis-1`", 0),
    (WITHOUT_EXAMPLE, 0),
];

/// The internal crates, some of whose items the crate exports as its own.
const INNER_CRATES: [&str; 3] =
    ["tower-ratelimit-connections", "tower-ratelimit-engine", "tower-ratelimit-redisson"];

const WITHOUT_EXAMPLE: &str = "public functions, types and traits without an example";

/// The only feature whose items may name the crate `redis`.
const REDIS_FEATURE: &str = "redis-1";

/// The form of the JSON that `public-api` reads, in the version that Cargo.toml names.
const FORM: u64 = 45;

const HEAD: &str = "\
# The public items of the crate, with all features. `make public-api` writes this file.
#
# `::name` is another crate. Its paths and those of the standard library are short. The methods of a
# trait are listed once, with the trait. Implementations of auto traits and for all types are not.
#
";

/// A line of the list, in its order: by path, and the implementations of a type after the type.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    path: String,
    is_impl: bool,
    text: String,
    /// The same for all paths of an item.
    id: u32,
    has_example: bool,
}

fn root() -> PathBuf {
    Path::new(FOLDER).join("../..")
}

/// Returns the oldest Rust version and the features by the manifest of the crate.
fn manifest() -> (String, Vec<String>) {
    let text = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let rust = text.split("\nrust-version = \"").nth(1).unwrap().split('"').next().unwrap();
    let features = text.split("\n[features]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let features = features.lines().filter_map(|line| line.split_once(" = [")).map(|it| it.0);
    (rust.to_owned(), features.map(String::from).collect())
}

/// A public item as its line in full, with its id and that of its parent.
struct Item {
    full: String,
    id: u32,
    parent_id: Option<u32>,
    has_example: bool,
}

/// Reads the public items with some features, as Rust `version` documents them; items of internal
/// crates where they are exported.
fn public_items(version: &str, features: &[String]) -> Vec<Item> {
    let features = ["--no-default-features", "--features", &features.join(",")];
    let mut items = items_of("tower-ratelimit", version, &features, 0);
    for (package, number) in INNER_CRATES.into_iter().zip(1..) {
        let inner = items_of(package, version, &["--all-features"], number << 24);
        let name = package.replace('-', "_");
        let types: BTreeSet<_> = inner.iter().filter_map(|it| type_of(&it.full, &name)).collect();
        let exports = items.iter().filter_map(|item| item.full.strip_prefix("pub use "));
        let exports = exports.map(|path| (path.rsplit("::").next().unwrap(), path));
        let exports = exports.filter(|(own, _)| types.contains(own));
        let exports: BTreeMap<_, _> =
            exports.map(|(own, path)| (own.to_owned(), path.to_owned())).collect();
        let is_export = |full: &str| {
            full.strip_prefix("pub use ").is_some_and(|path| exports.values().any(|it| it == path))
        };
        items.retain(|item| !is_export(&item.full));
        let is_exported =
            |item: &Item| type_of(&item.full, &name).is_some_and(|own| exports.contains_key(own));
        items.extend(inner.into_iter().filter(is_exported));
        items.iter_mut().for_each(|item| item.full = exported(&item.full, &name, &exports));
    }
    items
}

/// Returns the type of a crate that a line in full is about.
fn type_of<'a>(full: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = full.split_once(name)?;
    let mut parts = rest.split(|it: char| !it.is_alphanumeric() && it != '_');
    parts.find(|part| starts_uppercase(part))
}

/// Replaces the paths of an internal crate by those under which its types are exported.
fn exported(full: &str, name: &str, exports: &BTreeMap<String, String>) -> String {
    let is_part = |it: char| it.is_alphanumeric() || it == '_' || it == ':';
    let mut text = String::new();
    for word in full.split_inclusive(|it| !is_part(it)) {
        let (word, end) = word.split_at(word.find(|it| !is_part(it)).unwrap_or(word.len()));
        let own = word.strip_prefix(name).and_then(|rest| {
            rest.split("::").enumerate().find_map(|(at, part)| Some((at, exports.get(part)?)))
        });
        text += &match own {
            Some((at, path)) => {
                let rest = word.split("::").skip(at + 1).map(|part| format!("::{part}"));
                path.clone() + &rest.collect::<String>()
            }
            None => word.to_owned(),
        };
        text += end;
    }
    text
}

fn items_of(package: &str, version: &str, features: &[&str], first_id: u32) -> Vec<Item> {
    let (items, with_example) = public_api(package, version, features);
    let item = |item: &PublicItem| Item {
        full: item.to_string(),
        id: first_id + item.id().0,
        parent_id: item.parent_id().map(|id| first_id + id.0),
        has_example: with_example.contains(&item.id().0),
    };
    items.items().map(item).collect()
}

/// Reads what rustdoc says of a package, and the ids of the items whose docs have an example.
fn public_api(package: &str, version: &str, features: &[&str]) -> (PublicApi, BTreeSet<u32>) {
    let target = root().join("target/msrv");
    let path = target.join(format!("doc/{}.json", package.replace('-', "_")));
    // That of other features has the same path.
    _ = fs::remove_file(&path);
    let output = Command::new("rustup")
        .args(["run", version, "cargo", "rustdoc", "-p", package, "--lib"])
        .args(features)
        .arg("--target-dir")
        .arg(&target)
        .args(["--", "-Z", "unstable-options", "--output-format", "json"])
        .env("RUSTDOC", Path::new(FOLDER).join("rustdoc"))
        .env_remove("RUSTDOCFLAGS")
        .current_dir(root())
        .output();
    let error = match output {
        Ok(output) if output.status.success() => String::new(),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => format!("rustup: {error}"),
    };
    let hint = format!("if it is missing, run: rustup toolchain install {version}");
    assert!(error.is_empty(), "Rust {version} does not list the public items; {hint}\n{error}");

    let text = fs::read_to_string(&path).unwrap();
    let form = text.rsplit("\"format_version\":").next().unwrap().trim_end_matches('}');
    let hint = "use the version of the crate `public-api` that reads it, and its number as `FORM`";
    assert_eq!(form, FORM.to_string(), "Rust {version} writes another form of JSON; {hint}");
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let items = json["index"].as_object().unwrap().iter();
    let with_example =
        items.filter(|(_, item)| item["docs"].as_str().is_some_and(|docs| docs.contains("```")));
    let with_example = with_example.map(|(id, _)| id.parse().unwrap());
    let items = Builder::from_rustdoc_json(path).omit_blanket_impls(true);
    (items.omit_auto_trait_impls(true).build().unwrap(), with_example.collect())
}

fn lines(items: &[Item]) -> BTreeSet<Line> {
    let is_trait_impl = |text: &str| text.starts_with("impl") && text.contains(" for ");
    let trait_impls = items.iter().filter(|item| is_trait_impl(&item.full));
    let trait_impls: BTreeSet<_> = trait_impls.map(|item| item.id).collect();
    let line = |item: &Item| {
        let (path, text) = (path(&item.full), short(&item.full));
        let is_impl = text.starts_with("impl");
        let is_of_trait = item.parent_id.is_some_and(|id| trait_impls.contains(&id));
        let is_left_out = is_impl && !is_trait_impl(&text)
            || ["StructuralPartialEq for ", "Unpin for "].iter().any(|it| text.contains(it))
            || is_of_trait && text.contains(" fn ")
            || text.starts_with("pub mod guide");
        let line = Line { path, is_impl, text, id: item.id, has_example: item.has_example };
        (!is_left_out && !line.path.is_empty()).then_some(line)
    };
    items.iter().filter_map(line).collect()
}

/// Shortens the paths of a line, which are full.
fn short(line: &str) -> String {
    let mut text = String::new();
    let is_part = |it: char| it.is_alphanumeric() || it == '_' || it == ':';
    // `public-api` leaves `: ` out of bounds such as `Body<Error: Into<E>>`.
    let line = line.replace("Errorcore::", "Error: core::");
    let mut rest = &*line;
    while let Some(start) = rest.find(is_part) {
        let (between, word) = rest.split_at(start);
        let (word, after) = word.split_at(word.find(|it| !is_part(it)).unwrap_or(word.len()));
        text.push_str(between);
        let parts: Vec<_> = word.split("::").collect();
        text.push_str(&match *parts {
            ["tower_ratelimit"] => String::new(),
            ["tower_ratelimit", ..] => parts[1..].join("::"),
            [.., module, name @ ("Error" | "Result")]
                if ["alloc", "core", "std"].contains(&parts[0]) && module != "result" =>
            {
                format!("{module}::{name}")
            }
            ["alloc" | "core" | "std", .., name] => name.to_owned(),
            [name, .., last] if name.starts_with(char::is_lowercase) => format!("::{name}::{last}"),
            _ => word.to_owned(),
        });
        rest = after;
    }
    text + rest
}

/// Returns the path that a line is listed by, of the full line: that of its item, of the type that
/// implements a trait, or of the trait if the type is not of the crate.
fn path(line: &str) -> String {
    let mut depth = 0;
    let mut plain = String::new();
    for it in line.split('(').next().unwrap().chars() {
        match it {
            '<' => depth += 1,
            '>' => depth -= 1,
            _ if depth == 0 => plain.push(it),
            _ => {}
        }
    }
    let head = plain.split(" where ").next().unwrap();
    let mut own = head.split(' ').filter_map(|word| word.strip_prefix("tower_ratelimit::"));
    let path = if line.starts_with("impl") { own.next_back() } else { own.next() };
    path.unwrap_or_default().trim_end_matches(':').to_owned()
}

fn is_type(line: &&Line) -> bool {
    const KINDS: [&str; 4] = ["pub struct ", "pub enum ", "pub trait ", "pub type "];
    let text = line.text.trim_start_matches("#[non_exhaustive] ");
    // Types of a trait have a path such as `Type::Output`.
    let of_type = line.path.rsplit("::").nth(1).is_some_and(starts_uppercase);
    KINDS.iter().any(|kind| text.starts_with(kind)) && !of_type
}

/// Returns the paths of functions, types and traits without an example in their docs.
fn without_example(all: &BTreeSet<Line>) -> BTreeSet<&str> {
    let items = all.iter().filter(|line| !line.has_example);
    let items = items.filter(|line| is_type(line) || line.text.contains(" fn "));
    items.map(|line| &*line.path).collect()
}

/// Returns what the head of the list counts, in the order of `LIMITS`. Methods of one name are one.
fn counts(all: &BTreeSet<Line>, without_redis: &BTreeSet<Line>) -> [usize; LIMITS.len()] {
    let types = || all.iter().filter(is_type);
    let methods = |name: &str| {
        let methods = all.iter().filter(|it| it.path.starts_with(name) && it.text.contains(" fn "));
        methods.map(|line| &line.path).collect::<BTreeSet<_>>().len()
    };
    let is_redis = |it: &&Line| {
        other_crates(&it.text).any(|name| name == "redis") || it.text == "pub use redis"
    };
    [
        types().map(|line| line.id).collect::<BTreeSet<_>>().len(),
        types().filter(|line| !line.path.contains("::")).count(),
        methods("Limiter::"),
        methods("Charge::"),
        methods("RateLimitLayer::"),
        without_redis.iter().filter(is_redis).count(),
        without_example(all).len(),
    ]
}

/// Returns the text of the list.
fn list() -> String {
    let (version, features) = manifest();
    let others: Vec<_> = features.iter().filter(|it| *it != REDIS_FEATURE).cloned().collect();
    let without_redis = lines(&public_items(&version, &others));
    let all = lines(&public_items(&version, &features));
    // For the one who adds an item.
    println!("without an example: {:?}", without_example(&all));
    let mut text = HEAD.to_owned();
    for (count, (name, limit)) in counts(&all, &without_redis).iter().zip(LIMITS) {
        text += &format!("# {count} {name}, of at most {limit}\n");
    }
    let crates: BTreeSet<_> = all.iter().flat_map(|line| other_crates(&line.text)).collect();
    text += &format!("# Other crates: {}\n", Vec::from_iter(crates).join(", "));
    let texts = |lines: &BTreeSet<Line>| lines.iter().map(|it| it.text.clone()).collect::<Vec<_>>();
    let known = texts(&without_redis);
    let added: Vec<_> = texts(&all).into_iter().filter(|line| !known.contains(line)).collect();
    text += &format!("\n{}\n", known.join("\n"));
    if !added.is_empty() {
        text += &format!("\n# With the feature `{REDIS_FEATURE}`:\n\n{}\n", added.join("\n"));
    }
    text
}

fn starts_uppercase(name: &str) -> bool {
    name.starts_with(char::is_uppercase)
}

/// Returns the names of the crates in a line of the list.
fn other_crates(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|it: char| !it.is_alphanumeric() && it != '_' && it != ':');
    let paths = words.filter_map(|word| word.strip_prefix("::")?.split_once("::"));
    paths.map(|(name, _)| name)
}

/// Returns the lines that only one of two texts has.
fn difference(old: &str, new: &str) -> String {
    let only = |sign, text: &str, other: &str| {
        let others: BTreeSet<_> = other.lines().collect();
        let lines = text.lines().filter(|line| !others.contains(line));
        lines.map(|line| format!("{sign} {line}\n")).collect::<String>()
    };
    only('-', old, new) + &only('+', new, old)
}

#[test]
fn the_list_has_the_public_items() {
    let file = Path::new(FOLDER).with_extension("txt");
    let new = list();
    if env::var_os("WRITE_LIST").is_some() {
        fs::write(file, new).unwrap();
        return;
    }
    let old = fs::read_to_string(file).unwrap_or_default();
    let hint = "run `make public-api` if it should";
    assert!(old == new, "the public API changes; {hint}:\n{}", difference(&old, &new));
}

#[test]
fn the_public_items_are_few() {
    let text = listed();
    for (name, limit) in LIMITS {
        let end = format!(" {name}, of at most {limit}");
        let count = text.lines().find_map(|line| line.strip_prefix("# ")?.strip_suffix(&end));
        let count = count.unwrap_or_else(|| panic!("{end:?} is missing; run `make public-api`"));
        assert!(count.parse::<usize>().unwrap() <= limit, "{count} {name}, of at most {limit}");
    }
}

fn listed() -> String {
    fs::read_to_string(Path::new(FOLDER).with_extension("txt")).unwrap()
}

/// A user depends on this crate alone: what it exports must have its path.
#[test]
fn no_public_item_names_an_internal_crate() {
    let text = listed();
    for name in INNER_CRATES.map(|package| package.replace('-', "_")) {
        assert!(!text.contains(&name), "export what the public items name of {name}");
    }
}

/// Enums that have all of their variants, for a match without a wildcard.
const COMPLETE: [&str; 1] = ["Admission<G>"];

/// What a later version adds must not break users.
#[test]
fn public_enums_and_variants_with_fields_can_get_more() {
    let text = listed();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("pub enum ") {
            assert!(COMPLETE.contains(&name), "{name} is not `#[non_exhaustive]`");
        }
        // A field of a variant: `pub Error::NoRate::limiter: Cow`.
        let field = line.strip_prefix("pub ").and_then(|line| line.split_once(": "));
        let path = field.map(|(path, _)| path.split("::").collect::<Vec<_>>());
        if let Some([.., kind, variant, _]) = path.as_deref()
            && [kind, variant].iter().all(|name| name.starts_with(char::is_uppercase))
        {
            let (variant, _) = field.unwrap().0.rsplit_once("::").unwrap();
            let line = format!("#[non_exhaustive] pub {variant}");
            let is_open = text.lines().any(|other| other == line);
            assert!(is_open, "{variant} is not `#[non_exhaustive]`");
        }
    }
}

/// `tests/contract/traits.rs` says which traits a type implements.
#[test]
fn each_public_type_has_a_row_in_the_table_of_traits() {
    let traits = fs::read_to_string(root().join("tests/contract/traits.rs")).unwrap();
    let (_, rows) = traits.split_once("\nimplements! {").unwrap();
    let (rows, _) = rows.split_once("\n#[tokio::test]").unwrap();
    let words: BTreeSet<_> = rows.split(|c: char| !c.is_alphanumeric()).collect();
    for line in listed().lines() {
        let item = line.split_once("pub struct ").or_else(|| line.split_once("pub enum "));
        let Some((_, path)) = item else { continue };
        let name = path.split(['<', '(']).next().unwrap().rsplit("::").next().unwrap();
        assert!(words.contains(name), "{path} has no row");
    }
}

/// With `use tower_ratelimit::*`, a module would hide a crate of its name.
#[test]
fn no_public_module_has_the_name_of_a_crate_that_users_of_this_one_have() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let dependencies = manifest.split_once("\n[dependencies]\n").unwrap().1;
    let crates = dependencies.lines().filter_map(|line| line.split_once(" = ")).map(|it| it.0);
    let crates: BTreeSet<_> = crates.collect();
    assert!(crates.contains("http"));
    let text = listed();
    let modules = text.lines().filter_map(|line| line.strip_prefix("pub mod "));
    let modules: Vec<_> = modules.collect();
    assert!(modules.contains(&"layer"), "{modules:?}");
    assert!(!modules.iter().any(|name| crates.contains(name)), "{modules:?}");
}

#[test]
fn paths_are_short_unless_they_would_mean_another_item() {
    for (long, expected) in [
        (
            "pub fn tower_ratelimit::Limiter::name(&self) -> &str",
            "pub fn Limiter::name(&self) -> &str",
        ),
        ("-> core::result::Result<(), core::fmt::Error>", "-> Result<(), fmt::Error>"),
        ("(core::time::Duration, redis::aio::Line)", "(Duration, ::redis::Line)"),
        ("pub tower_ratelimit::E::V::at: http::uri::Uri", "pub E::V::at: ::http::Uri"),
        ("<S as tower_service::Service<R>>::Error", "<S as ::tower_service::Service<R>>::Error"),
    ] {
        assert_eq!(short(long), expected);
    }
}

#[test]
fn lines_are_in_the_order_of_paths() {
    for (line, expected) in [
        ("pub const fn tower_ratelimit::Key<'k>::new(&self) -> tower_ratelimit::X", "Key::new"),
        ("#[non_exhaustive] pub enum tower_ratelimit::http::Headers", "http::Headers"),
        ("pub tower_ratelimit::Tokens::input: tower_ratelimit::X", "Tokens::input"),
        ("impl<S: Clone> From<S> for tower_ratelimit::A<S> where S: tower_ratelimit::B", "A"),
        ("impl tower_ratelimit::Store for tower_ratelimit::MemoryStore", "MemoryStore"),
        ("impl tower_ratelimit::IntoKey for &'static str", "IntoKey"),
    ] {
        assert_eq!(path(line), expected);
    }
}
