//! The URLs of Redis: that of one server, and those that name all nodes and settings. All callers
//! read URLs here, so one URL has one answer. It opens no connection.

use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo,
};

use super::link::{Place, TransportError};

/// The nodes that a URL names, as URLs.
pub(super) enum Nodes {
    Server(String),
    Sentinels {
        sentinels: Vec<String>,
        /// With the name in place of the host.
        master: String,
    },
    Cluster(Vec<String>),
}

/// The settings of connections in the parameters of a URL.
#[derive(Debug, Default, PartialEq)]
pub(super) struct UrlSettings {
    pub(super) connections: Option<usize>,
    pub(super) script_flags: Option<String>,
}

const SETTINGS: [&str; 2] = ["connections", "script_flags"];
const SENTINELS: [&str; 2] = ["sentinel_user", "sentinel_password"];

/// The forms of a URL, for errors.
pub const FORMS: &str = "redis://HOST:PORT, rediss://HOST:PORT, unix:///PATH, \
                                redis+sentinel://HOST:PORT,HOST:PORT/MASTER or \
                                redis+cluster://HOST:PORT,HOST:PORT";

/// Reads a URL with all nodes and settings. `further` are the names of the owner's parameters,
/// which it reads itself.
pub(super) fn read<'a>(
    url: &'a str,
    further: &[&str],
) -> Result<(Nodes, UrlSettings, Parameters<'a>), TransportError> {
    if let Some(why) = scheme_error(url) {
        return Err(TransportError::config(format!(
            "cannot use the Redis URL: {why}; write {FORMS}"
        )));
    }
    reject_ambiguous(url)?;
    let invalid = |why: &str| invalid(url, why);
    let parameters = Parameters::of(url);
    let scheme = url.split("://").next().unwrap_or_default();
    let topology = scheme.split_once('+').filter(|(_, topology)| *topology != "unix");
    let own = [further, &SETTINGS].concat();
    let known = match topology {
        Some((_, "sentinel")) => [&own[..], &["protocol"], &SENTINELS].concat(),
        _ => [&own[..], &["protocol"]].concat(),
    };
    parameters.reject_unknown(&known, &invalid)?;
    let settings = UrlSettings::read(&parameters, &invalid)?;
    let nodes = match topology {
        None => Nodes::Server(parameters.without(&own)),
        Some((tls, topology)) => several_nodes(scheme, tls, topology, &parameters, &invalid)?,
    };
    Ok((nodes, settings, parameters))
}

/// Returns the nodes of a URL such as `redis+cluster://HOST,HOST`.
fn several_nodes(
    scheme: &str,
    tls: &str,
    topology: &str,
    parameters: &Parameters<'_>,
    invalid: &impl Fn(&str) -> TransportError,
) -> Result<Nodes, TransportError> {
    let rest = &parameters.before[scheme.len() + 3..];
    let (login, rest) = match rest.rsplit_once('@') {
        Some((login, rest)) => ([login, "@"].concat(), rest),
        None => (String::new(), rest),
    };
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts = hosts.split(',').filter(|host| !host.is_empty());
    match topology {
        "cluster" if path.is_empty() => {
            Ok(Nodes::Cluster(hosts.map(|host| [tls, "://", &login, host].concat()).collect()))
        }
        "cluster" => Err(invalid("a cluster has no databases; remove the path")),
        "sentinel" if path.is_empty() => {
            Err(invalid("it names no master; write redis+sentinel://HOST:PORT,HOST:PORT/MASTER"))
        }
        "sentinel" => {
            let of_sentinels = parameters.sentinel_login();
            let sentinels = hosts.map(|host| [tls, "://", &of_sentinels, host].concat()).collect();
            let master = [tls, "://", &login, path].concat();
            Ok(Nodes::Sentinels { sentinels, master })
        }
        _ => unreachable!("`scheme_error` rejects other topologies"),
    }
}

