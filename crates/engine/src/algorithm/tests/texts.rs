//! Texts about the code: paths that comments name, and functions that scripts must not use. Does
//! not run anything.

use std::{
    fs,
    path::{Path, PathBuf},
};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The files of a folder, with their texts.
fn files(folder: &Path, all: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|extension| extension.to_str()) {
            None if path.is_dir() => files(&path, all),
            Some("rs" | "lua" | "md") => {
                let text = fs::read_to_string(&path).unwrap();
                all.push((path, text));
            }
            _ => {}
        }
    }
}

fn texts(folders: &[&str]) -> Vec<(PathBuf, String)> {
    let mut all = vec![];
    folders.iter().for_each(|folder| files(&Path::new(ROOT).join(folder), &mut all));
    assert!(all.len() > 10, "{} files", all.len());
    all
}

/// Returns the paths below `src`, `crates` and `scripts` that a text names in backticks.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._".contains(letter);
        ["src/", "crates/", "scripts/"].iter().any(|folder| word.starts_with(folder))
            && word.chars().all(is_plain)
    })
}

#[test]
fn every_file_that_a_comment_or_a_page_names_exists() {
    let mut named = 0;
    for (file, text) in texts(&["src", "crates", "scripts", "docs"]) {
        for path in paths(&text) {
            named += 1;
            // `NAME` stands for each algorithm.
            let path = path.replace("NAME", "fixed_window");
            let exists = Path::new(ROOT).join(&path).exists();
            assert!(exists, "{}: `{path}` does not exist; correct it", file.display());
        }
    }
    assert!(named > 10, "{named} paths");
}

/// Returns the names of the functions of a text, each once, in the order of the text.
fn functions<'a>(text: &'a str, keyword: &str) -> Vec<&'a str> {
    let mut names = vec![];
    for line in text.lines().map(str::trim_start).filter(|line| !line.starts_with(['-', '/'])) {
        let Some((_, rest)) = line.split_once(keyword) else { continue };
        let name = rest.split(['(', '<']).next().unwrap();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

#[test]
fn the_functions_that_a_model_has_in_both_languages_stand_in_the_same_order() {
    for model in ["bucket", "fixed_window", "sliding_window", "sliding_log", "concurrency"] {
        let read = |path: String| fs::read_to_string(Path::new(ROOT).join(path)).unwrap();
        let lua = read(format!("scripts/{model}/model.lua"));
        let rust = read(format!("crates/engine/src/algorithm/{model}.rs"));
        let [lua, rust] = [functions(&lua, "function "), functions(&rust, "fn ")];
        let common = |all: &[&str], others: &[&str]| -> Vec<String> {
            let is_common = |name: &&&str| others.contains(*name);
            all.iter().filter(is_common).map(ToString::to_string).collect()
        };
        let both = common(&lua, &rust);
        assert!(both.len() >= 6, "{model}: {both:?}");
        assert_eq!(both, common(&rust, &lua), "{model}");
    }
}

#[test]
fn scripts_use_no_function_that_lua_5_4_lacks() {
    let missing = [
        "math.frexp",
        "math.ldexp",
        "math.pow",
        "math.log10",
        "math.mod",
        "math.sinh",
        "math.cosh",
        "math.tanh",
        "table.getn",
        "table.maxn",
        "table.foreach",
        "string.gfind",
        "setfenv",
        "getfenv",
        "loadstring",
        "module(",
        "bit.",
        "arg.n",
    ];
    for (file, text) in texts(&["scripts"]) {
        for (i, line) in text.lines().enumerate() {
            let code = line.split("--").next().unwrap();
            for name in missing {
                let is_used = code.contains(name);
                assert!(!is_used, "{}, line {}: Lua 5.4 has no {name}", file.display(), i + 1);
            }
        }
    }
}
