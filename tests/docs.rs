//! The pages of `docs/`: their titles and lengths, the index, the modules of the guide, and all
//! links to files and headings.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

const INDEX: &str = include_str!("../docs/README.md");
const GUIDE: &str = include_str!("../src/guide.rs");

/// Measurements are tables, which are looked up rather than read.
const LONG: [&str; 1] = ["benchmarks"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the names of the pages and their texts.
fn pages() -> Vec<(String, String)> {
    let files = fs::read_dir(root().join("docs")).unwrap().map(|file| file.unwrap().path());
    let is_page = |file: &PathBuf| file.extension().is_some_and(|it| it == "md");
    let mut pages: Vec<_> = files
        .filter(is_page)
        .map(|file| {
            let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(file).unwrap())
        })
        .collect();
    pages.sort();
    pages
}

/// Returns the files with code, and their texts.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut files = vec![];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|it| it == "rs") {
            let code = fs::read_to_string(&path).unwrap();
            files.push((path, code));
        }
    }
    files
}

/// Returns the lines outside of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the anchor of a heading, as GitHub and rustdoc make it.
fn anchor(heading: &str) -> String {
    let is_part = |char: &char| char.is_alphanumeric() || "-_ ".contains(*char);
    heading.chars().filter(is_part).collect::<String>().to_lowercase().replace(' ', "-")
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

/// Returns the targets of inline links and of definitions.
fn targets(text: &str) -> Vec<String> {
    let mut targets = vec![];
    for line in prose(text) {
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        targets.extend(inline.map(String::from));
        if let Some((_, target)) = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")) {
            targets.push(target.to_owned());
        }
    }
    targets
}

/// Returns the names in `[text][name]`.
fn references(text: &str) -> BTreeSet<String> {
    let names = prose(text).flat_map(|line| line.split("][").skip(1));
    names.filter_map(|rest| Some(rest.split_once(']')?.0.to_owned())).collect()
}

#[test]
fn each_page_has_a_title_and_a_place_in_the_index_and_in_the_guide() {
    for (name, text) in pages() {
        if name == "README" {
            continue;
        }
        assert!(INDEX.contains(&format!("]: {name}.md\n")), "docs/README.md does not list {name}");
        let row = format!(" \"{name}\"\n");
        assert!(
            name == "playground" || GUIDE.contains(&row),
            "src/guide.rs does not contain {name}"
        );
        assert!(text.starts_with("# "), "docs/{name}.md has no title");
        let titles = prose(&text).filter(|line| line.starts_with("# ")).count();
        assert_eq!(titles, 1, "docs/{name}.md");
        let words = text.split_whitespace().count();
        let is_long = words > 2_000 && !LONG.contains(&&*name);
        assert!(!is_long, "docs/{name}.md has {words} words: split it");
    }
}

#[test]
fn the_readme_is_short() {
    let lines = fs::read_to_string(root().join("README.md")).unwrap().lines().count();
    assert!(lines <= 160, "README.md has {lines} lines: move text to a page");
}

#[test]
fn all_links_lead_somewhere() {
    let mut files = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "THREAT-MODEL.md"]
        .map(|it| root().join(it))
        .to_vec();
    files.extend(pages().into_iter().map(|(name, _)| root().join(format!("docs/{name}.md"))));
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for target in targets(&text) {
            if target.contains("://") || !target.contains(['.', '#']) {
                continue;
            }
            let (path, heading) = target.split_once('#').unwrap_or((&target, ""));
            let linked =
                if path.is_empty() { file.clone() } else { file.parent().unwrap().join(path) };
            assert!(linked.exists(), "{}: {target}", file.display());
            if !heading.is_empty() {
                let text = fs::read_to_string(&linked).unwrap();
                assert!(anchors(&text).contains(heading), "{}: {target}", file.display());
            }
        }
    }
}

/// In rustdoc, other pages are modules: a link to a file would lead nowhere.
#[test]
fn the_guide_defines_all_links_between_pages() {
    let pages = pages().into_iter().filter(|(name, _)| name != "README" && name != "playground");
    for (name, text) in pages {
        for line in prose(&text) {
            let mut inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            assert!(inline.all(|target| !target.contains(".md")), "docs/{name}.md: {line}");
            let definition = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
            let Some((link, target)) = definition else { continue };
            let (page, heading) = target.split_once('#').unwrap_or((target, ""));
            let page = page.trim_end_matches(".md");
            let is_defined = match heading {
                "" => link == page || page.starts_with("pictures/"),
                _ => {
                    let module = page.replace('-', "_");
                    GUIDE.contains(&format!("[{link}]: crate::guide::{module}#{heading}\n"))
                }
            };
            assert!(is_defined, "docs/{name}.md: src/guide.rs does not define {line}");
        }
    }
}

