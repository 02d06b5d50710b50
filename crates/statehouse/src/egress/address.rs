//! Which addresses an outbound request may be sent to.
//!
//! A caller who chooses the target of a request must not reach services that only the server can reach: the machine itself, its
//! network, the cloud's metadata service. The transport therefore resolves the name first, checks every address here, and
//! connects to a checked address instead of the name.
//!
//! - A1. No request is sent to an address without a meaning in the public network, in whatever form it is written: an IPv6
//!   address that stands for an IPv4 address is classified as that one.
//! - A2. `allow_private` permits the server's own network: loopback, private, shared and unique local addresses. Metadata
//!   services, link-local, multicast and unspecified addresses stay forbidden.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What kind of place an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressClass {
    /// The public network.
    Public,
    /// One's own network, or the machine itself.
    Private,
    /// Where nothing is ever to be sent.
    Closed,
}

/// Services of clouds that give credentials to every caller from within.
const METADATA_V4: [Ipv4Addr; 4] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];
const METADATA_V6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x0254),
    Ipv6Addr::new(0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254),
];

/// IPv4 ranges that are not public, as address, length of the prefix, and what they are.
const RANGES_V4: [(Ipv4Addr, u32, AddressClass); 15] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8, AddressClass::Closed),
    (Ipv4Addr::new(10, 0, 0, 0), 8, AddressClass::Private),
    (Ipv4Addr::new(100, 64, 0, 0), 10, AddressClass::Private),
    (Ipv4Addr::new(127, 0, 0, 0), 8, AddressClass::Private),
    (Ipv4Addr::new(169, 254, 0, 0), 16, AddressClass::Closed),
    (Ipv4Addr::new(172, 16, 0, 0), 12, AddressClass::Private),
    (Ipv4Addr::new(192, 0, 0, 0), 24, AddressClass::Closed),
    (Ipv4Addr::new(192, 0, 2, 0), 24, AddressClass::Closed),
    (Ipv4Addr::new(192, 88, 99, 0), 24, AddressClass::Closed),
    (Ipv4Addr::new(192, 168, 0, 0), 16, AddressClass::Private),
    (Ipv4Addr::new(198, 18, 0, 0), 15, AddressClass::Private),
    (Ipv4Addr::new(198, 51, 100, 0), 24, AddressClass::Closed),
    (Ipv4Addr::new(203, 0, 113, 0), 24, AddressClass::Closed),
    (Ipv4Addr::new(224, 0, 0, 0), 4, AddressClass::Closed),
    (Ipv4Addr::new(240, 0, 0, 0), 4, AddressClass::Closed),
];

/// IPv6 ranges that are not public. What lies outside `2000::/3` is not public either.
const RANGES_V6: [(Ipv6Addr, u32, AddressClass); 5] = [
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, AddressClass::Private),
    (Ipv6Addr::LOCALHOST, 128, AddressClass::Private),
    // Special purposes of the IETF, Teredo among them, and documentation.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23, AddressClass::Closed),
    (Ipv6Addr::new(0x2001, 0x0db8, 0, 0, 0, 0, 0, 0), 32, AddressClass::Closed),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20, AddressClass::Closed),
];

/// What kind of place an address is (A1).
pub fn place_of(address: IpAddr) -> AddressClass {
    match address {
        IpAddr::V4(address) => place_of_v4(address),
        IpAddr::V6(address) => place_of_v6(address),
    }
}

/// Whether something may be sent to an address.
pub fn is_allowed(address: IpAddr, allow_private: bool) -> bool {
    match place_of(address) {
        AddressClass::Public => true,
        AddressClass::Private => allow_private,
        AddressClass::Closed => false,
    }
}

fn place_of_v4(address: Ipv4Addr) -> AddressClass {
    if METADATA_V4.contains(&address) {
        return AddressClass::Closed;
    }
    let bits = u32::from(address);
    let within = |range: &&(Ipv4Addr, u32, AddressClass)| (bits ^ u32::from(range.0)) >> (32 - range.1) == 0;
    RANGES_V4.iter().find(within).map_or(AddressClass::Public, |range| range.2)
}

