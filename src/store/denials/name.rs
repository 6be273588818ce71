//! A key of a limiter. Addresses suffice to compare limiters: there is one copy of each name.

use std::ptr;

use crate::keys::Key;

#[derive(Clone, Copy)]
pub(super) struct LimiterKey<'a> {
    pub(super) hash: u64,
    pub(super) limiter: &'static str,
    pub(super) key: &'a [u8],
}

#[derive(Clone)]
pub(super) struct OwnedLimiterKey {
    pub(super) hash: u64,
    pub(super) limiter: &'static str,
    pub(super) key: Key<'static>,
}

impl OwnedLimiterKey {
    /// Keeps a key with this name.
    pub(super) fn new(LimiterKey { hash, limiter, .. }: LimiterKey<'_>, key: &Key<'_>) -> Self {
        Self { hash, limiter, key: key.clone().into_owned() }
    }

    pub(super) fn borrowed(&self) -> LimiterKey<'_> {
        LimiterKey { hash: self.hash, limiter: self.limiter, key: self.key.as_bytes() }
    }

    pub(super) fn is(&self, name: LimiterKey<'_>) -> bool {
        self.key.as_bytes() == name.key && ptr::eq(self.limiter, name.limiter)
    }
}
