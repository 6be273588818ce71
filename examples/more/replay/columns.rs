//! Lines of columns: CSV with a header, and logs with a line `#Fields`, such as those of IIS and
//! CloudFront.

use std::borrow::Cow;

use super::stamp;

/// The names of the columns.
#[derive(Clone)]
pub struct Columns {
    pub names: Vec<String>,
    /// What is between columns; tabs or else spaces, if it is unknown.
    separator: Option<u8>,
}

impl Columns {
    /// Reads the header of CSV.
    pub fn of_header(line: &[u8]) -> Option<Self> {
        let separator = separator(line).unwrap_or(b',');
        let name = |cell: Cow<'_, [u8]>| String::from_utf8_lossy(&cell).trim().to_owned();
        let names: Vec<_> = split(line, separator)?.into_iter().map(name).collect();
        Some(Self { names, separator: Some(separator) })
    }

    /// Reads the header of CSV, if a line of any format is one: it has only names.
    pub fn of_first(line: &[u8]) -> Option<Self> {
        let columns = Self::of_header(line)?;
        let is_name = |name: &String| {
            name.starts_with(|it: char| it.is_alphabetic() || "_@#".contains(it))
                && stamp::parse(name.as_bytes()).is_none()
        };
        Some(columns).filter(|it| it.names.len() > 1 && it.names.iter().all(is_name))
    }

    /// Reads a line `#Fields`; `None` if it is another comment.
    pub fn of_comment(line: &[u8]) -> Option<Self> {
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_ascii_whitespace();
        let first = words.next()?.trim_end_matches(':');
        let names = words.map(str::to_owned).collect();
        first.eq_ignore_ascii_case("#fields").then_some(Self { names, separator: None })
    }

    /// Returns the values of a line, if it has one for each name.
    pub fn values<'a>(&self, line: &'a [u8]) -> Option<Vec<Cow<'a, [u8]>>> {
        let by_line = || if line.contains(&b'\t') { b'\t' } else { b' ' };
        let values = split(line, self.separator.unwrap_or_else(by_line))?;
        Some(values).filter(|values| values.len() == self.names.len())
    }
}

/// Returns what separates the columns of a line: the first of these that is in it.
fn separator(line: &[u8]) -> Option<u8> {
    [b',', b';', b'\t'].into_iter().find(|separator| line.contains(separator))
}

/// Splits a line of CSV; `None` if a quote has no end.
fn split(line: &[u8], separator: u8) -> Option<Vec<Cow<'_, [u8]>>> {
    let (mut cells, mut rest) = (vec![], line);
    loop {
        if let [b'"', quoted @ ..] = rest {
            let (mut value, mut text) = (vec![], quoted);
            loop {
                let end = memchr::memchr(b'"', text)?;
                value.extend(&text[..end]);
                text = &text[end + 1..];
                let [b'"', behind @ ..] = text else { break };
                value.push(b'"');
                text = behind;
            }
            cells.push(Cow::Owned(value));
            match text {
                [] => return Some(cells),
                [first, behind @ ..] if *first == separator => rest = behind,
                _ => return None,
            }
        } else {
            match memchr::memchr(separator, rest) {
                Some(end) => {
                    cells.push(Cow::Borrowed(&rest[..end]));
                    rest = &rest[end + 1..];
                }
                None => {
                    cells.push(Cow::Borrowed(rest));
                    return Some(cells);
                }
            }
        }
    }
}
