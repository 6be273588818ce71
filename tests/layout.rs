//! The layout of the sources, as CONTRIBUTING.md describes it: which file imports from which, by
//! the `use` lines and by the paths that the code spells out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Attribute, ImplItem, Item, ItemImpl, Path as TypePath, TraitItem, UseTree, Visibility,
    visit::{self, Visit},
};

/// The storeys from the top down, by the first part of a module path. A file imports from its own
/// storey, and from those below it.
const STOREYS: [&[&str]; 7] = [
    &["lib", "guide"],
    &["middleware", "config", "redisson"],
    &["limiter"],
    &["store"],
    &["observe"],
    &["decision", "algorithm"],
    &["quota", "keys", "error", "time", "sync"],
];

/// The items that users name first. All others are in the public modules.
const ROOT: [&str; 14] = [
    "Algorithm",
    "Charge",
    "Decision",
    "Error",
    "FailurePolicy",
    "Key",
    "Limiter",
    "MemoryStore",
    "Permit",
    "Quota",
    "RateLimitLayer",
    "RedisStore",
    "Reservation",
    "key",
];

const PUBLIC_MODULES: [&str; 7] =
    ["config", "guide", "http", "layer", "observe", "redisson", "store"];

/// The path of a module, such as `store::memory`. That of the crate is `lib`.
type Module = String;

/// The path of an item as a `use` line spells it.
type ItemPath = Vec<String>;

/// The public types and traits, each at the place where users find it. Fewer are better: a type
/// belongs here if users name it, or match on it. With the features of the default there are
/// 57, because twelve are of `metrics`, `redis`, `redisson` and `serde`.
const PUBLIC_TYPES: [(&str, &[&str]); 8] = [
    ("config", &["ConfigError", "Limit", "Limiters", "Limits", "QuotaError", "Refill"]),
    (
        "http",
        &[
            "Headers",
            "Meter",
            "MissingKey",
            "Rejection",
            "RejectionBody",
            "RequestError",
            "ResponseBody",
            "Settle",
            "TokenMeter",
            "Tokens",
            "Usage",
            "VendorState",
        ],
    ),
    (
        "key",
        &[
            "ClientIp",
            "Global",
            "IntoKey",
            "Key",
            "KeyExtractor",
            "Or",
            "PeerIp",
            "ProxyHeader",
            "Route",
            "Value",
        ],
    ),
    ("layer", &["Custom", "Http", "RateLimit", "ResponseFuture", "Rule"]),
    (
        "lib",
        &[
            "Algorithm",
            "Charge",
            "Decision",
            "Error",
            "FailurePolicy",
            "Key",
            "Limiter",
            "MemoryStore",
            "Permit",
            "Quota",
            "RateLimitLayer",
            "RedisStore",
            "Reservation",
        ],
    ),
    (
        "observe",
        &[
            "DeniedKey",
            "Event",
            "KeyChange",
            "Metrics",
            "Observer",
            "Operation",
            "Reason",
            "TopDenied",
        ],
    ),
    ("redisson", &["RateLimiter", "RateLimiterConfig", "RateType"]),
    (
        "store",
        &[
            "AnyStore",
            "Credentials",
            "CredentialsProvider",
            "ErrorKind",
            "Health",
            "KeyScan",
            "KeyState",
            "MemoryStore",
            "RedisConfig",
            "RedisStore",
            "Source",
            "Status",
            "Store",
            "StoreError",
            "WhenFull",
        ],
    ),
];

struct Import {
    /// The name that it brings into scope.
    name: String,
    path: ItemPath,
    /// A hub names the items of its children again. That alone does not depend on them.
    is_reexport: bool,
}

/// What each file imports, without tests.
struct Sources(BTreeMap<Module, Vec<Import>>);

impl Sources {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut sources = BTreeMap::new();
        for path in rust_files(&root) {
            let module = module_of(path.strip_prefix(&root).unwrap());
            if module.split("::").all(|part| part != "tests") {
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
        Self(all.collect())
    }

    /// Returns the files that define what a file imports.
    fn imports(&self, module: &str) -> BTreeSet<Module> {
        let imports = self.0[module].iter().filter(|import| !import.is_reexport);
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
            } else if self.0.contains_key(&child) {
                module = child;
            } else {
                let mut imports = self.0[&module].iter().filter(|_| module != from);
                let Some(import) = imports.find(|import| import.name == *part) else { break };
                let path = [&*import.path, &path[index + 1..]].concat();
                return self.definition(&module, &path);
            }
        }
        Some(module)
    }
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

