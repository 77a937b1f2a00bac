"""Internet addresses that a server may connect to on behalf of a client.

Source: IANA's special-purpose address registries. Not `ipaddress.is_global`, which differs between
versions of Python and calls multicast global.
"""

from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias

from inlay.base.errors import InvalidRequestError

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_SPECIAL_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    )
)  # fmt: skip
_GLOBAL_6 = IPv6Network("2000::/3")
_SPECIAL_6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "3fff::/20"))
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")


def address_of(text: str) -> Address | None:
    """The address that is meant: an IPv4 address inside an IPv6 one is taken out.

    None where `text` is no address.
    """
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    if address in _MAPPED or address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address(int(address) >> 80 & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """True for an address of the public internet that stands for one host."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_4)
    return address in _GLOBAL_6 and not any(address in network for network in _SPECIAL_6)


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Networks by their notation, as 10.0.0.0/8.

    Raises:
        InvalidRequestError: one is not a network.
    """
    try:
        return tuple(ip_network(text) for text in texts)
    except ValueError as error:
        raise InvalidRequestError(f"not a network, like 10.0.0.0/8: {error}") from error
