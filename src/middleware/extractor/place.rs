//! The places of values in a request, and how they are read. The keys of values are in `value`.

use std::borrow::Cow;

use http::{
    HeaderName,
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
        let value = if is_only { head.headers.get(name)?.as_bytes() } else { b"" };
        (!value.is_empty()).then_some(value)
    }

    pub(super) fn read<'a>(&self, head: &'a Parts) -> Found<'a> {
        let in_headers = |name| head.headers.get_all(name).iter().map(|value| value.as_bytes());
        match self {
            Self::Header(name) => only(in_headers(name).map(Cow::from)),
            Self::Query(name) => only(parameters(head, name)),
            Self::Cookie(name) => {
                // HTTP/2 can split the cookies into several headers.
                let pairs = in_headers(&COOKIE).flat_map(|line| line.split(|&byte| byte == b';'));
                let values = pairs.filter_map(|pair| {
                    let value = pair.trim_ascii().strip_prefix(name.as_bytes())?;
                    value.strip_prefix(b"=")
                });
                only(values.map(Cow::from))
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
    let (scheme, token) = value.split_at_checked("bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}