fn storey(module: &str) -> usize {
    let first = module.split("::").next().unwrap();
    let found = STOREYS.iter().position(|storey| storey.contains(&first));
    found.unwrap_or_else(|| panic!("{module} is in no storey: add it to STOREYS"))
}

#[test]
fn the_root_has_fourteen_items_and_public_modules() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/lib.rs")).unwrap();
    let public = imports_in(&text).into_iter().filter(|import| import.is_reexport);
    let names = public.map(|import| import.name);
    assert_eq!(names.collect::<BTreeSet<_>>(), ROOT.map(String::from).into());
    let modules = syn::parse_file(&text).unwrap().items.into_iter().filter_map(|item| match item {
        Item::Mod(module) if !matches!(module.vis, Visibility::Inherited) => {
            Some(module.ident.to_string())
        }
        _ => None,
    });
    assert_eq!(modules.collect::<BTreeSet<_>>(), PUBLIC_MODULES.map(String::from).into());
}

/// Returns the names of public types and traits that a list of items defines or re-exports.
fn public_types(items: &[Item]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for item in items {
        let (visibility, name) = match item {
            Item::Struct(item) => (&item.vis, &item.ident),
            Item::Enum(item) => (&item.vis, &item.ident),
            Item::Trait(item) => (&item.vis, &item.ident),
            Item::Type(item) => (&item.vis, &item.ident),
            Item::Use(item) if matches!(item.vis, Visibility::Public(_)) => {
                flatten(&item.tree, &mut vec![], &mut |name, _| _ = names.insert(name));
                continue;
            }
            _ => continue,
        };
        if matches!(visibility, Visibility::Public(_)) {
            names.insert(name.to_string());
        }
    }
    names.retain(|name| name.starts_with(char::is_uppercase));
    names
}

/// What users find where. Types that no public module names, such as that of a closure or those
/// behind `#[doc(hidden)]`, do not count.
#[test]
fn the_public_types_are_those_that_are_listed() {
    let items = |module: &str| syn::parse_file(&source(module)).unwrap().items;
    let inline = |wanted: &str| {
        let mut modules = items("lib").into_iter().filter_map(|item| match item {
            Item::Mod(module) if module.ident == wanted => module.content,
            _ => None,
        });
        modules.next().unwrap().1
    };
    let mut all = BTreeSet::new();
    for (module, listed) in PUBLIC_TYPES {
        let found = public_types(&match module {
            "http" | "layer" => inline(module),
            "key" => items("middleware::extractor"),
            _ => items(module),
        });
        assert_eq!(found, listed.iter().map(|name| name.to_string()).collect(), "in {module}");
        all.extend(found);
    }
    assert_eq!(all.len(), 69);
}

/// Collects the names of the types in a part of an item, and those of a crate among them.
#[derive(Default)]
struct TypeNames<'a> {
    /// The names of items of the crate that the file has imported, and the aliases of others.
    foreign: BTreeSet<&'a str>,
    all: BTreeSet<String>,
    found: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for TypeNames<'_> {
    fn visit_path(&mut self, path: &'ast TypePath) {
        let names: Vec<_> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        // A path such as `self::Alias` leads to an alias, too.
        if [names.first(), names.last()].iter().flatten().any(|it| self.foreign.contains(&***it)) {
            self.found.insert(names.join("::"));
        }
        self.all.extend(names);
        visit::visit_path(self, path);
    }
}

/// The feature under which public items may name types of the crate `redis`.
const REDIS: &str = "redis-1";

fn needs_feature(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let list = attribute.meta.require_list();
        list.is_ok_and(|it| it.path.is_ident("cfg") && it.tokens.to_string().contains(REDIS))
    })
}

