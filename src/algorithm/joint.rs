use super::{Action, Ask, Outcome, Verdict};

/// What the limits of one request come to together, as `scripts/verdict.lua` says: a request is admitted by
/// all of its limits or by none, and then goes on when the last of them lets it.
///
/// Each limit is looked at first, and then each is settled by what came of that.
#[derive(Debug, Default)]
pub(crate) struct Joint {
    wait: f64,
    late: f64,
    /// The limit that makes the request wait, or denies it longest, or has least remaining.
    binding: usize,
    verdict: Option<Verdict>,
}

impl Ask {
    /// Asks what would come of it, for one of several limits.
    pub(crate) fn look(&self) -> Self {
        let (cost, max_wait) = match self.action {
            Action::Check | Action::Peek => (self.cost, self.max_wait),
            Action::Refund | Action::Spend => (f64::NEG_INFINITY, f64::INFINITY),
        };
        Self { action: Action::Peek, cost, max_wait, ..*self }
    }
}

impl Joint {
    pub(crate) fn look(&mut self, limit: usize, verdict: Verdict) {
        let (wait, late) = match verdict.admitted {
            true => (verdict.wait, 0.0),
            false => (0.0, verdict.wait),
        };
        if late > self.late || self.late == 0.0 && wait > self.wait {
            self.binding = limit;
        }
        (self.wait, self.late) = (self.wait.max(wait), self.late.max(late));
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let admitted = self.late == 0.0;
        Outcome { admitted, wait: if admitted { self.wait } else { self.late } }
    }

    pub(crate) fn settle(&mut self, limit: usize, verdict: Verdict) {
        let least = self.verdict.is_some_and(|it| verdict.remaining < it.remaining);
        if self.outcome().wait == 0.0 && least {
            self.binding = limit;
        }
        if limit == 0 || limit == self.binding {
            self.verdict = Some(verdict);
        }
    }

    /// The verdict, and the limit that binds.
    pub(crate) fn verdict(self) -> (Verdict, usize) {
        (self.verdict.expect("a request has a limit"), self.binding)
    }
}
