//! What is measured: this crate, other rate limiters, and on request this crate at another commit.

use crate::programs::Program;

/// A limiter with one algorithm.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// The name on the command line, unique.
    pub id: &'static str,
    pub label: &'static str,
    pub kind: Kind,
    pub program: Program,
    pub variant: &'static str,
    pub algorithm: &'static str,
    /// What it does not do, in comparison with this crate.
    pub lacks: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `INCR`, which limits nothing.
    Baseline,
    Ours,
    /// Ours at another commit.
    OtherCommit,
    /// Permits, of this crate or another library.
    Permits,
    /// Another library. Our limiter that has its kind of algorithm is compared with it.
    Peer {
        rival: &'static str,
    },
}

impl Subject {
    /// Whether the workloads that only compare this crate with itself include it.
    pub fn is_own(&self) -> bool {
        matches!(self.kind, Kind::Ours | Kind::OtherCommit) && !self.id.ends_with("redisson")
    }

    pub fn is_permits(&self) -> bool {
        self.kind == Kind::Permits
    }
}

const TOKEN_BUCKET: Kind = Kind::Peer { rival: "token-bucket" };
const FIXED_WINDOW: Kind = Kind::Peer { rival: "fixed-window" };
const SLIDING_WINDOW: Kind = Kind::Peer { rival: "sliding-window-10" };

/// What the names of the subjects of another commit begin with.
pub const OTHER_COMMIT: &str = "other-commit-";

/// This crate, by algorithm, and the same at another commit.
macro_rules! ours {
    ($($algorithm:literal, $label:literal;)*) => {
        &[$(
            Subject {
                id: $algorithm,
                label: $label,
                kind: Kind::Ours,
                program: Program::Rust("ours"),
                variant: $algorithm,
                algorithm: $label,
                lacks: "",
            },
            Subject {
                id: concat!("other-commit-", $algorithm),
                label: concat!("other commit: ", $label),
                kind: Kind::OtherCommit,
                program: Program::OtherCommit,
                variant: $algorithm,
                algorithm: $label,
                lacks: "",
            },
        )*]
    };
}

const OURS: &[Subject] = ours! {
    "token-bucket", "token bucket";
    "fixed-window", "fixed window";
    "leaky-bucket", "leaky bucket";
    "sliding-window", "sliding window, 1 bucket";
    "sliding-window-10", "sliding window, 10 buckets";
    "sliding-log", "sliding log";
    "redisson", "`redisson::RateLimiter`";
};

