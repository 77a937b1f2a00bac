"""The root secret of a namespace.

In a file that every member has, or made by the first and kept in NATS.
"""

import secrets

import msgspec
import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from inlay.digest import Secret
from inlay.errors import InvalidRequestError, OverloadedError

_KEY = "secret"
_TRIES = 3


class _Kept(msgspec.Struct, frozen=True):
    """The namespace's record of its secret; `root` is empty where it is in files."""

    fingerprint: str
    root: bytes = b""


_decoder = msgspec.msgpack.Decoder(_Kept)


async def agree(storage: KeyValue, own: Secret | None, namespace: str) -> Secret:
    """The secret of the namespace.

    Of those who come at the same time the first decides, by compare-and-set.

    Args:
        storage: the namespace's facts.
        own: the one from a file, or None where there is no file.
        namespace: its name.

    Raises:
        InvalidRequestError: the namespace has another secret, or one that is only in files.
        OverloadedError: NATS does not answer.
    """
    offered = _Kept(own.fingerprint) if own is not None else None
    for _ in range(_TRIES):
        try:
            kept = _decoder.decode((await storage.get(_KEY)).value or b"")
        except nats.js.errors.KeyNotFoundError:
            new = Secret(secrets.token_bytes(32))
            kept = offered or _Kept(new.fingerprint, new.root)
            try:
                await storage.create(_KEY, msgspec.msgpack.encode(kept))
            except nats.js.errors.KeyWrongLastSequenceError:
                continue
        except (nats.errors.Error, TimeoutError) as error:
            raise OverloadedError(
                f"NATS does not show the secret: {error}", retry_after=1
            ) from error
        return _checked(kept, own, namespace)
    raise OverloadedError("NATS does not settle on a secret", retry_after=1)


def _checked(kept: _Kept, own: Secret | None, namespace: str) -> Secret:
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
