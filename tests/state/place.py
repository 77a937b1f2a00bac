"""A place of kept responses with one of a background in it, without a model."""

from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import msgspec

from inlay.http import FrontendSettings
from inlay.http.asgi import Message
from inlay.http.callers.auth import ANYONE
from inlay.http.frontend_part import FrontendAccess
from inlay.http.inner_call import inner_call
from inlay.http.server import Call, Server
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.store.kept.contents import Contents
from inlay.store.kept.memory import MemoryStorage
from inlay.store.settings import BatchSettings, ResponseSettings
from inlay.transport.local import LocalPlane
from inlay_state import conversations
from inlay_state.jobs import Jobs
from inlay_state.kept import Kept
from inlay_state.records import (
    ConversationRecord,
    HeldResponse,
    ResponseRecord,
    Status,
    decode_response,
)
from inlay_state.service import State

OWNER = "ab" * 16
ID = "resp_a"
CONVERSATION = "conv_a"
QUEUED: dict[str, Any] = {
    "id": ID, "object": "response", "created_at": 5, "status": "queued", "model": "tiny",
    "output": [],
}  # fmt: skip


async def _nothing(_: Message) -> None:
    """Answer nobody."""


class Interrupted(MemoryStorage):
    """Storage in which others do something just before a content is read or written.

    Attributes:
        on_read: done once, before the next reading.
        on_write: done once, before the next writing of a response's output.
    """

    on_read: Callable[[], Awaitable[object]] | None = None
    on_write: Callable[[], Awaitable[object]] | None = None

    async def read(self, name: str, size: int, file: BinaryIO) -> bool:
        act, self.on_read = self.on_read, None
        if act is not None:
            await act()
        return await super().read(name, size, file)

    async def write(self, name: str, file: BinaryIO) -> int:
        if "-output-" in name:
            act, self.on_write = self.on_write, None
            if act is not None:
                await act()
        return await super().write(name, file)


class Place:
    """A storage, what keeps responses in it, and a frontend's part without a model."""

    def __init__(self, owner_bytes: int = 1 << 24) -> None:
        self.now = 1000.0
        self.storage = Interrupted(1 << 24)
        self.kept = Kept(
            self.storage,
            Contents(self.storage),
            max_bytes=1 << 30,
            owner_bytes=owner_bytes,
            ttl=100_000,
            clock=lambda: self.now,
        )
        self.server = server = Server(
            Router(LocalPlane([])), FrontendSettings(port=0), Secret(bytes(32))
        )
        settings = ResponseSettings(response_store="memory")
        self.state = State(FrontendAccess(server, (), BatchSettings(), settings))
        self.state.kept = self.kept
        self.state.jobs = self.jobs = Jobs(server, self.kept, lambda _: None)

    def call(self) -> Call:
        """Return a call of anyone."""
        return inner_call(
            self.server,
            "/v1/responses",
            b"",
            _nothing,
            request_id="r",
            caller=ANYONE,
            client=self.server.clients.of(ANYONE, ""),
            budget=self.server.budget,
        )

    async def cancel(self) -> dict[str, Any]:
        """Cancel it at a frontend that does not make it; return what its client sees."""
        found: dict[str, Any] = msgspec.json.decode(await self.state.cancel(self.call(), OWNER, ID))
        return found

    async def converse(self, items: bytes = b"[]") -> None:
        """Keep a conversation that the response has locked."""
        record = ConversationRecord(
            id=CONVERSATION,
            created_at=5,
            expires_at=100_000,
            items=await self.kept.write(OWNER, "items", items),
        )
        await self.kept.add(OWNER, record)
        await conversations.lock(self.kept, OWNER, CONVERSATION, ID)

    async def enqueue(
        self,
        status: Status = "queued",
        conversation: str | None = None,
        given: bytes = b"[]",
    ) -> None:
        """Keep a background response, whose input is `given`."""
        output = msgspec.json.encode({**QUEUED, "status": status})
        record = ResponseRecord(
            id=ID,
            created_at=5,
            expires_at=100_000,
            status=status,
            background=True,
            conversation=conversation,
            request=await self.kept.write(OWNER, "request", b"{}"),
            input=await self.kept.write(OWNER, "input", given),
            output=await self.kept.write(OWNER, "output", output),
        )
        await self.kept.add(OWNER, record)
        await self.kept.add_job(OWNER, ID)

    async def take(self) -> HeldResponse:
        """Take the response, as a frontend does that makes it."""
        revision, record = await self.kept.find(OWNER, ID, ResponseRecord)
        assert record is not None
        held = await HeldResponse.take(
            self.storage, f"{OWNER}.{ID}", revision, record, "one", decode_response
        )
        assert held is not None
        return held

    async def record(self) -> ResponseRecord:
        return await self.kept.get(OWNER, ID, ResponseRecord)

    async def conversation(self) -> ConversationRecord:
        return await self.kept.get(OWNER, CONVERSATION, ConversationRecord)

    async def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(await self.state.shown(self.call(), OWNER, ID))
        return found

    async def events(self) -> list[dict[str, Any]]:
        body = await self.kept.read((await self.record()).events)
        return [msgspec.json.decode(line) for line in body.splitlines()]