/// Returns what is wrong with the scheme of a URL. Any other part can contain a password, and is
/// not repeated.
pub fn scheme_error(url: &str) -> Option<String> {
    const SCHEMES: [&str; 7] =
        ["redis", "rediss", "valkey", "valkeys", "unix", "redis+unix", "valkey+unix"];
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    let topology = scheme.strip_prefix("rediss+").or_else(|| scheme.strip_prefix("redis+"));
    if url != url.trim() {
        return Some("it begins or ends with a space".to_owned());
    }
    if SCHEMES.contains(&scheme) || matches!(topology, Some("sentinel" | "cluster")) {
        return None;
    }
    let is_address = url.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:".contains(&byte))
        && url.split_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_ok());
    let is_word = scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+');
    Some(match scheme {
        "" if is_address => format!("`{url}` has no scheme"),
        "" => "it has no scheme".to_owned(),
        _ if is_word => format!("the scheme `{scheme}` is unknown"),
        _ => "the scheme is invalid".to_owned(),
    })
}

/// Rejects a URL with special characters in the login. The error cannot name the address.
fn reject_ambiguous(url: &str) -> Result<(), TransportError> {
    let is_unix = url.contains("unix://");
    if !is_unix && url.contains(char::is_whitespace) {
        return Err(TransportError::config(
            "cannot use the Redis URL: it contains a space; remove it, or write %20 in a password",
        ));
    }
    let is_ambiguous = url.contains('#') || !is_unix && url.matches('@').count() > 1;
    match is_ambiguous && !url.ends_with("#insecure") {
        true => Err(TransportError::config(
            "cannot use the Redis URL: it contains a `#` or more than one `@`; percent-encode the \
             special characters of the user and the password: %23 for #, %40 for @, %2F for /",
        )),
        false => Ok(()),
    }
}

fn invalid(url: &str, why: &str) -> TransportError {
    TransportError::config(format!("cannot use the Redis URL {}: {why}", masked(url)))
}

/// A URL, split into its parameters and the part before them.
#[derive(Debug)]
pub struct Parameters<'a> {
    url: &'a str,
    before: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
}

impl<'a> Parameters<'a> {
    /// A `?` before an `@` belongs to a password.
    fn of(url: &'a str) -> Self {
        let host = if url.contains("unix://") { 0 } else { url.rfind('@').unwrap_or(0) };
        let Some(start) = url[host..].find('?').map(|at| host + at) else {
            return Self { url, before: url, pairs: vec![] };
        };
        let pairs = url[start + 1..].split('&').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect();
        Self { url, before: &url[..start], pairs }
    }

    /// Returns the value of a parameter.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1)
    }

    /// Returns the error of an invalid parameter.
    pub fn invalid(&self, why: &str) -> TransportError {
        invalid(self.url, why)
    }

    /// Returns the URL without the parameters of these names.
    fn without(&self, names: &[&str]) -> String {
        let rest = self.pairs.iter().filter(|pair| !names.contains(&pair.0));
        let rest: Vec<_> = rest.map(|(name, value)| format!("{name}={value}")).collect();
        let mark = if rest.is_empty() { "" } else { "?" };
        [self.before, mark, &rest.join("&")].concat()
    }

    fn reject_unknown(
        &self,
        known: &[&str],
        invalid: &impl Fn(&str) -> TransportError,
    ) -> Result<(), TransportError> {
        let unix: &[&str] =
            if self.before.contains("unix://") { &["db", "user", "pass"] } else { &[] };
        let known: Vec<_> = [known, unix].concat();
        match self.pairs.iter().find(|pair| !known.contains(&pair.0)) {
            Some(("db", _)) => {
                Err(invalid("the database is the path of this URL; write redis://HOST:PORT/DB"))
            }
            Some((name, _)) => Err(invalid(&format!(
                "the parameter `{name}` is unknown; the parameters are {}",
                known.join(", ")
            ))),
            None => Ok(()),
        }
    }

    fn sentinel_login(&self) -> String {
        let [user, password] = SENTINELS.map(|name| self.get(name));
        match password {
            Some(password) => format!("{}:{password}@", user.unwrap_or_default()),
            None => String::new(),
        }
    }
}

