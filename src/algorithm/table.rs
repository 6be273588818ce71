//! The table of the algorithms: the only list of their models and scripts. Holds no logic of its
//! own.

use std::mem::take;

#[cfg(feature = "redis")]
use super::hold;
use super::{
    Algorithm,
    block::{self, Block},
    concurrency, engine, fixed_window,
    hold::Held,
    leaky_bucket,
    model::Model,
    packed::{FastReport, FastStep, INITIAL, Packed},
    request::{Action, EngineReply, EngineRequest, Release},
    reservations::Reserved,
    sliding_log, sliding_window, token_bucket,
};
use crate::quota::{ConfigError, Quota};

/// The Lua text that decides by one algorithm.
#[cfg(feature = "redis")]
pub(crate) struct ScriptSource {
    pub(crate) name: &'static str,
    /// The letter that the parameters and the states of the algorithm begin with.
    pub(crate) form: u8,
    /// The parameters and the form of the state.
    pub(crate) state: &'static str,
    /// The model and what it uses, how its state is stored, and the engine.
    pub(crate) model: &'static str,
    /// The fast path for the most common checks.
    pub(crate) fast: &'static str,
}

macro_rules! algorithms {
    ($(
        $variant:ident $module:ident::$state:ident $form:literal
            $folder:literal $storage:literal
    ),* $(,)?) => {
        /// The state of one key.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub(crate) enum State {
            /// The state of a key without requests, under any algorithm.
            #[default]
            Initial,
            Blocked(Box<Block<State>>),
            Held(Box<Held<State>>),
            $($variant(Option<Reserved<$module::$state>>),)*
        }

        /// An algorithm with a quota, ready to decide.
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum Params {
            $($variant(<$module::$state as Model>::Params),)*
        }

        #[cfg(feature = "redis")]
        pub(crate) const SOURCES: &[ScriptSource] = &[$(ScriptSource {
            name: stringify!($module),
            form: $form,
            state: include_str!(concat!("../../scripts/", $folder, "/state.lua")),
            model: concat!(
                include_str!("../../scripts/hold.lua"),
                include_str!("../../scripts/block.lua"),
                include_str!(concat!("../../scripts/", $folder, "/model.lua")),
                include_str!(concat!("../../scripts/", $storage, ".lua")),
                include_str!("../../scripts/engine.lua"),
                include_str!("../../scripts/holding.lua"),
                include_str!("../../scripts/finish.lua"),
            ),
            fast: include_str!(concat!("../../scripts/", stringify!($module), "/fast.lua")),
        },)*];

        impl State {
            #[inline]
            pub(crate) fn is_initial(&self) -> bool {
                match self {
                    Self::Initial => true,
                    Self::Blocked(_) | Self::Held(_) => false,
                    $(Self::$variant(stored) => stored.is_none(),)*
                }
            }

            /// Returns whether units are still held whose slot has ended.
            pub(super) fn has_ended_holds(&self, now: f64) -> bool {
                matches!(self, Self::Held(held) if held.slots.has_ended(now))
            }

            /// Returns whether the clock has stepped back since what is held was changed.
            pub(super) fn has_stale_holds(&self, now: f64) -> bool {
                matches!(self, Self::Held(held) if held.slots.is_stale(now))
            }

            /// Follows a clock that has stepped back: the only change that a denied request makes.
            pub(super) fn follow_clock(&mut self, now: f64) {
                match self {
                    Self::Held(held) => {
                        if held.slots.is_stale(now) {
                            held.slots.touch(now);
                        }
                        held.state.follow_clock(now);
                    }
                    $(Self::$variant(Some(reserved)) => reserved.follow_clock(now),)*
                    _ => {}
                }
            }

            /// Returns whether units are held.
            pub(crate) fn is_held(&self) -> bool {
                match self {
                    Self::Blocked(block) => block.state.is_held(),
                    Self::Held(_) => true,
                    _ => false,
                }
            }

            /// The instant at which the block ends.
            pub(crate) fn blocked_until(&self) -> Option<f64> {
                match self {
                    Self::Blocked(block) => Some(block.ends),
                    _ => None,
                }
            }

            /// The instant of the last waiting request with a known reservation.
            #[inline]
            pub(crate) fn waited_until(&self, now: f64) -> Option<f64> {
                let instant = match self {
                    Self::Initial => None,
                    Self::Blocked(block) => return block.state.waited_until(now),
                    Self::Held(held) => return held.state.waited_until(now),
                    $(Self::$variant(stored) => {
                        let Reserved { state, waiting } = stored.as_ref()?;
                        waiting.until().or_else(|| state.waits_until(now))
                    })*
                };
                instant.filter(|instant| *instant > now)
            }

            /// Drops reservations that are over, by a clock that never steps back.
            #[inline]
            pub(crate) fn forget_reservations(&mut self, now: f64) {
                match self {
                    Self::Blocked(block) => block.state.forget_reservations(now),
                    Self::Held(held) => held.state.forget_reservations(now),
                    $(Self::$variant(Some(Reserved { waiting, .. })) if waiting.is_over(now) => {
                        waiting.0 = None;
                    })*
                    _ => {}
                }
            }
        }

        /// An algorithm, whatever its settings. No algorithm applies the state of another.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind {
            $($variant,)*
        }

        impl Kind {
            /// False if units are only held.
            #[inline]
            pub(crate) fn spends(self) -> bool {
                match self {
                    $(Self::$variant => <$module::$state as Model>::SPENDS,)*
                }
            }
        }

        /// For the scripts.
        #[cfg(feature = "redis")]
        impl Params {
            /// The index of the algorithm in [`SOURCES`].
            pub(crate) fn index(&self) -> usize {
                self.kind() as usize
            }

            /// The parameters of the script.
            pub(crate) fn args(&self) -> Vec<f64> {
                match self {
                    $(Self::$variant(params) => <$module::$state as Model>::args(params),)*
                }
            }

            /// Reads the state that a script found; `None` if it is malformed.
            pub(crate) fn decode(&self, bytes: &[u8]) -> Option<State> {
                if bytes.is_empty() {
                    return Some(State::Initial);
                }
                if bytes[0] == block::FORM {
                    let (ends, inside) = block::decode(bytes)?;
                    return Some(self.blocked(self.decode(inside)?, ends));
                }
                if bytes[0] == hold::FORM {
                    let (slots, beside) = hold::decode(bytes)?;
                    return Some(self.close(Held { slots, ..self.held(self.decode(beside)?) }));
                }
                Some(match self {
                    $(Self::$variant(_) => {
                        let state = <$module::$state as Model>::decode(bytes)?;
                        State::$variant(Some(Reserved::new(state)))
                    })*
                })
            }
        }

        impl Params {
            pub(crate) fn kind(&self) -> Kind {
                match self {
                    $(Self::$variant(_) => Kind::$variant,)*
                }
            }

            /// The largest cost that a check can be granted.
            pub(crate) fn max_cost(&self) -> f64 {
                match self {
                    $(Self::$variant(params) => <$module::$state as Model>::max_cost(params),)*
                }
            }

            /// The same with a quota that is smaller by the units that are held.
            pub(super) fn beside(&self, held: f64) -> Self {
                match self {
                    $(Self::$variant(params) => {
                        Self::$variant(<$module::$state as Model>::beside(params, held))
                    })*
                }
            }

            /// True if units can be held.
            pub(crate) fn can_hold(&self) -> bool {
                match self {
                    $(Self::$variant(params) => <$module::$state as Model>::holds(params),)*
                }
            }

            /// False if units are only held.
            #[inline]
            pub(crate) fn spends(&self) -> bool {
                self.kind().spends()
            }

            /// True for a shaper: requests wait without asking to, in a bounded room.
            pub(crate) fn shapes(&self) -> bool {
                match self {
                    $(Self::$variant(params) => <$module::$state as Model>::shapes(params),)*
                }
            }

            /// True if units are restored one by one.
            pub(crate) fn restores_evenly(&self) -> bool {
                match self {
                    $(Self::$variant(params) => {
                        <$module::$state as Model>::restores_evenly(params)
                    })*
                }
            }

            /// The longest wait, in microseconds, of a check that does not specify one.
            pub(crate) fn default_wait(&self) -> f64 {
                match self {
                    $(Self::$variant(params) => <$module::$state as Model>::default_wait(params),)*
                }
            }

            /// The longest wait, in microseconds, that can be reserved.
            pub(crate) fn max_reservable(&self) -> f64 {
                match self {
                    $(Self::$variant(params) => {
                        <$module::$state as Model>::max_reservable(params)
                    })*
                }
            }

            /// Decides, and changes the state, which is one of this algorithm.
            #[inline]
            pub(crate) fn step(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
                match state {
                    State::Blocked(_) => self.step_blocked(state, request),
                    _ if request.action.blocks() => self.step_blocked(state, request),
                    _ => self.step_inside(state, request),
                }
            }

            /// Decides about the state inside of a block, or of a key without one.
            #[inline]
            pub(super) fn step_inside(
                &self,
                state: &mut State,
                request: &EngineRequest,
            ) -> EngineReply {
                match (&*state, request.action) {
                    (State::Held(_), _) | (_, Action::Hold { .. }) => {
                        self.step_held(state, request)
                    }
                    _ => self.step_bare(state, request),
                }
            }

            /// Decides about a state without a block and without holds.
            #[inline]
            pub(super) fn step_bare(
                &self,
                state: &mut State,
                request: &EngineRequest,
            ) -> EngineReply {
                if request.action == Action::Refund {
                    self.return_units(state, request.now, &[Release::grant(request.cost)]);
                }
                match self {
                    $(Self::$variant(params) => {
                        if !matches!(state, State::$variant(_)) {
                            if !request.action.commits() {
                                return engine::step::<$module::$state>(&mut None, request, params);
                            }
                            *state = State::$variant(None);
                        }
                        let State::$variant(stored) = state else { unreachable!() };
                        engine::step(stored, request, params)
                    })*
                }
            }

            /// Returns units to the state, as the algorithm counted them.
            pub(crate) fn return_units(&self, state: &mut State, now: f64, releases: &[Release]) {
                match (self, state) {
                    (_, State::Blocked(block)) => {
                        self.return_units(&mut block.state, now, releases);
                    }
                    (_, state @ State::Held(_)) => self.change_beside(state, now, |beside| {
                        self.return_units(beside, now, releases);
                    }),
                    $((Self::$variant(params), State::$variant(stored)) => {
                        engine::return_units(stored, now, releases, params);
                    })*
                    _ => {} // the initial state
                }
            }

            /// Encodes the state in two numbers for later requests. `None` if two do not suffice:
            /// because requests wait, or because it was counted with other parameters.
            #[inline]
            pub(crate) fn pack(&self, state: &State, now: f64) -> Option<Packed> {
                match (self, state) {
                    (_, State::Held(held)) => self.pack_held(held),
                    $((Self::$variant(params), State::$variant(Some(reserved))) => {
                        let is_over = reserved.waiting.is_over(now);
                        if is_over { reserved.state.pack(now, params) } else { None }
                    })*
                    _ => state.is_initial().then_some(INITIAL),
                }
            }

            /// The state that the numbers represent.
            #[inline]
            pub(crate) fn unpack(&self, packed: Packed) -> State {
                if packed == INITIAL {
                    return State::Initial;
                }
                if !self.spends() {
                    return self.unpack_held(packed);
                }
                match self {
                    $(Self::$variant(params) => {
                        let state = <$module::$state as Model>::unpack(packed, params);
                        State::$variant(state.map(Reserved::new))
                    })*
                }
            }
        }
    };
}