/// rustdoc does not check the headings in links to the guide.
#[test]
fn all_links_of_the_code_to_headings_lead_somewhere() {
    let pages: BTreeMap<_, _> =
        pages().into_iter().map(|(name, text)| (name.replace('-', "_"), anchors(&text))).collect();
    let mut links = 0;
    for (file, code) in sources(&root().join("src")) {
        for rest in code.split("guide::").skip(1) {
            let link = rest.split([')', '\n']).next().unwrap_or_default();
            let Some((page, heading)) = link.split_once('#') else { continue };
            assert!(pages[page].contains(heading), "{}: {link}", file.display());
            links += 1;
        }
    }
    assert!(links > 10, "{links}");
}

/// Readers copy the examples.
#[test]
fn no_example_in_the_code_unwraps() {
    for (file, code) in sources(&root().join("src")) {
        let docs = code.lines().map(str::trim_start).filter(|line| line.starts_with("//"));
        let docs = docs.filter(|line| line.contains(".unwrap()"));
        assert_eq!(docs.collect::<Vec<_>>(), [""; 0], "{}", file.display());
    }
}

/// Each file has the code of a page, and then its tests, if they are not in `programs.rs`.
#[test]
fn the_pages_have_the_recipes_and_programs_that_are_tested() {
    let folders = ["recipes", "programs"].map(|it| sources(&root().join("tests/http").join(it)));
    assert_eq!(folders.each_ref().map(Vec::len), [4, 11]);
    for (file, text) in folders.into_iter().flatten() {
        let (head, code) = text.split_once("\n\n").unwrap();
        let code = code.split("\nmod tests {").next().unwrap();
        let page = head.split('`').nth(1).unwrap();
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        assert!(text.contains(code), "docs/{page} does not contain the code of {}", file.display());
    }
}

/// Methods that take and return a value, or set something, and are no settings.
const NO_SETTINGS: [&str; 12] = [
    "Charge::also",
    "Charge::and",
    "Permit::set_used",
    "Permit::set_used_for",
    "VendorState::of_resource",
    "VendorState::with_block",
    "VendorState::with_remaining",
    "VendorState::with_resource",
    "VendorState::with_unknown_block",
    "layer::RequestError::with_status",
    "layer::Usage::and",
    "redisson::RateLimiter::for_key",
];

/// Returns the functions of `tests/public-api.txt`: their paths without type parameters, and
/// whether they look like a setting.
fn public_functions() -> Vec<(String, bool)> {
    let list = fs::read_to_string(root().join("tests/public-api.txt")).unwrap();
    let lines = list.lines().filter_map(|line| line.split_once("pub ")?.1.split_once("fn "));
    let functions = lines.filter_map(|(_, function)| {
        let (head, arguments) = function.split_once('(')?;
        let (mut path, mut depth) = (String::new(), 0);
        for char in head.chars() {
            match char {
                '<' => depth += 1,
                '>' => depth -= 1,
                _ if depth == 0 => path.push(char),
                _ => {}
            }
        }
        let name = path.rsplit("::").next().unwrap();
        let result = arguments.split_once("-> ").unwrap_or_default().1;
        let is_builder = arguments.starts_with("self")
            && ["Self", "Result<Self,", "call::"].iter().any(|it| result.starts_with(it));
        let is_setting = is_builder || name.starts_with("set_") || name.starts_with("with_");
        Some((path, is_setting))
    });
    functions.collect()
}

/// Returns the settings of `docs/settings.md` as paths, with the page in the last cell.
fn documented_settings() -> BTreeMap<String, String> {
    let mut settings = BTreeMap::new();
    let page = fs::read_to_string(root().join("docs/settings.md")).unwrap();
    let mut of_type = "";
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            of_type = heading.split('`').nth(1).unwrap_or_default();
        }
        let cells: Vec<_> = line.split(" | ").collect();
        if line.starts_with("| `") && !of_type.is_empty() {
            assert_eq!(cells.len(), 4, "{line}");
            let page = cells[3].rsplit('[').next().unwrap().trim_end_matches("] |");
            for name in cells[0].split('`').skip(1).step_by(2) {
                settings.insert(format!("{of_type}::{name}"), page.to_owned());
            }
        }
    }
    settings
}

#[test]
fn each_setting_has_a_row_with_a_page_that_names_it() {
    let functions = public_functions();
    let settings = documented_settings();
    for (path, is_setting) in &functions {
        let is_left_out = NO_SETTINGS.contains(&&**path);
        assert!(!is_setting || is_left_out || settings.contains_key(path), "{path} has no row");
    }
    for (path, page) in &settings {
        assert!(functions.iter().any(|(it, _)| it == path), "{path} is in no public list");
        let name = path.rsplit("::").next().unwrap().trim_start_matches("try_");
        let text = fs::read_to_string(root().join(format!("docs/{page}.md"))).unwrap_or_default();
        assert!(page == "rustdoc |" || text.contains(name), "docs/{page}.md has no {name}");
    }
}

