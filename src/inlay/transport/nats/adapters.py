"""The adapters that each model of a namespace is to have.

One value for each model, so that it is read and changed at once. A model whose adapters were all
unloaded has an empty value; none at all means that nothing was ever loaded, or that the store was
emptied: then whoever knows what was there writes it back.
"""

import hashlib
from collections.abc import Callable, Iterable

import msgspec

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.messages.commands import LoadAdapter
from inlay.transport.nats.facts import TRIES, read, write
from inlay.transport.nats.member import Member

_WHAT = "the adapters of the namespace"


class RecordedAdapter(msgspec.Struct, frozen=True):
    """An adapter by the name that clients use, and its source.

    Attributes:
        name: what clients call it.
        path: a directory of each worker's machine, or an address.
        sha256: of its weights' file, or None.
    """

    name: str
    path: str
    sha256: str | None = None

    @property
    def order(self) -> LoadAdapter:
        """The command that has a worker load it, whatever has its name there."""
        return LoadAdapter(self.name, self.path, self.sha256, in_place=True, recorded=True)


Recorded = tuple[RecordedAdapter, ...]

_decoder = msgspec.msgpack.Decoder(Recorded)
encode = msgspec.msgpack.encode


def decode(value: bytes) -> Recorded:
    """The adapters recorded for one model. Raises `InvalidRequestError` if it is not understood."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{_WHAT} are not understood: {error}") from error


def key_of(model: str) -> str:
    """The key of a model, whatever characters its name has."""
    return f"adapters.{hashlib.sha256(model.encode()).hexdigest()}"


class AdapterRecord:
    """The record of a namespace, as one member reads and changes it.

    All methods raise `OverloadedError` when NATS does not answer, and `InvalidRequestError` if what
    it has is not understood.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._known: dict[str, Recorded] = {}

    async def read(self, model: str) -> Recorded:
        """The adapters of a model; written back where the store has lost what is known here."""
        return await self._change(model, lambda found: found)

    async def add(self, model: str, adapter: RecordedAdapter) -> None:
        """Record an adapter, in the place of any of its name."""
        await self._change(model, lambda found: (*_without(found, adapter.name), adapter))

    async def drop(self, models: Iterable[str], name: str) -> bool:
        """Forget the adapter of that name at some models; True if one had it."""
        had = False
        for model in models:
            if any(adapter.name == name for adapter in await self.read(model)):
                await self._change(model, lambda found: _without(found, name))
                had = True
        return had

    async def uphold(self) -> None:
        """Write back what an emptied store has lost."""
        for model in tuple(self._known):
            await self.read(model)

    async def _change(self, model: str, change: Callable[[Recorded], Recorded]) -> Recorded:
        storage, key = await self._member.facts(), key_of(model)
        for _ in range(TRIES):
            found = await read(storage, key, _WHAT)
            stored = None if found is None else decode(found[0])
            before = self._known.get(model, ()) if stored is None else stored
            after = change(before)
            kept = after == before and (stored is not None or not before)
            if kept or await write(
                storage, key, encode(after), None if found is None else found[1], _WHAT
            ):
                self._known[model] = after
                return after
        raise OverloadedError(f"NATS does not settle on {_WHAT}", retry_after=1)


def _without(found: Recorded, name: str) -> Recorded:
    return tuple(adapter for adapter in found if adapter.name != name)
