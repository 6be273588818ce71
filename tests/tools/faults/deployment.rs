//! A master, its replicas, and the three Sentinels that watch them.

use std::{error::Error, sync::mpsc, thread, time::Duration};

use tower_ratelimit::{RedisStore, store::RedisConfig};

use crate::{
    instance::Instance,
    load::{Moment, forgetful, now, until},
    namespace::Host,
};

const NAME: &str = "limits";
/// A user that may not subscribe to announcements.
const NO_SUBSCRIPTION: &str = "reader:secret@";
const USERS: &str = "user reader on >secret resetchannels +sentinel|get-master-addr-by-name \
    +sentinel|sentinels +sentinel|myid +sentinel|master +sentinel|masters +role +ping +hello\n";

/// The hosts and settings of servers and Sentinels.
pub struct Plan<'a> {
    /// The master, and the replicas.
    pub servers: Vec<(Host, Vec<(String, String)>)>,
    pub sentinels: [Host; 3],
    pub settings: &'a [&'a str],
}

impl Default for Plan<'_> {
    fn default() -> Self {
        let servers = [(); 3].map(|()| (Host::LOCAL, vec![]));
        Self { servers: servers.into(), sentinels: [Host::LOCAL; 3], settings: &[] }
    }
}

/// Running servers and Sentinels. They are killed when this is dropped.
pub struct Deployment {
    /// At the start, the first server is the master.
    pub servers: Vec<Instance>,
    pub sentinels: Vec<Instance>,
}

impl Deployment {
    pub fn start(plan: &Plan<'_>) -> Result<Self, Box<dyn Error>> {
        let mut servers: Vec<Instance> = vec![];
        for (host, environment) in &plan.servers {
            let master =
                servers.first().map(|master| (master.host.address, master.port.to_string()));
            let mut settings = plan.settings.to_vec();
            if let Some((address, port)) = &master {
                settings.extend(["--replicaof", address, port]);
            }
            servers.push(Instance::server(host, &settings, environment)?);
        }
        let replicas = servers.len() - 1;
        until("the replicas have all data", || {
            servers[0].info("replication", &format!("connected_slaves:{replicas}\r"))
                && servers[1..]
                    .iter()
                    .all(|replica| replica.info("replication", "master_link_status:up"))
        })?;
        let lines = format!(
            "sentinel monitor {NAME} {} {} 2\nsentinel down-after-milliseconds {NAME} 1000\n\
             sentinel failover-timeout {NAME} 5000\n{USERS}",
            servers[0].host.address, servers[0].port,
        );
        let sentinels =
            plan.sentinels.each_ref().map(|sentinel| Instance::sentinel(sentinel, &lines));
        let sentinels = sentinels.into_iter().collect::<Result<_, _>>()?;
        let deployment = Self { servers, sentinels };
        until("the Sentinels know all servers", || deployment.is_known(replicas))?;
        Ok(deployment)
    }

    /// Returns true if the Sentinels know each other, the master and the replicas.
    fn is_known(&self, replicas: usize) -> bool {
        let expected = [
            ("num-slaves", &*replicas.to_string()),
            ("num-other-sentinels", "2"),
            ("flags", "master"),
        ];
        self.sentinels.iter().all(|sentinel| {
            let words = ["SENTINEL", "MASTER", NAME];
            let reply: Vec<String> = sentinel.query(&words).unwrap_or_default();
            let has = |&(name, value): &(&str, &str)| {
                reply.chunks(2).any(|pair| pair[0] == name && pair[1] == value)
            };
            expected.iter().all(has)
        })
    }

