//! Lists of networks, such as trusted proxies and forbidden clients.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

use crate::quota::ConfigError;

/// A list of networks.
#[derive(Clone, Debug)]
pub(super) struct Networks(Arc<[IpNet]>);

impl Networks {
    pub(super) fn new<T: AsRef<str>>(
        networks: impl IntoIterator<Item = T>,
    ) -> Result<Self, ConfigError> {
        networks.into_iter().map(|it| network(it.as_ref())).collect::<Result<_, _>>().map(Self)
    }

    /// Does the same as [`new`](Networks::new), for literals.
    #[track_caller]
    pub(super) fn literal<T: AsRef<str>>(networks: impl IntoIterator<Item = T>) -> Self {
        match Self::new(networks) {
            Ok(networks) => networks,
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

fn network(text: &str) -> Result<IpNet, ConfigError> {
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
