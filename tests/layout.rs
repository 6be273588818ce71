//! The layout of the sources, as CONTRIBUTING.md describes it, where no compiler sees it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// What is before an item of a file. Other items are indented.
const VISIBILITIES: [&str; 4] = ["", "pub ", "pub(crate) ", "pub(super) "];

/// A file, without comments and unit tests.
#[derive(Default)]
struct Source {
    /// The text without `use` lines.
    code: String,
    /// The names in scope, with their paths, and whether they are public. A hub names the items of
    /// its children again: that alone does not depend on them.
    imports: BTreeMap<String, (String, bool)>,
}

impl Source {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let text: String =
            lines.map(|line| line.split(" //").next().unwrap().to_owned() + "\n").collect();
        let mut source = Self::default();
        for part in text.split_inclusive(';') {
            let import = part.rsplit_once("use ");
            match import.and_then(|(before, tree)| Some((before.rsplit_once('\n')?, tree))) {
                Some(((before, visibility), tree)) if VISIBILITIES.contains(&visibility) => {
                    source.code += before;
                    source.add_imports(tree.trim_end_matches(';'), "", !visibility.is_empty());
                }
                _ => source.code += part,
            }
        }
        source
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        self.code.split(|it: char| !it.is_alphanumeric() && it != '_' && it != ':')
    }

    /// Adds each name that a `use` line brings into scope.
    fn add_imports(&mut self, tree: &str, prefix: &str, is_public: bool) {
        let tree = format!("{prefix}{tree}");
        if let Some((path, group)) = tree.split_once('{') {
            let mut depth = 0;
            let parts = group.strip_suffix('}').unwrap().split(|letter| {
                depth += i32::from(letter == '{') - i32::from(letter == '}');
                letter == ',' && depth == 0
            });
            parts.for_each(|part| self.add_imports(part.trim(), path, is_public));
        } else if tree != prefix {
            let (path, name) = tree.split_once(" as ").unwrap_or((&tree, ""));
            let path = path.trim_end_matches("::self").trim_end_matches("::*");
            let name = if name.is_empty() { path.rsplit("::").next().unwrap() } else { name };
            self.imports.insert(name.to_owned(), (path.to_owned(), is_public));
        }
    }
}

/// The files of a crate, without tests, by module, such as `store::memory`; `lib` is the crate.
#[derive(Default)]
struct Sources(BTreeMap<String, Source>);

impl Sources {
    /// Reads the inner crates, and then the crate that users have.
    fn of_all_crates() -> Vec<Self> {
        let inner = fs::read_dir("crates").unwrap().map(|folder| folder.unwrap().path());
        let read = |folder: PathBuf| {
            let mut sources = Self::default();
            sources.read(&folder.join("src"), "lib".to_owned());
            sources
        };
        inner.chain([".".into()]).map(read).collect()
    }

    /// Reads a file, and the files of the modules that it declares.
    fn read(&mut self, folder: &Path, module: String) {
        let source = Source::read(&folder.join(module.replace("::", "/")).with_extension("rs"));
        let mut is_test = false;
        for line in source.code.lines() {
            if let Some((visibility, name)) = line.trim_end_matches(';').split_once("mod ")
                && VISIBILITIES.contains(&visibility)
                && !(is_test || line.ends_with('{'))
            {
                self.read(folder, child(&module, name));
            }
            is_test = line.starts_with('#') && (is_test || line.contains("test"));
        }
        self.0.insert(module, source);
    }

    /// Returns each file with the files that define what it imports, or names by a path.
    fn edges(&self) -> BTreeSet<(String, String)> {
        let edges = self.0.iter().flat_map(|(module, source)| {
            let imports = source.imports.values().filter(|(_, is_public)| !is_public);
            let paths = source.words().filter(|word| word.contains("::"));
            let paths = imports.map(|(path, _)| &**path).chain(paths);
            paths.filter_map(|path| Some((module.clone(), self.definition(module, path)?)))
        });
        edges.filter(|(module, imported)| module != imported).collect()
    }

