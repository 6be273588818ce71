//! The layout of the sources, as CONTRIBUTING.md describes it: which file imports from which, by
//! the `use` lines and by the paths that the code spells out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Attribute, Expr, ImplItem, Item, Lit, Meta, MetaNameValue, Signature, TraitItem, UseTree,
    Visibility,
};

/// The path of a module, such as `store::memory`. That of the crate is `lib`.
type Module = String;

/// The path of an item as a `use` line spells it.
type ItemPath = Vec<String>;

struct Import {
    /// The name that it brings into scope.
    name: String,
    path: ItemPath,
    /// A hub names the items of its children again. That alone does not depend on them.
    is_reexport: bool,
}

/// What each file of a crate imports, without tests.
struct Sources {
    root: PathBuf,
    files: BTreeMap<Module, Vec<Import>>,
}

/// What imports what.
type Graph = BTreeMap<Module, BTreeSet<Module>>;

impl Sources {
    fn of_all_crates() -> Vec<Self> {
        let crates = fs::read_dir(root().join("crates")).unwrap();
        let inner = crates.map(|folder| Self::read(&folder.unwrap().path()));
        inner.chain([Self::of_root()]).collect()
    }

    /// Reads the files of the crate that users have.
    fn of_root() -> Self {
        Self::read(root())
    }

    fn read(folder: &Path) -> Self {
        let root = folder.join("src");
        let mut sources = BTreeMap::new();
        for path in rust_files(&root) {
            let module = module_of(path.strip_prefix(&root).unwrap());
            if module.split("::").all(|part| !["tests", "testing"].contains(&part)) {
                let text = fs::read_to_string(&path).unwrap();
                sources.insert(module, (imports_in(&text), paths_in(&text)));
            }
        }
        let modules: BTreeSet<_> = sources.keys().cloned().collect();
        let all = sources.into_iter().map(|(module, (mut imports, paths))| {
            let is_child = |name: &str| modules.contains(&child(&module, name));
            for mut path in paths {
                if is_child(&path[0]) {
                    path.insert(0, "self".to_owned());
                }
                imports.push(Import { name: String::new(), path, is_reexport: false });
            }
            (module, imports)
        });
        let files = all.collect();
        Self { root, files }
    }

    /// Returns the text of a file.
    fn text(&self, module: &str) -> String {
        let path = self.root.join(module.replace("::", "/")).with_extension("rs");
        fs::read_to_string(path).unwrap()
    }

    fn graph(&self) -> Graph {
        self.files.keys().map(|module| (module.clone(), self.imports(module))).collect()
    }

    /// Returns the files that define what a file imports.
    fn imports(&self, module: &str) -> BTreeSet<Module> {
        let imports = self.files[module].iter().filter(|import| !import.is_reexport);
        let found = imports.filter_map(|import| self.definition(module, &import.path));
        found.filter(|found| found != module).collect()
    }