fn place_of_v6(address: Ipv6Addr) -> AddressClass {
    if METADATA_V6.contains(&address) {
        return AddressClass::Closed;
    }
    if let Some(inner) = inner_v4(address) {
        return place_of_v4(inner);
    }
    let bits = u128::from(address);
    let within = |range: &&(Ipv6Addr, u32, AddressClass)| {
        (bits ^ u128::from(range.0)).checked_shr(128 - range.1) == Some(0)
    };
    match RANGES_V6.iter().find(within) {
        Some(range) => range.2,
        None if bits >> 125 == 1 => AddressClass::Public,
        None => AddressClass::Closed,
    }
}

/// The IPv4 address that an IPv6 one stands for: mapped, compatible, translated (NAT64) or tunnelled (6to4).
fn inner_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match [a, b, c, d, e, f] {
        [0, 0, 0, 0, 0, 0xffff] | [0, 0, 0, 0, 0xffff, 0] | [0x0064, 0xff9b, 0, 0, 0, 0] => Some(v4(g, h)),
        // `::` and `::1` are themselves.
        [0, 0, 0, 0, 0, 0] if g != 0 || h > 1 => Some(v4(g, h)),
        [0x2002, high, low, ..] => Some(v4(high, low)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(expected: AddressClass, addresses: &[&str]) {
        for text in addresses {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(place_of(address), expected, "{text}");
        }
    }

    #[test]
    fn every_range_at_its_edges() {
        check(
            AddressClass::Private,
            &[
                "10.0.0.0",
                "10.255.255.255",
                "100.64.0.0",
                "100.127.255.255",
                "127.0.0.1",
                "127.255.255.254",
                "172.16.0.0",
                "172.31.255.255",
                "192.168.0.1",
                "192.168.255.255",
                "198.18.0.0",
                "198.19.255.255",
                "::1",
                "fc00::1",
                "fdff:ffff::1",
            ],
        );
        check(
            AddressClass::Closed,
            &[
                "0.0.0.0",
                "0.1.2.3",
                "169.254.0.1",
                "169.254.169.254",
                "100.100.100.200",
                "168.63.129.16",
                "192.0.0.1",
                "192.0.0.192",
                "192.0.2.1",
                "192.88.99.1",
                "198.51.100.7",
                "203.0.113.7",
                "224.0.0.1",
                "239.255.255.255",
                "240.0.0.1",
                "255.255.255.255",
                "::",
                "fe80::1",
                "febf::1",
                "fec0::1",
                "ff02::1",
                "fd00:ec2::254",
                "fd20:ce::254",
                "2001:db8::1",
                "2001::1",
                "3fff::1",
                "100::1",
                "64:ff9b:1::1",
                "4000::1",
            ],
        );
        check(
            AddressClass::Public,
            &[
                "1.1.1.1",
                "8.8.8.8",
                "9.255.255.255",
                "11.0.0.0",
                "100.63.255.255",
                "100.128.0.0",
                "126.255.255.255",
                "128.0.0.1",
                "169.253.255.255",
                "169.255.0.0",
                "172.15.255.255",
                "172.32.0.0",
                "192.0.1.0",
                "192.167.255.255",
                "192.169.0.0",
                "198.17.255.255",
                "198.20.0.0",
                "223.255.255.255",
                "2606:4700::1111",
                "2a00:1450:4001::200e",
                "2003::1",
            ],
        );
    }

    #[test]
    fn an_ipv4_address_is_itself_in_every_form() {
        check(
            AddressClass::Private,
            &[
                "::ffff:127.0.0.1",
                "::ffff:10.0.0.1",
                "::ffff:0:192.168.0.1",
                "::127.0.0.1",
                "64:ff9b::10.0.0.1",
                "2002:c0a8:0001::1",
                "2002:7f00:0001::",
            ],
        );
        check(
            AddressClass::Closed,
            &["::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "2002:a9fe:a9fe::1", "::ffff:0.0.0.0"],
        );
        check(AddressClass::Public, &["::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:0808:0808::1"]);
    }

    #[test]
    fn an_own_network_can_be_opened_and_the_rest_stays_closed() {
        for (text, open, allowed) in [
            ("8.8.8.8", true, true),
            ("127.0.0.1", true, false),
            ("10.1.2.3", true, false),
            ("fd12::1", true, false),
            ("169.254.169.254", false, false),
            ("fd00:ec2::254", false, false),
            ("fe80::1", false, false),
            ("224.0.0.1", false, false),
            ("0.0.0.0", false, false),
            ("::", false, false),
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!((is_allowed(address, true), is_allowed(address, false)), (open, allowed), "{text}");
        }
    }
}
