//! Several limits for one request: all of them admit it, or none. Its Lua twin is `scripts/together.lua`.

use super::{Action, Ask, Outcome, Verdict};

/// Asks several limits together, as `scripts/together.lua` does: a request is admitted by all of its limits
/// or by none, and goes on when the last of them lets it. `step` asks one of them. Returns the verdict of the
/// limit that binds, and its place: it denies longest, or has least remaining, and of several such makes the
/// request wait longest.
pub(crate) fn together(
    asks: &[Ask],
    mut step: impl FnMut(usize, &Ask) -> Verdict,
) -> (Verdict, usize) {
    let (mut wait, mut late, mut binding) = (0.0, 0.0, 0);
    let mut waits = vec![0.0; asks.len()];
    for (place, ask) in asks.iter().enumerate().filter(|(_, ask)| ask.action.asks()) {
        let look = step(place, &Ask { action: Action::Peek, ..*ask });
        if look.admitted {
            waits[place] = look.wait;
            wait = look.wait.max(wait);
        } else if look.wait > late {
            (late, binding) = (look.wait, place);
        }
    }

    let admitted = late == 0.0;
    let outcome = Outcome { admitted, wait: if admitted { wait } else { late } };
    let mut verdict: Option<Verdict> = None;
    for (place, ask) in asks.iter().enumerate() {
        let outcome = ask.action.asks().then_some(outcome);
        let own = step(place, &Ask { outcome, ..*ask });
        let binds = match verdict {
            _ if !admitted => place == binding,
            Some(it) if own.remaining == it.remaining => waits[place] > waits[binding],
            Some(it) => own.remaining < it.remaining,
            None => true,
        };
        if binds {
            (verdict, binding) = (Some(own), place);
        }
    }
    (verdict.expect("a request has a limit"), binding)
}
