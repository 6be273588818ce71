//! The tokenizer of the header `Forwarded` (RFC 7239): splits a header line into elements and finds
//! their `for` parameters. `client_ip` parses addresses and decides which proxies are trusted.
//!
//! A line is read from its end, because trusted proxies append to the end and a client can forge
//! the rest. Read from the left, a quote that the client left open would pair with the quotes of
//! the proxy, and text inside a quoted string of the proxy would become elements. Read from the
//! right, this is impossible: the line ends outside of a quoted string, and all quotes inside a
//! quoted string are escaped. So the text to the left has no effect on the elements of a proxy.

use std::{borrow::Cow, iter};

/// Returns the `for` parameters of a line, from the last element to the first; `None` for an
/// element that is malformed, or does not have exactly one.
pub(super) fn from_the_right(line: &[u8]) -> impl Iterator<Item = Option<Cow<'_, [u8]>>> {
    split_from_the_right(line, b',').map(for_parameter)
}

/// Splits at separators outside of quoted strings. Returns the parts from the last to the first.
fn split_from_the_right(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    iter::from_fn(move || {
        let text = rest.take()?;
        let Some(at) = last_separator(text, separator) else { return Some(text) };
        rest = Some(&text[..at]);
        Some(&text[at + 1..])
    })
}

fn last_separator(text: &[u8], separator: u8) -> Option<usize> {
    let mut quoted = false;
    text.iter().enumerate().rposition(|(at, &byte)| {
        match byte {
            // A backslash outside of a quoted string makes the element malformed and escapes
            // nothing.
            b'"' if !quoted => quoted = true,
            b'"' => quoted = is_escaped(&text[..at]),
            _ => {}
        }
        byte == separator && !quoted
    })
}

/// Returns whether the character after `before` is escaped: an even number of backslashes escape
/// each other.
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|&&byte| byte == b'\\').count() % 2 == 1
}

/// Parses `forwarded-element = [ forwarded-pair ] *( ";" [ forwarded-pair ] )`.
fn for_parameter(element: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut found = None;
    for pair in split_from_the_right(element, b';').map(<[u8]>::trim_ascii) {
        if pair.is_empty() {
            continue;
        }
        let (name, text) = pair.split_at(pair.iter().position(|&byte| byte == b'=')?);
        let value = value(&text[1..])?;
        if name.is_empty() || !name.iter().copied().all(is_token) {
            return None;
        }
        if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
            return None;
        }
    }
    found
}

/// Parses `value = token / quoted-string`.
///
/// Some proxies omit the quotes that `:`, `[` and `]` need in addresses and ports. These characters
/// are accepted, because they are not separators.
fn value(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    match text.strip_prefix(b"\"") {
        Some(quoted) => unescaped(quoted.strip_suffix(b"\"")?),
        None => {
            let is_plain = |byte: u8| is_token(byte) || b":[]".contains(&byte);
            (!text.is_empty() && text.iter().copied().all(is_plain)).then_some(Cow::Borrowed(text))
        }
    }
}

/// Unescapes the text between the quotes of a `quoted-string`.
fn unescaped(quoted: &[u8]) -> Option<Cow<'_, [u8]>> {
    if !quoted.iter().any(|byte| b"\"\\".contains(byte)) {
        return Some(Cow::Borrowed(quoted));
    }
    let mut text = Vec::with_capacity(quoted.len());
    let mut bytes = quoted.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'"' => return None,
            b'\\' => text.push(*bytes.next()?),
            _ => text.push(byte),
        }
    }
    Some(Cow::Owned(text))
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