algorithms! {
    FixedWindow fixed_window::FixedWindowState b'F' "fixed_window" "reservations",
    SlidingLog sliding_log::SlidingLogState b'S' "sliding_log" "sliding_log/log",
    SlidingWindow sliding_window::SlidingWindowState b'W' "sliding_window" "reservations",
    TokenBucket token_bucket::TokenBucketState b'T' "bucket" "reservations",
    LeakyBucket leaky_bucket::LeakyBucketState b'L' "bucket" "reservations",
    Concurrency concurrency::ConcurrencyState b'C' "concurrency" "reservations",
}

impl Params {
    /// Returns a state in a block.
    pub(super) fn blocked(&self, state: State, ends: f64) -> State {
        State::Blocked(Box::new(Block { ends, state }))
    }

    /// Decides about a key that is blocked, or is to be.
    #[cold]
    fn step_blocked(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        let (known, mut inside) = match take(state) {
            State::Blocked(block) => (block.ends, block.state),
            state => (0.0, state),
        };
        let decide = |request: &_| self.step_inside(&mut inside, request);
        let (reply, ends) = block::step(known, request, decide);
        *state = match ends {
            Some(ends) => self.blocked(inside, ends),
            None => inside,
        };
        reply
    }

    pub(crate) fn new(algorithm: Algorithm, quota: Quota) -> Result<Self, ConfigError> {
        let is_concurrency = matches!(algorithm, Algorithm::Concurrency);
        if is_concurrency != quota.is_concurrent() {
            return Err(ConfigError::Concurrent { algorithm: algorithm.name(), quota });
        }
        let bucket = matches!(algorithm, Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket);
        if !bucket && quota.burst_size() != quota.limit() {
            return Err(ConfigError::BurstWithoutBucket { algorithm: algorithm.name(), quota });
        }
        Ok(match algorithm {
            Algorithm::FixedWindow => {
                Self::FixedWindow(fixed_window::FixedWindowParams::new(quota))
            }
            Algorithm::SlidingLog => Self::SlidingLog(sliding_log::SlidingLogParams::new(quota)),
            Algorithm::SlidingWindow { buckets } => {
                Self::SlidingWindow(sliding_window::SlidingWindowParams::new(quota, buckets)?)
            }
            Algorithm::TokenBucket { refill, overdraft } => {
                Self::TokenBucket(token_bucket::params(quota, refill, overdraft)?)
            }
            Algorithm::LeakyBucket => Self::LeakyBucket(leaky_bucket::params(quota)),
            Algorithm::Concurrency => Self::Concurrency(concurrency::ConcurrencyParams::new(quota)),
        })
    }

