//! The table of the algorithms, the only list of their models and scripts, and the state of a key
//! under one of them.

use std::ops::Deref;

use super::{
    Algorithm, concurrency,
    core::Core,
    engine, fixed_window,
    hold::Held,
    leaky_bucket,
    model::{Model, Parameters},
    request::{Action, EngineReply, EngineRequest, Release},
    reservations::Reserved,
    sliding_log, sliding_window, token_bucket,
};
use crate::quota::{Quota, QuotaError};

/// The Lua text that decides by one algorithm.
pub struct ScriptSource {
    pub name: &'static str,
    /// The letter that the parameters and the states of the algorithm begin with.
    pub form: u8,
    /// The parameters and the form of the state.
    pub state: &'static str,
    /// The model and what it uses, how its state is stored, and the engine.
    pub model: &'static str,
    /// The fast path for the most common checks.
    pub fast: &'static str,
    /// The fast path for requests that wait, if that is another one.
    pub queue: &'static str,
}

macro_rules! algorithms {
    ($(
        $variant:ident $module:ident::$state:ident $form:literal
            $folder:literal $storage:literal $($queue:literal)?
    ),* $(,)?) => {
        /// What was spent of a key, as an algorithm counts it.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub(crate) enum Spent {
            #[default]
            Nothing,
            $($variant(Reserved<$module::$state>),)*
        }

        /// An algorithm with a quota, ready to decide.
        #[derive(Clone, Copy, Debug)]
        #[allow(private_interfaces)] // others only pass them on
        pub enum Params {
            $($variant(<$module::$state as Model>::Params),)*
        }

        pub const SOURCES: &[ScriptSource] = &[$(ScriptSource {
            name: stringify!($module),
            form: $form,
            state: include_str!(concat!("../../scripts/", $folder, "/state.lua")),
            model: concat!(
                include_str!("../../scripts/engine.lua"),
                include_str!("../../scripts/block.lua"),
                "do\n",
                include_str!(concat!("../../scripts/", $folder, "/model.lua")),
                include_str!(concat!("../../scripts/", $storage, ".lua")),
                "end\n",
                include_str!("../../scripts/holding.lua"),
                include_str!("../../scripts/finish.lua"),
            ),
            fast: include_str!(concat!("../../scripts/", stringify!($module), "/fast.lua")),
            queue: concat!($(include_str!(concat!("../../scripts/", $queue, ".lua")))?),
        },)*];

        impl State {
            /// Follows a clock that has stepped back: the only change that a denied request makes.
            pub(super) fn follow_clock(&mut self, now: i64) {
                if let Held::Expiring(slots) = &mut self.held
                    && slots.is_stale(now)
                {
                    slots.touch(now);
                }
                match &mut self.spent {
                    Spent::Nothing => {}
                    $(Spent::$variant(reserved) => reserved.follow_clock(now),)*
                }
            }

            /// The instant of the last waiting request with a known reservation.
            #[inline]
            pub fn waited_until(&self, now: i64) -> Option<i64> {
                match &self.spent {
                    Spent::Nothing => None,
                    $(Spent::$variant(reserved) => reserved.waits_until(now),)*
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
            pub fn spends(self) -> bool {
                match self {
                    $(Self::$variant => <$module::$state as Model>::SPENDS,)*
                }
            }

            /// True for a shaper: requests wait without asking to, in a bounded room.
            pub fn shapes(self) -> bool {
                match self {
                    $(Self::$variant => <$module::$state as Model>::SHAPES,)*
                }
            }
        }

        /// What is the same for all algorithms.
        impl Deref for Params {
            type Target = dyn Parameters;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Self::$variant(params) => params,)*
                }
            }
        }

        /// For the scripts.
        impl Params {
            /// The index of the algorithm in [`SOURCES`].
            pub fn index(&self) -> usize {
                self.kind() as usize
            }

            /// Reads what was spent; `None` if it is malformed.
            pub(super) fn decode_spent(&self, bytes: &[u8]) -> Option<Spent> {
                if bytes.is_empty() {
                    return Some(Spent::Nothing);
                }
                Some(match self {
                    $(Self::$variant(_) => {
                        let state = <$module::$state as Model>::decode(bytes)?;
                        Spent::$variant(Reserved::new(state))
                    })*
                })
            }
        }

        impl Params {
            pub fn kind(&self) -> Kind {
                match self {
                    $(Self::$variant(_) => Kind::$variant,)*
                }
            }

            /// Decides about a state without a block, beside units that are `held`.
            #[inline(always)]
            pub(super) fn step_model(
                &self,
                spent: &mut Spent,
                held: [i64; 2],
                request: &EngineRequest,
            ) -> EngineReply {
                if request.action == Action::Refund {
                    self.return_bare(spent, request.now, &[Release::grant(request.cost)]);
                }
                match self {
                    $(Self::$variant(params) => {
                        let is_new = !matches!(spent, Spent::$variant(_));
                        if is_new {
                            let state = <$module::$state as Model>::initial(request.now, params);
                            *spent = Spent::$variant(Reserved::new(state));
                        }
                        let Spent::$variant(reserved) = spent else { unreachable!() };
                        let decided = engine::decide(reserved, held, request, params, false);
                        let (reply, is_over) = decided.expect("not in a core");
                        if is_over.unwrap_or(is_new) {
                            *spent = Spent::Nothing;
                        }
                        reply
                    })*
                }
            }

            /// Returns units to a state without a block and without holds.
            pub(super) fn return_bare(&self, spent: &mut Spent, now: i64, releases: &[Release]) {
                let is_over = match (self, &mut *spent) {
                    $((Self::$variant(params), Spent::$variant(reserved)) => {
                        engine::return_units(reserved, now, releases, params);
                        reserved.state.reset_after(now) == 0
                    })*
                    _ => false,
                };
                if is_over {
                    *spent = Spent::Nothing;
                }
            }

            /// Decides about a state that lies in a core, by a plain action, or for a limit on
            /// concurrency by a hold or a peek. `None` if no core represents the state after the
            /// decision, or the clock stepped back: nothing is changed then.
            #[inline(always)]
            pub fn step_core(
                &self,
                core: &mut Core,
                request: &EngineRequest,
            ) -> Option<EngineReply> {
                match self {
                    $(Self::$variant(params) => {
                        engine::step_core::<$module::$state>(core, request, params)
                    })*
                }
            }

            /// Takes a state out of a core.
            pub fn open(&self, core: Core) -> State {
                if core.amount == 0 {
                    return State::default();
                }
                if !self.spends() {
                    return State { held: Held::Endless(core), ..State::default() };
                }
                let spent = match self {
                    $(Self::$variant(params) => {
                        let state = <$module::$state as Model>::open(core, core.at, params);
                        state.map_or(Spent::Nothing, |state| Spent::$variant(Reserved::new(state)))
                    })*
                };
                State { spent, ..State::default() }
            }

            /// Returns the core that represents a state for later requests, if one does.
            #[inline]
            pub fn close(&self, state: &State, now: i64) -> Option<Core> {
                if state.blocked_until > 0 {
                    return None;
                }
                match (self, &state.held, &state.spent) {
                    (_, Held::None, Spent::Nothing) => Some(Core::default()),
                    (Self::Concurrency(_), Held::Endless(core), Spent::Nothing) => Some(*core),
                    $((Self::$variant(params), Held::None, Spent::$variant(reserved))
                        if reserved.waits_until(now).is_none() =>
                    {
                        reserved.state.close(now, params)
                    })*
                    _ => None,
                }
            }
        }
    };
}

