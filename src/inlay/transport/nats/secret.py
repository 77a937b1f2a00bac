"""The root secret of a namespace.

In a file that every member has, or made by the first and kept in NATS. Members that run write it
back where the store has lost it. If another was made meanwhile the older one stays: those who have
the younger say so, and have to be started again.
"""

import secrets
import time

import msgspec
from nats.js.kv import KeyValue

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.messages.digest import Secret
from inlay.transport.nats.facts import TRIES, read, write

_KEY = "secret"
_WHAT = "the secret"


class SecretRecord(msgspec.Struct, frozen=True):
    """The namespace's record of its secret.

    Attributes:
        fingerprint: of the secret.
        root: of 32 bytes; empty where it is in files.
        since: Unix time at which it was recorded first; 0 in records of earlier versions.
    """

    fingerprint: str
    root: bytes = b""
    since: float = 0.0


_decoder = msgspec.msgpack.Decoder(SecretRecord)
_encode = msgspec.msgpack.encode


async def agree(
    storage: KeyValue, own: Secret | None, namespace: str
) -> tuple[Secret, SecretRecord]:
    """The secret of the namespace, and its record.

    Of those who come at the same time the first decides, by compare-and-set.

    Args:
        storage: the namespace's facts.
        own: the one from a file, or None where there is no file.
        namespace: its name.

    Raises:
        InvalidRequestError: the namespace has another secret, or one that is only in files.
        OverloadedError: NATS does not answer.
    """
    for _ in range(TRIES):
        found = await _read(storage)
        if found is None:
            new = own or Secret(secrets.token_bytes(32))
            kept = SecretRecord(new.fingerprint, b"" if own else new.root, time.time())
            if not await _write(storage, kept, None):
                continue
        else:
            kept = found[0]
        return _checked(kept, own, namespace), kept
    raise OverloadedError("NATS does not settle on a secret", retry_after=1)


async def uphold(storage: KeyValue, kept: SecretRecord) -> str | None:
    """Write a secret in use back where the namespace's record is lost, or of a younger one.

    Returns the fingerprint of another secret that is older and stays; None: it is this one.

    Raises `OverloadedError` when NATS does not answer.
    """
    for _ in range(TRIES):
        found = await _read(storage)
        if found is not None:
            other = found[0]
            if other.fingerprint == kept.fingerprint:
                return None
            if (other.since, other.fingerprint) < (kept.since, kept.fingerprint):
                return other.fingerprint
        if await _write(storage, kept, None if found is None else found[1]):
            return None
    raise OverloadedError("NATS does not settle on a secret", retry_after=1)


async def record(storage: KeyValue) -> SecretRecord | None:
    """The namespace's record of its secret, if it has one. Raises `OverloadedError`."""
    found = await _read(storage)
    return None if found is None else found[0]


async def recorded(storage: KeyValue) -> str | None:
    """The fingerprint of the namespace's secret, if it has one. Raises `OverloadedError`."""
    found = await record(storage)
    return None if found is None else found.fingerprint


async def _read(storage: KeyValue) -> tuple[SecretRecord, int | None] | None:
    """The record and its revision."""
    found = await read(storage, _KEY, _WHAT)
    return None if found is None else (_decoder.decode(found[0]), found[1])


async def _write(storage: KeyValue, kept: SecretRecord, revision: int | None) -> bool:
    return await write(storage, _KEY, _encode(kept), revision, _WHAT)


def _checked(kept: SecretRecord, own: Secret | None, namespace: str) -> Secret:
    if own is None:
        if not kept.root:
            raise InvalidRequestError(
                f"the secret of the namespace {namespace} is in a file: give it with --secret-file"
            )
        return Secret(kept.root)
    if own.fingerprint != kept.fingerprint:
        raise InvalidRequestError(
            f"the namespace {namespace} has the secret {kept.fingerprint}; the one that was given "
            f"is {own.fingerprint}"
        )
    return own
