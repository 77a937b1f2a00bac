"""Proof, at the beginning of a connection, that both ends know the namespace's secret.

The listener sends a random nonce; the dialer answers with one of its own and a keyed BLAKE3 of both
and of the listener's TLS certificate; the listener answers likewise. A proof cannot be replayed, as
each has the other side's fresh nonce in it, and cannot be relayed, as a man in the middle has
another certificate. Nothing else is read from a peer before its proof.
"""

import hmac
import secrets
import struct

from blake3 import blake3

from inlay.messages.digest import Secret

MAGIC = b"inlay\x00"
VERSION = 2
NONCE_BYTES = 32
PROOF_BYTES = 32

_hello = struct.Struct(f"<{len(MAGIC)}sH{NONCE_BYTES}s")


class HandshakeError(Exception):
    """The other end is no peer of this namespace; the message says what was wrong."""


class Handshake:
    """One side of the proof, as bytes in and bytes out.

    Args:
        secret: the namespace's.
        fingerprint: SHA-256 of the listener's TLS certificate; empty where there is no TLS.
        dials: this side opened the connection.

    Attributes:
        need: bytes that `take` wants next; 0 once the other side has proved itself.
    """

    def __init__(self, secret: Secret, fingerprint: bytes, *, dials: bool) -> None:
        self._key = secret.transport
        self._fingerprint = fingerprint
        self._dials = dials
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self.need = _hello.size

    def begin(self) -> bytes:
        """Return what this side sends first."""
        return _hello.pack(MAGIC, VERSION, self._ours)

    def take(self, data: bytes) -> bytes:
        """Take the `need` bytes that came; return what this side sends next, if anything.

        Raises:
            HandshakeError: another protocol, another version, or no proof.
        """
        if not self._theirs:
            magic, version, self._theirs = _hello.unpack(data)
            if magic != MAGIC:
                raise HandshakeError("the other end does not speak this protocol")
            if version != VERSION:
                raise HandshakeError(f"version {version} of the protocol; {VERSION} is spoken")
            if self._theirs == self._ours:
                raise HandshakeError("the other end repeats what it is sent")
            self.need = PROOF_BYTES
            # The dialer proves itself first: a listener shows a stranger nothing made with the
            # secret.
            return self._proof(dials=True) if self._dials else b""
        if not hmac.compare_digest(data, self._proof(dials=not self._dials)):
            raise HandshakeError("the other end does not know the namespace's secret")
        self.need = 0
        return b"" if self._dials else self._proof(dials=False)

    def _proof(self, *, dials: bool) -> bytes:
        nonces = (self._ours, self._theirs) if self._dials else (self._theirs, self._ours)
        role = b"dialer" if dials else b"listener"
        return blake3(role + b"".join(nonces) + self._fingerprint, key=self._key).digest(
            PROOF_BYTES
        )