    /// Returns the file that defines an item of the crate, through all re-exports.
    fn definition(&self, from: &str, path: &[String]) -> Option<Module> {
        let mut module = match path[0].as_str() {
            "crate" => "lib".to_owned(),
            "self" => from.to_owned(),
            "super" => parent(from),
            _ => return None, // another crate
        };
        for (index, part) in path.iter().enumerate().skip(1) {
            let child = child(&module, part);
            if part == "super" {
                module = parent(&module);
            } else if self.files.contains_key(&child) {
                module = child;
            } else {
                let mut imports = self.files[&module].iter().filter(|_| module != from);
                let Some(import) = imports.find(|import| import.name == *part) else { break };
                let path = [&*import.path, &path[index + 1..]].concat();
                return self.definition(&module, &path);
            }
        }
        Some(module)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The module of a crate that contains a module.
fn top_of(module: &str) -> &str {
    module.split("::").next().unwrap()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => rust_files(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

fn module_of(path: &Path) -> Module {
    let path = path.with_extension("");
    path.iter().map(|part| part.to_str().unwrap()).collect::<Vec<_>>().join("::")
}

fn parent(module: &str) -> Module {
    module.rsplit_once("::").map_or("lib", |(parent, _)| parent).to_owned()
}

fn child(module: &str, name: &str) -> Module {
    if module == "lib" { name.to_owned() } else { format!("{module}::{name}") }
}

/// Returns the paths of modules outside of comments, of the `use` lines of the file, and of its
/// unit tests.
fn paths_in(text: &str) -> Vec<ItemPath> {
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    let (mut paths, mut in_use) = (vec![], false);
    for line in code.lines() {
        let line = line.split("//").next().unwrap();
        in_use |= line.starts_with("use ") || line.starts_with("pub") && line.contains(" use ");
        if !in_use {
            let words = line.split(|it: char| !it.is_alphanumeric() && it != '_' && it != ':');
            let words = words.filter(|word| word.contains("::") && !word.starts_with(':'));
            let parts = words.map(|word| word.split("::").map(String::from).collect::<Vec<_>>());
            paths.extend(parts.map(|mut parts| {
                parts.retain(|part| !part.is_empty());
                parts
            }));
        }
        in_use &= !line.contains(';');
    }
    paths.retain(|path| path.len() > 1);
    paths
}

fn imports_in(text: &str) -> Vec<Import> {
    let mut imports = vec![];
    for item in syn::parse_file(text).unwrap().items {
        if let Item::Use(item) = item {
            let is_reexport = !matches!(item.vis, Visibility::Inherited);
            let mut add =
                |name: String, path: ItemPath| imports.push(Import { name, path, is_reexport });
            flatten(&item.tree, &mut vec![], &mut add);
        }
    }
    imports
}

/// Calls `add` for each name that a `use` line brings into scope.
fn flatten(tree: &UseTree, path: &mut ItemPath, add: &mut impl FnMut(String, ItemPath)) {
    let full = |path: &ItemPath, item: String| [&**path, &[item]].concat();
    match tree {
        UseTree::Path(part) => {
            path.push(part.ident.to_string());
            flatten(&part.tree, path, add);
            path.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, path, add)),
        UseTree::Name(name) if name.ident == "self" => {
            add(path[path.len() - 1].clone(), path.clone())
        }
        UseTree::Name(name) => add(name.ident.to_string(), full(path, name.ident.to_string())),
        UseTree::Rename(name) => add(name.rename.to_string(), full(path, name.ident.to_string())),
        UseTree::Glob(_) => add("*".to_owned(), path.clone()),
    }
}

/// What is true of one algorithm is a method of its model.
#[test]
fn no_code_outside_of_the_engine_names_an_algorithm() {
    let sources = Sources::of_root();
    for module in sources.files.keys() {
        for path in paths_in(&sources.text(module)) {
            let [kind, name] = path.last_chunk().unwrap();
            let is_variant = name.starts_with(char::is_uppercase);
            let names = ["Algorithm", "Params"].contains(&&**kind) && is_variant;
            assert!(!names, "{module} names {kind}::{name}: make it a method of `Model`");
        }
    }
}

/// A store decides behind one trait: what a limiter asks of it is true of every backend.
#[test]
fn no_code_above_the_stores_names_a_backend() {
    let sources = Sources::of_root();
    let is_above = |module: &str| {
        ["limiter", "middleware"].iter().any(|it| module.split("::").next() == Some(it))
    };
    let is_test = |module: &str| {
        let (parent, name) = module.rsplit_once("::").unwrap_or(("lib", module));
        sources.text(parent).contains(&format!("#[cfg(test)]\nmod {name};"))
    };
    for module in sources.files.keys().filter(|module| is_above(module) && !is_test(module)) {
        let text = sources.text(module);
        let names = backends_in(&text);
        assert!(names.is_empty(), "{module} names {names:?}: ask the trait `Store` of any backend");
    }
}

/// Returns the names of backends outside of comments and of the unit tests of the file.
fn backends_in(text: &str) -> Vec<&str> {
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    let code = code.lines().map(|line| line.split("//").next().unwrap());
    let words = code.flat_map(|line| line.split(|it: char| !it.is_alphanumeric() && it != ':'));
    let names = ["MemoryStore", "Redis", "AnyStore::Memory", "AnyStore::Dyn"];
    let is_backend = |word: &&str| names.iter().any(|name| word.contains(name));
    words.filter(is_backend).collect()
}

#[test]
fn no_files_or_top_modules_import_each_other_in_a_circle() {
    for sources in Sources::of_all_crates() {
        let files = sources.graph();
        let mut tops = Graph::new();
        for (module, imports) in files.iter().filter(|(module, _)| *module != "lib") {
            let top = tops.entry(top_of(module).to_owned()).or_default();
            top.extend(
                imports.iter().map(|it| top_of(it).to_owned()).filter(|it| it != top_of(module)),
            );
        }
        for graph in [files, tops] {
            let mut finished = BTreeSet::new();
            graph.keys().for_each(|module| visit(&graph, module, &mut vec![], &mut finished));
        }
    }
}

/// Follows the imports of a module. `path` leads to it, and no circle goes through those
/// `finished`.
fn visit(graph: &Graph, module: &Module, path: &mut Vec<Module>, finished: &mut BTreeSet<Module>) {
    if let Some(start) = path.iter().position(|known| known == module) {
        panic!("these import each other in a circle: {:?}", &path[start..]);
    }
    if finished.contains(module) {
        return;
    }
    path.push(module.clone());
    for import in graph.get(module).into_iter().flatten() {
        visit(graph, import, path, finished);
    }
    path.pop();
    finished.insert(module.clone());
}

/// A panic about an argument names the line of the caller, and its documentation has a section.
#[test]
fn public_functions_that_panic_at_their_callers_document_it() {
    let mut found = 0;
    let sources = Sources::of_all_crates();
    let files = sources.iter().flat_map(|all| all.files.keys().map(move |module| (all, module)));
    for (sources, module) in files {
        for item in syn::parse_file(&sources.text(module)).unwrap().items {
            let functions = match item {
                Item::Fn(item) => vec![(item.vis, item.sig, item.attrs)],
                Item::Impl(item) => item.items.into_iter().filter_map(function).collect(),
                _ => vec![],
            };
            for (visibility, signature, attributes) in functions {
                let has = |name: &str| attributes.iter().any(|it| it.path().is_ident(name));
                if matches!(visibility, Visibility::Public(_)) && has("track_caller") {
                    let name = signature.ident;
                    let documented =
                        attributes.iter().any(|it| doc(it) == Some(" # Panics".into()));
                    assert!(documented, "{module}: `{name}` has no section `# Panics`");
                    found += 1;
                }
            }
        }
    }
    assert!(found > 20, "{found}");
}

/// A name says what a function does. How fast it is, or how it is stored, changes.
#[test]
fn no_function_is_named_by_its_speed_or_its_care() {
    const WORDS: [&str; 5] = ["fast", "slow", "quick", "carefully", "packed"];
    let mut found = 0;
    for sources in Sources::of_all_crates() {
        for module in sources.files.keys() {
            for name in function_names(syn::parse_file(&sources.text(module)).unwrap().items) {
                let known = name.split('_').find(|word| WORDS.contains(word));
                assert!(known.is_none(), "{module}: `{name}` has {known:?}: say what it does");
                found += 1;
            }
        }
    }
    assert!(found > 1_000, "{found}");
}

/// Returns the names of functions, except those that a trait of another crate may have named.
fn function_names(items: Vec<Item>) -> Vec<String> {
    let name = |signature: Signature| signature.ident.to_string();
    let names = items.into_iter().flat_map(|item| match item {
        Item::Fn(item) => vec![name(item.sig)],
        Item::Impl(item) if item.trait_.is_none() => {
            let functions = item.items.into_iter().filter_map(function);
            functions.map(|(_, signature, _)| name(signature)).collect()
        }
        Item::Trait(item) => {
            let functions = item.items.into_iter().filter_map(|item| match item {
                TraitItem::Fn(item) => Some(name(item.sig)),
                _ => None,
            });
            functions.collect()
        }
        Item::Mod(item) => function_names(item.content.map_or(vec![], |(_, items)| items)),
        _ => vec![],
    });
    names.collect()
}

fn function(item: ImplItem) -> Option<(Visibility, Signature, Vec<Attribute>)> {
    match item {
        ImplItem::Fn(item) => Some((item.vis, item.sig, item.attrs)),
        _ => None,
    }
}

/// Returns the text of a line of documentation.
fn doc(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(MetaNameValue { path, value: Expr::Lit(value), .. }) = &attribute.meta
    else {
        return None;
    };
    match &value.lit {
        Lit::Str(text) if path.is_ident("doc") => Some(text.value()),
        _ => None,
    }
}

#[test]
fn no_two_types_of_a_top_module_have_one_name() {
    for sources in Sources::of_all_crates() {
        let mut known: BTreeMap<(String, String), Module> = BTreeMap::new();
        for module in sources.files.keys() {
            for item in syn::parse_file(&sources.text(module)).unwrap().items {
                let (name, attributes) = match item {
                    Item::Struct(item) => (item.ident, item.attrs),
                    Item::Enum(item) => (item.ident, item.attrs),
                    Item::Trait(item) => (item.ident, item.attrs),
                    Item::Type(item) => (item.ident, item.attrs),
                    _ => continue,
                };
                // Two forms of one type are for different features.
                if attributes.iter().any(|it| it.path().is_ident("cfg")) {
                    continue;
                }
                let place = (top_of(module).to_owned(), name.to_string());
                let other = known.insert(place, module.clone());
                assert!(other.is_none(), "{module} and {other:?} have a type {name}");
            }
        }
    }
}
