use super::{Action, Ask, Outcome, Verdict};

/// Asks several limits together, as `scripts/together.lua` does: a request is admitted by all of its limits
/// or by none, and goes on when the last of them lets it. `step` asks one of them. Returns the verdict of the
/// limit that binds, and its place: it makes the request wait, or denies it longest, or has least remaining.
pub(crate) fn together(
    asks: &[Ask],
    mut step: impl FnMut(usize, &Ask) -> Verdict,
) -> (Verdict, usize) {
    let (mut wait, mut late, mut binding) = (0.0, 0.0, 0);
    for (place, ask) in asks.iter().enumerate().filter(|(_, ask)| ask.action.asks()) {
        let look = step(place, &Ask { action: Action::Peek, ..*ask });
        let (own_wait, own_late) = if look.admitted { (look.wait, 0.0) } else { (0.0, look.wait) };
        if own_late > late || late == 0.0 && own_wait > wait {
            binding = place;
        }
        (wait, late) = (own_wait.max(wait), own_late.max(late));
    }

    let admitted = late == 0.0;
    let outcome = Outcome { admitted, wait: if admitted { wait } else { late } };
    let mut verdict = None;
    for (place, ask) in asks.iter().enumerate() {
        let outcome = ask.action.asks().then_some(outcome);
        let own = step(place, &Ask { outcome, ..*ask });
        let least = verdict.is_none_or(|it: Verdict| own.remaining < it.remaining);
        if wait.max(late) > 0.0 && place == binding || wait.max(late) == 0.0 && least {
            (verdict, binding) = (Some(own), place);
        }
    }
    (verdict.expect("a request has a limit"), binding)
}
