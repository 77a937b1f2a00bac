"""`Address`: where an engine process is connected to."""

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


__all__ = ["Address"]
