//! The crate limitador: fixed windows in Redis, strict (a script that reads and one that writes) or
//! cached (counted in the process, and written later). Its HTTP and gRPC servers are left out.

use std::{collections::HashMap, process::ExitCode, sync::Arc};

use limitador::{
    AsyncRateLimiter,
    limit::{Context, Limit, Namespace},
    storage::{
        AsyncCounterStorage,
        redis::{AsyncRedisStorage, CachedRedisStorage},
    },
};
use peers::{Error, Limiter, Quota, Subject, run};

fn main() -> ExitCode {
    run::<Limitador>()
}

struct Limitador {
    limiter: Arc<AsyncRateLimiter>,
}

impl Subject for Limitador {
    type Limiter = Namespaced;

    async fn connect(variant: &str, url: &str) -> Result<Self, Error> {
        let storage: Box<dyn AsyncCounterStorage> = match variant {
            "cached" => Box::new(CachedRedisStorage::new(url).await?),
            _ => Box::new(AsyncRedisStorage::new(url).await?),
        };
        Ok(Self { limiter: Arc::new(AsyncRateLimiter::new_with_storage(storage)) })
    }

    fn limiter(&self, quota: Quota) -> Result<Namespaced, Error> {
        let key = vec!["user".try_into().map_err(|error| format!("{error:?}"))?];
        let (limit, period) = (u64::from(quota.limit), Quota::PERIOD.as_secs());
        self.limiter.add_limit(Limit::new(quota.name, limit, period, Vec::new(), key));
        Ok(Namespaced { limiter: self.limiter.clone(), namespace: quota.name.into() })
    }
}

struct Namespaced {
    limiter: Arc<AsyncRateLimiter>,
    namespace: Namespace,
}

impl Limiter for Namespaced {
    async fn check(&self, key: &str) -> Result<bool, Error> {
        let context = Context::from(HashMap::from([("user".to_owned(), key.to_owned())]));
        let check = self.limiter.check_rate_limited_and_update(&self.namespace, &context, 1);
        Ok(!check.await.map_err(|error| error.to_string())?.limited)
    }
}
