//! The places of values in a request, and how they are read. The keys of values are in `value`.

use std::borrow::Cow;

use http::{
    HeaderName, HeaderValue,
    header::{AUTHORIZATION, COOKIE},
    request::Parts,
};
use percent_encoding::percent_decode;

#[derive(Clone, Debug)]
pub(super) enum Place {
    Header(HeaderName),
    /// A parameter, by its decoded name.
    Query(Box<str>),
    Cookie(Box<str>),
    /// The header `Authorization`.
    Bearer,
}

/// The values that a place should contain once.
pub(super) enum Found<'a> {
    Nothing,
    One(Cow<'a, [u8]>),
    Several,
}

impl Place {
    /// Returns the value of a header as [`read`](Self::read) does, if no header occurs twice: by
    /// one look-up instead of an iterator.
    #[inline]
    pub(super) fn only_header<'a>(&self, head: &'a Parts) -> Option<&'a [u8]> {
        let Self::Header(name) = self else { return None };
        let is_only = head.headers.len() == head.headers.keys_len();
        let value = if is_only { trimmed(head.headers.get(name)?) } else { b"" };
        (!value.is_empty()).then_some(value)
    }

    pub(super) fn read<'a>(&self, head: &'a Parts) -> Found<'a> {
        let in_headers = |name| head.headers.get_all(name).iter().map(trimmed);
        match self {
            Self::Header(name) => only(in_headers(name).map(Cow::from)),
            Self::Query(name) => only(parameters(head, name)),
            Self::Cookie(name) => {
                // HTTP/2 can split the cookies into several headers.
                let pairs = in_headers(&COOKIE).flat_map(|line| line.split(|&byte| byte == b';'));
                only(pairs.filter_map(|pair| cookie(pair, name.as_bytes())))
            }
            Self::Bearer => {
                let tokens = in_headers(&AUTHORIZATION).map(|value| token(value).unwrap_or(b""));
                only(tokens.map(Cow::from))
            }
        }
    }
}

fn only<'a>(mut values: impl Iterator<Item = Cow<'a, [u8]>>) -> Found<'a> {
    match (values.next(), values.next()) {
        (_, Some(_)) => Found::Several,
        (Some(value), None) if !value.is_empty() => Found::One(value),
        _ => Found::Nothing,
    }
}

/// Returns the value of a header without the spaces around it, which belong to no value (RFC 9110).
/// HTTP/1 removes them; HTTP/2 does not, and a server behind a gateway would.
#[inline]
pub(super) fn trimmed(value: &HeaderValue) -> &[u8] {
    value.as_bytes().trim_ascii()
}

/// Returns the value of a cookie, if it has this name. Services accept several forms of one cookie,
/// which must have one key: spaces around the name and the value, quotes, and percent-encoding.
fn cookie<'a>(pair: &'a [u8], name: &[u8]) -> Option<Cow<'a, [u8]>> {
    let (found, value) = pair.split_at(pair.iter().position(|&byte| byte == b'=')?);
    let found = found.trim_ascii();
    if found != name && Cow::from(percent_decode(found)) != name {
        return None;
    }
    Some(match Cow::from(percent_decode(value[1..].trim_ascii())) {
        Cow::Borrowed(value) => Cow::Borrowed(unquoted(value)),
        Cow::Owned(value) => Cow::Owned(unquoted(&value).to_vec()),
    })
}

fn unquoted(value: &[u8]) -> &[u8] {
    value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value)
}

/// Returns the values of a query parameter.
fn parameters<'a>(head: &'a Parts, name: &str) -> impl Iterator<Item = Cow<'a, [u8]>> {
    let pairs = head.uri.query().unwrap_or_default().split('&');
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let named = pairs.filter(move |(found, _)| *decoded(found) == *name.as_bytes());
    named.map(|(_, value)| decoded(value))
}

/// Decodes `application/x-www-form-urlencoded`.
fn decoded(text: &str) -> Cow<'_, [u8]> {
    match text.contains('+') {
        true => percent_decode(text.replace('+', " ").as_bytes()).collect::<Vec<_>>().into(),
        false => percent_decode(text.as_bytes()).into(),
    }
}

/// Returns the credentials behind `Bearer`, in any case, and spaces.
fn token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("bearer".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer")
        && token.first().is_some_and(|byte| b" \t".contains(byte));
    is_bearer.then(|| token.trim_ascii())
}
