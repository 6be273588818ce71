//! `Limit`: a name and a quota, of which there is one copy in the process. It holds no settings of
//! a limiter beyond these.

use std::{
    collections::{HashMap, HashSet},
    sync::{LazyLock, Mutex},
};

use crate::{quota::Quota, sync::lock};

/// The number of copies that are kept until the process ends, in about a megabyte. A limiter whose
/// quota changes all the time must not fill the memory.
const MAX_LIMITS: usize = 10_000;

/// The name of a limiter, and a quota of it. A decision refers to the copy, which makes decisions
/// small without a count of references that all threads share.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(crate) struct Limit {
    pub(crate) name: &'static str,
    pub(crate) quota: Quota,
}

#[derive(Default)]
struct Known {
    all: HashSet<&'static Limit>,
    first: HashMap<&'static str, &'static Limit>,
}

impl Limit {
    /// Returns the copy of this limit. If there are too many already, it is the first one of the
    /// name, with another quota.
    pub(crate) fn of(name: &'static str, quota: Quota) -> &'static Self {
        static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
        lock(&KNOWN).limit(Self { name, quota }, MAX_LIMITS)
    }

    /// Returns the quota of a limiter, if it is another one.
    pub(crate) fn other<'a>(&self, quota: &'a Quota) -> Option<&'a Quota> {
        (*quota != self.quota).then_some(quota)
    }
}

impl Known {
    fn limit(&mut self, limit: Limit, max: usize) -> &'static Limit {
        if let Some(known) = self.all.get(&limit) {
            return known;
        }
        match self.first.get(limit.name) {
            Some(first) if self.all.len() >= max => first,
            _ => {
                let limit: &'static Limit = Box::leak(Box::new(limit));
                self.all.insert(limit);
                self.first.entry(limit.name).or_insert(limit);
                limit
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_copy_of_a_limit_and_a_bounded_number() {
        let mut known = Known::default();
        let mut of = |name, n| known.limit(Limit { name, quota: Quota::per_second(n) }, 3);
        let [one, two] = [1, 2].map(|n| of("a", n));
        assert_eq!([one.quota, two.quota], [1, 2].map(Quota::per_second));
        assert!(std::ptr::eq(of("a", 2), two));
        assert_eq!(of("b", 1).name, "b");
        assert!(std::ptr::eq(of("a", 3), one), "too many");
        assert_eq!((of("c", 7).name, of("c", 8).quota), ("c", Quota::per_second(7)));
    }
}
