//! An observer that calls its store and a limiter from within each event, and a time limit for
//! tests in which that could deadlock.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock,
        mpsc::{RecvTimeoutError, channel},
    },
    task::{Context, Waker},
    thread,
    time::Duration,
};

use tokio::runtime::Builder;
use tower_ratelimit::{
    Algorithm, Charge, Error, Limiter, Quota,
    observe::{Event, Observer},
    store::Store,
};

/// The number of events of each kind that call back: what they call has events, too.
const CALLS: usize = 3;

pub struct CallsBack<S> {
    store: S,
    limiter: OnceLock<Limiter>,
    /// The number of events by their kinds.
    seen: Mutex<BTreeMap<String, usize>>,
}

impl<S: Store + Clone> CallsBack<S> {
    /// Adds the observer to the store.
    pub fn add_to(store: &S) -> Arc<Self> {
        let (limiter, seen) = (OnceLock::new(), Mutex::default());
        let observer = Arc::new(Self { store: store.clone(), limiter, seen });
        store.clone().into_any().add_observer(observer.clone());
        observer
    }

    /// Makes a limiter over the store, which is called from then on.
    pub fn limiter(&self, quota: Quota) -> Limiter {
        let make = || Limiter::new("called", self.store.clone(), Algorithm::token_bucket(), quota);
        self.limiter.get_or_init(make).clone()
    }

    /// Returns the kinds of the events so far.
    pub fn kinds(&self) -> Vec<String> {
        self.seen.lock().unwrap().keys().cloned().collect()
    }

    fn call(&self, kind: &str, count: usize, limiter: &Limiter) {
        let store = self.store.clone().into_any();
        store.add_observer(Arc::new(|_: &Event<'_>| ()));
        let _ = store.health();
        let name = format!("{kind}-{count}");
        let quota = Quota::per_hour(9);
        let made = Limiter::try_new(&name, self.store.clone(), Algorithm::FixedWindow, quota);
        made.unwrap().set_quota(Quota::per_hour(8)).unwrap();
        let minute = Duration::from_secs(60);
        begin(limiter, async |limiter| limiter.check("key").await.map(drop));
        begin(limiter, async |limiter| limiter.check("blocked").await.map(drop));
        begin(limiter, async move |limiter| limiter.block("blocked", minute).await.map(drop));
        begin(limiter, async |limiter| limiter.reset("other").await);
        begin(limiter, async |limiter| {
            let charge = Charge::new(&limiter, "key").and(Charge::new(&limiter, "other"));
            charge.check().await.map(drop)
        });
    }
}

impl<S: Store + Clone> Observer for CallsBack<S> {
    fn on_event(&self, event: &Event<'_>) {
        let event = format!("{event:?}");
        let kind = event.split(' ').next().unwrap_or_default();
        let count = {
            let mut seen = self.seen.lock().unwrap();
            let count = seen.entry(kind.to_owned()).or_default();
            *count += 1;
            *count
        };
        if let Some(limiter) = self.limiter.get().filter(|_| count <= CALLS) {
            self.call(kind, count, limiter);
        }
    }
}

/// Begins a call within the event. What is left of it runs in a task.
fn begin<F>(limiter: &Limiter, call: impl FnOnce(Limiter) -> F)
where
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let mut call = Box::pin(call(limiter.clone()));
    if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        tokio::spawn(call);
    }
}

/// Runs a test in a thread of its own, so that a deadlock fails it.
pub fn within_a_minute<T, F>(test: impl FnOnce() -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T>,
{
    let (sender, receiver) = channel();
    let thread = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let _ = sender.send(runtime.block_on(test()));
    });
    match receiver.recv_timeout(Duration::from_secs(60)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().unwrap_err())
        }
        Err(RecvTimeoutError::Timeout) => panic!("a deadlock: an observer is called under a lock"),
    }
}
