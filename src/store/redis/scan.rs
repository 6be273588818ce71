//! `KeyScan`: the keys of a limiter in Redis, for operators. No decision uses it.

use std::{fmt, sync::Arc, vec};

use super::{
    backend::Backend,
    connections::{ANSWER_TIMEOUT, Command, Deadline, TransportError},
};
use crate::{algorithm::Algorithm, error::StoreError, keys::Key};

/// The keys that one command looks at: it occupies the server for less than a millisecond.
const KEYS_PER_COMMAND: usize = 1_000;

/// A scan over the keys of a limiter in Redis, for a page or a tool for operators: made by
/// [`RedisStore::scan`](crate::RedisStore::scan).
///
/// It looks at *all* keys of the servers, in steps of about 1,000 keys with the command `SCAN`, for
/// which the user at the server needs the permission `+scan`. Do not scan to serve a request.
///
/// A key that has state during the whole scan is found, perhaps more than once. A key that gets
/// state or loses it meanwhile may be found or not, and so may the keys of a slot of a cluster that
/// moves meanwhile.
///
/// # Examples
///
/// ```no_run
/// use tower_ratelimit::{Algorithm, Limiter, Quota, RedisStore};
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://127.0.0.1/").await?;
/// let api = Limiter::new("api", store.clone(), Algorithm::token_bucket(), Quota::per_second(10));
///
/// let mut scan = store.scan("api", Algorithm::token_bucket());
/// while let Some(keys) = scan.next().await? {
///     for key in keys {
///         println!("{key}: {} left", api.peek(&key).await?.remaining());
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct KeyScan {
    backend: Arc<Backend>,
    /// What is in front of each key, without the brace; `None` for all limiters.
    head: Option<String>,
    /// The servers that are left, after the first step.
    places: Option<vec::IntoIter<u16>>,
    /// The server that is being scanned, and its cursor.
    position: Option<(u16, u64)>,
}

impl KeyScan {
    /// With `None`, the scan is over the keys of all limiters, under all prefixes.
    pub(super) fn new(backend: Arc<Backend>, of: Option<(&str, Algorithm)>) -> Self {
        let head = of.map(|(limiter, algorithm)| {
            [&backend.prefix, ":", limiter, ":", algorithm.name(), ":"].concat()
        });
        Self { backend, head, places: None, position: None }
    }

    /// Makes one step: returns the keys that it has found, often none, or `None` if all servers
    /// were scanned. A step looks at about 1,000 keys of a server.
    ///
    /// # Errors
    ///
    /// If the server does not answer within a second, or the user lacks the permission `+scan`. The
    /// next call repeats the step.
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time; the next call repeats the step.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time and I/O.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::{Algorithm, RedisStore};
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let mut scan = store.scan("api", Algorithm::token_bucket());
    /// while let Some(keys) = scan.next().await? {
    ///     println!("{}", keys.len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    // Not an iterator: a step needs the answer of a server.
    #[allow(clippy::should_implement_trait)]
    pub async fn next(&mut self) -> Result<Option<Vec<Key<'static>>>, StoreError> {
        let names = self.names().await?;
        Ok(names
            .map(|names| names.iter().filter_map(|it| key_in(it, self.head.as_deref())).collect()))
    }

    /// Makes the same step as [`next`](KeyScan::next), but returns the names in Redis, such as
    /// `ratelimit:api:token-bucket:{ip=192.0.2.1}`: the prefix, the limiter, the algorithm and the
    /// key. Names of limiters and algorithms have no colons.
    ///
    /// # Errors
    ///
    /// Those of [`next`](KeyScan::next).
    ///
    /// # Cancel safety
    ///
    /// The future can be dropped at any time; the next call repeats the step.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time and I/O.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use tower_ratelimit::RedisStore;
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = RedisStore::connect("redis://127.0.0.1/").await?;
    /// let mut scan = store.scan_all();
    /// while let Some(names) = scan.next_names().await? {
    ///     println!("{}", names.join(" "));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn next_names(&mut self) -> Result<Option<Vec<String>>, StoreError> {
        let names = self.names().await?.map(|names| {
            let names = names.into_iter().filter(|it| key_in(it, self.head.as_deref()).is_some());
            names.filter_map(|name| String::from_utf8(name).ok()).collect()
        });
        Ok(names)
    }

    async fn names(&mut self) -> Result<Option<Vec<Vec<u8>>>, StoreError> {
        self.step().await.map_err(|error| self.backend.monitor.explain(error).into_store_error())
    }

    async fn step(&mut self) -> Result<Option<Vec<Vec<u8>>>, TransportError> {
        let deadline = Deadline::new(ANSWER_TIMEOUT);
        let client = &self.backend.client;
        let places = match &mut self.places {
            Some(places) => places,
            None => self.places.insert(client.places(deadline).await?.into_iter()),
        };
        let Some((place, cursor)) = self.position.or_else(|| Some((places.next()?, 0))) else {
            return Ok(None);
        };
        self.position = Some((place, cursor));
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern(self.head.as_deref()));
        scan.arg("COUNT").arg(KEYS_PER_COMMAND);
        let ((cursor, names), _): ((u64, Vec<Vec<u8>>), _) =
            client.node_of(place).execute(deadline, Command::new(&scan)).await?;
        self.position = Some((place, cursor)).filter(|_| cursor != 0);
        Ok(Some(names))
    }
}

