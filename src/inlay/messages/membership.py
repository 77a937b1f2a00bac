"""The place of a worker in a model that several workers make together.

An extension has the type (`inlay.extension.Extension.types`), and knows what else there is to it.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec


class Membership(Protocol):
    """A worker's place among the parts of a whole, as the core sees it.

    Attributes:
        name: of what the worker makes, among the parts of the whole.
        whole: name of all parts together, as clients call it.
        identity: equal at workers whose wholes are the same.
        outputs: kinds of what the whole gives.
        is_chain: several language models answer in a row: it takes chats alone.
        shares_adapters: its adapters are of the whole, and clients name them.
    """

    @property
    def name(self) -> str: ...
    @property
    def whole(self) -> str: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def outputs(self) -> Collection[str]: ...
    @property
    def is_chain(self) -> bool: ...
    @property
    def shares_adapters(self) -> bool: ...

    def missing(self, served: Collection[str]) -> Mapping[str, str]:
        """Return the parts that are not among the served names: what each would be served as."""


class UnreadMembership(msgspec.Struct):
    """One of an extension that is not loaded: a card with it is not understood."""

    def __post_init__(self) -> None:
        raise ValueError("it is of an extension that is not loaded here (--extensions)")
