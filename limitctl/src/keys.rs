//! Keys on the command line, as the extractors of a layer make them.

use std::net::IpAddr;

use tower_ratelimit::{
    Key,
    key::{self, ClientIp, ProxyHeader, Value},
};

const FORMS: &str = "write ip:ADDRESS, header:NAME=VALUE, bearer:TOKEN, cookie:NAME=VALUE, \
     query:NAME=VALUE, route:ROUTE, global, anonymous, text:TEXT, scope:SCOPE=VALUE, or raw:KEY \
     as logs print it";

/// The crate `http` has no longer names, and `key::header` would panic.
const MAX_HEADER_NAME: usize = 65_535;

/// What the extractors of the service are set to.
#[derive(Default)]
pub struct Settings {
    pub ipv6_prefix: u8,
    pub secret: Option<Vec<u8>>,
}

impl Settings {
    /// Returns the key of all parts, as a tuple of extractors makes it.
    pub fn key(&self, parts: &[String]) -> Result<Key<'static>, String> {
        let mut keys = parts.iter().map(|part| self.part(part));
        let first = keys.next().ok_or_else(|| format!("no key; {FORMS}"))??;
        if let Some(secret_of) = self.unused_secret(parts) {
            return Err(secret_of);
        }
        keys.try_fold(first, |key, part| Ok(key.and(&part?)))
    }

    fn unused_secret(&self, parts: &[String]) -> Option<String> {
        let hashes = ["header:", "bearer:", "cookie:", "query:", "scope:"];
        let is_hashed = |part: &String| hashes.iter().any(|it| part.starts_with(it));
        (self.secret.is_some() && !parts.iter().any(is_hashed)).then(|| {
            "--hashed-with: no part of the key can be hashed; omit it, or write header:, bearer:, \
             cookie:, query: or scope:"
                .to_owned()
        })
    }

    fn part(&self, part: &str) -> Result<Key<'static>, String> {
        let wrong = |why: &str| format!("the key {part:?} {why}");
        let (kind, value) = part.split_once(':').unwrap_or((part, ""));
        let named = || {
            let found = value.split_once('=').filter(|(name, _)| !name.is_empty());
            found.ok_or_else(|| wrong(&format!("has no name; write {kind}:NAME=VALUE")))
        };
        match kind {
            "ip" => {
                let address: IpAddr =
                    value.parse().map_err(|_| wrong("is no address; write ip:203.0.113.7"))?;
                // The keys of `PeerIp` are the same, with 64 bits.
                let extractor = ClientIp::new(ProxyHeader::XForwardedFor, [""; 0]);
                Ok(extractor.ipv6_prefix(self.ipv6_prefix).key(address))
            }
            "header" => {
                let (name, value) = named()?;
                let is_name =
                    |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
                if !name.bytes().all(is_name) || name.len() > MAX_HEADER_NAME {
                    return Err(wrong("has a name that no header has; write header:x-api-key=k1"));
                }
                Ok(self.hashed(key::header(name)).key(value))
            }
            "bearer" => Ok(self.hashed(key::bearer()).key(value)),
            "cookie" => named().map(|(name, value)| self.hashed(key::cookie(name)).key(value)),
            "query" => named().map(|(name, value)| self.hashed(key::query(name)).key(value)),
            "scope" => named().map(|(scope, value)| match &self.secret {
                Some(secret) => Key::hashed(scope, value, secret),
                None => Key::scoped(scope, value),
            }),
            "route" => Ok(Key::scoped("route", value)),
            "global" if part == "global" => Ok(key::Global.key()),
            "anonymous" if part == "anonymous" => Ok(Key::scoped("anonymous", "")),
            "text" => Ok(Key::from(value).into_owned()),
            "raw" => Key::from_text(value).ok_or_else(|| {
                wrong(
                    "is not as logs print keys: other characters than printable ASCII, and \
                     % { } = | in a value, are written as %XX; for a bare value write text:VALUE",
                )
            }),
            _ => Err(wrong(&format!("is of no known kind; {FORMS}"))),
        }
    }

    fn hashed(&self, value: Value) -> Value {
        match &self.secret {
            Some(secret) => value.hashed(secret),
            None => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(parts: &[&str]) -> Result<String, String> {
        let settings = Settings { ipv6_prefix: 64, secret: None };
        let parts: Vec<_> = parts.iter().map(|part| (*part).to_owned()).collect();
        settings.key(&parts).map(|key| key.to_string())
    }

    #[test]
    fn keys_are_those_of_the_extractors() {
        for (parts, text) in [
            (&["ip:203.0.113.7"][..], "ip=203.0.113.7"),
            (&["ip:::ffff:203.0.113.7"], "ip=203.0.113.7"),
            (&["ip:2001:db8::7"], "ip=2001:db8::/64"),
            (&["header:X-API-Key=k=1"], "header:x-api-key=k%3D1"),
            (&["bearer:abc"], "bearer=abc"),
            (&["cookie:session=s1"], "cookie:session=s1"),
            (&["query:api_key=k1"], "query:api_key=k1"),
            (&["route:/users/{id}"], "route=/users/%7Bid%7D"),
            (&["global"], "global"),
            (&["anonymous"], "anonymous="),
            (&["text:alice"], "alice"),
            (&["text:a=b"], "a%3Db"),
            (&["scope:user=alice"], "user=alice"),
            (&["raw:ip=203.0.113.7|route=/a"], "ip=203.0.113.7|route=/a"),
            (&["ip:203.0.113.7", "route:/a"], "ip=203.0.113.7|route=/a"),
        ] {
            assert_eq!(key(parts).as_deref(), Ok(text), "{parts:?}");
        }
    }

    #[test]
    fn a_wrong_key_says_what_to_write() {
        for (parts, why) in [
            (&["alice"][..], "text:TEXT"),
            (&["ip:alice"], "write ip:203.0.113.7"),
            (&["header:k1"], "write header:NAME=VALUE"),
            (&["header:a b=k1"], "write header:x-api-key=k1"),
            (&["raw:a b"], "%XX"),
            (&["global:x"], "of no known kind"),
        ] {
            let error = key(parts).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_secret_hashes_the_values_and_must_be_used() {
        let settings = Settings { ipv6_prefix: 64, secret: Some(b"a long random text".to_vec()) };
        let key = |part: &str| settings.key(&[part.to_owned()]);
        let hash = "071dd2bb1e73fdc6805dfe7e37c0f6d9";
        assert_eq!(
            key("header:x-api-key=k1").unwrap().as_str(),
            format!("header:x-api-key=={hash}")
        );
        assert_eq!(key("scope:api-key=k1").unwrap().as_str(), format!("api-key=={hash}"));
        assert!(key("ip:203.0.113.7").unwrap_err().contains("--hashed-with"));
    }
}
