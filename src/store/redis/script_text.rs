//! The text of a script as it is sent: without its comments, and with its hash. It knows no script.

use redis::Script;

/// A text in Lua, and the hash by which a server knows it.
///
/// The text has no comments, so that a change of a comment is no change of the script: replicas of
/// two versions then share the script that a server has cached.
#[derive(Debug)]
pub(crate) struct ScriptText {
    pub(crate) text: String,
    pub(crate) hash: Box<str>,
}

impl ScriptText {
    pub(crate) fn new(commented: &str) -> Self {
        let text = without_comments(commented);
        let hash = Script::new(&text).get_hash().into();
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

/// Writes the text that is sent to a file of `scripts/sent`, and returns the name if the file had
/// another one: what a server runs can be read in one piece, and a review sees each change of it.
#[cfg(test)]
pub(crate) fn write(name: &str, purpose: &str, files: &str, script: &ScriptText) -> Option<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/sent");
    let path = folder.join(name).with_extension("lua");
    let text = format!(
        "-- {purpose}\n-- Written by a test: edit the files that it consists of, whose comments \
         are not sent:\n-- {files}\n-- EVALSHA names the text below this line {}\n{}",
        script.hash, script.text
    );
    if std::fs::read_to_string(&path).ok().as_ref() == Some(&text) {
        return None;
    }
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(path, text).unwrap();
    Some(name.to_owned())
}

/// Fails if texts were not what is sent.
#[cfg(test)]
pub(crate) fn assert_written(changed: impl IntoIterator<Item = Option<String>>) {
    let changed: Vec<_> = changed.into_iter().flatten().collect();
    assert!(
        changed.is_empty(),
        "these files of scripts/sent were not what is sent: commit them as they are written now: \
         {changed:?}"
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
