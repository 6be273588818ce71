//! The channels of a node: those of each runtime that makes calls. A connection lives in the
//! runtime that made it, so calls of another runtime would end or stand still with it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::runtime::{self, Handle};

use super::{
    super::home,
    channel::{Channel, ConnectionCounts},
    server::Server,
};
use crate::sync::lock;

pub(crate) struct Channels {
    server: Arc<Server>,
    made: Arc<ConnectionCounts>,
    /// The number of connections of a runtime of the application.
    connections: usize,
    /// Read without a lock by each call. A process has few runtimes.
    of_runtimes: ArcSwap<Vec<Arc<RuntimeChannels>>>,
    /// Locked while a runtime is added.
    adding: Mutex<()>,
}

/// The channels of one runtime.
pub(crate) struct RuntimeChannels {
    runtime: runtime::Id,
    channels: Box<[Arc<Channel>]>,
}

impl Channels {
    pub(crate) fn new(server: Arc<Server>, connections: usize) -> Self {
        let (made, of_runtimes) = (Arc::default(), ArcSwap::default());
        Self { server, made, connections, of_runtimes, adding: Mutex::default() }
    }

    /// Returns the channels of the current runtime.
    ///
    /// # Panics
    ///
    /// Outside of a runtime.
    pub(crate) fn current(&self) -> Arc<RuntimeChannels> {
        let runtime = Handle::current().id();
        self.known(runtime).unwrap_or_else(|| self.add(runtime))
    }

    fn known(&self, runtime: runtime::Id) -> Option<Arc<RuntimeChannels>> {
        self.of_runtimes.load().iter().find(|known| known.runtime == runtime).cloned()
    }

    /// Returns the time for which the server has not answered commands of the current runtime;
    /// `None` if no connection is open.
    pub(crate) fn silence(&self) -> Option<Duration> {
        self.most(Channel::silence)
    }

    /// Returns the time for which calls of the current runtime have wanted a connection.
    pub(crate) fn wanted(&self) -> Duration {
        self.most(Channel::wanted).unwrap_or_default()
    }

    fn most(&self, time: impl Fn(&Channel) -> Option<Duration>) -> Option<Duration> {
        let known = self.known(Handle::try_current().ok()?.id())?;
        known.channels.iter().filter_map(|channel| time(channel)).max()
    }

    fn add(&self, runtime: runtime::Id) -> Arc<RuntimeChannels> {
        let _adding = lock(&self.adding);
        let known = self.of_runtimes.load_full();
        if let Some(known) = self.known(runtime) {
            return known;
        }
        // The home makes few calls.
        let is_home = home::is(runtime);
        let count = if is_home { 1 } else { self.connections };
        let channel = |_| Arc::new(Channel::new(self.server.clone(), self.made.clone(), is_home));
        let new =
            Arc::new(RuntimeChannels { runtime, channels: (0..count).map(channel).collect() });
        // Without the runtimes that have ended, or have no connection at the moment.
        let kept = known.iter().filter(|known| known.is_in_use()).chain([&new]);
        self.of_runtimes.store(Arc::new(kept.cloned().collect()));
        new
    }

    /// Gives up the connections whose commands have waited for this time without any reply.
    pub(crate) fn give_up_silent(&self, time: Duration) {
        let of_runtimes = self.of_runtimes.load();
        let channels = of_runtimes.iter().flat_map(|it| &it.channels);
        channels.for_each(|channel| channel.give_up_silent(time));
    }

    /// Returns the number of connections so far, and of those that replaced another one.
    pub(crate) fn made(&self) -> &ConnectionCounts {
        &self.made
    }
}

impl RuntimeChannels {
    pub(crate) fn get(&self, index: usize) -> &Arc<Channel> {
        &self.channels[index % self.channels.len()]
    }

    /// Returns false if the runtime has ended, or has no connection, and no call uses them.
    fn is_in_use(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1 || self.channels.iter().any(|channel| channel.is_in_use())
    }
}