/// As `layer::MissingKey::Reject`.
#[test]
fn each_value_of_a_setting_is_public() {
    let list = fs::read_to_string(root().join("tests/public-api.txt")).unwrap();
    let page = fs::read_to_string(root().join("docs/settings.md")).unwrap();
    let mut values = 0;
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        for code in row.split(" | ").nth(2).unwrap().split('`').skip(1).step_by(2) {
            if !code.contains("::") {
                continue;
            }
            let item = format!(" {}", code.split('(').next().unwrap());
            let has_item = |line: &str| {
                line.split_once(&item)
                    .is_some_and(|(_, rest)| rest.is_empty() || rest.starts_with('('))
            };
            assert!(list.lines().any(has_item), "{item} is in no public list: {row}");
            values += 1;
        }
    }
    assert!(values > 15, "{values}");
}

/// The error about an unknown parameter lists those that are known.
#[cfg(feature = "redis")]
#[test]
fn each_parameter_of_a_url_has_a_row() {
    let page = fs::read_to_string(root().join("docs/settings.md")).unwrap();
    for url in ["redis+sentinel://h/m?other=1", "unix:///socket?other=1"] {
        let error = tower_ratelimit::store::lazy(url).unwrap_err().to_string();
        let (_, names) = error.split_once("the parameters are ").expect(&error);
        assert!(names.split(", ").count() > 6, "{error}");
        for name in names.split(", ") {
            let rows = page.lines().filter(|line| line.starts_with("| `"));
            let mut cells = rows.filter_map(|line| line.split(" | ").next());
            assert!(cells.any(|cell| cell.split('`').any(|it| it == name)), "{name} has no row");
        }
    }
}

/// As `tests/redis/store.rs::a_key_cannot_choose_its_slot`.
#[test]
fn the_threat_model_names_tests_that_exist() {
    let text = fs::read_to_string(root().join("THREAT-MODEL.md")).unwrap();
    let named: Vec<_> = text.split('`').filter_map(|it| it.split_once(".rs::")).collect();
    assert!(named.len() > 30, "{}", named.len());
    for (file, name) in named {
        let code = fs::read_to_string(root().join(file).with_extension("rs"));
        let code = code.unwrap_or_else(|_| panic!("there is no {file}.rs"));
        assert!(code.contains(&format!("fn {name}(")), "{file}.rs has no test {name}");
    }
}

/// As `store.rs`, `algorithm/..`, `Versions::current`, `decide`.
#[test]
fn contributing_names_files_and_items_that_exist() {
    let text = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    let begin = text.find("## The path of a request").unwrap();
    let end = text.find("## Rules").unwrap();
    let code: Vec<_> =
        ["src", "crates"].into_iter().flat_map(|folder| sources(&root().join(folder))).collect();
    let is_item = |name: &str| {
        let is_word = |it: char| it.is_alphanumeric() || it == '_';
        let is_in = |code: &str| {
            code.match_indices(name).any(|(at, _)| {
                !code[..at].ends_with(is_word) && !code[at + name.len()..].starts_with(is_word)
            })
        };
        code.iter().any(|(_, code)| is_in(code))
    };
    let exists = |name: &str| {
        let folders = ["", "src", "crates/engine/src", "crates/connections/src", "scripts"];
        code.iter().any(|(path, _)| path.ends_with(name))
            || folders.iter().any(|folder| root().join(folder).join(name).exists())
    };
    let (mut files, mut items) = (0, 0);
    // Text between backquotes is at the odd places.
    for name in text[begin..end].split('`').skip(1).step_by(2) {
        let name = name.trim_end_matches("/..").trim_end_matches('/');
        if ["NAME", ".lua"].iter().any(|it| name.contains(it))
            || name.contains([' ', '\n', '#', '(', '-', '!'])
        {
            continue;
        } else if name.contains(['/', '.']) {
            assert!(exists(name), "there is no {name}");
            files += 1;
        } else {
            assert!(name.split("::").all(is_item), "there is no {name}");
            items += 1;
        }
    }
    assert!(files > 60 && items > 60, "{files} files, {items} items");
}

#[test]
fn all_references_are_defined_and_used() {
    for (name, text) in pages() {
        let used = references(&text);
        let defined: BTreeSet<_> = prose(&text)
            .filter_map(|line| Some(line.strip_prefix('[')?.split_once("]: ")?.0.to_owned()))
            .collect();
        assert_eq!(used, defined, "docs/{name}.md");
    }
}
