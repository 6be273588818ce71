//! Combines several limits for one request: all of them admit it, or none. Its Lua twin is
//! `scripts/combine.lua`.

use super::request::{Action, Admission, EngineReply, EngineRequest};

/// Decides about several limits. All of them admit the request or none, and it proceeds when the
/// last of them lets it. `step` decides about one of them. Returns the reply of the limit that
/// binds, and its index: the one that denies longest, or else has least remaining, and of several
/// such the one that makes the request wait longest.
pub(crate) fn combine(
    requests: &[EngineRequest],
    mut step: impl FnMut(usize, &EngineRequest) -> EngineReply,
) -> (EngineReply, usize) {
    let (mut wait, mut excess, mut binding) = (0.0, 0.0, 0);
    let mut waits = vec![0.0; requests.len()];
    for (limit, request) in requests.iter().enumerate() {
        if !request.action.can_be_denied() {
            continue; // what is spent for one limit does not wait for another
        }
        let peek = step(limit, &EngineRequest { action: Action::Peek, ..*request });
        if peek.admitted {
            waits[limit] = peek.wait;
            wait = peek.wait.max(wait);
        } else if peek.wait > excess {
            (excess, binding) = (peek.wait, limit);
        }
    }

    let admitted = excess == 0.0;
    let admission = Admission { admitted, wait: if admitted { wait } else { excess } };
    let mut reply: Option<EngineReply> = None;
    for (limit, request) in requests.iter().enumerate() {
        let admission = request.action.can_be_denied().then_some(admission);
        let own = step(limit, &EngineRequest { admission, ..*request });
        let binds = match reply {
            _ if !admitted => limit == binding,
            Some(known) if own.remaining == known.remaining => waits[limit] > waits[binding],
            Some(known) => own.remaining < known.remaining,
            None => true,
        };
        if binds {
            (reply, binding) = (Some(own), limit);
        }
    }
    (reply.expect("a request has a limit"), binding)
}
