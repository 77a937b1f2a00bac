"""`Address`: where an engine process is connected to; `KvRoom`: where two engines meet."""

import msgspec


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address at which frontends and other workers connect to an engine process.

    Attributes:
        host: name or IP address.
        port: of TCP.
        fingerprint: SHA-256 of the certificate that it shows, 32 bytes.
    """

    host: str
    port: int
    fingerprint: bytes


class KvRoom(msgspec.Struct, frozen=True, array_like=True):
    """The place where a decode worker takes a prompt's keys and values from a prefill worker.

    Attributes:
        host: `ModelCard.bootstrap` of the prefill worker.
        port: of it.
        number: of the room there, from 1 to 2**63 - 1; drawn at random, used once.
    """

    host: str
    port: int
    number: int