const OTHERS: &[Subject] = &[
    Subject {
        id: "incr",
        label: "`INCR`",
        kind: Kind::Baseline,
        program: Program::Rust("incr"),
        variant: "",
        algorithm: "none",
        lacks: "limits nothing",
    },
    Subject {
        id: "increx",
        label: "`INCREX`",
        kind: FIXED_WINDOW,
        program: Program::Rust("incr"),
        variant: "increx",
        algorithm: "fixed window",
        lacks: "only Redis 8.8 and Valkey 9.2 have it; no time to retry, no waiting, no several \
                limits at once",
    },
    Subject {
        id: "tower-rate-limit-redis",
        label: "tower-rate-limit-redis 1.0",
        kind: TOKEN_BUCKET,
        program: Program::Rust("tower-rate-limit-redis"),
        variant: "",
        algorithm: "GCRA",
        lacks: "no cost, no waiting, no refund; bursts up to 65,535; whole milliseconds; one \
                connection without reconnection; calls the inner service before the decision",
    },
    Subject {
        id: "throttled",
        label: "throttled 0.1",
        kind: TOKEN_BUCKET,
        program: Program::Rust("throttled"),
        variant: "",
        algorithm: "GCRA",
        lacks: "no Tower layer, no waiting, no refund, no several limits at once",
    },
    Subject {
        id: "redis-rate",
        label: "script of redis_rate 10 (Go), by redis-rs",
        kind: TOKEN_BUCKET,
        program: Program::Rust("redis-rate"),
        variant: "",
        algorithm: "GCRA",
        lacks: "counts time in fractions of seconds as floating-point numbers; no waiting, no \
                refund; its client in Go is not measured",
    },
    Subject {
        id: "tower-rate-limiter",
        label: "tower-rate-limiter 0.1",
        kind: FIXED_WINDOW,
        program: Program::Rust("tower-rate-limiter"),
        variant: "",
        algorithm: "fixed window",
        lacks: "denied requests count; no cost, no waiting, no refund",
    },
    Subject {
        id: "limitador",
        label: "limitador 0.14",
        kind: FIXED_WINDOW,
        program: Program::Rust("limitador"),
        variant: "strict",
        algorithm: "fixed window",
        lacks: "not exact: it reads and then writes, in two round trips; no waiting (its \
                source is changed so that it compiles without RocksDB)",
    },
    Subject {
        id: "limitador-cached",
        label: "limitador 0.14, cached",
        kind: FIXED_WINDOW,
        program: Program::Rust("limitador"),
        variant: "cached",
        algorithm: "fixed window",
        lacks: "not exact: processes count by themselves and write later; no waiting",
    },
    Subject {
        id: "trypema",
        label: "trypema 2.2",
        kind: SLIDING_WINDOW,
        program: Program::Rust("trypema"),
        variant: "redis",
        algorithm: "sliding window",
        lacks: "may exceed the limit for a time, by its documentation; the limit of a key is that \
                of its first request; no Tower layer, no waiting",
    },
    Subject {
        id: "trypema-hybrid",
        label: "trypema 2.2, hybrid",
        kind: SLIDING_WINDOW,
        program: Program::Rust("trypema"),
        variant: "hybrid",
        algorithm: "sliding window",
        lacks: "processes count by themselves and write later, so they may exceed the limit \
                together; no Tower layer, no waiting",
    },
    Subject {
        id: "bucket4j",
        label: "bucket4j 8.19 (Java), `batching()`, Lettuce",
        kind: TOKEN_BUCKET,
        program: Program::Java,
        variant: "bucket4j",
        algorithm: "token bucket",
        lacks: "the clock of the client; compare-and-swap, so processes that share a key retry",
    },
    Subject {
        id: "redisson-java",
        label: "Redisson 4.7 (Java), `RRateLimiter`",
        kind: Kind::Peer { rival: "redisson" },
        program: Program::Java,
        variant: "redisson",
        algorithm: "sliding log",
        lacks: "the clock of the client; about 120 bytes per permit",
    },
    Subject {
        id: "rate-limiter-flexible",
        label: "rate-limiter-flexible 11.4 (Node), ioredis",
        kind: FIXED_WINDOW,
        program: Program::Node,
        variant: "",
        algorithm: "fixed window",
        lacks: "denied requests count; whole seconds",
    },
    Subject {
        id: "rate-limiter-flexible-blocking",
        label: "rate-limiter-flexible with `inMemoryBlockOnConsumed`",
        kind: FIXED_WINDOW,
        program: Program::Node,
        variant: "blocking",
        algorithm: "fixed window",
        lacks: "denied requests count; whole seconds; a refund or reset by another process does \
                not end a block",
    },
];

/// Permits that are taken and returned. They are measured by themselves, by `--permits`.
pub const PERMITS: &[Subject] = &[
    Subject {
        id: "concurrency",
        label: "concurrency",
        kind: Kind::Permits,
        program: Program::Rust("ours"),
        variant: "concurrency",
        algorithm: "concurrency",
        lacks: "",
    },
    Subject {
        id: "concurrency-kept",
        label: "the same, without the return",
        kind: Kind::Permits,
        program: Program::Rust("ours"),
        variant: "concurrency-kept",
        algorithm: "concurrency",
        lacks: "",
    },
    Subject {
        id: "redisson-semaphore",
        label: "Redisson 4.7 (Java), `RPermitExpirableSemaphore`",
        kind: Kind::Permits,
        program: Program::Java,
        variant: "redisson-semaphore",
        algorithm: "concurrency",
        lacks: "",
    },
];

/// All other subjects, in the order of the tables.
pub fn all() -> impl Iterator<Item = &'static Subject> {
    OURS.iter().chain(OTHERS)
}