impl UrlSettings {
    fn read(
        parameters: &Parameters<'_>,
        invalid: &impl Fn(&str) -> TransportError,
    ) -> Result<Self, TransportError> {
        let connections = parameters.get("connections").map(|text| match text.parse() {
            Ok(connections) if connections > 0 => Ok(connections),
            _ => Err(invalid(&format!("`connections={text}` is not a number from 1 on"))),
        });
        let script_flags = parameters.get("script_flags").map(|flags| {
            let is_flag = |flag: &str| {
                !flag.is_empty() && flag.bytes().all(|it| it.is_ascii_alphanumeric() || it == b'-')
            };
            match flags.split(',').all(is_flag) {
                true => Ok(flags.to_owned()),
                false => Err(invalid(
                    "`script_flags` has a name that is not a flag; write for example \
                     script_flags=allow-key-locking",
                )),
            }
        });
        Ok(Self { script_flags: script_flags.transpose()?, connections: connections.transpose()? })
    }
}

/// A parsed URL.
#[derive(Clone)]
pub(super) struct Url {
    pub(super) place: Place,
    pub(super) login: RedisConnectionInfo,
    pub(super) is_tls: bool,
}

impl Url {
    /// Reads the URL of one node, without settings.
    pub(super) fn read(url: &str) -> Result<Self, TransportError> {
        reject_ambiguous(url)?;
        let form = |why: &str| {
            let form = "write redis://HOST:PORT/DB, unix:///PATH, or with the feature `tls-rustls` \
                        rediss://HOST:PORT/DB, with special characters of a password as in %2F for \
                        a slash";
            invalid(url, &format!("{why}; {form}"))
        };
        let invalid = |why: &str| invalid(url, why);
        let plain = |from: &str, to: &str| url.strip_prefix(from).map(|rest| [to, rest].concat());
        let plain = plain("rediss://", "redis://").or_else(|| plain("valkeys://", "valkey://"));
        if plain.is_some() && url.ends_with("#insecure") {
            return Err(invalid(
                "certificates are always checked; remove `#insecure`, and give the CA \
                 certificates to `RedisConfig::ca_certificates`",
            ));
        }
        let is_tls = plain.is_some();
        let info: ConnectionInfo =
            plain.as_deref().unwrap_or(url).into_connection_info().map_err(|error| {
                let why = error.to_string();
                form(why.split(" - InvalidClientConfig").next().unwrap_or(&why))
            })?;
        let place = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Place::Tcp((host.clone(), *port)),
            ConnectionAddr::Unix(path) => Place::Unix(path.clone()),
            other => return Err(form(&format!("{other} is not an address"))),
        };
        if info.redis_settings().db() < 0 {
            return Err(invalid("the database must be a number, 0 or above"));
        }
        let parameters = Parameters::of(url);
        parameters.reject_unknown(&["protocol"], &invalid)?;
        // Servers before 7.2 do not know CLIENT SETINFO, and the user may lack the permission for
        // it.
        let mut login = info.redis_settings().clone().set_skip_set_lib_name();
        if parameters.get("protocol").is_none() {
            login = login.set_protocol(ProtocolVersion::RESP3);
        }
        Ok(Self { place, login, is_tls })
    }

    pub(super) fn read_all(
        urls: impl IntoIterator<Item = impl AsRef<str>>,
        form: &str,
    ) -> Result<Vec<Self>, TransportError> {
        let urls: Result<Vec<_>, _> =
            urls.into_iter().map(|url| Self::read(url.as_ref())).collect();
        match urls {
            Ok(urls) if urls.is_empty() => Err(TransportError::config(format!(
                "cannot find Redis: there is no URL; write {form}"
            ))),
            Ok(urls) if urls.iter().any(|url| url.is_tls != urls[0].is_tls) => {
                Err(TransportError::config(
                    "cannot use redis:// and rediss:// URLs together: unlisted nodes are \
                     connected to like the first one; write rediss:// for all of them",
                ))
            }
            urls => urls,
        }
    }
}

