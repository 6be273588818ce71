//! The epochs of what is held: the evidence that the units of a hold are still its own. The units
//! themselves are in `algorithm/hold.rs`.

/// The epochs of a shard. Each is new, as a `reset` may take no time, and must not confuse the
/// holds before it with later ones.
#[derive(Default)]
pub(super) struct Epochs {
    last: i64,
}

impl Epochs {
    /// Returns the epoch of the first hold of a key: its instant, or a number soon after it.
    #[inline]
    pub(super) fn next(&mut self, now: i64) -> i64 {
        self.last = now.max(self.last + 1);
        self.last
    }
}
