//! The names that the fields of logs have. Knows no formats.

/// The names of time stamps, [`plain`]; two names are a date and the time of the day.
pub const TIMES: [&str; 21] = [
    "time",
    "timestamp",
    "ts",
    "starttime",
    "timeiso8601",
    "msec",
    "timelocal",
    "datetime",
    "startutc",
    "startlocal",
    "start",
    "requesttime",
    "requesttimeepoch",
    "eventtime",
    "asctime",
    "realtimetimestamp",
    "date",
    "date,time",
    "time,date",
    "t",
    PREFIX,
];

/// The names of addresses of clients, [`plain`]: those that the server has found out, then those of
/// the peer, then [`FORWARDED`].
pub const ADDRESSES: [&str; 43] = [
    "ip",
    "clientip",
    "clientaddr",
    "clientaddress",
    "clienthost",
    "client.ip",
    "client.address",
    "network.client.ip",
    "cip",
    "downstreamremoteaddress",
    "remoteip",
    "remoteaddr",
    "remoteaddress",
    "remotehost",
    "ipaddress",
    "sourceip",
    "source.ip",
    "source.address",
    "sourceipaddress",
    "srcip",
    "src",
    "calleripaddress",
    "id.origh",
    "peerip",
    "peeraddr",
    "peeraddress",
    "network.peer.address",
    "net.peer.ip",
    "net.sock.peer.addr",
    "sockip",
    "client",
    "peer",
    "remote",
    "xrealip",
    "realip",
    "httpxrealip",
    "cfconnectingip",
    "trueclientip",
    "xforwardedfor",
    "httpxforwardedfor",
    "forwardedfor",
    "fwd",
    "forwarded",
];

/// The names of addresses that a proxy reports, or that a client forges.
pub const FORWARDED: [&str; 11] = [
    "front",
    "xrealip",
    "realip",
    "httpxrealip",
    "cfconnectingip",
    "trueclientip",
    "xforwardedfor",
    "httpxforwardedfor",
    "forwardedfor",
    "fwd",
    "forwarded",
];

/// The fields that can contain the line of another program, [`plain`].
pub const LINES: [&str; 6] = ["log", "message", "msg", "textpayload", "line", "raw"];

/// The time stamp in front of an object of JSON.
pub const PREFIX: &str = "prefix";

/// Objects that say nothing about the fields in them.
const AROUND: [&str; 20] = [
    "request",
    "req",
    "http",
    "httprequest",
    "headers",
    "header",
    "fields",
    "span",
    "spans",
    "properties",
    "jsonpayload",
    "attributes",
    "data",
    "context",
    "requestcontext",
    "identity",
    "event",
    "extra",
    "access",
    "record",
];

/// Returns a name without what differs between logs: cases, `_` and `-`, a unit in brackets, and
/// the objects around it. `request.headers.X-Forwarded-For` is `xforwardedfor`.
pub fn plain(name: &str) -> String {
    let name = name.split([' ', '[', '(']).next().unwrap_or(name);
    let parts = name.split('.').map(|part| {
        part.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
    });
    let parts: Vec<_> = parts.collect();
    let is_inside = |part: &&String| {
        !AROUND.contains(&&***part) && !part.bytes().all(|byte| byte.is_ascii_digit())
    };
    let inside: Vec<_> = parts.iter().filter(is_inside).map(String::as_str).collect();
    inside.join(".")
}