/// Visits what users see of the items of a file without the feature: no bodies of functions, no
/// private fields.
fn visit_public(items: &[Item], public: &BTreeSet<&str>, names: &mut TypeNames<'_>) {
    let is_seen = |visibility: &Visibility, attributes: &[Attribute]| {
        matches!(visibility, Visibility::Public(_)) && !needs_feature(attributes)
    };
    for item in items {
        match item {
            Item::Use(item) if is_seen(&item.vis, &item.attrs) => {
                flatten(&item.tree, &mut vec![], &mut |_, path| {
                    if names.foreign.contains(&*path[0]) {
                        names.found.insert(format!("pub use {}", path.join("::")));
                    }
                });
            }
            Item::Struct(item) if is_seen(&item.vis, &item.attrs) => {
                names.visit_generics(&item.generics);
                let fields = item.fields.iter().filter(|it| is_seen(&it.vis, &it.attrs));
                fields.for_each(|field| names.visit_type(&field.ty));
            }
            Item::Enum(item) if is_seen(&item.vis, &item.attrs) => names.visit_item_enum(item),
            Item::Type(item) if is_seen(&item.vis, &item.attrs) => names.visit_type(&item.ty),
            Item::Const(item) if is_seen(&item.vis, &item.attrs) => names.visit_type(&item.ty),
            Item::Fn(item) if is_seen(&item.vis, &item.attrs) => names.visit_signature(&item.sig),
            Item::Trait(item) if is_seen(&item.vis, &item.attrs) => {
                names.visit_generics(&item.generics);
                item.supertraits.iter().for_each(|it| names.visit_type_param_bound(it));
                for item in &item.items {
                    match item {
                        TraitItem::Fn(item) => names.visit_signature(&item.sig),
                        other => names.visit_trait_item(other),
                    }
                }
            }
            Item::Impl(item) if is_of(item, public) && !needs_feature(&item.attrs) => {
                names.visit_generics(&item.generics);
                names.visit_type(&item.self_ty);
                item.trait_.iter().for_each(|(_, path, _)| names.visit_path(path));
                for item in &item.items {
                    match item {
                        ImplItem::Fn(item) if is_seen(&item.vis, &item.attrs) => {
                            names.visit_signature(&item.sig);
                        }
                        ImplItem::Const(item) if is_seen(&item.vis, &item.attrs) => {
                            names.visit_type(&item.ty);
                        }
                        ImplItem::Type(item) => names.visit_type(&item.ty),
                        _ => {}
                    }
                }
            }
            Item::Mod(item) if is_seen(&item.vis, &item.attrs) => {
                let items = item.content.iter();
                items.for_each(|(_, items)| visit_public(items, public, names));
            }
            _ => {}
        }
    }
}

/// Returns whether users see the implementation: of a public type, or of a public trait.
fn is_of(item: &ItemImpl, public: &BTreeSet<&str>) -> bool {
    let mut names = TypeNames::default();
    names.visit_type(&item.self_ty);
    item.trait_.iter().for_each(|(_, path, _)| names.visit_path(path));
    names.all.iter().any(|name| public.contains(&**name))
}

/// Returns the types of the crate `redis` in the public items of a file.
fn public_redis_types(items: &[Item], foreign: BTreeSet<&str>) -> BTreeSet<String> {
    let public = PUBLIC_TYPES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    let mut names = TypeNames { foreign, ..TypeNames::default() };
    visit_public(items, &public, &mut names);
    names.found
}

#[test]
fn public_items_name_types_of_the_crate_redis_only_under_its_feature() {
    let sources = Sources::read();
    let files: Vec<_> =
        sources.0.keys().map(|it| (it, syn::parse_file(&source(it)).unwrap().items)).collect();
    let mut foreign: BTreeMap<&Module, BTreeSet<&str>> = BTreeMap::new();
    let mut aliases = BTreeSet::new();
    for (module, items) in &files {
        let is_module = sources.0.contains_key(&child(module, "redis"));
        let mut names: BTreeSet<_> = sources.0[*module]
            .iter()
            .filter(|import| import.path[0] == "redis" && !is_module && !import.name.is_empty())
            .map(|import| &*import.name)
            .collect();
        names.extend((!is_module).then_some("redis"));
        for item in items {
            if let Item::Type(item) = item {
                let mut found = TypeNames { foreign: names.clone(), ..TypeNames::default() };
                found.visit_type(&item.ty);
                aliases.extend((!found.found.is_empty()).then(|| item.ident.to_string()));
            }
        }
        foreign.insert(module, names);
    }
    for (module, items) in &files {
        let names = foreign[module].iter().copied().chain(aliases.iter().map(|it| &**it));
        let found = public_redis_types(items, names.collect());
        assert!(found.is_empty(), "public items of {module} name {found:?}: add `{REDIS}`");
    }
}

