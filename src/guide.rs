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
    (@each {$($name:ident $slug:literal $file:literal)*} $all:tt) => {
        $(pages! { @page $name $file $all })*
    };
    (@page $page:ident $page_file:literal {$($name:ident $slug:literal $file:literal)*}) => {
        #[doc = concat!($("[", $slug, "]: crate::guide::", stringify!($name), "\n"),*)]
        #[doc = headings!()]
        #[doc = include_str!("../docs/pictures/links.md")]
        #[doc = ""]
        #[doc = include_str!($page_file)]
        pub mod $page {}
    };
}

pages! {{
    algorithms "algorithms" "../docs/algorithms.md"
    benchmarks "benchmarks" "../docs/benchmarks.md"
    coming_from_bucket4j "coming-from-bucket4j" "../docs/coming-from-bucket4j.md"
    coming_from_governor "coming-from-governor" "../docs/coming-from-governor.md"
    coming_from_nginx "coming-from-nginx" "../docs/coming-from-nginx.md"
    coming_from_rate_limiter_flexible "coming-from-rate-limiter-flexible"
        "../docs/coming-from-rate-limiter-flexible.md"
    coming_from_tower_governor "coming-from-tower-governor" "../docs/coming-from-tower-governor.md"
    concurrency "concurrency" "../docs/concurrency.md"
    configuration "configuration" "../docs/configuration.md"
    connections "connections" "../docs/connections.md"
    copy_one_of_these "copy-one-of-these" "../docs/copy-one-of-these.md"
    design_decisions "design-decisions" "../docs/design-decisions.md"
    how_it_works "how-it-works" "../docs/how-it-works.md"
    http "http" "../docs/http.md"
    incidents "incidents" "../docs/incidents.md"
    keys "keys" "../docs/keys.md"
    layers "layers" "../docs/layers.md"
    limitctl "limitctl" "../docs/limitctl.md"
    llm "llm" "../docs/llm.md"
    monitoring "monitoring" "../docs/monitoring.md"
    on_call "on-call" "../docs/on-call.md"
    outgoing "outgoing" "../docs/outgoing.md"
    quick_start "quick-start" "../docs/quick-start.md"
    quotas "quotas" "../docs/quotas.md"
    recipes "recipes" "../docs/recipes.md"
    replay "replay" "../docs/replay.md"
    redis_capacity "redis-capacity" "../docs/redis-capacity.md"
    redis_connecting "redis-connecting" "../docs/redis-connecting.md"
    redis_failovers "redis-failovers" "../docs/redis-failovers.md"
    redis_failures "redis-failures" "../docs/redis-failures.md"
    redis_permissions "redis-permissions" "../docs/redis-permissions.md"
    redisson "redisson" "../docs/redisson.md"
    servers "servers" "../docs/servers.md"
    settings "settings" "../docs/settings.md"
    several_limits "several-limits" "../docs/several-limits.md"
    support_tasks "support-tasks" "../docs/support-tasks.md"
    testing "testing" "../docs/testing.md"
    troubleshooting "troubleshooting" "../docs/troubleshooting.md"
    vendors "vendors" "../docs/vendors.md"
    waiting "waiting" "../docs/waiting.md"
}}
