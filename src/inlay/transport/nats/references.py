"""The references that the workers of a namespace are held to.

The first one of a key stands until it is replaced. Each has a checksum under the namespace's
secret: one that nobody of the namespace wrote counts as none.
"""

import asyncio
import hmac
import logging

from blake3 import blake3

from inlay.base.errors import InlayError, OverloadedError
from inlay.messages.digest import Secret
from inlay.transport.nats.facts import TRIES, read, write
from inlay.transport.nats.member import Member

log = logging.getLogger(__name__)

_WHAT = "the references of the namespace"
_CHECKSUM = 32
_RETRY_SECONDS = 1.0
_SPARE_BYTES = 4096
"""Of a message, for its headers."""


class ReferenceRecord:
    """The references of a namespace, as one worker reads and writes them.

    Args:
        member: joined as a worker.
        secret: of the namespace.
    """

    def __init__(self, member: Member, secret: Secret) -> None:
        self._member = member
        self._secret = secret
        self._known: dict[str, bytes] = {}

    async def settle(self, key: str, own: bytes | None, replace: bool) -> bytes | None:
        """Return what is kept under `key`; where there is nothing, `own`, from then on.

        Waits for as long as NATS is away.

        Args:
            key: of the reference.
            own: made by this worker, if one was.
            replace: `own` is kept in any case.
        """
        said = ""
        while True:
            try:
                return await self._settle(key, own, replace)
            except OverloadedError as error:
                if error.message != said:
                    log.warning("the self-check waits: %s", error.message)
                    said = error.message
                await asyncio.sleep(_RETRY_SECONDS)
            except InlayError as error:
                log.error("the fleet keeps no reference: %s", error.message)
                return own

    async def uphold(self) -> None:
        """Write back what an emptied store has lost. Raises `OverloadedError`."""
        for key, data in tuple(self._known.items()):
            await self._settle(key, data, replace=False)

    async def _settle(self, key: str, own: bytes | None, replace: bool) -> bytes | None:
        storage, name = await self._member.facts(), f"references.{key}"
        for _ in range(TRIES):
            found = await read(storage, name, _WHAT)
            kept = None if found is None else self._checked(key, found[0])
            if kept is None and found is not None:
                log.warning("a reference of the namespace has not its checksum, and is not used")
            if own is not None and (replace or kept is None):
                value = self._checksum(key, own) + own
                if len(value) > (limit := self._member.control.max_payload - _SPARE_BYTES):
                    log.warning(
                        "NATS keeps no reference of %d bytes (its max_payload allows %d): other "
                        "workers make their own", len(value), limit,
                    )  # fmt: skip
                    return own
                kept = own
                if not await write(storage, name, value, found and found[1], _WHAT):
                    continue
            if kept is not None:
                self._known[key] = kept
            return kept
        raise OverloadedError(f"NATS does not settle on {_WHAT}", retry_after=1)

    def _checked(self, key: str, value: bytes) -> bytes | None:
        data = value[_CHECKSUM:]
        return data if hmac.compare_digest(value[:_CHECKSUM], self._checksum(key, data)) else None

    def _checksum(self, key: str, data: bytes) -> bytes:
        return blake3(key.encode() + data, key=self._secret.references).digest(_CHECKSUM)