#[test]
fn a_type_of_the_crate_redis_is_found_wherever_users_see_it() {
    let find = |code: &str| {
        let items = syn::parse_file(code).unwrap().items;
        public_redis_types(&items, ["redis", "Cmd", "Alias"].into())
    };
    for seen in [
        "pub use redis;",
        "pub use redis::Client;",
        "pub use Cmd;",
        "pub fn f() -> Cmd {}",
        "pub struct S { pub field: redis::Cmd }",
        "pub struct S<T: redis::ToRedisArgs>(T);",
        "pub enum E { A(Vec<Cmd>) }",
        "pub type T = Option<Cmd>;",
        "pub mod m { pub fn f(_: &Cmd) {} }",
        "pub trait T: redis::ToRedisArgs {}",
        "pub trait T { fn f(&self) -> Box<dyn Fn(Cmd)>; }",
        "impl RedisStore { pub fn f(&self, cmd: impl Into<Cmd>) {} }",
        "impl RedisStore { pub fn f<C>(c: C) where C: redis::aio::ConnectionLike {} }",
        "impl RedisStore { pub fn f() -> super::Alias {} }",
        "impl From<redis::RedisError> for StoreError {}",
        "impl From<StoreError> for redis::RedisError {}",
        "impl redis::ToRedisArgs for Key<'_> {}",
        "impl<C: redis::aio::ConnectionLike> Store for C {}",
        "impl Iterator for KeyScan { type Item = Cmd; }",
    ] {
        assert_eq!(find(seen).len(), 1, "{seen}");
        let hidden = format!("#[cfg(feature = \"redis-1\")]\n{seen}");
        assert!(find(&hidden).is_empty(), "{hidden}");
    }
    for unseen in [
        "use redis::Cmd; pub(crate) use redis::Client;",
        "pub struct S { field: redis::Cmd }",
        "pub fn f() { redis::cmd(\"GET\"); }",
        "impl RedisStore { fn f() -> Cmd {} pub(crate) fn g() -> Cmd {} }",
        "impl From<redis::RedisError> for LoginFailure {}",
        "impl RedisStore { #[cfg(feature = \"redis-1\")] pub fn f() -> Cmd {} }",
    ] {
        assert!(find(unseen).is_empty(), "{unseen}");
    }
}

#[test]
fn paths_count_outside_of_use_lines_comments_and_tests() {
    let code = "use super::{\n    a::B,\n};\n/// `super::c`\nfn f() -> super::d::E { self.g() }\n";
    let tests = "\n#[cfg(test)]\nmod tests {\n    use super::h;\n}";
    let path = ["super", "d", "E"].map(String::from).to_vec();
    assert_eq!(paths_in(&[code, tests].concat()), [path]);
}

#[test]
fn a_file_imports_from_no_storey_above_it() {
    let sources = Sources::read();
    for module in sources.0.keys() {
        for import in sources.imports(module) {
            let is_below = storey(&import) >= storey(module);
            assert!(is_below, "{module} imports from {import}, which is in a storey above");
        }
    }
}

/// What is true of one algorithm is a method of its model. Only the formats of settings name them.
#[test]
fn no_code_outside_of_the_algorithms_and_the_settings_names_an_algorithm() {
    let sources = Sources::read();
    let is_free = |module: &str| {
        ["algorithm", "config"].iter().all(|it| module.split("::").next() != Some(it))
    };
    for module in sources.0.keys().filter(|module| is_free(module)) {
        for path in paths_in(&source(module)) {
            let [kind, name] = path.last_chunk().unwrap();
            let is_variant = name.starts_with(char::is_uppercase);
            let names = ["Algorithm", "Params"].contains(&&**kind) && is_variant;
            assert!(!names, "{module} names {kind}::{name}: make it a method of `Model`");
        }
    }
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let sources = Sources::read();
    let mut finished = BTreeSet::new();
    for module in sources.0.keys() {
        visit(&sources, module, &mut vec![], &mut finished);
    }
}