impl fmt::Debug for KeyScan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyScan").field("head", &self.head).finish_non_exhaustive()
    }
}

/// Returns the pattern of the names with this head. A prefix can contain any character.
fn pattern(head: Option<&str>) -> String {
    let Some(head) = head else { return "*:*:{*}".to_owned() };
    let mut pattern = String::with_capacity(head.len() + 3);
    for character in head.chars() {
        if "*?[]^\\".contains(character) {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern + "{*}"
}

/// Returns the key in a name that `Backend::key` has made.
fn key_in(name: &[u8], head: Option<&str>) -> Option<Key<'static>> {
    let name = str::from_utf8(name).ok()?;
    let key = match head {
        Some(head) => name.strip_prefix(head)?.strip_prefix('{')?,
        None => {
            // No prefix contains a brace.
            let (head, key) = name.split_once(":{")?;
            let (limiter, algorithm) = head.rsplit_once(':')?;
            algorithm.parse::<Algorithm>().ok().filter(|_| limiter.contains(':'))?;
            key
        }
    };
    let key = key.strip_suffix('}')?;
    Key::from_text(if key == "%" { "" } else { key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_the_prefix_to_the_letter() {
        assert_eq!(pattern(Some("ratelimit:api:")), "ratelimit:api:{*}");
        assert_eq!(pattern(Some("a*[b]\\?:")), "a\\*\\[b\\]\\\\\\?:{*}");
    }

    #[test]
    fn a_key_is_found_in_its_name() {
        let found =
            |name: &str| key_in(name.as_bytes(), Some("p:api:a:")).map(|key| key.to_string());
        assert_eq!(found("p:api:a:{ip=192.0.2.1}"), Some("ip=192.0.2.1".to_owned()));
        assert_eq!(found("p:api:a:{%}"), Some(String::new()));
        assert_eq!(found("p:api:a:{a b}"), None);
        assert_eq!(found("p:api:a:{a}:reserved"), None);
    }

    #[test]
    fn a_key_of_any_limiter_is_found_in_its_name() {
        let found = |name: &str| key_in(name.as_bytes(), None).map(|key| key.to_string());
        assert_eq!(found("p:q:api:token-bucket:{a=b:%7B}"), Some("a=b:%7B".to_owned()));
        for name in ["api:token-bucket:{a}", "p:api:other:{a}", "p:api:{a}", "{a}:x", "p:a:b:{a}:r"]
        {
            assert_eq!(found(name), None, "{name}");
        }
    }
}