/// Returns the URL without its user, password and query.
fn masked(url: &str) -> String {
    let without_query = |url: &str| url.split('?').next().unwrap_or_default().to_owned();
    if url.contains("unix://") {
        return without_query(url); // the password is in the query
    }
    let scheme = url.find("://").map_or("", |end| &url[..end + 3]);
    match url.rsplit_once('@') {
        Some((_, rest)) => [scheme, "***@", &without_query(rest)].concat(),
        // Without an '@' after it, a password stands in place of the port.
        None if url[scheme.len()..].matches(':').count() > 1 => [scheme, "***"].concat(),
        None => without_query(url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_masked() {
        for (url, shown) in [
            ("redis://alice:secret@host:6379/0", "redis://***@host:6379/0"),
            ("redis://:se@cret@host", "redis://***@host"),
            ("alice:secret@host", "***@host"),
            ("redis://alice:sec?ret@host:6379/0", "redis://***@host:6379/0"),
            ("redis://host?secret=1", "redis://host"),
            ("redis://alice:secret:host:6379", "redis://***"),
            ("unix:///a/socket?pass=sec@ret", "unix:///a/socket"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(masked(url), shown);
        }
    }

    /// A parameter of the owner.
    const FURTHER: [&str; 1] = ["colour"];

    fn nodes(url: &str) -> String {
        match read(url, &FURTHER) {
            Ok((Nodes::Server(url), ..)) => url,
            Ok((Nodes::Cluster(nodes), ..)) => nodes.join(" "),
            Ok((Nodes::Sentinels { sentinels, master }, ..)) => {
                format!("{} -> {master}", sentinels.join(" "))
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn one_url_names_all_nodes() {
        for (url, expected) in [
            ("redis://a:1/2?colour=red", "redis://a:1/2"),
            ("unix:///a/b?db=3&connections=2", "unix:///a/b?db=3"),
            ("rediss+cluster://:p@a:1,b", "rediss://:p@a:1 rediss://:p@b"),
            ("redis+sentinel://a:1,b:2/main", "redis://a:1 redis://b:2 -> redis://main"),
            (
                "rediss+sentinel://u:p@a/main/3?sentinel_password=q&connections=2",
                "rediss://:q@a -> rediss://u:p@main/3",
            ),
        ] {
            assert_eq!(nodes(url), expected);
        }
    }

    #[test]
    fn parameters_are_settings_and_the_owner_reads_its_own() {
        let url = "redis+cluster://a?colour=red&connections=2&script_flags=allow-key-locking";
        let (_, settings, parameters) = read(url, &FURTHER).unwrap();
        let script_flags = Some("allow-key-locking".to_owned());
        assert_eq!(settings, UrlSettings { connections: Some(2), script_flags });
        assert_eq!(parameters.get("colour"), Some("red"));
    }

    #[test]
    fn an_invalid_url_says_what_is_wrong() {
        for (url, part) in [
            ("redis+sentinel://a:1,b:2", "names no master"),
            ("redis+cluster://a/1", "no databases"),
            ("redis+ring://a", "the scheme `redis+ring` is unknown"),
            ("redis+cluster://:secret@a?dead=1s", "`dead` is unknown"),
            ("redis://a?connections=0", "from 1 on"),
            ("redis://a?script_flags=a,,b", "allow-key-locking"),
        ] {
            let text = nodes(url);
            assert!(text.contains(part) && !text.contains("secret"), "{url}: {text}");
        }
        let error = Url::read("redis://a?colour=red").err().unwrap().to_string();
        assert!(error.contains("`colour` is unknown"), "{error}");
    }
}
