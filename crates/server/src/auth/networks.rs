//! The networks from which a key may be used.
//!
//! The address is that of the connection. Behind a proxy this is the proxy's address: forwarding headers are not read, because
//! any client can send them.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use http::Extensions;
use ipnet::IpNet;

/// Addresses in CIDR notation, separated by commas: `10.0.0.0/8, 2001:db8::/32, 192.0.2.7`. Empty allows all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedNetworks(Vec<IpNet>);

/// A text that is not a list of networks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a network; write an address such as 192.0.2.7, or a range such as 10.0.0.0/8")]
pub struct BadNetwork(String);

impl AllowedNetworks {
    /// Whether an address is in one of the networks. An IPv4 address that came in over IPv6 counts as IPv4.
    pub fn allow(&self, address: Option<IpAddr>) -> bool {
        let address = address.map(|address| address.to_canonical());
        self.0.is_empty()
            || address.is_some_and(|address| self.0.iter().any(|network| network.contains(&address)))
    }

    /// Whether every address is allowed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for AllowedNetworks {
    type Err = BadNetwork;

    fn from_str(text: &str) -> Result<AllowedNetworks, BadNetwork> {
        let words = text.split([',', ' ']).filter(|word| !word.is_empty());
        let network = |word: &str| {
            let bad = || BadNetwork(word.to_owned());
            match word.contains('/') {
                true => word.parse::<IpNet>().map(|network| network.trunc()).map_err(|_| bad()),
                false => word.parse::<IpAddr>().map(IpNet::from).map_err(|_| bad()),
            }
        };
        words.map(network).collect::<Result<_, _>>().map(AllowedNetworks)
    }
}

impl fmt::Display for AllowedNetworks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, network) in self.0.iter().enumerate() {
            write!(f, "{}{network}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// The address of the client of a connection, which the listener adds to each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerAddress(pub Option<IpAddr>);

impl PeerAddress {
    /// The address that the listener added.
    pub fn of(extensions: &Extensions) -> PeerAddress {
        extensions.get().copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_and_judged() {
        let networks: AllowedNetworks = "10.1.2.3/8, 2001:db8::/32,192.0.2.7".parse().unwrap();
        assert_eq!(networks.to_string(), "10.0.0.0/8, 2001:db8::/32, 192.0.2.7/32");
        let allow = |address: &str| networks.allow(Some(address.parse().unwrap()));
        assert!(
            allow("10.255.0.1") && allow("::ffff:10.0.0.1") && allow("2001:db8::9") && allow("192.0.2.7")
        );
        assert!(!allow("11.0.0.1") && !allow("192.0.2.8") && !allow("::1"));
        assert!(!networks.allow(None));
        assert!(AllowedNetworks::default().allow(None));
        for bad in ["10.0.0.0/33", "host.example", "10.0.0", "/8"] {
            assert!(bad.parse::<AllowedNetworks>().is_err(), "{bad}");
        }
    }
}
