//! The text of a script as it is sent: without its comments, and with its hash. It knows no script.

use sha1_smol::Sha1;

/// A text in Lua, and the hash by which a server knows it.
///
/// The text has no comments, so that a change of a comment is no change of the script: replicas of
/// two versions then share the script that a server has cached.
#[derive(Debug)]
pub struct ScriptText {
    pub text: String,
    pub hash: Box<str>,
}

impl ScriptText {
    pub fn new(commented: &str) -> Self {
        let text = without_comments(commented);
        let hash = Sha1::from(&text).hexdigest().into();
        Self { text, hash }
    }
}

/// Drops the comments, and of blank lines all but one. The scripts have no long comments and no
/// long strings.
fn without_comments(commented: &str) -> String {
    let mut text = String::with_capacity(commented.len());
    for line in commented.lines() {
        let code = line[..comment_start(line)].trim_end();
        let is_blank = line.trim_end().is_empty();
        if !code.is_empty() || is_blank && !text.is_empty() && !text.ends_with("\n\n") {
            text.push_str(code);
            text.push('\n');
        }
    }
    text
}

/// Returns the index at which the comment of a line begins, else the length of the line.
fn comment_start(line: &str) -> usize {
    let (mut quote, mut escaped) = (None, false);
    for (index, letter) in line.char_indices() {
        match (quote, letter) {
            (Some(_), '\\') if !escaped => {
                escaped = true;
                continue;
            }
            (Some(open), _) if open == letter && !escaped => quote = None,
            (None, '\'' | '"') => quote = Some(letter),
            (None, '-') if line[index..].starts_with("--") => return index,
            _ => {}
        }
        escaped = false;
    }
    line.len()
}

/// Keeps the hash of a script in `scripts/sent/hashes.txt`, where a review sees that a server will
/// run another text. Beside it is the text of `token_bucket`, to be read in one piece. `make
/// script` prints the others from `target/scripts`. Returns the name if the script was another one.
#[cfg(any(test, feature = "testing"))]
pub fn write(name: &str, purpose: &str, files: &str, script: &ScriptText) -> Option<String> {
    use std::{fs, path::Path, sync::Mutex};

    static FILES: Mutex<()> = Mutex::new(()); // other tests write to the file of hashes
    let _files = FILES.lock();
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let (kept, printed) = (root.join("scripts/sent"), root.join("target/scripts"));
    let text = format!(
        "-- {purpose}\n-- Written by a test: edit the files that it consists of, whose comments \
         are not sent:\n-- {files}\n-- EVALSHA names the text below this line {}\n{}",
        script.hash, script.text
    );
    let (file, hashes) = (format!("{name}.lua"), kept.join("hashes.txt"));
    fs::create_dir_all(&printed).unwrap();
    fs::write(printed.join(&file), &text).unwrap();
    let mut is_kept = true;
    if name == "token_bucket" && fs::read_to_string(kept.join(&file)).ok() != Some(text.clone()) {
        fs::write(kept.join(&file), text).unwrap();
        is_kept = false;
    }
    let line = format!("{} {name}", script.hash);
    let known = fs::read_to_string(&hashes).unwrap();
    if !known.lines().any(|known| known == line) {
        let others =
            known.lines().filter(|known| known.split_once(' ').map(|it| it.1) != Some(name));
        let mut lines: Vec<_> = others.chain([&*line]).collect();
        lines.sort_unstable_by_key(|line| line.split_once(' ').map(|it| it.1));
        fs::write(hashes, lines.join("\n") + "\n").unwrap();
        is_kept = false;
    }
    (!is_kept).then(|| name.to_owned())
}

/// Fails if scripts were not what is sent.
#[cfg(any(test, feature = "testing"))]
pub fn assert_written(changed: impl IntoIterator<Item = Option<String>>) {
    let changed: Vec<_> = changed.into_iter().flatten().collect();
    assert!(
        changed.is_empty(),
        "scripts/sent had other scripts than are sent: commit it as it is written now; `make \
         script NAME=..` prints a text: {changed:?}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_dropped_and_strings_stay() {
        let text = "-- a\n\nlocal a = 1 -- b\n\n-- c\n\n  -- d\n  call('--', \"it's --\") --\n";
        assert_eq!(without_comments(text), "local a = 1\n\n  call('--', \"it's --\")\n");
        assert_eq!(without_comments(r"f('\'--') -- quote"), "f('\\'--')\n");
    }

    #[test]
    fn a_comment_changes_no_hash() {
        let one = ScriptText::new("-- one\nreturn 1\n");
        assert_eq!(one.hash, ScriptText::new("return 1 -- two\n").hash);
        assert_ne!(one.hash, ScriptText::new("return 2\n").hash);
    }
}