/// Follows the imports of a file. `path` leads to it, and no circle goes through those `finished`.
fn visit(
    sources: &Sources,
    module: &Module,
    path: &mut Vec<Module>,
    finished: &mut BTreeSet<Module>,
) {
    if let Some(start) = path.iter().position(|known| known == module) {
        panic!("these files import each other in a circle: {:?}", &path[start..]);
    }
    if finished.contains(module) {
        return;
    }
    path.push(module.clone());
    for import in sources.imports(module) {
        visit(sources, &import, path, finished);
    }
    path.pop();
    finished.insert(module.clone());
}

/// The connections to Redis. They could be a crate of their own.
const CONNECTIONS: &str = "store::redis::transport";

/// The only modules of this crate that the connections import.
const GROUND: [&str; 2] = ["sync", "time"];

/// The modules of the connections, from the top down. A file imports from its own module, and from
/// those below it.
const ROOMS: [&[&str]; 5] = [&["config", "url"], &["topology"], &["health"], &["link"], &["home"]];

/// The words of rate limiters that connections do not know.
const WORDS: [&str; 8] =
    ["limiter", "quota", "denial", "denied", "decision", "prefix", "reservation", "refund"];

fn source(module: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(module.replace("::", "/"));
    fs::read_to_string(path.with_extension("rs")).unwrap()
}

/// The files of the connections, and the hubs of their modules.
fn connections(sources: &Sources) -> impl Iterator<Item = &Module> {
    sources.0.keys().filter(|module| module.starts_with(CONNECTIONS))
}

fn room(module: &str) -> Option<usize> {
    let first = module.strip_prefix(CONNECTIONS)?.split("::").nth(1)?;
    let found = ROOMS.iter().position(|room| room.contains(&first));
    Some(found.unwrap_or_else(|| panic!("{module} is in no room: add it to ROOMS")))
}

#[test]
fn the_connections_import_only_time_and_locks_of_this_crate() {
    let sources = Sources::read();
    for module in connections(&sources) {
        for import in &sources.0[module] {
            let Some(found) = sources.definition(module, &import.path) else { continue };
            let is_allowed = found.starts_with(CONNECTIONS) || GROUND.contains(&&*found);
            assert!(is_allowed, "{module} imports from {found}");
        }
        // Paths that the code spells out elsewhere.
        for path in source(module).split("crate::").skip(1) {
            let is_allowed = ["sync::", "time::", "{sync::"].iter().any(|it| path.starts_with(it));
            assert!(is_allowed, "{module}: crate::{:?}", path.lines().next());
        }
    }
}

#[test]
fn the_modules_of_the_connections_are_above_each_other() {
    let sources = Sources::read();
    for module in connections(&sources) {
        let Some(own) = room(module) else { continue };
        for import in sources.imports(module) {
            let is_below = room(&import).is_none_or(|room| room >= own);
            assert!(is_below, "{module} imports from {import}, which is in a room above");
        }
    }
}

#[test]
fn the_connections_know_no_words_of_limiters() {
    let sources = Sources::read();
    for module in connections(&sources) {
        for (number, line) in (1..).zip(source(module).lines()) {
            let words = line.split(|it: char| !it.is_alphanumeric() && it != '_');
            let mut words = words.map(|word| word.to_lowercase());
            let known = words.find(|word| WORDS.contains(&word.trim_end_matches('s')));
            assert!(known.is_none(), "{module}:{number} has {known:?}: {line}");
        }
    }
}

#[test]
fn the_hubs_of_the_store_in_redis_only_re_export() {
    for hub in
        ["", "::transport", "::transport::link", "::transport::health", "::transport::topology"]
    {
        let hub = format!("store::redis{hub}");
        let items = syn::parse_file(&source(&hub)).unwrap().items;
        let other = items.iter().find(|item| !matches!(item, Item::Mod(_) | Item::Use(_)));
        assert!(other.is_none(), "{hub} has an item of its own");
    }
}

#[test]
fn no_two_types_of_a_storey_have_one_name() {
    let sources = Sources::read();
    let mut known: BTreeMap<(usize, String), Module> = BTreeMap::new();
    for module in sources.0.keys() {
        for item in syn::parse_file(&source(module)).unwrap().items {
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
            let other = known.insert((storey(module), name.to_string()), module.clone());
            assert!(other.is_none(), "{module} and {other:?} have a type {name}");
        }
    }
}