algorithms! {
    FixedWindow fixed_window::FixedWindowState b'F' "fixed_window" "reservations",
    SlidingLog sliding_log::SlidingLogState b'S' "sliding_log" "sliding_log/log",
    SlidingWindow sliding_window::SlidingWindowState b'W' "sliding_window" "reservations",
    TokenBucket token_bucket::TokenBucketState b'T' "bucket" "reservations" "token_bucket/queue",
    LeakyBucket leaky_bucket::LeakyBucketState b'L' "bucket" "reservations",
    Concurrency concurrency::ConcurrencyState b'C' "concurrency" "reservations",
}

/// The state of a key; the default is the state of a key without requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// The instant at which the block of the key ends; 0 without one.
    pub(super) blocked_until: i64,
    pub(super) held: Held,
    pub(super) spent: Spent,
}

impl State {
    /// Returns whether units are held.
    pub fn is_held(&self) -> bool {
        !matches!(self.held, Held::None)
    }

    /// The instant at which the block ends.
    pub fn blocked_until(&self) -> Option<i64> {
        (self.blocked_until > 0).then_some(self.blocked_until)
    }
}

impl Params {
    /// See [`Kind::spends`].
    #[inline]
    pub fn spends(&self) -> bool {
        self.kind().spends()
    }

    /// See [`Kind::shapes`].
    pub fn shapes(&self) -> bool {
        self.kind().shapes()
    }

    /// Decides, and changes the state, which is one of this algorithm, where it lies.
    #[inline(always)]
    pub fn step(&self, state: &mut State, request: &EngineRequest) -> EngineReply {
        if state.blocked_until > 0 || request.action.blocks() {
            self.step_blocked(state, request)
        } else if state.is_held() || request.action.holds() {
            self.step_held(state, request)
        } else {
            self.step_alone(&mut state.spent, request)
        }
    }

    /// Returns whether units can be held: their use must not have an instant of its own.
    pub fn can_hold(&self) -> bool {
        !self.shapes()
    }

    pub fn new(algorithm: Algorithm, quota: Quota) -> Result<Self, QuotaError> {
        let is_concurrency = matches!(algorithm, Algorithm::Concurrency);
        if is_concurrency != quota.is_concurrent() {
            return Err(QuotaError::Concurrent { algorithm: algorithm.name(), quota });
        }
        let bucket = matches!(algorithm, Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket);
        if !bucket && quota.burst_size() != quota.limit() {
            return Err(QuotaError::BurstWithoutBucket { algorithm: algorithm.name(), quota });
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
}
