//! The guide: one module for each page of `docs/`, and no code. The page on the playground is not
//! among them, because its pictures are only in the repository.

/// Links between the pages. The first definition of a link counts, so these replace the definitions
/// at the end of a page, which lead to files.
macro_rules! pages {
    ($($name:ident $file:literal)*) => {$(
        #[doc = "[algorithms]: crate::guide::algorithms"]
        #[doc = "[benchmarks]: crate::guide::benchmarks"]
        #[doc = "[connections]: crate::guide::connections"]
        #[doc = "[http]: crate::guide::http"]
        #[doc = "[keys]: crate::guide::keys"]
        #[doc = "[operation]: crate::guide::operation"]
        #[doc = "[servers]: crate::guide::servers"]
        #[doc = "[several-limits]: crate::guide::several_limits"]
        #[doc = "[waiting]: crate::guide::waiting"]
        #[doc = ""]
        #[doc = include_str!($file)]
        pub mod $name {}
    )*};
}

pages! {
    algorithms "../docs/algorithms.md"
    benchmarks "../docs/benchmarks.md"
    configuration "../docs/configuration.md"
    connections "../docs/connections.md"
    http "../docs/http.md"
    keys "../docs/keys.md"
    layers "../docs/layers.md"
    operation "../docs/operation.md"
    redisson "../docs/redisson.md"
    servers "../docs/servers.md"
    several_limits "../docs/several-limits.md"
    waiting "../docs/waiting.md"
}
