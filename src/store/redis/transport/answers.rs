//! What an error says: whether the server has answered, and what that means for the connection and for later commands.

use redis::{ErrorKind, RedisError, ServerErrorKind};

/// Whether the server has answered, if with an error.
pub(crate) fn is_answer(error: &RedisError) -> bool {
    // An extension is an error of a kind that the client has no name for.
    let kind = error.kind();
    matches!(kind, ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::UnexpectedReturnType)
}

/// Whether it says how to go on.
pub(crate) fn is_routine(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, Moved, NoScript, TryAgain};
    matches!(error.kind(), ErrorKind::Server(Ask | Moved | NoScript | TryAgain))
}

/// The codes by which a server answers that it changes nothing now, whatever the key is.
const REFUSALS: [&str; 9] = [
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
];

/// Whether the server has answered that it changes nothing now. A script ends at its first write then.
pub(crate) fn is_refusal(error: &RedisError) -> bool {
    REFUSALS.iter().any(|code| {
        // Redis 6.2 puts what stops a script into an `ERR`.
        let in_detail = || error.detail().is_some_and(|it| it.contains(&format!(" -{code} ")));
        error.code() == Some(code) || in_detail()
    })
}

/// Whether an error means that the connection is of no use, and not that the server refused a command.
pub(crate) fn is_of_the_connection(error: &RedisError) -> bool {
    // A server that loads its data may have been replaced as the master.
    let is_loading = error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading);
    error.is_io_error() || error.is_unrecoverable_error() || is_loading || is_of_a_replica(error)
}

/// Whether the server may not write: after a failover it may have become a replica.
pub(crate) fn is_of_a_replica(error: &RedisError) -> bool {
    use ServerErrorKind::{MasterDown, ReadOnly};
    matches!(error.kind(), ErrorKind::Server(ReadOnly | MasterDown))
        // Redis 6.2 puts what stops a script into an `ERR`.
        || error.detail().is_some_and(|detail| detail.contains(" -READONLY "))
}
