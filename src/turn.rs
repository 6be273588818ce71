//! Waiting for a turn, and giving it back.

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::time::{Sleep, sleep};

use crate::{
    decision::Decision, error::StoreError, key::Key, limiter::Limiter, store::Answer,
    waiters::Place,
};

/// A request that asks for its turn, and waits for it. Dropped before it goes on, it gives back what it
/// has spent or booked.
pub(crate) struct Turn {
    phase: Phase,
    /// Until it goes on, or gives back.
    who: Option<(Limiter, Key<'static>, Option<Place>)>,
}

enum Phase {
    Asking(Answer<Decision>),
    Admitted(Decision, Option<Pin<Box<Sleep>>>),
    Over,
}

impl Turn {
    pub(crate) fn new(
        limiter: Limiter,
        key: Key<'static>,
        answer: Answer<Decision>,
        place: Option<Place>,
    ) -> Self {
        Self { phase: Phase::Asking(answer), who: Some((limiter, key, place)) }
    }

    /// Waits for the decision. If that allows, there is its delay to wait for.
    pub(crate) fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Decision, StoreError>> {
        let Phase::Asking(answer) = &mut self.phase else { panic!("polled after completion") };
        let answer = ready!(Pin::new(answer).poll(cx));
        self.phase = match answer {
            Ok(decision) if decision.is_allowed() => Phase::Admitted(decision, None),
            _ => Phase::Over,
        };
        if let Phase::Admitted(decision, timer) = &mut self.phase
            && !decision.sleep().is_zero()
        {
            *timer = Some(Box::pin(sleep(decision.sleep())));
        }
        Poll::Ready(answer)
    }

    pub(crate) fn poll_sleep(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.phase {
            Phase::Admitted(_, Some(sleep)) => sleep.as_mut().poll(cx),
            _ => Poll::Ready(()),
        }
    }

    /// The request goes on, and nothing is given back. Returns who is charged.
    pub(crate) fn go(mut self) -> Option<Key<'static>> {
        self.phase = Phase::Over;
        self.who.take().map(|(_, key, _)| key)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let answer = match mem::replace(&mut self.phase, Phase::Over) {
            Phase::Asking(answer) => answer,
            Phase::Admitted(decision, _) => Answer::ready(Ok(decision)),
            Phase::Over => return,
        };
        let Some((limiter, key, place)) = self.who.take() else { return };
        let store = limiter.store().clone();
        store.detach(Box::pin(async move {
            if let Ok(decision) = answer.await
                && decision.is_allowed()
            {
                // Without an answer the turn passes unused.
                let _ = limiter.give_back(&key, &decision).await;
            }
            drop(place);
        }));
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}
