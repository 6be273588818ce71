//! What is known about a server.

/// The state of a server, by the results of calls, in order from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerState {
    /// It executes scripts.
    Ready,
    /// It has not answered yet.
    Unknown,
    /// It answers, but rejects scripts.
    Rejecting,
    /// It does not answer, for another reason than those below.
    Unavailable,
    /// It answers simple commands, but executes no script in time.
    Slow,
    /// It rejects the user or the password.
    LoginRejected,
    /// It accepts connections, but does not answer.
    Silent,
    /// Its address refuses connections.
    Refused,
    /// No connection can be opened within the time.
    Unreachable,
}