    pub fn sentinel_urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Instance::url).collect()
    }

    pub fn master_url() -> String {
        format!("redis://{NAME}")
    }

    pub fn store(&self) -> Result<RedisStore, Box<dyn Error>> {
        self.store_by(self.sentinel_urls())
    }

    /// Makes a store whose user may not subscribe.
    pub fn store_without_subscription(&self) -> Result<RedisStore, Box<dyn Error>> {
        self.store_by(
            self.sentinels.iter().map(|sentinel| sentinel.url_as(NO_SUBSCRIPTION)).collect(),
        )
    }

    pub fn store_by(&self, sentinels: Vec<String>) -> Result<RedisStore, Box<dyn Error>> {
        Ok(forgetful(RedisConfig::sentinels(sentinels, &Self::master_url()))?)
    }

    /// Commands a failover, as soon as the Sentinels accept it.
    pub fn fail_over(&self) -> Result<(), Box<dyn Error>> {
        let words = ["SENTINEL", "FAILOVER", NAME];
        until("a replica can be promoted", || {
            self.sentinels.iter().any(|sentinel| sentinel.query::<redis::Value>(&words).is_ok())
        })?;
        Ok(())
    }

    /// Waits until a server other than these is a master.
    pub fn until_promoted(&self, before: &[usize]) -> Result<(usize, Moment), Box<dyn Error>> {
        let mut promoted = None;
        let moment = until("a replica is promoted", || {
            let mut others = (0..self.servers.len()).filter(|server| !before.contains(server));
            promoted = others.find(|server| self.is_master(*server));
            promoted.is_some()
        })?;
        Ok((promoted.unwrap_or_default(), moment))
    }

    /// Commands a failover, and waits for a decision of the new master. Calls `request` before each
    /// poll. Returns the time from the promotion to the decision.
    pub fn fail_over_until_decided(&self, request: impl Fn()) -> Result<Duration, Box<dyn Error>> {
        self.fail_over()?;
        let (new, promoted) = self.until_promoted(&[0])?;
        let followed = until("the new master decides", || {
            request();
            self.servers[new].decisions().is_some_and(|count| count > 0)
        })?;
        Ok(followed.saturating_sub(promoted))
    }

    /// Waits until a server is a replica.
    pub fn until_demoted(&self, old: usize) -> Result<Moment, Box<dyn Error>> {
        until("the old master is a replica", || self.servers[old].info("replication", "role:slave"))
    }

    pub fn is_master(&self, server: usize) -> bool {
        self.servers[server].info("replication", "role:master")
    }

    /// Returns true if a server is a replica with a link to this master.
    pub fn is_replica_of(&self, server: usize, master: usize) -> bool {
        let port = format!("master_port:{}\r", self.servers[master].port);
        let info = self.servers[server].query::<String>(&["INFO", "replication"]);
        info.is_ok_and(|info| info.contains(&port) && info.contains("master_link_status:up"))
    }

    /// Waits until the replicas have received all writes of the first server.
    pub fn until_replicated(&self) -> Result<(), Box<dyn Error>> {
        until("the replicas have all data of the master", || {
            let info = self.servers[0].query::<String>(&["INFO", "replication"]);
            let info = info.unwrap_or_default();
            let offset = info.lines().find_map(|line| line.strip_prefix("master_repl_offset:"));
            let offset = format!("offset={},", offset.unwrap_or("none"));
            info.lines().filter(|line| line.starts_with("slave")).all(|line| line.contains(&offset))
        })?;
        Ok(())
    }

    /// Receives the moment at which a Sentinel announces another master, and its port.
    pub fn announcement(&self) -> Result<mpsc::Receiver<(Moment, u16)>, Box<dyn Error>> {
        let (sender, receiver) = mpsc::channel();
        for sentinel in &self.sentinels {
            let Ok(mut connection) = sentinel.connection() else { continue };
            connection.set_read_timeout(None)?;
            let sender = sender.clone();
            let (subscribed, is_subscribed) = mpsc::channel();
            thread::spawn(move || {
                let mut subscription = connection.as_pubsub();
                subscription.subscribe("+switch-master")?;
                let _ = subscribed.send(());
                // The name, and the addresses and ports of the old master and of the new one.
                let text: String = subscription.get_message()?.get_payload()?;
                let port = text.split(' ').nth(4).and_then(|port| port.parse().ok());
                let _ = sender.send((now(), port.unwrap_or_default()));
                Ok::<_, redis::RedisError>(())
            });
            let _ = is_subscribed.recv();
        }
        Ok(receiver)
    }
}
