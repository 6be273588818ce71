//! Documentation of this crate by topic.
//!
//! [algorithms]: algorithms
//! [before]: redis_connecting#before-the-first-start
//! [benchmarks]: benchmarks
//! [coming-from-bucket4j]: coming_from_bucket4j
//! [coming-from-governor]: coming_from_governor
//! [coming-from-nginx]: coming_from_nginx
//! [coming-from-rate-limiter-flexible]: coming_from_rate_limiter_flexible
//! [coming-from-tower-governor]: coming_from_tower_governor
//! [concurrency]: concurrency
//! [configuration]: configuration
//! [connections]: connections
//! [copy-one-of-these]: copy_one_of_these
//! [design-decisions]: design_decisions
//! [how-it-works]: how_it_works
//! [http]: http
//! [incidents]: incidents
//! [keys]: keys
//! [layers]: layers
//! [limitctl]: limitctl
//! [llm]: llm
//! [monitoring]: monitoring
//! [on-call]: on_call
//! [outgoing]: outgoing
//! [quick-start]: quick_start
//! [quotas]: quotas
//! [recipes]: recipes
//! [redis-capacity]: redis_capacity
//! [redis-connecting]: redis_connecting
//! [redis-failovers]: redis_failovers
//! [redis-failures]: redis_failures
//! [redis-permissions]: redis_permissions
//! [redisson]: redisson
//! [replay]: replay
//! [servers]: servers
//! [settings]: settings
//! [several-limits]: several_limits
//! [support-tasks]: support_tasks
//! [testing]: testing
//! [troubleshooting]: troubleshooting
//! [vendors]: vendors
//! [waiting]: waiting
#![doc = concat!(
    "[playground]: ", env!("CARGO_PKG_REPOSITORY"), "/blob/HEAD/docs/playground.md\n",
    "[threat-model]: ", env!("CARGO_PKG_REPOSITORY"), "/blob/HEAD/THREAT-MODEL.md\n\n",
)]
#![doc = include_str!("../docs/README.md")]

/// The links to headings of other pages.
macro_rules! headings {
    () => {
        "
[deployments]: crate::guide::troubleshooting#503-for-some-clients-during-a-deployment
[behind-a-proxy]: crate::guide::keys#behind-a-proxy
[between]: crate::guide::waiting#between-processes
[end-waits]: crate::guide::waiting#when-the-service-stops
[how-large-a-burst]: crate::guide::quotas#how-large-a-burst
[no-mark]: crate::guide::design_decisions#why-nothing-in-redis-says-that-requests-wait
[option-layer]: crate::guide::layers#a-limit-that-can-be-switched-off
[runtime]: crate::guide::layers#what-needs-a-runtime
[unix-socket]: crate::guide::keys#a-unix-socket-or-a-proxy-of-unknown-address
[line]: crate::guide::waiting#in-a-line
[learning]: crate::guide::outgoing#learning-from-the-vendors-answer
[login]: crate::guide::recipes#login-failures-by-name-and-address
[asking]: crate::guide::design_decisions#how-processes-ask-for-units
[fewer]: crate::guide::troubleshooting#429-after-fewer-requests-than-the-limit
[limitctl-keys]: crate::guide::limitctl#keys
[health]: crate::guide::redis_connecting#a-service-that-starts-without-redis
[long-windows]: crate::guide::quotas#long-windows
[nests]: crate::guide::layers#nests-and-services
[permit-life]: crate::guide::concurrency#the-life-of-a-permit-in-redis
[plans-in-a-database]: crate::guide::recipes#api-plans-from-a-database-with-a-cache
[plans]: crate::guide::copy_one_of_these#plans-by-api-key
[places]: crate::guide::concurrency#waiting-for-a-place
[resources]: crate::guide::vendors#resources
[secrets]: crate::guide::keys#secrets
[shared-calls]: crate::guide::redis_capacity#decisions-per-second
[shutdown]: crate::guide::redis_connecting#a-service-that-shuts-down
[urgent]: crate::guide::outgoing#urgent-calls-priority
[smoke-test]: crate::guide::testing#after-deploying
[stuck-streams]: crate::guide::limitctl#stuck-streams
[what-is-stored]: crate::guide::how_it_works#what-is-stored
"
    };
}

/// The pages. The first definition of a link counts, so the definitions here replace those at the
/// end of a page, which lead to files: other pages and their headings become modules, and pictures
/// data.
macro_rules! pages {
    ($all:tt) => { pages! { @each $all $all } };
    (@each {$($name:ident $file:literal)*} $all:tt) => {
        $(pages! { @page $name $file $all })*
    };
    (@page $page:ident $page_file:literal {$($name:ident $file:literal)*}) => {
        #[doc = concat!($("[", $file, "]: crate::guide::", stringify!($name), "\n"),*)]
        #[doc = headings!()]
        #[doc = include_str!("../docs/pictures/links.md")]
        #[doc = ""]
        #[doc = include_str!(concat!("../docs/", $page_file, ".md"))]
        pub mod $page {}
    };
}

pages! {{
    algorithms "algorithms"
    benchmarks "benchmarks"
    coming_from_bucket4j "coming-from-bucket4j"
    coming_from_governor "coming-from-governor"
    coming_from_nginx "coming-from-nginx"
    coming_from_rate_limiter_flexible "coming-from-rate-limiter-flexible"
    coming_from_tower_governor "coming-from-tower-governor"
    concurrency "concurrency"
    configuration "configuration"
    connections "connections"
    copy_one_of_these "copy-one-of-these"
    design_decisions "design-decisions"
    how_it_works "how-it-works"
    http "http"
    incidents "incidents"
    keys "keys"
    layers "layers"
    limitctl "limitctl"
    llm "llm"
    monitoring "monitoring"
    on_call "on-call"
    outgoing "outgoing"
    quick_start "quick-start"
    quotas "quotas"
    recipes "recipes"
    replay "replay"
    redis_capacity "redis-capacity"
    redis_connecting "redis-connecting"
    redis_failovers "redis-failovers"
    redis_failures "redis-failures"
    redis_permissions "redis-permissions"
    redisson "redisson"
    servers "servers"
    settings "settings"
    several_limits "several-limits"
    support_tasks "support-tasks"
    testing "testing"
    troubleshooting "troubleshooting"
    vendors "vendors"
    waiting "waiting"
}}
