//! Lists of networks, such as trusted proxies and forbidden clients.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::error::ConfigError;

/// The networks of which no client on the internet has an address.
const NO_CLIENTS: [&str; 11] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "224.0.0.0/3",
    // All that is not in 2000::/3.
    "::/3",
    "4000::/2",
    "8000::/1",
];

/// A list of networks.
#[derive(Clone, Debug)]
pub(super) struct Networks(Option<Arc<[IpNet]>>);

impl Networks {
    pub(super) const NONE: Self = Self(None);

    pub(super) fn new<T: AsRef<str>>(
        networks: impl IntoIterator<Item = T>,
    ) -> Result<Self, ConfigError> {
        let networks = networks.into_iter().map(|it| network(it.as_ref()));
        Ok(Self(Some(networks.collect::<Result<_, _>>()?)))
    }

    fn networks(&self) -> &[IpNet] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Does the same as [`new`](Networks::new), for trusted proxies: not all clients can be some.
    pub(super) fn of_proxies<T: AsRef<str>>(
        networks: impl IntoIterator<Item = T>,
    ) -> Result<Self, ConfigError> {
        let networks = Self::new(networks)?;
        let no_clients = NO_CLIENTS.iter().map(|it| it.parse().expect("a network"));
        let known: Vec<_> = networks.networks().iter().copied().chain(no_clients).collect();
        // With the addresses that no client has, the trusted ones are all.
        match IpNet::aggregate(&known).iter().find(|network| network.prefix_len() == 0) {
            Some(IpNet::V4(_)) => Err(ConfigError::AllTrusted { version: "IPv4" }),
            Some(IpNet::V6(_)) => Err(ConfigError::AllTrusted { version: "IPv6" }),
            None => Ok(networks),
        }
    }

    /// Does the same as [`new`](Networks::new), for literals.
    #[track_caller]
    pub(super) fn literal<T: AsRef<str>>(networks: impl IntoIterator<Item = T>) -> Self {
        match Self::new(networks) {
            Ok(networks) => networks,
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.networks().is_empty()
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.networks().iter().any(|network| network.contains(&address))
    }
}

fn network(text: &str) -> Result<IpNet, ConfigError> {
    let text = text.trim(); // of a list in an environment variable, say
    let network = text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    let network = network.map_err(|_| ConfigError::Network { network: text.to_owned() })?;
    Ok(match network {
        // A prefix of 96 bits covers only mapped IPv4 addresses.
        IpNet::V6(mapped) if mapped.prefix_len() >= 96 => match mapped.addr().to_ipv4_mapped() {
            Some(address) => IpNet::new_assert(address.into(), mapped.prefix_len() - 96),
            None => network,
        },
        _ => network,
    })
}