    /// Returns the file that defines an item of the crate, through all re-exports.
    fn definition(&self, from: &str, path: &str) -> Option<String> {
        let parts: Vec<_> = path.split("::").collect();
        let mut module = from.to_owned();
        for (index, part) in parts.iter().enumerate() {
            module = match *part {
                "crate" => "lib".to_owned(),
                "self" => module,
                "super" => module.rsplit_once("::").map_or("lib", |(parent, _)| parent).to_owned(),
                _ if self.0.contains_key(&child(&module, part)) => child(&module, part),
                _ if index == 0 => return None, // another crate, or an item of the file
                _ => {
                    let import = self.0[&module].imports.get(*part).filter(|_| module != from);
                    let Some((import, _)) = import else { break };
                    let path = [&[&**import], &parts[index + 1..]].concat().join("::");
                    return self.definition(&module, &path);
                }
            };
        }
        Some(module)
    }
}

fn child(module: &str, name: &str) -> String {
    if module == "lib" { name.to_owned() } else { format!("{module}::{name}") }
}

fn top_of(module: &str) -> &str {
    module.split("::").next().unwrap()
}

#[test]
fn no_files_or_top_modules_import_each_other_in_a_circle() {
    for sources in Sources::of_all_crates() {
        let files = sources.edges();
        assert!(files.len() > 100 || sources.0.len() < 100, "imports are not found");
        let tops = files.iter().map(|(from, to)| (top_of(from).to_owned(), top_of(to).to_owned()));
        let tops = tops.filter(|(from, to)| from != to && from != "lib").collect();
        for mut edges in [files, tops] {
            // Each round leaves out the ends of all paths that are in no circle.
            for _ in 0..edges.len() {
                let from: BTreeSet<_> = edges.iter().map(|(from, _)| from.clone()).collect();
                let to: BTreeSet<_> = edges.iter().map(|(_, to)| to.clone()).collect();
                edges.retain(|edge| to.contains(&edge.0) && from.contains(&edge.1));
            }
            assert!(edges.is_empty(), "these import each other in a circle: {edges:#?}");
        }
    }
}

#[test]
fn no_code_names_an_algorithm_or_above_the_stores_a_backend() {
    let backends = ["MemoryStore", "Redis", "AnyStore::Memory", "AnyStore::Dyn"];
    for (module, source) in Sources::of_all_crates().pop().unwrap().0 {
        let is_above = ["limiter", "middleware"].contains(&top_of(&module));
        for word in source.words() {
            let (of, name) = word.rsplit_once("::").unwrap_or(("", word));
            let is_type = of.ends_with("Algorithm") || of.ends_with("Params");
            let names = is_type && name.starts_with(char::is_uppercase);
            assert!(!names, "{module} names {word}: make it a method of `Model`");
            let names = is_above && backends.iter().any(|backend| word.contains(backend));
            assert!(!names, "{module} names {word}: call it by `StoreCalls`");
        }
    }
}

#[test]
fn functions_are_not_named_by_their_speed_and_types_of_a_top_module_have_different_names() {
    const WORDS: [&str; 5] = ["fast", "slow", "quick", "carefully", "packed"];
    for sources in Sources::of_all_crates() {
        let mut types = BTreeMap::new();
        for (module, source) in &sources.0 {
            for name in source.code.split("fn ").skip(1) {
                let name = name.split(['(', '<']).next().unwrap();
                let name = name.trim_start_matches("req_packed"); // of a trait of `redis`
                let known = name.split('_').find(|word| WORDS.contains(word));
                assert!(known.is_none(), "{module}: `{name}` has {known:?}: say what it does");
            }
            let is_optional = |item: &&str| item.lines().any(|line| line.starts_with("#[cfg("));
            let items = source.code.split("\n\n").filter(|item| !is_optional(item));
            for line in items.flat_map(str::lines) {
                let line = VISIBILITIES.iter().rev().find_map(|it| line.strip_prefix(it)).unwrap();
                let mut words = line.split([' ', '<', ';', '(', '{']);
                if ["struct", "enum", "trait", "type"].contains(&words.next().unwrap()) {
                    let other = types.insert((top_of(module), words.next()), module);
                    assert!(other.is_none(), "{module} and {other:?} have one: {line}");
                }
            }
        }
        assert!(types.len() > 1, "{types:?}");
    }
}