    /// Returns the parameters for the fast path of the memory store, if it knows the settings.
    pub(crate) fn fast(&self) -> Option<Fast> {
        match self {
            Self::TokenBucket(params) => {
                token_bucket::PlainTokenBucket::new(params).map(Fast::TokenBucket)
            }
            Self::FixedWindow(params) => Some(Fast::FixedWindow(params.plain())),
            _ => None,
        }
    }

    /// Returns what remains of a packed state, and the time until it is the initial one.
    pub(crate) fn observe_packed(&self, packed: Packed, now: f64) -> [f64; 2] {
        let EngineReply { remaining, reset, .. } =
            self.step(&mut self.unpack(packed), &EngineRequest::observe(now));
        [remaining, reset]
    }
}

/// The parameters of the algorithms that the fast path knows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fast {
    TokenBucket(token_bucket::PlainTokenBucket),
    FixedWindow(fixed_window::PlainFixedWindow),
}

impl Fast {
    /// Decides as the engine does about a check that does not wait, and changes the state if the
    /// request is admitted; `None` if the cost is invalid, or if the state is newer.
    #[inline]
    pub(crate) fn step(&self, packed: &mut Packed, cost: u64, now: i64) -> Option<FastStep> {
        match self {
            Self::TokenBucket(bucket) => bucket.step(packed, cost, now),
            Self::FixedWindow(window) => window.step(packed, cost, now),
        }
    }

    #[inline]
    pub(crate) fn report(&self, step: &FastStep) -> FastReport {
        match self {
            Self::TokenBucket(bucket) => bucket.report(step),
            Self::FixedWindow(window) => window.report(step),
        }
    }

    /// Returns what remains, and the time until the state is the initial one; `None` as for
    /// [`step`](Self::step).
    #[inline]
    pub(crate) fn observe(&self, packed: Packed, now: i64) -> Option<[u64; 2]> {
        match self {
            Self::TokenBucket(bucket) => bucket.observe(packed, now),
            Self::FixedWindow(window) => window.observe(packed, now),
        }
    }
}
